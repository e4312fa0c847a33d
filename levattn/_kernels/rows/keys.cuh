// Keys as the kernels read them: stored in any format and layout, shifted, scaled, weighted, or zero where masked.

struct Half {
    unsigned short bits;
};

struct Bfloat {
    unsigned short bits;
};

__device__ inline double widen(double x) { return x; }
__device__ inline float widen(float x) { return x; }
__device__ inline float widen(Bfloat x) { return __uint_as_float((unsigned int)x.bits << 16); }

#include "half.cuh"

// The parameters of a kernel that reads keys, in the order of `key_arguments` of rows/cuda.py; absent arrays are null.
#define KEY_PARAMETERS                                                                                              \
    const Key *keys, long long item_stride, long long row_stride, long long column_stride,                          \
        const unsigned char *mask, long long mask_stride, const double *shift, const double *scale,                 \
        const double *weights, long long weight_stride, int d

#define KEY_READER                                                                                                  \
    { keys, item_stride, row_stride, column_stride, mask, mask_stride, shift, scale, weights, weight_stride, d }

// a + b, and the rounding error of that.
__device__ inline double add_exactly(double a, double b, double &lost) {
    const double sum = a + b, part = sum - a;
    lost = (a - (sum - part)) + (b - part);
    return sum;
}

template <typename Key>
struct Reader {
    const Key *keys;
    long long item_stride, row_stride, column_stride;  // in elements
    const unsigned char *mask;                         // (b, n), rows next to each other
    long long mask_stride;
    const double *shift;          // (b, 3, d), parts of a number each
    const double *scale;          // (b, d)
    const double *weights;        // (b, n), rows next to each other
    long long weight_stride;
    int d;

    __device__ bool takes_part(long long item, long long row) const {
        return !mask || mask[item * mask_stride + row];
    }

    // One coordinate of a key as it is stored, zero where it takes no part.
    __device__ Key stored(long long item, long long row, int column) const {
        if (!takes_part(item, row)) return Key{};
        return keys[item * item_stride + row * row_stride + column * column_stride];
    }

    // Whether coordinates stand for themselves.
    __device__ bool plain() const { return !shift && !scale && !weights; }

    // What a coordinate stands for. With FRESH the parts of a shift are read each time: kept, they would spill registers.
    template <bool FRESH = false, typename Number = Key>
    __device__ double value(Number number, long long item, long long row, int column) const {
        double x = (double)widen(number);
        if (plain()) return x;
        if (!takes_part(item, row)) return 0;
        if (scale) x *= scale[item * d + column];
        if (shift && FRESH) {
            const volatile double *const parts = shift + 3 * item * d + column;
            x = x - parts[0] - parts[d];
        } else if (shift) {
            x = x - shift[3 * item * d + column] - shift[(3 * item + 1) * d + column];
        }
        if (weights) x *= weights[item * weight_stride + row];
        return x;
    }

    // What the shift of a value loses by rounding.
    __device__ double rest(long long item, long long row, int column) const {
        if (!shift || !takes_part(item, row)) return 0;
        double x = (double)widen(stored(item, row, column));
        if (scale) x *= scale[item * d + column];
        const double first = shift[3 * item * d + column], second = shift[(3 * item + 1) * d + column];
        double lost;
        x = add_exactly(x, -first, lost);
        double more;
        add_exactly(x, -second, more);
        const double all = lost + more - shift[(3 * item + 2) * d + column];
        return weights ? all * weights[row + item * weight_stride] : all;
    }

    // A coordinate in the precision Real, which is exact for keys as they are stored or Real = double.
    template <typename Real>
    __device__ Real read(long long item, long long row, int column) const {
        const Key number = stored(item, row, column);
        if (plain()) return (Real)widen(number);
        return (Real)value(number, item, row, column);
    }
};

// One column of the keys of one matrix, for threads that read it row by row; zero beyond the last column.
template <typename Key>
struct Column {
    const Key *keys;
    const unsigned char *mask;
    const double *weights;
    long long row_stride;
    double shift, more, scale;  // two parts of the shift
    bool plain;

    __device__ Column(const Reader<Key> &reader, long long item, int column)
        : keys(column < reader.d ? reader.keys + item * reader.item_stride + column * reader.column_stride : nullptr),
          mask(reader.mask ? reader.mask + item * reader.mask_stride : nullptr),
          weights(reader.weights ? reader.weights + item * reader.weight_stride : nullptr),
          row_stride(reader.row_stride), shift(0), more(0), scale(1), plain(!reader.shift && !reader.scale && !reader.weights) {
        if (keys && reader.shift) {
            shift = reader.shift[3 * item * reader.d + column];
            more = reader.shift[(3 * item + 1) * reader.d + column];
        }
        if (keys && reader.scale) scale = reader.scale[item * reader.d + column];
    }

    // As a reader has them.
    __device__ Key stored(long long row) const {
        return keys && (!mask || mask[row]) ? keys[row * row_stride] : Key{};
    }

    __device__ double value(Key number, long long row) const {
        if (plain) return (double)widen(number);
        if (!keys || (mask && !mask[row])) return 0;
        const double x = (double)widen(number) * scale - shift - more;
        return weights ? x * weights[row] : x;
    }

    template <typename Real>
    __device__ Real read(long long row) const {
        const Key number = stored(row);
        return plain ? (Real)widen(number) : (Real)value(number, row);
    }
};
