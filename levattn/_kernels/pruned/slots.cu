// Slots of fused attention whose logarithms of weights are columns of their keys, and the rows of queries for them.
//
// Behind the d columns of a key are three that add up to a logarithm, where queries have ones, and three that are ones in
// the last slot alone, where queries have three that add up to a logit of their own. Float16 has a narrow range, so there the
// ones are larger and the logarithms smaller, by the same factor.

#include "formats.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int PARTS = 3;  // of a logarithm: 8 bits each for bfloat16 and TF32, 11 for float16

// The narrow format of parts, the factor of ones, and each part of a logarithm that hides a slot, which is finite.
template <typename Row>
struct Parts {
    using Kind = Bfloat;
    static constexpr float ONE = 1, ABSENT = -1e30f;
};
template <>
struct Parts<Half> {
    using Kind = Half;
    static constexpr float ONE = 1024, ABSENT = -60000;
};

__device__ inline float within(float x, float size) { return x != x ? x : fminf(fmaxf(x, -size), size); }

// One of the parts of a number.
template <typename Row>
__device__ inline float part_of(float x, int which) {
    float left = within(x, -PARTS * Parts<Row>::ABSENT), found = 0;
    for (int k = 0; k <= which; ++k) {
        typename Parts<Row>::Kind part;
        narrow(within(left, -Parts<Row>::ABSENT), part);
        found = widen(part), left -= found;
    }
    return found;
}

}  // namespace

// Write keys (b, s + R + 1, width) and values (b, s + R + 1, value_width), and the logarithms of weights (b, s + R): of s kept
// keys, of which the first counts[item] are there, of R summaries, and of a slot of weight 1 for what is near. Behind its D
// columns a value has the share of summaries, and the share of the last slot. `sums` (b, R, d + D + 3) has sums of keys and of
// values, weights, offsets and counts. A block has a slot.
template <typename Row, typename Kept>
__global__ void __launch_bounds__(THREADS)
    write_slots(const Kept *kept, const Kept *kept_values, const long long *counts, const float *sums, double scale, int s,
                int R, int d, int D, int width, int value_width, Row *keys, Row *values, float *logs) {
    const int slots = s + R + 1, slot = blockIdx.x % slots, c = slot - s;
    const long long item = blockIdx.x / slots;
    const bool own = slot < s, last = c == R;
    const float *const sum = sums + (item * R + (own || last ? 0 : c)) * (d + D + 3), *const figures = sum + d + D;
    const bool there = own ? !counts || slot < counts[item] : last || (figures[2] > 0.5f && figures[0] > 0);
    const float total = own || last || !there ? 1 : figures[0];
    const float log_weight = !there ? __int_as_float(0xff800000) : own || last ? 0 : logf(total) - figures[1] / total;
    const float one = Parts<Row>::ONE, scaled = log_weight / ((float)scale * one);
    Row *const key = keys + (long long)blockIdx.x * width, *const value = values + (long long)blockIdx.x * value_width;
    for (int k = threadIdx.x; k < width; k += THREADS) {
        float x = 0;
        if (k < d) x = last ? 0 : own ? widen(kept[(item * s + slot) * d + k]) : sum[k] / total;
        else if (k < d + PARTS) x = part_of<Row>(scaled, k - d);
        else if (k < d + 2 * PARTS) x = last ? one : 0;
        narrow(x, key[k]);
    }
    for (int k = threadIdx.x; k < value_width; k += THREADS) {
        float x = k == D ? !own && !last : k == D + 1 && last;
        if (k < D && there && !last) x = own ? widen(kept_values[(item * s + slot) * D + k]) : sum[d + k] / total;
        narrow(x, value[k]);
    }
    if (threadIdx.x == 0 && !last) logs[item * (s + R) + slot] = log_weight;
}

// Write rows (b g m, width) for queries Q (b, g, m, d) with logits `own` (b, g, m) of the last slot. A warp has a row.
template <typename Row>
__global__ void __launch_bounds__(THREADS)
    widen_queries(const Row *Q, long long q_item, long long q_head, long long q_row, const float *own, double scale,
                  int b, int g, int m, int d, int width, Row *rows) {
    const int lane = threadIdx.x % 32;
    const long long row = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32, head = row / m, item = head / g;
    if (item >= b) return;
    const float one = Parts<Row>::ONE, logit = own[row] / ((float)scale * one);
    const Row *const from = Q + item * q_item + head % g * q_head + row % m * q_row;
    for (int k = lane; k < width; k += 32) {
        float x = 0;
        if (k < d) x = widen(from[k]);
        else if (k < d + PARTS) x = one;
        else if (k < d + 2 * PARTS) x = part_of<Row>(logit, k - d - PARTS);
        narrow(x, rows[row * width + k]);
    }
}
