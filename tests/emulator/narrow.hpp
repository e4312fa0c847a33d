// narrow.cuh in plain C++.

inline void narrow(float x, Half &to) {
    const unsigned int bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    unsigned int found;
    if (size > 0x7f800000) found = 0x7fff;        // no number
    else if (size >= 0x477ff000) found = 0x7c00;  // rounded to 65536, which is infinite
    else if (size >= 0x38800000) found = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
    else found = (unsigned int)nearbyintf(__uint_as_float(size) * 16777216.0f);  // multiples of 2^-24
    to.bits = (unsigned short)(sign | found);
}
