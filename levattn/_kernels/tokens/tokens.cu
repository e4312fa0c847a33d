// Token statistics attention, forward: what each run of tokens sums up, what each run begins with, the memberships,
// and the output; and all of it at once for sequences of one run.

#include "shared.cuh"
#include "tokens.cuh"

namespace {

constexpr int LINES = 16;  // threads of a column of a scan, each with
constexpr int EACH = 4;    // runs at a time

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }

// The factor by which so many tokens multiply the sums of a head before them.
__device__ inline double kept_by(const double *rates, int head, int tokens) {
    double kept = 1, power = rates ? rates[head] : 1;
    for (; tokens; tokens /= 2, power *= power)
        if (tokens % 2) kept *= power;
    return kept;
}

// Σ w² and the number of the tokens of a run, each times `weight(head, t)`: to `sums` (pitch,).
template <typename Key, int V, typename Real, typename Weight>
__device__ inline void sum_run(const Run &run, const Tokens<Key, V> &tokens, const double *rates, int h, int d,
                               Weight weight, Real *sums) {
    for (int unit = threadIdx.x; unit < tokens.units; unit += blockDim.x) {
        const int head = unit / tokens.each;
        const Unit<Key, V> from = tokens.unit(unit);
        const Real rate = rate_of<Real>(rates, head);
        Real sum[V];
        fill<V>((Real)0, sum);
#pragma unroll 1
        for (int low = 0; low < run.tokens; low += DEEP) {
            Real w[DEEP][V];
            from.bring(low, run.present, w);
#pragma unroll
            for (int t = 0; t < DEEP; ++t) {
                const Real kept = run.has(low + t) ? rate : (Real)1, share = weight(head, low + t);
#pragma unroll
                for (int v = 0; v < V; ++v) sum[v] = fma(kept, sum[v], share * (w[t][v] * w[t][v]));
            }
        }
        store<V>(sums + unit * V, true, sum);
    }
    for (int head = threadIdx.x; head < h; head += blockDim.x) {
        const Real rate = rate_of<Real>(rates, head);
        Real sum = 0;
#pragma unroll
        for (int t = 0; t < RUN; ++t)
            if (run.has(t)) sum = fma(rate, sum, weight(head, t));
        sums[h * d + head] = sum;
    }
}

// What the logits of a call are made of: `temperature` (·, h), `offset` (·, h, T) or null.
template <typename Real>
struct Weighing {
    const Real *temperature;
    long long temperature_item, temperature_head;
    const Real *offset;
    long long offset_item, offset_head, offset_row;
    int logits;
    bool mean;
    double least;
};

#define LOGIT_PARAMETERS                                                                                            \
    const Real *temperature, long long temperature_item, long long temperature_head, const Real *offset,            \
        long long offset_item, long long offset_head, long long offset_row, int logits, bool mean, double least

#define THESE_LOGITS                                                                                                \
    {                                                                                                               \
        temperature, temperature_item, temperature_head, offset, offset_item, offset_head, offset_row, logits,      \
            mean, least                                                                                             \
    }

