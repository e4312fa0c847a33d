// Latent attention, forward: the sums of each run, the state before each run, and the rows of each run.
//
// A thread keeps its part of the state S in registers from step to step. The block scans the latents' own sums a chunk
// of steps at a time, while the next chunk is on its way. Columns never mix, so their distribution over blocks changes
// no bit. Sums over latents add the latents of a thread in order, and then lanes in pairs. States are combined from run
// to run in double precision.

#include "shared.cuh"
#include "copies.cuh"
#include "formats.cuh"
#include "steps.cuh"
#include "latent.cuh"

namespace {

constexpr int NEVER = 0x7fffffff, BEFORE = -NEVER;  // after and before all positions that a row may see last
constexpr int AHEAD = 4;           // runs whose sums are loaded together
constexpr double FAR = 40;         // the logarithm of a sum that is far from 1

// Steps of a chunk.
template <typename Real>
constexpr int STEPS = 64 / sizeof(Real);

}  // namespace

// The first position of each sequence that a latent sees, counted from the beginning of the sequence, to `first`
// (b, n, L). It is BEFORE if the state has seen a position, and NEVER if the latent sees none. The grid is (n · b,
// latents / 32).
template <typename Key>
__global__ void __launch_bounds__(256, 4)
    find_first(const Key *K, long long k_item, long long k_row, const unsigned char *mask, long long mask_item,
               long long mask_row, const long long *bounds, int n, const double *maxima, int L, int *first) {
    constexpr int DEEP = 4;  // positions of a warp at a time
    __shared__ int found[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, l = blockIdx.y * 32 + lane;
    const long long sequence = blockIdx.x % n, item = blockIdx.x / n;
    const long long low = bounds[sequence], count = bounds[sequence + 1] - low;
    const long long place = (item * n + sequence) * L + l;
    if (warp == 0)
        found[lane] = l >= L || (maxima && maxima[place] != nothing<double>()) ? BEFORE : NEVER;
    __syncthreads();
    for (long long base = 0; base < count; base += 8 * DEEP) {
        if (__syncthreads_and(found[lane] != NEVER)) break;
        int here = NEVER;
#pragma unroll
        for (int i = 0; i < DEEP; ++i) {
            const long long at = base + warp * DEEP + i;
            if (l >= L || at >= count || (mask && !mask[item * mask_item + (low + at) * mask_row])) continue;
            if (widen(K[item * k_item + (low + at) * k_row + l]) != nothing<float>()) here = min(here, (int)at);
        }
        if (here != NEVER) atomicMin(found + lane, here);
        __syncthreads();
    }
    if (warp == 0 && l < L) first[place] = found[lane];
}

// The softmax over the latents that a row sees, and over the gate if there is one: its largest logit, the inverse of
// the sum of exponentials relative to that logit, and the weight of the gate, (b, T) each. The grid is (runs · b,
// stretches of 64 rows).
template <typename Key, typename Real>
__global__ void __launch_bounds__(256, 4)
    weigh_rows(const Key *Q, long long q_item, long long q_row, const Real *gate, long long gate_item,
               long long gate_row, const int *first, const long long *runs, int count, int n, int L, long long T,
               Real *largest, Real *inverse, Real *gates) {
    const Run run(runs, blockIdx.x % count);
    const long long item = blockIdx.x / count;
    const int lane = threadIdx.x % 32, stop = min(run.rows, ((int)blockIdx.y + 1) * 64);
    const int *const begins = first + (item * n + run.sequence) * L;
    for (int k = blockIdx.y * 64 + threadIdx.x / 32; k < stop; k += 8) {
        const Key *const logits = Q + item * q_item + (run.row + k) * q_row;
        const Real gate_logit = gate ? gate[item * gate_item + (run.row + k) * gate_row] : nothing<Real>();
        const long long seen = run.seen + k;
        Real most = gate_logit;
        for (int l = lane; l < L; l += 32)
            if (begins[l] <= seen && begins[l] != NEVER && !(widen(logits[l]) <= most)) most = widen(logits[l]);
        for (int far = 16; far; far /= 2) most = max(most, __shfl_xor_sync(ALL, most, far));
        if (most == nothing<Real>()) most = 0;
        Real total = 0;
        for (int l = lane; l < L; l += 32)
            if (begins[l] <= seen && begins[l] != NEVER) total += exponential(widen(logits[l]) - most);
        for (int far = 16; far; far /= 2) total += __shfl_xor_sync(ALL, total, far);
        const Real own = exponential(gate_logit - most);
        if (gate) total += own;
        if (lane) continue;
        const long long at = item * T + run.row + k;
        const Real scale = total == 0 ? 0 : 1 / total;
        largest[at] = most, inverse[at] = scale;
        if (gate) gates[at] = own * scale;
    }
}

// The sums of each run by itself: the largest logit, and the sums relative to it, to (b, runs, L[, D]). Runs that no
// run follows are left out. The grid is (runs · b, columns, latents).
template <typename Real, int LATENTS>
__global__ void __launch_bounds__((Tile<Real, LATENTS>::THREADS), 1)
    sum_runs(POSITION_PARAMETERS, const long long *runs, int count, int L, int D, Real *maxima, Real *sums,
             Real *states) {
    DYNAMIC_SHARED(shared);
    const Run run(runs, blockIdx.x % count);
    if (!run.followed) return;
    const long long item = blockIdx.x / count, place = item * count + blockIdx.x % count;
    Walk<Real, LATENTS, STEPS<Real>> walk(shared, run, item, L, D, LATENTS);
    Real *const tops = walk.own;
    for (int l = threadIdx.x; l < LATENTS; l += blockDim.x) tops[l] = nothing<Real>();
    walk.begin(nullptr, nullptr, nullptr, 0, L, D);
    walk.go(
        POSITIONS, [](int, int, int) {},
        [&](int, int) {
            return [&](int, int l, Real, Real, Real x) {
                if (!(x <= tops[l])) tops[l] = x;
            };
        },
        [](int, int) { return [](int) {}; }, [](int, int) {});
    for (int l = threadIdx.x; l < walk.latents; l += blockDim.x) {
        const Real lowered = tops[l] == nothing<Real>() ? 0 : exponential(walk.references[l] - tops[l]);
        walk.references[l] = lowered;
        if (blockIdx.y) continue;
        maxima[place * L + walk.latent + l] = tops[l];
        sums[place * L + walk.latent + l] = walk.totals[l] * lowered;
    }
    __syncthreads();
    walk.part.end(walk.references, states + (place * L + walk.latent) * D + walk.column, walk.latents, walk.columns, D);
}

// Combine the sums of the runs of each sequence with the state before them, (b, n, L) or nothing. The references and
// sums before each run replace those of the run itself, and the totals are written too. `scan_runs` then combines
// the sums S: it multiplies the state before by `entered` (b, n, L), and uses the factors `kept` and `gained`
// (b, runs, L). The grid is (b · n · L / 256).
template <typename Real, typename Whole>
__global__ void __launch_bounds__(256)
    combine_sums(const long long *runs, const long long *spans, int count, long long b, int n, int L,
                 const double *before, const double *sums_before, Real *maxima, Real *sums, double *entered,
                 double *kept, double *gained, Whole *all_maxima, Whole *all_sums) {
    const long long place = (long long)blockIdx.x * 256 + threadIdx.x;
    if (place >= b * n * L) return;
    const long long l = place % L, sequence = place / L % n, item = place / L / n;
    double reference = nothing<double>(), total = 0;
    if (before) {
        // logits have this type, and the factor below corrects its rounding; a sum of any size is brought near 1
        const double own = sums_before[place], size = log(own), far = fabs(size) > FAR && fabs(size) < 800 ? size : 0;
        reference = (Real)(before[place] + far);
        const double factor = reference == nothing<double>() ? 0 : exp(before[place] - reference);
        entered[place] = factor;
        total = factor == 0 ? 0 : own * factor;
    }
    const long long low = spans[sequence], high = spans[sequence + 1];
    for (long long next = low; next < high; next += AHEAD) {
        const int together = (int)min((long long)AHEAD, high - next);
        double own[AHEAD], own_sums[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const long long at = (item * count + next + i) * L + l;
            const bool followed = i < together && runs[(next + i) * FIELDS + FOLLOWED];
            own[i] = followed ? maxima[at] : nothing<double>(), own_sums[i] = followed ? sums[at] : 0;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (i >= together) break;
            const long long at = (item * count + next + i) * L + l;
            maxima[at] = (Real)reference, sums[at] = (Real)total;
            const double most = own[i] > reference ? own[i] : reference;
            const double keep = reference == nothing<double>() ? 0 : exp(reference - most);
            const double gain = own[i] == nothing<double>() ? 0 : exp(own[i] - most);
            kept[at] = keep, gained[at] = gain;
            total = total * keep + own_sums[i] * gain;
            reference = most;
        }
    }
    if (all_maxima) all_maxima[place] = (Whole)reference, all_sums[place] = (Whole)total;
}

// X ← kept X + gained x over the runs of each sequence, forwards or backwards, with the sums of each run, x (b, runs, L, D).
// X before a run, times `given`, replaces its x. X begins as `before` times `entered`, and ends in `all`, (b, n, L, D).
// Absent factors are 1, and absent sums 0. Runs with 0 in the field number `field` have no sums. The grid is
// (b · n · L · D / 256).
template <typename Real, typename Whole>
__global__ void __launch_bounds__(256)
    scan_runs(const long long *runs, const long long *spans, int count, long long b, int n, int L, int D, int field,
              bool backwards, const double *before, const double *entered, const double *kept, const double *gained,
              const double *given, Real *x, Whole *all) {
    const long long place = (long long)blockIdx.x * 256 + threadIdx.x;
    if (place >= b * n * L * D) return;
    const long long l = place / D % L, sequence = place / D / L % n, item = place / D / L / n;
    const long long low = spans[sequence], high = spans[sequence + 1];
    double total = 0;
    if (before && entered[place / D] != 0) total = before[place] * entered[place / D];
    for (long long next = 0; next < high - low; next += AHEAD) {
        const int together = (int)min((long long)AHEAD, high - low - next);
        double own[AHEAD], keep[AHEAD], gain[AHEAD], give[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const long long r = backwards ? high - 1 - next - i : low + next + i, at = (item * count + r) * L + l;
            own[i] = i < together && runs[r * FIELDS + field] ? x[at * D + place % D] : 0;
            keep[i] = i < together && kept ? kept[at] : 1;
            gain[i] = i < together && gained ? gained[at] : 1;
            give[i] = i < together && given ? given[at] : 1;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (i >= together) break;
            const long long r = backwards ? high - 1 - next - i : low + next + i, at = (item * count + r) * L + l;
            x[at * D + place % D] = (Real)(give[i] * total);
            total = keep[i] * total + gain[i] * own[i];
        }
    }
    if (all) all[place] = (Whole)total;
}

// The rows of each run, to Y (b, slices of latents, T, D). The grid is (runs · b, columns, latents).
template <typename Real, int LATENTS>
__global__ void __launch_bounds__((Tile<Real, LATENTS>::THREADS), 1)
    write_rows(POSITION_PARAMETERS, const Real *Q, long long q_item, long long q_row, const Real *gate_value,
               long long gate_value_item, long long gate_value_row, const Real *largest, const Real *inverse,
               const Real *gates, START_PARAMETERS, const long long *runs, int count, int L, int D, long long T,
               Real *Y) {
    constexpr int STEPS = ::STEPS<Real>;
    using Part = Tile<Real, LATENTS>;
    DYNAMIC_SHARED(shared);
    const Run run(runs, count - 1 - blockIdx.x % count);  // the last ones are the longest
    if (!run.rows) return;
    const long long item = blockIdx.x / count;
    const bool gated = gate_value && blockIdx.z == 0;
    const int pitch = blockDim.x / 32 * Part::WIDE, weight_numbers = 2 * STEPS * LATENTS;
    const int value_numbers = gate_value ? 2 * STEPS * pitch : 0;
    Walk<Real, LATENTS, STEPS> walk(shared, run, item, L, D, weight_numbers + value_numbers + 6 * STEPS);
    const int column = walk.column, columns = walk.columns;
    Real *const weights = walk.own, *const gate_values = weights + weight_numbers;
    Real *const scales = gate_values + value_numbers;
    fill_zeros(walk.own, walk.references);
    walk.begin(references, sums, states, item * slots + run.slot, L, D);
    walk.go(
        POSITIONS,
        [&](int next, int other, int arriving) {
            const long long at = run.row + next;
            bring(weights + other * STEPS * LATENTS, LATENTS, Q + item * q_item + at * q_row + walk.latent, q_row,
                  arriving, walk.latents);
            if (gated)
                bring(gate_values + other * STEPS * pitch, pitch,
                      gate_value + item * gate_value_item + at * gate_value_row + column, gate_value_row, arriving, columns);
            Real *const scale = scales + 3 * other * STEPS;
            bring(scale, STEPS, largest + item * T + at, 0, 1, arriving);
            bring(scale + STEPS, STEPS, inverse + item * T + at, 0, 1, arriving);
            if (gated) bring(scale + 2 * STEPS, STEPS, gates + item * T + at, 0, 1, arriving);
        },
        [&](int, int here) {
            const Real *const scale = scales + 3 * here * STEPS;
            Real *const w = weights + here * STEPS * LATENTS;
            return [=](int k, int l, Real, Real sum, Real) {
                Real &x = w[k * LATENTS + l];
                x = sum == 0 ? 0 : exponential(x - scale[k]) * scale[STEPS + k] / sum;
            };
        },
        [&](int start, int here) {
            const Real *const gate = scales + (3 * here + 2) * STEPS;
            Real *const rows = Y + ((item * gridDim.z + blockIdx.z) * T + run.row + start) * D + column;
            return [&, gate, rows, here](int k) {
                const int step = here * STEPS + k;
                Real y[Part::COLUMNS];
                walk.part.template sum_latents<false>(weights + step * LATENTS, y);
                Part::each_column(y, [&](int c, Real sum) {
                    if (c < columns)
                        rows[(long long)k * D + c] = gated ? fma(gate[k], gate_values[step * pitch + c], sum) : sum;
                });
            };
        },
        [](int, int) {});
}

// The joined state of (m, s, S) and (n, t, U), with `rows` latents in all, and D numbers for each. The grid is
// (rows · max(D, 1) / 256).
__global__ void __launch_bounds__(256)
    join_states(const double *m, const double *s, const double *S, const double *n, const double *t, const double *U,
                long long rows, int D, double *top, double *sums, double *out) {
    const long long at = (long long)blockIdx.x * 256 + threadIdx.x, row = at / max(D, 1);
    if (row >= rows) return;
    const double left = m[row], right = n[row], most = left > right || left != left ? left : right;
    const double base = most == nothing<double>() ? 0 : most;
    const double a = exp(left - base), b = exp(right - base);
    if (at % max(D, 1) == 0) top[row] = most, sums[row] = a * s[row] + b * t[row];
    if (D) out[at] = a * S[at] + b * U[at];
}
