// Attention of rows to the few keys near them, which come out of the summaries that stand for them, and what joins that to
// attention to slots.
//
// A warp has one row, and a lane one of the keys near it. Columns are shared out to the lanes: a lane has COLUMNS of them.

#include "formats.cuh"

namespace {

constexpr int WARPS = 8;  // of a block
constexpr int LANES = 32;
constexpr int ABREAST = 4;  // rows of an array that a warp reads at a time
constexpr float REMAINS = 0.25f;
constexpr unsigned int ALL = 0xffffffffu;

__device__ inline float nothing() { return __int_as_float(0xff800000); }  // −∞

__device__ inline float sum_of_lanes(float x) {
#pragma unroll
    for (int half = LANES / 2; half; half /= 2) x += __shfl_xor_sync(ALL, x, half);
    return x;
}

__device__ inline float largest_of_lanes(float x) {
#pragma unroll
    for (int half = LANES / 2; half; half /= 2) x = max(x, __shfl_xor_sync(ALL, x, half));
    return x;
}

// What the lanes of a warp tell each other.
struct Told {
    float logit[LANES], out[LANES], weight[LANES];
    int name[LANES];
};

// Columns of a row that a lane has.
template <int COLUMNS>
struct Columns {
    float of[COLUMNS];

    template <typename Number>
    __device__ void read(const Number *row, int count) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = threadIdx.x % LANES + LANES * c;
            of[c] = column < count ? widen(row[column]) : 0;
        }
    }

    __device__ float times(const Columns &other) const {
        float sum = 0;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) sum = fmaf(of[c], other.of[c], sum);
        return sum;
    }

    __device__ void add(float factor, const Columns &other) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) of[c] = fmaf(factor, other.of[c], of[c]);
    }
};

// Write to products[j] the product of q and row(j), for j below count.
template <int COLUMNS, typename Row>
__device__ inline void multiply(const Columns<COLUMNS> &q, int count, int d, const Row &row, float *products) {
    for (int low = 0; low < count; low += ABREAST) {
        Columns<COLUMNS> keys[ABREAST];
#pragma unroll
        for (int u = 0; u < ABREAST; ++u) keys[u].read(row(min(low + u, count - 1)), d);
#pragma unroll
        for (int u = 0; u < ABREAST; ++u) {
            const float product = sum_of_lanes(q.times(keys[u]));
            if (threadIdx.x % LANES == 0 && low + u < count) products[low + u] = product;
        }
    }
    __syncwarp();
}

// Add to y the rows(j) times factors[j], for j below count; rows of factor 0 do not count, whatever they hold.
template <int COLUMNS, typename Row>
__device__ inline void mix(Columns<COLUMNS> &y, int count, int D, const Row &row, const float *factors) {
    for (int low = 0; low < count; low += ABREAST) {
        Columns<COLUMNS> values[ABREAST];
#pragma unroll
        for (int u = 0; u < ABREAST; ++u) values[u].read(row(min(low + u, count - 1)), D);
#pragma unroll
        for (int u = 0; u < ABREAST; ++u)
            if (low + u < count && factors[low + u] != 0) y.add(factors[low + u], values[u]);
    }
}

}  // namespace