// The memberships of a run's tokens, to `scores` (h, LINE), and if there are such arrays (b, h, T), to `memberships`
// and, what the temperature multiplies, to `levels`. `row` has Σ w² and the number of tokens before, or of all.
template <typename Key, int V, typename Real>
__device__ inline void weigh_run(const Run &run, const Tokens<Key, V> &tokens, const double *rates, int h, int d,
                                 bool causal, const Real *row, const Weighing<Real> &by, long long T, Real *scores,
                                 Real *parts, Real (*joined)[MOST / 32][RUN], Real *memberships, Real *levels) {
    const int units = tokens.units, each = tokens.each;
    for (int base = 0; by.logits != NONE && base < units; base += blockDim.x) {
        const int unit = base + threadIdx.x;
        if (unit < units) {
            const Unit<Key, V> from = tokens.unit(unit);
            const Real rate = rate_of<Real>(rates, unit / each);
            Real A[V];
            begin<V>(by.logits == DIAGONAL ? row : nullptr, unit * V, A);
#pragma unroll 1
            for (int low = 0; low < run.tokens; low += DEEP) {
                Real w[DEEP][V];
                from.bring(low, run.present, w);
#pragma unroll
                for (int t = 0; t < DEEP; ++t) {
                    const Real kept = run.has(low + t) ? rate : (Real)1;
                    Real sum = 0;
#pragma unroll
                    for (int v = 0; v < V; ++v) {
                        const Real x = w[t][v] * w[t][v];
                        if (by.logits == NORM) {
                            sum += x;
                            continue;
                        }
                        if (causal) A[v] = fma(kept, A[v], x);
                        sum += x / ((Real)by.least > A[v] ? (Real)by.least : A[v]);
                    }
                    parts[(low + t) * (blockDim.x + 1) + threadIdx.x] = sum;
                }
            }
        }
        __syncthreads();
        gather_units<RUN>(parts, base, units, each, [&](int head, int t, Real sum, bool fresh) {
            scores[head * LINE + t] = fresh ? sum : scores[head * LINE + t] + sum;
        });
        __syncthreads();
    }

    const int t = threadIdx.x % RUN, line = threadIdx.x / RUN, lines = blockDim.x / RUN;
    const long long at = run.item * h * T + run.first + t;
    Real most = (Real)__int_as_float(0xff800000);  // −∞
    for (int head = line; head < h; head += lines) {
        Real level = by.logits == NONE ? 0 : scores[head * LINE + t];
        if (by.mean && by.logits == DIAGONAL)
            level *= count_of(run, t, rate_of<Real>(rates, head), row ? row[h * d + head] : 0, causal);
        if (by.offset && t < run.tokens)
            level += by.offset[run.item * by.offset_item + head * by.offset_head + (run.first + t) * by.offset_row];
        const Real logit = by.temperature[run.item * by.temperature_item + head * by.temperature_head] * level;
        scores[head * LINE + t] = logit;
        most = max(most, logit);
        if (levels && t < run.tokens) levels[at + head * T] = run.has(t) ? level : 0;
    }
    most = join_threads(most, joined[0], [](Real a, Real b) { return max(a, b); });
    Real total = 0;
    for (int head = line; head < h; head += lines)
        total += scores[head * LINE + t] = exponential(scores[head * LINE + t] - most);
    total = join_threads(total, joined[1], [](Real a, Real b) { return a + b; });
    for (int head = line; head < h; head += lines) {
        const Real P = run.has(t) ? scores[head * LINE + t] / total : 0;
        scores[head * LINE + t] = P;
        if (memberships && t < run.tokens) memberships[at + head * T] = P;
    }
}

// The outputs of a run's tokens. `weights` has the memberships of tokens, `apart` from head to head, and `row` Σ Π w²
// and Σ Π before, or of all.
template <typename Key, int V, typename Real>
__device__ inline void write_run(const Run &run, const Tokens<Key, V> &tokens, const double *rates, int h, int d,
                                 bool causal, const Real *row, const Real *weights, long long apart, double gain,
                                 double c, double ridge, const Channels<Key, V> &out) {
    for (int unit = threadIdx.x; unit < tokens.units; unit += blockDim.x) {
        const int head = unit / tokens.each;
        const Unit<Key, V> from = tokens.unit(unit);
        Key *next = out.of(unit);
        const Real rate = rate_of<Real>(rates, head);
        Real M[V], N = row ? row[h * d + head] : 0;
        begin<V>(row, unit * V, M);
#pragma unroll 1
        for (int low = 0; low < run.tokens; low += DEEP) {
            Real w[DEEP][V], P[DEEP];
            from.bring(low, run.present, w);
            bring(weights + head * apart + low, run.present >> low, P);
#pragma unroll
            for (int t = 0; t < DEEP; ++t, next += out.of_row) {
                if (causal && run.has(low + t)) add_token<V>(rate, P[t], w[t], M, N);
                const Real weight = N + (Real)ridge, factor = -(Real)gain * P[t];
                Real y[V];
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const Real share = weight == 0 ? (Real)1 : weight / fma((Real)c, M[v], weight);
                    y[v] = run.has(low + t) ? factor * w[t][v] * share : (Real)0;
                }
                if (low + t < run.tokens) store<V>(next, true, y);
            }
        }
    }
}

// Write the sums with which one sequence begins, `before` (b, h, n, d) and `weights_before` (b, h, n) or zeros, to `row`
// (pitch,); if `ends`, the sums after it, with `sums` (pitch,) added. The sums after it also go to `after` and
// `weights_after`, if there are such arrays.
template <typename Real>
__device__ inline void begin_sequence(const Run &run, const double *rates, int h, int d, int n, const Real *sums,
                                      bool ends, const double *before, const double *weights_before, double *after,
                                      double *weights_after, Real *row) {
    const int tokens = __popc(run.present);
    for (int column = threadIdx.x; column < h * d + h; column += blockDim.x) {
        const bool weight = column >= h * d;
        const int head = weight ? column - h * d : column / d;
        const long long place = (run.item * h + head) * n + run.sequence, deep = place * d + column % d;
        double state = 0;
        if (before) state = weight ? weights_before[place] : before[deep];
        const double end = sums ? fma(kept_by(rates, head, tokens), state, (double)sums[column]) : state;
        row[column] = (Real)(ends ? end : state);
        if (after && weight) weights_after[place] = end;
        else if (after) after[deep] = end;
    }
}

}  // namespace

