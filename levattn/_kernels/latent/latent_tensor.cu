// Latent attention, forward, in single precision on tensor cores: the sums of each run, and the rows of each run.
//
// A block of threads takes its run 16 positions at a time, and keeps the state S in the registers of its warps. With the
// references R of the latents before a chunk and E[u] = e^(K[u] − R), products give the rows t of the chunk:
//
//   w = p / s(t),   A[t, u] = ⟨w[t], E[u]⟩ (u ≤ t),   Y = w S + A V,   S ← S + Eᵀ V.
//
// A position whose logit exceeds R by more than SLACK raises the reference, as in steps.cuh. From this row of the chunk on, A
// is summed pair by pair, with exponentials relative to the references that each row has reached, and w is scaled down for
// products with S. Then S and E change to the new references. So no row depends on a later position.
//
// Each factor is the sum of two numbers of 11 bits, which hold it to 2^-23, and the product of two rests is left out. Tensor
// cores truncate sums, they do not round. So they add 32 products or fewer of each sort, and rounded sums add the results.

#include "shared.cuh"
#include "copies.cuh"
#include "tf32.cuh"
#include "formats.cuh"
#include "steps.cuh"
#include "spread.cuh"

namespace {

constexpr int STEPS = 16;  // positions of a chunk, and the rows of a product, whose sums have OCTET terms
constexpr int LINE = 20;   // numbers from one row of A to the next

struct Split {
    float high, low;

    __device__ explicit Split(float x) {
        const float raised = x * 8193;  // 2^13 + 1
        high = raised - (raised - x);
        low = x - high;
    }
};

template <int N>
__device__ inline void split(const float (&x)[N], float (&high)[N], float (&low)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const Split parts(x[i]);
        high[i] = parts.high, low[i] = parts.low;
    }
}

// Whether a number can be split: not NaN, and not so large that a power of two times it is not finite.
__device__ inline bool is_moderate(float x) { return fabsf(x) < 0x1p113f; }

// Logits and values of the positions that a block sees, and which are masked.
struct Seen {
    const float *logits;
    long long logit_step;
    const float *values;
    long long value_step;
    const unsigned char *mask;
    long long mask_step;
};

// The passage of a block of threads through a run. The distance of lines of latents and of values in shared memory lets a
// warp read different banks at a time.
template <int LATENTS, int TILES, bool ROWS>
struct Chunks : Spread<LATENTS, TILES> {
    using Sums = Spread<LATENTS, TILES>;
    using Sums::channel, Sums::each_row, Sums::each_sum, Sums::g, Sums::OCTETS, Sums::S, Sums::t, Sums::WIDE;
    static constexpr int PITCH = LATENTS + 8, SPREAD = WIDE + 8;

    const Run run;
    const long long item;
    const int column, latent, columns, latents;
    float *const logits, *const values, *const E, *const references, *const reached, *const lowered;
    unsigned int *const flags, *const taken;                      // two each, of chunks: seen, raised; not masked
    float *const weights, *const rising, *const sums, *const A, *const scales;  // only with ROWS
    float total, top;  // of one latent

    __device__ Chunks(unsigned char *shared, const Run &run, long long item, int L, int D)
        : run(run), item(item), column(blockIdx.y * WIDE), latent(blockIdx.z * LATENTS), columns(min(D - column, WIDE)),
          latents(min(L - latent, LATENTS)), logits((float *)shared), values(logits + 2 * STEPS * PITCH),
          E(values + 2 * STEPS * SPREAD), references(E + STEPS * PITCH), reached(references + LATENTS),
          lowered(reached + LATENTS), flags((unsigned int *)(lowered + LATENTS)), taken(flags + 4),
          weights((float *)(taken + 4)), rising(weights + 2 * STEPS * PITCH), sums(rising + STEPS * PITCH),
          A(sums + STEPS * PITCH), scales(A + 2 * STEPS * LINE) {}

    __device__ bool idle() const { return channel() >= columns; }
    // The line and the latent of a thread, where threads share out both.
    static __device__ int own_latent() { return threadIdx.x % LATENTS; }
    static __device__ int own_line() { return threadIdx.x / LATENTS; }
    static constexpr int LINES = THREADS / LATENTS;

