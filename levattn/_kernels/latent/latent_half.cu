// Latent attention, forward, of numbers of 16 bits on tensor cores: the sums of each run, and the rows of each run.
//
// A block of threads takes its run 64 positions at a time, and keeps the state S in the registers of its warps. Exponentials
// E[u] = 2^(log2(e) (K[u] − R) − shift) are relative to a reference R of each latent, the logit of one of its positions. The
// shift is a whole number, by which the sum s before a chunk is below 1. Products give the rows t of the chunk:
//
//   w = p / s(t),   A[t, u] = ⟨w[t], E[u]⟩ (u ≤ t),   Y = w S + A V,   S ← S + Eᵀ V.
//
// Factors are rounded to the format of the positions, and sums add the rounded E. A shift moves no rounding, so it
// may depend on all positions before. A position whose exponential would exceed 2^MOST ends a part of the chunk, and
// another part begins with it and its logit as the reference. So no row depends on a later position.
//
// The sums of a run by itself are the start of many rows. There E is the sum of two numbers of 16 bits.

#include "shared.cuh"
#include "formats.cuh"
#include "mma.cuh"
#include "approximate.cuh"
#include "finite.cuh"
#include "runs.cuh"
#include "spread.cuh"

namespace {

constexpr int STEPS = 64;  // positions of a chunk
constexpr int PACK = 8;    // numbers of 16 bytes; lines in shared memory are so many apart

// Of a multiprocessor at a time, as many as its shared memory holds.
template <int LATENTS>
#if __CUDA_ARCH__ >= 900
constexpr int BLOCKS = LATENTS < 128 ? 3 : 2;
#else
constexpr int BLOCKS = 2;
#endif

constexpr float MOST = 10, LOG2_E = 1.4426950408889634f;

// By how much weights are raised, so that small ones keep their digits: float16 has few numbers below 2^-14. A sum is at
// least 1/2, so no weight exceeds 2^15, and none of A 2^14.
__device__ inline float lift(Half) { return 16384; }
__device__ inline float lift(Bfloat) { return 1; }

__device__ inline float number_of(Half, unsigned int word, int upper) { return half_of(word, upper); }
__device__ inline float number_of(Bfloat, unsigned int word, int upper) {
    return __uint_as_float(upper ? word & 0xffff0000u : word << 16);
}

// A bit at the end of each number of a word that is infinite or NaN: its exponent and one more make that bit.
__device__ inline unsigned int not_finite(Half, unsigned int word) { return ((word & 0x7c007c00u) + 0x04000400u) & 0x80008000u; }
__device__ inline unsigned int not_finite(Bfloat, unsigned int word) {
    return ((word & 0x7f807f80u) + 0x00800080u) & 0x80008000u;
}

// Rows of numbers as they are stored, on their way to shared memory.
template <typename Key>
struct Lines {
    const Key *from;
    long long step;  // from row to row
    int columns;
    bool aligned;

    __device__ Lines(const Key *from, long long step, int columns)
        : from(from), step(step), columns(columns), aligned(!(((unsigned long long)from | 2 * step) & 15)) {}

    // Call `use(row, column)` for the packs that this thread brings, which have one column.
    template <int WIDE, typename Use>
    static __device__ void each_pack(Use use) {
        constexpr int PACKS = WIDE / PACK;
        const int column = threadIdx.x % PACKS * PACK;
#pragma unroll 1
        for (int row = threadIdx.x / PACKS; row < STEPS; row += THREADS / PACKS) use(row, column);
    }

    // Bring `count` rows from row `first` on, and zeros after them.
    template <int WIDE>
    __device__ void arrive(Key *to, long long first, int count) const {
        const Key *const rows = from + first * step;
        each_pack<WIDE>([&](int row, int column) {
            const int there = row < count ? min(max(columns - column, 0), PACK) : 0;
            const Key *const numbers = rows + (there ? row * step + column : 0);
            Key *const place = to + row * (WIDE + PACK) + column;
            if (aligned) return copy_async(place, numbers, (int)sizeof(Key) * there);
#pragma unroll 1
            for (int k = 0; k < PACK; ++k) place[k] = k < there ? numbers[k] : Key{0};
        });
    }

