// Random sketches: sparse ones, dense ones, subsampled Hadamard transforms.
//
// Most sums are of parts of the rows first, each of which has a sketch of its own, and then of those in one order.

#include "keys.cuh"
#include "philox.cuh"
#include "shared.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int TILE = 4096;                // rows that a block of threads puts in order
constexpr int STEPS = TILE / THREADS;     // rows of a tile for each thread
constexpr int DEPTH = 4;                  // rows that a thread reads before it adds them up
constexpr int GROUP = 16;                 // parts that are added at a time
constexpr int SIDE = 64, EACH = 4, STAGE = 16;  // of a tile of a product, of what a thread has of it, rows at a time
constexpr int FLIPS = 1024;               // signs that are drawn at a time for the rows of a transform

template <typename Key>
struct alignas(16) Pack {
    Key of[16 / sizeof(Key)];
};

// Calls take(row, 2 * place + (1 for the sign -1)) for some rows, whose numbers begin at `number`.
template <typename Take>
__device__ void draw_places(unsigned long long seed, unsigned int stream, unsigned int block, unsigned int size,
                            long long number, int count, const Take &take) {
    const long long group = number / PHILOX_GROUP;
    const int skipped = (int)(number % PHILOX_GROUP);
    for (int g = threadIdx.x; g * PHILOX_GROUP < skipped + count; g += THREADS) {
        const Words drawn = draw_words(seed, stream, group + g, block);
#pragma unroll
        for (int j = 0; j < PHILOX_GROUP; ++j) {
            const int row = g * PHILOX_GROUP + j - skipped;
            if (row >= 0 && row < count) take(row, below(drawn.of[j], size) << 1 | (drawn.of[j] & 1));
        }
    }
}

// The rows that a block of threads puts in order: some of those of a part of `span` rows, for a block of the sketch.
struct Tile {
    long long unit;  // (part, block)
    int tile, block, row, count;
    long long at;  // of its first row among all parts and blocks, which have their rows next to each other

    __device__ Tile(int n, int blocks, int span, int tiles)
        : unit(blockIdx.x / tiles), tile(blockIdx.x % tiles), block((int)(unit % blocks)) {
        const long long first = unit / blocks * span;
        const int rows = (int)min((long long)span, n - first), low = tile * TILE;
        row = (int)first + low;
        count = min(max(rows - low, 0), TILE);
        at = first * blocks + (long long)block * rows + low;
    }

    // Where the rows of this tile that have a digit are counted: by unit, digit and tile.
    __device__ long long place(int digits, int digit, int tiles) const {
        return (unit * digits + digit) * tiles + tile;
    }
};

}  // namespace

// How many rows of each tile have each digit of their place: to `counts`, after a zero.
//
// Places are drawn, or read from `places` where that is given. The grid is (parts * blocks * tiles).
__global__ void __launch_bounds__(THREADS)
    count_digits(unsigned long long seed, unsigned int stream, long long offset, int n, int blocks, int size, int span,
                 int tiles, int shift, int bits, int digits, const unsigned int *places, int *counts) {
    DYNAMIC_SHARED(bytes);
    int *const counted = (int *)bytes;  // (digits,)
    const Tile tile(n, blocks, span, tiles);
    const unsigned int mask = (1u << bits) - 1;
    for (int digit = threadIdx.x; digit < digits; digit += THREADS) counted[digit] = 0;
    __syncthreads();
    const auto take = [&](int, unsigned int place) { atomicAdd(counted + (place >> 1 >> shift & mask), 1); };
    if (places)
        for (int i = threadIdx.x; i < tile.count; i += THREADS) take(i, places[tile.at + i]);
    else
        draw_places(seed, stream, tile.block, size, offset + tile.row, tile.count, take);
    __syncthreads();
    for (int digit = threadIdx.x; digit < digits; digit += THREADS)
        counts[1 + tile.place(digits, digit, tiles)] = counted[digit];
    if (blockIdx.x == 0 && threadIdx.x == 0) counts[0] = 0;
}

