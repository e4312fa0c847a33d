// Token statistics attention, gradients: in the sums that the tokens of each run read, and then in tokens, offsets and
// temperatures.
//
// With r = 1 / (N + ridge + c M) and q = (N + ridge) r, the output of a token is −gain Π q w. Its gradient in the M that
// it has read is Γ = gain c Π w q r dY, and in N it is −⟨Γ, m⟩, where c m q = 1 − q. P and p are the sums of Γ and of
// ⟨Γ, m⟩ over the tokens that see a token. B is the sum of e x / A² over them, from the sums A of x = w².

#include "shared.cuh"
#include "tokens.cuh"
#include "warps.cuh"

namespace {

constexpr int PART = 4;  // tokens that a thread holds while it goes backwards
constexpr int PARTS = RUN / PART;
constexpr int SUMMING = 128;  // threads of a block that sums gradients of temperatures

// The smallest divisor that does not count as zero.
__device__ inline float smallest(float) { return 0x1p-125f; }
__device__ inline double smallest(double) { return 0x1p-1021; }

// The shares r and q of a channel; sums that count as zero are as if no token were seen.
template <typename Real>
__device__ inline Real share_of(Real weight, Real c, Real M) {
    const Real total = fma(c, M, weight);
    return total < smallest(total) ? 0 : 1 / total;
}

template <typename Real>
__device__ inline Real kept_of(Real weight, Real share) {
    return share == 0 && weight < smallest(weight) ? 1 : weight * share;
}

// Whether products of gradients in single precision may leave its range, for second moments of about this size.
__device__ inline bool is_far(double, double, double) { return false; }
__device__ inline bool is_far(float m, double c, double gain) {
    const double size = m, product = gain * gain * size * size * size;
    return size != 0 && !(size >= 1e-24 && size <= 1e16 && c * size <= 1e12 && product >= 1e-60);
}

template <int V, typename Real>
__device__ inline void copy(const Real (&from)[V], Real (&to)[V]) {
#pragma unroll
    for (int v = 0; v < V; ++v) to[v] = from[v];
}

}  // namespace

// Σ Γ and Σ ⟨Γ, m⟩ of each run as they come to the run before it, to `flows` (b, runs, pitch). `starts` are Σ Π w² and
// Σ Π. The grid is (runs · b).
template <typename Key, typename Real, int V>
__global__ void __launch_bounds__(MOST, RESIDENT<Real>)
    trace_tokens(TOKEN_PARAMETERS, const Real *starts, const Real *memberships, const Key *dY, long long dy_item,
                 long long dy_head, long long dy_row, double gain, double c, double ridge, long long T, Real *flows) {
    DYNAMIC_SHARED(shared);
    Real *const parts = (Real *)shared;
    const Run run = THIS_RUN(false);
    const Tokens<Key, V> tokens(W, w_item, w_head, w_row, run, h, d), given(dY, dy_item, dy_head, dy_row, run, h, d);
    const int each = tokens.each, units = tokens.units;
    const Real *const row = starts ? starts + run.begins(causal, firsts, n, pitch) : nullptr;
    flows += run.ends(firsts, n, pitch);
    for (int base = 0; base < units; base += blockDim.x) {
        const int unit = base + threadIdx.x;
        if (unit < units) {
            const int head = unit / each;
            const Unit<Key, V> from = tokens.unit(unit), down = given.unit(unit);
            const Real *const weights = memberships + (run.item * h + head) * T + run.first;
            const Real rate = rate_of<Real>(rates, head);
            Real M[V], flow[V], N = row ? row[h * d + head] : 0, counted = 0, kept = 1;
            begin<V>(row, unit * V, M);
            fill<V>((Real)0, flow);
#pragma unroll 1
            for (int low = 0; low < run.tokens; low += DEEP) {
                Real w[DEEP][V], dy[DEEP][V], P[DEEP];
                from.bring(low, run.present, w);
                down.bring(low, run.present, dy);
                bring(weights + low, run.present >> low, P);
#pragma unroll
                for (int t = 0; t < DEEP; ++t) {
                    if (!run.has(low + t)) continue;
                    if (causal) {
                        add_token<V>(rate, P[t], w[t], M, N);
                        kept *= rate;
                    }
                    const Real weight = N + (Real)ridge, factor = kept * (Real)gain * P[t];
#pragma unroll
                    for (int v = 0; v < V; ++v) {
                        const Real r = share_of(weight, (Real)c, M[v]), q = kept_of(weight, r);
                        const Real z = factor * (w[t][v] * dy[t][v]) * r;
                        flow[v] = fma((Real)c * q, z, flow[v]);
                        counted = fma(1 - q, z, counted);
                    }
                }
            }
            store<V>(flows + unit * V, true, flow);
            parts[threadIdx.x] = counted;
        }
        __syncthreads();
        gather_units<1>(parts, base, units, each, [&](int head, int, Real sum, bool fresh) {
            flows[h * d + head] = fresh ? sum : flows[h * d + head] + sum;
        });
        __syncthreads();
    }
}

