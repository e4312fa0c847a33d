// Second moments and squared norms on tensor cores, for keys of up to 128 columns and products in single precision.
//
// Moments multiply 16-bit numbers as they are. All other numbers are scaled by powers of two and split into two float16,
// the rounded number (a half) and the remainder (a rest), which hold it to within 2^-23. Tensor cores truncate sums. So
// they add up at most 32 products of each sort, the small ones first; sums with rounding add up these partial sums.

#include "keys.cuh"
#include "blocks.cuh"
#include "shared.cuh"
#include "mma.cuh"

namespace {

constexpr int SIDE = 32;      // columns of a tile of moments, and products summed up by tensor cores alone
constexpr int COLUMNS = 128;  // of a stage of the pipeline, those of all groups of SIDE rows together
constexpr int WARPS = 8;      // of a block of threads that splits factors

template <int WIDE>
constexpr int TILES = (WIDE / SIDE) * (WIDE / SIDE + 1) / 2;  // of the upper triangle

// A warp sums up one tile, of the rows of one group.
template <int WIDE>
constexpr int MOMENT_THREADS = 32 * TILES<WIDE> * (COLUMNS / WIDE);

// What tensor cores multiply.
template <typename Raw>
struct Multiplied {
    using Number = Raw;
};
template <>
struct Multiplied<float> {
    using Number = Half;
};

// Of a block of threads that scores keys; a warp takes 32 rows of 16-bit numbers and 16 of floats at a time.
template <typename Raw>
constexpr int SCORE_WARPS = sizeof(Raw) == 4 ? 8 : 6;

// Blocks of threads that a multiprocessor is to hold; keys that are changed on the way in are read slowly anyway.
template <typename Key, typename Raw>
constexpr int RESIDENT = sizeof(Key) == sizeof(Raw) ? 2 : 1;

// One entry of a key as it is multiplied: a float, or the 16 bits of keys that are neither shifted nor weighted; those
// of a Half are not scaled either.
template <typename Key>
__device__ void fetch(const Reader<Key> &reader, long long item, long long row, int column, float &to) {
    to = reader.template read<float>(item, row, column);
}

__device__ void fetch(const Reader<Bfloat> &reader, long long item, long long row, int column, Bfloat &to) {
    float x = widen(reader.keys[item * reader.item_stride + row * reader.row_stride + column * reader.column_stride]);
    if (reader.scale) x = (float)(x * reader.scale[item * reader.d + column]);
    to.bits = reader.takes_part(item, row) ? (unsigned short)(__float_as_uint(x) >> 16) : 0;
}

__device__ void fetch(const Reader<Half> &reader, long long item, long long row, int column, Half &to) {
    to = reader.keys[item * reader.item_stride + row * reader.row_stride + column * reader.column_stride];
    if (!reader.takes_part(item, row)) to.bits = 0;
}

// Whether 16 bytes of a row can be copied as they are.
template <typename Key, typename Raw>
__device__ bool is_direct(const Reader<Key> &reader) {
    const long long apart = reader.item_stride | reader.row_stride;
    return sizeof(Key) == sizeof(Raw) && !reader.shift && !reader.scale && !reader.weights &&
           (reader.column_stride == 1 || reader.d == 1) && apart * (long long)sizeof(Key) % 16 == 0 &&
           (size_t)reader.keys % 16 == 0;
}

// A power of two by which numbers of at most this size (the bits of a float) are brought below 2^15, the largest of
// them to 2^14 or more unless they are tiny; and its inverse.
__device__ float raising(unsigned int size) { return __uint_as_float((268 - max(size >> 23, 27u)) << 23); }
__device__ float lowering(unsigned int size) { return __uint_as_float((max(size >> 23, 27u) - 14) << 23); }

__device__ unsigned int size_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The rests of two numbers, given their halves.
__device__ unsigned int pack_rests(float low, float high, unsigned int halves) {
    return pack(Half{}, low - half_of(halves, 0), high - half_of(halves, 1));
}

// The place of a row's 16 bytes in a tile of rows, so that what a warp takes at a time lies in different banks.
template <int WIDE>
__device__ int place_of_words(int row, int chunk) { return (row * (WIDE / 8) + (chunk ^ (row & 7))) * 16; }

template <int WIDE>
__device__ int place_of_floats(int row, int chunk) { return (row * (WIDE / 4) + (chunk ^ (row & 1) << 2)) * 16; }

// Bring `rows` rows of keys from `first` on to shared memory, zero where there are none; direct ones are on their way.
template <typename Key, typename Raw, int WIDE>
__device__ void bring(const Reader<Key> &reader, bool direct, long long item, long long first, long long stop,
                      int rows, unsigned char *to) {
    constexpr int EACH = 16 / sizeof(Raw), CHUNKS = WIDE / EACH;
    for (int at = threadIdx.x; at < rows * CHUNKS; at += MOMENT_THREADS<WIDE>) {
        const int r = at / CHUNKS, chunk = at % CHUNKS, column = chunk * EACH;
        const long long row = first + r;
        const int count = row < stop && reader.takes_part(item, row) ? max(0, min(EACH, reader.d - column)) : 0;
        unsigned char *const place =
            to + (sizeof(Raw) == 2 ? place_of_words<WIDE>(r, chunk) : place_of_floats<WIDE>(r, chunk));
        if (direct) {
            const Key *const from = reader.keys + item * reader.item_stride + row * reader.row_stride + column;
            copy_async(place, count ? from : reader.keys, count * (int)sizeof(Raw));
            continue;
        }
#pragma unroll 1
        for (int k = 0; k < EACH; ++k) {
            Raw number = {};
            if (k < count) fetch(reader, item, row, column + k, number);
            ((Raw *)place)[k] = number;
        }
    }
}

// Split a stage of floats into halves and rests, with the columns of each SIDE rows raised to the same size; the factors
// that lower them again go to `lowered`, (groups, WIDE). A warp takes 16 columns of SIDE rows at a time.
template <int WIDE>
__device__ void split(const unsigned char *raw, unsigned char *halves, unsigned char *rests, float *lowered) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    for (int task = threadIdx.x / 32; task < COLUMNS / 16; task += MOMENT_THREADS<WIDE> / 32) {
        const int group = task / (WIDE / 16), low = task % (WIDE / 16) * 16;
        const int first = group * SIDE + lane / 4;
        float x[4][4];
        unsigned int sizes[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 four = *(const float4 *)(raw + place_of_floats<WIDE>(first + 8 * i, low / 4 + quad));
            x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
#pragma unroll
            for (int k = 0; k < 4; ++k) sizes[k] = max(sizes[k], size_of(x[i][k]));
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
            for (int far = 4; far < 32; far *= 2)
                sizes[k] = max(sizes[k], __shfl_xor_sync(0xffffffffu, sizes[k], far));
            if (lane < 4) lowered[group * WIDE + low + quad * 4 + k] = lowering(sizes[k]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int place = place_of_words<WIDE>(first + 8 * i, low / 8 + quad / 2) + quad % 2 * 8;
#pragma unroll
            for (int k = 0; k < 4; ++k) x[i][k] *= raising(sizes[k]);
            const uint2 high = {pack(Half{}, x[i][0], x[i][1]), pack(Half{}, x[i][2], x[i][3])};
            *(uint2 *)(halves + place) = high;
            *(uint2 *)(rests + place) = {pack_rests(x[i][0], x[i][1], high.x), pack_rests(x[i][2], x[i][3], high.y)};
        }
    }
}

// Four matrices of 8 rows and 8 columns, in the order of A transposed: 16 columns of 16 rows.
template <int WIDE>
__device__ void load_left(unsigned int (&words)[4], const unsigned char *rows, int row, int column) {
    const int lane = threadIdx.x % 32;
    const int at = row + lane / 16 * 8 + lane % 8;
    load_transposed(words, rows + place_of_words<WIDE>(at, column / 8 + lane / 8 % 2));
}

// Two times 8 columns of 16 rows as B.
template <int WIDE>
__device__ void load_right(unsigned int (&words)[4], const unsigned char *first, const unsigned char *second, int row,
                           int column) {
    const int lane = threadIdx.x % 32;
    load_transposed(words, (lane < 16 ? first : second) + place_of_words<WIDE>(row + lane % 16, column / 8));
}

// Add the products of rows to one tile of the moments: of 32 rows as they are, or of the two parts of 16 rows.
template <typename Raw, int WIDE>
__device__ void add_products(const unsigned char *halves, const unsigned char *rests, const float *lowered, int row,
                             int down, int across, float (&totals)[2][4][4]) {
    constexpr bool SPLIT = sizeof(Raw) == 4;
    using Number = typename Multiplied<Raw>::Number;
    const int lane = threadIdx.x % 32;
    const unsigned char *const second = SPLIT ? rests : halves + 16 * WIDE * 2;
    unsigned int a[2][2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        load_left<WIDE>(a[m][0], halves, row, down + 16 * m);
        load_left<WIDE>(a[m][1], second, row, down + 16 * m);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        unsigned int b[4];
        if (down == across) {  // the same words, in another order
#pragma unroll
            for (int i = 0; i < 4; ++i) b[i] = a[n / 2][i / 2][i % 2 * 2 + n % 2];
        } else {
            load_right<WIDE>(b, halves, second, row, across + 8 * n);
        }
        float sums[2][4] = {};
#pragma unroll
        for (int step = SPLIT ? 4 : 2; step-- > 0;)  // the halves' products last
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const int p = step % 2, q = SPLIT ? step / 2 : p;
                multiply_add(Number(), sums[m], a[m][p], b[2 * q], b[2 * q + 1]);
            }
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float &total = totals[m][n][i];
                if (!SPLIT) {
                    total += sums[m][i];
                    continue;
                }
                const float left = lowered[down + 16 * m + lane / 4 + i / 2 * 8];
                const float right = lowered[across + 8 * n + lane % 4 * 2 + i % 2];
                total = fma(sums[m][i], left * right, total);
            }
    }
}

