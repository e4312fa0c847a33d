// The nearest center of each row, and sums of rows by label.

#include "pairs.cuh"
#include "warps.cuh"

namespace {

constexpr int ADDING = 256;  // threads of a block
constexpr int WARPS = ADDING / 32;
constexpr int LABELS = 8;  // that a thread reads at a time
constexpr int ROWS = 4;    // that a warp reads at a time
constexpr int QUEUE = 32 + 32 * LABELS;  // rows of the label that wait for that

// Write to `sums` (d,) the sums over the rows with a label of some columns, beginning with `first`, times their weights
// weigh(row), and add what add(figures, row, weight) adds for each to `figures`. Rows of weight 0 are left out. Each warp
// has a stretch of the rows, so that one label may have all of them. A thread has some COLUMNS.
template <int COLUMNS, typename Real, typename Weigh, typename Add, int FIGURES>
__device__ inline void add_members(const Real *rows, long long row_step, const int *names, int label, int n, int first, int d,
                                   const Weigh &weigh, const Add &add, double (&figures)[FIGURES], Real *sums) {
    constexpr int WIDTH = 32 * COLUMNS;
    __shared__ double parts[WARPS][WIDTH], totals[WARPS][FIGURES];
    __shared__ int queues[WARPS][QUEUE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = first + lane;
    const int span = (n + 32 * WARPS - 1) / (32 * WARPS) * 32;
    const int begin = min(warp * span, n), end = min(begin + span, n);
    int *const queue = queues[warp];
    int waiting = 0;
    double sum[COLUMNS] = {};
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
            Real x[ROWS][COLUMNS];
            double times[ROWS];
#pragma unroll
            for (int u = 0; u < ROWS; ++u) {
                const int row = queue[min(k + u, waiting - 1)];
                times[u] = k + u < waiting ? weigh(row) : 0;
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    x[u][c] = column + 32 * c < d ? rows[row * row_step + column + 32 * c] : Real(0);
            }
#pragma unroll
            for (int u = 0; u < ROWS; ++u) {
                if (times[u] == 0) continue;
                add(figures, queue[min(k + u, waiting - 1)], times[u]);
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) sum[c] = fma(times[u], (double)x[u][c], sum[c]);
            }
        }
        __syncwarp();
        waiting = 0;
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) parts[warp][32 * c + lane] = sum[c];
    if (lane == 0)
        for (int k = 0; k < FIGURES; ++k) totals[warp][k] = figures[k];
    __syncthreads();
    for (int c = threadIdx.x; c < WIDTH && first + c < d; c += ADDING) {
        double found = 0;
        for (int k = 0; k < WARPS; ++k) found += parts[k][c];
        sums[first + c] = (Real)found;
    }
    for (int j = 0; j < FIGURES; ++j) {
        figures[j] = 0;
        for (int k = 0; k < WARPS; ++k) figures[j] += totals[k][j];
    }
}

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

