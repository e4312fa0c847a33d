// Copies of single numbers into shared memory that do not wait: any row of any array, whatever its alignment.

#ifdef __CUDA_ARCH__

template <typename Real>
__device__ inline void copy_later(Real *to, const Real *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                 ::"r"((unsigned int)__cvta_generic_to_shared(to)), "l"(from), "n"(sizeof(Real))
                 : "memory");
}

// Wait for all copies of this thread; other threads see them after a barrier.
__device__ inline void finish_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#else

namespace host {

struct Later {
    void *to;
    const void *from;
    size_t bytes;
};

static std::vector<Later> later[1024];  // of each thread, which become visible when it waits for them

}  // namespace host

template <typename Real>
void copy_later(Real *to, const Real *from) {
    host::later[threadIdx.x].push_back({to, from, sizeof(Real)});
}

inline void finish_copies() {
    for (const host::Later &copy : host::later[threadIdx.x]) memcpy(copy.to, copy.from, copy.bytes);
    host::later[threadIdx.x].clear();
}

#endif