// Eight numbers as they are stored, in words.
__device__ float number_at(const unsigned int (&words)[8], int k, float) { return __uint_as_float(words[k]); }
__device__ float number_at(const unsigned int (&words)[4], int k, Half) { return half_of(words[k / 2], k % 2); }
__device__ float number_at(const unsigned int (&words)[4], int k, Bfloat) {
    return __uint_as_float(k % 2 ? words[k / 2] & 0xffff0000u : words[k / 2] << 16);
}

__device__ void put_number(unsigned int (&words)[8], int k, float x) { words[k] = __float_as_uint(x); }
template <typename Number>
__device__ void put_number(unsigned int (&words)[4], int k, Number x) {
    words[k / 2] |= (unsigned int)x.bits << k % 2 * 16;
}

// Eight entries of a row from `column` on, zero where there are none.
template <typename Key, typename Raw, int WORDS>
__device__ void read_eight(const Reader<Key> &reader, bool direct, long long item, long long row, bool there,
                           int column, unsigned int (&words)[WORDS]) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = 0;
    if (!there || column >= reader.d) return;
    if (direct && column + 8 <= reader.d) {
        const Key *const from = reader.keys + item * reader.item_stride + row * reader.row_stride + column;
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            const uint4 four = *(const uint4 *)((const unsigned int *)from + i);
            words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        Raw number = {};
        if (column + k < reader.d) fetch(reader, item, row, column + k, number);
        put_number(words, k, number);
    }
}

