// The larger of distances, with its row; on ties the lower row.

template <typename Real, typename Row>
__device__ inline void keep_farther(Real &far, Row &row, Real other_far, Row other) {
    if (other_far > far || (other_far == far && other < row)) far = other_far, row = other;
}

// Let all threads of a warp have the largest distance of any of them, and its row.
template <typename Real, typename Row>
__device__ inline void keep_farthest(Real &far, Row &row) {
    for (int half = 16; half; half /= 2)
        keep_farther(far, row, __shfl_xor_sync(0xffffffffu, far, half), __shfl_xor_sync(0xffffffffu, row, half));
}
