// mma.cuh in plain C++, with sums that are rounded no better than on any device.

namespace host {

struct Copy {
    void *to;
    const void *from;
    int bytes, room;  // zeros fill the room
    int group;
};

static std::vector<Copy> copies[1024];  // of each thread, which become visible when it waits for them
static int groups[1024];
static unsigned int words[32][32][6];  // of each warp and lane, while they are exchanged
static double numbers[32][32][12];
static const unsigned char *rows[32][32];

// Sum as on sm_80, the coarsest: of eight products at a time, all cut off one bit after the last place of the largest.
inline float cut_sum(float c, const double *products) {
    double largest = fabs(c), sum = c;
    for (int i = 0; i < 8; ++i) {
        sum += products[i];
        if (fabs(products[i]) > largest) largest = fabs(products[i]);
    }
    if (!(fabs(sum) < 0x1p127) || largest == 0) return (float)sum;
    const long long exponent = __double_as_longlong(largest) & 0x7ffll << 52;  // of products of floats: never the lowest
    const double place = __longlong_as_double(exponent - (24ll << 52));
    const double places = __longlong_as_double((2046ll << 52) - __double_as_longlong(place));  // in one
    sum = trunc(c * places);
    for (int i = 0; i < 8; ++i) sum += trunc(products[i] * places);
    sum *= place;
    const float rounded = (float)sum;
    return fabs((double)rounded) > fabs(sum) ? nextafterf(rounded, 0) : rounded;
}

}  // namespace host

template <typename Number>
void multiply_add(Number, float (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
    const int lane = threadIdx.x % 32;
    unsigned int(&there)[32][6] = host::words[threadIdx.x / 32];
    __syncwarp();
    for (int i = 0; i < 4; ++i) there[lane][i] = a[i];
    there[lane][4] = b0;
    there[lane][5] = b1;
    __syncwarp();
    const auto number = [](unsigned int word, int k) {
        return (double)widen(Number{(unsigned short)(k % 2 ? word >> 16 : word)});
    };
    double left[2][16], right[2][16];
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 16; ++k) {
            left[i][k] = number(there[lane / 4 * 4 + k % 8 / 2][i + k / 8 * 2], k);
            right[i][k] = number(there[(lane % 4 * 2 + i) * 4 + k % 8 / 2][4 + k / 8], k);
        }
    for (int i = 0; i < 4; ++i) {
        const double *const row = left[i / 2], *const column = right[i % 2];
        double products[16];
        for (int k = 0; k < 16; ++k) products[k] = row[k] * column[k];
        c[i] = host::cut_sum(host::cut_sum(c[i], products), products + 8);
    }
}

// Sums in order of k, each product and sum rounded once. A device may add up in another order, so that results are
// compared by bounds of their errors, and their bits only with those of the same machine.
inline void multiply_add(double (&c)[4], const double (&a)[8], const double (&b)[4]) {
    const int lane = threadIdx.x % 32;
    double(&there)[32][12] = host::numbers[threadIdx.x / 32];
    __syncwarp();
    for (int i = 0; i < 8; ++i) there[lane][i] = a[i];
    for (int i = 0; i < 4; ++i) there[lane][8 + i] = b[i];
    __syncwarp();
    for (int k = 0; k < 16; ++k) {
        const double *const rows = there[lane / 4 * 4 + k % 4] + k / 4 * 2;
        const double *const first = there[lane % 4 * 8 + k % 4] + 8 + k / 4, *const second = first + 4 * 12;
        c[0] = fma(rows[0], *first, c[0]);
        c[1] = fma(rows[0], *second, c[1]);
        c[2] = fma(rows[1], *first, c[2]);
        c[3] = fma(rows[1], *second, c[3]);
    }
}

// Number k of word i of a lane, from the matrices whose rows the lanes name.
template <typename Place>
void load_words(unsigned int (&words)[4], const void *row, Place place) {
    const int lane = threadIdx.x % 32;
    const unsigned char *(&rows)[32] = host::rows[threadIdx.x / 32];
    __syncwarp();
    rows[lane] = (const unsigned char *)row;
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        unsigned short pair[2];
        for (int k = 0; k < 2; ++k) {
            const auto [down, across] = place(lane / 4, 2 * (lane % 4) + k);
            memcpy(pair + k, rows[8 * i + down] + 2 * across, 2);
        }
        words[i] = pair[0] | (unsigned int)pair[1] << 16;
    }
    if ((size_t)row % 16) words[0] = words[1] = words[2] = words[3] = ~0u;
}

inline void load_transposed(unsigned int (&words)[4], const void *row) {
    load_words(words, row, [](int g, int k) { return std::pair(k, g); });
}

inline void load_matrices(unsigned int (&words)[4], const void *row) {
    load_words(words, row, [](int g, int k) { return std::pair(g, k); });
}

inline void copy_async(void *to, const void *from, int bytes) {
    if (((size_t)to | (size_t)from) % 16) bytes = -1;
    host::copies[threadIdx.x].push_back({to, from, bytes, 16, host::groups[threadIdx.x]});
}

inline void copy_word_async(void *to, const void *from) {
    const int bytes = ((size_t)to | (size_t)from) % 4 ? -1 : 4;
    host::copies[threadIdx.x].push_back({to, from, bytes, 4, host::groups[threadIdx.x]});
}

inline void commit_copies() { ++host::groups[threadIdx.x]; }

template <int pending>
void wait_copies() {
    std::vector<host::Copy> &copies = host::copies[threadIdx.x];
    while (!copies.empty() && copies.front().group < host::groups[threadIdx.x] - pending) {
        const host::Copy copy = copies.front();
        copies.erase(copies.begin());
        memset(copy.to, copy.bytes < 0 ? 0xff : 0, copy.room);
        if (copy.bytes > 0) memcpy(copy.to, copy.from, copy.bytes);
    }
}

inline unsigned int bits_of(Half, float x) {
    const unsigned int bits = __float_as_uint(x), sign = bits >> 16 & 0x8000;
    const double size = fabs(x);
    if (!(size < 65520)) return sign | (size != size ? 0x7fff : 0x7c00);
    const int exponent = size < 0x1p-14 ? -14 : ilogb(size);
    const unsigned int fraction = (unsigned int)rint(ldexp(size, 10 - exponent));  // ties to even; a carry is right
    return sign | (((unsigned int)(exponent + 14) << 10) + fraction);
}

inline unsigned int bits_of(Bfloat, float x) {
    const unsigned int bits = __float_as_uint(x);
    return (x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000) >> 16;
}

template <typename Number>
unsigned int pack(Number format, float low, float high) {
    return bits_of(format, low) | bits_of(format, high) << 16;
}

inline float half_of(unsigned int word, int upper) { return widen(Half{(unsigned short)(upper ? word >> 16 : word)}); }
