// Decode steps over a compressed cache: softmax attention of one token to slots and to the tokens after them.
//
// Slots and later tokens stay where they are. Each is cut into chunks of keys. A block of threads takes one chunk for
// the rows that share its keys, so it reads each key and value once. A second launch joins the chunks of each row. All
// sums are in float32. The cuts depend on the numbers of slots and tokens alone, so a row has the same bits in any
// batch.

#include "shared.cuh"
#include "formats.cuh"
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
};

template <typename Real>
struct Pack<Real, 1> {
    Real number;

    __device__ float get(int) const { return widen(number); }
};

// The i-th of the heads from `first` on that `listed` has bits for; 0 lists all.
__device__ inline int head_of(int first, unsigned long long listed, int i) {
    if (!listed) return first + i;
    for (; i; --i) listed &= listed - 1;
    return first + __popcll(~listed & (listed - 1));
}

}  // namespace

// Write the sums of each chunk for rows of q (B, H, d) to `parts`. First come, (B G r, chunks, 2), the largest logit and
// the sum of weights relative to it. Then come, (B G r, chunks, D), the values times these weights.
//
// Slots are keys (B, G, s, d), values (B, G, s, D) and weights (B, G, s), which are logarithms or null for zeros. Later
// tokens are `near_keys` and `near_values`, (B, heads, t, .), and `present` (B, t), which may be null. The last token
// always counts. Slots of head i have the heads' number `head_of(first, listed, i)` in q and in later tokens; r rows of
// q share it. `softcap`: a bound of logits, or 0. PACK: numbers that are read at once. ROWS: of a block. The grid is
// (B G chunks, rows).
template <typename Real, int PACK, int ROWS>
__global__ void __launch_bounds__(THREADS, ROWS < 4 ? 4 : 3)
    attend_parts(const Real *q, long long q_item, long long q_row, const Real *keys, long long k_item, long long k_head,
                 long long k_row, const Real *values, long long v_item, long long v_head, long long v_row,
                 const float *weights, long long w_item, long long w_head, const Real *near_keys, long long near_k_item,
                 long long near_k_head, long long near_k_row, const Real *near_values, long long near_v_item,
                 long long near_v_head, long long near_v_row, const unsigned char *present, long long p_item,
                 long long p_row, int s, int t, int chunk, int G, int r, int d, int D, int first,
                 unsigned long long listed, double scale, double softcap, float *parts) {
    DYNAMIC_SHARED(memory);
    constexpr int QUAD = PACK < 4 ? PACK : 4, AHEAD = ROWS < 8 ? 8 : 4;
    using Numbers = Pack<Real, PACK>;
    using Quad = Pack<float, QUAD>;  // as many as 16 bytes hold
    float *const sums = parts + 2ll * gridDim.x * r;
    float *const asked = (float *)memory;                    // (ROWS, d), quads of a pack apart from each other
    float *const gathered = asked + ROWS * d;                // (groups, ROWS, columns)
    float *const logits = gathered + THREADS * ROWS * PACK;  // (ROWS, chunk), later weights
    const float nothing = __int_as_float(0xff800000);        // −∞
    const int far = (s + chunk - 1) / chunk, chunks = far + (t + chunk - 1) / chunk;
    const int item = blockIdx.x / chunks, part = blockIdx.x % chunks, top = blockIdx.y * ROWS;
    const int b = item / G, g = item % G, head = head_of(first, listed, g);
    const bool slots = part < far;
    const int begin = (slots ? part : part - far) * chunk, count = min(chunk, (slots ? s : t) - begin);
    const long long key_step = slots ? k_row : near_k_row, value_step = slots ? v_row : near_v_row;
    const Real *const K =
        (slots ? keys + b * k_item + g * k_head : near_keys + b * near_k_item + head * near_k_head) + begin * key_step;
    const Real *const V =
        (slots ? values + b * v_item + g * v_head : near_values + b * near_v_item + head * near_v_head) +
        begin * value_step;
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, packs = d / PACK;

    // The first keys are on their way while the rows of q come to shared memory
    const Real *rows[KEYS];
    Numbers next[KEYS];
    float bias[KEYS];
    const auto fetch = [&](int low) {
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            const int key = min(low + i * GROUPS + group, count - 1), place = begin + key;
            rows[i] = K + key * key_step;
            if (lane < packs) next[i] = *(const Numbers *)(rows[i] + lane * PACK);
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
                if (p + LANES < packs) next[i] = *(const Numbers *)(rows[i] + (p + LANES) * PACK);
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
    Numbers read[AHEAD];
    const auto bring = [&](int low, int column) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int key = low + i * groups;
            if (key < count && column < columns) read[i] = *(const Numbers *)(V + key * value_step + column * PACK);
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