    // Begin with the state at one place of (b, slots, L[, D]), or with an empty one.
    __device__ void begin(const float *before, const float *sums_before, const float *states, long long place, int L,
                          int D) {
        const int l = threadIdx.x;
        const bool begun = before && l < latents;
        total = begun ? sums_before[place * L + latent + l] : 0;
        top = nothing<float>();
        if (l < LATENTS) references[l] = begun ? before[place * L + latent + l] : nothing<float>();
        this->load(states ? states + (place * L + latent) * D + column : nullptr, latents, columns, D);
    }

    // Bring the logits and values of a chunk, from step `start` on, to one of the two places.
    __device__ void arrive(const Seen &from, int start, int place) {
        const int count = min(run.positions - start, STEPS);
        const long long at = run.position + start;
        if (run.positions) {
            const float *const next = from.logits + at * from.logit_step, *const beside = from.values + at * from.value_step;
            bring(logits + place * STEPS * PITCH, PITCH, next, from.logit_step, count, latents);
            bring(values + place * STEPS * SPREAD, SPREAD, beside, from.value_step, count, columns);
        }
        if (threadIdx.x < 32)
            bring_mask(taken + place, from.mask ? from.mask + at * from.mask_step : nullptr, from.mask_step, count);
        if (threadIdx.x < 2) flags[2 * place + threadIdx.x] = 0;
    }

    __device__ float logit(int place, int k, int l) const {
        return taken[place] >> k & 1 && l < latents ? logits[(place * STEPS + k) * PITCH + l] : nothing<float>();
    }

    // A value, or zero for a position that no latent sees.
    __device__ float value(int place, int k, int c) const {
        return flags[2 * place] >> k & 1 && c < columns ? values[(place * STEPS + k) * SPREAD + c] : 0;
    }

    // Exponentials relative to the references before a chunk.
    __device__ void exponentiate(int place) {
        unsigned int seen = 0;
        const int l = own_latent();
        const float reference = references[l];
        for (int k = own_line(); k < STEPS; k += LINES) {
            const float x = logit(place, k, l);
            E[k * PITCH + l] = x == nothing<float>() ? 0 : expf(x - reference);
            if (x != nothing<float>()) seen |= 1u << k;
        }
        collect(flags + 2 * place, seen);
    }

    // The sums of each latent up to each step, and the references that it has reached there.
    __device__ void scan(int place) {
        unsigned int raised = 0;
        const int l = threadIdx.x;
        if (l < LATENTS) {
            float reference = references[l];
#pragma unroll 4
            for (int k = 0; k < STEPS; ++k) {
                const float x = logit(place, k, l);
                float e = E[k * PITCH + l];
                if (x > reference + SLACK && x < -nothing<float>()) {  // +∞ makes NaN
                    total *= expf(reference - x);
                    reference = x;
                    e = 1;
                    raised |= 1u << k;
                } else if (raised && x != nothing<float>()) {
                    e = expf(x - reference);
                }
                total += e;
                if (!(x <= top)) top = x;
                if (ROWS) sums[k * PITCH + l] = total, rising[k * PITCH + l] = reference;
            }
            reached[l] = reference;
            lowered[l] = raised ? expf(references[l] - reference) : 1;
        }
        collect(flags + 2 * place + 1, raised);
    }

    // Raise the references of S and of E, once the chunk no longer needs the old ones.
    __device__ void raise(int place) {
        for (int k = own_line(), l = own_latent(); k < STEPS; k += LINES)
            if (reached[l] != references[l]) {
                const float x = logit(place, k, l);
                E[k * PITCH + l] = x == nothing<float>() ? 0 : expf(x - reached[l]);
            }
        each_sum([&](int l, int, float &sum) { sum *= lowered[l]; });
        __syncthreads();
        if (threadIdx.x < LATENTS) references[threadIdx.x] = reached[threadIdx.x];
    }