    // Whether any number that this thread brought is not finite.
    template <int WIDE>
    static __device__ bool brought_other(const Key *to) {
        unsigned int found = 0;
        each_pack<WIDE>([&](int row, int column) {
            const uint4 words = *(const uint4 *)(to + row * (WIDE + PACK) + column);
            found |= not_finite(Key{}, words.x) | not_finite(Key{}, words.y) | not_finite(Key{}, words.z) |
                     not_finite(Key{}, words.w);
        });
        return found;
    }
};

// The passage of a block of threads through a run. For what is no product, a thread has two latents, at OWN of the steps of
// a chunk; threads that have the same latents compute the same references and shifts.
template <typename Key, int LATENTS, int TILES, bool ROWS>
struct Passage : Spread<LATENTS, TILES> {
    using Sums = Spread<LATENTS, TILES>;
    using Sums::channel, Sums::each_row, Sums::each_sum, Sums::g, Sums::OCTETS, Sums::S, Sums::t, Sums::WIDE;
    static constexpr int PITCH = LATENTS + PACK, SPREAD = WIDE + PACK;
    static constexpr int NARROW = STEPS + PACK, PAIRS = LATENTS / 2, GROUPS = THREADS / PAIRS, OWN = STEPS / GROUPS;
    static constexpr int STAGE = STEPS * PITCH;

    const int column, latent, columns, latents;
    Key *const logits;  // of positions, of two chunks; E takes their place
    Key *const others;  // with ROWS the logits of rows, of two chunks, whose place w takes; else what E leaves
    Key *const values, *const A;
    float *const sums, *const factors, *const scales;  // of E, (GROUPS, LATENTS); of S; of the rows of two chunks
    int *const raised;
    unsigned int *const bits;   // of the positions of two chunks that take part, two words each
    const unsigned int *taken;  // those of this chunk
    float reference[2], shift[2], total[2], top[2], factor[2];

    __device__ Passage(unsigned char *shared, int L, int D)
        : column(blockIdx.y * WIDE), latent(blockIdx.z * LATENTS), columns(min(D - column, WIDE)),
          latents(min(L - latent, LATENTS)), logits((Key *)shared), others(logits + 2 * STAGE),
          values(others + (ROWS ? 2 : 1) * STAGE), A(values + STEPS * SPREAD),
          sums((float *)(A + (ROWS ? STEPS * NARROW : 0))), factors(sums + GROUPS * LATENTS), scales(factors + LATENTS),
          raised((int *)(scales + (ROWS ? 4 * STEPS : 0))), bits((unsigned int *)raised + 1), taken(bits) {}

    static __device__ int lane() { return threadIdx.x % 32; }
    __device__ bool idle() const { return channel() >= columns; }
    static __device__ int own_latent() { return threadIdx.x % PAIRS * 2; }
    static __device__ int own_step() { return threadIdx.x / PAIRS * OWN; }

    // Begin with the state at one place of (b, slots, L[, D]), or with an empty one.
    __device__ void begin(const float *before, const float *sums_before, const float *states, long long place, int L,
                          int D) {
        const bool begun = before && sums_before;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int l = own_latent() + i;
            const float m = begun && l < latents ? before[place * L + latent + l] : nothing<float>();
            const bool sees = m != nothing<float>();
            const float s = sees ? sums_before[place * L + latent + l] : 0;
            reference[i] = l < latents ? is_finite(m) ? m : 0 : -nothing<float>();  // beyond the last latent E is 0
            total[i] = sees && !is_finite(m) ? m - m : s;                           // NaN
            shift[i] = 0, factor[i] = 1, top[i] = nothing<float>();
        }
        this->load(states ? states + (place * L + latent) * D + column : nullptr, latents, columns, D);
    }

