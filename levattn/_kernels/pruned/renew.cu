// Renewals of a causal selection, one after another: each chooses among the slots of the one before and new keys.
//
// A block of threads has one sequence, and makes all of its renewals. The items of a renewal are the summaries before it,
// the keys that were kept, and the keys that are no longer recent, in this order. As many of their places as fit lie in
// shared memory, in rows; the others in main memory of the device.

#include "finite.cuh"
#include "shared.cuh"
#include "warps.cuh"

namespace {

#include "farther.cuh"

constexpr int THREADS = 512;  // of a block, or half as many for rows of many columns, which take more registers
constexpr int WARPS = THREADS / 32;
constexpr int PLACED = 8;                 // rows that a warp places at a time, at most
constexpr int LANES = 8;                  // threads that share a row while distances are computed
constexpr int PACK = 4;                   // numbers that a thread reads at once; rows begin at multiples of them
constexpr int READ = 16;                  // numbers that a thread reads before it adds them
constexpr unsigned int ALL = 0xffffffffu;

// The slots of an item: s kept keys, values and positions; sums of R summaries, their weights, offsets and counts, and
// their radii or null.
struct Slots {
    float *keys, *values;
    long long *places;
    double *sums, *value_sums, *weights, *offsets, *counts, *radius;
    int s, R;

    __device__ Slots of(long long item, int d, int D) const {
        return {keys + item * s * d,       values + item * s * D, places + item * s,   sums + item * R * d,
                value_sums + item * R * D, weights + item * R,    offsets + item * R,  counts + item * R,
                radius ? radius + item * R : nullptr, s, R};
    }
};

struct Items {
    Slots held;
    const float *K, *V;  // keys and values that are no longer recent
    long long key_step, value_step;

    __device__ double count(int i) const { return i < held.R ? held.counts[i] : 1.0; }

    // A key or a value of an item that is no summary.
    __device__ const float *row(int i, bool of_values, int width) const {
        const int at = i - held.R;
        if (at < held.s) return (of_values ? held.values : held.keys) + (long long)at * width;
        return of_values ? V + (at - held.s) * value_step : K + (at - held.s) * key_step;
    }
};

// Memory of a block for n items. `far`: (n,) numbers in double precision, where `squares` and `least` lie. Rows have `deep`
// numbers, which are d and zeros. `outside` has the rows of all sequences that are not `resident`.
struct Room {
    float *inside, *outside, *squares, *least, *along, *scores, *mean;
    double *far;
    int *labels, *flags, *order, *starts;
    int resident, pitch, deep, d;

    __device__ Room(unsigned char *memory, float *outside, long long sequence, int resident, int n, int R, int d)
        : resident(resident), d(d) {
        const int wide = (n + PLACED - 1) / PLACED * PLACED;
        deep = (d + PACK - 1) / PACK * PACK, pitch = deep + LANES;
        this->outside = outside + sequence * max(wide - resident, 0) * deep;
        far = (double *)memory;
        squares = (float *)memory, least = squares + wide, along = least + wide, scores = along + wide;
        inside = scores + wide, mean = inside + (long long)resident * pitch;
        labels = (int *)(mean + deep), flags = labels + wide, order = flags + wide, starts = order + wide;
    }