// For rows of Q (b, g, m, d), times `scale`, and the keys (b, n, d) from first[i] up to last[i], at most 32: write the
// logarithm of their mass A to `masses` (b, g, m), and their mean value a to `changes` (b, g, m, D + 1). Keys of role
// (b, n) -2 are left out, and without roles none.
//
// With summaries, a key of role c is a member of one. Its weight is e^logs (b, n), or 1 without. Then A and a count what
// is left of summaries with members near a row as well, the share of which is the last number of a. `gone` (b, g, m) is
// C / A and a becomes a - C c / A. Here C and c are of the same summaries as slots: the last R of `slots` (b, s + R, d),
// with `slot_values` (b, s + R, ·) and `slot_logs` (b, s + R). `sums` (b, R, wide) has d sums of keys, D sums of
// values, weight, offset and count of each summary. The grid is (b * g * m / 8).
template <typename Row, typename Key, int COLUMNS>
__global__ void __launch_bounds__(WARPS *LANES)
    attend_near(const Row *Q, long long q_item, long long q_head, long long q_row, const Key *K, long long k_item,
                long long k_row, const Key *V, long long v_item, long long v_row, const int *first, const int *last,
                const long long *role, const float *logs, const float *sums, const Row *slots, const Row *slot_values,
                long long value_row, const float *slot_logs, double scale, long long rows, int g, int m, int n, int d,
                int D, int s, int R, float *masses, float *gone, float *changes) {
    __shared__ Told all[WARPS];
    const int lane = threadIdx.x % LANES;
    const long long place = (long long)blockIdx.x * WARPS + threadIdx.x / LANES;
    if (place >= rows) return;
    Told &told = all[threadIdx.x / LANES];
    const long long item = place / m / g;
    const int i = (int)(place % m), low = first[i], count = last[i] - low;
    const bool here = lane < count;
    const int name = !here ? -2 : role ? (int)role[item * n + low + lane] : -1;
    const bool member = sums && name >= 0;
    Columns<COLUMNS> q;
    q.read(Q + item * q_item + place / m % g * q_head + i * q_row, d);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) q.of[c] *= (float)scale;
    multiply(q, count, d, [&](int j) { return K + item * k_item + (low + j) * k_row; }, told.logit);
    const float logit = here && name > -2 ? told.logit[lane] : nothing();
    const float log_weight = member && logs ? logs[item * n + low + lane] : 0;
    const float out = member ? expf(log_weight) : 0;
    told.name[lane] = name, told.out[lane] = out, told.weight[lane] = member ? out * (logit - log_weight) : 0;
    __syncwarp();
    // The first lane of each summary has the rest of it
    float taken = 0, inner = 0, members = 0;
    int leader = lane;
    for (int j = 0; sums && j < count; ++j) {
        if (!member || told.name[j] != name) continue;
        taken += told.out[j], inner += told.weight[j], members += 1;
        leader = min(leader, j);
    }
    const bool stands = member && leader == lane;
    const unsigned int standing = __ballot_sync(ALL, stands);
    __syncwarp();
    const long long wide = d + D + 3;
    const auto sums_of = [&](int j) { return sums + (item * R + told.name[j]) * wide; };
    float weight = 1, rest = nothing();
    if (standing) {
        for (unsigned int left = standing; left; left &= left - 1) {
            const int j = __popc((left & -left) - 1);
            Columns<COLUMNS> keys;
            keys.read(sums_of(j), d);
            const float product = sum_of_lanes(q.times(keys));
            if (lane == j) inner = product - inner;
        }
        if (stands) {
            const float *const figures = sums_of(lane) + d + D;
            weight = figures[0] - taken;
            const bool remains = figures[2] - members > 0.5f && weight > 0;
            inner -= figures[1];
            if (!remains) weight = 1;
            rest = remains ? inner / weight + logf(weight) : nothing();
        }
    }
    const float top = largest_of_lanes(max(logit, rest)), base = top == nothing() ? 0 : top;
    const float e = expf(logit - base), e_rest = expf(rest - base), total = sum_of_lanes(e + e_rest);
    const float mass = total > 0 ? logf(total) + base : nothing(), inverse = total > 0 ? 1 / total : 0;
    const float share = e_rest * inverse, coefficient = share / weight;
    __syncwarp();
    told.out[lane] = coefficient;
    __syncwarp();
    told.logit[lane] = e * inverse - (member ? told.out[leader] * out : 0);
    __syncwarp();
    Columns<COLUMNS> y = {};
    mix(y, count, D, [&](int j) { return V + item * v_item + (low + j) * v_row; }, told.logit);
    float summed = sum_of_lanes(share), ratio = 0;
    if (standing) {
        const long long slot = item * (s + R) + s;
        float whole = nothing();
        for (unsigned int left = standing; left; left &= left - 1) {
            const int j = __popc((left & -left) - 1);
            Columns<COLUMNS> numbers;
            numbers.read(sums_of(j) + d, D);
            y.add(told.out[j], numbers);
            numbers.read(slots + (slot + told.name[j]) * d, d);
            const float product = sum_of_lanes(q.times(numbers));
            if (lane == j) whole = product + slot_logs[slot + name] - mass;
        }
        const float highest = largest_of_lanes(whole), floor = highest == nothing() ? 0 : highest;
        const float part = expf(whole - floor), parts = sum_of_lanes(part);
        ratio = parts > 0 ? min(parts * expf(floor), 1.0f) : 0;
        __syncwarp();
        told.weight[lane] = parts > 0 ? -ratio * part / parts : 0;
        __syncwarp();
        for (unsigned int left = standing; left; left &= left - 1) {
            const int j = __popc((left & -left) - 1);
            Columns<COLUMNS> values;
            values.read(slot_values + (slot + told.name[j]) * value_row, D);
            y.add(told.weight[j], values);
        }
        summed -= parts > 0 ? ratio : 0;
    }
    float *const to = changes + place * (D + 1);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
        if (lane + LANES * c < D) to[lane + LANES * c] = y.of[c];
    if (lane) return;
    to[D] = summed, masses[place] = mass;
    if (gone) gone[place] = ratio;
}

// Join attention to slots, `found` (rows, ·), to near keys: write (found + share * change) / (1 - share * gone) to Y (rows, D).
//
// Behind its D columns `found` has the share of summaries, and the share of a slot that stands for what is near. With
// `sums` (rows,), the logarithms of the masses of all slots, it has mean values and nothing behind them. The shares of
// summaries go to `rests` (rows,). The grid is (rows / 8).
template <typename Row, typename Out>
__global__ void __launch_bounds__(WARPS *LANES)
    join_near(const Row *found, long long found_row, const float *sums, const float *masses, const float *changes,
              const float *gone, long long rows, int D, Out *Y, float *rests) {
    const int lane = threadIdx.x % LANES;
    const long long place = (long long)blockIdx.x * WARPS + threadIdx.x / LANES;
    if (place >= rows) return;
    const Row *const from = found + place * found_row;
    const float *const change = changes + place * (D + 1);
    const float share = sums ? 1 / (1 + expf(sums[place] - masses[place])) : widen(from[D + 1]);
    const float others = sums ? 1 - share : 1, divisor = max(1 - (gone ? share * gone[place] : 0), REMAINS);
    for (int column = lane; column < D; column += LANES)
        narrow((others * widen(from[column]) + share * change[column]) / divisor, Y[place * D + column]);
    if (lane) return;
    const float rest = sums ? 0 : widen(from[D]);
    rests[place] = max((rest + share * change[D]) / divisor, 0.0f);
}
