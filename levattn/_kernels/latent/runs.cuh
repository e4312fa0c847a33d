// Code that the kernels of latent attention share: runs, and the copies of their positions to shared memory.
//
// A run is a stretch of a sequence that one block takes step by step. In a step a position enters the state, then a row is
// written; some runs have only positions, or only rows. The sums of a latent are relative to a reference, which rises at a
// position whose logit is larger by more than SLACK. So no row depends on a later position, and no exponential exceeds
// e^SLACK.

namespace {

constexpr int FIELDS = 8;    // of a run
constexpr int FOLLOWED = 7;  // the number of this field
constexpr float SLACK = 4;
constexpr unsigned int ALL = 0xffffffffu;

struct Run {
    long long sequence;
    long long slot;       // of the state before it
    long long position;   // the first of its positions
    long long row;        // the first of its rows
    long long seen;       // the last position that this row sees, counted from the beginning of the sequence
    int positions, rows;  // equal numbers, or 0 for one of them
    bool followed;        // by another run of the sequence, which needs the sums of this one

    __device__ Run(const long long *runs, long long number) {
        const long long *const fields = runs + number * FIELDS;
        sequence = fields[0], slot = fields[1], position = fields[2], row = fields[3], seen = fields[4];
        positions = (int)fields[5], rows = (int)fields[6], followed = fields[FOLLOWED];
    }

    __device__ int steps() const { return max(positions, rows); }
};

template <typename Real>
__device__ inline Real nothing() {
    return (Real)__int_as_float(0xff800000);  // −∞
}

// Start copying rows to shared memory, `pitch` apart; `finish_copies` waits for them.
template <typename Real>
__device__ inline void bring(Real *to, int pitch, const Real *from, long long step, int rows, int columns) {
    for (int row = 0; row < rows; ++row)
        for (int column = threadIdx.x; column < columns; column += blockDim.x)
            copy_later(to + row * pitch + column, from + row * step + column);
}

// Write one bit for each of at most 32 positions that takes part. For the first warp.
__device__ inline void bring_mask(unsigned int *to, const unsigned char *mask, long long step, int positions) {
    const int lane = threadIdx.x;
    const unsigned int taken = __ballot_sync(ALL, lane < positions && (!mask || mask[lane * step]));
    if (lane == 0) *to = taken;
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

// The parameters of kernels that read positions, and of kernels that begin with states (b, slots, L[, D]).
#define POSITION_PARAMETERS                                                                                         \
    const Real *K, long long k_item, long long k_row, const Real *V, long long v_item, long long v_row,             \
        const unsigned char *mask, long long mask_item, long long mask_row

#define POSITIONS Positions<Real>{K, k_item, k_row, V, v_item, v_row, mask, mask_item, mask_row}

#define START_PARAMETERS const Real *references, const Real *sums, const Real *states, long long slots