    __device__ float *row(int i) const {
        return i < resident ? inside + (long long)i * pitch : outside + (long long)(i - resident) * deep;
    }
};

struct alignas(16) Pack {
    float of[PACK];
};

// Write the places (x - origin) root of all items, their squared lengths, and log masses for each unit of weight at the
// query. Return whether those of this thread are finite.
template <int COLUMNS>
__device__ bool place_items(const Items &items, const Room &room, int n, const float *root, const float *query,
                            const float *origin) {
    constexpr int ROWS = COLUMNS > 2 ? PLACED / 2 : PLACED;
    const int lane = threadIdx.x % 32, d = room.d;
    bool sound = true;
    for (int low = threadIdx.x / 32 * ROWS; low < n; low += blockDim.x / 32 * ROWS) {
        float *const rows = room.row(low);  // all of them inside, or all outside
        const int step = low < room.resident ? room.pitch : room.deep;
        for (int r = 0; r < ROWS && low + r < n; ++r) {
            const int i = low + r;
            const bool whole = i >= items.held.R, there = items.count(i) > 0;
            const double inverse = whole || !there ? 1.0 : 1.0 / items.held.weights[i];
            float product = 0;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const int k = lane + 32 * c;
                if (k >= d) {
                    if (k < room.deep) rows[r * step + k] = 0;
                    continue;
                }
                const float x = (whole ? items.row(i, false, d)[k]
                                       : (float)(items.held.sums[(long long)i * d + k] * inverse)) - origin[k];
                rows[r * step + k] = x;
                product = fmaf(x, query[k], product);
            }
            product = sum_of_warp(product);
            if (!whole && there) product -= (float)(items.held.offsets[i] * inverse);
            if (lane == 0) room.along[i] = product;
            sound = sound && is_finite(product);
        }
        __syncwarp();
        float sums[ROWS][COLUMNS] = {};
#pragma unroll 1
        for (int low_k = 0; low_k < d; low_k += PACK) {
            Pack x[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) x[r] = *(const Pack *)(rows + r * step + low_k);
#pragma unroll
            for (int j = 0; j < PACK; ++j) {
                const int k = low_k + j;
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    if (32 * c > k) break;  // the factor is lower triangular
                    const int column = lane + 32 * c;
                    const float factor = column <= k && k < d ? root[(long long)k * d + column] : 0;
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) sums[r][c] = fmaf(x[r].of[j], factor, sums[r][c]);
                }
            }
        }
        __syncwarp();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (low + r >= n) break;
            float square = 0;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const int k = lane + 32 * c;
                if (k < d) rows[r * step + k] = sums[r][c];
                square = fmaf(sums[r][c], sums[r][c], square);
            }
            square = sum_of_warp(square);
            if (lane == 0) room.squares[low + r] = square;
            sound = sound && is_finite(square);
        }
    }
    return sound;
}

// Label the items whose labels are not below 0 by R of them that are far from one another, beginning with the farthest
// from their mean, and write their squared distances to these. Before and after, all threads wait.
template <int COLUMNS>
__device__ void find_clusters(const Items &items, const Room &room, int n, int R) {
    __shared__ float fars[2][WARPS];  // in turns, so that a pick takes one barrier
    __shared__ int picks[2][WARPS];
    const int d = room.d, lane = threadIdx.x % LANES, first = threadIdx.x / LANES, warp = threadIdx.x / 32;
    for (int k = threadIdx.x; k < room.deep; k += blockDim.x) {
        double sum = 0, weight = 0;
        for (int i = 0; i < n && k < d; ++i) {
            if (room.labels[i] < 0) continue;
            const double own = items.count(i);
            sum += own * room.row(i)[k], weight += own;
        }
        room.mean[k] = weight > 0 ? (float)(sum / weight) : 0;
    }
    __syncthreads();
    int chosen = 0;
    for (int pick = 0; pick <= R; ++pick) {
        const float *const from = pick ? room.row(chosen) : room.mean;
        Pack center[COLUMNS];  // of which a lane has every eighth pack
#pragma unroll
        for (int u = 0; u < COLUMNS; ++u)
            if (PACK * (lane + LANES * u) < room.deep) center[u] = *(const Pack *)(from + PACK * (lane + LANES * u));
        float far = -1;
        chosen = 0;
        for (int low = 0; low < n; low += blockDim.x / LANES) {  // all threads alike, because they exchange sums
            const int i = low + first;
            const float *const x = room.row(min(i, n - 1));
            float distance = 0;
#pragma unroll
            for (int u = 0; u < COLUMNS; ++u) {
                if (PACK * (lane + LANES * u) >= room.deep) break;
                const Pack own = *(const Pack *)(x + PACK * (lane + LANES * u));
#pragma unroll
                for (int j = 0; j < PACK; ++j) {
                    const float apart = own.of[j] - center[u].of[j];
                    distance = fmaf(apart, apart, distance);
                }
            }
#pragma unroll
            for (int half = LANES / 2; half; half /= 2) distance += __shfl_xor_sync(ALL, distance, half);
            if (lane || i >= n || room.labels[i] < 0) continue;
            if (pick == 1 || (pick && distance < room.least[i])) room.least[i] = distance, room.labels[i] = pick - 1;
            keep_farther(far, chosen, pick ? room.least[i] : distance, i);
        }
        if (pick == R) break;
        keep_farthest(far, chosen);
        if (threadIdx.x % 32 == 0) fars[pick % 2][warp] = far, picks[pick % 2][warp] = chosen;
        __syncthreads();
        const int other = threadIdx.x % (blockDim.x / 32);
        far = fars[pick % 2][other], chosen = picks[pick % 2][other];
        keep_farthest(far, chosen);
    }
    __syncthreads();
}

