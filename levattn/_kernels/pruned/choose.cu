// Scores of rows by their places, and the rows with the largest scores, in their order.

#include "finite.cuh"
#include "warps.cuh"

namespace {

constexpr int SCORING = 256;  // threads of a block that scores
constexpr int ROWS = 64;      // of such a block
constexpr int CHOOSING = 1024;
constexpr int AHEAD = 4;  // scores that a thread reads before it looks at them
constexpr int DIGITS = 256;
constexpr int WARPS = CHOOSING / 32;

__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

// Words that rise with numbers: no number has the least, and infinity counts as the largest number.
__device__ inline unsigned int word_of(float x) {
    if (x != x) return 0;
    const unsigned int bits = __float_as_uint(fminf(x, 3.402823466e38f) + 0.0f);  // −0 is 0
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline unsigned long long word_of(double x) {
    if (x != x) return 0;
    const unsigned long long bits = (unsigned long long)__double_as_longlong(fmin(x, 1.7976931348623157e308) + 0.0);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

}  // namespace

// Write scores of rows with places X (rows, d) and the products `along` (rows,) of keys with the mean query: the logarithm of
// the expected weight, for residuals with that of the squared distance (rows,) to a center, or to zero without one. A
// distance below `same` of the squared length counts as that. `finite`: for each ROWS rows, whether squared lengths are.
template <typename Real>
__global__ void __launch_bounds__(SCORING)
    score_rows(const Real *X, const Real *along, const Real *distance, long long rows, int d, bool residual, double same,
               Real *scores, bool *finite) {
    const int lane = threadIdx.x % 32;
    const long long low = (long long)blockIdx.x * ROWS;
    bool sound = true;
    for (long long row = low + threadIdx.x / 32; row < min(low + ROWS, rows); row += SCORING / 32) {
        Real square = 0;
        for (int k = lane; k < d; k += 32) square = fma(X[row * d + k], X[row * d + k], square);
        square = sum_of_warp(square);
        Real score = along[row] + square / 2;
        if (residual)
            score += logarithm(max(distance ? distance[row] : square, max((Real)same * square, (Real)1e-30)));
        if (lane == 0) scores[row] = score;
        sound = sound && is_finite(square);
    }
    sound = __syncthreads_and(sound);
    if (threadIdx.x == 0) finite[blockIdx.x] = sound;
}

// Write to `order` (b, count) the rows with the largest of n scores, in their order; on ties the first. Rows with a flag in
// `first` (b, n) come before others. `flags` (b, n): which rows these are. `sound` (b,): whether all scores are numbers.
// A block has an item; it finds the smallest chosen score digit by digit.
template <typename Real>
__global__ void __launch_bounds__(CHOOSING, 1)
    choose_rows(const Real *scores, const bool *first, long long first_step, int n, int count, long long *order,
                bool *flags, bool *sound) {
    using Word = decltype(word_of(Real()));
    constexpr int BITS = 8 * sizeof(Word);
    __shared__ unsigned int found[DIGITS];
    __shared__ int larger[WARPS], equal[WARPS], chosen[2];
    const long long item = blockIdx.x;
    const Real *const own = scores + item * n;
    const bool *const ahead = first + item * first_step;
    const auto word = [&](int i) { return ahead[i] ? ~Word(0) : word_of(own[i]); };
    Word least = 0, known = 0;  // the digits of the smallest chosen word, and which are known
    int left = count;           // of the words that begin with these
    bool numbers = true;
    for (int shift = BITS - 8; shift >= 0; shift -= 8) {
        for (int k = threadIdx.x; k < DIGITS; k += CHOOSING) found[k] = 0;
        __syncthreads();
        int digit = 0;
        unsigned int run = 0;  // of equal digits, because many begin alike
        for (int low = threadIdx.x; low < n; low += AHEAD * CHOOSING) {
            Word x[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) x[u] = word(min(low + u * CHOOSING, n - 1));
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                numbers = numbers && x[u];
                if (low + u * CHOOSING >= n || (x[u] & known) != least) continue;
                const int next = (int)(x[u] >> shift & (DIGITS - 1));
                if (next != digit) {
                    if (run) atomicAdd(&found[digit], run);
                    digit = next, run = 0;
                }
                ++run;
            }
        }
        if (run) atomicAdd(&found[digit], run);
        __syncthreads();
        if (threadIdx.x < DIGITS) {
            int above = 0;
            for (int k = threadIdx.x + 1; k < DIGITS; ++k) above += found[k];
            if (above < left && left <= above + (int)found[threadIdx.x])
                chosen[0] = threadIdx.x, chosen[1] = above;
        }
        __syncthreads();
        if (count) least |= (Word)chosen[0] << shift, left -= chosen[1];
        known |= (Word)(DIGITS - 1) << shift;
    }
    numbers = __syncthreads_and(numbers);
    if (threadIdx.x == 0) sound[item] = numbers;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int written = 0;
    for (int low = 0; low < n; low += CHOOSING) {
        const int i = low + threadIdx.x;
        const Word x = i < n ? word(i) : 0;
        const bool above = count && i < n && x > least, tie = count && i < n && x == least;
        const unsigned int all_above = __ballot_sync(0xffffffffu, above), ties = __ballot_sync(0xffffffffu, tie);
        if (lane == 0) larger[warp] = __popc(all_above), equal[warp] = __popc(ties);
        __syncthreads();
        int place = __popc(all_above & ((1u << lane) - 1)), tied = __popc(ties & ((1u << lane) - 1));
        int every_above = 0, every_tie = 0;
#pragma unroll 4
        for (int k = 0; k < WARPS; ++k) {
            if (k < warp) place += larger[k], tied += equal[k];
            every_above += larger[k], every_tie += equal[k];
        }
        const bool take = above || (tie && tied < left);
        if (take) order[item * count + written + place + min(tied, left)] = i;
        if (i < n) flags[item * n + i] = take;
        written += every_above + min(every_tie, left);
        left -= min(every_tie, left);
        __syncthreads();
    }
}
