// Rows that are far from one another: the first is the farthest from the mean, each other from all rows before it.
//
// A block of threads makes all picks of one matrix. `find_distances` computes the distances of all pairs before, and
// `pick_rows` reads one row of their table for each pick. Without room for a table, `far_rows` computes distances as it
// goes: as many rows as fit stay in shared memory, and the block reads the others again for each pick.

#include "pairs.cuh"
#include "shared.cuh"

namespace {

constexpr int PICKING = 1024;            // threads of a block that reads a table
constexpr int AHEAD = 8;                 // distances that a thread reads before it compares them
constexpr int COMPUTING = 512;           // threads of a block without a table
constexpr int LANES = 8;                 // threads that share a row
constexpr int AT_ONCE = COMPUTING / LANES;  // rows
constexpr int APART = 8;                 // numbers between rows in shared memory, so that they begin in other banks

#include "farther.cuh"

}  // namespace

// Write squared distances of the rows of X (b, count, d) to one another to `table` (b, count, wide). `wide`: a multiple
// of 4, at least count.
//
// They are sums of squared differences: those of equal rows are 0, and nothing cancels. A block computes a tile of the
// upper triangle, and writes it to both. The grid is (b * tiles * tiles).
template <typename Real>
__global__ void __launch_bounds__(MATCHING, 2)
    find_distances(const Real *X, int count, int d, int wide, Real *table) {
    using Tile = Pairs<Real>;
    using Pack = typename Tile::Pack;
    constexpr int PACK = Tile::PACK, EACH = Tile::EACH, TILE = Tile::TILE;
    __shared__ typename Tile::Stage stages[2];
    const int tiles = (count + TILE - 1) / TILE;
    const int top = blockIdx.x / tiles % tiles * TILE, side = blockIdx.x % tiles * TILE;
    if (side < top) return;
    const long long item = blockIdx.x / (tiles * tiles);
    const Real *const rows = X + item * count * d;
    const auto write = [&](int, const Real(&sums)[EACH][EACH]) {
        Real *const out = table + item * count * wide;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int low = 0; low < EACH; low += PACK) {
                Pack across, down;
#pragma unroll
                for (int k = 0; k < PACK; ++k) across.of[k] = sums[i][low + k], down.of[k] = sums[low + k][i];
                const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
                const int row = top + Tile::place(y, i), first = side + Tile::place(x, low);
                if (row < count && first < wide) *(Pack *)(out + (long long)row * wide + first) = across;
                const int column = side + Tile::place(x, i), begin = top + Tile::place(y, low);
                if (side > top && column < count) *(Pack *)(out + (long long)column * wide + begin) = down;
            }
    };
    add_pairs<Real>(
        stages, d, 1, [&](int at) { return rows + (long long)min(top + at, count - 1) * d; },
        [&](int, int at) { return rows + (long long)min(side + at, count - 1) * d; },
        [](Real a, Real b, Real sum) { return fma(a - b, a - b, sum); }, write);
}

// Write to `picks` (b, R) numbers of rows among every `step`-th of n, whose weights (b, n) are above 0. `table`: from
// `find_distances`. `away`: (b, count), squared distances to the mean. A block has one matrix, and its distances to the
// picks in shared memory.
template <typename Real>
__global__ void __launch_bounds__(PICKING, 1)
    pick_rows(const Real *table, const Real *away, const Real *weight, long long n, long long step, int count, int wide,
              int R, long long *picks) {
    DYNAMIC_SHARED(memory);
    __shared__ Real fars[2][PICKING / 32];  // of the warps, in turns, so that a pick takes one barrier
    __shared__ int rows[2][PICKING / 32];
    const long long item = blockIdx.x;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Real *const nearest = (Real *)memory;  // (count,), below 0 for rows of weight 0; a thread has its own places
    for (int row = threadIdx.x; row < count; row += PICKING)
        nearest[row] = weight[item * n + row * step] > 0 ? Real(0) : Real(-1);
    int chosen = 0;
    for (int pick = 0; pick < R; ++pick) {
        const Real *const from = pick ? table + (item * count + chosen) * wide : away + item * count;
        Real far = -1;
        chosen = 0;
        for (int low = threadIdx.x; low < count; low += AHEAD * PICKING) {
            Real read[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) read[k] = from[min(low + k * PICKING, count - 1)];
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                const int row = low + k * PICKING;
                if (row >= count || nearest[row] < 0) continue;
                if (pick > 1) read[k] = min(read[k], nearest[row]);
                if (pick) nearest[row] = read[k];
                keep_farther(far, chosen, read[k], row);
            }
        }
        keep_farthest(far, chosen);
        const int turn = pick % 2;
        if (lane == 0) fars[turn][warp] = far, rows[turn][warp] = chosen;
        __syncthreads();
        far = fars[turn][lane], chosen = rows[turn][lane];
        keep_farthest(far, chosen);
        if (threadIdx.x == 0) picks[item * R + pick] = chosen * step;
    }
}

// Write to `picks` (b, R) numbers of rows among every `step`-th of X (b, n, d), whose weights (b, n) are above 0.
// `mean`: (b, d). `count`: the number of candidate rows. The first `resident` of them fit into shared memory, behind a
// row and, if `inside`, the distances to the picks. `outside`: (b, count), otherwise holds the distances. A block has
// one matrix.
template <typename Real>
__global__ void __launch_bounds__(COMPUTING)
    far_rows(const Real *X, const Real *weight, const Real *mean, long long n, int d, long long step, long long count,
             int R, long long resident, bool inside, Real *outside, long long *picks) {
    DYNAMIC_SHARED(memory);
    __shared__ Real fars[COMPUTING / 32];
    __shared__ long long rows[COMPUTING / 32];
    const long long item = blockIdx.x;
    const Real *const all = X + item * n * d, *const weights = weight + item * n;
    Real *const center = (Real *)memory;
    Real *const nearest = inside ? center + d : outside + item * count;
    Real *const copies = center + d + (inside ? count : 0);
    const int wide = d + APART;
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
    for (long long row = first; row < resident; row += AT_ONCE)
        for (int k = lane; k < d; k += LANES) copies[row * wide + k] = all[row * step * d + k];
    for (int pick = 0; pick < R; ++pick) {
        const Real *const from = pick ? all + picks[item * R + pick - 1] * d : mean + item * d;
        for (int k = threadIdx.x; k < d; k += COMPUTING) center[k] = from[k];
        __syncthreads();
        Real far = -1;
        long long chosen = 0;
        for (long long low = 0; low < count; low += AT_ONCE) {  // all threads alike, because they exchange sums
            const long long row = low + first;
            const Real *const x = row < resident ? copies + row * wide : all + min(row, count - 1) * step * d;
            Real distance = 0;
#pragma unroll 4
            for (int k = lane; k < d; k += LANES) {
                const Real apart = x[k] - center[k];
                distance = fma(apart, apart, distance);
            }
            for (int half = LANES / 2; half; half /= 2) distance += __shfl_xor_sync(0xffffffffu, distance, half);
            if (lane || row >= count) continue;
            if (pick > 1) distance = min(distance, nearest[row]);
            if (pick) nearest[row] = distance;
            if (weights[row * step] > 0) keep_farther(far, chosen, distance, row);
        }
        keep_farthest(far, chosen);
        if (threadIdx.x % 32 == 0) fars[threadIdx.x / 32] = far, rows[threadIdx.x / 32] = chosen;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int warp = 1; warp < COMPUTING / 32; ++warp) keep_farther(far, chosen, fars[warp], rows[warp]);
            picks[item * R + pick] = chosen * step;
        }
        __syncthreads();
    }
}
