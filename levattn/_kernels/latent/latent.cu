// Latent attention, forward: what each run sums up, what each run begins with, and the rows of each run.
//
// A thread keeps its part of the state S in registers from step to step, and the latents' own sums are scanned beside
// it, a chunk of steps at a time, while the next chunk is on its way. Columns never mix, so that how they are shared
// out over blocks changes no bit; sums over latents are those of a thread in order, then of lanes in pairs. States
// are combined from run to run in double precision.

#include "shared.cuh"
#include "copies.cuh"
#include "latent.cuh"

namespace {

constexpr int NEVER = 0x7fffffff, BEFORE = -NEVER;  // after and before all positions that a row may see last
constexpr int AHEAD = 4;           // runs whose sums are asked for together

// Steps of a chunk.
template <typename Real>
constexpr int STEPS = 64 / sizeof(Real);

}  // namespace

// The first position of each sequence that a latent sees, counted from the beginning of the sequence: BEFORE if its
// state has seen something, NEVER if nothing has. To `first` (b, n, L). The grid is (n · b, latents / 32).
template <typename Real>
__global__ void __launch_bounds__(256, 4)
    find_first(const Real *K, long long k_item, long long k_row, const unsigned char *mask, long long mask_item,
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
            if (K[item * k_item + (low + at) * k_row + l] != nothing<Real>()) here = min(here, (int)at);
        }
        if (here != NEVER) atomicMin(found + lane, here);
        __syncthreads();
    }
    if (warp == 0 && l < L) first[place] = found[lane];
}

// The softmax over the latents that a row sees, and over the gate if there is one: its largest logit, the inverse of
// the sum of exponentials relative to it, and the weight of the gate, (b, T) each. The grid is (runs · b, stretches of
// 64 rows).
template <typename Real>
__global__ void __launch_bounds__(256, 4)
    weigh_rows(const Real *Q, long long q_item, long long q_row, const Real *gate, long long gate_item,
               long long gate_row, const int *first, const long long *runs, int count, int n, int L, long long T,
               Real *largest, Real *inverse, Real *gates) {
    const Run run(runs, blockIdx.x % count);
    const long long item = blockIdx.x / count;
    const int lane = threadIdx.x % 32, stop = min(run.rows, ((int)blockIdx.y + 1) * 64);
    const int *const begins = first + (item * n + run.sequence) * L;
    for (int k = blockIdx.y * 64 + threadIdx.x / 32; k < stop; k += 8) {
        const Real *const logits = Q + item * q_item + (run.row + k) * q_row;
        const Real beside = gate ? gate[item * gate_item + (run.row + k) * gate_row] : nothing<Real>();
        const long long seen = run.seen + k;
        Real most = beside;
        for (int l = lane; l < L; l += 32)
            if (begins[l] <= seen && begins[l] != NEVER && !(logits[l] <= most)) most = logits[l];
        for (int far = 16; far; far /= 2) most = max(most, __shfl_xor_sync(ALL, most, far));
        if (most == nothing<Real>()) most = 0;
        Real total = 0;
        for (int l = lane; l < L; l += 32)
            if (begins[l] <= seen && begins[l] != NEVER) total += exponential(logits[l] - most);
        for (int far = 16; far; far /= 2) total += __shfl_xor_sync(ALL, total, far);
        const Real own = exponential(beside - most);
        if (gate) total += own;
        if (lane) continue;
        const long long at = item * T + run.row + k;
        const Real scale = total == 0 ? 0 : 1 / total;
        largest[at] = most, inverse[at] = scale;
        if (gate) gates[at] = own * scale;
    }
}

