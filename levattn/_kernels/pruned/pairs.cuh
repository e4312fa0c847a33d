// Sums over the terms of pairs of rows, tile by tile; the next terms come to shared memory meanwhile.

#include "copies.cuh"

constexpr int SIDE = 16;               // threads along a side of a tile
constexpr int MATCHING = SIDE * SIDE;  // threads of a block
constexpr int STAGE = 16;              // terms of each sum in shared memory at a time

// Sums of a thread: EACH by EACH of the TILE by TILE of a block, in packs of 16 bytes.
template <typename Real>
struct Pairs {
    static constexpr int PACK = 16 / sizeof(Real), EACH = 2 * PACK, TILE = SIDE * EACH;

    struct alignas(16) Pack {
        Real of[PACK];
    };
    struct Stage {
        Pack left[STAGE][TILE / PACK + 1], right[STAGE][TILE / PACK + 1];
    };

    // The place along a side of the i-th of a thread: packs of neighbors lie side by side.
    __device__ static int place(int thread, int i) { return i / PACK * (SIDE * PACK) + thread * PACK + i % PACK; }
};

// Sums of add(x, y, sum) over the terms of the rows left(i) and the rows right(tile, j) of some tiles, of d terms each.
//
// `stages` (2,) is in shared memory. All threads call done(tile, sums) with those of their own that are complete.
template <typename Real, typename Left, typename Right, typename Add, typename Done>
__device__ inline void add_pairs(typename Pairs<Real>::Stage *stages, int d, int tiles, const Left &left,
                                 const Right &right, const Add &add, const Done &done) {
    using Pack = typename Pairs<Real>::Pack;
    using Stage = typename Pairs<Real>::Stage;
    constexpr int PACK = Pairs<Real>::PACK, EACH = Pairs<Real>::EACH;
    const int slabs = max((d + STAGE - 1) / STAGE, 1), x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const auto fetch = [&](int number) {
        Stage &stage = stages[number % 2];
        const int tile = tiles == 1 ? 0 : number / slabs, k = (number - tile * slabs) * STAGE + x;
#pragma unroll 2
        for (int i = 0; i < EACH; ++i) {  // not all at once, because their addresses would take too many registers
            const int at = y + i * SIDE;
            Real *const mine = &stage.left[x][at / PACK].of[at % PACK];
            Real *const other = &stage.right[x][at / PACK].of[at % PACK];
            if (k < d) {
                copy_later(mine, left(at) + k);
                copy_later(other, right(tile, at) + k);
            } else {
                *mine = *other = 0;
            }
        }
    };
    fetch(0);
    finish_copies();
    __syncthreads();
    for (int tile = 0, number = 0; tile < tiles; ++tile) {
        Real sums[EACH][EACH] = {};
        for (int slab = 0; slab < slabs; ++slab, ++number) {
            if (number + 1 < tiles * slabs) fetch(number + 1);
            const Stage &stage = stages[number % 2];
#pragma unroll 4
            for (int term = 0; term < STAGE; ++term) {
                Pack a[2], b[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    a[k] = stage.left[term][k * SIDE + y];
                    b[k] = stage.right[term][k * SIDE + x];
                }
#pragma unroll
                for (int i = 0; i < EACH; ++i)
#pragma unroll
                    for (int j = 0; j < EACH; ++j)
                        sums[i][j] = add(a[i / PACK].of[i % PACK], b[j / PACK].of[j % PACK], sums[i][j]);
            }
            finish_copies();
            __syncthreads();
        }
        done(tile, sums);
    }
}
