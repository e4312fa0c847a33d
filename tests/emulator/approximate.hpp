// approximate.cuh in plain C++, with errors as large as on a device.

namespace host {

// Cut off, by two units of the last place at most.
inline float coarse(double exact) {
    const float x = (float)exact;
    if (!(fabsf(x) < __builtin_inff())) return x;
    return fabsf(x) < 0x1p-126f ? copysignf(0, x) : __uint_as_float(__float_as_uint(x) & ~1u);
}

}  // namespace host

inline float power_of_two(float x) { return host::coarse(exp2((double)x)); }
inline float reciprocal(float x) { return host::coarse(1 / (fabsf(x) < 0x1p-126f ? copysign(0.0, x) : (double)x)); }
