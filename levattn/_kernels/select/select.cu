// Which keys their scores select: thresholds, the score of a rank, lists of what was found, and the rows listed.
//
// Matrices are cut into tiles of entries, numbered one matrix after the other. A pass counts what each tile has, and
// after an exclusive scan of the counts a second one writes it to its place: lists ascend, whoever comes first.

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROUNDS = 8;                  // entries that a thread looks at
constexpr int RUN = 32 * ROUNDS;           // consecutive entries of a warp
constexpr int TILE = WARPS * RUN;          // of a block
constexpr int SPAN = 32 * THREADS;         // entries whose digits a block counts
constexpr int DIGIT_BITS = 11;             // at most
constexpr int DIGITS = 1 << DIGIT_BITS;
constexpr int OWN = DIGITS / THREADS;      // digits that a thread sums up
constexpr int COPIED = 16;                 // rows that a block copies
constexpr int SEEKERS = 1024;              // threads that look at a whole matrix

__device__ inline double infinite() { return __longlong_as_double(0x7ff0000000000000ll); }

// Out, in, or between the bounds, where it is to be looked at again; NaN is between all bounds.
template <typename Real>
__device__ inline bool is_in(Real x, double high) {
    return (double)x >= high;
}
template <typename Real>
__device__ inline bool is_listed(Real x, double low, double high) {
    return !((double)x < low) && !((double)x >= high);
}

// The least number above x; infinity and NaN are their own.
__device__ inline double upward(double x) {
    if (x != x || x == infinite()) return x;
    const long long bits = __double_as_longlong(x == 0 ? 0.0 : x);
    return __longlong_as_double(bits < 0 ? bits - 1 : bits + 1);
}

// The larger of two numbers, NaN if one of them is.
template <typename Real>
__device__ inline Real larger(Real a, Real b) {
    return a != a || a > b ? a : b;
}

// Bits that are ordered as the numbers are, zeros alike, and NaN above all numbers.
__device__ inline unsigned long long ordered(float x) {
    if (x != x) return 0xffffffffu;
    const unsigned int bits = __float_as_uint(x == 0 ? 0.0f : x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline unsigned long long ordered(double x) {
    if (x != x) return ~0ull;
    const unsigned long long bits = (unsigned long long)__double_as_longlong(x == 0 ? 0.0 : x);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}
__device__ inline double number(unsigned long long bits, float) {
    const unsigned int low = (unsigned int)bits;
    return (double)__uint_as_float(low >> 31 ? low & 0x7fffffffu : ~low);
}
__device__ inline double number(unsigned long long bits, double) {
    return __longlong_as_double((long long)(bits >> 63 ? bits & ~(1ull << 63) : ~bits));
}

// Count the next digits, of `bits` bits above `shift`, of entries from `start` to `stop` whose higher digits are `prefix`.
template <typename Real>
__device__ inline void add_digits(const Real *values, const unsigned char *present, long long start, long long stop,
                                  unsigned long long prefix, int shift, int bits, unsigned int *found) {
#pragma unroll 4
    for (long long at = start + threadIdx.x; at < stop; at += THREADS) {
        if (present && !present[at]) continue;
        const unsigned long long key = ordered(values[at]) >> shift;
        if (key >> bits == prefix) atomicAdd(&found[key & ((1ull << bits) - 1)], 1u);
    }
}

// Give `use` the digit of the entry of a rank, counted from the largest, and its rank among the entries with that digit; in
// one thread. The counts (DIGITS,) become 0. Return false for a rank of 0, and at `first` if there are no more entries.
template <typename Count, typename Use>
__device__ inline bool find_digit(Count *counts, unsigned long long rank, bool first, unsigned long long *sums, Use use) {
    Count *const mine = counts + DIGITS - 1 - (int)threadIdx.x * OWN;
    Count own[OWN];
    unsigned long long total = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        own[i] = mine[-i];
        mine[-i] = 0;
        total += own[i];
    }
    sums[threadIdx.x] = total;
    for (int step = 1; step < THREADS; step *= 2) {
        __syncthreads();
        const unsigned long long before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
    }
    __syncthreads();
    if (rank == 0 || (first && rank >= sums[THREADS - 1])) return false;
    unsigned long long before = sums[threadIdx.x] - total;
    if (rank <= before || rank > before + total) return true;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (rank > before && rank <= before + own[i]) use(DIGITS - 1 - (int)threadIdx.x * OWN - i, rank - before);
        before += own[i];
    }
    return true;
}

