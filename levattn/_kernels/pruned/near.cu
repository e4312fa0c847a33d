// Attention of rows to the few keys near them, which come out of the summaries that stand for them, and what joins that to
// attention to slots.
//
// A warp has a few rows that follow each other, and a lane one of the keys near any of them. Columns are shared out to the
// lanes: a lane has COLUMNS of them.

#include "formats.cuh"
#include "warps.cuh"

namespace {

constexpr int WARPS = 8;  // of a block
constexpr int LANES = 32;
constexpr int ROWS = 4;  // of a warp
constexpr float REMAINS = 0.25f;
constexpr unsigned int ALL = 0xffffffffu;

__device__ inline float nothing() { return __int_as_float(0xff800000); }  // −∞

// The sum over the lanes of one of four numbers: lanes 8r to 8r + 7 have that of x[r].
__device__ inline float sums_of_lanes(const float (&x)[ROWS]) {
    const bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
    const float first = (upper ? x[2] : x[0]) + __shfl_xor_sync(ALL, upper ? x[0] : x[2], 16);
    const float second = (upper ? x[3] : x[1]) + __shfl_xor_sync(ALL, upper ? x[1] : x[3], 16);
    float sum = (odd ? second : first) + __shfl_xor_sync(ALL, odd ? first : second, 8);
#pragma unroll
    for (int half = 4; half; half /= 2) sum += __shfl_xor_sync(ALL, sum, half);
    return sum;
}

// Columns of a row that a lane has.
template <int COLUMNS>
struct Columns {
    float of[COLUMNS];

    template <typename Number>
    __device__ void read(const Number *row, int count, float factor = 1) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = threadIdx.x % LANES + LANES * c;
            of[c] = column < count ? factor * widen(row[column]) : 0;
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

    __device__ void write(float *row, int count) const {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int column = threadIdx.x % LANES + LANES * c;
            if (column < count) row[column] = of[c];
        }
    }
};

// What the lanes of a warp tell each other.
struct Told {
    float logit[ROWS][LANES], out[LANES], inner[LANES];
    float weight[LANES][ROWS];
    int name[LANES];
};

// Summaries, and the slots that stand for them, of one matrix.
template <typename Row>
struct Summed {
    const float *sums;
    const Row *keys, *values;
    const float *logs;
    long long wide, key_row, value_row;
    int d, D;

    __device__ const float *sums_of(int name) const { return sums + name * wide; }
};

// What a row has of near keys and of what is left of their summaries: the logarithm of the mass, the share of summaries, and
// C / A. Weights of keys go to `told`; where there are summaries, their part of the values goes to `to`.
template <int COLUMNS>
struct Mixed {
    float mass, summed, ratio;
    bool begun;  // whether `to` was written

    template <typename Row>
    __device__ Mixed(Told &told, int r, int count, bool here, float log_weight, const Row *asked, float scale,
                     const Summed<Row> &from, float *to) {
        const int lane = threadIdx.x % LANES, name = here ? told.name[lane] : -2;
        const bool member = from.sums && name >= 0;
        const float logit = name > -2 ? told.logit[r][lane] : nothing(), out = member ? expf(log_weight) : 0;
        told.out[lane] = out, told.inner[lane] = member ? out * (logit - log_weight) : 0;
        __syncwarp();
        // The first lane of each summary has the rest of it
        const unsigned int there = __ballot_sync(ALL, member);
        float taken = 0, inner = 0, members = 0;
        int leader = lane;
        for (unsigned int left = there; left; left &= left - 1) {
            const int j = place_of(left);
            if (!member || told.name[j] != name) continue;
            taken += told.out[j], inner += told.inner[j], members += 1;
            leader = min(leader, j);
        }
        const unsigned int standing = __ballot_sync(ALL, member && leader == lane);
        Columns<COLUMNS> q;
        float weight = 1, rest = nothing();
        if (standing) {
            q.read(asked, from.d, scale);
            for (unsigned int left = standing; left; left &= left - 1) {
                const int j = place_of(left);
                Columns<COLUMNS> keys;
                keys.read(from.sums_of(told.name[j]), from.d);
                const float product = sum_of_warp(q.times(keys));
                if (lane == j) inner = product - inner;
            }
            if (standing >> lane & 1) {
                const float *const figures = from.sums_of(name) + from.d + from.D;
                weight = figures[0] - taken;
                const bool remains = figures[2] - members > 0.5f && weight > 0;
                inner -= figures[1];
                if (!remains) weight = 1;
                rest = remains ? inner / weight + logf(weight) : nothing();
            }
        }
        const float top = largest_of_warp(max(logit, rest)), base = top == nothing() ? 0 : top;
        const float e = expf(logit - base), e_rest = expf(rest - base), total = sum_of_warp(e + e_rest);
        const float inverse = total > 0 ? 1 / total : 0, share = e_rest * inverse;
        mass = total > 0 ? logf(total) + base : nothing();
        __syncwarp();
        told.out[lane] = share / weight;
        __syncwarp();
        told.weight[lane][r] = e * inverse - (member ? told.out[leader] * out : 0);
        summed = ratio = 0, begun = standing;
        if (standing) join(told, standing, q, share, from, to);
        __syncwarp();
    }