// Σ w² and the number of tokens of each run, to `sums` (b, runs, pitch), and how many take part in each, to `counts`
// (b, runs) if there is such an array. The grid is (runs · b).
template <typename Key, typename Real, int V>
__global__ void __launch_bounds__(MOST, 3) sum_tokens(TOKEN_PARAMETERS, int *counts, Real *sums) {
    const Run run = THIS_RUN(false);
    const Tokens<Key, V> tokens(W, w_item, w_head, w_row, run, h, d);
    if (counts && threadIdx.x == 0) counts[run.item * firsts[n] + run.number] = __popc(run.present);
    sum_run(run, tokens, rates, h, d, [](int, int) { return (Real)1; }, sums + run.ends(firsts, n, pitch));
}

// Sums of runs (b, runs, pitch) into sums of the runs before them, or if `backwards` behind them, after those that a
// sequence begins with. What comes to a run is multiplied by the rate of its head once for each of its `counts`
// (b, runs) tokens. Beside these, or instead if not `everywhere`, the sums of all of each sequence: to `totals`
// (b, n, pitch), and in double precision to `whole` (b, h, n, d) and `whole_weights` (b, h, n). The grid is
// (n · b, columns / 32).
template <typename Real>
__global__ void __launch_bounds__(32 * LINES)
    scan_tokens(const long long *firsts, int n, const double *rates, const int *counts, const double *first,
                const double *first_weights, int h, int d, int pitch, bool everywhere, bool backwards, Real *sums,
                Real *totals, double *whole, double *whole_weights) {
    __shared__ double factors[LINES][32], terms[LINES][32];
    __shared__ double carried[32];
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32, column = blockIdx.y * 32 + lane;
    const long long sequence = blockIdx.x % n, item = blockIdx.x / n, low = firsts[sequence];
    const long long count = firsts[sequence + 1] - low, runs = firsts[n];
    const bool there = column < h * d + h, weight = column >= h * d;
    const int head = weight ? column - h * d : column / d;
    const long long place = (item * h + head) * n + sequence, deep = place * d + column % d;
    if (line == 0) {
        carried[lane] = 0;
        if (there && first) carried[lane] = weight ? first_weights[place] : first[deep];
    }
    __syncthreads();
    for (long long base = 0; base < count; base += LINES * EACH) {
        double factor[EACH], term[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const long long at = base + line * EACH + i, run = low + (backwards ? count - 1 - at : at);
            factor[i] = 1, term[i] = 0;
            if (at >= count || !there) continue;
            term[i] = sums[(item * runs + run) * pitch + column];
            if (rates) factor[i] = kept_by(rates, head, counts[item * runs + run]);
        }
        double product = factor[0], sum = term[0];
#pragma unroll
        for (int i = 1; i < EACH; ++i) product *= factor[i], sum = fma(factor[i], sum, term[i]);
        factors[line][lane] = product, terms[line][lane] = sum;
        __syncthreads();
        double state = carried[lane];
        for (int before = 0; before < line; ++before)
            state = fma(factors[before][lane], state, terms[before][lane]);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const long long at = base + line * EACH + i, run = low + (backwards ? count - 1 - at : at);
            if (everywhere && at < count && there) sums[(item * runs + run) * pitch + column] = (Real)state;
            state = fma(factor[i], state, term[i]);
        }
        __syncthreads();
        if (line == LINES - 1) carried[lane] = state;
        __syncthreads();
    }
    if (line || !there) return;
    if (totals) totals[(item * n + sequence) * pitch + column] = (Real)carried[lane];
    if (whole && weight) whole_weights[place] = carried[lane];
    else if (whole) whole[deep] = carried[lane];
}

