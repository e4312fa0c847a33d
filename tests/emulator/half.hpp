// half.cuh in plain C++.

inline float widen(Half x) {
    const unsigned int sign = (unsigned int)(x.bits & 0x8000) << 16;
    const unsigned int exponent = x.bits >> 10 & 0x1f;
    const unsigned int fraction = x.bits & 0x3ff;
    if (exponent == 0) {  // zero and subnormal numbers are multiples of 2^-24
        const float size = (float)fraction * 5.9604644775390625e-8f;
        return sign ? -size : size;
    }
    const unsigned int raised = exponent == 0x1f ? 0xffu : exponent + 112;
    return __uint_as_float(sign | raised << 23 | fraction << 13);
}
