// Words of Philox4x32-10 and what is read from them: `words`, `signs` and `below` of levattn/_core/random.py.

#define PHILOX_MULTIPLIERS 0xD2511F53, 0xCD9E8D57
#define PHILOX_INCREMENTS 0x9E3779B9, 0xBB67AE85
#define PHILOX_ROUNDS 10
#define PHILOX_GROUP 4  // rows that share a counter

struct Words {
    unsigned int of[PHILOX_GROUP];
};

// The words of four rows in one column; the first row has the number PHILOX_GROUP * group.
__device__ inline Words draw_words(unsigned long long seed, unsigned int stream, long long group,
                                   unsigned int column) {
    constexpr unsigned int multipliers[] = {PHILOX_MULTIPLIERS}, increments[] = {PHILOX_INCREMENTS};
    unsigned int a = (unsigned int)group, b = (unsigned int)((unsigned long long)group >> 32), c = column, d = stream;
    unsigned int key0 = (unsigned int)seed, key1 = (unsigned int)(seed >> 32);
#pragma unroll
    for (int round = 0; round < PHILOX_ROUNDS; ++round) {
        const unsigned long long p = (unsigned long long)a * multipliers[0];
        const unsigned long long q = (unsigned long long)c * multipliers[1];
        a = (unsigned int)(q >> 32) ^ b ^ key0;
        c = (unsigned int)(p >> 32) ^ d ^ key1;
        b = (unsigned int)q;
        d = (unsigned int)p;
        key0 += increments[0];
        key1 += increments[1];
    }
    return {{a, b, c, d}};
}

// A number below `size`, by the upper 31 bits.
__device__ inline unsigned int below(unsigned int word, unsigned int size) {
    return (unsigned int)((unsigned long long)(word >> 1) * size >> 31);
}

// The sign is negative where the lowest bit is set.
template <typename Real>
__device__ inline Real with_sign(unsigned int word, Real x) {
    return word & 1 ? -x : x;
}