// The memberships (b, h, T), for gradients `levels` (b, h, T), which the temperature multiplies, and if there are
// `sums` (b, runs, pitch), Σ Π w² and Σ Π of each run; `counts` as in `sum_tokens`. `starts` are Σ w² and counts of
// tokens. Tokens stay in `room` bytes of shared memory, if there are any, until they are summed up. The grid is
// (runs · b).
template <typename Key, typename Real, int V>
__global__ void __launch_bounds__(MOST, RESIDENT<Real> + 1)
    weigh_tokens(TOKEN_PARAMETERS, int room, const Real *starts, LOGIT_PARAMETERS, long long T, int *counts,
                 Real *memberships, Real *levels, Real *sums) {
    DYNAMIC_SHARED(shared);
    __shared__ Real joined[2][MOST / 32][RUN];
    Real *const scores = (Real *)(shared + room), *const parts = scores + h * LINE;
    const Run run = THIS_RUN(true);
    Tokens<Key, V> tokens(W, w_item, w_head, w_row, run, h, d);
    tokens.hold(run, room ? shared : nullptr);
    if (counts && threadIdx.x == 0) counts[run.item * firsts[n] + run.number] = __popc(run.present);
    const Real *const row = starts ? starts + run.begins(causal, firsts, n, pitch) : nullptr;
    const Weighing<Real> by = THESE_LOGITS;
    weigh_run(run, tokens, rates, h, d, causal, row, by, T, scores, parts, joined, memberships, levels);
    if (!sums) return;
    __syncthreads();
    sum_run(run, tokens, rates, h, d, [&](int head, int t) { return scores[head * LINE + t]; },
            sums + run.ends(firsts, n, pitch));
}

// The output, to Y of any strides. `starts` are Σ Π w² and Σ Π. The grid is (runs · b).
template <typename Key, typename Real, int V>
__global__ void __launch_bounds__(MOST, 2)
    write_tokens(TOKEN_PARAMETERS, const Real *starts, const Real *memberships, double gain, double c, double ridge,
                 long long T, Key *Y, long long y_item, long long y_head, long long y_row) {
    const Run run = THIS_RUN(false);
    const Tokens<Key, V> tokens(W, w_item, w_head, w_row, run, h, d);
    const Channels<Key, V> out(Y, y_item, y_head, y_row, run, h, d);
    const Real *const row = starts ? starts + run.begins(causal, firsts, n, pitch) : nullptr;
    const Real *const weights = memberships + run.item * h * T + run.first;
    write_run(run, tokens, rates, h, d, causal, row, weights, T, gain, c, ridge, out);
}

// All of it for sequences of at most RUN tokens, which a block sees whole, and with the same bits: the output, and if
// there are such arrays, the sums A, n, M, N after the tokens. Without `adds` the sums before are of all that is seen.
// The grid is (n · b).
template <typename Key, typename Real, int V>
__global__ void __launch_bounds__(MOST, RESIDENT<Real>)
    attend_tokens(TOKEN_PARAMETERS, int room, const double *A, const double *n_tokens, const double *M, const double *N,
                  bool adds, LOGIT_PARAMETERS, double gain, double c, double ridge, long long T, Key *Y,
                  long long y_item, long long y_head, long long y_row, double *A_after, double *n_after,
                  double *M_after, double *N_after) {
    DYNAMIC_SHARED(shared);
    __shared__ Real joined[2][MOST / 32][RUN];
    Real *const row = (Real *)(shared + room), *const sums = row + pitch, *const scores = sums + pitch;
    Real *const parts = scores + h * LINE;
    const Run run(offsets, n, T, mask, mask_item, mask_row);
    Tokens<Key, V> tokens(W, w_item, w_head, w_row, run, h, d);
    tokens.hold(run, room ? shared : nullptr);
    const Weighing<Real> by = THESE_LOGITS;
    const bool summed = adds && (!causal || A_after), ends = !causal && adds;

    if (logits == DIAGONAL || A_after) {
        if (summed) sum_run(run, tokens, rates, h, d, [](int, int) { return (Real)1; }, sums);
        __syncthreads();
        begin_sequence(run, rates, h, d, n, summed ? sums : nullptr, ends, A, n_tokens, A_after, n_after, row);
        __syncthreads();
    }
    Real *const nowhere = nullptr;
    weigh_run(run, tokens, rates, h, d, causal, row, by, T, scores, parts, joined, nowhere, nowhere);
    __syncthreads();
    if (summed) sum_run(run, tokens, rates, h, d, [&](int head, int t) { return scores[head * LINE + t]; }, sums);
    __syncthreads();
    begin_sequence(run, rates, h, d, n, summed ? sums : nullptr, ends, M, N, M_after, N_after, row);
    __syncthreads();
    const Channels<Key, V> out(Y, y_item, y_head, y_row, run, h, d);
    write_run(run, tokens, rates, h, d, causal, row, scores, LINE, gain, c, ridge, out);
}
