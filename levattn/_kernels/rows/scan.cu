// What a pass over the keys tells of their columns and rows.

#include "keys.cuh"

namespace {

constexpr int THREADS = 256;

}  // namespace

// Sums of the columns of a block of rows, or if `largest` their largest magnitudes: to `partial` (b, blocks, d).
//
// The grid is (blocks, columns / THREADS rounded up, matrices of this launch); `before` matrices come before these.
template <typename Key, bool largest>
__global__ void __launch_bounds__(THREADS)
    scan_columns(KEY_PARAMETERS, long long n, long long before, int block_rows, double *partial) {
    const Reader<Key> reader KEY_READER;
    const int place = blockIdx.y * THREADS + threadIdx.x;
    if (place >= d) return;
    const long long item = before + blockIdx.z;
    const Column<Key> column(reader, item, place);
    const long long start = (long long)blockIdx.x * block_rows, stop = min(start + block_rows, n);
    double found = 0;
    for (long long row = start; row < stop; ++row) {
        const double x = column.template read<double>(row);
        if (!largest) found += x;
        else if (found == found && !(fabs(x) <= found)) found = fabs(x);  // NaN is taken over, and stays
    }
    partial[(item * gridDim.x + blockIdx.x) * d + place] = found;
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
        bad = bad || !(fabs(x) <= 1.7976931348623157e308);
    }
    const bool any = __any_sync(0xffffffffu, bad);
    if (lane == 0) out[row] = any;
}