// Write to `levels` (b, R) the means of numbers x (b, n) with weights (b, n) over the rows with each label; 0 for a label
// without rows. A block has a label of one matrix. The grid is (b * R).
template <typename Real>
__global__ void __launch_bounds__(ADDING)
    level_members(const Real *x, const Real *weight, const int *labels, int n, int R, Real *levels) {
    __shared__ double parts[WARPS][2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, label = blockIdx.x % R;
    const long long item = blockIdx.x / R;
    double sum = 0, mass = 0;
    for (int row = threadIdx.x; row < n; row += ADDING) {
        if (labels[item * n + row] != label) continue;
        const double w = weight[item * n + row];
        if (w > 0) sum = fma(w, (double)x[item * n + row], sum), mass += w;
    }
    sum = sum_of_warp(sum), mass = sum_of_warp(mass);
    if (lane == 0) parts[warp][0] = sum, parts[warp][1] = mass;
    __syncthreads();
    if (threadIdx.x) return;
    for (int k = 1; k < WARPS; ++k) sum += parts[k][0], mass += parts[k][1];
    levels[blockIdx.x] = mass > 0 ? (Real)(sum / mass) : Real(0);
}

// Sums over the rows with each label of rows of X (b, n, d) times their weights (b, n), to `sums` (b, R, d), and of the
// weights, to `mass` (b, R). A row of weight 0 is not added, whatever it holds. The steps of X are in numbers.
//
// A block has one label and some columns of one matrix. It looks at all labels, which costs less than a sort. Sums are in
// double precision, in an order that n determines. The grid is (b * R, tiles of columns).
template <typename Real, int COLUMNS>
__global__ void __launch_bounds__(ADDING)
    sum_members(const Real *X, long long item_step, long long row_step, const Real *weight, const int *labels, int n,
                int d, int R, Real *sums, Real *mass) {
    const long long item = blockIdx.x / R;
    const int first = blockIdx.y * 32 * COLUMNS;
    const Real *const weights = weight + item * n;
    double figures[1] = {};
    add_members<COLUMNS>(
        X + item * item_step, row_step, labels + item * n, blockIdx.x % R, n, first, d,
        [&](int row) { return (double)weights[row]; },
        [](double *figures, int, double w) { figures[0] += w; }, figures, sums + (long long)blockIdx.x * d);
    if (threadIdx.x == 0 && blockIdx.y == 0) mass[blockIdx.x] = (Real)figures[0];
}

// Write summaries of rows K (b, n, d) and V (b, n, D) with labels: to `summed` (b, R, d + D + 3) the sums over keys and over
// values, times e^tilt, and the weight Σ e^tilt, the offset Σ e^tilt tilt and the number of members. The tilts (b, n) are
// `along` (b, n) less the level (b, R) of the label, at most `most` in size. A row of weight (b, n) 0 is in no summary: it has
// the role -2, others their labels, and the tilt 0.
//
// A block has a label and some columns of the keys or the values of one matrix. The grid is (b * R, tiles of keys and values).
template <typename Real, int COLUMNS>
__global__ void __launch_bounds__(ADDING, 3)
    merge_members(const Real *K, long long key_item, long long key_row, const Real *V, long long value_item,
                  long long value_row, const Real *weight, const int *labels, const Real *along, const Real *levels,
                  double most, int n, int d, int D, int R, Real *summed, long long *role, Real *tilts) {
    const long long item = blockIdx.x / R;
    const int label = blockIdx.x % R, key_tiles = (d + 32 * COLUMNS - 1) / (32 * COLUMNS);
    const bool of_keys = (int)blockIdx.y < key_tiles;
    const int first = 32 * COLUMNS * ((int)blockIdx.y - (of_keys ? 0 : key_tiles));
    const int *const names = labels + item * n;
    const Real *const own = along + item * n, *const weights = weight + item * n;
    const double level = levels[blockIdx.x];
    Real *const to = summed + (long long)blockIdx.x * (d + D + 3);
    const auto tilt_of = [&](int row) { return (double)(Real)fmax(-most, fmin(most, (double)own[row] - level)); };
    double figures[3] = {};
    add_members<COLUMNS>(
        of_keys ? K + item * key_item : V + item * value_item, of_keys ? key_row : value_row, names, label, n, first,
        of_keys ? d : D, [&](int row) { return weights[row] > 0 ? (double)(Real)exp(tilt_of(row)) : 0.0; },
        [&](double *figures, int row, double w) { figures[0] += w, figures[1] += w * tilt_of(row), figures[2] += 1; },
        figures, of_keys ? to : to + d);
    if (blockIdx.y) return;
    if (threadIdx.x == 0)
        for (int k = 0; k < 3; ++k) to[d + D + k] = (Real)figures[k];
    for (int row = threadIdx.x; row < n; row += ADDING) {
        const bool there = weights[row] > 0;
        if (there ? names[row] != label : label) continue;
        role[item * n + row] = there ? label : -2;
        tilts[item * n + row] = there ? (Real)tilt_of(row) : Real(0);
    }
}