// Words of a factor as B, of SIDE rows and 8 columns: two words for each of two products, for every lane. The words of
// the halves come first, then the words of the rests.
//
// A lane has the entries of eight adjacent columns of a key, 8t to 8t + 7 of SIDE, and of the same eight rows of the
// factor. A and B have the same order, so that the products are right.
template <int WIDE>
constexpr int FACTOR_WORDS = WIDE * WIDE / 2;

template <int WIDE>
__device__ uint4 factor_words(const uint4 *factor, int tile, int depth) {
    return factor[(tile * (WIDE / SIDE) + depth) * 32 + threadIdx.x % 32];
}

}  // namespace

// One block of rows: its moment's upper triangle to `partial`, (blocks, d, d), as `moment_blocks` does. d is at most
// WIDE. The grid is (blocks,).
template <typename Key, typename Raw, int WIDE>
__global__ void __launch_bounds__(MOMENT_THREADS<WIDE>, RESIDENT<Key, Raw>)
    tensor_moments(KEY_PARAMETERS, const long long *pieces, const long long *firsts, int count, long long whole,
                   int block_rows, double *partial) {
    constexpr bool SPLIT = sizeof(Raw) == 4;
    constexpr int GROUPS = COLUMNS / WIDE, ROWS = GROUPS * SIDE, STAGES = SPLIT ? 3 : 6;
    constexpr int STAGE_BYTES = ROWS * WIDE * sizeof(Raw), PART_BYTES = ROWS * WIDE * 2;
    DYNAMIC_SHARED(shared);
    unsigned char *const halves = shared + STAGES * STAGE_BYTES, *const rests = halves + PART_BYTES;
    float *const lowered = (float *)(rests + PART_BYTES);
    const Reader<Key> reader KEY_READER;
    const bool direct = is_direct<Key, Raw>(reader);
    const Block block(pieces, firsts, count, whole, blockIdx.x, block_rows);
    const int stages = (int)((block.stop - block.start + ROWS - 1) / ROWS);

    const int lane = threadIdx.x % 32, group = threadIdx.x / 32 / TILES<WIDE>;
    int down = 0, across = threadIdx.x / 32 % TILES<WIDE>;  // of the tile, among those of the upper triangle
    while (across >= WIDE / SIDE - down) across -= WIDE / SIDE - down++;
    across = (across + down) * SIDE;
    down *= SIDE;

    float totals[2][4][4] = {};
    for (int stage = 1 - STAGES; stage < stages; ++stage) {
        if (stage >= 0) {
            wait_copies<STAGES - 2>();
            __syncthreads();
        }
        const int next = stage + STAGES - 1;
        if (next < stages)
            bring<Key, Raw, WIDE>(reader, direct, block.item, block.start + next * ROWS, block.stop, ROWS,
                                  shared + next % STAGES * STAGE_BYTES);
        commit_copies();
        if (stage < 0) continue;
        const unsigned char *here = shared + stage % STAGES * STAGE_BYTES;
        if (SPLIT) {
            split<WIDE>(here, halves, rests, lowered);
            here = halves;
            __syncthreads();
        }
        if (across >= d) continue;
#pragma unroll 1
        for (int row = group * SIDE; row < (group + 1) * SIDE; row += SPLIT ? 16 : 32)
            add_products<Raw, WIDE>(here, rests, lowered + group * WIDE, row, down, across, totals);
    }
    wait_copies<0>();

    float *const others = (float *)shared + threadIdx.x % (32 * TILES<WIDE>);  // sums of the other groups, added in order
    constexpr int APART = 32 * TILES<WIDE>;
    __syncthreads();
    if (group)
#pragma unroll
        for (int i = 0; i < 32; ++i) others[((group - 1) * 32 + i) * APART] = totals[i / 16][i / 4 % 4][i % 4];
    __syncthreads();
    if (group) return;
    double *const out = partial + (long long)blockIdx.x * d * d;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        double sum = totals[i / 16][i / 4 % 4][i % 4];
        for (int g = 0; g < GROUPS - 1; ++g) sum += others[(g * 32 + i) * APART];
        const int r = down + i / 16 * 16 + lane / 4 + i / 2 % 2 * 8, c = across + i / 4 % 4 * 8 + lane % 4 * 2 + i % 2;
        if (r <= c && c < d) out[(long long)r * d + c] = sum;
    }
}

