// The steps of a run in single or double precision, and the copies of its positions to shared memory.
//
// The sums of a latent are relative to a reference, which rises at a position whose logit is larger by more than SLACK. So
// no row depends on a later position, and no exponential exceeds e^SLACK.

#include "runs.cuh"

namespace {

constexpr float SLACK = 4;

// Start copying rows to shared memory, `pitch` apart; `finish_copies` waits for them.
template <typename Real>
__device__ inline void bring(Real *to, int pitch, const Real *from, long long step, int rows, int columns) {
#pragma unroll 1
    for (int row = 0; row < rows; ++row)
#pragma unroll 1
        for (int column = threadIdx.x; column < columns; column += blockDim.x)
            copy_later(to + row * pitch + column, from + row * step + column);
}

// Collect the bits of all threads.
__device__ inline void collect(unsigned int *to, unsigned int bits) {
#pragma unroll
    for (int far = 16; far; far /= 2) bits |= __shfl_xor_sync(ALL, bits, far);
    if (threadIdx.x % 32 == 0 && bits) atomicOr(to, bits);
}

// Logits and values of positions, which may be masked.
template <typename Real>
struct Positions {
    const Real *K;
    long long k_item, k_row;
    const Real *V;
    long long v_item, v_row;
    const unsigned char *mask;
    long long mask_item, mask_row;
};

}  // namespace

// The parameters of kernels that read positions.
#define POSITION_PARAMETERS                                                                                         \
    const Real *K, long long k_item, long long k_row, const Real *V, long long v_item, long long v_row,             \
        const unsigned char *mask, long long mask_item, long long mask_row

#define POSITIONS Positions<Real>{K, k_item, k_row, V, v_item, v_row, mask, mask_item, mask_row}