    // The lowest place of a bit.
    static __device__ int place_of(unsigned int bits) { return __popc((bits & -bits) - 1); }

    // Add what is left of summaries, less these summaries as slots.
    template <typename Row>
    __device__ void join(Told &told, unsigned int standing, const Columns<COLUMNS> &q, float share,
                         const Summed<Row> &from, float *to) {
        const int lane = threadIdx.x % LANES;
        Columns<COLUMNS> y = {}, numbers;
        float whole = nothing();
        for (unsigned int left = standing; left; left &= left - 1) {
            const int j = place_of(left), slot = told.name[j];
            numbers.read(from.sums_of(slot) + from.d, from.D);
            y.add(told.out[j], numbers);
            numbers.read(from.keys + slot * from.key_row, from.d);
            const float product = sum_of_warp(q.times(numbers));
            if (lane == j) whole = product + from.logs[slot] - mass;
        }
        const float highest = largest_of_warp(whole), floor = highest == nothing() ? 0 : highest;
        const float part = expf(whole - floor), parts = sum_of_warp(part);
        ratio = parts > 0 ? min(parts * expf(floor), 1.0f) : 0;
        summed = sum_of_warp(share) - ratio;
        told.inner[lane] = parts > 0 ? -ratio * part / parts : 0;
        __syncwarp();
        for (unsigned int left = standing; left; left &= left - 1) {
            const int j = place_of(left);
            numbers.read(from.values + told.name[j] * from.value_row, from.D);
            y.add(told.inner[j], numbers);
        }
        y.write(to, from.D);
    }
};

}  // namespace