    __device__ unsigned int *word(Key *stage, int k) const { return (unsigned int *)(stage + k * PITCH + own_latent()); }

    // The logit of one of the two latents of this thread at a step.
    __device__ float logit(const Key *stage, int k, int i) const {
        if (!(taken[k / 32] >> k % 32 & 1)) return nothing<float>();
        return number_of(Key{}, *(const unsigned int *)(stage + k * PITCH + own_latent()), i);
    }

    __device__ float exponent(float x, int i) const { return fmaf(x - reference[i], LOG2_E, -shift[i]); }

    // Call `use(k, x)` for the own steps of this thread, with its two logits: nothing before `low`, from `stop` on, and where
    // a position is masked.
    template <typename Use>
    __device__ void each_step(const Key *stage, int low, int stop, Use use) const {
        const int first = own_step(), before = max(low - first, 0), after = max(first + OWN - stop, 0);
        unsigned int bits = taken[first / 32] >> first % 32;
        bits = before + after < OWN ? bits >> before << before << 32 - OWN << after >> after >> 32 - OWN : 0;
#pragma unroll 4
        for (int j = 0; j < OWN; ++j) {
            const unsigned int both = *(const unsigned int *)(stage + (first + j) * PITCH + own_latent());
            const bool there = bits >> j & 1;
            const float x[2] = {there ? number_of(Key{}, both, 0) : nothing<float>(),
                                there ? number_of(Key{}, both, 1) : nothing<float>()};
            use(first + j, x);
        }
    }

