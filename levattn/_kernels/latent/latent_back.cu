// Latent attention, backward: products of rows and latents, gradients of the rows' logits, and gradients of positions.
// With the sums s and S of a latent relative to its reference, c = p / s and E = e^(K − reference):
//
//   G[t] = ⟨dY[t], S(t)⟩            dQ[t] = c G − p Σ c G       (the gate's part of the sum: λ ⟨dY, gate value⟩)
//   R(u) = Σ c[t] dY[t], ρ(u) = Σ c[t] G[t] / s(t)   over the rows t that see position u
//   dV[u] = Σ E[u] R(u)             dK[u] = E[u] (⟨V[u], R(u)⟩ − ρ(u))       (Σ dV over the latents)
//
// Blocks take runs as in latent.cu, first forwards, which stores E and 1 / s, and then backwards. There a position that
// raised the reference multiplies R and ρ by its a. All numbers are relative to the current reference, but numbers that
// pass from run to run are relative to the references before runs.

#include "shared.cuh"
#include "copies.cuh"
#include "steps.cuh"
#include "latent.cuh"

namespace {

// Steps of a chunk.
template <typename Real>
constexpr int STEPS = 32 / sizeof(Real);

// Blocks of threads for each multiprocessor, where the compiler's choice of registers would allow one or two less.
template <typename Real, int LATENTS>
constexpr int RESIDENT = sizeof(Real) == 8 || LATENTS > 32 ? 1 : LATENTS > 16 ? 8 : 10;

// Sum the results of warps, (warps, LATENTS), in their order.
template <int LATENTS, typename Real>
__device__ inline Real over_warps(const Real *found, int apart) {
    Real sum = *found;
    for (int warp = 1; warp < (int)blockDim.x / 32; ++warp) sum += found[warp * apart];
    return sum;
}

}  // namespace

// Per run and step: E (b, U, L), 1 / s or 0 (b, T, L), and G of these columns, (b, slices of columns, T, L). Per run: the
// factors from its first reference, `kept`, and from its last, `given`, to the first reference of the next run of the
// sequence, (b, runs, L). The grid is (runs · b, columns, latents).
template <typename Real, int LATENTS>
__global__ void __launch_bounds__((Tile<Real, LATENTS>::THREADS), (RESIDENT<Real, LATENTS>))
    trace_runs(POSITION_PARAMETERS, const Real *dY, long long dy_item, long long dy_row, START_PARAMETERS,
               const long long *runs, int count, int L, int D, long long T, long long U, Real *exponentials,
               Real *inverse, Real *G, double *kept, double *given) {
    constexpr int STEPS = ::STEPS<Real>;
    DYNAMIC_SHARED(shared);
    const long long number = count - 1 - blockIdx.x % count, item = blockIdx.x / count;
    const Run run(runs, number);
    const long long place = item * slots + run.slot;
    const int pitch = blockDim.x / 32 * Tile<Real, LATENTS>::WIDE, gradient_numbers = 2 * STEPS * pitch;
    Walk<Real, LATENTS, STEPS> walk(shared, run, item, L, D, gradient_numbers + blockDim.x / 32 * STEPS * LATENTS);
    const int latent = walk.latent, latents = walk.latents;
    Real *const gradients = walk.own, *const found = gradients + gradient_numbers;
    const bool first = blockIdx.y == 0;
    fill_zeros(gradients, found);
    walk.begin(references, sums, states, place, L, D);
    walk.go(
        POSITIONS,
        [&](int next, int other, int arriving) {
            if (run.rows)
                bring(gradients + other * STEPS * pitch, pitch,
                      dY + item * dy_item + (run.row + next) * dy_row + walk.column, dy_row, arriving, walk.columns);
        },
        [&](int start, int) {
            Real *const left = exponentials + (item * U + run.position + start) * L + latent;
            Real *const right = inverse + (item * T + run.row + start) * L + latent;
            return [&, left, right](int k, int l, Real e, Real sum, Real) {
                if (first && run.positions) left[(long long)k * L + l] = e;
                if (first && run.rows) right[(long long)k * L + l] = sum == 0 ? 0 : 1 / sum;
            };
        },
        [&](int, int here) {
            return [&, here](int k) {
                if (run.rows)
                    walk.part.sum_columns(gradients + (here * STEPS + k) * pitch,
                                          found + (threadIdx.x / 32 * STEPS + k) * LATENTS);
            };
        },
        [&](int start, int steps) {
            if (!run.rows) return;
            __syncthreads();
            Real *const out = G + ((item * gridDim.y + blockIdx.y) * T + run.row + start) * L + latent;
            for (int k = 0; k < steps; ++k)
                for (int l = threadIdx.x; l < latents; l += blockDim.x)
                    out[(long long)k * L + l] = over_warps<LATENTS>(found + k * LATENTS + l, STEPS * LATENTS);
        });
    if (!kept || blockIdx.y) return;
    const bool last = number + 1 == count || Run(runs, number + 1).sequence != run.sequence;
    for (int l = threadIdx.x; l < latents; l += blockDim.x) {
        const long long at = (item * count + number) * L + latent + l;
        const double next = last ? nothing<double>() : (double)references[(item * slots + run.slot + 1) * L + latent + l];
        const double begun = references[place * L + latent + l], ended = walk.references[l];
        kept[at] = last || begun == nothing<double>() ? 0 : exp(begun - next);
        given[at] = last || ended == nothing<double>() ? 0 : exp(ended - next);
    }
}