    // The values of a chunk as A, transposed: rows are channels, and the other axis positions.
    template <typename Read>
    __device__ void take_values(float (&high)[TILES][2][4], float (&low)[TILES][2][4], Read read) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[i] = read(OCTET * half + t() + i / 2 * 4, channel() + 16 * tile + g() + i % 2 * 8);
                split(x, high[tile][half], low[tile][half]);
            }
    }

    // S += Eᵀ V.
    __device__ void enter(const float (&high)[TILES][2][4], const float (&low)[TILES][2][4]) {
#pragma unroll
        for (int j = 0; j < OCTETS; ++j) {
            float e[4], e_high[4], e_low[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) e[i] = E[(t() + 4 * i) * PITCH + OCTET * j + g()];
            split(e, e_high, e_low);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                float added[4] = {};
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    multiply_add(added, low[tile][half], e_high[2 * half], e_high[2 * half + 1]);
                    multiply_add(added, high[tile][half], e_low[2 * half], e_low[2 * half + 1]);
                }
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    multiply_add(added, high[tile][half], e_high[2 * half], e_high[2 * half + 1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) S[tile][j][i] += added[i];
            }
        }
    }

    // The weights of an octet of latents as A, whose columns t and t + 4 are the latents 2t and 2t + 1.
    __device__ void take_weights(int place, int j, float (&high)[4], float (&low)[4]) const {
        const float *const from = weights + (place * STEPS + g()) * PITCH + OCTET * j + 2 * t();
        const float2 upper = *(const float2 *)from, lower = *(const float2 *)(from + 8 * PITCH);
        const float x[4] = {upper.x, lower.x, upper.y, lower.y};
        split(x, high, low);
    }

    // w = p / s, in the place of the logits; `scale` holds the largest logit of a row, and the inverse of its sum.
    __device__ void weigh(int place, const float *scale) {
        for (int k = own_line(), l = own_latent(); k < STEPS; k += LINES) {
            float &w = weights[(place * STEPS + k) * PITCH + l];
            const float sum = sums[k * PITCH + l];
            w = l < latents && sum != 0 ? expf(w - scale[k]) * scale[STEPS + k] / sum : 0;
        }
    }

    // The first row at which a position raised a reference; beyond the chunk if there is none.
    __device__ int first_raised(int place) const {
        const unsigned int raised = flags[2 * place + 1];
        return __popc((raised & (~raised + 1)) - 1);
    }

    // A of the rows before this one, in two parts, each the products of half of the latents.
    __device__ void multiply_pairs(int place, int stop) {
        const int warp = threadIdx.x / 32, u = OCTET * (warp % 2), half = warp / 2;
        float found[4] = {};
#pragma unroll
        for (int group = 0; group < OCTETS / 2; group += 4) {
            float large[4] = {}, small[4] = {};
#pragma unroll
            for (int i = 0; i < 4 && i < OCTETS / 2; ++i) {
                const int j = half * (OCTETS / 2) + group + i;
                float high[4], low[4];
                take_weights(place, j, high, low);
                const float2 e = *(const float2 *)(E + (u + g()) * PITCH + OCTET * j + 2 * t());
                const Split first(e.x), second(e.y);
                multiply_add(small, low, first.high, second.high);
                multiply_add(small, high, first.low, second.low);
                multiply_add(large, high, first.high, second.high);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) found[i] += large[i] + small[i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = g() + i / 2 * 8, at = u + 2 * t() + i % 2;
            if (row < stop || at > row) A[(half * STEPS + row) * LINE + at] = at <= row ? found[i] : 0;
        }
    }

    // A of this row and of the rows after it.
    __device__ void sum_pairs(int place, int start) {
        for (int pair = threadIdx.x; pair < STEPS * STEPS; pair += THREADS) {
            const int row = pair / STEPS, u = pair % STEPS;
            if (row < start || u > row) continue;
            float sum = 0;
#pragma unroll 1
            for (int l = 0; l < latents; ++l) {
                const float x = logit(place, u, l);
                if (x != nothing<float>())
                    sum = fmaf(weights[(place * STEPS + row) * PITCH + l], expf(x - rising[row * PITCH + l]), sum);
            }
            A[row * LINE + u] = sum, A[(STEPS + row) * LINE + u] = 0;
        }
    }

    // Weights of S, which is relative to the references before the chunk.
    __device__ void lower_weights(int place, int start) {
        for (int k = own_line(), l = own_latent(); k < STEPS; k += LINES) {
            const float risen = rising[k * PITCH + l];
            if (k >= start && risen != references[l])
                weights[(place * STEPS + k) * PITCH + l] *= expf(references[l] - risen);
        }
    }

    // Y = w S, eight columns in each of the products.
    __device__ void read(int place, float (&Y)[2 * TILES][4]) const {
#pragma unroll
        for (int group = 0; group < OCTETS; group += 4) {
            float large[2 * TILES][4] = {}, small[2 * TILES][4] = {};
#pragma unroll
            for (int j = group; j < group + 4; ++j) {
                float high[4], low[4];
                take_weights(place, j, high, low);
#pragma unroll
                for (int n = 0; n < 2 * TILES; ++n) {
                    const Split first(S[n / 2][j][n % 2 * 2]), second(S[n / 2][j][n % 2 * 2 + 1]);
                    multiply_add(small[n], low, first.high, second.high);
                    multiply_add(small[n], high, first.low, second.low);
                    multiply_add(large[n], high, first.high, second.high);
                }
            }
#pragma unroll
            for (int n = 0; n < 2 * TILES; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) Y[n][i] += large[n][i] + small[n][i];
        }
    }

    // Y += A V, with values that can be split.
    __device__ void add_pairs(const float (&v_high)[TILES][2][4], const float (&v_low)[TILES][2][4],
                              float (&Y)[2 * TILES][4]) const {
        __syncwarp();  // fewer registers
        float sum[2 * TILES][4] = {};
        float a_high[2][4], a_low[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = pair(g() + i % 2 * 8, OCTET * half + t() + i / 2 * 4);
            split(a, a_high[half], a_low[half]);
        }
#pragma unroll
        for (int n = 0; n < 2 * TILES; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float *const high = v_high[n / 2][half], *const low = v_low[n / 2][half];
                multiply_add(sum[n], a_low[half], high[n % 2], high[2 + n % 2]);
                multiply_add(sum[n], a_high[half], low[n % 2], low[2 + n % 2]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
                multiply_add(sum[n], a_high[half], v_high[n / 2][half][n % 2], v_high[n / 2][half][2 + n % 2]);
#pragma unroll
            for (int i = 0; i < 4; ++i) Y[n][i] += sum[n][i];
        }
    }

    __device__ float pair(int row, int u) const { return A[row * LINE + u] + A[(STEPS + row) * LINE + u]; }
};

}  // namespace

