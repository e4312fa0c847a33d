// tf32.cuh in plain C++, with sums that are rounded no better than on any device.

namespace host {

static float entries[32][32][6];  // of each warp and lane, while they are exchanged

// Of an operand the last 13 bits are not read.
inline double read_tf32(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// Sum as on sm_80, the coarsest: of four products at a time, all cut off one bit after the last place of the largest.
inline float cut_sum_of_four(float c, const double *products) {
    double largest = fabs(c), sum = c;
    for (int i = 0; i < 4; ++i) {
        sum += products[i];
        if (fabs(products[i]) > largest) largest = fabs(products[i]);
    }
    if (!(fabs(sum) < 0x1p127) || largest == 0) return (float)sum;
    const long long exponent = __double_as_longlong(largest) & 0x7ffll << 52;  // of products of floats: never the lowest
    const double place = __longlong_as_double(exponent - (24ll << 52));
    const double places = __longlong_as_double((2046ll << 52) - __double_as_longlong(place));  // in one
    sum = trunc(c * places);
    for (int i = 0; i < 4; ++i) sum += trunc(products[i] * places);
    sum *= place;
    const float rounded = (float)sum;
    return fabs((double)rounded) > fabs(sum) ? nextafterf(rounded, 0) : rounded;
}

}  // namespace host

inline void multiply_add(float (&c)[4], const float (&a)[4], float b0, float b1) {
    const int lane = threadIdx.x % 32;
    float(&there)[32][6] = host::entries[threadIdx.x / 32];
    __syncwarp();
    for (int i = 0; i < 4; ++i) there[lane][i] = a[i];
    there[lane][4] = b0;
    there[lane][5] = b1;
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        double products[8];
        for (int k = 0; k < 8; ++k) {
            const float left = there[lane / 4 * 4 + k % 4][i / 2 + k / 4 * 2];
            const float right = there[(lane % 4 * 2 + i % 2) * 4 + k % 4][4 + k / 4];
            products[k] = host::read_tf32(left) * host::read_tf32(right);
        }
        c[i] = host::cut_sum_of_four(host::cut_sum_of_four(c[i], products), products + 4);
    }
}