// Put the rows of each unit into the order of a digit of their places, and those of one digit in the order they had.
//
// `firsts` is where the rows of a unit, digit and tile begin. A row is 2 * row + (1 for the sign -1), a place is twice
// that and the same. Drawn places are read from `places`, and the rows from `rows`, unless they are not given; what
// is put in order goes to `placed` (if it is given) and `ordered`. The grid is (parts * blocks * tiles).
__global__ void __launch_bounds__(THREADS)
    move_rows(unsigned long long seed, unsigned int stream, long long offset, int n, int blocks, int size, int span,
              int tiles, int shift, int bits, int digits, const unsigned int *places, const unsigned int *rows,
              const int *firsts, unsigned int *placed, unsigned int *ordered) {
    DYNAMIC_SHARED(bytes);
    unsigned int *const held = (unsigned int *)bytes;                  // (TILE,)
    unsigned short *const counted = (unsigned short *)(held + TILE);  // (WARPS, digits)
    const Tile tile(n, blocks, span, tiles);
    const unsigned int mask = (1u << bits) - 1;
    for (int i = threadIdx.x; i < WARPS * digits; i += THREADS) counted[i] = 0;
    const auto take = [&](int row, unsigned int place) { held[row] = place; };
    if (places)
        for (int i = threadIdx.x; i < tile.count; i += THREADS) take(i, places[tile.at + i]);
    else
        draw_places(seed, stream, tile.block, size, offset + tile.row, tile.count, take);
    __syncthreads();

    const int lane = threadIdx.x % 32, begin = threadIdx.x / 32 * STEPS * 32;
    unsigned short *const mine = counted + threadIdx.x / 32 * digits;
    unsigned short ranks[STEPS];  // among the rows of the same digit of this warp
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int i = begin + step * 32 + lane;
        ranks[step] = 0;
        if (begin + step * 32 >= tile.count) continue;
        const bool present = i < tile.count;
        const unsigned int digit = present ? held[i] >> 1 >> shift & mask : 0;
        unsigned int peers = __ballot_sync(0xffffffffu, present);
        for (int bit = 0; bit < bits; ++bit) {
            const unsigned int votes = __ballot_sync(0xffffffffu, digit >> bit & 1);
            peers &= digit >> bit & 1 ? votes : ~votes;
        }
        const int before = __popc(peers & ((1u << lane) - 1));
        ranks[step] = (unsigned short)(mine[digit] + before);
        __syncwarp();
        if (present && before == 0) mine[digit] += (unsigned short)__popc(peers);
        __syncwarp();
    }
    __syncthreads();
    for (int digit = threadIdx.x; digit < digits; digit += THREADS) {
        unsigned short total = 0;
        for (int warp = 0; warp < WARPS; ++warp) {
            const unsigned short count = counted[warp * digits + digit];
            counted[warp * digits + digit] = total;
            total += count;
        }
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int i = begin + step * 32 + lane;
        if (i >= tile.count) continue;
        const unsigned int place = held[i];
        const int digit = place >> 1 >> shift & mask;
        const long long to = (long long)firsts[tile.place(digits, digit, tiles)] + mine[digit] + ranks[step];
        ordered[to] = rows ? rows[tile.at + i] : (unsigned int)(tile.row + i) << 1 | (place & 1);
        if (placed) placed[to] = place;
    }
}

// Where the rows of each place begin: to `starts` (parts * blocks * size + 1,), by search in places in order.
__global__ void __launch_bounds__(THREADS)
    find_starts(const unsigned int *places, int n, int blocks, int size, int span, long long runs, int *starts) {
    const long long run = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (run > runs) return;
    const long long unit = run / size, first = unit / blocks * span;
    const int rows = (int)min((long long)span, max(n - first, 0ll));
    long long low = run < runs ? first * blocks + unit % blocks * rows : (long long)n * blocks;
    long long high = run < runs ? low + rows : low;
    const unsigned int place = (unsigned int)(run % size);
    while (low < high) {
        const long long middle = (low + high) / 2;
        if (places[middle] >> 1 < place) low = middle + 1;
        else high = middle;
    }
    starts[run] = (int)low;
}

