// Token statistics attention, forward: what each run of tokens sums up, what each run begins with, the memberships,
// and the output.

#include "shared.cuh"
#include "tokens.cuh"

namespace {

constexpr int LINES = 16;  // threads of a column of a scan, each with
constexpr int EACH = 4;    // runs at a time

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }

// Σ w² and the number of the tokens of a run, each times `weight(head, t)`: to `sums` (pitch,).
template <int V, typename Real, typename Weight>
__device__ inline void sum_run(const Run &run, const Real *W, long long w_item, long long w_head, long long w_row,
                               const double *rates, int h, int d, Weight weight, Real *sums) {
    const int each = d / V;
    const bool whole = is_whole<V>(W, sizeof(Real));
    for (int unit = threadIdx.x; unit < h * each; unit += blockDim.x) {
        const int head = unit / each;
        const Real *const from = channels(W, w_item, w_head, w_row, run, head, unit % each * V);
        const Real rate = rate_of<Real>(rates, head);
        Real sum[V];
        fill<V>((Real)0, sum);
#pragma unroll 1
        for (int low = 0; low < run.tokens; low += DEEP) {
            Real w[DEEP][V];
            bring(from + low * w_row, w_row, run.present >> low, whole, w);
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

}  // namespace

// Σ w² and the number of tokens of each run, to `sums` (b, runs, pitch). The grid is (runs · b).
template <typename Real, int V>
__global__ void __launch_bounds__(MOST, 3) sum_tokens(TOKEN_PARAMETERS, Real *sums) {
    const Run run = THIS_RUN(false);
    sum_run<V>(run, W, w_item, w_head, w_row, rates, h, d, [](int, int) { return (Real)1; },
               sums + run.ends(firsts, n, pitch));
}

// Sums of runs (b, runs, pitch) into sums of the runs before them, or if `backwards` behind them, after those that a
// sequence begins with. A run multiplies what comes to it by `kept` (·, runs, h). Beside these, or instead if not
// `everywhere`, the sums of all of each sequence: to `totals` (b, n, pitch), and in double precision to `whole`
// (b, h, n, d) and `whole_weights` (b, h, n). The grid is (n · b, columns / 32).
template <typename Real>
__global__ void __launch_bounds__(32 * LINES)
    scan_tokens(const long long *firsts, int n, const double *kept, long long kept_item, const double *first,
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
            if (kept) factor[i] = kept[item * kept_item + run * h + head];
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
// `sums` (b, runs, pitch), Σ Π w² and Σ Π of each run. `starts` are Σ w² and counts of tokens. The grid is (runs · b).
template <typename Real, int V>
__global__ void __launch_bounds__(MOST, RESIDENT<Real> + 1)
    weigh_tokens(TOKEN_PARAMETERS, const Real *starts, const Real *temperature, long long temperature_item,
                 long long temperature_head, const Real *offset, long long offset_item, long long offset_head,
                 long long offset_row, int logits, bool mean, double least, long long T, Real *memberships,
                 Real *levels, Real *sums) {
    DYNAMIC_SHARED(shared);
    __shared__ Real joined[2][MOST / 32][RUN];
    Real *const scores = (Real *)shared, *const parts = scores + h * LINE;
    const Run run = THIS_RUN(true);
    const int each = d / V, units = h * each;
    const bool whole = is_whole<V>(W, sizeof(Real));
    const Real *const row = starts ? starts + run.begins(causal, firsts, n, pitch) : nullptr;

    for (int base = 0; logits != NONE && base < units; base += blockDim.x) {
        const int unit = base + threadIdx.x;
        if (unit < units) {
            const int head = unit / each;
            const Real *const from = channels(W, w_item, w_head, w_row, run, head, unit % each * V);
            const Real rate = rate_of<Real>(rates, head);
            Real A[V];
            begin<V>(logits == DIAGONAL ? row : nullptr, unit * V, A);
#pragma unroll 1
            for (int low = 0; low < run.tokens; low += DEEP) {
                Real w[DEEP][V];
                bring(from + low * w_row, w_row, run.present >> low, whole, w);
#pragma unroll
                for (int t = 0; t < DEEP; ++t) {
                    const Real kept = run.has(low + t) ? rate : (Real)1;
                    Real sum = 0;
#pragma unroll
                    for (int v = 0; v < V; ++v) {
                        const Real x = w[t][v] * w[t][v];
                        if (logits == NORM) {
                            sum += x;
                            continue;
                        }
                        if (causal) A[v] = fma(kept, A[v], x);
                        sum += x / ((Real)least > A[v] ? (Real)least : A[v]);
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
        Real level = logits == NONE ? 0 : scores[head * LINE + t];
        if (mean && logits == DIAGONAL)
            level *= count_of(run, t, rate_of<Real>(rates, head), row ? row[h * d + head] : 0, causal);
        if (offset && t < run.tokens)
            level += offset[run.item * offset_item + head * offset_head + (run.first + t) * offset_row];
        const Real logit = temperature[run.item * temperature_item + head * temperature_head] * level;
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
        if (t < run.tokens) memberships[at + head * T] = P;
    }
    if (!sums) return;

    __syncthreads();
    sum_run<V>(run, W, w_item, w_head, w_row, rates, h, d, [&](int head, int t) { return scores[head * LINE + t]; },
               sums + run.ends(firsts, n, pitch));
}

// The output, to Y of any strides. `starts` are Σ Π w² and Σ Π. The grid is (runs · b).
template <typename Real, int V>
__global__ void __launch_bounds__(MOST, 2)
    write_tokens(TOKEN_PARAMETERS, const Real *starts, const Real *memberships, double gain, double c, double ridge,
                 long long T, Real *Y, long long y_item, long long y_head, long long y_row) {
    const Run run = THIS_RUN(false);
    const int each = d / V, units = h * each;
    const bool whole = is_whole<V>(W, sizeof(Real));
    const Real *const row = starts ? starts + run.begins(causal, firsts, n, pitch) : nullptr;
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
        const int head = unit / each, channel = unit % each * V;
        const Real *const from = channels(W, w_item, w_head, w_row, run, head, channel);
        const Real *const weights = memberships + (run.item * h + head) * T + run.first;
        Real *const to = channels(Y, y_item, y_head, y_row, run, head, channel);
        const Real rate = rate_of<Real>(rates, head);
        Real M[V], N = row ? row[h * d + head] : 0;
        begin<V>(row, unit * V, M);
#pragma unroll 1
        for (int low = 0; low < run.tokens; low += DEEP) {
            Real w[DEEP][V], P[DEEP], *next = to + low * y_row;
            bring(from + low * w_row, w_row, run.present >> low, whole, w);
            bring(weights + low, run.present >> low, P);
#pragma unroll
            for (int t = 0; t < DEEP; ++t, next += y_row) {
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
