// Small dense matrices, one block of threads each.

#include "shared.cuh"

namespace {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;

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

}  // namespace

// The contract of `inverse_cholesky`: G and W are (b, d, d), `pivot` and `inverse_norm_bound` (b,). A block of threads takes one
// matrix, in 2 d doubles of dynamic shared memory and d (d | 1) more, or as many for each in `room` if that is given: an
// odd width spreads a column over the banks.
//
// The scaled matrix is eliminated in place, forwards: left of the column that is eliminated the lower triangle of A holds
// the inverse of the factor, from it on what is left of the matrix.
__global__ void __launch_bounds__(THREADS, 1)
    invert_cholesky(const double *G, int d, double shift, double *room, double *W, double *pivot,
                    double *inverse_norm_bound) {
    DYNAMIC_SHARED(memory);
    __shared__ double reduced[THREADS];
    const long long item = blockIdx.x, size = (long long)d * d;
    const double *const from = G + item * size;
    double *const scale = reinterpret_cast<double *>(memory), *const step = scale + d;
    double *const A = room ? room + item * d * (d | 1) : step + d, *const out = W + item * size;
    const int pitch = d | 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < d; i += THREADS) {
        const double c = sqrt(from[(long long)i * d + i]);
        scale[i] = c > 0 ? 1.0 / c : 0.0;
    }
    __syncthreads();
    for (int i = warp; i < d; i += WARPS)
        for (int j = lane; j <= i; j += 32)  // the square of a rounded root may miss the diagonal
            A[(long long)i * pitch + j] = i == j ? 1.0 + shift : from[(long long)i * d + j] * scale[i] * scale[j];
    double smallest = 1.0 / 0.0;
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
    if (threadIdx.x == 0) pivot[item] = smallest;
    if (!(smallest > 0)) {
        if (threadIdx.x == 0) inverse_norm_bound[item] = 1.0 / 0.0;
        return;
    }
    double tallest = 0, widest = 0;
    for (int i = threadIdx.x; i < d; i += THREADS) {
        double across = 0, down = 0;
        if (scale[i] > 0) {
            for (int j = 0; j <= i; ++j) across += scale[j] > 0 ? fabs(A[(long long)i * pitch + j]) : 0.0;
            for (int j = i; j < d; ++j) down += scale[j] > 0 ? fabs(A[(long long)j * pitch + i]) : 0.0;
        }
        tallest = fmax(tallest, across);
        widest = fmax(widest, down);
    }
    tallest = largest_of(tallest, reduced);
    widest = largest_of(widest, reduced);
    if (threadIdx.x == 0) inverse_norm_bound[item] = tallest * widest;
    for (int i = warp; i < d; i += WARPS)
        for (int j = lane; j < d; j += 32) {
            const bool kept = i <= j && scale[i] > 0 && scale[j] > 0;
            out[(long long)i * d + j] = kept ? A[(long long)j * pitch + i] * scale[i] : 0.0;
        }
}