    // Bring the sums of the latents of this thread between 1/2 and 1. The first logit that an empty latent sees becomes its
    // reference.
    __device__ void settle(const Key *stage, int low, int stop) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            factor[i] = 1;
            if (total[i] != 0 && is_finite(total[i])) {
                const int exponent = max(min((int)(__float_as_uint(total[i]) >> 23) - 126, 126), -126);
                factor[i] = __uint_as_float((unsigned int)(127 - exponent) << 23);
                total[i] *= factor[i], shift[i] += (float)exponent;
            }
            if (total[i] != 0 || own_latent() + i >= latents) continue;
            reference[i] = shift[i] = 0;
#pragma unroll 1
            for (int k = low; k < stop; ++k) {
                const float x = logit(stage, k, i);
                if (x == nothing<float>()) continue;
                if (is_finite(x)) reference[i] = x;
                break;
            }
        }
    }

    // Make the logit at a step the reference of each latent whose exponential exceeds the most there.
    __device__ void raise(const Key *stage, int low) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float x = logit(stage, low, i);
            if (!(exponent(x, i) > MOST && is_finite(x))) continue;
            const float lowered = power_of_two(fmaf(reference[i] - x, LOG2_E, shift[i]));
            total[i] *= lowered, factor[i] *= lowered;
            reference[i] = x, shift[i] = 0;
        }
    }

    // The step at which this part of a chunk stops: before the next one at which a reference rises. The sums of E too.
    __device__ int open(const Key *stage, int low, int count) {
        int stop = count;
        for (;;) {
            float sum[2] = {};
            int first = stop;
            each_step(stage, low, stop, [&](int k, const float (&x)[2]) {
                const float power[2] = {exponent(x[0], 0), exponent(x[1], 1)};
                const float e[2] = {power_of_two(power[0]), power_of_two(power[1])};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (power[i] > MOST && is_finite(x[i])) first = min(first, k);
                    if (!ROWS && !(x[i] <= top[i])) top[i] = x[i];
                }
                add(sum, e);
            });
#pragma unroll
            for (int i = 0; i < 2; ++i) sums[threadIdx.x / PAIRS * LATENTS + own_latent() + i] = sum[i];
            if (!__syncthreads_or(first < stop)) return stop;
            if (threadIdx.x == 0) *raised = stop;
            __syncthreads();
            atomicMin(raised, first);
            __syncthreads();
            stop = *raised;
            if (stop > low) continue;
            raise(stage, low), stop = count;
        }
    }

    // Sums add the numbers that are multiplied.
    static __device__ unsigned int add(float (&sum)[2], const float (&e)[2]) {
        const unsigned int both = pack(Key{}, e[0], e[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[i] += ROWS ? number_of(Key{}, both, i) : e[i];
        return both;
    }

    // E in the place of the logits, zero before `low` and from `stop` on; and w in the place of the logits of rows.
    // `scale` holds the largest logit of each row, and the inverse of its sum.
    __device__ void weigh(Key *stage, Key *rows, const float *scale, int low, int stop, bool enters) {
        float sum[2] = {total[0], total[1]};
        if (enters) {
            for (int group = 0; group < GROUPS; ++group)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (group == threadIdx.x / PAIRS) sum[i] = total[i];
                    total[i] += sums[group * LATENTS + own_latent() + i];
                }
        }
        each_step(stage, low, stop, [&](int k, const float (&x)[2]) {
            if (enters) {
                const float e[2] = {power_of_two(exponent(x[0], 0)), power_of_two(exponent(x[1], 1))};
                const unsigned int both = *word(stage, k) = add(sum, e);
                if (!ROWS)
                    *word(rows, k) = pack(Key{}, e[0] - number_of(Key{}, both, 0), e[1] - number_of(Key{}, both, 1));
            }
            if (!ROWS) return;
            const unsigned int both = *word(rows, k);
            float w[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float p = power_of_two((number_of(Key{}, both, i) - scale[k]) * LOG2_E) * scale[STEPS + k];
                w[i] = sum[i] != 0 && own_latent() + i < latents ? p * lift(Key{}) * reciprocal(sum[i]) : 0;
            }
            *word(rows, k) = pack(Key{}, w[0], w[1]);
        });
        if (threadIdx.x < PAIRS)
#pragma unroll
            for (int i = 0; i < 2; ++i) factors[own_latent() + i] = factor[i];
    }

    // A lane's address of its line of four matrices. With `across`, the second one is beside the first, and the third one
    // below; else the other way.
    static __device__ const Key *line(const Key *from, int pitch, bool across) {
        const int octet = lane() / 8, next = octet % 2 * 8, far = octet / 2 * 8;
        return from + (lane() % 8 + (across ? far : next)) * pitch + (across ? next : far);
    }

    // A of the rows of this warp, and zeros after each row.
    __device__ void multiply_pairs(const Key *E, const Key *w, int low, int stop) {
        const int first = threadIdx.x / 32 * TALL;
        if (first >= stop || first + TALL <= low) return;
#pragma unroll 1
        for (int u = 0; u <= first; u += TALL) {
            float found[2][4] = {};
#pragma unroll
            for (int l = 0; l < LATENTS; l += TALL) {
                unsigned int weights[4], e[4];
                load_matrices(weights, line(w + first * PITCH + l, PITCH, false));
                load_matrices(e, line(E + u * PITCH + l, PITCH, true));
                multiply_add(Key{}, found[0], weights, e[0], e[1]);
                multiply_add(Key{}, found[1], weights, e[2], e[3]);
            }
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int row = first + g() + 8 * i, at = u + OCTET * n + 2 * t();
                    *(unsigned int *)(A + row * NARROW + at) =
                        pack(Key{}, at <= row ? found[n][2 * i] : 0, at < row ? found[n][2 * i + 1] : 0);
                }
        }
    }

    // Let S follow references and shifts.
    __device__ void follow() {
        bool changed = false;
#pragma unroll
        for (int l = lane(); l < LATENTS; l += 32) changed |= factors[l] != 1;
        if (!__any_sync(ALL, changed)) return;
        each_sum([&](int l, int, float &sum) { sum *= factors[l]; });
    }

    // Y = w S of 16 rows, eight columns in each of the products.
    __device__ void read(const Key *w, int first, float (&Y)[2 * TILES][4]) const {
#pragma unroll
        for (int l = 0; l < OCTETS; l += 2) {
            unsigned int weights[4];
            load_matrices(weights, line(w + first * PITCH + OCTET * l, PITCH, false));
#pragma unroll
            for (int n = 0; n < 2 * TILES; ++n) {
                const float *const upper = S[n / 2][l] + n % 2 * 2, *const lower = S[n / 2][l + 1] + n % 2 * 2;
                multiply_add(Key{}, Y[n], weights, pack(Key{}, upper[0], upper[1]), pack(Key{}, lower[0], lower[1]));
            }
        }
    }

    // Y += A V of 16 rows.
    __device__ void add_pairs(int first, float (&Y)[2 * TILES][4]) const {
#pragma unroll 1
        for (int u = 0; u <= first; u += TALL) {
            unsigned int weights[4];
            load_matrices(weights, line(A + first * NARROW + u, NARROW, false));
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                unsigned int v[4];
                load_transposed(v, line(values + u * SPREAD + channel() + TALL * tile, SPREAD, false));
                multiply_add(Key{}, Y[2 * tile], weights, v[0], v[1]);
                multiply_add(Key{}, Y[2 * tile + 1], weights, v[2], v[3]);
            }
        }
    }

    // S += Eᵀ V.
    __device__ void enter(const Key *E, const Key *rests, int low, int stop) {
#pragma unroll 1
        for (int u = low / TALL * TALL; u < stop; u += TALL) {
            unsigned int v[TILES][4];
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                unsigned int found[4];
                load_transposed(found, line(values + u * SPREAD + channel() + TALL * tile, SPREAD, false));
                v[tile][0] = found[0], v[tile][1] = found[2], v[tile][2] = found[1], v[tile][3] = found[3];
            }
#pragma unroll
            for (int part = ROWS; part < 2; ++part)
#pragma unroll
                for (int j = 0; j < OCTETS; j += 2) {
                    unsigned int e[4];
                    load_transposed(e, line((part ? E : rests) + u * PITCH + OCTET * j, PITCH, false));
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        multiply_add(Key{}, S[tile][j], v[tile], e[0], e[1]);
                        multiply_add(Key{}, S[tile][j + 1], v[tile], e[2], e[3]);
                    }
                }
        }
    }

    // -- values that are not finite, which reach the rows that see them, and no others -------

    // Make those in the channels of this warp zero.
    __device__ void drop_others() {
#pragma unroll 1
        for (int at = lane(); at < STEPS * TALL * TILES; at += 32) {
            Key &x = values[at / (TALL * TILES) * SPREAD + channel() + at % (TALL * TILES)];
            if (!is_finite(widen(x))) x = Key{0};
        }
        __syncwarp();
    }

    // Call `use(u, row)` for the steps of a part, with the values of a position that any latent sees. Where a sum is not a
    // number, a later row that reads it is none, whatever its weights; so is each later row of this part.
    template <typename Use>
    __device__ void each_other(const Lines<Key> &from, const Lines<Key> &seen_by, long long start, int low, int stop,
                               Use use) const {
#pragma unroll 1
        for (int u = low; u < stop; ++u) {
            bool seen = false;
            if (taken[u / 32] >> u % 32 & 1)
                for (int l = lane(); l < latents; l += 32) seen = seen || sees(seen_by, start + u, l);
            if (!__any_sync(ALL, seen)) continue;
            use(u, from.from + (start + u) * from.step);
        }
    }

    // Such a value of a row, or 0.
    __device__ float other(const Key *row, int c) const {
        const float x = c < columns ? widen(row[c]) : 0;
        return is_finite(x) ? 0 : x;
    }

    static __device__ bool sees(const Lines<Key> &logits, long long position, int l) {
        return widen(logits.from[position * logits.step + l]) != nothing<float>();
    }

    __device__ void add_others(const Lines<Key> &from, const Lines<Key> &seen_by, long long start, int low, int stop,
                               int first, float (&Y)[2 * TILES][4]) const {
        each_other(from, seen_by, start, low, min(stop, first + TALL), [&](int u, const Key *row) {
            each_row(Y, [&](int k, int c, float &y) {
                if (u <= first + k) y += other(row, c);
            });
        });
    }

    __device__ void enter_others(const Lines<Key> &from, const Lines<Key> &seen_by, long long start, int low, int stop) {
        each_other(from, seen_by, start, low, stop, [&](int u, const Key *row) {
            each_sum([&](int l, int c, float &sum) {
                if (l < latents && sees(seen_by, start + u, l)) sum += other(row, c);
            });
        });
    }

    // Y += g x for some of 16 rows, with their gates g, and rows x that are `step` apart.
    __device__ void add_gated(float (&Y)[2 * TILES][4], int low, int stop, const float *gates, const float *x,
                              long long step) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int k = g() + 8 * i, first = channel() + 2 * t();
            if (k < low || k >= stop) continue;
            const float gate = gates[k] * lift(Key{});
            const float *const row = x + k * step + first;
