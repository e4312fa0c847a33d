// Sums and maxima over the lanes of a warp, in an order that is always the same; all lanes have them.

template <typename Real>
__device__ inline Real sum_of_warp(Real x) {
#pragma unroll
    for (int far = 16; far; far /= 2) x += __shfl_xor_sync(0xffffffffu, x, far);
    return x;
}

template <typename Real>
__device__ inline Real largest_of_warp(Real x) {
#pragma unroll
    for (int far = 16; far; far /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, far));
    return x;
}
