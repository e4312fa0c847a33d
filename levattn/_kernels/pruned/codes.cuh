// Numbers of few bits; see codes.py. An entry is m + b (l + h z) of a code z, in the format of its row.

namespace {

__device__ inline void narrow_within(float x, float &to) { to = x; }
__device__ inline void narrow_within(float x, Bfloat &to) { narrow(x, to); }
__device__ inline void narrow_within(float x, Half &to) { narrow(x != x ? x : min(max(x, -65504.0f), 65504.0f), to); }

// Of a column: b = 2^(size / 8), and m = mean b².
__device__ inline float size_of(signed char size) { return exp2f((float)size / 8); }
__device__ inline float mean_of(short mean, float b) { return (float)mean * b * b; }

template <typename Real>
__device__ inline Real opened(unsigned int code, float low, float step, float b, float m) {
    Real x;
    narrow_within(m + (low + (float)code * step) * b, x);
    return x;
}

}  // namespace