// The gradients of offsets (b, h, T), if there are any, and what each run adds to those of temperatures (b, runs, h).
// Those of tokens, to dW of any strides: all of them for the logits NONE and NORM; else without what comes through the
// logits, for which there are e (b, h, T), and the sums of e x / A² of each run as they come to the run before it, to
// `flows` (b, runs, pitch). `squares` are what runs begin with of Σ w², `starts` of Σ Π w², and `coming` what P and p
// end with. Tokens stay in `room` bytes of shared memory, if there are any. The grid is (runs · b).
template <typename Key, typename Real, int V>
__global__ void __launch_bounds__(MOST, RESIDENT<Real>)
    spread_tokens(TOKEN_PARAMETERS, int room, const Real *squares, const Real *starts, const Real *coming,
                  const Real *memberships, const Real *levels, const Key *dY, long long dy_item, long long dy_head,
                  long long dy_row, const Real *temperature, long long temperature_item, long long temperature_head,
                  int logits, bool mean, double least, double gain, double c, double ridge, long long T, Real *dW,
                  long long dw_item, long long dw_head, long long dw_row, Real *offsets_to, double *temperatures_to,
                  Real *e, Real *flows) {
    DYNAMIC_SHARED(shared);
    __shared__ Real joined[3][MOST / 32][RUN];
    Real *const scores = (Real *)(shared + room), *const parts = scores + h * LINE;
    const Run run = THIS_RUN(true);
    Tokens<Key, V> tokens(W, w_item, w_head, w_row, run, h, d);
    const Tokens<Key, V> given(dY, dy_item, dy_head, dy_row, run, h, d);
    const Channels<Real, V> out(dW, dw_item, dw_head, dw_row, run, h, d);
    const int each = tokens.each, units = tokens.units;
    tokens.hold(run, room ? shared : nullptr);
    const long long place = run.begins(causal, firsts, n, pitch);
    const Real *const row = starts ? starts + place : nullptr, *const ahead = coming ? coming + place : nullptr;
    const Real *const before = squares ? squares + place : nullptr;

    for (int base = 0; base < units; base += blockDim.x) {
        const int unit = base + threadIdx.x;
        Real moments = 0;  // of a unit after the run
        if (unit < units) {
            const int head = unit / each;
            const Unit<Key, V> from = tokens.unit(unit), down = given.unit(unit);
            Real *const to = out.of(unit);
            const Real *const weights = memberships + (run.item * h + head) * T + run.first;
            const Real rate = rate_of<Real>(rates, head);
            Real M[PARTS][V], N[PARTS];  // before each part of the run
            begin<V>(row, unit * V, M[0]);
            N[0] = row ? row[h * d + head] : 0;
#pragma unroll 1
            for (int part = 0; part + 1 < PARTS; ++part) {
                const unsigned int present = causal ? run.present >> part * PART : 0;
                Real w[PART][V], P[PART];
                from.bring(part * PART, causal ? run.present : 0, w);
                bring(weights + part * PART, present, P);
                copy<V>(M[part], M[part + 1]);
                N[part + 1] = N[part];
#pragma unroll
                for (int t = 0; t < PART; ++t)
                    if (present >> t & 1) add_token<V>(rate, P[t], w[t], M[part + 1], N[part + 1]);
            }
            Real flow[V], counted = ahead && unit % each == 0 ? ahead[h * d + head] : 0;  // once for each head
            begin<V>(ahead, unit * V, flow);
#pragma unroll 1
            for (int part = PARTS - 1; part >= 0; --part) {
                const unsigned int present = run.present >> part * PART;
                Real w[PART][V], dy[PART][V], P[PART], r[PART][V], weight[PART];
                from.bring(part * PART, run.present, w);
                down.bring(part * PART, run.present, dy);
                bring(weights + part * PART, present, P);
#pragma unroll
                for (int t = 0; t < PART; ++t) {
                    if (causal && present >> t & 1) add_token<V>(rate, P[t], w[t], M[part], N[part]);
                    weight[t] = N[part] + (Real)ridge;
#pragma unroll
                    for (int v = 0; v < V; ++v) r[t][v] = share_of(weight[t], (Real)c, M[part][v]);
                }
#pragma unroll
                for (int t = PART - 1; t >= 0; --t) {
                    const bool there = present >> t & 1;
                    Real g[V], sum = 0;
                    fill<V>((Real)0, g);
                    if (there) {
#pragma unroll
                        for (int v = 0; v < V; ++v) {
                            const Real q = kept_of(weight[t], r[t][v]), scaled = (Real)gain * dy[t][v];
                            if (causal) {
                                const Real z = P[t] * (w[t][v] * scaled) * r[t][v];
                                flow[v] = fma((Real)c * q, z, flow[v]);
                                counted = fma(1 - q, z, counted);
                            }
                            sum += w[t][v] * fma(w[t][v], flow[v], -scaled * q);
                            g[v] = P[t] * fma(2 * w[t][v], flow[v], -scaled * q);
                        }
                        sum -= counted;
                        if (causal) {
#pragma unroll
                            for (int v = 0; v < V; ++v) flow[v] *= rate;
                            counted *= rate;
                        }
                    }
                    const int place = part * PART + t;
                    parts[place * (blockDim.x + 1) + threadIdx.x] = sum;
                    if (place < run.tokens) store<V>(to + place * out.of_row, true, g);
                }
            }
#pragma unroll
            for (int v = 0; v < V; ++v) moments += N[PARTS - 1] > 0 ? M[PARTS - 1][v] / N[PARTS - 1] : 0;
        }
        __syncthreads();
        gather_units<RUN>(parts, base, units, each, [&](int head, int t, Real sum, bool fresh) {
            scores[head * LINE + t] = fresh ? sum : scores[head * LINE + t] + sum;
        });
        __syncthreads();
        parts[threadIdx.x] = moments;
        __syncthreads();
        gather_units<1>(parts, base, units, each, [&](int head, int, Real sum, bool fresh) {
            scores[head * LINE + RUN] = fresh ? sum : scores[head * LINE + RUN] + sum;
        });
        __syncthreads();
    }

    const int t = threadIdx.x % RUN, line = threadIdx.x / RUN, lines = blockDim.x / RUN;
    const long long at = run.item * h * T + run.first + t;
    // Slopes are from the head of most membership on: near 1, their mean would be its slope alone.
    const auto larger = [](Real a, Real b) { return a > b ? a : b; };
    Real top = 0, start = -(Real)__int_as_float(0x7f800000), common = 0;
    for (int head = line; head < h; head += lines)
        if (run.has(t)) top = larger(memberships[at + head * T], top);
    top = join_threads(top, joined[0], larger);
    for (int head = line; head < h; head += lines)
        if (run.has(t) && memberships[at + head * T] == top) start = larger(scores[head * LINE + t], start);
    start = join_threads(start, joined[1], larger);
    for (int head = line; head < h; head += lines)
        if (run.has(t)) common = fma(memberships[at + head * T], scores[head * LINE + t] - start, common);
    common = join_threads(common, joined[2], [](Real a, Real b) { return a + b; });
    for (int base = 0; base < h; base += lines) {
        const int head = base + line;
        const bool there = head < h && run.has(t);
        const Real gradient = there ? memberships[at + head * T] * (scores[head * LINE + t] - start - common) : 0;
        double product = there ? (double)gradient * (double)levels[at + head * T] : 0;
        for (int far = RUN / 2; far; far /= 2) product += __shfl_xor_sync(ALL, product, far);
        if (head >= h) continue;
        if (t == 0) {
            const bool far = is_far(scores[head * LINE + RUN] / d, c, gain);
            const Real unknown = far ? (Real)__int_as_float(0x7fc00000) : (Real)0;
            scores[head * LINE + RUN] = unknown;
            temperatures_to[(run.item * firsts[n] + run.number) * h + head] = product + unknown;
        }
        Real back = gradient * temperature[run.item * temperature_item + head * temperature_head];
        if (offsets_to && t < run.tokens) offsets_to[at + head * T] = back;
        if (mean && logits == DIAGONAL)
            back *= count_of(run, t, rate_of<Real>(rates, head), before ? before[h * d + head] : 0, causal);
        scores[head * LINE + t] = back;
        if (e && t < run.tokens) e[at + head * T] = back;
    }
    __syncthreads();
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
        Real g[V];
        fill<V>(scores[unit / each * LINE + RUN], g);
        if (g[0] == 0) continue;
        for (int t = 0; t < run.tokens; ++t)
            if (run.has(t)) store<V>(out.of(unit) + t * out.of_row, true, g);
    }
    if (logits == NONE || (logits == DIAGONAL && !flows)) return;

    if (flows) flows += run.ends(firsts, n, pitch);
    for (int unit = threadIdx.x; unit < units; unit += blockDim.x) {
        const int head = unit / each;
        const Unit<Key, V> from = tokens.unit(unit);
        Real *const to = out.of(unit);
        const Real rate = rate_of<Real>(rates, head);
        Real A[V], flow[V], kept = 1;
        begin<V>(before, unit * V, A);
        fill<V>((Real)0, flow);
#pragma unroll 1
        for (int low = 0; low < run.tokens; low += DEEP) {
            Real w[DEEP][V];
            from.bring(low, run.present, w);
#pragma unroll
            for (int k = 0; k < DEEP; ++k) {
                if (!run.has(low + k)) continue;
                const Real back = scores[head * LINE + low + k];
                if (logits == NORM) {
                    Real g[V];
                    load<V>(to + (low + k) * out.of_row, true, g);
#pragma unroll
                    for (int v = 0; v < V; ++v) g[v] = fma(2 * back, w[k][v], g[v]);
                    store<V>(to + (low + k) * out.of_row, true, g);
                    continue;
                }
                if (causal) kept *= rate;
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const Real x = w[k][v] * w[k][v];
                    if (causal) A[v] = fma(rate, A[v], x);
                    if (!((Real)least > A[v])) flow[v] = fma(kept * back, x / A[v] / A[v], flow[v]);
                }
            }
        }
        if (logits == DIAGONAL) store<V>(flows + unit * V, true, flow);
    }
    if (logits == DIAGONAL)
        for (int head = threadIdx.x; head < h; head += blockDim.x) flows[h * d + head] = 0;
}