#pragma unroll
            for (int n = 0; n < 2 * TILES; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c)
                    if (first + OCTET * n + c < columns) Y[n][2 * i + c] = fmaf(gate, row[OCTET * n + c], Y[n][2 * i + c]);
        }
    }

    // Write some of 16 rows to `to` of Y, two numbers at a time where they lie in a word.
    __device__ void write(const float (&rows)[2 * TILES][4], int low, int stop, int D, bool wide, void *Y, long long to) const {
#pragma unroll
        for (int n = 0; n < 2 * TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int k = g() + 8 * i, c = channel() + OCTET * n + 2 * t();
                if (k < low || k >= stop || c >= columns) continue;
                const float first = within(rows[n][2 * i] / lift(Key{}), Key{});
                const float second = within(rows[n][2 * i + 1] / lift(Key{}), Key{});
                const long long at = to + (long long)k * D + c;
                if (wide) {
                    ((float *)Y)[at] = first;
                    if (c + 1 < columns) ((float *)Y)[at + 1] = second;
                } else if (D % 2 == 0) {
                    *(unsigned int *)((Key *)Y + at) = pack(Key{}, first, second);
                } else {
                    narrow(first, ((Key *)Y)[at]);
                    if (c + 1 < columns) narrow(second, ((Key *)Y)[at + 1]);
                }
            }
        __syncwarp();
    }
};

}  // namespace

