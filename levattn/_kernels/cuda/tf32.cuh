// Products of numbers in single precision on tensor cores: PTX of sm_80 and later.
//
// A product is C (16, 8) += A (16, 8) B (8, 8) of numbers of 11 bits (TF32), spread over a warp. With g = lane / 4 and
// t = lane % 4, a lane has
//   A: entries of row g (0, 2) and row g + 8 (1, 3), of columns t (0, 1) and t + 4 (2, 3);
//   B: entries of column g, of rows t (0) and t + 4 (1);
//   C: entries of row g (0, 1) and row g + 8 (2, 3), of columns 2t (0, 2) and 2t + 1 (1, 3).

__device__ inline void multiply_add(float (&c)[4], const float (&a)[4], float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