// Flag the `size` candidates with the largest scores, on ties the first, and list them. Candidates are items that are no
// summaries. Before and after, all threads wait.
__device__ void choose(const Items &items, const Room &room, int n, int size, long long fresh, int sinks, bool residual,
                       float same) {
    const int before = items.held.R, candidates = n - before;
    for (int i = threadIdx.x; i < candidates; i += blockDim.x) {
        const float square = room.squares[before + i];
        float score = room.along[before + i] + square / 2;
        if (residual) score += logf(fmaxf(room.least[before + i], fmaxf(same * square, 1e-30f)));
        const long long place = i < items.held.s ? items.held.places[i] : fresh + i - items.held.s;
        room.scores[i] = place < sinks ? __int_as_float(0x7f800000) : score;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < candidates; i += blockDim.x) {
        const float own = room.scores[i];
        int rank = 0;
        for (int j = 0; j < candidates; ++j) rank += room.scores[j] > own || (room.scores[j] == own && j < i);
        room.flags[i] = rank < size;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < candidates; i += blockDim.x) {
        if (!room.flags[i]) continue;
        int place = 0;
        for (int j = 0; j < i; ++j) place += room.flags[j];
        if (place < size) room.order[place] = i;  // scores that are no numbers flag more
        room.labels[before + i] = -1;
    }
    __syncthreads();
}

// Write kept keys, their values and their positions.
__device__ void keep(const Items &items, const Room &room, const Slots &to, long long fresh, int D) {
    const int lane = threadIdx.x % 32, d = room.d;
    for (int at = threadIdx.x / 32; at < to.s; at += blockDim.x / 32) {
        const int i = room.order[at], item = items.held.R + i;
        const float *const key = items.row(item, false, d), *const value = items.row(item, true, D);
        for (int k = lane; k < d; k += 32) to.keys[(long long)at * d + k] = key[k];
        for (int k = lane; k < D; k += 32) to.values[(long long)at * D + k] = value[k];
        if (lane == 0) to.places[at] = i < items.held.s ? items.held.places[i] : fresh + i - items.held.s;
    }
}

// List the items of each label, label after label. Before and after, all threads wait.
__device__ void list_members(const Room &room, int n, int R) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int own = room.labels[i];
        if (own < 0) continue;
        int place = 0;
        for (int j = 0; j < n; ++j) {
            const int other = room.labels[j];
            place += other >= 0 && (other < own || (other == own && j < i));
        }
        room.order[place] = i;
    }
    for (int c = threadIdx.x; c <= R; c += blockDim.x) {
        int start = 0;
        for (int i = 0; i < n; ++i) start += room.labels[i] >= 0 && room.labels[i] < c;
        room.starts[c] = start;
    }
    __syncthreads();
}

// Add the rows of some items, from the one at a place to the one before `end`, times their factors.
template <int COLUMNS, typename Number, typename Row>
__device__ inline void add_rows(double (&sums)[COLUMNS], int at, int end, const int *items, const double *factors,
                                int width, const Row &row) {
    constexpr int AHEAD = READ / COLUMNS;  // rows
    const int lane = threadIdx.x % 32;
    for (; at < end; at += AHEAD) {
        Number read[AHEAD][COLUMNS];
        double times[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const int source = min(at + u, end - 1);
            times[u] = factors[source];
            const Number *const from = row(items[source]);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) read[u][c] = lane + 32 * c < width ? from[lane + 32 * c] : Number(0);
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            if (at + u >= end) break;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) sums[c] = fma(times[u], (double)read[u][c], sums[c]);
        }
    }
}

