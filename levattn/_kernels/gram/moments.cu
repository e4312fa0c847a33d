// Second moments: sums of k kᵀ over blocks of rows, and of those over pieces, in the one order of the library.

#include "keys.cuh"
#include "blocks.cuh"
#include "tile.cuh"

namespace {

constexpr int APART = THREADS / TILE;
constexpr int RUN = 64;     // rows whose sum is of type Real before it is added to one of doubles
constexpr int LEVELS = 48;  // of a binary counter of blocks

// The entries of a stage that a thread brings: those of one column, in every APART-th row.
template <typename Key, typename Real>
__device__ void fetch(const Column<Key> &column, long long row, long long stop, Real *out) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) out[i] = row + i * APART < stop ? column.template read<Real>(row + i * APART) : (Real)0;
}

}  // namespace

// One block of rows and one tile of the upper triangle of its moment: to `partial`, (blocks, d, d).
// The grid is (blocks, tiles of the upper triangle).
template <typename Key, typename Real>
__global__ void __launch_bounds__(THREADS, 2)
    moment_blocks(KEY_PARAMETERS, const long long *pieces, const long long *firsts, int count, int block_rows,
                   double *partial) {
    __shared__ Quad<Real> left[STAGE][SIDE], right[STAGE][SIDE];
    const Reader<Key> reader KEY_READER;

    const Block block(pieces, firsts, count, blockIdx.x, block_rows);
    const long long item = block.item, start = block.start, stop = block.stop;

    int down = 0, across = blockIdx.y;  // row and column of the tile among those of the upper triangle
    const int tiles = (d + TILE - 1) / TILE;
    while (across >= tiles - down) across -= tiles - down++;
    across += down;

    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    Real sums[EACH][EACH] = {};
    double totals[EACH][EACH] = {};
    Real next_left[LOADS], next_right[LOADS];
    const int r = threadIdx.x / TILE, c = threadIdx.x % TILE;
    const Column<Key> from_left(reader, item, down * TILE + c), from_right(reader, item, across * TILE + c);
    fetch(from_left, start + r, stop, next_left);
    fetch(from_right, start + r, stop, next_right);
    for (long long row = start; row < stop; row += STAGE) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            left[r + i * APART][c / EACH].entry[c % EACH] = next_left[i];
            right[r + i * APART][c / EACH].entry[c % EACH] = next_right[i];
        }
        __syncthreads();
        if (row + STAGE < stop) {
            fetch(from_left, row + STAGE + r, stop, next_left);
            fetch(from_right, row + STAGE + r, stop, next_right);
        }
#pragma unroll 4
        for (int k = 0; k < STAGE; ++k) add_products(left[k][y], right[k][x], sums);
        if (sizeof(Real) < sizeof(double) && ((row + STAGE - start) % RUN == 0 || row + STAGE >= stop))
#pragma unroll
            for (int i = 0; i < EACH; ++i)
#pragma unroll
                for (int j = 0; j < EACH; ++j) {
                    totals[i][j] += (double)sums[i][j];
                    sums[i][j] = 0;
                }
    }
    double *const out = partial + (long long)blockIdx.x * d * d;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int r = down * TILE + y * EACH + i, c = across * TILE + x * EACH + j;
            if (r <= c && c < d)
                out[(long long)r * d + c] = sizeof(Real) < sizeof(double) ? totals[i][j] : (double)sums[i][j];
        }
}

// Sum up the blocks of each piece in pairs, pairs of pairs, and so on: to `out` (pieces, d, d), both triangles.
__global__ void __launch_bounds__(THREADS)
    add_blocks(const double *partial, const long long *firsts, long long pieces, int d, double *out) {
    const long long size = (long long)d * d;
    const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= pieces * size) return;
    const long long piece = at / size;
    const int r = (int)(at % size / d), c = (int)(at % d);
    if (r > c) return;
    const double *const from = partial + (long long)r * d + c;
    double levels[LEVELS];
    const long long first = firsts[piece], blocks = firsts[piece + 1] - first;
    for (long long i = 0; i < blocks; ++i) {
        double sum = from[(first + i) * size];
        int level = 0;
        for (; i >> level & 1; ++level) sum = levels[level] + sum;
        levels[level] = sum;
    }
    double total = 0;
    bool begun = false;
    for (int level = 0; level < LEVELS; ++level)
        if (blocks >> level & 1) {
            total = begun ? levels[level] + total : levels[level];
            begun = true;
        }
    out[piece * size + (long long)r * d + c] = total;
    out[piece * size + (long long)c * d + r] = total;
}