// Split factors W (slots, d, width), the rows raised to the same size, into words for `tensor_squares`: to `factors`,
// (slots, 2, FACTOR_WORDS). By how much keys are lowered instead goes to `lowered`, (slots, WIDE). If `triangular`,
// entries below the diagonal are taken to be zero. The grid is (slots,).
template <int WIDE>
__global__ void __launch_bounds__(32 * WARPS)
    split_factors(const double *W, int d, int width, bool triangular, unsigned int *factors, float *lowered) {
    const double *const matrix = W + (long long)blockIdx.x * d * width;
    unsigned int *const halves = factors + (long long)blockIdx.x * 2 * FACTOR_WORDS<WIDE>;
    float *const scales = lowered + (long long)blockIdx.x * WIDE;
    __shared__ float raised[WIDE];
    for (int row = threadIdx.x / 32; row < WIDE; row += WARPS) {
        unsigned int size = 0;
        for (int c = threadIdx.x % 32; row < d && c < width; c += 32)
            if (!triangular || row <= c) size = max(size, size_of((float)matrix[(long long)row * width + c]));
        for (int far = 1; far < 32; far *= 2) size = max(size, __shfl_xor_sync(0xffffffffu, size, far));
        if (threadIdx.x % 32 == 0) raised[row] = raising(size), scales[row] = lowering(size);
    }
    __syncthreads();
    for (int at = threadIdx.x; at < FACTOR_WORDS<WIDE>; at += 32 * WARPS) {
        const int lane = at / 4 % 32, depth = at / 128 % (WIDE / SIDE), tile = at / 128 / (WIDE / SIDE);
        const int row = depth * SIDE + lane % 4 * 8 + at % 4 * 2, column = tile * 8 + lane / 4;
        double x[2];
        for (int k = 0; k < 2; ++k) {
            const bool there = row + k < d && column < width && !(triangular && row + k > column);
            x[k] = there ? matrix[(long long)(row + k) * width + column] * raised[row + k] : 0;
        }
        const unsigned int words = pack(Half{}, (float)x[0], (float)x[1]);
        halves[at] = words;
        halves[FACTOR_WORDS<WIDE> + at] =
            pack(Half{}, (float)(x[0] - half_of(words, 0)), (float)(x[1] - half_of(words, 1)));
    }
}