#define STORED_PARAMETERS                                                                                           \
    const Key *K, long long k_item, long long k_row, const Key *V, long long v_item, long long v_row,               \
        const unsigned char *mask, long long mask_item, long long mask_row

// The sums of each run by itself: the largest logit, and the sums relative to it, to (b, runs, L[, D]). Runs that no
// run follows are left out. The grid is (runs · b, columns, latents).
template <typename Key, int LATENTS, int TILES>
__global__ void __launch_bounds__(THREADS, BLOCKS<LATENTS>)
    half_runs(STORED_PARAMETERS, const long long *runs, int count, int L, int D, float *maxima, float *sums, float *states) {
    using Part = Passage<Key, LATENTS, TILES, false>;
    DYNAMIC_SHARED(shared);
    const Run run(runs, blockIdx.x % count);
    if (!run.followed) return;
    const long long item = blockIdx.x / count, place = item * count + blockIdx.x % count;
    Part part(shared, L, D);
    const Lines<Key> logits(K + item * k_item + run.position * k_row + part.latent, k_row, part.latents);
    const Lines<Key> values(V + item * v_item + run.position * v_row + part.column, v_row, part.columns);
    const unsigned char *const seen = mask ? mask + item * mask_item + run.position * mask_row : nullptr;
    part.begin(nullptr, nullptr, nullptr, 0, L, D);
    if (threadIdx.x < STEPS) bring_mask(part.bits, seen, mask_row, run.positions);
    logits.template arrive<LATENTS>(part.logits, 0, run.positions);
    for (int start = 0; start < run.positions; start += STEPS) {
        const int steps = min(run.positions - start, STEPS), next = start + STEPS, here = start / STEPS % 2;
        Key *const E = part.logits + here * Part::STAGE;
        commit_copies();
        wait_copies<0>();
        part.taken = part.bits + 2 * here;
        __syncthreads();
        values.template arrive<Part::WIDE>(part.values, start, steps);
        commit_copies();
        if (next < run.positions) {
            const unsigned char *const later = seen ? seen + next * mask_row : nullptr;
            if (threadIdx.x < STEPS) bring_mask(part.bits + 2 * (1 - here), later, mask_row, run.positions - next);
            logits.template arrive<LATENTS>(part.logits + (1 - here) * Part::STAGE, next, run.positions - next);
        }
        commit_copies();
        bool others = false;
        for (int low = 0, stop; low < steps; low = stop) {
            if (low) {  // E has taken the place of the logits
                __syncthreads();
                logits.template arrive<LATENTS>(E, start, steps);
                commit_copies();
                wait_copies<0>();
                __syncthreads();
            }
            part.settle(E, low, steps);
            stop = part.open(E, low, steps);
            part.weigh(E, part.others, nullptr, low, stop, true);
            wait_copies<1>();
            others |= Lines<Key>::template brought_other<Part::WIDE>(part.values);
            others = __syncthreads_or(others);
            if (part.idle()) continue;
            part.follow();
            if (others) part.drop_others();
            part.enter(E, part.others, low, stop);
            if (others) part.enter_others(values, logits, start, low, stop);
        }
    }
    // The largest logit of a latent is the one of some thread of it.
    float *const tops = part.sums;
#pragma unroll
    for (int i = 0; i < 2; ++i) tops[threadIdx.x / Part::PAIRS * LATENTS + part.own_latent() + i] = part.top[i];
    __syncthreads();
    if (threadIdx.x < Part::PAIRS)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int l = part.own_latent() + i;
            float top = nothing<float>();
            for (int group = 0; group < Part::GROUPS; ++group)
                if (!(tops[group * LATENTS + l] <= top)) top = tops[group * LATENTS + l];
            const float down = top == nothing<float>() ? 0 : exp2f(fmaf(part.reference[i] - top, LOG2_E, part.shift[i]));
            part.factors[l] = down;
            if (blockIdx.y == 0 && l < part.latents) {
                maxima[place * L + part.latent + l] = top;
                sums[place * L + part.latent + l] = part.total[i] * down;
            }
        }
    __syncthreads();
    float *const to = states + (place * L + part.latent) * D + part.column;
    part.each_sum([&](int l, int c, float &sum) {
        if (l < part.latents && c < part.columns) to[(long long)l * D + c] = sum * part.factors[l];
    });
}

