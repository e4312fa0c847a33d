// What a pass over the keys tells of their columns and rows.

#include "finite.cuh"
#include "keys.cuh"

namespace {

constexpr int THREADS = 256;

}  // namespace

// Sums of the columns of a block of rows, or if `largest` their largest magnitudes: to `partial` (b, blocks, d).
//
// Of `together` threads, a power of two of at least 32, each has a column; others have the same columns of other rows, and
// what they find is combined in pairs. The grid is (blocks, columns / together rounded up, matrices of this launch);
// `before` matrices come before these.
template <typename Key, bool largest>
__global__ void __launch_bounds__(THREADS)
    scan_columns(KEY_PARAMETERS, long long n, long long before, int block_rows, int together, double *partial) {
    __shared__ double found[THREADS];
    const Reader<Key> reader KEY_READER;
    const int place = blockIdx.y * together + threadIdx.x % together, apart = THREADS / together;
    const long long item = before + blockIdx.z;
    const long long start = (long long)blockIdx.x * block_rows, stop = min(start + block_rows, n);
    // NaN is taken over, and stays
    const auto combined = [](double a, double b) { return !largest ? a + b : a != a || b <= a ? a : b; };
    double mine = 0;
#pragma unroll 4
    for (long long row = start + threadIdx.x / together; row < stop; row += apart) {
        const double x = place < d ? reader.template read<double>(item, row, place) : 0;
        mine = combined(mine, largest ? fabs(x) : x);
    }
    found[threadIdx.x] = mine;
    for (int step = THREADS / 2; step >= together; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) found[threadIdx.x] = combined(found[threadIdx.x], found[threadIdx.x + step]);
    }
    if (threadIdx.x < together && place < d)
        partial[(item * gridDim.x + blockIdx.x) * d + place] = found[threadIdx.x];
}

// Sums of the columns of a block of rows less an origin (b, d), as pairs of numbers: to `high` and `low` (b, blocks, d).
//
// Threads and the grid are as in `scan_columns`.
template <typename Key>
__global__ void __launch_bounds__(THREADS)
    sum_apart(KEY_PARAMETERS, long long n, long long before, int block_rows, int together, const double *origin,
              double *high, double *low) {
    __shared__ double sums[THREADS], rests[THREADS];
    const Reader<Key> reader KEY_READER;
    const int place = blockIdx.y * together + threadIdx.x % together, apart = THREADS / together;
    const long long item = before + blockIdx.z;
    const Column<Key> column(reader, item, place);
    const long long start = (long long)blockIdx.x * block_rows, stop = min(start + block_rows, n);
    const double from = place < d ? origin[item * d + place] : 0;
    double sum = 0, rest = 0;
    for (long long row = start + threadIdx.x / together; row < stop; row += apart) {
        if (!reader.takes_part(item, row)) continue;
        double lost, more;
        const double x = add_exactly(column.template read<double>(row), -from, lost);
        sum = add_exactly(sum, x, more);
        rest += more + lost;
    }
    sums[threadIdx.x] = sum, rests[threadIdx.x] = rest;
    for (int step = THREADS / 2; step >= together; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) {
            double more;
            sums[threadIdx.x] = add_exactly(sums[threadIdx.x], sums[threadIdx.x + step], more);
            rests[threadIdx.x] += rests[threadIdx.x + step] + more;
        }
    }
    if (threadIdx.x < together && place < d) {
        const long long to = (item * gridDim.x + blockIdx.x) * d + place;
        high[to] = sums[threadIdx.x], low[to] = rests[threadIdx.x];
    }
}

// Which rows of one matrix hold NaN or infinity, and are not masked: 1 in `out` (n,).
template <typename Key>
__global__ void __launch_bounds__(THREADS) find_nonfinite(KEY_PARAMETERS, long long n, long long item, unsigned char *out) {
    const Reader<Key> reader KEY_READER;
    const int lane = threadIdx.x % 32;
    const long long row = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (row >= n) return;
    bool bad = false;
    for (int column = lane; column < d; column += 32) {
        const double x = reader.template read<double>(item, row, column);
        bad = bad || !is_finite(x);
    }
    const bool any = __any_sync(0xffffffffu, bad);
    if (lane == 0) out[row] = any;
}
