// Decode steps over a compressed cache: softmax attention of one token to slots and to the tokens after them.
//
// Slots and later tokens stay where they are, and slots may be codes of few bits. Each is cut into chunks of keys. A block of threads takes one chunk for
// the rows that share its keys, so it reads each key and value once. A second launch joins the chunks of each row. All
// sums are in float32. The cuts depend on the numbers of slots and tokens alone, so a row has the same bits in any
// batch.

#include "shared.cuh"
#include "formats.cuh"
#include "codes.cuh"
#include "warps.cuh"

namespace {

constexpr int THREADS = 128;             // of a block that reads a chunk
constexpr int LANES = 8;                 // threads that share a key
constexpr int GROUPS = THREADS / LANES;  // of such threads
constexpr int KEYS = 4;                  // that a thread reads together
constexpr int WARPS = 8;                 // of a block that joins chunks
constexpr int EACH = 4;                  // columns of a thread that joins them
constexpr int COLUMNS = 32 * EACH;       // of such a block
constexpr int CHUNKS = 8;                // that a thread reads together
constexpr unsigned int ALL = 0xffffffffu;

// Neighbors along a row, read at once: one number, or 16 bytes, which are kept as words to take fewer registers.
template <typename Real, int COUNT>
struct alignas(16) Pack {
    unsigned int words[4];

    __device__ float get(int k) const {
        if constexpr (sizeof(Real) == 4) return __uint_as_float(words[k]);
        else return widen(Real{(unsigned short)(words[k / 2] >> 16 * (k % 2))});
    }

    __device__ void put(int k, Real number) {
        if constexpr (sizeof(Real) == 4) words[k] = __float_as_uint(number);
        else words[k / 2] = k % 2 ? words[k / 2] | (unsigned int)number.bits << 16 : number.bits;
    }
};

template <typename Real>
struct Pack<Real, 1> {
    Real number;

    __device__ float get(int) const { return widen(number); }
};

// Codes of the slots of a head, (s, width) bytes, each of 8 bits or of two codes of 4 bits, with lows and steps (s, blocks),
// of `entries` columns each. The codes of a pack are read at once. With its low and its step they take the words of a pack.
struct Codes {
    const unsigned char *codes;
    const Bfloat *lows, *steps;
    int width, blocks, entries, bits;

    template <typename Real, int COUNT>
    __device__ void fetch(Pack<Real, COUNT> &to, int row, int column) const {
        const int scale = row * blocks + (blocks > 1 ? column / entries : 0);
        const unsigned char *const from = codes + (long long)row * width + (column < width ? column : column - width);
        if constexpr (COUNT == 8) *(uint2 *)to.words = *(const uint2 *)from;
        else to.words[0] = *(const unsigned int *)from;
        to.words[COUNT / 4] = lows[scale].bits | (unsigned int)steps[scale].bits << 16;
    }

    // The numbers of a pack, with b and m of its columns, or null for 1 and 0.
    template <typename Real, int COUNT>
    __device__ Pack<Real, COUNT> open(const Pack<Real, COUNT> &from, int column, const float *b, const float *m) const {
        const unsigned int scale = from.words[COUNT / 4];
        const float low = __uint_as_float(scale << 16), step = __uint_as_float(scale & 0xffff0000u);
        const int shift = bits == 4 && column >= width ? 4 : 0, mask = bits == 8 ? 255 : 15;
        Pack<Real, COUNT> found;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const unsigned int code = from.words[k / 4] >> (8 * (k % 4) + shift) & mask;
            found.put(k, opened<Real>(code, low, step, b ? b[column + k] : 1, m ? m[column + k] : 0));
        }
        return found;
    }
};

// The i-th of the heads from `first` on that `listed` has bits for; 0 lists all.
__device__ inline int head_of(int first, unsigned long long listed, int i) {
    if (!listed) return first + i;
    for (; i; --i) listed &= listed - 1;
    return first + __popcll(~listed & (listed - 1));
}

}  // namespace

// Codes of keys and of values.
#define CODE_PARAMETERS                                                                                             \
    const unsigned char *key_codes, const Bfloat *key_lows, const Bfloat *key_steps, const signed char *sizes,      \
        const short *means, const unsigned char *value_codes, const Bfloat *value_lows, const Bfloat *value_steps,  \
        int key_width, int key_blocks, int key_entries, int value_width, int value_blocks, int value_entries, int bits