// Write the entry of a rank of this block's matrix to the first row of `bounds`, and the bounds around it to the others.
__device__ inline void write_bounds(double entry, const double *margins, double *bounds) {
    double *const to = bounds + blockIdx.x;
    *to = entry;
    to[gridDim.x] = entry * (1 - margins[blockIdx.x]);
    to[2 * gridDim.x] = upward(entry * (1 + margins[blockIdx.x]));
}

}  // namespace

// How many entries of each tile are between the bounds of their matrix: to `counts` (b · tiles,). `chosen` (b, n), if given,
// is set for those at or above them. Without `high` the upper bound is infinite. Left out are entries that are not `present`
// or have a flag in `without`, both (b, n) or absent.
template <typename Real>
__global__ void __launch_bounds__(THREADS)
    count_listed(const Real *values, const unsigned char *present, const unsigned char *without, const double *low,
                 const double *high, long long n, long long tiles, unsigned char *chosen, long long *counts) {
    __shared__ int found[WARPS];
    const long long item = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long first = tile * TILE + warp * RUN + lane, matrix = item * n;
    const double least = low[item], most = high ? high[item] : infinite();
    Real read[ROUNDS];
    bool part[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const long long at = first + 32 * i;
        read[i] = at < n ? values[matrix + at] : (Real)0;
        part[i] = at < n && (!present || present[matrix + at]) && !(without && without[matrix + at]);
    }
    int count = 0;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const long long at = first + 32 * i;
        count += part[i] && is_listed(read[i], least, most);
        if (chosen && at < n) chosen[matrix + at] = part[i] && is_in(read[i], most);
    }
    for (int step = 16; step; step /= 2) count += __shfl_xor_sync(0xffffffffu, count, step);
    if (lane == 0) found[warp] = count;
    __syncthreads();
    if (threadIdx.x) return;
    long long total = 0;
    for (int i = 0; i < WARPS; ++i) total += found[i];
    counts[blockIdx.x] = total;
}

// Where the entries of each tile go, to `offsets` (items · tiles + 1,), and where those of each matrix begin, to `starts`
// (items + 1,). One block of threads adds up as many consecutive counts each.
__global__ void __launch_bounds__(THREADS)
    find_places(const long long *counts, long long items, long long tiles, long long *offsets, long long *starts) {
    __shared__ long long sums[THREADS];
    const long long all = items * tiles, own = (all + THREADS - 1) / THREADS;
    const long long first = min(threadIdx.x * own, all), last = min(first + own, all);
    long long total = 0;
    for (long long i = first; i < last; ++i) total += counts[i];
    sums[threadIdx.x] = total;
    for (int step = 1; step < THREADS; step *= 2) {
        __syncthreads();
        const long long before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
    }
    long long place = sums[threadIdx.x] - total;  // its own sum, which no other thread changes any more
    for (long long i = first; i < last; ++i) {
        offsets[i] = place;
        if (i % tiles == 0) starts[i / tiles] = place;
        place += counts[i];
    }
    if (threadIdx.x < THREADS - 1) return;
    offsets[all] = starts[items] = place;
    for (long long item = 0; item < items && !tiles; ++item) starts[item] = 0;
}

