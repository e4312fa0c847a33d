// Shared memory whose size is an argument of the launch: DYNAMIC_SHARED(name); declares it in a kernel, as bytes.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
