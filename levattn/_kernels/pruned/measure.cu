// The measure of differences of keys by the moments of queries: a factor of the moments, and the means.

#include "shared.cuh"

namespace {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;

#include "sum_of_block.cuh"

}  // namespace

// Of sums over `count` queries, total (b, d) and second (b, d, d), and over `keys` keys, key_total (b, d): write a lower
// factor (b, d, d) of the moment of the queries about their mean, with a share of its trace added to its diagonal, and
// both means (b, d). The share is `jitter` of the moment about the mean or `rounding` of that about zero, whichever is
// more. In `wrong` (b, 2) are flags: moments are not finite, which count as zeros, or have no factor. A block has a matrix.
template <typename Real>
__global__ void __launch_bounds__(THREADS, 1)
    factor_queries(const double *total, const double *second, double count, const double *key_total, double keys, int d,
                   double jitter, double rounding, Real *root, Real *query, Real *origin, bool *wrong) {
    DYNAMIC_SHARED(memory);
    __shared__ double reduced[THREADS];
    const int pitch = d | 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long item = blockIdx.x, size = (long long)d * d;
    double *const A = (double *)memory, *const mean = A + d * pitch;
    const double *const from = second + item * size;
    for (int i = threadIdx.x; i < d; i += THREADS) {
        mean[i] = total[item * d + i] / count;
        query[item * d + i] = (Real)mean[i];
        origin[item * d + i] = (Real)(key_total[item * d + i] / keys);
    }
    __syncthreads();
    double infinite = 0, spread = 0, square = 0;
    for (int i = warp; i < d; i += WARPS)
        for (int j = lane; j < d; j += 32) {
            const double x = from[(long long)i * d + j] / count, y = x - mean[i] * mean[j];
            if (!(fabs(y) <= 1.7976931348623157e308)) infinite = 1;
            if (i == j) square += x, spread += y;
            if (j <= i) A[i * pitch + j] = y;
        }
    const bool lost = sum_of(infinite, reduced) > 0;
    spread = sum_of(spread, reduced) / d * jitter, square = sum_of(square, reduced) * rounding;
    const double more = lost ? 0 : spread > square ? spread : square, least = more > 0 ? more : 1;
    for (int i = warp; i < d; i += WARPS)
        for (int j = lane; j <= i; j += 32) A[i * pitch + j] = (lost ? 0 : A[i * pitch + j]) + (i == j ? least : 0);
    bool failed = false;
    for (int k = 0; k < d; ++k) {
        __syncthreads();
        const double pivot = A[k * pitch + k];
        failed = failed || !(pivot > 0);
        const double inverse = 1 / sqrt(pivot);
        __syncthreads();
        for (int i = k + threadIdx.x; i < d; i += THREADS) A[i * pitch + k] *= inverse;
        __syncthreads();
        for (int i = k + 1 + warp; i < d; i += WARPS) {
            const double own = A[i * pitch + k];
            for (int j = k + 1 + lane; j <= i; j += 32) A[i * pitch + j] = fma(-own, A[j * pitch + k], A[i * pitch + j]);
        }
    }
    __syncthreads();
    for (int i = warp; i < d; i += WARPS)
        for (int j = lane; j < d; j += 32) root[item * size + (long long)i * d + j] = j <= i ? (Real)A[i * pitch + j] : Real(0);
    if (threadIdx.x == 0) wrong[2 * item] = lost, wrong[2 * item + 1] = failed;
}
