// The linear recurrence h[t] = a[t] h[t − 1] + x[t] of every channel.

namespace {

constexpr int LINES = 16;  // threads along the positions
constexpr int EACH = 16;   // positions of a thread

// h after a decay; where a sequence begins, h is not read.
template <typename Real>
__device__ Real decayed(bool begins, Real decay, Real h, Real term) {
    return fma(decay, begins ? Real(0) : h, term);
}

}  // namespace

// h (b, T, C) from h[−1] = first (b, C), or 0; backwards, r[t] = x[t] + a[t + 1] r[t + 1] from 0. Where a is 0 the other
// row is not read.
//
// A block takes 32 channels through all positions, LINES · EACH at a time. Each thread composes its own positions, then the
// threads of a channel are composed one after the other, then each thread repeats its own. The grid is (b · channels / 32).
template <typename Real>
__global__ void __launch_bounds__(32 * LINES)
    scan_decayed(const Real *a, long long a_item, long long a_row, const Real *x, long long x_item, long long x_row,
                 const Real *first, long long T, int C, bool backwards, Real *out) {
    __shared__ Real decays[LINES][32], sums[LINES][32];
    __shared__ Real carried[32];
    __shared__ bool begun[LINES][32];
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32, groups = (C + 31) / 32;
    const long long item = blockIdx.x / groups;
    const int channel = blockIdx.x % groups * 32 + lane;
    const bool there = channel < C;
    if (line == 0) carried[lane] = there && first ? first[item * C + channel] : 0;
    for (long long base = 0; base < T; base += LINES * EACH) {
        Real decay[EACH], term[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const long long at = base + line * EACH + i, t = backwards ? T - 1 - at : at;
            decay[i] = 1, term[i] = 0;
            if (at >= T || !there) continue;
            term[i] = x[item * x_item + t * x_row + channel];
            if (!backwards) decay[i] = a[item * a_item + t * a_row + channel];
            else decay[i] = at ? a[item * a_item + (t + 1) * a_row + channel] : 0;
        }
        Real product = decay[0], sum = term[0];
        bool begins = decay[0] == 0;
#pragma unroll
        for (int i = 1; i < EACH; ++i) {
            sum = decayed(decay[i] == 0, decay[i], sum, term[i]);
            product = decayed(decay[i] == 0, decay[i], product, Real(0)), begins = begins || decay[i] == 0;
        }
        decays[line][lane] = product, sums[line][lane] = sum, begun[line][lane] = begins;
        __syncthreads();
        Real h = carried[lane];
        for (int before = 0; before < line; ++before) {
            h = decayed(begun[before][lane], decays[before][lane], h, sums[before][lane]);
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            h = decayed(decay[i] == 0, decay[i], h, term[i]);
            const long long at = base + line * EACH + i, t = backwards ? T - 1 - at : at;
            if (at < T && there) out[(item * T + t) * C + channel] = h;
        }
        __syncthreads();
        if (line == LINES - 1) carried[lane] = h;
    }
}