#define SEEN_BY(chunks)                                                                                             \
    Seen{K + item * k_item + chunks.latent, k_row, V + item * v_item + chunks.column, v_row,                        \
         mask ? mask + item * mask_item : nullptr, mask_row}

// The sums of each run by itself: the largest logit, and the sums relative to it, to (b, runs, L[, D]). Runs that no
// run follows are left out. The grid is (runs · b, columns, latents).
template <int LATENTS, int TILES>
__global__ void __launch_bounds__(THREADS, 2)
    multiply_runs(POSITION_PARAMETERS, const long long *runs, int count, int L, int D, float *maxima, float *sums,
                  float *states) {
    DYNAMIC_SHARED(shared);
    const Run run(runs, blockIdx.x % count);
    if (!run.followed) return;
    const long long item = blockIdx.x / count, place = item * count + blockIdx.x % count;
    Chunks<LATENTS, TILES, false> chunks(shared, run, item, L, D);
    const Seen from = SEEN_BY(chunks);
    chunks.begin(nullptr, nullptr, nullptr, 0, L, D);
    for (int start = -STEPS; start < run.positions; start += STEPS) {
        const int next = start + STEPS, other = next / STEPS % 2, here = 1 - other;
        finish_copies();
        __syncthreads();
        if (next < run.positions) chunks.arrive(from, next, other);
        if (start < 0) continue;
        chunks.exponentiate(here);
        __syncthreads();
        chunks.scan(here);
        __syncthreads();
        if (chunks.flags[2 * here + 1]) chunks.raise(here);
        if (chunks.idle()) continue;
        float high[TILES][2][4], low[TILES][2][4];
        chunks.take_values(high, low, [&](int k, int c) { return chunks.value(here, k, c); });
        chunks.enter(high, low);
    }
    __syncthreads();
    const int l = threadIdx.x;
    if (l < chunks.latents) {
        const float down = chunks.top == nothing<float>() ? 0 : expf(chunks.references[l] - chunks.top);
        chunks.lowered[l] = down;
        if (blockIdx.y == 0) {
            maxima[place * L + chunks.latent + l] = chunks.top;
            sums[place * L + chunks.latent + l] = chunks.total * down;
        }
    }
    __syncthreads();
    float *const to = states + (place * L + chunks.latent) * D + chunks.column;
    chunks.each_sum([&](int l, int c, float &sum) {
        if (l < chunks.latents && c < chunks.columns) to[(long long)l * D + c] = sum * chunks.lowered[l];
    });
}

