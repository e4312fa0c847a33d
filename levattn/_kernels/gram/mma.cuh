// Products on tensor cores and copies into shared memory that do not wait: PTX of sm_80 and later.
//
// A product is C (16, 8) += A (16, 16) B (16, 8) of 16-bit numbers, two in a word, spread over a warp. With
// g = lane / 4 and t = lane % 4, a lane has
//   A: words of row g (0, 2) and row g + 8 (1, 3), of columns 2t, 2t + 1 (0, 1) and 2t + 8, 2t + 9 (2, 3);
//   B: words of column g, of rows 2t, 2t + 1 (0) and 2t + 8, 2t + 9 (1);
//   C: entries of row g (0, 1) and row g + 8 (2, 3), of columns 2t (0, 2) and 2t + 1 (1, 3).

// The product of numbers that PTX calls `type`.
#define DEFINE_MULTIPLY_ADD(Number, type)                                                                           \
    __device__ inline void multiply_add(Number, float (&c)[4], const unsigned int (&a)[4], unsigned int b0,         \
                                        unsigned int b1) {                                                          \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                                          \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                                                        \
            "{%0, %1, %2, %3};"                                                                                     \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                        \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                        \
    }

DEFINE_MULTIPLY_ADD(Bfloat, "bf16")
DEFINE_MULTIPLY_ADD(Half, "f16")

// C (16, 8) += A (16, 16) B (16, 8) in double precision. A lane has
//   A: entries of row g (even ones) and row g + 8 (odd ones), of columns t, t + 4, t + 8, t + 12;
//   B: entries of column g, of rows t, t + 4, t + 8, t + 12;
//   C: as above.
// sm_80 has no larger product than (8, 4) times (4, 8), whose lanes have the same entries.
__device__ inline void multiply_add(double (&c)[4], const double (&a)[8], const double (&b)[4]) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int k = 0; k < 2; ++k)
        asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
            : "d"(a[4 * k]), "d"(a[4 * k + 1]), "d"(a[4 * k + 2]), "d"(a[4 * k + 3]), "d"(b[2 * k]), "d"(b[2 * k + 1]));
#else
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+d"(c[2 * i]), "+d"(c[2 * i + 1])
                : "d"(a[2 * k + i]), "d"(b[k]));
#endif
}

// Four matrices (8, 8) of 16-bit numbers in shared memory, transposed: word i of a lane has column g, rows 2t and
// 2t + 1 of matrix i. Lane l gives the address of row l % 8 of matrix l / 8, 16 bytes.
__device__ inline void load_transposed(unsigned int (&words)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"((unsigned int)__cvta_generic_to_shared(row))
                 : "memory");
}

// The same matrices as they lie: word i of a lane has row g, columns 2t and 2t + 1 of matrix i.
__device__ inline void load_matrices(unsigned int (&words)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"((unsigned int)__cvta_generic_to_shared(row))
                 : "memory");
}

// 16 bytes to shared memory, of which those after `bytes` are zero; both addresses are multiples of 16.
__device__ inline void copy_async(void *to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes)
                 : "memory");
}

// 4 bytes to shared memory, in the same groups.
__device__ inline void copy_word_async(void *to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 ::"r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for the copies of this thread, but for the last `pending` groups that it has committed.
template <int pending>
__device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ inline unsigned int pack(Half, float low, float high) {
    unsigned int word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ inline unsigned int pack(Bfloat, float low, float high) {
    unsigned int word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

__device__ inline float half_of(unsigned int word, int upper) {
    return widen(Half{(unsigned short)(upper ? word >> 16 : word)});
}
