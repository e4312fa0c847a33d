// The nearest center of each row, and sums of rows by label.

#include "pairs.cuh"

namespace {

constexpr int ADDING = 256;  // threads of a block
constexpr int WARPS = ADDING / 32;
constexpr int LABELS = 8;  // that a thread reads at a time
constexpr int ROWS = 4;    // that a warp reads at a time
constexpr int QUEUE = 32 + 32 * LABELS;  // rows of the label that wait for that

}  // namespace

// For each row x of X (b, n, d) write to `labels` (b, n) which of the centers (b, R, d) is nearest, on ties the first,
// and to `distances` (b, n) its squared distance. `squares` (b, n) and `norms` (b, R) are of rows and of centers.
//
// A block has some rows of one matrix, and compares them with one tile of centers after another. The grid is
// (b * tiles of rows).
template <typename Real>
__global__ void __launch_bounds__(MATCHING, 2)
    find_nearest(const Real *X, const Real *squares, const Real *centers, const Real *norms, int n, int d, int R,
                 long long *labels, Real *distances) {
    using Tile = Pairs<Real>;
    constexpr int EACH = Tile::EACH, TILE = Tile::TILE;
    __shared__ typename Tile::Stage stages[2];
    const int tiles = (n + TILE - 1) / TILE;
    const long long item = blockIdx.x / tiles;
    const int top = blockIdx.x % tiles * TILE, x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const Real *const rows = X + item * n * d, *const others = centers + item * R * d;
    const Real *const lengths = norms + item * R;
    Real best[EACH] = {};
    int found[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) found[i] = -1;
    const auto compare = [&](int tile, const Real(&sums)[EACH][EACH]) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int center = tile * TILE + Tile::place(x, j);
            const Real length = lengths[min(center, R - 1)];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const Real relative = length - 2 * sums[i][j];
                if (center < R && (found[i] < 0 || relative < best[i])) best[i] = relative, found[i] = center;
            }
        }
    };
    add_pairs<Real>(
        stages, d, (R + TILE - 1) / TILE, [&](int at) { return rows + (long long)min(top + at, n - 1) * d; },
        [&](int tile, int at) { return others + (long long)min(tile * TILE + at, R - 1) * d; },
        [](Real a, Real b, Real sum) { return fma(a, b, sum); }, compare);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        for (int half = SIDE / 2; half; half /= 2) {
            const Real other = __shfl_xor_sync(0xffffffffu, best[i], half);
            const int center = __shfl_xor_sync(0xffffffffu, found[i], half);
            if (center < 0) continue;
            if (found[i] < 0 || other < best[i] || (other == best[i] && center < found[i]))
                best[i] = other, found[i] = center;
        }
        const int row = top + Tile::place(y, i);
        if (x || row >= n) continue;
        const Real distance = best[i] + squares[item * n + row];
        labels[item * n + row] = found[i];
        distances[item * n + row] = distance > 0 ? distance : Real(0);
    }
}

// Sums over the rows with each label of rows of X (b, n, d) times their weights (b, n), to `sums` (b, R, d), and of the
// weights, to `mass` (b, R). A row of weight 0 is not added, whatever it holds. The steps of X are in numbers.
//
// A block has one label and some columns of one matrix. It looks at all labels, which costs less than a sort. Each warp
// has a stretch of the rows, so that one label may have all of them. A thread has some COLUMNS. Sums are in double
// precision, in an order that n determines. The grid is (b * R, tiles of columns).
template <typename Real, int COLUMNS>
__global__ void __launch_bounds__(ADDING)
    sum_members(const Real *X, long long item_step, long long row_step, const Real *weight, const int *labels, int n,
                int d, int R, Real *sums, Real *mass) {
    constexpr int WIDTH = 32 * COLUMNS;
    __shared__ double parts[WARPS][WIDTH], totals[WARPS];
    __shared__ int queues[WARPS][QUEUE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long item = blockIdx.x / R;
    const int label = blockIdx.x % R, column = blockIdx.y * WIDTH + lane;
    const Real *const rows = X + item * item_step, *const weights = weight + item * n;
    const int *const names = labels + item * n;
    const int span = (n + 32 * WARPS - 1) / (32 * WARPS) * 32;
    const int begin = min(warp * span, n), end = min(begin + span, n);
    int *const queue = queues[warp];
    int waiting = 0;
    double sum[COLUMNS] = {}, total = 0;
    for (int low = begin; low < end; low += 32 * LABELS) {
        int read[LABELS];
#pragma unroll
        for (int u = 0; u < LABELS; ++u) {
            const int row = low + 32 * u + lane;
            read[u] = row < end ? names[row] : -1;
        }
#pragma unroll
        for (int u = 0; u < LABELS; ++u) {
            const unsigned int members = __ballot_sync(0xffffffffu, read[u] == label);
            if (read[u] == label) queue[waiting + __popc(members & ((1u << lane) - 1))] = low + 32 * u + lane;
            waiting += __popc(members);
        }
        if (waiting < 32 && low + 32 * LABELS < end) continue;
        __syncwarp();
        for (int k = 0; k < waiting; k += ROWS) {
            Real x[ROWS][COLUMNS], times[ROWS];
#pragma unroll
            for (int u = 0; u < ROWS; ++u) {
                const int row = queue[min(k + u, waiting - 1)];
                times[u] = k + u < waiting ? weights[row] : Real(0);
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    x[u][c] = column + 32 * c < d ? rows[row * row_step + column + 32 * c] : Real(0);
            }
#pragma unroll
            for (int u = 0; u < ROWS; ++u) {
                if (times[u] == 0) continue;
                total += times[u];
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) sum[c] = fma((double)times[u], (double)x[u][c], sum[c]);
            }
        }
        __syncwarp();
        waiting = 0;
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) parts[warp][32 * c + lane] = sum[c];
    if (lane == 0) totals[warp] = total;
    __syncthreads();
    for (int c = threadIdx.x; c < WIDTH && blockIdx.y * WIDTH + c < d; c += ADDING) {
        double found = 0;
        for (int k = 0; k < WARPS; ++k) found += parts[k][c];
        sums[(long long)blockIdx.x * d + blockIdx.y * WIDTH + c] = (Real)found;
    }
    if (threadIdx.x || blockIdx.y) return;
    double found = 0;
    for (int k = 0; k < WARPS; ++k) found += totals[k];
    mass[blockIdx.x] = (Real)found;
}
