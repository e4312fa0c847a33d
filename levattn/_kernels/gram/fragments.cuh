// Double numbers in shared memory as products on tensor cores take them: in tiles of up to 64 columns.

constexpr int TILE = 64;
constexpr int PITCH = TILE + 4;  // from a row to the next, so that what lanes take at a time lies in different banks

// Sixteen rows of sixteen columns. With g = lane / 4, a lane has columns 2g and 2g + 1, as rows g and g + 8 of A
// transposed, or as column g of two B.
__device__ inline void load_columns(double (&numbers)[8], const double *rows, int column) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const double2 two = *(const double2 *)(rows + (t + 4 * k) * PITCH + column + 2 * g);
        numbers[2 * k] = two.x, numbers[2 * k + 1] = two.y;
    }
}

// Add the products with sixteen columns as `load_columns` has them: with 2g of each g, and with 2g + 1.
__device__ inline void add_products(double (&sums)[2][4], const double (&a)[8], const double (&columns)[8]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const double b[4] = {columns[half], columns[2 + half], columns[4 + half], columns[6 + half]};
        multiply_add(sums[half], a, b);
    }
}

// The column, among sixteen, of an entry of those sums.
__device__ inline int column_of(int half, int entry) { return threadIdx.x % 4 * 4 + entry % 2 * 2 + half; }
