// Whether a number is neither NaN nor infinite.

__device__ inline bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }
__device__ inline bool is_finite(double x) { return fabs(x) <= 1.7976931348623157e308; }
