// Decode steps of latent attention: a few causal rows of each head, and the state after them, in one launch.
//
// A block takes 32 columns of a head, and reads and writes their state once. The sums of the latents need no columns, so
// every block of a head computes them itself. All arithmetic is in double precision.

#include "shared.cuh"
#include "formats.cuh"

namespace {

constexpr int ROWS = 8;      // at most; also the warps of a block, which share out the latents, and later the rows
constexpr int COLUMNS = 32;  // of a block
constexpr int DEEP = 8;      // latents of a column that are loaded together
constexpr unsigned int ALL = 0xffffffffu;

}  // namespace

// Y (b, T, D) of T rows, and the state after them (b, L[, D]), from the state before, which may be absent. The grid is
// (b, columns).
template <typename Real>
__global__ void __launch_bounds__(32 * ROWS)
    step_rows(const Real *Q, long long q_item, long long q_row, const Real *K, long long k_item, long long k_row,
              const Real *V, long long v_item, long long v_row, const unsigned char *mask, long long mask_item,
              long long mask_row, int T, int L, int D, const double *maxima, const double *sums, const double *states,
              Real *Y, double *new_maxima, double *new_sums, double *new_states) {
    DYNAMIC_SHARED(shared);
    __shared__ double parts[ROWS][ROWS][COLUMNS];  // of a row, by a warp
    __shared__ unsigned int seen;                  // the positions that a latent sees: one bit each
    double *const kept = (double *)shared, *const gained = kept + T * L, *const weights = gained + T * L;  // (T, L)
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const double nothing = (double)__int_as_float(0xff800000);  // −∞
    const long long item = blockIdx.x;
    const int column = blockIdx.y * COLUMNS + lane;

    // The slowest loads run while the sums of the latents are computed
    double state[DEEP], values[ROWS], y[ROWS];
    const long long place = item * L * D + column;
    const auto bring = [&](int low) {
#pragma unroll
        for (int i = 0; i < DEEP; ++i) {
            const int l = low + i * ROWS;
            state[i] = states && l < L && column < D ? states[place + (long long)l * D] : 0;
        }
    };
    bring(warp);
#pragma unroll
    for (int t = 0; t < ROWS; ++t)
        values[t] = t < T && column < D ? widen(V[item * v_item + t * v_row + column]) : 0, y[t] = 0;
    if (threadIdx.x == 0) seen = 0;
    __syncthreads();

    // Each position multiplies the sums before it by `kept`, and adds itself times `gained`
    unsigned int mine = 0;
    for (int l = threadIdx.x; l < L; l += blockDim.x) {
        double reference = maxima ? maxima[item * L + l] : nothing, total = sums ? sums[item * L + l] : 0;
        for (int t = 0; t < T; ++t) {
            const bool taken = !mask || mask[item * mask_item + t * mask_row];
            const double x = taken ? widen(K[item * k_item + t * k_row + l]) : nothing;
            const double most = x <= reference || reference != reference ? reference : x;
            const double base = most == nothing ? 0 : most;
            const double keep = exp(reference - base), gain = exp(x - base);
            if (x != nothing) mine |= 1u << t;
            total = fma(keep, total, gain), reference = most;
            kept[t * L + l] = keep, gained[t * L + l] = gain, weights[t * L + l] = total;
        }
        if (blockIdx.y == 0) new_maxima[item * L + l] = reference, new_sums[item * L + l] = total;
    }
    if (mine) atomicOr(&seen, mine);
    __syncthreads();

    // The softmax over the latents that have seen a position, divided by their sums
    if (warp < T) {
        const Real *const logits = Q + item * q_item + warp * q_row;
        double *const w = weights + warp * L;
        double most = nothing, total = 0;
        for (int l = lane; l < L; l += 32)
            if (w[l] != 0 && !(widen(logits[l]) <= most)) most = widen(logits[l]);
        for (int far = 16; far; far /= 2) most = max(most, __shfl_xor_sync(ALL, most, far));
        if (most == nothing) most = 0;
        for (int l = lane; l < L; l += 32) total += w[l] != 0 ? exp(widen(logits[l]) - most) : 0;
        for (int far = 16; far; far /= 2) total += __shfl_xor_sync(ALL, total, far);
        for (int l = lane; l < L; l += 32)
            w[l] = w[l] != 0 && total != 0 ? exp(widen(logits[l]) - most) / total / w[l] : 0;
    }
    __syncthreads();

#pragma unroll
    for (int t = 0; t < ROWS; ++t)
        if (!(seen >> t & 1)) values[t] = 0;
    for (int low = warp; low < L; low += ROWS * DEEP) {
        if (low != warp) bring(low);
#pragma unroll
        for (int i = 0; i < DEEP; ++i) {
            const int l = low + i * ROWS;
            if (l >= L) break;
#pragma unroll
            for (int t = 0; t < ROWS; ++t) {
                if (t >= T) break;
                state[i] = fma(kept[t * L + l], state[i], gained[t * L + l] * values[t]);
                y[t] = fma(weights[t * L + l], state[i], y[t]);
            }
            if (column < D) new_states[place + (long long)l * D] = state[i];
        }
    }
#pragma unroll
    for (int t = 0; t < ROWS; ++t) parts[t][warp][lane] = y[t];
    __syncthreads();
    if (warp >= T || column >= D) return;
    double sum = 0;
    for (int each = 0; each < ROWS; ++each) sum += parts[warp][each][lane];
    narrow((decltype(widen(Real{})))sum, Y[(item * T + warp) * D + column]);
}