// Per row: dQ, the gradients of the gate and of its value, and in the places of 1 / s and G the weights c and the
// increments of ρ. The grid is (runs · b, stretches of 64 rows).
template <typename Real>
__global__ void __launch_bounds__(256)
    finish_rows(const Real *Q, long long q_item, long long q_row, const Real *dY, long long dy_item, long long dy_row,
                const Real *gate_value, long long gate_value_item, long long gate_value_row, const Real *largest,
                const Real *scales, const Real *gates, const long long *runs, int count, int L, int D, long long T,
                Real *inverse, Real *G, Real *dQ, Real *dgate, Real *dgate_value) {
    const Run run(runs, blockIdx.x % count);
    const long long item = blockIdx.x / count;
    const int lane = threadIdx.x % 32, stop = min(run.rows, ((int)blockIdx.y + 1) * 64);
    for (int k = blockIdx.y * 64 + threadIdx.x / 32; k < stop; k += 8) {
        const long long row = run.row + k, at = item * T + row;
        const Real *const logits = Q + item * q_item + row * q_row;
        const Real most = largest[at], scale = scales[at];
        Real own = 0, total = 0;
        if (gate_value) {
            const Real *const gradient = dY + item * dy_item + row * dy_row;
            const Real *const value = gate_value + item * gate_value_item + row * gate_value_row;
            for (int column = lane; column < D; column += 32) {
                own = fma(gradient[column], value[column], own);
                dgate_value[at * D + column] = gates[at] * gradient[column];
            }
            for (int far = 16; far; far /= 2) own += __shfl_xor_sync(ALL, own, far);
        }
        for (int l = lane; l < L; l += 32) {
            const Real one = inverse[at * L + l];
            if (one == 0) continue;
            const Real p = exponential(logits[l] - most) * scale;
            total = fma(p * one, G[at * L + l], total);
        }
        for (int far = 16; far; far /= 2) total += __shfl_xor_sync(ALL, total, far);
        if (gate_value) total = fma(gates[at], own, total);
        for (int l = lane; l < L; l += 32) {
            const long long entry = at * L + l;
            const Real one = inverse[entry], p = one == 0 ? 0 : exponential(logits[l] - most) * scale;
            const Real c = p * one, flow = one == 0 ? 0 : c * G[entry];
            dQ[entry] = flow - p * total;
            inverse[entry] = c;
            G[entry] = flow * one;
        }
        if (gate_value && lane == 0) dgate[at] = gates[at] * (own - total);
    }
}

