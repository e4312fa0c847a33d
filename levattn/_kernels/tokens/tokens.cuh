// What the kernels of token statistics attention share: runs of tokens, units of channels, and softmax over heads.
// Tokens are stored as Key, and everything else is of the type Real that they are computed in.
//
// A block of threads takes a run, all heads and channels of up to RUN tokens of a sequence. A unit is V channels of a
// head, next to each other; the units of a token are shared out over the threads, in rounds if there are more. Sums
// along a run are those of a thread in order. What a run begins with lies in a row of `pitch` numbers, as do the sums
// of a run: the channels of all heads, and then one weight of each head. Causal tokens have a row for each run, others
// one for each sequence.

#include "formats.cuh"

namespace {

constexpr int RUN = 16;        // tokens of a run
constexpr int DEEP = 8;        // tokens whose numbers are on their way together
constexpr int LINE = RUN + 1;  // numbers from head to head of an array (h, RUN) in shared memory
constexpr int MOST = 256;      // threads of a block
constexpr unsigned int ALL = 0xffffffffu;

template <typename Real>
constexpr int RESIDENT = sizeof(Real) == 4 ? 2 : 1;  // blocks of a multiprocessor

enum Logits { NONE, NORM, DIAGONAL };

// A run, by its number from all sequences of all items: `firsts` (n + 1,) counts the runs before each sequence. Passes
// over the tokens go forwards and backwards in turn, so that one finds in the cache what the one before left there.
struct Run {
    long long item, sequence, number, first;  // the last is its first token
    int tokens;
    unsigned int present;  // a bit for each token that takes part

    // All of a sequence of at most RUN tokens, by its number from all items; without offsets there is one of `all`.
    __device__ Run(const long long *offsets, int n, long long all, const unsigned char *mask, long long mask_item,
                   long long mask_row) {
        item = blockIdx.x / n, sequence = number = blockIdx.x % n;
        first = offsets ? offsets[sequence] : 0;
        tokens = (int)((offsets ? offsets[sequence + 1] : all) - first);
        look(mask, mask_item, mask_row);
    }

    __device__ Run(const long long *offsets, const long long *firsts, int n, const unsigned char *mask,
                   long long mask_item, long long mask_row, bool downwards) {
        const long long block = downwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x, count = firsts[n];
        item = block / count, number = block % count;
        int low = 0, high = n;  // the last sequence whose runs begin at this one or before
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (firsts[middle] <= number) low = middle;
            else high = middle;
        }
        sequence = low;
        first = offsets[low] + (number - firsts[low]) * RUN;
        tokens = (int)min(offsets[low + 1] - first, (long long)RUN);
        look(mask, mask_item, mask_row);
    }

    __device__ void look(const unsigned char *mask, long long mask_item, long long mask_row) {
        const int lane = threadIdx.x % 32;
        present = __ballot_sync(
            ALL, lane < tokens && (!mask || mask[item * mask_item + (first + lane) * mask_row]));
    }

    __device__ bool has(int t) const { return present >> t & 1; }

    // Where in an array of rows of `pitch` numbers lies what the run begins with, and what it sums up.
    __device__ long long begins(bool causal, const long long *firsts, int n, int pitch) const {
        return (causal ? item * firsts[n] + number : item * n + sequence) * pitch;
    }
    __device__ long long ends(const long long *firsts, int n, int pitch) const {
        return (item * firsts[n] + number) * pitch;
    }
};

template <typename Key, int V>
struct alignas(V * sizeof(Key)) Vector {
    Key keys[V];
};

// V numbers next to each other; `whole` if they lie as a vector has to.
template <int V, typename Key, typename Real>
__device__ inline void load(const Key *from, bool whole, Real (&to)[V]) {
    if constexpr (V > 1) {
        if (whole) {
            const Vector<Key, V> vector = *(const Vector<Key, V> *)from;
#pragma unroll
            for (int v = 0; v < V; ++v) to[v] = widen(vector.keys[v]);
            return;
        }
    }
#pragma unroll
    for (int v = 0; v < V; ++v) to[v] = widen(from[v]);
}

template <int V, typename Key, typename Real>
__device__ inline void store(Key *to, bool whole, const Real (&from)[V]) {
    if constexpr (V > 1) {
        if (whole) {
            Vector<Key, V> vector;
#pragma unroll
            for (int v = 0; v < V; ++v) narrow(from[v], vector.keys[v]);
            *(Vector<Key, V> *)to = vector;
            return;
        }
    }
#pragma unroll
    for (int v = 0; v < V; ++v) narrow(from[v], to[v]);
}

template <int V, typename Real>
__device__ inline void fill(Real value, Real (&to)[V]) {
#pragma unroll
    for (int v = 0; v < V; ++v) to[v] = value;
}

// Tokens of a unit, `step` apart: where they lie, or where their thread has put them in shared memory.
template <typename Key, int V>
struct Unit {
    const Key *from;
    long long step;
    bool whole;

    // Some tokens from a place on; zeros for those that take no part.
    template <int COUNT, typename Real>
    __device__ void bring(int low, unsigned int present, Real (&to)[COUNT][V]) const {
        const Key *next = from + low * step;
#pragma unroll
        for (int t = 0; t < COUNT; ++t, next += step) {
            fill<V>((Real)0, to[t]);
            if (present >> low + t & 1) load<V>(next, whole, to[t]);
        }
    }
};

// And numbers of a head's tokens.
template <int DEEP, typename Real>
__device__ inline void bring(const Real *from, unsigned int present, Real (&to)[DEEP]) {
#pragma unroll
    for (int t = 0; t < DEEP; ++t) to[t] = present >> t & 1 ? from[t] : 0;
}