// The numbers within their matrix of the entries that were counted, to places from `offsets` on.
template <typename Real>
__global__ void __launch_bounds__(THREADS)
    fill_listed(const Real *values, const unsigned char *present, const unsigned char *without, const double *low,
                const double *high, long long n, long long tiles, const long long *offsets, long long *indices) {
    __shared__ int found[WARPS];
    if (offsets[blockIdx.x] == offsets[blockIdx.x + 1]) return;
    const long long item = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long first = tile * TILE + warp * RUN + lane, matrix = item * n;
    const double least = low[item], most = high ? high[item] : infinite();
    unsigned int votes[ROUNDS];
    int count = 0;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const long long at = first + 32 * i;
        const bool there = at < n && (!present || present[matrix + at]) && !(without && without[matrix + at]);
        votes[i] = __ballot_sync(0xffffffffu, there && is_listed(values[matrix + at], least, most));
        count += __popc(votes[i]);
    }
    if (lane == 0) found[warp] = count;
    __syncthreads();
    long long place = offsets[blockIdx.x];
    for (int i = 0; i < warp; ++i) place += found[i];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        const long long mine = place + __popc(votes[i] & ((1u << lane) - 1));
        if (votes[i] >> lane & 1) indices[mine] = first + 32 * i;
        place += __popc(votes[i]);
    }
}

// How many of the entries whose higher digits are those of `prefixes` (b,) have each next digit, of `bits` bits above
// `shift`: added to `counts` (b, DIGITS). The grid is b · (spans of a matrix).
template <typename Real>
__global__ void __launch_bounds__(THREADS)
    count_digits(const Real *values, const unsigned char *present, long long n, long long spans,
                 const unsigned long long *prefixes, int shift, int bits, unsigned long long *counts) {
    __shared__ unsigned int found[DIGITS];
    const long long item = blockIdx.x / spans, matrix = item * n;
    const long long start = blockIdx.x % spans * SPAN, stop = min(start + SPAN, n);
    for (int i = threadIdx.x; i < DIGITS; i += THREADS) found[i] = 0;
    __syncthreads();
    add_digits(values, present, matrix + start, matrix + stop, prefixes[item], shift, bits, found);
    __syncthreads();
    for (int i = threadIdx.x; i < DIGITS; i += THREADS)
        if (found[i]) atomicAdd(&counts[item * DIGITS + i], (unsigned long long)found[i]);
}

// The next digit of the entry of rank `ranks` (b,), at first `size`, counted from the largest among those with the same higher digits:
// appended to the prefix; the rank becomes that among the entries with this digit, and the counts 0. A rank that is
// not below the number of entries becomes 0, which says that all are wanted. The last digit completes the entries, the first
// row of `bounds` (3, b), −∞ where all are wanted. By `margins` (b,) further rows are the entries times 1 − margin, and the
// least numbers above the entries times 1 + margin. The grid is b.
template <typename Real>
__global__ void __launch_bounds__(THREADS)
    choose_digit(unsigned long long *counts, unsigned long long *prefixes, unsigned long long *ranks, long long size, int bits,
                 bool first, bool last, const double *margins, double *bounds) {
    __shared__ unsigned long long sums[THREADS];
    __shared__ double entry;
    const long long item = blockIdx.x;
    const unsigned long long rank = first ? (unsigned long long)size : ranks[item], prefix = prefixes[item];
    if (threadIdx.x == 0) entry = -infinite();
    const bool some = find_digit(counts + item * DIGITS, rank, first, sums, [&](int digit, unsigned long long left) {
        prefixes[item] = prefix << bits | (unsigned long long)digit;
        ranks[item] = left;
        entry = number(prefix << bits | (unsigned long long)digit, Real());
    });
    if (!some && threadIdx.x == 0) ranks[item] = 0;
    __syncthreads();
    if (last && threadIdx.x == 0) write_bounds(entry, margins, bounds);
}

// The entries of rank `size`, and bounds around them, as `choose_digit` completes them, of matrices with at most SPAN
// entries. The grid is b.
template <typename Real>
__global__ void __launch_bounds__(THREADS)
    find_ranked(const Real *values, const unsigned char *present, long long n, long long size, const double *margins,
                double *bounds) {
    __shared__ unsigned int found[DIGITS];
    __shared__ unsigned long long sums[THREADS], prefix, rank;
    __shared__ double entry;
    for (int i = threadIdx.x; i < DIGITS; i += THREADS) found[i] = 0;
    if (threadIdx.x == 0) prefix = 0, rank = (unsigned long long)size, entry = -infinite();
    bool first = true;
    for (int shift = 8 * sizeof(Real); shift; first = false) {
        const int bits = min(DIGIT_BITS, shift);
        shift -= bits;
        __syncthreads();
        const unsigned long long higher = prefix, wanted = rank;
        add_digits(values, present, blockIdx.x * n, blockIdx.x * n + n, higher, shift, bits, found);
        __syncthreads();
        const bool some = find_digit(found, wanted, first, sums, [&](int digit, unsigned long long left) {
            prefix = higher << bits | (unsigned long long)digit;
            rank = left;
            entry = number(prefix, Real());
        });
        if (!some) break;
    }
    __syncthreads();
    if (threadIdx.x == 0) write_bounds(entry, margins, bounds);
}