// For rows of Q (b, g, m, d), times `scale`, and the keys (b, n, d) from first[i] up to last[i]: write the logarithm of their
// mass A to `masses` (b, g, m), and their mean value a to `changes` (b, g, m, D + 1). A warp takes four rows, with at most 32
// keys near any of them. Keys of role (b, n) -2 are left out, and without roles none.
//
// With summaries, a key of role c is a member of one. Its weight is e^logs (b, n), or 1 without. Then A and a count what
// is left of summaries with members near a row as well, the share of which is the last number of a. `gone` (b, g, m) is
// C / A and a becomes a - C c / A. Here C and c are of the same summaries as slots: R of `slots` (b, slot_rows, ·), behind
// the first s, with `slot_values` (b, slot_rows, ·) and `slot_logs` (b, s + R). `sums` (b, R, wide) has d sums of keys, D sums of
// values, weight, offset and count of each summary. The grid is (b * g * m rounded up to fours / 32).
template <typename Row, typename Key, int COLUMNS>
__global__ void __launch_bounds__(WARPS *LANES, COLUMNS > 4 ? 1 : 2)
    attend_near(const Row *Q, long long q_item, long long q_head, long long q_row, const Key *K, long long k_item,
                long long k_row, const Key *V, long long v_item, long long v_row, const int *first, const int *last,
                const long long *role, const float *logs, const float *sums, const Row *slots, long long slot_row,
                const Row *slot_values, long long value_row, int slot_rows, const float *slot_logs, double scale, int b, int g, int m, int n, int d, int D,
                int s, int R, float *masses, float *gone, float *changes) {
    constexpr int ABREAST = 2;  // rows of keys and values that a warp reads at a time
    __shared__ __align__(16) Told all[WARPS];
    const int lane = threadIdx.x % LANES, groups = (m + ROWS - 1) / ROWS;
    const long long group = (long long)blockIdx.x * WARPS + threadIdx.x / LANES, head = group / groups, item = head / g;
    if (item >= b) return;
    Told &told = all[threadIdx.x / LANES];
    const int i = (int)(group % groups) * ROWS, rows = min(m - i, ROWS);
    const int low = first[i], count = last[i + rows - 1] - low;
    const Row *const asked = Q + item * q_item + head % g * q_head + i * q_row;
    const auto row_at = [&](int r) { return asked + min(r, rows - 1) * q_row; };
    const long long key = item * n + low + lane;
    told.name[lane] = lane >= count ? -2 : role ? (int)role[key] : -1;
    const float log_weight = logs && lane < count ? logs[key] : 0;
    Columns<COLUMNS> q[ROWS], x[ABREAST];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) q[r].read(row_at(r), d, (float)scale);
    const Key *from = K + item * k_item + low * k_row;
    for (int j = 0; j < count; j += ABREAST, from += ABREAST * k_row) {
#pragma unroll
        for (int u = 0; u < ABREAST; ++u) x[u].read(from + (j + u < count ? u * k_row : 0), d);
#pragma unroll
        for (int u = 0; u < ABREAST; ++u) {
            float products[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) products[r] = q[r].times(x[u]);
            const float product = sums_of_lanes(products);
            if (lane % 8 == 0 && j + u < count) told.logit[lane / 8][j + u] = product;
        }
    }
    __syncwarp();
    const long long slot = item * slot_rows + s, place = head * m + i, wide = d + D + 3;
    const Summed<Row> summed{sums ? sums + item * R * wide : nullptr,
                             slots + slot * slot_row, slot_values + slot * value_row,
                             slot_logs + item * (s + R) + s, wide, slot_row, value_row, d, D};
    unsigned int begun = 0;
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
        const bool here = low + lane >= first[i + r] && low + lane < last[i + r];
        float *const to = changes + (place + r) * (D + 1);
        const Mixed<COLUMNS> mixed(told, r, count, here, log_weight, row_at(r), (float)scale, summed, to);
        begun |= (unsigned int)mixed.begun << r;
        if (lane) continue;
        to[D] = mixed.summed, masses[place + r] = mixed.mass;
        if (gone) gone[place + r] = mixed.ratio;
    }
    Columns<COLUMNS> y[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) y[r].read(changes + (place + r) * (D + 1), begun >> r & 1 ? D : 0);
    const Key *value = V + item * v_item + low * v_row;
    for (int j = 0; j < count; j += ABREAST, value += ABREAST * v_row) {
#pragma unroll
        for (int u = 0; u < ABREAST; ++u) x[u].read(value + (j + u < count ? u * v_row : 0), D);
#pragma unroll
        for (int u = 0; u < ABREAST; ++u) {
            if (j + u >= count) break;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) y[r].add(told.weight[j + u][r], x[u]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        if (r < rows) y[r].write(changes + (place + r) * (D + 1), D);
}

// Join attention to slots, `found` (rows, ·), to near keys: write (found + share * change) / (1 - share * gone) to Y (rows, D).
//
// Behind its D columns `found` has the share of summaries, and the share of a slot that stands for what is near. With
// `sums` (rows,), the logarithms of the masses of all slots, it has mean values and nothing behind them. The shares of
// summaries go to `rests` (rows,). The grid is (rows / 8).
template <typename Row>
__global__ void __launch_bounds__(WARPS *LANES)
    join_near(const Row *found, long long found_row, const float *sums, const float *masses, const float *changes,
              const float *gone, long long rows, int D, Row *Y, float *rests) {
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