// What each run sums up by itself: the largest logit, and the sums relative to it, to (b, runs, L[, D]). Runs that
// nothing follows are left out. The grid is (runs · b, columns, latents).
template <typename Real, int LATENTS>
__global__ void __launch_bounds__((Tile<Real, LATENTS>::THREADS), 1)
    sum_runs(POSITION_PARAMETERS, const long long *runs, int count, int L, int D, Real *maxima, Real *sums,
             Real *states) {
    constexpr int STEPS = ::STEPS<Real>;
    using Part = Tile<Real, LATENTS>;
    DYNAMIC_SHARED(shared);
    const Run run(runs, blockIdx.x % count);
    if (!run.followed) return;
    const long long item = blockIdx.x / count, place = item * count + blockIdx.x % count;
    const int pitch = blockDim.x / 32 * Part::WIDE, column = blockIdx.y * pitch, latent = blockIdx.z * LATENTS;
    const int columns = min(D - column, pitch), latents = min(L - latent, LATENTS);
    Real *const logits = (Real *)shared, *const values = logits + 2 * STEPS * LATENTS;
    Real *const references = values + 2 * STEPS * pitch, *const totals = references + LATENTS;
    Real *const tops = totals + LATENTS;
    unsigned int *const flags = (unsigned int *)(tops + LATENTS), *const taken = flags + 4;

    fill_zeros(logits, references);
    for (int l = threadIdx.x; l < LATENTS; l += blockDim.x) references[l] = tops[l] = nothing<Real>(), totals[l] = 0;
    if (threadIdx.x < 4) flags[threadIdx.x] = 0;
    Part part;
    part.begin(nullptr, latents, columns, D);
    for (int start = -STEPS; start < run.steps(); start += STEPS) {
        const int next = start + STEPS, other = next / STEPS % 2, here = 1 - other;
        finish_copies();
        __syncthreads();
        const int arriving = min(run.steps() - next, STEPS);
        if (arriving > 0) {
            const long long at = run.position + next;
            bring(logits + other * STEPS * LATENTS, LATENTS, K + item * k_item + at * k_row + latent, k_row, arriving,
                  latents);
            bring(values + other * STEPS * pitch, pitch, V + item * v_item + at * v_row + column, v_row, arriving,
                  columns);
            if (threadIdx.x < 32)
                bring_mask(taken + other, mask ? mask + item * mask_item + at * mask_row : nullptr, mask_row, arriving);
            if (threadIdx.x < 2) flags[2 * other + threadIdx.x] = 0;
        }
        if (start < 0) continue;
        const int steps = min(run.steps() - start, STEPS);
        Real *const E = logits + here * STEPS * LATENTS;
        scan_logits<LATENTS>(E, taken[here], steps, latents, references, totals, flags + 2 * here,
                             [&](int, int l, Real, Real, Real x) {
                                 if (!(x <= tops[l])) tops[l] = x;
                             });
        __syncthreads();
        const unsigned int seen = flags[2 * here], raised = flags[2 * here + 1];
#pragma unroll 1
        for (int k = 0; k < steps; ++k)
            if (seen >> k & 1)
                part.enter(E + k * LATENTS, values + (here * STEPS + k) * pitch, raised >> k & 1);
    }
    for (int l = threadIdx.x; l < latents; l += blockDim.x) {
        const Real lowered = tops[l] == nothing<Real>() ? 0 : exponential(references[l] - tops[l]);
        references[l] = lowered;
        if (blockIdx.y) continue;
        maxima[place * L + latent + l] = tops[l];
        sums[place * L + latent + l] = totals[l] * lowered;
    }
    __syncthreads();
    part.end(references, states + (place * L + latent) * D + column, latents, columns, D);
}

