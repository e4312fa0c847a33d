// A state S of latents and channels in the registers of a block, as products of tensor cores take and leave it.
//
// A warp has the channels of TILES · 16 columns. A lane has, in the order of C in mma.cuh and tf32.cuh, two latents of two
// channels, for each octet of latents and each tile.

namespace {

using Real = float;

constexpr int THREADS = 128;  // of a block
constexpr int WARPS = THREADS / 32;
constexpr int TALL = 16, OCTET = 8;  // rows and columns of a product

template <int LATENTS, int TILES>
struct Spread {
    static constexpr int OCTETS = LATENTS / OCTET, WIDE = TALL * TILES * WARPS;

    float S[TILES][OCTETS][4];

    // Of factors, lanes have rows g and g + 8, and columns t and t + 4 or 2t and 2t + 1.
    static __device__ int g() { return threadIdx.x % 32 / 4; }
    static __device__ int t() { return threadIdx.x % 4; }
    static __device__ int channel() { return threadIdx.x / 32 * TALL * TILES; }

    // Call `use(latent, channel, sum)` for the entries of S in this lane.
    template <typename Use>
    __device__ void each_sum(Use use) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int j = 0; j < OCTETS; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    use(OCTET * j + 2 * t() + i % 2, channel() + TALL * tile + g() + i / 2 * 8, S[tile][j][i]);
    }

    // Begin with `latents` rows of `columns` columns, D apart, or with zeros.
    __device__ void load(const float *from, int latents, int columns, int D) {
        each_sum([&](int l, int c, float &sum) { sum = from && l < latents && c < columns ? from[(long long)l * D + c] : 0; });
    }

    // Call `use(row, channel, y)` for the entries of 16 rows in this lane.
    template <typename Use>
    static __device__ void each_row(float (&Y)[2 * TILES][4], Use use) {
#pragma unroll
        for (int n = 0; n < 2 * TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) use(g() + i / 2 * 8, channel() + OCTET * n + 2 * t() + i % 2, Y[n][i]);
    }
};

}  // namespace
