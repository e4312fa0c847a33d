// Second moments: sums of k kᵀ over blocks of rows, and of those over pieces, in the one order of the library.

#include "keys.cuh"
#include "blocks.cuh"
#include "shared.cuh"
#include "mma.cuh"
#include "fragments.cuh"

namespace {

constexpr int THREADS = 128;             // of two pairs of warps; a pair sums up every other sixteen rows
constexpr int STAGE = 32;                // rows in shared memory at a time
constexpr int RUN = 4 * STAGE;           // rows, 64 of each pair, whose sums are added to others then
constexpr int APART = THREADS / TILE;    // of the rows of a stage, a thread brings one column of every such
constexpr int LOADS = STAGE / APART;
constexpr int SUMS = 64;                 // of a thread

constexpr int ADDERS = 512;  // threads that add up blocks
constexpr int FEW = 8;       // blocks that one of them adds up at a time

// What a thread brings of a stage, as it is stored: one column of `count` rows.
template <typename Key>
__device__ void fetch(const Reader<Key> &reader, long long item, long long start, int count, int column,
                      Key (&numbers)[LOADS]) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
        numbers[i] = i * APART < count && column < reader.d ? reader.stored(item, start + i * APART, column) : Key{};
}

template <typename Key>
__device__ void put(const Reader<Key> &reader, long long item, long long start, int count, int column,
                    const Key (&numbers)[LOADS], double *to) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const bool there = i * APART < count && column < reader.d;
        to[i * APART * PITCH] = there ? reader.template value<true>(numbers[i], item, start + i * APART, column) : 0;
    }
}

// Sums that come in order, combined like the bits of a binary counter.
template <int LEVELS>
struct Counter {
    double levels[LEVELS];
    long long count = 0;

    __device__ void add(double sum) {
        int level = 0;
        for (; count >> level & 1; ++level) sum = levels[level] + sum;
        levels[level] = sum;
        ++count;
    }

    // Add what is left to the sum of what comes after, if there is any, from the lowest level upward.
    __device__ void finish(double &total, bool &begun) const {
        for (int level = 0; level < LEVELS; ++level)
            if (count >> level & 1) {
                total = begun ? levels[level] + total : levels[level];
                begun = true;
            }
    }
};

}  // namespace

// One block of rows and one tile of the upper triangle of its moment: to `partial`, (blocks, d, d). The grid is
// (blocks times tiles of the upper triangle), those of a block next to each other.
//
// A warp has sixteen rows of the tile above, and sixteen below, with all columns: on the diagonal each of them has as much of
// the triangle as the others.
template <typename Key>
__global__ void __launch_bounds__(THREADS, 2)
    moment_blocks(KEY_PARAMETERS, const long long *pieces, const long long *firsts, int count, long long whole,
                   int block_rows, double *partial) {
    constexpr bool AHEAD = sizeof(Key) < 8;  // there are registers for the next rows
    DYNAMIC_SHARED(shared);
    double *const left = (double *)shared, *const right = left + STAGE * PITCH, *const totals = right + STAGE * PITCH;
    const Reader<Key> reader KEY_READER;

    int tiles = (d + TILE - 1) / TILE;
    const int triangle = tiles * (tiles + 1) / 2;
    const long long number = blockIdx.x / triangle;
    const Block block(pieces, firsts, count, whole, number, block_rows);
    const int rows = (int)(block.stop - block.start);
    int down = 0, across = blockIdx.x % triangle;  // row and column of the tile among those of the upper triangle
    while (across >= tiles - down) across -= tiles - down++;
    across = (across + down) * TILE;
    down *= TILE;
    const bool diagonal = down == across;

    const int pair = threadIdx.x / 64, mine = threadIdx.x % 64;
    const auto row_of = [&](int m) { return m ? 48 - mine / 32 * 16 : mine / 32 * 16; };
    unsigned int needed = 0;  // which sixteen columns of each sixteen rows
    for (int m = 0; m < 2; ++m)
        for (int j = 0; j < 4; ++j)
            if (down + row_of(m) < d && across + 16 * j < d && (!diagonal || 16 * j >= row_of(m))) needed |= 1u << (4 * m + j);

    double sums[2][4][2][4] = {};
    const int r = threadIdx.x / TILE, c = threadIdx.x % TILE, there = rows - r;
    const long long start = block.start + r;
    double *const to_left = left + r * PITCH + c, *const to_right = right + r * PITCH + c;
    Key next_left[LOADS], next_right[LOADS];
    if (AHEAD) {
        fetch(reader, block.item, start, there, down + c, next_left);
        if (!diagonal) fetch(reader, block.item, start, there, across + c, next_right);
    }
    for (int i = threadIdx.x; i < SUMS * 64; i += THREADS) totals[i] = 0;
    for (int row = 0; row < rows; row += STAGE) {
        __syncthreads();
        if (!AHEAD) fetch(reader, block.item, start + row, there - row, down + c, next_left);
        put(reader, block.item, start + row, there - row, down + c, next_left, to_left);
        if (!diagonal) {
            if (!AHEAD) fetch(reader, block.item, start + row, there - row, across + c, next_right);
            put(reader, block.item, start + row, there - row, across + c, next_right, to_right);
        }
        __syncthreads();
        if (AHEAD) {
            const int next = row + STAGE;
            fetch(reader, block.item, start + next, there - next, down + c, next_left);
            if (!diagonal) fetch(reader, block.item, start + next, there - next, across + c, next_right);
        }
        const double *const downs = left + pair * 16 * PITCH, *const acrosses = diagonal ? downs : right + pair * 16 * PITCH;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            double a[8];
            load_columns(a, downs, row_of(m));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (!(needed >> (4 * m + j) & 1)) continue;
                double b[8];
                load_columns(b, acrosses, 16 * j);
                add_products(sums[m][j], a, b);
            }
        }
        if ((row + STAGE) % RUN != 0 && row + STAGE < rows) continue;
        for (int turn = 0; turn < 2; ++turn) {
            if (turn) __syncthreads();
            if (pair != turn) continue;
#pragma unroll
            for (int i = 0; i < SUMS; ++i) {
                if (!(needed >> i / 8 & 1)) continue;
                double &sum = sums[i / 32][i / 8 % 4][i / 4 % 2][i % 4];
                totals[i * 64 + mine] += sum;
                sum = 0;
            }
        }
    }
    __syncthreads();
    double *const out = partial + number * d * d;
    const int g = threadIdx.x % 32 / 4;