// Add to dW what comes through the logits: e / A for each channel, and B, of which `coming` is what it ends with. Tokens
// stay in `room` bytes of shared memory, if there are any.
// The grid is (runs · b).
template <typename Key, typename Real, int V>
__global__ void __launch_bounds__(MOST, RESIDENT<Real>)
    finish_tokens(TOKEN_PARAMETERS, int room, const Real *squares, const Real *coming, const Real *e, double least, long long T,
                  Real *dW, long long dw_item, long long dw_head, long long dw_row) {
    DYNAMIC_SHARED(shared);
    const Run run = THIS_RUN(false);
    Tokens<Key, V> tokens(W, w_item, w_head, w_row, run, h, d);
    const Channels<Real, V> out(dW, dw_item, dw_head, dw_row, run, h, d);
    tokens.hold(run, room ? shared : nullptr);
    const long long place = run.begins(causal, firsts, n, pitch);
    const Real *const before = squares ? squares + place : nullptr, *const ahead = coming ? coming + place : nullptr;
    for (int unit = threadIdx.x; unit < tokens.units; unit += blockDim.x) {
        const int head = unit / tokens.each;
        const Unit<Key, V> from = tokens.unit(unit);
        const Unit<Real, V> halfway{out.of(unit), dw_row, true};  // what there is of dW
        Real *const to = out.of(unit);
        const Real *const backs = e + (run.item * h + head) * T + run.first;
        const Real rate = rate_of<Real>(rates, head);
        Real A[PARTS][V], flow[V];  // before each part of the run
        begin<V>(before, unit * V, A[0]);
        begin<V>(ahead, unit * V, flow);
#pragma unroll 1
        for (int part = 0; part + 1 < PARTS; ++part) {
            const unsigned int present = causal ? run.present >> part * PART : 0;
            Real w[PART][V];
            from.bring(part * PART, causal ? run.present : 0, w);
            copy<V>(A[part], A[part + 1]);
#pragma unroll
            for (int t = 0; t < PART; ++t) {
                const Real kept = present >> t & 1 ? rate : (Real)1;
#pragma unroll
                for (int v = 0; v < V; ++v) A[part + 1][v] = fma(kept, A[part + 1][v], w[t][v] * w[t][v]);
            }
        }
#pragma unroll 1
        for (int part = PARTS - 1; part >= 0; --part) {
            const unsigned int present = run.present >> part * PART;
            // 1 / A, negative where A is less than the least, and the part of A that came before
            Real w[PART][V], g[PART][V], back[PART], inverse[PART][V], earlier[PART][V];
            from.bring(part * PART, run.present, w);
            halfway.bring(part * PART, run.present, g);
            bring(backs + part * PART, present, back);
#pragma unroll
            for (int t = 0; t < PART; ++t)
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const Real before = rate * A[part][v];
                    if (causal && present >> t & 1) A[part][v] = fma(rate, A[part][v], w[t][v] * w[t][v]);
                    const bool clamped = (Real)least > A[part][v];
                    inverse[t][v] = clamped ? -1 / (Real)least : 1 / A[part][v];
                    earlier[t][v] = causal && !clamped ? before * inverse[t][v] : (Real)1;
                }
#pragma unroll
            for (int t = PART - 1; t >= 0; --t) {
                if (!(present >> t & 1)) continue;
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    const bool clamped = inverse[t][v] < 0;
                    const Real part = w[t][v] * (clamped ? -inverse[t][v] : inverse[t][v]);  // 0 for w = 0
                    const Real direct = back[t] * part;
                    g[t][v] = fma((Real)2, fma(-w[t][v], flow[v], direct * earlier[t][v]), g[t][v]);
                    if (causal && !clamped) flow[v] = fma(direct, part, flow[v]);
                    if (causal) flow[v] *= rate;
                }
                store<V>(to + (part * PART + t) * dw_row, true, g[t]);
            }
        }
    }
}

// Sums (b, h) of parts (b, runs, h) over the runs. A warp has a head.
template <typename Real>
__global__ void __launch_bounds__(SUMMING)
    sum_temperatures(const double *parts, int b, int runs, int h, Real *sums) {
    const int lane = threadIdx.x % 32;
    const long long head = blockIdx.x * (long long)(SUMMING / 32) + threadIdx.x / 32;
    if (head >= (long long)b * h) return;
    parts += head / h * runs * h + head % h;
    double sum = 0;
    for (int run = lane; run < runs; run += 32) sum += parts[(long long)run * h];
    sum = sum_of_warp(sum);
    if (lane == 0) sums[head] = (Real)sum;
}
