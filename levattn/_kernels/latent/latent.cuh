// Runs position by position on the plain units: the part of a state that a thread holds, and the scan of logits.
//
// In shared memory and in arrays of exponentials E, a position that raises the reference has −a in place of its 1. It
// multiplies the sums before it by a < 1. The sign of −0 counts.

namespace {

constexpr int WIDEST = 128;  // columns of a block

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }

template <typename Real>
__device__ inline bool raises(Real e) {
    if constexpr (sizeof(Real) == 4) return __float_as_int(e) < 0;
    else return __double_as_longlong(e) < 0;
}

template <typename Real>
__device__ inline void load_four(const Real *from, Real (&to)[4]) {
    if constexpr (sizeof(Real) == 4) {
        const float4 four = *(const float4 *)from;
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
        const double2 low = *(const double2 *)from, high = *(const double2 *)(from + 2);
        to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
    }
}

// Sum N values over LANES lanes that are APART from each other, and share out the sums. A lane keeps the sums whose number
// modulo LANES is its own number (modulo N, if N is smaller), at the multiples of LANES.
template <int LANES, int APART, int N, typename Real>
__device__ inline void share_sums(Real (&values)[N]) {
    const int lane = threadIdx.x % 32 / APART;
#pragma unroll
    for (int far = LANES / 2; far; far /= 2)
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (far >= N) {
                values[i] += __shfl_xor_sync(ALL, values[i], far * APART);
            } else if (!(i & (LANES - 1) & ~(far - 1))) {
                const bool upper = lane & far;
                const Real kept = upper ? values[i | far] : values[i], given = upper ? values[i] : values[i | far];
                values[i] = kept + __shfl_xor_sync(ALL, given, far * APART);
            }
        }
}

// A part of a matrix of LATENTS rows that is spread over the threads of a block, WIDE columns to each warp: the sums S of a
// state, or their backward counterpart R.
template <typename Real, int LATENTS>
struct Tile {
    static constexpr int ALONG = LATENTS > 64 ? 8 : 4;         // lanes along the latents
    static constexpr int ACROSS = 32 / ALONG;                  // lanes along the columns
    static constexpr int EACH = LATENTS / ALONG;               // latents of a thread
    static constexpr int COLUMNS = sizeof(Real) == 4 ? 8 : 4;  // of a thread
    static constexpr int WIDE = ACROSS * COLUMNS;
    static constexpr int WARPS = WIDEST / WIDE;
    static constexpr int THREADS = 32 * WARPS;

    // Fours of latents and of columns go round the lanes, so that lanes read different banks
    Real sums[EACH][COLUMNS];

    static __device__ int along() { return threadIdx.x % ALONG; }
    static __device__ int across() { return threadIdx.x % 32 / ALONG; }
    static __device__ int latent(int j) { return 4 * (along() + ALONG * (j / 4)) + j % 4; }
    static __device__ int column(int c) {
        return threadIdx.x / 32 * WIDE + 4 * (across() + ACROSS * (c / 4)) + c % 4;
    }

    // Begin with a matrix of `latents` rows and `columns` columns, D apart; with zeros if there is none.
    __device__ void begin(const Real *from, int latents, int columns, int D) {
#pragma unroll
        for (int j = 0; j < EACH; ++j)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
                sums[j][c] = from && latent(j) < latents && column(c) < columns
                                 ? from[(long long)latent(j) * D + column(c)]
                                 : 0;
    }

    // Write S, each row times a factor.
    __device__ void end(const Real *factors, Real *to, int latents, int columns, int D) const {
#pragma unroll
        for (int j = 0; j < EACH; ++j)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
                if (latent(j) < latents && column(c) < columns)
                    to[(long long)latent(j) * D + column(c)] =
                        factors ? factors[latent(j)] * sums[j][c] : sums[j][c];
    }

    static __device__ void load_columns(const Real *row, Real (&x)[COLUMNS]) {
#pragma unroll
        for (int q = 0; q < COLUMNS / 4; ++q) {
            Real four[4];
            load_four(row + column(4 * q), four);
#pragma unroll
            for (int i = 0; i < 4; ++i) x[4 * q + i] = four[i];
        }
    }