// From what the runs of each sequence sum up, and from the state before them, (b, n, L) or nothing: the references and
// sums that each run begins with, in the place of its own, and all of them together. Sums S are to be combined as
// `scan_runs` does, with what comes in multiplied by `entered` (b, n, L), and with the factors `kept` and `gained`
// (b, runs, L). The grid is (b · n · L / 256).
template <typename Real>
__global__ void __launch_bounds__(256)
    combine_sums(const long long *runs, const long long *spans, int count, long long b, int n, int L,
                 const double *before, const double *sums_before, Real *maxima, Real *sums, double *entered,
                 double *kept, double *gained, double *all_maxima, double *all_sums) {
    const long long place = (long long)blockIdx.x * 256 + threadIdx.x;
    if (place >= b * n * L) return;
    const long long l = place % L, sequence = place / L % n, item = place / L / n;
    double reference = nothing<double>(), total = 0;
    if (before) {
        reference = (Real)before[place];  // logits are of this type: what it is rounded by is made good
        const double factor = reference == nothing<double>() ? 0 : exp(before[place] - reference);
        entered[place] = factor;
        total = factor == 0 ? 0 : sums_before[place] * factor;
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
    if (all_maxima) all_maxima[place] = reference, all_sums[place] = total;
}

// X ← kept X + gained x over the runs of each sequence, forwards or backwards, for what each run has, x (b, runs, L, D):
// each gets instead what comes before it, times `given`. X begins as `before` times `entered`, and ends in `all`,
// (b, n, L, D). Absent factors are 1, and absent sums 0. Runs whose number `field` is 0 have nothing. The grid is
// (b · n · L · D / 256).
template <typename Real>
__global__ void __launch_bounds__(256)
    scan_runs(const long long *runs, const long long *spans, int count, long long b, int n, int L, int D, int field,
              bool backwards, const double *before, const double *entered, const double *kept, const double *gained,
              const double *given, Real *x, double *all) {
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
    if (all) all[place] = total;
}

// The rows of each run, to Y (b, slices of latents, T, D). The grid is (runs · b, columns, latents).
template <typename Real, int LATENTS>
__global__ void __launch_bounds__((Tile<Real, LATENTS>::THREADS), 1)
    write_rows(POSITION_PARAMETERS, const Real *Q, long long q_item, long long q_row, const Real *beside,
               long long beside_item, long long beside_row, const Real *largest, const Real *inverse,
               const Real *gates, START_PARAMETERS, const long long *runs, int count, int L, int D, long long T,
               Real *Y) {
    constexpr int STEPS = ::STEPS<Real>;
    using Part = Tile<Real, LATENTS>;
    DYNAMIC_SHARED(shared);
    const Run run(runs, count - 1 - blockIdx.x % count);  // the last ones are the longest
    if (!run.rows) return;
    const long long item = blockIdx.x / count, place = item * slots + run.slot;
    const int pitch = blockDim.x / 32 * Part::WIDE, column = blockIdx.y * pitch, latent = blockIdx.z * LATENTS;
    const int columns = min(D - column, pitch), latents = min(L - latent, LATENTS);
    const bool gated = beside && blockIdx.z == 0;
    Real *const logits = (Real *)shared, *const weights = logits + 2 * STEPS * LATENTS;
    Real *const values = weights + 2 * STEPS * LATENTS, *const asides = values + 2 * STEPS * pitch;
    Real *const scales = asides + (beside ? 2 * STEPS * pitch : 0), *const roots = scales + 6 * STEPS;
    Real *const totals = roots + LATENTS;
    unsigned int *const flags = (unsigned int *)(totals + LATENTS), *const taken = flags + 4;

    fill_zeros(logits, roots);
    for (int l = threadIdx.x; l < LATENTS; l += blockDim.x) {
        const bool begun = references && l < latents;
        roots[l] = begun ? references[place * L + latent + l] : nothing<Real>();
        totals[l] = begun ? sums[place * L + latent + l] : 0;
    }
    if (threadIdx.x < 4) flags[threadIdx.x] = 0;
    Part part;
    part.begin(states ? states + (place * L + latent) * D + column : nullptr, latents, columns, D);
    for (int start = -STEPS; start < run.steps(); start += STEPS) {
        const int next = start + STEPS, other = next / STEPS % 2, here = 1 - other;
        finish_copies();
        __syncthreads();
        const int arriving = min(run.steps() - next, STEPS);
        if (arriving > 0) {
            if (run.positions) {
                const long long at = run.position + next;
                bring(logits + other * STEPS * LATENTS, LATENTS, K + item * k_item + at * k_row + latent, k_row,
                      arriving, latents);
                bring(values + other * STEPS * pitch, pitch, V + item * v_item + at * v_row + column, v_row, arriving,
                      columns);
            }
            const long long at = run.row + next;
            bring(weights + other * STEPS * LATENTS, LATENTS, Q + item * q_item + at * q_row + latent, q_row, arriving,
                  latents);
            if (gated)
                bring(asides + other * STEPS * pitch, pitch, beside + item * beside_item + at * beside_row + column,
                      beside_row, arriving, columns);
            Real *const scale = scales + 3 * other * STEPS;
            bring(scale, STEPS, largest + item * T + at, 0, 1, arriving);
            bring(scale + STEPS, STEPS, inverse + item * T + at, 0, 1, arriving);
            if (gated) bring(scale + 2 * STEPS, STEPS, gates + item * T + at, 0, 1, arriving);
            if (threadIdx.x < 32)
                bring_mask(taken + other,
                           mask ? mask + item * mask_item + (run.position + next) * mask_row : nullptr, mask_row,
                           run.positions ? arriving : 0);
            if (threadIdx.x < 2) flags[2 * other + threadIdx.x] = 0;
        }
        if (start < 0) continue;
        const int steps = min(run.steps() - start, STEPS);
        Real *const E = logits + here * STEPS * LATENTS, *const w = weights + here * STEPS * LATENTS;
        const Real *const scale = scales + 3 * here * STEPS;
        scan_logits<LATENTS>(E, taken[here], steps, latents, roots, totals, flags + 2 * here,
                             [&](int k, int l, Real, Real sum, Real) {
                                 Real &x = w[k * LATENTS + l];
                                 x = sum == 0 ? 0 : exponential(x - scale[k]) * scale[STEPS + k] / sum;
                             });
        __syncthreads();
        const unsigned int seen = flags[2 * here], raised = flags[2 * here + 1];
        Real *const rows = Y + ((item * gridDim.z + blockIdx.z) * T + run.row + start) * D + column;
#pragma unroll 1
        for (int k = 0; k < steps; ++k) {
            const int line = (here * STEPS + k) * pitch;
            if (seen >> k & 1) part.enter(E + k * LATENTS, values + line, raised >> k & 1);
            Real y[Part::COLUMNS];
            part.template sum_latents<false>(w + k * LATENTS, y);
            Part::each_column(y, [&](int c, Real sum) {
                if (c < columns)
                    rows[(long long)k * D + c] =
                        gated ? fma(scale[2 * STEPS + k], asides[line + c], sum) : sum;
            });
        }
    }
}

// Two states as one: (m, s, S) and (n, t, U), with `rows` latents in all, D numbers to each. The grid is
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