// Write the sums of each chunk for rows of q (B, H, d) to `parts`. First come, (B G r, chunks, 2), the largest logit and
// the sum of weights relative to it. Then come, (B G r, chunks, D), the values times these weights.
//
// Slots are keys (B, G, s, d), values (B, G, s, D) and weights (B, G, s), which are logarithms or null for zeros. Later
// tokens are `near_keys` and `near_values`, (B, heads, t, .), and `present` (B, t), which may be null. The last token
// always counts. Slots of head i have the heads' number `head_of(first, listed, i)` in q and in later tokens; r rows of
// q share it. `softcap`: a bound of logits, or 0. PACK: numbers that are read at once. ROWS: of a block.
//
// With CODED, codes (B, G, s, width) without gaps are the slots, in place of keys and values. The columns of keys have
// `sizes` and `means` (B, G, d), or null. The grid is (B G chunks, rows).
template <typename Real, int PACK, int ROWS, bool CODED>
__global__ void __launch_bounds__(THREADS, CODED || ROWS >= 4 ? 3 : 4)
    attend_parts(const Real *q, long long q_item, long long q_row, const Real *keys, long long k_item, long long k_head,
                 long long k_row, const Real *values, long long v_item, long long v_head, long long v_row,
                 const float *weights, long long w_item, long long w_head, const Real *near_keys, long long near_k_item,
                 long long near_k_head, long long near_k_row, const Real *near_values, long long near_v_item,
                 long long near_v_head, long long near_v_row, const unsigned char *present, long long p_item,
                 long long p_row, CODE_PARAMETERS, int s, int t, int chunk, int G, int r, int d, int D, int first,
                 unsigned long long listed, double scale, double softcap, float *parts) {
    DYNAMIC_SHARED(memory);
    constexpr int QUAD = PACK < 4 ? PACK : 4, AHEAD = ROWS < 8 ? 8 : 4;
    using Numbers = Pack<Real, PACK>;
    using Quad = Pack<float, QUAD>;  // as many as 16 bytes hold
    float *const sums = parts + 2ll * gridDim.x * r;
    float *const asked = (float *)memory;                    // (ROWS, d), quads of a pack apart from each other
    float *const gathered = asked + ROWS * d;                // (groups, ROWS, columns)
    float *const logits = gathered + THREADS * ROWS * PACK;  // (ROWS, chunk), later weights
    float *const b_of = logits + ROWS * chunk, *const m_of = b_of + d;  // of the columns of coded keys
    const float nothing = __int_as_float(0xff800000);        // −∞
    const int far = (s + chunk - 1) / chunk, chunks = far + (t + chunk - 1) / chunk;
    const int item = blockIdx.x / chunks, part = blockIdx.x % chunks, top = blockIdx.y * ROWS;
    const int b = item / G, g = item % G, head = head_of(first, listed, g);
    const bool slots = part < far;
    const int begin = (slots ? part : part - far) * chunk, count = min(chunk, (slots ? s : t) - begin);
    const auto codes_from = [&](const unsigned char *codes, const Bfloat *lows, const Bfloat *steps, int width, int blocks,
                                int entries) {
        const long long slot = (long long)item * s + begin;
        return Codes{codes + slot * width, lows + slot * blocks, steps + slot * blocks, width, blocks, entries, bits};
    };
    const Codes key_code = codes_from(key_codes, key_lows, key_steps, key_width, key_blocks, key_entries);
    const long long key_step = slots ? k_row : near_k_row, value_step = slots ? v_row : near_v_row;
    const Real *const K =
        (slots ? keys + b * k_item + g * k_head : near_keys + b * near_k_item + head * near_k_head) + begin * key_step;
    const Real *const V =
        (slots ? values + b * v_item + g * v_head : near_values + b * near_v_item + head * near_v_head) +
        begin * value_step;
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, packs = d / PACK;

    // The first keys are on their way while the rows of q come to shared memory
    const Real *rows[KEYS] = {};
    Numbers next[KEYS];
    float bias[KEYS];
    const auto load = [&](int low, int i, int p) {
        if constexpr (CODED)
            if (slots) return key_code.fetch(next[i], min(low + i * GROUPS + group, count - 1), p * PACK);
        next[i] = *(const Numbers *)(rows[i] + p * PACK);
    };
    const auto fetch = [&](int low) {
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            const int key = min(low + i * GROUPS + group, count - 1), place = begin + key;
            rows[i] = K + key * key_step;
            if (lane < packs) load(low, i, lane);
            bias[i] = 0;
            if (slots && weights) bias[i] = weights[b * w_item + g * w_head + place];
            if (!slots && present && place < t - 1 && !present[b * p_item + place * p_row]) bias[i] = nothing;
        }
    };
    fetch(0);
    for (int row = 0; row < ROWS; ++row)
        for (int k = threadIdx.x; k < d; k += THREADS) {
            const int quad = k % PACK / QUAD * packs + k / PACK;
            const Real *const from = q + b * q_item + ((long long)head * r + top + row) * q_row + k;
            asked[row * d + quad * QUAD + k % QUAD] = top + row < r ? (float)scale * widen(*from) : 0;
        }
    if (CODED && slots)
        for (int k = threadIdx.x; k < d; k += THREADS) {
            const float size = sizes ? size_of(sizes[(long long)item * d + k]) : 1;
            b_of[k] = size, m_of[k] = sizes ? mean_of(means[(long long)item * d + k], size) : 0;
        }

    __syncthreads();

    // Logits: the next numbers are on their way while these are multiplied
