// Numbers as they are stored, read and written: the formats of keys.cuh, and what rounds to them.

#include "keys.cuh"

#include "narrow.cuh"

__device__ inline void narrow(float x, float &to) { to = x; }
__device__ inline void narrow(double x, double &to) { to = x; }
__device__ inline void narrow(float x, Bfloat &to) {
    const unsigned int bits = __float_as_uint(x), up = bits + 0x7fff + (bits >> 16 & 1);
    to.bits = (unsigned short)((x == x ? up : bits | 0x400000) >> 16);
}

// A finite number within the range of a format, which its rounding could leave.
__device__ inline float within(float x, float) { return x; }
__device__ inline float within(float x, Bfloat) { return x; }
__device__ inline float within(float x, Half) { return fabsf(x) < 3.4e38f ? fminf(fmaxf(x, -65504.0f), 65504.0f) : x; }
