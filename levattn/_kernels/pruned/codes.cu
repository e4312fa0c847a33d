// Rows of few bits as numbers; see levattn/_kernels/codes.py.

#include "formats.cuh"

namespace {

constexpr int THREADS = 256;

__device__ inline void narrow_within(float x, float &to) { to = x; }
__device__ inline void narrow_within(float x, Bfloat &to) { narrow(x, to); }
__device__ inline void narrow_within(float x, Half &to) { narrow(min(max(x, -65504.0f), 65504.0f), to); }

}  // namespace

// Write to rows (count, d) the numbers m + b (l + h z) of codes z (count, w), of 8 bits, or of 4: the lower halves of w
// bytes, then the upper ones. `lows` l and `steps` h are (count, blocks), of `entries` columns each. Of `span` rows each,
// sizes (count / span, d) give b = 2^(size / 8), and means give m = mean b²; without them b = 1 and m = 0. A thread has
// neighbors along a row. The grid is (count * d / 1024).
template <typename Real>
__global__ void __launch_bounds__(THREADS)
    open_codes(const unsigned char *codes, const Bfloat *lows, const Bfloat *steps, const signed char *sizes,
               const short *means, long long count, long long span, int d, int w, int blocks, int entries, int bits,
               Real *rows) {
    const long long first = ((long long)blockIdx.x * THREADS + threadIdx.x) * 4;
    for (long long at = first; at < min(first + 4, count * d); ++at) {
        const long long row = at / d;
        const int column = (int)(at - row * d), block = column / entries;
        const unsigned int byte = codes[row * w + (column < w ? column : column - w)];
        const unsigned int code = bits == 8 ? byte : column < w ? byte & 15 : byte >> 4;
        float b = 1, m = 0;
        if (sizes) {
            const long long place = row / span * d + column;
            b = exp2f((float)sizes[place] / 8), m = (float)means[place] * b * b;
        }
        const float low = widen(lows[row * blocks + block]), step = widen(steps[row * blocks + block]);
        narrow_within(m + (low + (float)code * step) * b, rows[at]);
    }
}