// The rows of each run, to Y (b, slices of latents, T, D). The grid is (runs · b, columns, latents).
template <int LATENTS, int TILES>
__global__ void __launch_bounds__(THREADS, 2)
    multiply_rows(POSITION_PARAMETERS, const float *Q, long long q_item, long long q_row, const float *gate_value,
                  long long gate_value_item, long long gate_value_row, const float *largest, const float *inverse,
                  const float *gates, START_PARAMETERS, const long long *runs, int count, int L, int D, long long T,
                  float *Y) {
    DYNAMIC_SHARED(shared);
    const Run run(runs, count - 1 - blockIdx.x % count);  // the last ones are the longest
    if (!run.rows) return;
    const long long item = blockIdx.x / count;
    const bool gated = gate_value && blockIdx.z == 0;
    Chunks<LATENTS, TILES, true> chunks(shared, run, item, L, D);
    const Seen from = SEEN_BY(chunks);
    chunks.begin(references, sums, states, item * slots + run.slot, L, D);
    for (int start = -STEPS; start < run.steps(); start += STEPS) {
        const int next = start + STEPS, other = next / STEPS % 2, here = 1 - other, steps = min(run.rows - start, STEPS);
        finish_copies();
        __syncthreads();
        if (next < run.rows) {
            const int arriving = min(run.rows - next, STEPS);
            const long long at = run.row + next;
            chunks.arrive(from, next, other);
            bring(chunks.weights + other * STEPS * chunks.PITCH, chunks.PITCH, Q + item * q_item + at * q_row + chunks.latent,
                  q_row, arriving, chunks.latents);
            float *const scale = chunks.scales + 2 * other * STEPS;
            bring(scale, STEPS, largest + item * T + at, 0, 1, arriving);
            bring(scale + STEPS, STEPS, inverse + item * T + at, 0, 1, arriving);
        }
        if (start < 0) continue;
        chunks.exponentiate(here);
        __syncthreads();
        chunks.scan(here);
        __syncthreads();
        chunks.weigh(here, chunks.scales + 2 * here * STEPS);
        __syncthreads();
        const int risen = chunks.first_raised(here);
        if (run.positions) {
            chunks.multiply_pairs(here, risen);
            if (risen < STEPS) chunks.sum_pairs(here, risen);
            __syncthreads();
        }
        if (risen < STEPS) {
            chunks.lower_weights(here, risen);
            __syncthreads();
        }
        float rows[2 * TILES][4] = {};
        if (!chunks.idle()) chunks.read(here, rows);
        if (run.positions) {
            if (risen < STEPS) chunks.raise(here);
            float high[TILES][2][4], low[TILES][2][4];
            bool moderate = true;
            if (!chunks.idle()) {
                chunks.take_values(high, low, [&](int k, int c) {
                    const float x = chunks.value(here, k, c);
                    moderate = moderate && is_moderate(x);
                    return is_moderate(x) ? x : 0;
                });
                chunks.add_pairs(high, low, rows);
                if (__any_sync(ALL, !moderate)) {  // other values must not affect the rows before them
#pragma unroll 1
                    for (int u = 0; u < STEPS; ++u)
                        chunks.each_row(rows, [&](int k, int c, float &y) {
                            const float x = chunks.value(here, u, c), weight = u <= k ? chunks.pair(k, u) : 0;
                            if (weight != 0 && !is_moderate(x)) y += weight * x;
                        });
                    chunks.take_values(high, low, [&](int k, int c) { return chunks.value(here, k, c); });
                }
                chunks.enter(high, low);
            }
        }
        if (chunks.idle()) continue;
        const long long at = item * T + run.row + start;
        const long long to = ((item * gridDim.z + blockIdx.z) * T + run.row + start) * D + chunks.column;
        const float *const beside = gate_value + item * gate_value_item + (run.row + start) * gate_value_row + chunks.column;
        for (int k = chunks.g(); k < steps; k += 8)
            chunks.each_row(rows, [&](int row, int c, float y) {
                if (row == k && c < chunks.columns)
                    Y[to + k * D + c] = gated ? fmaf(gates[at + k], beside[k * gate_value_row + c], y) : y;
            });
    }
}

// The sums over the slices of latents (b, slices, rows), to Y (b, rows). The grid is (b · rows / 256).
template <typename Key>
__global__ void __launch_bounds__(256) add_slices(const float *parts, long long b, int slices, long long rows, Key *Y) {
    const long long place = (long long)blockIdx.x * 256 + threadIdx.x;
    if (place >= b * rows) return;
    const float *const from = parts + place / rows * slices * rows + place % rows;
    float sum = 0;
    for (int slice = 0; slice < slices; ++slice) sum += from[slice * rows];
    narrow(within(sum, Key{}), Y[place]);
}
