// The sum over all THREADS threads of a block, in an order that is always the same; all of them have it. `shared` has room
// for a number of each.

__device__ inline double sum_of(double mine, double *shared) {
    __syncthreads();
    shared[threadIdx.x] = mine;
    for (int half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    __syncthreads();
    return shared[0];
}
