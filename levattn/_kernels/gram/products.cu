// Rows times a matrix: squared norms of the products, which are not written, and the products themselves.

#include "keys.cuh"
#include "copies.cuh"
#include "mma.cuh"
#include "fragments.cuh"

namespace {

constexpr int THREADS = 256;  // of eight warps, each with sixteen rows and all columns of a tile
constexpr int ROWS = 128;     // of a block of threads
constexpr int STAGE = 16;     // coordinates of keys in shared memory at a time
constexpr int KEY_PITCH = STAGE + 4;
constexpr int LOADS = ROWS * STAGE / THREADS;
constexpr int TOGETHER = 4;  // rows of a thread, which share what it reads of a basis

// What a thread brings of a stage of keys, as it is stored: coordinate k of every sixteenth of `count` rows.
template <typename Key>
__device__ void fetch(const Reader<Key> &reader, long long item, long long start, int count, int row, int k,
                      Key (&numbers)[LOADS]) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
        numbers[i] = row + 16 * i < count && k < reader.d ? reader.stored(item, start + row + 16 * i, k) : Key{};
}

// Copy a stage of a matrix (d, width), which is there once `finish_copies` was called.
__device__ inline void bring(const double *matrix, int d, int width, bool triangular, int low, int column, double *to) {
#pragma unroll 1
    for (int at = threadIdx.x; at < STAGE * TILE; at += THREADS) {
        const int l = low + at / TILE, c = column + at % TILE;
        double *const place = to + at / TILE * PITCH + at % TILE;
        if (c < width && l < d && !(triangular && l > c)) copy_later(place, matrix + (long long)l * width + c);
        else *place = 0;
    }
}

}  // namespace

// ‖k W‖² of the rows of the matrices `items` (slots,), at most `ceiling`, to `out[item * out_stride + row]`. Without `items`
// they are all matrices in order. Where they are `packed` the keys are those of the slots, one after the other.
//
// W is (slots, d, width); if `triangular`, entries below its diagonal are taken to be zero. The grid is (tiles of rows,
// slots of this launch); `before` slots come before these.
template <typename Key, typename Score>
__global__ void __launch_bounds__(THREADS, sizeof(Key) < 8 ? 2 : 1)
    square_rows(KEY_PARAMETERS, long long n, const long long *items, long long before, const double *W, int width,
                bool triangular, double ceiling, Score *out, long long out_stride, bool packed) {
    constexpr bool AHEAD = sizeof(Key) < 8;  // there are registers for the next keys
    __shared__ double keys_there[ROWS * KEY_PITCH];
    __shared__ __align__(16) double right[2][STAGE * PITCH];
    const Reader<Key> reader KEY_READER;
    // in 32 bits, as registers would spill
    const unsigned int slot = (unsigned int)before + blockIdx.y, place = items ? (unsigned int)items[slot] : slot;
    const unsigned int item = packed ? slot : place;
    const long long start = (long long)blockIdx.x * ROWS;
    const int count = (int)min(n - start, (long long)ROWS);
    const double *const matrix = W + (unsigned long long)slot * ((unsigned int)d * width);

    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, first = threadIdx.x / 32 * 16 + g;
    const int k = threadIdx.x % STAGE, r = threadIdx.x / STAGE;
    double squares[2] = {};
    Key next[LOADS];
    int turn = 0;
    if (AHEAD) fetch(reader, item, start, count, r, k, next);
    bring(matrix, d, width, triangular, 0, 0, right[0]);
    for (int column = 0; column < width; column += TILE) {
        double sums[4][2][4] = {};
        const int depth = triangular ? min(d, column + TILE) : d;
        for (int low = 0; low < depth; low += STAGE, turn ^= 1) {
            __syncthreads();
            if (!AHEAD) fetch(reader, item, start, count, r, low + k, next);
#pragma unroll
            for (int i = 0; i < LOADS; ++i) keys_there[(r + 16 * i) * KEY_PITCH + k] = (double)widen(next[i]);
            if (!reader.plain() && low + k < d) {  // one at a time, because all at once would spill registers
#pragma unroll 1
                for (int row = r; row < count; row += 16) {
                    double &x = keys_there[row * KEY_PITCH + k];
                    x = reader.value(x, item, start + row, low + k);
                }
            }
            finish_copies();
            __syncthreads();
            const bool last = low + STAGE >= depth;
            const int next_low = last ? 0 : low + STAGE, next_column = last ? column + TILE : column;
            if (next_column < width) {
                if (AHEAD) fetch(reader, item, start, count, r, next_low + k, next);
                bring(matrix, d, width, triangular, next_low, next_column, right[turn ^ 1]);
            }
            double a[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) a[i] = keys_there[(first + i % 2 * 8) * KEY_PITCH + t + i / 2 * 4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (column + 16 * j >= width || (triangular && low >= column + 16 * (j + 1))) continue;
                double b[8];
                load_columns(b, right[turn], 16 * j);
                add_products(sums[j], a, b);
            }
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const double sum = sums[i / 8][i / 4 % 2][i % 4];
            squares[i % 4 / 2] = fma(sum, sum, squares[i % 4 / 2]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        double total = squares[i];
        for (int far = 1; far < 4; far *= 2) total += __shfl_xor_sync(0xffffffffu, total, far);
        const int row = first + 8 * i;
        if (t == 0 && row < count) out[place * out_stride + start + row] = (Score)(total > ceiling ? ceiling : total);
    }
}

// Rows of matrices times an upper-triangular basis (d, d) of each; every product rounded about once if `exact`: error-free
// products, summed up with their errors.
//
// `pieces` (count, 4) are slot, item, first row, row after the last; `packed` those of the products in `out` (rows, d), which
// begin at multiples of TOGETHER. A thread has one column of as many rows, of all up to the last of `packed`.
template <typename Key, bool exact>
__global__ void __launch_bounds__(THREADS)
    rows_in_basis(KEY_PARAMETERS, const long long *pieces, const long long *packed, int count, const double *bases,
                  double *out) {
    const Reader<Key> reader KEY_READER;
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x, place = at / d * TOGETHER;
    const int column = (int)(at % d);
    if (place >= packed[4 * count - 1]) return;
    int piece = 0;
    for (int high = count; high - piece > 1;) {  // to the last one that begins here or before
        const int middle = (piece + high) / 2;
        if (packed[4 * middle + 2] <= place) piece = middle;
        else high = middle;
    }
    const long long begin = packed[4 * piece + 2], item = pieces[4 * piece + 1];
    const long long row = pieces[4 * piece + 2] + place - begin;
    const int there = (int)min(packed[4 * piece + 3] - place, (long long)TOGETHER);
    const double *const basis = bases + pieces[4 * piece] * d * d;
    double total[TOGETHER] = {}, low[TOGETHER] = {};
    for (int k = 0; k <= column; ++k) {
        const double b = basis[(long long)k * d + column];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const double a = reader.template read<double>(item, row + min(i, there - 1), k);
            if (!exact) {
                total[i] = fma(a, b, total[i]);
                continue;
            }
            const double product = a * b, error = fma(a, b, -product);
            const double sum = total[i] + product, part = sum - total[i];
            low[i] += ((total[i] - (sum - part)) + (product - part)) + error;
            if (shift) low[i] += reader.rest(item, row + min(i, there - 1), k) * b;
            total[i] = sum;
        }
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i)
        if (i < there) out[(place + i) * d + column] = total[i] + low[i];
}