// Sums of the rows of each run, which lie in order from starts[run * step] to starts[(run + 1) * step].
//
// They are written to `out` (parts, items, buckets, d) for the runs (part, bucket), or if `add` added to it. A run
// takes 1 << log_lanes threads, and each of these 16 bytes of a row. The grid is (runs, tiles of columns, items), the
// last perhaps cut short.
template <typename Key, typename Sum>
__global__ void __launch_bounds__(THREADS, 3)
    sum_runs(KEY_PARAMETERS, long long items, const unsigned int *ordered, const int *starts, int step,
             unsigned int runs, unsigned int buckets, int log_lanes, bool add, Sum *out) {
    constexpr int WIDTH = 16 / sizeof(Key);
    const Reader<Key> reader KEY_READER;
    const unsigned int run = (unsigned int)(((unsigned long long)blockIdx.x * THREADS + threadIdx.x) >> log_lanes);
    const int lane = threadIdx.x & ((1 << log_lanes) - 1);
    const int column = (int)(blockIdx.y << log_lanes | lane) * WIDTH;
    if (run >= runs || column >= d) return;
    const int start = starts[(long long)run * step], stop = starts[(long long)(run + 1) * step];
    if (add && start == stop) return;
    const bool packed = !shift && !scale && !weights && column + WIDTH <= d && column_stride == 1 &&
                        ((unsigned long long)keys | item_stride * sizeof(Key) | row_stride * sizeof(Key)) % 16 == 0;
    for (long long item = blockIdx.z; item < items; item += gridDim.z) {
        Sum sums[WIDTH] = {};
        if (packed) {
            const Key *const from = keys + item * item_stride + column;
            for (int k = start; k < stop; k += DEPTH) {
                unsigned int rows[DEPTH];
                Pack<Key> packs[DEPTH];
#pragma unroll
                for (int u = 0; u < DEPTH; ++u) rows[u] = ordered[min(k + u, stop - 1)];
#pragma unroll
                for (int u = 0; u < DEPTH; ++u) packs[u] = *(const Pack<Key> *)(from + (rows[u] >> 1) * row_stride);
#pragma unroll
                for (int u = 0; u < DEPTH; ++u)
                    if (k + u < stop && reader.takes_part(item, rows[u] >> 1))
#pragma unroll
                        for (int i = 0; i < WIDTH; ++i) sums[i] += with_sign(rows[u], (Sum)widen(packs[u].of[i]));
            }
        } else {
            for (int k = start; k < stop; ++k)
#pragma unroll
                for (int i = 0; i < WIDTH; ++i)
                    if (column + i < d)
                        sums[i] += with_sign(ordered[k], reader.template read<Sum>(item, ordered[k] >> 1, column + i));
        }
        const long long part = run / buckets, bucket = run % buckets;
        Sum *const to = out + ((part * items + item) * buckets + bucket) * d + column;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            if (column + i < d) to[i] = add ? to[i] + sums[i] : sums[i];
    }
}

// Sums of each GROUP of some parts, in their order: to `out` (groups, length), or if `add` added to it.
template <typename Sum>
__global__ void __launch_bounds__(THREADS)
    add_parts(const Sum *parts, int count, long long length, bool add, Sum *out) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= length) return;
    const int first = blockIdx.y * GROUP, last = min(first + GROUP, count);
    Sum sum = parts[first * length + at];
#pragma unroll 4
    for (int part = first + 1; part < last; ++part) sum += parts[part * length + at];
    Sum *const to = out + blockIdx.y * length + at;
    *to = add ? *to + sum : sum;
}

// Entries of a dense sketch for some rows, in the precision Sum: to `S` (size, n). They are normals, or else signs.
//
// A thread draws those of four rows in two columns of words (normals) or one (signs, of which a word has 32).
template <typename Sum>
__global__ void __launch_bounds__(THREADS)
    draw_dense(unsigned long long seed, unsigned int stream, long long offset, long long n, int size, bool normal,
               Sum *S) {
    const int skipped = (int)(offset % PHILOX_GROUP);
    const long long groups = (skipped + n + PHILOX_GROUP - 1) / PHILOX_GROUP;
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    const long long group = offset / PHILOX_GROUP + at % groups, first = at % groups * PHILOX_GROUP - skipped;
    const long long left = at / groups * (normal ? 2 : 32);
    if (left >= size) return;
    const auto put = [&](int j, int column, Sum x) {
        if (first + j >= 0 && first + j < n && left + column < size) S[(left + column) * n + first + j] = x;
    };
    if (normal) {
        const Words radii = draw_words(seed, stream, group, left), angles = draw_words(seed, stream, group, left + 1);
#pragma unroll
        for (int j = 0; j < PHILOX_GROUP; ++j) {
            const double radius = sqrt(-2 * log((radii.of[j] + 0.5) * (1.0 / 4294967296)));
            const double angle = 6.283185307179586 * ((angles.of[j] + 0.5) * (1.0 / 4294967296));
            put(j, 0, (Sum)(radius * cos(angle)));
            put(j, 1, (Sum)(radius * sin(angle)));
        }
    } else {
        const Words drawn = draw_words(seed, stream, group, left / 32);
#pragma unroll
        for (int j = 0; j < PHILOX_GROUP; ++j)
            for (int bit = 0; bit < 32; ++bit) put(j, bit, with_sign(drawn.of[j] >> bit, (Sum)1));
    }
}

