// Rows of few bits as numbers.

#include "formats.cuh"
#include "codes.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int EACH = 4;  // rows of a thread

}  // namespace

// Write to rows (count, d) the numbers m + b (l + h z) of codes z (count, w), of 8 bits, or of 4: the lower halves of w
// bytes, then the upper ones. `lows` l and `steps` h are (count, blocks), of `entries` columns each. Of `span` rows each,
// sizes (count / span, d) give b = 2^(size / 8), and means give m = mean b²; without them b = 1 and m = 0. A warp has some
// rows of one column after another, whose scales it computes once. The grid is (count / span, rows / 32, columns / 32).
template <typename Real>
__global__ void __launch_bounds__(THREADS)
    open_codes(const unsigned char *codes, const Bfloat *lows, const Bfloat *steps, const signed char *sizes,
               const short *means, int span, int d, int w, int blocks, int entries, int bits, Real *rows) {
    const int column = blockIdx.z * 32 + threadIdx.x % 32, block = column / entries;
    if (column >= d) return;
    const int begin = blockIdx.y * (WARPS * EACH) + threadIdx.x / 32;
    const long long top = (long long)blockIdx.x * span;
    float b = 1, m = 0;
    if (sizes) {
        const long long place = (long long)blockIdx.x * d + column;
        b = size_of(sizes[place]), m = mean_of(means[place], b);
    }
    const int byte = column < w ? column : column - w, shift = bits == 4 && column >= w ? 4 : 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const long long row = top + begin + i * WARPS;
        if (row >= top + span) break;
        const unsigned int code = codes[row * w + byte] >> shift & (bits == 8 ? 255 : 15);
        const long long scale = row * blocks + block;
        rows[row * d + column] = opened<Real>(code, widen(lows[scale]), widen(steps[scale]), b, m);
    }
}
