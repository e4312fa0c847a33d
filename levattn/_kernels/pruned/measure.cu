// The measure of differences of keys by the moments of queries: sums, also of chunks, a factor of the moments, and the means.

#include "finite.cuh"
#include "formats.cuh"
#include "shared.cuh"

namespace {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int ADDING = 256;  // threads of a block that adds rows
constexpr int AT_ONCE = 4;   // rows that a thread reads before it adds them

#include "sum_of_block.cuh"

}  // namespace

// Write to `sums` (chunks b, d) the sums over the rows of each chunk of X (b, g, n, d), whose first three steps are given
// in numbers. The n rows are cut into chunks of `length`; those of all g heads belong together. A block has 32 columns and
// `most` rows of a chunk of a sequence. There are sums for each of the parts: `sums` (parts, chunks b, d). The grid is
// (chunks b, 32 columns, parts). The order of the sums depends on g and `length` alone.
template <typename Key>
__global__ void __launch_bounds__(ADDING)
    sum_rows(const Key *X, long long item_step, long long head_step, long long row_step, int b, int g, int length, int d,
             int most, double *sums) {
    __shared__ double parts[ADDING / 32][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = 32 * blockIdx.y + lane;
    const int begin = blockIdx.z * most, rows = min(g * length, begin + most);
    const int chunk = blockIdx.x / b, sequence = blockIdx.x % b;
    const Key *const from = X + sequence * item_step + (long long)chunk * length * row_step + column;
    double sum = 0;
    for (int low = begin + warp; low < rows; low += AT_ONCE * (ADDING / 32)) {
        double read[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const int row = low + u * (ADDING / 32), head = row / length;
            const bool here = row < rows && column < d;
            read[u] = here ? (double)widen(from[head * head_step + (row - head * length) * row_step]) : 0.0;
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) sum += read[u];
    }
    parts[warp][lane] = sum;
    __syncthreads();
    if (warp || column >= d) return;
    for (int k = 1; k < ADDING / 32; ++k) sum += parts[k][lane];
    sums[((long long)blockIdx.z * gridDim.x + blockIdx.x) * d + column] = sum;
}

// Replace `sums` (chunks, size) of chunks by those up to and with each chunk, after the sums `before` (size,) or zeros.
__global__ void __launch_bounds__(ADDING) add_chunks(double *sums, const double *before, int chunks, long long size) {
    const long long i = (long long)blockIdx.x * ADDING + threadIdx.x;
    if (i >= size) return;
    double sum = before ? before[i] : 0;
    for (int chunk = 0; chunk < chunks; ++chunk) sums[chunk * size + i] = sum = sum + sums[chunk * size + i];
}

// Of sums over queries, total (b, d) and second (b, d, d), and over `keys` keys, key_total (b, d) or null: write a lower
// factor (b, d, d) of the moment of the queries about their mean, with a share of its trace added to its diagonal, and
// both means (b, d). The share is `jitter` of the moment about the mean or `rounding` of that about zero, whichever is
// more. In `sound` (2, b) are flags: moments are finite (others count as zeros), and they have a factor. A block has a matrix.
// There are `count` queries, and `each` more for each further `group` of the b matrices.
template <typename Real>
__global__ void __launch_bounds__(THREADS, 1)
    factor_queries(const double *total, const double *second, double count, double each, int group,
                   const double *key_total, double keys, int d, double jitter, double rounding, Real *root, Real *query,
                   Real *origin, bool *sound) {
    DYNAMIC_SHARED(memory);
    __shared__ double reduced[THREADS];
    const int pitch = d | 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long item = blockIdx.x, size = (long long)d * d;
    count += each * (blockIdx.x / group);
    double *const A = (double *)memory, *const mean = A + d * pitch;
    const double *const from = second + item * size;
    for (int i = threadIdx.x; i < d; i += THREADS) {
        mean[i] = total[item * d + i] / count;
        query[item * d + i] = (Real)mean[i];
        if (key_total) origin[item * d + i] = (Real)(key_total[item * d + i] / keys);
    }
    __syncthreads();
    double infinite = 0, spread = 0, square = 0;
    for (int i = warp; i < d; i += WARPS)
        for (int j = lane; j < d; j += 32) {
            const double x = from[(long long)i * d + j] / count, y = x - mean[i] * mean[j];
            if (!is_finite(y)) infinite = 1;
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
    if (threadIdx.x == 0) sound[item] = !lost, sound[gridDim.x + item] = !failed;
}