// A number below which no entry is the largest of its matrix, among those that are `present` (b, n) and not in `chosen`:
// the largest one times 1 − margin, to `bounds` (b,). Entries that are left out count as zero; NaN is the largest.
//
// Where `begins` (b + 1,) say that one entry of a matrix lies between `low` and `high`, it is set in `chosen` before. The
// grid is b.
template <typename Real>
__global__ void __launch_bounds__(SEEKERS)
    bound_left(const Real *values, const unsigned char *present, const long long *begins, const double *low,
               const double *high, long long n, const double *margins, unsigned char *chosen, double *bounds) {
    __shared__ Real tops[SEEKERS];
    const long long item = blockIdx.x, matrix = item * n;
    const bool alone = begins && begins[item + 1] - begins[item] == 1;
    const double least = alone ? low[item] : 0, most = alone ? high[item] : 0;
    Real top = (Real)-infinite();
#pragma unroll 4
    for (long long at = matrix + threadIdx.x; at < matrix + n; at += SEEKERS) {
        const Real x = values[at];
        bool left = (!present || present[at]) && !(chosen && chosen[at]);
        if (left && alone && is_listed(x, least, most)) {
            chosen[at] = 1;
            left = false;
        }
        top = larger(top, left ? x : (Real)0);
    }
    tops[threadIdx.x] = top;
    for (int half = SEEKERS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) tops[threadIdx.x] = larger(tops[threadIdx.x], tops[threadIdx.x + half]);
    }
    if (threadIdx.x == 0) bounds[item] = (n ? (double)tops[0] : 0) * (1 - margins[item]);
}

// The rows `indices` of each matrix (of d numbers; strides are in numbers): to rows of `out` from item · width on, or one
// after the other for a width of 0. There are `room` of them, the last of `starts` (items + 1,). Without `starts` each matrix
// has `width` rows.
template <typename Stored>
__global__ void __launch_bounds__(THREADS)
    gather_rows(const Stored *rows, long long item_stride, long long row_stride, long long column_stride,
                const long long *starts, long long items, const long long *indices, long long room, long long width,
                int d, Stored *out) {
    __shared__ long long sources[COPIED], targets[COPIED];
    const long long first = (long long)blockIdx.x * COPIED;
    const int count = (int)min((long long)COPIED, room - first);
    if (threadIdx.x < count) {
        const long long at = first + threadIdx.x;
        long long item = starts ? 0 : at / width, end = items;  // starts[item] <= at < starts[end]
        while (starts && end - item > 1) {
            const long long middle = (item + end) / 2;
            if (starts[middle] <= at) item = middle;
            else end = middle;
        }
        sources[threadIdx.x] = item * item_stride + indices[at] * row_stride;
        targets[threadIdx.x] = (width && starts ? item * width + at - starts[item] : at) * d;
    }
    __syncthreads();
    constexpr int pack = sizeof(uint4) / sizeof(Stored);
    const unsigned long long places = (unsigned long long)rows | (unsigned long long)out;
    const long long steps = item_stride | row_stride | d;
    const bool whole = column_stride == 1 && places % sizeof(uint4) == 0 && steps % pack == 0;
    const unsigned int units = whole ? d / pack : d;
    for (unsigned int i = threadIdx.x; i < count * units; i += THREADS) {
        const unsigned int row = i / units, unit = i % units;
        const Stored *const from = rows + sources[row];
        if (whole) ((uint4 *)(out + targets[row]))[unit] = ((const uint4 *)from)[unit];
        else out[targets[row] + unit] = from[unit * column_stride];
    }
}