// S (size, n) times the rows of each part of `span` rows: to `out` (parts, items, size, d).
//
// The grid is (parts * tiles of S * tiles of columns, items), the last perhaps cut short.
template <typename Key, typename Sum>
__global__ void __launch_bounds__(THREADS, 2)
    multiply_rows(KEY_PARAMETERS, long long items, long long n, long long span, const Sum *S, int size, Sum *out) {
    __shared__ Sum left[STAGE][SIDE + 1], right[STAGE][SIDE];
    const Reader<Key> reader KEY_READER;
    const int across = (d + SIDE - 1) / SIDE, down = (size + SIDE - 1) / SIDE;
    const int tile = blockIdx.x % across * SIDE, top = blockIdx.x / across % down * SIDE;
    const long long part = blockIdx.x / across / down, start = part * span, stop = min(start + span, n);
    const int x = threadIdx.x % (SIDE / EACH), y = threadIdx.x / (SIDE / EACH);
    for (long long item = blockIdx.y; item < items; item += gridDim.y) {
        const Column<Key> column(reader, item, tile + threadIdx.x % SIDE);
        Sum sums[EACH][EACH] = {};
        for (long long row = start; row < stop; row += STAGE) {
            __syncthreads();
#pragma unroll
            for (int k = threadIdx.x / SIDE; k < STAGE; k += THREADS / SIDE)
                right[k][threadIdx.x % SIDE] = row + k < stop ? column.template read<Sum>(row + k) : (Sum)0;
#pragma unroll
            for (int i = threadIdx.x / STAGE; i < SIDE; i += THREADS / STAGE) {
                const int k = threadIdx.x % STAGE;
                left[k][i] = row + k < stop && top + i < size ? S[(top + i) * n + row + k] : (Sum)0;
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < STAGE; ++k)
#pragma unroll
                for (int i = 0; i < EACH; ++i)
#pragma unroll
                    for (int j = 0; j < EACH; ++j)
                        sums[i][j] = fma(left[k][y + i * (SIDE / EACH)], right[k][x + j * (SIDE / EACH)], sums[i][j]);
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const int r = top + y + i * (SIDE / EACH), c = tile + x + j * (SIDE / EACH);
                if (r < size && c < d) out[((part * items + item) * size + r) * d + c] = sums[i][j];
            }
    }
}

namespace {

// Hadamard transforms of RADIX rows, `half` rows apart, among the rows of X, which have 1 << log_columns columns each.
template <int RADIX, typename Sum>
__device__ void transform(Sum *X, int rows, int log_columns, int log_half) {
    const int half = 1 << log_half;
    for (int i = threadIdx.x; i < rows / RADIX << log_columns; i += THREADS) {
        const int r = i >> log_columns, column = i & ((1 << log_columns) - 1);
        Sum *const at = X + (((r >> log_half) * RADIX * half + (r & (half - 1))) << log_columns) + column;
        Sum x[RADIX];
#pragma unroll
        for (int j = 0; j < RADIX; ++j) x[j] = at[j * half << log_columns];
#pragma unroll
        for (int step = 1; step < RADIX; step *= 2)
#pragma unroll
            for (int j = 0; j < RADIX; ++j)
                if (!(j & step)) {
                    const Sum sum = x[j] + x[j + step], difference = x[j] - x[j + step];
                    x[j] = sum;
                    x[j + step] = difference;
                }
#pragma unroll
        for (int j = 0; j < RADIX; ++j) at[j * half << log_columns] = x[j];
    }
}

}  // namespace