#pragma unroll 1
    for (int low = 0; low < count; low += GROUPS * KEYS) {
        float dots[KEYS][ROWS] = {};
        if (low) fetch(low);
#pragma unroll 1
        for (int p = lane; p < packs; p += LANES) {
            Numbers now[KEYS];
#pragma unroll
            for (int i = 0; i < KEYS; ++i) {
                now[i] = next[i];
                if constexpr (CODED)
                    if (slots) now[i] = key_code.open(now[i], p * PACK, b_of, m_of);
                if (p + LANES < packs) load(low, i, p + LANES);
            }
#pragma unroll
            for (int j = 0; j < PACK; j += QUAD)
#pragma unroll
                for (int row = 0; row < ROWS; ++row) {
                    const Quad x = *(const Quad *)(asked + row * d + (j / QUAD * packs + p) * QUAD);
#pragma unroll
                    for (int k = 0; k < QUAD; ++k)
#pragma unroll
                        for (int i = 0; i < KEYS; ++i)
                            dots[i][row] = fma(x.get(k), now[i].get(j + k), dots[i][row]);
                }
        }
#pragma unroll
        for (int i = 0; i < KEYS; ++i)
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                float x = dots[i][row];
                for (int half = LANES / 2; half; half /= 2) x += __shfl_xor_sync(ALL, x, half);
                const int key = low + i * GROUPS + group;
                if (lane != (i * ROWS + row) % LANES || key >= count) continue;
                if (softcap > 0) x = tanh(x / (float)softcap) * (float)softcap;
                logits[row * chunk + key] = x + bias[i];
            }
    }

    // The first values come while the logits become weights
    const int columns = D / PACK, width = min(columns, THREADS), groups = THREADS / width;
    const int mine = threadIdx.x % width, turn = threadIdx.x / width;
    const Codes value_code = codes_from(value_codes, value_lows, value_steps, value_width, value_blocks, value_entries);
    Numbers read[AHEAD];
    const auto bring = [&](int low, int column) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int key = low + i * groups;
            if (key >= count || column >= columns) continue;
            if constexpr (CODED)
                if (slots) {
                    value_code.fetch(read[i], key, column * PACK);
                    continue;
                }
            read[i] = *(const Numbers *)(V + key * value_step + column * PACK);
        }
    };
    if (turn < groups) bring(turn, mine);
    __syncthreads();
    const long long place = ((long long)item * r + top) * chunks + part;
    for (int row = threadIdx.x / 32; row < ROWS; row += THREADS / 32) {
        float *const z = logits + row * chunk;
        float most = nothing, total = 0;
        for (int k = threadIdx.x % 32; k < count; k += 32) most = max(most, z[k]);
        most = largest_of_warp(most);
        const float base = most == nothing ? 0 : most;
        for (int k = threadIdx.x % 32; k < count; k += 32) total += z[k] = exp(z[k] - base);
        total = sum_of_warp(total);
        if (threadIdx.x % 32 || top + row >= r) continue;
        float *const to = parts + 2 * (place + (long long)row * chunks);
        to[0] = most, to[1] = total;
    }
    __syncthreads();