// Write the summary of the members of label c: the sums over their keys with weights, or those over their values, and
// weight, offset and count. A warp has a label.
template <int COLUMNS>
__device__ void sum_up(const Items &items, const Room &room, const Slots &to, int c, bool of_values, int width,
                       double most_tilt) {
    __shared__ double factors[WARPS][32];
    const int lane = threadIdx.x % 32, before = items.held.R;
    const int begin = room.starts[c], end = room.starts[c + 1];
    double *const own_factors = factors[threadIdx.x / 32];
    double level = 0, mass = 0;
    for (int at = begin + lane; at < end; at += 32) {
        const double own = items.count(room.order[at]);
        level = fma(own, (double)room.along[room.order[at]], level), mass += own;
    }
    level = sum_of_warp(level), mass = sum_of_warp(mass);
    level = mass > 0 ? level / mass : 0;
    double sums[COLUMNS] = {}, weight = 0, offset = 0;
    const double *const held = of_values ? items.held.value_sums : items.held.sums;
    for (int low = begin; low < end; low += 32) {
        const int here = min(32, end - low), item = room.order[low + min(lane, here - 1)];
        const bool summary = item < before;
        const double whole = summary ? items.held.weights[item] : 1.0, shift = summary ? items.held.offsets[item] : 0.0;
        const double tilt = fmax(-most_tilt, fmin(most_tilt, (double)room.along[item] - level)), factor = exp(tilt);
        if (lane < here) weight = fma(factor, whole, weight), offset = fma(factor, shift + tilt * whole, offset);
        own_factors[lane] = factor;
        const int summaries = __popc(__ballot_sync(ALL, lane < here && summary));  // they come first
        __syncwarp();  // a vote orders no memory
        add_rows<COLUMNS, double>(sums, 0, summaries, room.order + low, own_factors, width,
                                  [&](int i) { return held + (long long)i * width; });
        add_rows<COLUMNS, float>(sums, summaries, here, room.order + low, own_factors, width,
                                 [&](int i) { return items.row(i, of_values, width); });
        __syncwarp();
    }
    weight = sum_of_warp(weight), offset = sum_of_warp(offset);
    const bool there = mass > 0 && weight > 0;
    const double balance = there ? mass / weight : 0;  // weights then have a mean of 1
    double *const out = (of_values ? to.value_sums : to.sums) + (long long)c * width;
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k)
        if (lane + 32 * k < width) out[lane + 32 * k] = there ? sums[k] * balance : 0;
    if (lane || of_values) return;
    to.weights[c] = there ? weight * balance : 0;
    to.offsets[c] = there ? balance * (offset + log(balance) * weight) : 0;
    to.counts[c] = mass;
}

// Write bounds of the distances of members from the means of their summaries. Before and after, all threads wait.
template <int COLUMNS>
__device__ void bound_distances(const Items &items, const Room &room, const Slots &to) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, d = room.d, before = items.held.R;
    for (int at = warp; at < room.starts[to.R]; at += blockDim.x / 32) {
        const int item = room.order[at], c = room.labels[item];
        const bool summary = item < before;
        const double own = summary && items.held.weights[item] > 0 ? 1.0 / items.held.weights[item] : 1.0;
        const double other = to.weights[c] > 0 ? 1.0 / to.weights[c] : 1.0;
        double square = 0;
#pragma unroll
        for (int u = 0; u < COLUMNS; ++u) {
            const int k = lane + 32 * u;
            if (k >= d) continue;
            const double x = summary ? items.held.sums[(long long)item * d + k] * own
                                     : (double)items.row(item, false, d)[k];
            const double apart = x - to.sums[(long long)c * d + k] * other;
            square = fma(apart, apart, square);
        }
        double far = sqrt(sum_of_warp(square));
        if (summary) far += items.held.radius[item];
        if (lane == 0) room.far[at] = far * (1 + (d + 8) * 2.220446049250313e-16);
    }
    __syncthreads();
    for (int c = warp; c < to.R; c += blockDim.x / 32) {
        double most = 0;
        for (int at = room.starts[c] + lane; at < room.starts[c + 1]; at += 32)
            if (!(room.far[at] <= most)) most = room.far[at];
        for (int half = 16; half; half /= 2) {
            const double other = __shfl_xor_sync(ALL, most, half);
            if (!(other <= most)) most = other;
        }
        if (lane == 0) to.radius[c] = most;
    }
    __syncthreads();
}

