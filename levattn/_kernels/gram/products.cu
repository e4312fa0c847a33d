// Rows times a matrix: squared norms of the products, which are not written, and the products themselves.

#include "keys.cuh"
#include "tile.cuh"

// ‖k W‖² of the rows of the matrices `items` (slots,), at most `ceiling`, to `out[item * out_stride + row]`.
//
// W is (slots, d, width); if `triangular`, entries below its diagonal are taken to be zero. Products are summed in the
// precision Real. The grid is (tiles of rows, slots of this launch); `before` slots come before these.
template <typename Key, typename Real, typename Score>
__global__ void __launch_bounds__(THREADS, 2)
    square_rows(KEY_PARAMETERS, long long n, const long long *items, long long before, const double *W, int width,
                bool triangular, double ceiling, Score *out, long long out_stride) {
    __shared__ Quad<Real> keys_there[STAGE][SIDE], right[STAGE][SIDE];
    const Reader<Key> reader KEY_READER;
    const long long slot = before + blockIdx.y, item = items[slot];
    const long long start = (long long)blockIdx.x * TILE;
    const double *const matrix = W + slot * d * width;
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    Real squares[EACH] = {};
    for (int column = 0; column < width; column += TILE) {
        Real sums[EACH][EACH] = {};
        const int depth = triangular ? min(d, column + TILE) : d;
        for (int low = 0; low < depth; low += STAGE) {
            __syncthreads();
            for (int i = 0; i < LOADS; ++i) {
                const int at = threadIdx.x + i * THREADS;
                const int r = at / STAGE, k = low + at % STAGE;  // keys lie column by column
                const bool there = start + r < n && k < d;
                keys_there[at % STAGE][r / EACH].entry[r % EACH] =
                    there ? reader.template read<Real>(item, start + r, k) : (Real)0;
                const int c = column + at % TILE, l = low + at / TILE;
                const bool kept = c < width && l < d && !(triangular && l > c);
                right[at / TILE][at % TILE / EACH].entry[at % EACH] =
                    kept ? (Real)matrix[(long long)l * width + c] : (Real)0;
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < STAGE; ++k) add_products(keys_there[k][y], right[k][x], sums);
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int j = 0; j < EACH; ++j) squares[i] = fma(sums[i][j], sums[i][j], squares[i]);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        Real total = squares[i];
        for (int lane = SIDE / 2; lane; lane /= 2) total += __shfl_xor_sync(0xffffffffu, total, lane);
        const long long row = start + y * EACH + i;
        if (x == 0 && row < n) out[item * out_stride + row] = (Score)((double)total > ceiling ? ceiling : (double)total);
    }
}

// Rows of one matrix times an upper-triangular `basis` (d, d), to `out` (rows, d); each product rounded about once if
// `exact`: error-free products, summed up with their errors.
template <typename Key, bool exact>
__global__ void __launch_bounds__(THREADS)
    rows_in_basis(KEY_PARAMETERS, long long n, long long item, long long start, const double *basis, double *out) {
    const Reader<Key> reader KEY_READER;
    const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n * d) return;
    const long long row = at / d;
    const int column = (int)(at % d);
    double total = 0, low = 0;
    for (int k = 0; k <= column; ++k) {
        const double a = reader.template read<double>(item, start + row, k), b = basis[(long long)k * d + column];
        if (!exact) {
            total = fma(a, b, total);
            continue;
        }
        const double product = a * b, error = fma(a, b, -product);
        const double sum = total + product, part = sum - total;
        low += ((total - (sum - part)) + (product - part)) + error;
        total = sum;
    }
    out[at] = total + low;
}