// E of positions that all rows see, relative to one reference (b, n, L) of each sequence; 0 where masked. To (b, U, L).
// The grid is (runs · b, stretches of 64 positions).
template <typename Real>
__global__ void __launch_bounds__(256)
    raise_logits(const Real *K, long long k_item, long long k_row, const unsigned char *mask, long long mask_item,
                 long long mask_row, const Real *references, int n, const long long *runs, int count, int L,
                 long long U, Real *exponentials) {
    const Run run(runs, blockIdx.x % count);
    const long long item = blockIdx.x / count;
    const int lane = threadIdx.x % 32, stop = min(run.positions, ((int)blockIdx.y + 1) * 64);
    for (int k = blockIdx.y * 64 + threadIdx.x / 32; k < stop; k += 8) {
        const long long at = run.position + k;
        const bool taken = !mask || mask[item * mask_item + at * mask_row];
        for (int l = lane; l < L; l += 32) {
            const Real x = taken ? K[item * k_item + at * k_row + l] : nothing<Real>();
            const Real reference = references[(item * n + run.sequence) * L + l];
            exponentials[(item * U + at) * L + l] = x == nothing<Real>() ? 0 : exponential(x - reference);
        }
    }
}

// The steps of a run from the last to the first. If `alone`, R and ρ of the run by itself, relative to the references
// before it: R to `flows` (b, runs, L, D), ρ to `flow_sums` (b, runs, L). Otherwise the gradients of its positions, from R
// and ρ of later runs, (b, slots, L[, D]) or nothing: dV (b, slices of latents, U, D) and dK (b, slices of columns, U, L).
// The grid is (runs · b, columns, latents).
template <typename Real, int LATENTS, bool alone>
__global__ void __launch_bounds__((Tile<Real, LATENTS>::THREADS), 1)
    flow_back(const Real *V, long long v_item, long long v_row, const Real *dY, long long dy_item, long long dy_row,
              const Real *exponentials, const Real *weights, const Real *growths, const long long *runs, int count,
              int L, int D, long long T, long long U, const Real *coming, const Real *coming_sums, long long slots,
              Real *flows, Real *flow_sums, Real *dV, Real *dK) {
    const long long number = count - 1 - blockIdx.x % count, item = blockIdx.x / count;
    const Run run(runs, number);
    if (alone ? !run.rows : !run.positions) return;
    constexpr int STEPS = ::STEPS<Real>;
    using Part = Tile<Real, LATENTS>;
    DYNAMIC_SHARED(shared);
    const long long place = item * slots + run.slot;
    const int pitch = blockDim.x / 32 * Part::WIDE, column = blockIdx.y * pitch, latent = blockIdx.z * LATENTS;
    const int columns = min(D - column, pitch), latents = min(L - latent, LATENTS);
    Real *const raised_logits = (Real *)shared, *const shares = raised_logits + 2 * STEPS * LATENTS;
    Real *const grown = shares + 2 * STEPS * LATENTS, *const gradients = grown + 2 * STEPS * LATENTS;
    Real *const values = gradients + 2 * STEPS * pitch, *const found = values + (alone ? 0 : 2 * STEPS * pitch);
    Real *const totals = found + (alone ? 0 : blockDim.x / 32 * STEPS * LATENTS);
    unsigned int *const flags = (unsigned int *)(totals + LATENTS);

    fill_zeros(raised_logits, found);
    for (int l = threadIdx.x; l < LATENTS; l += blockDim.x)
        totals[l] = coming && l < latents ? coming_sums[place * L + latent + l] : 0;
    if (threadIdx.x < 4) flags[threadIdx.x] = 0;
    Part part;
    part.begin(coming ? coming + (place * L + latent) * D + column : nullptr, latents, columns, D);
    const int chunks = (run.steps() + STEPS - 1) / STEPS;
    for (int chunk = chunks; chunk >= 0; --chunk) {
        const int next = chunk - 1, other = next & 1, here = 1 - other;
        finish_copies();
        __syncthreads();
        if (next >= 0) {
            const int start = next * STEPS, arriving = min(run.steps() - start, STEPS);
            if (run.positions) {
                const long long at = run.position + start;
                bring(raised_logits + other * STEPS * LATENTS, LATENTS, exponentials + (item * U + at) * L + latent, L,
                      arriving, latents);
                if (!alone)
                    bring(values + other * STEPS * pitch, pitch, V + item * v_item + at * v_row + column, v_row,
                          arriving, columns);
            }
            if (run.rows) {
                const long long at = run.row + start;
                bring(shares + other * STEPS * LATENTS, LATENTS, weights + (item * T + at) * L + latent, L, arriving,
                      latents);
                bring(grown + other * STEPS * LATENTS, LATENTS, growths + (item * T + at) * L + latent, L, arriving,
                      latents);
                bring(gradients + other * STEPS * pitch, pitch, dY + item * dy_item + at * dy_row + column, dy_row,
                      arriving, columns);
            }
            if (threadIdx.x < 2) flags[2 * other + threadIdx.x] = 0;
        }
        if (chunk == chunks) continue;
        const int start = chunk * STEPS, steps = min(run.steps() - start, STEPS);
        const Real *const E = raised_logits + here * STEPS * LATENTS, *const c = shares + here * STEPS * LATENTS;
        Real *const growth = grown + here * STEPS * LATENTS;
        unsigned int any = 0, up = 0;
        for (int l = threadIdx.x; l < latents; l += blockDim.x) {
            Real total = totals[l];
            for (int k = steps; k-- > 0;) {
                const Real e = E[k * LATENTS + l];
                if (run.rows) total += growth[k * LATENTS + l];
                growth[k * LATENTS + l] = total;  // ρ at this position
                if (raises(e)) total *= -e, up |= 1u << k, any |= 1u << k;
                else if (e != 0) any |= 1u << k;
            }
            totals[l] = total;
        }
        collect(flags + 2 * here, any);
        collect(flags + 2 * here + 1, up);
        __syncthreads();
        const unsigned int seen = flags[2 * here], raised = flags[2 * here + 1];
        Real *const to_values = dV + ((item * gridDim.z + blockIdx.z) * U + run.position + start) * D + column;
#pragma unroll 1
        for (int k = steps; k-- > 0;) {
            const int line = (here * STEPS + k) * pitch;
            const Real *const e = E + k * LATENTS;
            if (run.rows) part.template add<false>(c + k * LATENTS, gradients + line);
            if (!alone && seen >> k & 1) {
                Real y[Part::COLUMNS];
                if (raised >> k & 1) part.template sum_latents<true>(e, y);
                else part.template sum_latents<false>(e, y);
                Part::each_column(y, [&](int column, Real sum) {
                    if (column < columns) to_values[(long long)k * D + column] = sum;
                });
                part.sum_columns(values + line, found + (threadIdx.x / 32 * STEPS + k) * LATENTS);
            }
            if (raised >> k & 1) part.lower(e);
        }
        if (alone || !run.positions) continue;
        __syncthreads();
        Real *const to_logits = dK + ((item * gridDim.y + blockIdx.y) * U + run.position + start) * L + latent;
        for (int k = 0; k < steps; ++k) {
            if (!(seen >> k & 1)) continue;
            for (int l = threadIdx.x; l < latents; l += blockDim.x) {
                const Real e = E[k * LATENTS + l], weight = raises(e) ? (Real)1 : e;
                const Real sum = over_warps<LATENTS>(found + k * LATENTS + l, STEPS * LATENTS);
                to_logits[(long long)k * L + l] = weight * (blockIdx.y ? sum : sum - growth[k * LATENTS + l]);
            }
        }
    }
    if (!alone) return;
    const long long own = item * count + number;
    part.end(nullptr, flows + (own * L + latent) * D + column, latents, columns, D);
    if (blockIdx.y == 0)
        for (int l = threadIdx.x; l < latents; l += blockDim.x) flow_sums[own * L + latent + l] = totals[l];
}
