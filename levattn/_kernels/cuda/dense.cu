// Small dense matrices, one block of threads each.

namespace {

constexpr int THREADS = 256;

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

// The contract of `inverse_cholesky`: G and W are (b, d, d), `pivot` and `reach` (b,); `L` (b, d, d) and `work` (b, 3, d)
// are room. A block of threads takes one matrix.
//
// The scaled matrix is eliminated in place, forwards: left of the column that is eliminated L holds the inverse of the
// factor, from it on what is left of the matrix.
__global__ void __launch_bounds__(THREADS)
    invert_cholesky(const double *G, int d, double shift, double *L, double *work, double *W, double *pivot,
                    double *reach) {
    __shared__ double reduced[THREADS];
    const long long item = blockIdx.x, size = (long long)d * d;
    const double *const from = G + item * size;
    double *const A = L + item * size, *const out = W + item * size;
    double *const scale = work + 3 * item * d, *const column = scale + d, *const row = column + d;
    for (int i = threadIdx.x; i < d; i += THREADS) {
        const double c = sqrt(from[(long long)i * d + i]);
        scale[i] = c > 0 ? 1.0 / c : 0.0;
    }
    __syncthreads();
    for (long long at = threadIdx.x; at < size; at += THREADS) {
        const int i = (int)(at / d), j = (int)(at % d);
        A[at] = i == j ? 1.0 + shift : from[at] * scale[i] * scale[j];  // the square of a rounded root may miss it
    }
    double smallest = 1.0 / 0.0;
    for (int k = 0; k < d; ++k) {
        __syncthreads();
        if (!(scale[k] > 0)) continue;  // a column of zeros is left out
        const double p = A[(long long)k * d + k];
        smallest = p < smallest || p != p ? p : smallest;
        if (!(p > 0)) break;
        const double root = 1.0 / sqrt(p);
        for (int i = threadIdx.x; i < d; i += THREADS) {
            if (i > k) column[i] = A[(long long)i * d + k] * root;
            else row[i] = i == k ? root : A[(long long)k * d + i] * root;
        }
        __syncthreads();
        const int below = d - k - 1;
        for (int i = threadIdx.x; i <= k; i += THREADS) A[(long long)k * d + i] = row[i];
        for (long long at = threadIdx.x; at < (long long)below * d; at += THREADS) {
            const int i = k + 1 + (int)(at / d), j = (int)(at % d);
            if (j > i) continue;
            double *const entry = A + (long long)i * d + j;
            if (j > k) *entry = fma(-column[i], column[j], *entry);
            else if (j == k) *entry = -column[i] * root;
            else *entry = fma(-column[i], row[j], *entry);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) pivot[item] = smallest;
    if (!(smallest > 0)) {
        if (threadIdx.x == 0) reach[item] = 1.0 / 0.0;
        return;
    }
    double tallest = 0, widest = 0;
    for (int i = threadIdx.x; i < d; i += THREADS) {
        double across = 0, down = 0;
        if (scale[i] > 0) {
            for (int j = 0; j <= i; ++j) across += fabs(A[(long long)i * d + j]) * (scale[j] > 0 ? 1.0 : 0.0);
            for (int j = i; j < d; ++j) down += fabs(A[(long long)j * d + i]) * (scale[j] > 0 ? 1.0 : 0.0);
        }
        tallest = fmax(tallest, across);
        widest = fmax(widest, down);
    }
    tallest = largest_of(tallest, reduced);
    widest = largest_of(widest, reduced);
    if (threadIdx.x == 0) reach[item] = tallest * widest;
    for (long long at = threadIdx.x; at < size; at += THREADS) {
        const int i = (int)(at / d), j = (int)(at % d);
        const bool kept = i <= j && scale[i] > 0 && scale[j] > 0;
        out[at] = kept ? A[(long long)j * d + i] * scale[i] : 0.0;
    }
}