    // S[l] *= a for the latents whose reference a position raised.
    __device__ void lower(const Real *E) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const Real e = E[latent(j)];
            if (raises(e))
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) sums[j][c] *= -e;
        }
    }

    // S += w ⊗ x; weights are `encoded` at a position that raised references.
    template <bool encoded>
    __device__ void add(const Real *w, const Real *row) {
        Real x[COLUMNS];
        load_columns(row, x);
#pragma unroll
        for (int q = 0; q < EACH / 4; ++q) {
            Real four[4];
            load_four(w + latent(4 * q), four);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Real weight = encoded && raises(four[i]) ? (Real)1 : four[i];
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) sums[4 * q + i][c] = fma(weight, x[c], sums[4 * q + i][c]);
            }
        }
    }

    // A position enters.
    __device__ void enter(const Real *E, const Real *V, bool raised) {
        if (raised) {
            lower(E);
            add<true>(E, V);
        } else {
            add<false>(E, V);
        }
    }

    // Σ w_l S[l], shared out over the lanes along the latents.
    template <bool encoded>
    __device__ void sum_latents(const Real *w, Real (&y)[COLUMNS]) const {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) y[c] = 0;
#pragma unroll
        for (int q = 0; q < EACH / 4; ++q) {
            Real four[4];
            load_four(w + latent(4 * q), four);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Real weight = encoded && raises(four[i]) ? (Real)1 : four[i];
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) y[c] = fma(weight, sums[4 * q + i][c], y[c]);
            }
        }
        share_sums<ALONG, 1>(y);
    }

    // Call `use(column, sum)` for the sums that `sum_latents` leaves in this lane.
    template <typename Use>
    static __device__ void each_column(const Real (&y)[COLUMNS], Use use) {
        if (along() >= COLUMNS) return;
#pragma unroll
        for (int c = 0; c < COLUMNS; c += ALONG) use(column(0) + 4 * (ACROSS * ((along() + c) / 4)) + along() % 4, y[c]);
    }

    // ⟨S[l], x⟩ over the columns of this warp, to `to` (LATENTS,).
    __device__ void sum_columns(const Real *row, Real *to) const {
        Real x[COLUMNS], products[EACH];
        load_columns(row, x);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            products[j] = sums[j][0] * x[0];
#pragma unroll
            for (int c = 1; c < COLUMNS; ++c) products[j] = fma(sums[j][c], x[c], products[j]);
        }
        share_sums<ACROSS, ALONG>(products);
        if (across() >= EACH) return;
#pragma unroll
        for (int j = 0; j < EACH; j += ACROSS) {
            const int place = across() + j;
            to[4 * (along() + ALONG * (place / 4)) + place % 4] = products[j];
        }
    }
};

template <typename Real>
__device__ inline void fill_zeros(Real *from, Real *to) {
    for (Real *at = from + threadIdx.x; at < to; at += blockDim.x) *at = 0;
}

// Turn the logits of some steps (steps, LATENTS) into exponentials, one latent after the other, and call
// `use(step, latent, e, sum, reference)` for each with the sum of its latent up to there. `flags` are the steps at which
// some latent sees the position, and the steps that raise a reference.
template <int LATENTS, typename Real, typename Use>
__device__ inline void scan_logits(Real *K, unsigned int taken, int steps, int latents, Real *references, Real *sums,
                                   unsigned int *flags, Use use) {
    unsigned int seen = 0, raised = 0;
    for (int l = threadIdx.x; l < latents; l += blockDim.x) {
        Real reference = references[l], sum = sums[l];
#pragma unroll 4
        for (int k = 0; k < steps; ++k) {
            const Real x = taken >> k & 1 ? K[k * LATENTS + l] : nothing<Real>();
            Real e = 0, stored = 0;
            if (x > reference + (Real)SLACK && x < -nothing<Real>()) {  // +∞ makes NaN below
                stored = -exponential(reference - x);
                sum *= -stored;
                reference = x;
                e = 1;
                raised |= 1u << k;
                seen |= 1u << k;
            } else if (x != nothing<Real>()) {
                stored = e = exponential(x - reference);
                seen |= 1u << k;
            }
            sum += e;
            K[k * LATENTS + l] = stored;
            use(k, l, stored, sum, x);
        }
        references[l] = reference, sums[l] = sum;
    }
    collect(flags, seen);
    collect(flags + 1, raised);
}

