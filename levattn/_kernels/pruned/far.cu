// Rows that are far from one another: the first is the farthest from the mean, each other from all rows before it.
//
// A block of threads makes all picks of one matrix, so that a call is one launch. As many rows as fit stay in shared
// memory, and the block reads the others again for each pick.

#include "shared.cuh"

namespace {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int LANES = 8;                 // threads that share a row
constexpr int AT_ONCE = THREADS / LANES;  // rows
constexpr int APART = 8;                 // numbers between rows in shared memory, so that they begin in other banks

// Keep the larger distance and its row, on ties the lower row.
template <typename Real>
__device__ inline void keep_farther(Real &far, long long &row, Real other_far, long long other) {
    if (other_far > far || (other_far == far && other < row)) far = other_far, row = other;
}

}  // namespace

// Write to `picks` (b, R) numbers of rows among every `step`-th of X (b, n, d), whose weights (b, n) are above 0.
// `mean`: (b, d). `count`: the number of candidate rows. The first `resident` of them fit into shared memory, behind a
// row and, if `inside`, the distances to the picks. `outside`: (b, count), otherwise holds the distances. A block has
// one matrix.
template <typename Real>
__global__ void __launch_bounds__(THREADS)
    far_rows(const Real *X, const Real *weight, const Real *mean, long long n, int d, long long step, long long count,
             int R, long long resident, bool inside, Real *outside, long long *picks) {
    DYNAMIC_SHARED(memory);
    __shared__ Real fars[WARPS];
    __shared__ long long rows[WARPS];
    const long long item = blockIdx.x;
    const Real *const all = X + item * n * d, *const weights = weight + item * n;
    Real *const center = (Real *)memory;
    Real *const nearest = inside ? center + d : outside + item * count;
    Real *const copies = center + d + (inside ? count : 0);
    const int wide = d + APART;
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
    for (long long row = first; row < resident; row += AT_ONCE)
        for (int k = lane; k < d; k += LANES) copies[row * wide + k] = all[row * step * d + k];
    for (int pick = 0; pick < R; ++pick) {
        const Real *const from = pick ? all + picks[item * R + pick - 1] * d : mean + item * d;
        for (int k = threadIdx.x; k < d; k += THREADS) center[k] = from[k];
        __syncthreads();
        Real far = -1;
        long long chosen = 0;
        for (long long low = 0; low < count; low += AT_ONCE) {  // all threads alike, because they exchange sums
            const long long row = low + first;
            const Real *const x = row < resident ? copies + row * wide : all + min(row, count - 1) * step * d;
            Real distance = 0;
#pragma unroll 4
            for (int k = lane; k < d; k += LANES) {
                const Real apart = x[k] - center[k];
                distance = fma(apart, apart, distance);
            }
            for (int half = LANES / 2; half; half /= 2) distance += __shfl_xor_sync(0xffffffffu, distance, half);
            if (lane || row >= count) continue;
            if (pick > 1) distance = min(distance, nearest[row]);
            if (pick) nearest[row] = distance;
            if (weights[row * step] > 0) keep_farther(far, chosen, distance, row);
        }
        for (int half = 16; half; half /= 2)
            keep_farther(far, chosen, __shfl_xor_sync(0xffffffffu, far, half),
                         __shfl_xor_sync(0xffffffffu, chosen, half));
        if (threadIdx.x % 32 == 0) fars[threadIdx.x / 32] = far, rows[threadIdx.x / 32] = chosen;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int warp = 1; warp < WARPS; ++warp) keep_farther(far, chosen, fars[warp], rows[warp]);
            picks[item * R + pick] = chosen * step;
        }
        __syncthreads();
    }
}
