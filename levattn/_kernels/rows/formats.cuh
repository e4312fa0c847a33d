// Numbers as they are stored, read and written: the formats of keys.cuh, and what rounds to them.

#include "keys.cuh"

#include "narrow.cuh"

__device__ inline void narrow(float x, float &to) { to = x; }
__device__ inline void narrow(double x, double &to) { to = x; }
__device__ inline void narrow(float x, Bfloat &to) {
    const unsigned int bits = __float_as_uint(x), up = bits + 0x7fff + (bits >> 16 & 1);
    to.bits = (unsigned short)((x == x ? up : bits | 0x400000) >> 16);
}