template <typename Number>
__device__ inline void copy_all(Number *to, const Number *from, long long count) {
    for (long long i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

}  // namespace

// Write what is kept and the summaries after each of some renewals of b sequences, and whether its numbers are finite, to
// `finite` (turns, b). See `RenewalArguments` of pruned/__init__.py: `kept` to `held_radius` are the slots before the
// first renewal, s kept keys and `before` summaries; `new_kept` to `new_radius` those after each, `size` and R. `root`
// (turns b, d, d), `query` and `origin` (turns b, d): the measures. A renewal of each sequence has the item
// turn · b + sequence. Its results are the item b later if it is `in_turn`, where item `sequence` gets the slots before;
// all have as many slots then.
//
// `resident`: how many rows lie in shared memory, a multiple of 8. `outside`: room for others, where d is rounded up to packs.
template <int COLUMNS>
__global__ void __launch_bounds__(COLUMNS > 4 ? THREADS / 2 : THREADS, 1)
    renew_slots(const float *K, long long key_item, long long key_step, const float *V, long long value_item,
                long long value_step, const float *root, const float *query, const float *origin, int b, int turns,
                int leaving, int d, int D, long long oldest, int sinks, bool residual, bool in_turn, double same,
                double most_tilt, int resident, float *outside, float *kept, float *kept_values, long long *kept_places,
                double *held, double *held_values, double *held_weights, double *held_offsets, double *held_counts,
                double *held_radius, int s, int before, float *new_kept, float *new_values, long long *new_places,
                double *new_sums, double *new_value_sums, double *new_weights, double *new_offsets, double *new_counts,
                double *new_radius, int size, int R, bool *finite) {
    DYNAMIC_SHARED(memory);
    const int sequence = blockIdx.x, n = before + s + leaving, warp = threadIdx.x / 32;
    const Room room(memory, outside, sequence, resident, n, R, d);
    const Slots given{kept,         kept_values,  kept_places, held, held_values, held_weights,
                      held_offsets, held_counts, held_radius, s,    before};
    const Slots made{new_kept,    new_values, new_places, new_sums, new_value_sums, new_weights,
                     new_offsets, new_counts, new_radius, size,     R};
    if (in_turn) {
        const Slots first = made.of(sequence, d, D), slots = given.of(sequence, d, D);
        copy_all(first.keys, slots.keys, (long long)s * d);
        copy_all(first.values, slots.values, (long long)s * D);
        copy_all(first.places, slots.places, s);
        copy_all(first.sums, slots.sums, (long long)R * d);
        copy_all(first.value_sums, slots.value_sums, (long long)R * D);
        copy_all(first.weights, slots.weights, R);
        copy_all(first.offsets, slots.offsets, R);
        copy_all(first.counts, slots.counts, R);
        if (new_radius) copy_all(first.radius, slots.radius, R);
        __syncthreads();
    }
    for (int turn = 0; turn < turns; ++turn) {
        const long long item = (long long)turn * b + sequence, fresh = oldest + (long long)turn * leaving;
        const Items items{in_turn ? made.of(item, d, D) : given.of(item, d, D),
                          K + sequence * key_item + turn * leaving * key_step,
                          V + sequence * value_item + turn * leaving * value_step, key_step, value_step};
        const Slots to = made.of(item + (in_turn ? b : 0), d, D);
        for (int i = threadIdx.x; i < n; i += blockDim.x) room.labels[i] = items.count(i) > 0 ? 0 : -1;
        const bool sound = place_items<COLUMNS>(items, room, n, root + item * d * d, query + item * d, origin + item * d);
        const bool whole = __syncthreads_and(sound);
        if (threadIdx.x == 0) finite[item] = whole;
        if (residual && R) {
            find_clusters<COLUMNS>(items, room, n, R);
        } else if (residual) {
            for (int i = threadIdx.x; i < n; i += blockDim.x) room.least[i] = room.squares[i];
            __syncthreads();
        }
        choose(items, room, n, size, fresh, sinks, residual, (float)same);
        if (!residual && R) find_clusters<COLUMNS>(items, room, n, R);
        keep(items, room, to, fresh, D);
        __syncthreads();
        if (R) {
            list_members(room, n, R);
            for (int task = warp; task < 2 * R; task += blockDim.x / 32)
                sum_up<COLUMNS>(items, room, to, task / 2, task % 2, task % 2 ? D : d, most_tilt);
            __syncthreads();
            if (new_radius) bound_distances<COLUMNS>(items, room, to);
        }
    }
}
