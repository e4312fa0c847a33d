// Squared attention of queries: their normalizers, and heavy entries in two passes (count, then write them down).
//
// A block multiplies tiles of queries by tiles of keys in float64, and keeps the products to itself. Each product is one
// chain of fma, and sums over keys are those of chunks, added in their order: no bit depends on the other queries.

#include "tile.cuh"

namespace {

constexpr int ROOM = TILE + 1;  // so that columns begin in different banks

struct Tiles {
    double queries[STAGE][ROOM], keys[STAGE][ROOM];
};

// ⟨q, k⟩ of the queries y · EACH + i and the keys x + SIDE · j of a tile, and if `sizes` ⟨|q|, |k|⟩.
template <bool sizes>
__device__ inline void multiply(const double *Q, long long query, long long m, const double *K, long long key,
                                long long u, int d, Tiles &tiles, double (&sums)[EACH][EACH],
                                double (&bounds)[EACH][EACH]) {
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int j = 0; j < EACH; ++j) sums[i][j] = bounds[i][j] = 0;
    for (int low = 0; low < d; low += STAGE) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int row = y + SIDE * i, column = low + x;
            tiles.queries[x][row] = query + row < m && column < d ? Q[(query + row) * d + column] : 0;
            tiles.keys[x][row] = key + row < u && column < d ? K[(key + row) * d + column] : 0;
        }
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < STAGE; ++k) {
            double a[EACH], b[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) a[i] = tiles.queries[k][y * EACH + i], b[i] = tiles.keys[k][x + SIDE * i];
#pragma unroll
            for (int i = 0; i < EACH; ++i)
#pragma unroll
                for (int j = 0; j < EACH; ++j) {
                    sums[i][j] = fma(a[i], b[j], sums[i][j]);
                    if (sizes) bounds[i][j] = fma(fabs(a[i]), fabs(b[j]), bounds[i][j]);
                }
        }
    }
}

// The sum of what the threads of a row of a tile hold.
__device__ inline double across(double total) {
    for (int step = SIDE / 2; step; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
    return total;
}

// Which keys of a tile have a score of at least ε, for the query i of each thread: bit x + SIDE · j.
__device__ inline unsigned long long heavy(const double (&scores)[EACH], double epsilon) {
    unsigned long long found = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const unsigned int votes = __ballot_sync(0xffffffffu, scores[j] >= epsilon);
        found |= (unsigned long long)(votes >> threadIdx.x % 32 / SIDE * SIDE & 0xffffu) << SIDE * j;
    }
    return found;
}

}  // namespace

// ‖N q‖² of every query (m, d) for N (rows, d), and ‖|N| |q|‖². The grid is (tiles of queries).
__global__ void __launch_bounds__(THREADS)
    square_queries(const double *Q, const double *N, long long m, int rows, int d, double *squares, double *bounds) {
    __shared__ Tiles tiles;
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const long long query = (long long)blockIdx.x * TILE;
    double plain[EACH] = {}, most[EACH] = {};
    for (int row = 0; row < rows; row += TILE) {
        double sums[EACH][EACH], sizes[EACH][EACH];
        multiply<true>(Q, query, m, N, row, rows, d, tiles, sums, sizes);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                plain[i] = fma(sums[i][j], sums[i][j], plain[i]);
                most[i] = fma(sizes[i][j], sizes[i][j], most[i]);
            }
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const double square = across(plain[i]), bound = across(most[i]);
        const long long row = query + y * EACH + i;
        if (x == 0 && row < m) squares[row] = square, bounds[row] = bound;
    }
}

// How many keys (u, d) of each chunk have an entry ⟨q, k⟩² ≥ ε D, to `counts` (m, chunks), and the mass of all of them,
// to `masses`. The grid is chunks · (tiles of queries).
__global__ void __launch_bounds__(THREADS)
    count_heavy(const double *Q, const double *keys, const double *normalizers, double epsilon, long long m, long long u,
                int d, int chunk, int chunks, long long *counts, double *masses) {
    __shared__ Tiles tiles;
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const long long parts = (m + TILE - 1) / TILE, query = blockIdx.x % parts * TILE, part = blockIdx.x / parts;
    const long long stop = min(u, (part + 1) * chunk);
    double D[EACH], mass[EACH] = {};
    int count[EACH] = {};
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const long long row = query + y * EACH + i;
        D[i] = row < m ? normalizers[row] : 0;
    }
    for (long long key = part * chunk; key < stop; key += TILE) {
        double sums[EACH][EACH], unused[EACH][EACH];
        multiply<false>(Q, query, m, keys, key, stop, d, tiles, sums, unused);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const double score = D[i] > 0 ? sums[i][j] * sums[i][j] / D[i] : 0;
                mass[i] += score;
                count[i] += score >= epsilon;
            }
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const double total = across(mass[i]);
        for (int step = SIDE / 2; step; step /= 2) count[i] += __shfl_xor_sync(0xffffffffu, count[i], step);
        const long long row = query + y * EACH + i;
        if (x == 0 && row < m) counts[row * chunks + part] = count[i], masses[row * chunks + part] = total;
    }
}

// The entries that `count_heavy` counted, to places from `offsets` (m, chunks) on: the keys' `indices`, and scores.
__global__ void __launch_bounds__(THREADS)
    fill_heavy(const double *Q, const double *keys, const long long *indices, const double *normalizers, double epsilon,
               long long m, long long u, int d, int chunk, int chunks, const long long *offsets, long long *found,
               double *scores) {
    __shared__ Tiles tiles;
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const long long parts = (m + TILE - 1) / TILE, query = blockIdx.x % parts * TILE, part = blockIdx.x / parts;
    const long long stop = min(u, (part + 1) * chunk);
    double D[EACH];
    long long place[EACH];
    bool any = false;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const long long row = query + y * EACH + i, at = row * chunks + part;
        D[i] = row < m ? normalizers[row] : 0;
        place[i] = row < m ? offsets[at] : 0;
        any = any || (row < m && offsets[at] < offsets[at + 1]);
    }
    if (!__syncthreads_or(any)) return;
    for (long long key = part * chunk; key < stop; key += TILE) {
        double sums[EACH][EACH], unused[EACH][EACH];
        multiply<false>(Q, query, m, keys, key, stop, d, tiles, sums, unused);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
#pragma unroll
            for (int j = 0; j < EACH; ++j) sums[i][j] = D[i] > 0 ? sums[i][j] * sums[i][j] / D[i] : 0;
            const unsigned long long here = heavy(sums[i], epsilon);
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const int bit = x + SIDE * j;
                if (!(here >> bit & 1)) continue;
                const long long at = place[i] + __popcll(here & ((1ull << bit) - 1));
                found[at] = indices[key + bit], scores[at] = sums[i][j];
            }
            place[i] += __popcll(here);
        }
    }
}
