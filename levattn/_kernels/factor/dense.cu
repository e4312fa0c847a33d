// Small dense matrices, one block of threads each.

#include "shared.cuh"

namespace {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int STEPS = 30;  // of power iteration
constexpr double MOST_SHIFT = 1e30;  // next to a diagonal of 1, so large that nothing is left of the matrix

#include "sum_of_block.cuh"

enum { PIVOT, BOUND, RANK, LEAST, MOST, SPREAD, FIGURES };  // figures of a matrix
enum { FROBENIUS, SPECTRAL, OF_MOMENTS, NORMS };               // norms of its whitening matrix

__device__ inline double infinite() { return __longlong_as_double(0x7ff0000000000000ll); }

__device__ double largest_of(double mine, double *shared) {
    __syncthreads();
    shared[threadIdx.x] = mine;
    for (int half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shared[threadIdx.x] = fmax(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
    __syncthreads();
    return shared[0];
}

// The square of the 2-norm of A, or of its lower triangle, by power iteration. It leaves out rows and columns whose `scale`
// is not positive. `x` and `y` have room for d numbers, and each thread has a row and a column.
template <bool triangle>
__device__ double squared_norm(const double *A, int pitch, int d, const double *scale, double *x, double *y) {
    const int i = threadIdx.x;
    const bool live = i < d && scale[i] > 0;
    double before = 0, after = 0;
    if (i < d) x[i] = live ? cos((i + 1.0) * (i + 1.0)) : 0.0;
    __syncthreads();
    for (int j = 0; j < d; ++j) before = fma(x[j], x[j], before);
    for (int step = 0; step < STEPS; ++step) {
        const double length = step ? sqrt(after) : 1.0;
        double sum = 0;
        if (live)
            for (int j = triangle ? i : 0; j < d; ++j)
                if (scale[j] > 0) sum = fma(A[(long long)j * pitch + i], x[j], sum);
        if (i < d) y[i] = sum / length;
        __syncthreads();
        sum = 0;
        if (live)
            for (int j = 0; j < (triangle ? i + 1 : d); ++j)
                if (scale[j] > 0) sum = fma(A[(long long)i * pitch + j], y[j], sum);
        if (i < d) x[i] = sum;
        __syncthreads();
        if (step) before = 1.0;
        after = 0;
        for (int j = 0; j < d; ++j) after = fma(x[j], x[j], after);
        if (!(after > 0)) return 0;
    }
    return sqrt(after / before);
}

// Eliminate the scaled matrix `from`, with diagonal 1 + `shift`, column by column in A, and return the smallest pivot. The
// lower triangle of A holds the inverse of the factor to the left of the current column, and the remaining matrix from it on.
// `step` has room for d numbers.
__device__ double eliminate(const double *from, int d, double shift, const double *scale, double *step, double *A) {
    const int pitch = d | 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
    for (int i = warp; i < d; i += WARPS)
        for (int j = lane; j <= i; j += 32)  // the square of a rounded root may differ from it
            A[(long long)i * pitch + j] = i == j ? 1.0 + shift : from[(long long)i * d + j] * scale[i] * scale[j];
    double smallest = infinite();
    for (int k = 0; k < d; ++k) {
        __syncthreads();
        if (!(scale[k] > 0)) continue;  // a column of zeros is left out
        const double p = A[(long long)k * pitch + k];
        smallest = p < smallest || p != p ? p : smallest;
        if (!(p > 0)) break;
        const double root = 1.0 / sqrt(p);
        for (int j = threadIdx.x; j < d; j += THREADS)
            step[j] = j == k ? root : (j < k ? A[(long long)k * pitch + j] : A[(long long)j * pitch + k]) * root;
        __syncthreads();
        for (int j = threadIdx.x; j <= k; j += THREADS) A[(long long)k * pitch + j] = step[j];
        for (int i = k + 1 + warp; i < d; i += WARPS) {
            const double factor = step[i];
            double *const row = A + (long long)i * pitch;
            for (int j = lane; j <= i; j += 32) row[j] = fma(-factor, step[j], j == k ? 0.0 : row[j]);
        }
    }
    __syncthreads();
    return smallest;
}

// The product of the 1-norm and the inf-norm of the inverse factor in A, and the sum of its squares.
__device__ double bound_of(const double *A, int d, const double *scale, double *shared, double &spread) {
    const int pitch = d | 1;
    double tallest = 0, widest = 0, squares = 0;
    for (int i = threadIdx.x; i < d; i += THREADS) {
        double across = 0, down = 0;
        if (scale[i] > 0) {
            for (int j = 0; j <= i; ++j) {
                const double entry = scale[j] > 0 ? A[(long long)i * pitch + j] : 0.0;
                across += fabs(entry);
                squares = fma(entry, entry, squares);
            }
            for (int j = i; j < d; ++j) down += scale[j] > 0 ? fabs(A[(long long)j * pitch + i]) : 0.0;
        }
        tallest = fmax(tallest, across);
        widest = fmax(widest, down);
    }
    tallest = largest_of(tallest, shared);
    widest = largest_of(widest, shared);
    spread = sum_of(squares, shared);
    return tallest * widest;
}

}  // namespace

// The contract of `inverse_cholesky`: G and W are (b, d, d), and `figures` (b, FIGURES). `limits` (b,) are the limits of the
// bounds; without them `limit` is the limit of all. A block of threads takes one matrix, with at most as many columns as it
// has threads. It uses 2 d doubles of dynamic shared memory, and d (d | 1) more there, or in `room` if given. The odd width
// spreads a column over the banks.
//
// If `next_shift` is positive, it replaces `shift` for a matrix without a factor, or with a bound above `accepted`. It grows
// a hundredfold until there is a factor. The bound and the spread belong to `shift`.
__global__ void __launch_bounds__(THREADS, 1)
    invert_cholesky(const double *G, int d, double shift, double limit, const double *limits, double accepted,
                    double next_shift, double *room, double *W, double *figures) {
    DYNAMIC_SHARED(memory);
    __shared__ double reduced[THREADS];
    const long long item = blockIdx.x, size = (long long)d * d;
    const double *const from = G + item * size;
    double *const scale = reinterpret_cast<double *>(memory), *const step = scale + d;
    double *const A = room ? room + item * d * (d | 1) : step + d, *const out = W + item * size;
    double *const known = figures + item * FIGURES;
    const int pitch = d | 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double rank = 0, least = -infinite(), most = -infinite();  // least: with its sign changed
    for (int i = threadIdx.x; i < d; i += THREADS) {
        const double square = from[(long long)i * d + i], c = sqrt(square);
        scale[i] = c > 0 ? 1.0 / c : 0.0;
        rank += scale[i] > 0;
        least = fmax(least, square == square ? -square : infinite());
        most = fmax(most, square == square ? square : infinite());
    }
    rank = sum_of(rank, reduced);
    least = -largest_of(least, reduced);
    most = largest_of(most, reduced);
    double smallest = eliminate(from, d, shift, scale, step, A);
    double bound = infinite(), spread = infinite();
    if (smallest > 0) {
        bound = bound_of(A, d, scale, reduced, spread);
        if (bound > (limits ? limits[item] : limit) && bound < infinite())
            bound = fmin(bound, squared_norm<true>(A, pitch, d, scale, step, reduced));
    }
    if (next_shift > 0 && !(smallest > 0 && bound <= accepted))
        for (double tried = next_shift; tried < MOST_SHIFT; tried *= 100) {
            smallest = eliminate(from, d, tried, scale, step, A);
            if (smallest > 0) break;
        }
    const bool made = smallest > 0;
    for (int i = warp; i < d; i += WARPS)
        for (int j = lane; j < d; j += 32) {
            const bool kept = made && i <= j && scale[i] > 0 && scale[j] > 0;
            out[(long long)i * d + j] = kept ? A[(long long)j * pitch + i] * scale[i] : 0.0;
        }
    if (threadIdx.x) return;
    known[PIVOT] = smallest;
    known[BOUND] = bound;
    known[RANK] = rank;
    known[LEAST] = least;
    known[MOST] = most;
    known[SPREAD] = spread;
}

// W = B C of upper triangles, and the norms of D W, with D the diagonal matrix of `sizes` (b, d), to `norms` (b, NORMS).
// Without `bases` W is C, and `norms` also get the norm of D⁻¹ H D⁻¹ for the moments H. Shared memory and `room` are as
// above.
__global__ void __launch_bounds__(THREADS, 1)
    multiply_bases(const double *bases, const double *C, const double *H, const double *sizes, int d, double *room,
                   double *W, double *norms) {
    DYNAMIC_SHARED(memory);
    __shared__ double reduced[THREADS];
    const long long item = blockIdx.x, size = (long long)d * d;
    const double *const right = C + item * size, *const c = sizes + item * d;
    double *const x = reinterpret_cast<double *>(memory);
    double *const A = room ? room + item * d * (d | 1) : x + 2 * d, *const known = norms + item * NORMS;
    const int pitch = d | 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double whole = 0;
    if (!bases) {
        for (int i = warp; i < d; i += WARPS)
            for (int j = lane; j < d; j += 32) A[(long long)i * pitch + j] = H[item * size + (long long)i * d + j] / c[i] / c[j];
        __syncthreads();
        whole = squared_norm<false>(A, pitch, d, c, x, reduced);
        __syncthreads();
    }
    double squares = 0;
    for (int i = warp; i < d; i += WARPS)
        for (int j = lane; j < d; j += 32) {
            double product = 0;
            if (!bases) product = right[(long long)i * d + j];
            else {
                const double *const left = bases + item * size + (long long)i * d;
                for (int k = i; k <= j; ++k) product = fma(left[k], right[(long long)k * d + j], product);
                W[item * size + (long long)i * d + j] = product;
            }
            if (i > j) continue;
            const double even = c[i] * product;
            A[(long long)j * pitch + i] = even;
            squares = fma(even, even, squares);
        }
    squares = sum_of(squares, reduced);
    const double square = squared_norm<true>(A, pitch, d, c, x, reduced);
    if (threadIdx.x) return;
    known[FROBENIUS] = sqrt(squares);
    known[SPECTRAL] = sqrt(square);
    known[OF_MOMENTS] = sqrt(whole);
}