// ‖k W‖² of the rows of the matrices `items` (slots,), at most `ceiling`, to `out[item * out_stride + row]`, or to
// `doubles` if it is there, with factors as `split_factors` leaves them. d and width are at most WIDE. The grid is (any
// number, slots of this launch); `before` slots come before these, and the factors are those of this launch alone. Without
// `items` they are all matrices in order.
template <typename Key, typename Raw, int WIDE>
__global__ void __launch_bounds__(32 * SCORE_WARPS<Raw>, RESIDENT<Key, Raw>)
    tensor_squares(KEY_PARAMETERS, long long n, const long long *items, long long before, const unsigned int *factors,
                   const float *lowered, int width, bool triangular, double ceiling, float *out, double *doubles,
                   long long out_stride) {
    constexpr int WARPS = SCORE_WARPS<Raw>, DEEP = WIDE / SIDE;
    constexpr int PARTS = sizeof(Raw) == 4 ? 2 : 1, HIGH = 2 / PARTS, ROWS = 16 * HIGH;
    DYNAMIC_SHARED(shared);
    uint4 *const factor = (uint4 *)shared, *const factor_rests = factor + FACTOR_WORDS<WIDE> / 4;
    float *const scales = (float *)(factor_rests + FACTOR_WORDS<WIDE> / 4);
    const Reader<Key> reader KEY_READER;
    const bool direct = is_direct<Key, Raw>(reader);
    const long long slot = blockIdx.y, item = items ? items[before + slot] : before + slot;
    const uint4 *const from = (const uint4 *)factors + slot * (FACTOR_WORDS<WIDE> / 2);
    for (int i = threadIdx.x; i < FACTOR_WORDS<WIDE> / 2; i += 32 * WARPS) factor[i] = from[i];
    for (int i = threadIdx.x; i < WIDE; i += 32 * WARPS) scales[i] = lowered[slot * WIDE + i];
    __syncthreads();

    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int depths = (d + SIDE - 1) / SIDE, tiles = (width + 7) / 8;
    for (long long first = ((long long)blockIdx.x * WARPS + threadIdx.x / 32) * ROWS; first < n;
         first += (long long)gridDim.x * WARPS * ROWS) {
        unsigned int a[PARTS][HIGH][DEEP][2][4], sizes[2 * HIGH] = {};
#pragma unroll
        for (int m = 0; m < HIGH; ++m) {
            unsigned int stored[2][DEEP][2 * sizeof(Raw)];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const long long row = first + 16 * m + 8 * r + g;
                const bool there = row < n && reader.takes_part(item, row);
#pragma unroll
                for (int q = 0; q < DEEP; ++q)
                    read_eight<Key, Raw>(reader, direct, item, row, there, q * SIDE + t * 8, stored[r][q]);
            }
            unsigned int *const size = sizes + 2 * m;
#pragma unroll
            for (int q = 0; q < DEEP; ++q)
#pragma unroll
                for (int k = 0; k < 8; ++k)
#pragma unroll
                    for (int r = 0; r < 2; ++r)
                        size[r] =
                            max(size[r], size_of(number_at(stored[r][q], k, Raw()) * scales[q * SIDE + t * 8 + k]));
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int far = 1; far < 4; far *= 2)
                    size[r] = max(size[r], __shfl_xor_sync(0xffffffffu, size[r], far));
#pragma unroll
            for (int q = 0; q < DEEP; ++q)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 scale = *(const float2 *)(scales + q * SIDE + t * 8 + 2 * i);
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const float raised = raising(size[r]);
                        const float x = number_at(stored[r][q], 2 * i, Raw()) * scale.x * raised;
                        const float y = number_at(stored[r][q], 2 * i + 1, Raw()) * scale.y * raised;
                        const unsigned int words = pack(Half{}, x, y);
                        a[0][m][q][i / 2][i % 2 * 2 + r] = words;
                        if (PARTS == 2) a[PARTS - 1][m][q][i / 2][i % 2 * 2 + r] = pack_rests(x, y, words);
                    }
                }
        }

        float squares[2 * HIGH] = {};
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile += PARTS) {
            const int deep = triangular ? min(depths, (tile + PARTS - 1) * 8 / SIDE + 1) : depths;
            float sums[HIGH][PARTS][4] = {};
#pragma unroll
            for (int q = 0; q < DEEP; ++q)
                if (q < deep) {
                    float products[HIGH][PARTS][4] = {};
                    uint4 high[PARTS], low[PARTS];
#pragma unroll
                    for (int c = 0; c < PARTS; ++c) {
                        high[c] = factor_words<WIDE>(factor, tile + c, q);
                        low[c] = factor_words<WIDE>(factor_rests, tile + c, q);
                    }
#pragma unroll
                    for (int step = PARTS + 1; step-- > 0;)  // the products of the halves come last
#pragma unroll
                        for (int k = 0; k < 2; ++k)
#pragma unroll
                            for (int m = 0; m < HIGH; ++m)
#pragma unroll
                                for (int c = 0; c < PARTS; ++c) {
                                    const uint4 &b = step == 1 ? low[c] : high[c];
                                    multiply_add(Half(), products[m][c], a[step / 2][m][q][k], k ? b.z : b.x,
                                                 k ? b.w : b.y);
                                }
#pragma unroll
                    for (int m = 0; m < HIGH; ++m)
#pragma unroll
                        for (int c = 0; c < PARTS; ++c)
#pragma unroll
                            for (int i = 0; i < 4; ++i) sums[m][c][i] += products[m][c][i];
                }
#pragma unroll
            for (int m = 0; m < HIGH; ++m)
#pragma unroll
                for (int c = 0; c < PARTS; ++c)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        squares[2 * m + i / 2] = fma(sums[m][c][i], sums[m][c][i], squares[2 * m + i / 2]);
        }
#pragma unroll
        for (int r = 0; r < 2 * HIGH; ++r) {
#pragma unroll
            for (int far = 1; far < 4; far *= 2) squares[r] += __shfl_xor_sync(0xffffffffu, squares[r], far);
            const long long row = first + 8 * r + g;
            if (t || row >= n) continue;
            const double back = lowering(sizes[r]), square = squares[r] * back * back;
            if (doubles) doubles[item * out_stride + row] = square > ceiling ? ceiling : square;
            else out[item * out_stride + row] = (float)(square > ceiling ? ceiling : square);
        }
    }
}
