// Runs, which all kernels of latent attention share.
//
// A run is a stretch of a sequence that one block takes step by step. In a step a position enters the state, then a row is
// written; some runs have only positions, or only rows.

namespace {

constexpr int FIELDS = 8;    // of a run
constexpr int FOLLOWED = 7;  // the number of this field
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

// Write one bit for each position that takes part, a word for each warp that calls this.
__device__ inline void bring_mask(unsigned int *to, const unsigned char *mask, long long step, int positions) {
    const int k = threadIdx.x;
    const unsigned int taken = __ballot_sync(ALL, k < positions && (!mask || mask[k * step]));
    if (k % 32 == 0) to[k / 32] = taken;
}

}  // namespace

// The parameters of kernels that begin with states (b, slots, L[, D]).
#define START_PARAMETERS const Real *references, const Real *sums, const Real *states, long long slots