// The passage of a block of threads through a run, with some of its latents and columns. Shared memory holds logits and
// values of two chunks of STEPS steps: one arrives while the block works on the other. Then follow `numbers` numbers of the
// kernel, the references and sums of the latents, and bits of steps.
template <typename Real, int LATENTS, int STEPS>
struct Walk {
    using Part = Tile<Real, LATENTS>;

    const Run run;
    const long long item;
    const int pitch, column, latent, columns, latents;
    Real *const logits, *const values, *const own, *const references, *const totals;
    unsigned int *const flags, *const taken;
    Part part;

    __device__ Walk(unsigned char *shared, const Run &run, long long item, int L, int D, int numbers)
        : run(run), item(item), pitch(blockDim.x / 32 * Part::WIDE), column(blockIdx.y * pitch),
          latent(blockIdx.z * LATENTS), columns(min(D - column, pitch)), latents(min(L - latent, LATENTS)),
          logits((Real *)shared), values(logits + 2 * STEPS * LATENTS), own(values + 2 * STEPS * pitch),
          references(own + numbers), totals(references + LATENTS), flags((unsigned int *)(totals + LATENTS)),
          taken(flags + 4) {}

    // Begin with the state at one place of (b, slots, L[, D]), or with an empty one.
    __device__ void begin(const Real *before, const Real *sums, const Real *states, long long place, int L, int D) {
        fill_zeros(logits, own);
        for (int l = threadIdx.x; l < LATENTS; l += blockDim.x) {
            const bool begun = before && l < latents;
            references[l] = begun ? before[place * L + latent + l] : nothing<Real>();
            totals[l] = begun ? sums[place * L + latent + l] : 0;
        }
        if (threadIdx.x < 4) flags[threadIdx.x] = 0;
        part.begin(states ? states + (place * L + latent) * D + column : nullptr, latents, columns, D);
    }

    // Take the positions one after the other. A chunk has a first step, `start`, and a place, 0 or 1. `arrive(start, place,
    // steps)` brings further arrays of the next chunk. `scan(start, place)` returns the function that `scan_logits` calls.
    // `take(start, place)` returns the function to call with each step after its position has entered. `leave(start, steps)`
    // ends a chunk.
    template <typename Arrive, typename Scan, typename Take, typename Leave>
    __device__ void go(const Positions<Real> &from, Arrive arrive, Scan scan, Take take, Leave leave) {
        for (int start = -STEPS; start < run.steps(); start += STEPS) {
            const int next = start + STEPS, other = next / STEPS % 2, here = 1 - other;
            finish_copies();
            __syncthreads();
            const int arriving = min(run.steps() - next, STEPS);
            if (arriving > 0) {
                const long long at = run.position + next;
                if (run.positions) {
                    bring(logits + other * STEPS * LATENTS, LATENTS, from.K + item * from.k_item + at * from.k_row + latent,
                          from.k_row, arriving, latents);
                    bring(values + other * STEPS * pitch, pitch, from.V + item * from.v_item + at * from.v_row + column,
                          from.v_row, arriving, columns);
                }
                arrive(next, other, arriving);
                if (threadIdx.x < 32)
                    bring_mask(taken + other,
                               from.mask ? from.mask + item * from.mask_item + at * from.mask_row : nullptr,
                               from.mask_row, run.positions ? arriving : 0);
                if (threadIdx.x < 2) flags[2 * other + threadIdx.x] = 0;
            }
            if (start < 0) continue;
            const int steps = min(run.steps() - start, STEPS);
            Real *const E = logits + here * STEPS * LATENTS;
            scan_logits<LATENTS>(E, taken[here], steps, latents, references, totals, flags + 2 * here,
                                 scan(start, here));
            __syncthreads();
            const unsigned int seen = flags[2 * here], raised = flags[2 * here + 1];
            const auto step = take(start, here);
#pragma unroll 1
            for (int k = 0; k < steps; ++k) {
                if (seen >> k & 1)
                    part.enter(E + k * LATENTS, values + (here * STEPS + k) * pitch, raised >> k & 1);
                step(k);
            }
            leave(start, steps);
        }
    }
};

}  // namespace