// V numbers of a row that a run begins with, of which there may be none.
template <int V, typename Real>
__device__ inline void begin(const Real *row, int place, Real (&to)[V]) {
    if (row) load<V>(row + place, true, to);
    else fill<V>((Real)0, to);
}

// An array (b, h, T, d) with any steps along the first three axes, from the first token of a run on.
template <typename Key, int V>
struct Channels {
    Key *from;
    long long of_head, of_row;
    int each, units;  // of a head, of all

    __device__ Channels(Key *array, long long of_item, long long of_head, long long of_row, const Run &run, int h, int d)
        : from(array + run.item * of_item + run.first * of_row), of_head(of_head), of_row(of_row), each(d / V),
          units(h * each) {}

    __device__ Key *of(int unit) const { return from + unit / each * of_head + unit % each * V; }
};

// The same to be read, once from where it lies, or more than once from shared memory.
template <typename Key, int V>
struct Tokens : Channels<const Key, V> {
    bool whole;
    const Key *held = nullptr;  // (RUN, h d)

    __device__ Tokens(const Key *array, long long of_item, long long of_head, long long of_row, const Run &run, int h,
                      int d)
        : Channels<const Key, V>(array, of_item, of_head, of_row, run, h, d),
          whole((unsigned long long)array % (V * sizeof(Key)) == 0) {}

    __device__ Unit<Key, V> unit(int unit) const {
        if (held) return {held + unit * V, (long long)this->units * V, true};
        return {this->of(unit), this->of_row, whole};
    }

    // Bring all tokens of a run to `room`, if there is any: a thread those of its units, which no other one reads.
    __device__ void hold(const Run &run, unsigned char *room) {
        if (!room) return;
        Key *const to = (Key *)room;
        for (int unit = threadIdx.x; unit < this->units; unit += blockDim.x) {
            const Key *next = this->of(unit);
#pragma unroll 1
            for (int low = 0; low < run.tokens; low += DEEP) {
                Vector<Key, V> together[DEEP];
#pragma unroll
                for (int t = 0; t < DEEP; ++t, next += this->of_row) {
                    if (!run.has(low + t)) continue;
                    if (whole) together[t] = *(const Vector<Key, V> *)next;
                    else
#pragma unroll
                        for (int v = 0; v < V; ++v) together[t].keys[v] = next[v];
                }
#pragma unroll
                for (int t = 0; t < DEEP; ++t)
                    if (run.has(low + t)) ((Vector<Key, V> *)to)[(low + t) * this->units + unit] = together[t];
            }
        }
        held = to;
    }
};

// The rates at which sums of a head decay.
template <typename Real>
__device__ inline Real rate_of(const double *rates, int head) {
    return rates ? (Real)rates[head] : (Real)1;
}

// A token's part in the sums that causal tokens read.
template <int V, typename Real>
__device__ inline void add_token(Real rate, Real P, const Real (&w)[V], Real (&M)[V], Real &N) {
#pragma unroll
    for (int v = 0; v < V; ++v) M[v] = fma(rate, M[v], P * (w[v] * w[v]));
    N = fma(rate, N, P);
}

// The weights of the tokens that token t sees, after `before`.
template <typename Real>
__device__ inline Real count_of(const Run &run, int t, Real rate, Real before, bool causal) {
    for (int s = 0; causal && s <= t; ++s)
        if (run.has(s)) before = fma(rate, before, (Real)1);
    return before;
}

// Add up over the units of each head what one round of threads has left in `parts` (DEEP, blockDim.x + 1), and call
// `use(head, t, sum, fresh)`; a head whose units are of two rounds comes twice, and is fresh at first.
template <int DEEP, typename Real, typename Use>
__device__ inline void gather_units(const Real *parts, int base, int units, int each, Use use) {
    const int threads = blockDim.x, stop = min(base + threads, units), low = base / each;
    const int count = (stop - 1) / each - low + 1;
    for (int i = threadIdx.x; i < count * DEEP; i += threads) {
        const int t = i % DEEP, head = low + i / DEEP;
        const int from = max(head * each, base), to = min((head + 1) * each, stop);
        const Real *const row = parts + t * (threads + 1) - base;
        Real sum = 0;
        for (int unit = from; unit < to; ++unit) sum += row[unit];
        use(head, t, sum, from == head * each);
    }
}

// Combine what the threads of a token have found: the token of a thread is its number modulo RUN. `shared` has a line
// for each warp.
template <typename Real, typename Join>
__device__ inline Real join_threads(Real value, Real (*shared)[RUN], Join join) {
    value = join(value, __shfl_xor_sync(ALL, value, RUN));
    if (threadIdx.x % 32 < RUN) shared[threadIdx.x / 32][threadIdx.x % RUN] = value;
    __syncthreads();
    value = shared[0][threadIdx.x % RUN];
    for (int warp = 1; warp < (int)blockDim.x / 32; ++warp) value = join(value, shared[warp][threadIdx.x % RUN]);
    return value;
}

}  // namespace

#define TOKEN_PARAMETERS                                                                                            \
    const Key *W, long long w_item, long long w_head, long long w_row, const unsigned char *mask,                   \
        long long mask_item, long long mask_row, const long long *offsets, const long long *firsts, int n,          \
        const double *rates, int h, int d, int pitch, bool causal

#define THIS_RUN(downwards) Run(offsets, firsts, n, mask, mask_item, mask_row, downwards)