#pragma unroll 1
    for (int tile = 0; tile < columns; tile += width) {
        float own[ROWS][PACK] = {};
#pragma unroll 1
        for (int low = turn; turn < groups && low < count; low += groups * AHEAD) {
            if (tile || low != turn) bring(low, tile + mine);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int key = low + i * groups;
                if (key >= count || tile + mine >= columns) break;
                if constexpr (CODED)
                    if (slots) read[i] = value_code.open(read[i], (tile + mine) * PACK, nullptr, nullptr);
#pragma unroll
                for (int row = 0; row < ROWS; ++row) {
                    const float weight = logits[row * chunk + key];
#pragma unroll
                    for (int k = 0; k < PACK; ++k) own[row][k] = fma(weight, read[i].get(k), own[row][k]);
                }
            }
        }
        if (turn < groups)
#pragma unroll
            for (int row = 0; row < ROWS; ++row)
#pragma unroll
                for (int k = 0; k < PACK; ++k)
                    gathered[((turn * ROWS + row) * width + mine) * PACK + k] = own[row][k];
        __syncthreads();
        const int wide = min(width, columns - tile) * PACK;
        for (int row = 0; row < min(ROWS, r - top); ++row)
            for (int k = threadIdx.x; k < wide; k += THREADS) {
                float sum = 0;
                for (int i = 0; i < groups; ++i) sum += gathered[(i * ROWS + row) * width * PACK + k];
                sums[(place + (long long)row * chunks) * D + tile * PACK + k] = sum;
            }
        __syncthreads();
    }
}

// Write the output Y (B, H, D) of rows from their `parts`, as `attend_parts` left them. A row that sees nothing is NaN.
// The grid is (B G r, columns).
template <typename Real>
__global__ void __launch_bounds__(32 * WARPS, 3)
    join_parts(const float *parts, int chunks, int G, int r, int H, int D, int first, unsigned long long listed,
               Real *Y) {
    __shared__ float gathered[WARPS][COLUMNS];
    const float nothing = __int_as_float(0xff800000);  // −∞
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, low = blockIdx.y * COLUMNS;
    const int item = blockIdx.x / r, b = item / G, head = head_of(first, listed, item % G);
    const float *const own = parts + 2ll * blockIdx.x * chunks;
    const float *const sums = parts + 2ll * gridDim.x * chunks + (long long)blockIdx.x * chunks * D;
    float read[CHUNKS][EACH], found[EACH] = {};
    const auto bring = [&](int from) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                const int part = from + i * WARPS, column = low + k * 32 + lane;
                if (part < chunks && column < D) read[i][k] = sums[(long long)part * D + column];
            }
    };
    bring(warp);
    float most = nothing, total = 0;
    for (int part = lane; part < chunks; part += 32) most = max(most, own[2 * part]);
    most = largest_of_warp(most);
    const float base = most == nothing ? 0 : most;
    for (int part = lane; part < chunks; part += 32) total = fma(exp(own[2 * part] - base), own[2 * part + 1], total);
    total = sum_of_warp(total);
#pragma unroll 1
    for (int from = warp; from < chunks; from += CHUNKS * WARPS) {
        if (from != warp) bring(from);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            const int part = from + i * WARPS;
            if (part >= chunks) break;
            const float weight = exp(own[2 * part] - base);
#pragma unroll
            for (int k = 0; k < EACH; ++k)
                if (low + k * 32 + lane < D) found[k] = fma(weight, read[i][k], found[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k) gathered[warp][k * 32 + lane] = found[k];
    __syncthreads();
    for (int k = threadIdx.x; k < min(COLUMNS, D - low); k += 32 * WARPS) {
        float sum = 0;
        for (int i = 0; i < WARPS; ++i) sum += gathered[i][k];
        narrow(sum / total, Y[((long long)b * H + (long long)head * r + blockIdx.x % r) * D + low + k]);
    }
}