// The rows of each run, to Y (b, slices of latents, T, D), in the format of the positions or, `wide`, in single precision.
// The grid is (runs · b, columns, latents).
template <typename Key, int LATENTS, int TILES>
__global__ void __launch_bounds__(THREADS, BLOCKS<LATENTS>)
    half_rows(STORED_PARAMETERS, const Key *Q, long long q_item, long long q_row, const float *gate_value,
              long long gate_value_item, long long gate_value_row, const float *largest, const float *inverse,
              const float *gates, START_PARAMETERS, const long long *runs, int count, int L, int D, long long T, bool wide,
              void *Y) {
    using Part = Passage<Key, LATENTS, TILES, true>;
    DYNAMIC_SHARED(shared);
    const Run run(runs, count - 1 - blockIdx.x % count);  // the last ones are the longest
    if (!run.rows) return;
    const long long item = blockIdx.x / count;
    const bool enters = run.positions, gated = gate_value && blockIdx.z == 0;
    Part part(shared, L, D);
    const Lines<Key> logits(K + item * k_item + run.position * k_row + part.latent, k_row, part.latents);
    const Lines<Key> values(V + item * v_item + run.position * v_row + part.column, v_row, part.columns);
    const Lines<Key> rows(Q + item * q_item + run.row * q_row + part.latent, q_row, part.latents);
    const unsigned char *const seen = mask ? mask + item * mask_item + run.position * mask_row : nullptr;
    const auto arrive = [&](int start, int stage) {
        const int steps = run.rows - start, own = threadIdx.x % STEPS;
        const float *const scale = threadIdx.x < STEPS ? largest : inverse;
        float *const to = part.scales + 2 * stage * STEPS + threadIdx.x;
        if (own < steps) copy_word_async(to, scale + item * T + run.row + start + own);
        else *to = 0;
        const unsigned char *const later = enters && seen ? seen + start * mask_row : nullptr;
        if (threadIdx.x < STEPS) bring_mask(part.bits + 2 * stage, later, mask_row, steps);
        if (enters) logits.template arrive<LATENTS>(part.logits + stage * Part::STAGE, start, steps);
        rows.template arrive<LATENTS>(part.others + stage * Part::STAGE, start, steps);
    };
    part.begin(references, sums, states, item * slots + run.slot, L, D);
    arrive(0, 0);
    for (int start = 0; start < run.steps(); start += STEPS) {
        const int steps = min(run.rows - start, STEPS), next = start + STEPS, here = start / STEPS % 2;
        Key *const E = part.logits + here * Part::STAGE, *const w = part.others + here * Part::STAGE;
        commit_copies();
        wait_copies<0>();
        part.taken = part.bits + 2 * here;
        __syncthreads();
        if (enters) values.template arrive<Part::WIDE>(part.values, start, steps);
        commit_copies();
        if (next < run.rows) arrive(next, 1 - here);
        commit_copies();
        bool others = false;
        for (int low = 0, stop = steps; low < steps; low = stop, stop = steps) {
            if (low) {  // E and w have taken the place of logits
                __syncthreads();
                logits.template arrive<LATENTS>(E, start, steps);
                rows.template arrive<LATENTS>(w, start, steps);
                commit_copies();
                wait_copies<0>();
                __syncthreads();
            }
            part.settle(E, low, enters ? steps : low);
            if (enters) stop = part.open(E, low, steps);
            part.weigh(E, w, part.scales + 2 * here * STEPS, low, stop, enters);
            if (enters) {
                wait_copies<1>();
                others |= Lines<Key>::template brought_other<Part::WIDE>(part.values);
                others = __syncthreads_or(others);
                part.multiply_pairs(E, w, low, stop);
            }
            __syncthreads();
            if (part.idle()) continue;
            part.follow();
            if (others) part.drop_others();
#pragma unroll 1
            for (int first = low / TALL * TALL; first < stop; first += TALL) {
                float y[2 * TILES][4] = {};
                part.read(w, first, y);
                if (enters) part.add_pairs(first, y);
                if (others) part.add_others(values, logits, start, low, stop, first, y);
                const long long at = run.row + start + first;
                if (gated)
                    part.add_gated(y, low - first, stop - first, gates + item * T + at,
                                   gate_value + item * gate_value_item + at * gate_value_row + part.column, gate_value_row);
                part.write(y, low - first, stop - first, D, wide, Y, ((item * gridDim.z + blockIdx.z) * T + at) * D + part.column);
            }
            if (enters) {
                part.enter(E, nullptr, low, stop);
                if (others) part.enter_others(values, logits, start, low, stop);
            }
        }
    }
}