// Add what each part, `span` blocks of 1 << log_block rows, gives to a subsampled Hadamard transform: to `out` (parts,
// items, size, d). Blocks are numbered from the row numbers; `first` is that of the first one.
//
// 1 << log_rows rows of a block are transformed at a time, and these transforms are added with signs, of which the
// transform of the block is made. `chosen` (size,) are the rows that are kept. The grid is (parts * tiles of
// 1 << log_columns columns, items), the last perhaps cut short.
template <typename Key, typename Sum>
__global__ void __launch_bounds__(THREADS, 3)
    transform_rows(KEY_PARAMETERS, long long items, long long n, unsigned long long seed, unsigned int row_stream,
                   unsigned int flip_stream, long long offset, long long first, long long blocks, long long span,
                   int log_block, int log_rows, int log_columns, const long long *chosen, int size, Sum *out) {
    DYNAMIC_SHARED(bytes);
    const int rows = 1 << log_rows, width = 1 << log_columns;
    Sum *const X = (Sum *)bytes;                                              // (rows, width)
    unsigned char *const signs = (unsigned char *)(X + (rows << log_columns));  // (rows,)
    unsigned char *const flips = signs + rows;                                // (FLIPS,)
    const Reader<Key> reader KEY_READER;
    const int tiles = (d + width - 1) >> log_columns;
    const long long part = blockIdx.x / tiles, stop = first + min((part + 1) * span, blocks);
    const int left = (int)(blockIdx.x % tiles) << log_columns;
    for (long long item = blockIdx.y; item < items; item += gridDim.y) {
        Sum *const to = out + (part * items + item) * size * d;
        for (long long number = (first + part * span) << log_block; number < stop << log_block; number += rows) {
            const long long start = number - offset;
            if (start + rows <= 0 || start >= n) continue;
            __syncthreads();
            for (int g = threadIdx.x; g * PHILOX_GROUP < rows; g += THREADS) {
                const Words drawn = draw_words(seed, row_stream, number / PHILOX_GROUP + g, 0);
                for (int j = 0; j < PHILOX_GROUP; ++j) signs[g * PHILOX_GROUP + j] = drawn.of[j] & 1;
            }
            __syncthreads();
#pragma unroll 4
            for (int i = threadIdx.x; i < rows << log_columns; i += THREADS) {
                const long long row = start + (i >> log_columns);
                const int column = left + (i & (width - 1));
                X[i] = row >= 0 && row < n && column < d
                           ? with_sign(signs[i >> log_columns], reader.template read<Sum>(item, row, column))
                           : (Sum)0;
            }
            int level = 0;
            for (; level + 3 <= log_rows; level += 3) {
                __syncthreads();
                transform<8>(X, rows, log_columns, level);
            }
            __syncthreads();
            if (log_rows - level == 2) transform<4>(X, rows, log_columns, level);
            if (log_rows - level == 1) transform<2>(X, rows, log_columns, level);

            const long long block = number >> log_block;
            const long long other = number >> log_rows & ((1ll << (log_block - log_rows)) - 1);
            for (int low = 0; low < size; low += FLIPS) {
                const int count = min(FLIPS, size - low);
                __syncthreads();
                for (int i = threadIdx.x; i < count; i += THREADS) {
                    const Words drawn = draw_words(seed, flip_stream, block / PHILOX_GROUP, low + i);
                    unsigned int word = drawn.of[0];
                    for (int j = 1; j < PHILOX_GROUP; ++j)
                        if (block % PHILOX_GROUP == j) word = drawn.of[j];
                    flips[i] = (word ^ __popcll(chosen[low + i] >> log_rows & other)) & 1;
                }
                __syncthreads();
                for (int i = threadIdx.x; i < count << log_columns; i += THREADS) {
                    const int r = i >> log_columns, c = i & (width - 1);
                    if (left + c >= d) continue;
                    const int from = (int)(chosen[low + r] & (rows - 1)) << log_columns | c;
                    to[(long long)(low + r) * d + left + c] += with_sign(flips[r], X[from]);
                }
            }
        }
    }
}
