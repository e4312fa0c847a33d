// Copies of single numbers into shared memory that do not wait: any row of any array, whatever its alignment.

template <typename Real>
__device__ inline void copy_later(Real *to, const Real *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                 ::"r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from), "n"(sizeof(Real))
                 : "memory");
}

// Wait for all copies of this thread; other threads see them after a barrier.
__device__ inline void finish_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