#pragma unroll 1
    for (int i = pair; i < SUMS; i += 2) {
        const int r = down + row_of(i / 32) + 2 * g + i % 4 / 2, c = across + i / 8 % 4 * 16 + column_of(i / 4 % 2, i % 4);
        if (r <= c && c < d) out[(long long)r * d + c] = totals[i * 64 + mine];
    }
}

// Sum up the blocks of each piece in pairs, pairs of pairs, and so on: to `out` (pieces, d, d), both triangles. The grid is
// (pieces times as many blocks of threads as take all entries of a matrix). Without `firsts` each piece has `each` blocks.
//
// `parts` threads, a power of two, share an entry; each adds up FEW blocks, and they add up their sums in pairs.
__global__ void __launch_bounds__(ADDERS)
    add_blocks(const double *partial, const long long *firsts, int each, int d, int parts, double *out) {
    __shared__ double sums[ADDERS];
    const int lanes = ADDERS / parts, lane = threadIdx.x % lanes, part = threadIdx.x / lanes;
    const unsigned int size = (unsigned int)d * d, groups = (size + lanes - 1) / lanes;
    const unsigned int piece = blockIdx.x / groups, low = blockIdx.x % groups * lanes, high = min(low + lanes, size) - 1;
    if (low / d == high / d && high % d < low / d) return;  // all below the diagonal
    const unsigned int at = low + lane, r = at / d, c = at % d;
    const bool there = at < size && r <= c;
    const long long first = firsts ? firsts[piece] : (long long)piece * each;
    const int blocks = firsts ? (int)(firsts[piece + 1] - first) : each;
    const double *const from = partial + first * size + at;
    Counter<40> whole;
    double total = 0;
    bool begun = false;
    for (int block = 0; block < blocks; block += parts * FEW) {
        const int mine = block + part * FEW;
        double sum = 0;
        if (there && mine + FEW <= blocks) {
            double x[FEW];
#pragma unroll
            for (int i = 0; i < FEW; ++i) x[i] = from[(long long)(mine + i) * size];
#pragma unroll
            for (int step = 1; step < FEW; step *= 2)
#pragma unroll
                for (int i = 0; i < FEW; i += 2 * step) x[i] += x[i + step];
            sum = x[0];
        } else if (there && mine < blocks) {
            Counter<3> counter;
            for (int i = mine; i < blocks; ++i) counter.add(from[(long long)i * size]);
            bool some = false;
            counter.finish(sum, some);
        }
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (block + parts * FEW <= blocks) {
            for (int step = 1; step < parts; step *= 2) {
                if (part % (2 * step) == 0) sums[threadIdx.x] += sums[threadIdx.x + step * lanes];
                __syncthreads();
            }
            if (part == 0) whole.add(sums[lane]);
        } else if (part == 0) {
            const int full = (blocks - block) / FEW;
            Counter<4> counter;
            for (int i = 0; i < full; ++i) counter.add(sums[i * lanes + lane]);
            begun = (blocks - block) % FEW != 0;
            if (begun) total = sums[full * lanes + lane];
            counter.finish(total, begun);
        }
    }
    if (part != 0 || !there) return;
    whole.finish(total, begun);
    double *const moment = out + (long long)piece * size;
    moment[at] = moment[c * d + r] = total;
}

// How uneven the directions of `rows` rows of each matrix are, by the upper triangles of their moments (items, d, d): to
// `uneven` (items,), after which there is room for items · d numbers. With columns scaled to unit norm and the moment C it
// is ‖C‖²/d − d/rows; a column of zeros has no weight. The grid is (items,).
__global__ void __launch_bounds__(ADDERS)
    measure_unevenness(const double *moments, int d, double rows, double *uneven) {
    __shared__ double sums[ADDERS];
    double *const inverse = uneven + gridDim.x + (long long)blockIdx.x * d;  // of the squares of the columns
    const double *const G = moments + (long long)blockIdx.x * d * d;
    for (int i = threadIdx.x; i < d; i += ADDERS) {
        const double square = G[(long long)i * d + i];
        inverse[i] = square == 0 ? 0.0 : 1.0 / square;
    }
    __syncthreads();
    double mine = 0;
    for (int i = threadIdx.x / 32; i < d; i += ADDERS / 32)
        for (int j = i + threadIdx.x % 32; j < d; j += 32) {
            const double entry = G[(long long)i * d + j], part = entry * entry * inverse[j] * inverse[i];
            mine += i == j ? part : 2 * part;
        }
    sums[threadIdx.x] = mine;
    for (int half = ADDERS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) uneven[blockIdx.x] = sums[0] / d - d / rows;
}
