"""Streams against all keys at once, and against what one would write with numpy.

Bars, at d = 64 and float32, for Gaussian keys and for keys with the mean and covariance of two heads of an encoder:
- n = 4 000 000 keys: one pass (`StreamingUniversalSet`) has at least 55 % of the throughput of `universal_set` on all
  keys in memory in chunks of 512 rows, 75 % in chunks of 2048, 88 % in chunks of 16 384, and 92 % in chunks of 131 072
  and from a .npy file; two passes (`universal_set` of chunks) 92 % in chunks of 131 072 and from the file;
- ε = 0.05: a merge of states of 100 000 keys each takes at most 5 ms, whatever the keys;
- a state as bytes takes at most 1.1 times its arrays;
- a key appended to `CausalUniversalSet` takes at most 20 µs, with a query between two of them and without.

Beside them, without a bar: other sizes of chunks, ill-conditioned keys, Huber, and keys appended one at a time with
the heavy ones of a query asked for against a product with all keys so far.

    python examples/benchmarks/streaming.py [--rows 4000000] [--rounds 5] [--only passes merges others decoding]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from _keys import KINDS, REAL
from _rivals import Array, conditioned, interleaved, once, table, verdict

import levattn

D, EPSILON = 64, 0.05
CHUNK = 131_072
CHUNKS = {512: 0.55, 2048: 0.75, 16_384: 0.88, CHUNK: 0.92}  # rows, and the bar of one pass over such chunks
APPEND = 20e-6  # seconds
STATE_ROWS = 100_000
FEW_ROWS = 400_000  # of the streams that cost more
STEPS, QUERIES = 256, 32  # that are timed together when keys are appended one at a time


def keys(n: int, d: int = D) -> Array:
    """Gaussian keys, 200 of them longer."""
    rng = np.random.default_rng(0)
    K = rng.standard_normal((n, d), dtype=np.float32)
    K[:: max(1, n // 200)] *= np.float32(np.sqrt(0.01 * n))
    return K


class Chunks:
    """The rows of an array in chunks, again and again."""

    def __init__(self, K: Array, rows: int) -> None:
        self.K, self.rows = K, rows

    def __iter__(self) -> Iterator[Array]:
        for start in range(0, len(self.K), self.rows):
            yield self.K[start : start + self.rows]


def one_pass(chunks: Chunks | levattn.KeySource, f: object = 2) -> levattn.StreamedSet:
    state = levattn.StreamingUniversalSet(EPSILON, f=f)
    for chunk in chunks:
        state = state.update(chunk)
    return state.result()


def with_blas(chunks: Chunks | levattn.KeySource) -> Array:
    """Two passes in float32 on BLAS threads: moments, a Cholesky factor, and the scores of chunk after chunk."""
    G = sum((chunk.T @ chunk).astype(np.float64) for chunk in chunks)
    W = np.linalg.inv(np.linalg.cholesky(G).T).astype(np.float32)
    heavy, at = [], 0
    for chunk in chunks:
        Y = chunk @ W
        heavy.append(at + np.flatnonzero(np.einsum("ij,ij->i", Y, Y) >= EPSILON))
        at += len(chunk)
    return np.concatenate(heavy)


def passes(kind: str, K: Array, rounds: int) -> None:
    n = len(K)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "keys.npy")
        np.save(path, K)
        source = levattn.open_keys(path, chunk_rows=CHUNK)
        calls: dict[str, Callable[[], object]] = {"in memory": partial(levattn.universal_set, K, EPSILON)}
        for rows in (*CHUNKS, n):
            chunks, name = Chunks(K, rows), "one chunk" if rows == n else f"chunks of {rows}"
            calls[f"one pass, {name}"] = partial(one_pass, chunks)
            calls[f"two passes, {name}"] = partial(levattn.universal_set, chunks, EPSILON)
            if 16_384 <= rows < n:
                calls[f"numpy, {name}"] = partial(with_blas, chunks)
        calls["one pass, file"] = partial(one_pass, source)
        calls["two passes, file"] = partial(levattn.universal_set, source, EPSILON)
        calls["numpy, file"] = partial(with_blas, source)
        times = interleaved(calls, rounds)
        indices = levattn.universal_set(K, EPSILON).indices
        for found in (one_pass(source).indices, levattn.universal_set(source, EPSILON).indices, with_blas(source)):
            if not np.array_equal(found, indices):
                raise SystemExit("the sets differ")
    print(f"\n{n} {kind} keys, d = {D}, float32, {len(indices)} of them in the set")
    base = times["in memory"]
    table(
        ["route", "ms", "10⁶ keys/s", "throughput / in memory"],
        [[name, f"{1e3 * s:.0f}", f"{n / s / 1e6:.1f}", f"{base / s:.2f}"] for name, s in times.items()],
    )
    bars = {f"one pass, chunks of {rows}": bar for rows, bar in CHUNKS.items()}
    bars |= {"one pass, file": CHUNKS[CHUNK], f"two passes, chunks of {CHUNK}": 0.92, "two passes, file": 0.92}
    for name, bar in bars.items():
        print(f"{name}:", verdict(base / times[name], bar))
    best = min(s for name, s in times.items() if name.startswith("numpy"))
    for name in (f"one pass, chunks of {CHUNK}", f"two passes, chunks of {CHUNK}"):
        print(f"best numpy / {name}: {best / times[name]:.2f}")


def growing(n: int) -> Array:
    """Keys that double every 4096 rows, so that whole blocks are held until they are judged."""
    return np.asarray(keys(n) * np.exp2(np.arange(n) / 4096 - 64)[:, None], np.float32)


def many_at_the_threshold(n: int) -> Array:
    """Keys in pairs, triples and so on along the axes, with scores just above ε: as many as the theorem lets be."""
    copies = math.floor(1 / EPSILON)
    K = 1e-3 * keys(n)
    K[: D * copies] = np.kron(np.eye(D), np.ones((copies, 1))) * 1e3 * np.sqrt(n)
    return np.asarray(K, np.float32)


STATES: dict[str, Callable[[int], Array]] = {
    "gaussian": keys,
    "growing": growing,
    "at the threshold": many_at_the_threshold,
    "condition 1e4": lambda n: conditioned(n, D, 1e4, "float32"),
    "condition 1e8": lambda n: conditioned(n, D, 1e8, "float64"),
    "1e8 and growing": lambda n: conditioned(n, D, 1e8, "float64") * np.exp2(np.arange(n) / 4096)[:, None],
}


def array_bytes(data: bytes) -> int:
    """Bytes of the arrays in a state: its header lists their dtypes and shapes."""
    header = json.loads(data[16 : 16 + int.from_bytes(data[8:16], "little")])
    return sum(np.dtype(dtype).itemsize * math.prod(shape) for _, dtype, shape in header["arrays"])


def merges(rounds: int) -> None:
    print(f"\nstates of {STATE_ROWS} keys, d = {D}, ε = {EPSILON}")
    rows, slowest, largest = [], 0.0, 0.0
    numbers = 8 * (D * D + 3 * D * D / EPSILON)
    for name, make in STATES.items():
        K = make(2 * STATE_ROWS)
        first, second = (
            levattn.StreamingUniversalSet(EPSILON).update(part) for part in (K[:STATE_ROWS], K[STATE_ROWS:])
        )
        data = first.to_bytes()
        times = interleaved(
            {
                "merge": lambda a=first, b=second: copy.copy(a).merge(b),
                "result": first.result,
                "to_bytes": first.to_bytes,
                "from_bytes": partial(levattn.StreamingUniversalSet.from_bytes, data),
            },
            10 * rounds,
        )
        size, share = len(data), len(data) / array_bytes(data)
        slowest, largest = max(slowest, times["merge"]), max(largest, share)
        shown = [f"{1e3 * s:.2f}" for s in times.values()]
        rows.append([name, str(first.held), *shown, f"{size / 1e6:.2f}", f"{share:.3f}", f"{size / numbers:.2f}"])
    columns = ["held", "merge ms", "result ms", "to bytes ms", "from bytes ms", "MB", "/ arrays", "/ 8 (d² + 3d²/ε)"]
    table(["keys", *columns], rows)
    print("slowest merge in ms:", verdict(1e3 * slowest, 5, at_least=False))
    print("state as bytes / its arrays:", verdict(largest, 1.1, at_least=False))


def others(rounds: int) -> None:
    """What costs more than well-conditioned keys for x²."""
    print(f"\n{FEW_ROWS} keys, d = {D}, chunks of {CHUNK}: ms, and times the same in memory")
    cases: dict[str, tuple[Array, object]] = {
        "x², Gaussian": (keys(FEW_ROWS), 2),
        "x², condition 1e4, float32": (conditioned(FEW_ROWS, D, 1e4, "float32"), 2),
        "x², condition 1e4, float64": (conditioned(FEW_ROWS, D, 1e4, "float64"), 2),
        "x², condition 1e8, float64": (conditioned(FEW_ROWS, D, 1e8, "float64"), 2),
        "x², rows less their mean, float64": (
            (K := conditioned(FEW_ROWS, D, 1.0, "float64")) - K.mean(1, keepdims=True),
            2,
        ),
        "Huber, Gaussian": (keys(FEW_ROWS), levattn.Huber()),
        "x⁴, Gaussian, d = 8": (np.ascontiguousarray(keys(FEW_ROWS)[:, :8]), 4),
    }
    rows = []
    for name, (K, f) in cases.items():
        chunks = Chunks(K, CHUNK)
        calls: dict[str, Callable[[], object]] = {
            "in memory": partial(levattn.universal_set, K, EPSILON, f=f),
            "one pass": partial(one_pass, chunks, f),
        }
        if f == 2:
            calls["two passes"] = partial(levattn.universal_set, chunks, EPSILON)
        times = interleaved(calls, rounds)
        shown = [f"{1e3 * s:.0f}" for s in times.values()] + [""] * (3 - len(times))
        ratios = [f"{times[name] / times['in memory']:.2f}" for name in list(times)[1:]]
        rows.append([name, *shown, *ratios, *[""] * (3 - len(times))])
    table(["keys", "in memory", "one pass", "two passes", "one / memory", "two / memory"], rows)


class AllKeys:
    """A cache of all keys, and products with all of them."""

    def __init__(self, n: int, d: int) -> None:
        self.K, self.n = np.empty((n, d), np.float32), 0

    def append(self, key: Array) -> None:
        self.K[self.n : self.n + len(key)] = key
        self.n += len(key)

    def heavy(self, Q: Array) -> tuple[Array, Array]:
        scores = (Q @ self.K[: self.n].T) ** 2
        scores /= scores.sum(axis=1, keepdims=True)
        return np.nonzero(scores >= EPSILON)


def append(cache: Callable[[Array], object], keys: Iterator[Array]) -> None:
    for key in islice(keys, STEPS):
        cache(key)


class Between:
    """Keys appended with a query after each; `seconds` has what an append took, mean by mean of so many steps."""

    def __init__(self, state: levattn.CausalUniversalSet, Q: Array) -> None:
        self.state, self.Q = state, Q
        self.seconds: list[float] = []
        self.sum, self.steps = 0.0, 0

    def __call__(self, key: Array) -> None:
        self.sum += once(partial(self.state.update, key))
        self.state.heavy(self.Q)
        self.steps += 1
        if self.steps % STEPS == 0:
            self.seconds.append(self.sum / STEPS)
            self.sum = 0.0


def query(cache: Callable[[Array], object], Q: Array) -> None:
    for _ in range(QUERIES):
        cache(Q)


def decoding(rounds: int) -> None:
    n = 100_000
    print(f"\ndecoding after {n} keys, ε = {EPSILON}: µs a step of one key appended and the queries of a group")
    rows = []
    slowest = dict.fromkeys(("append", "append between queries"), 0.0)
    for d in (64, 128):
        K = keys(n + 4 * STEPS * rounds, d)
        for group in (1, 8):
            Q = np.random.default_rng(1).standard_normal((group, d), dtype=np.float32)
            ours, rival = levattn.CausalUniversalSet(EPSILON).update(K[:n]), AllKeys(len(K), d)
            rival.append(K[:n])
            stream, beside = iter(K[n:, None]), Between(ours, Q)
            times = interleaved(
                {
                    "append": partial(append, ours.update, stream),
                    "append between queries": partial(append, beside, stream),
                    "numpy append": partial(append, rival.append, iter(K[n:, None])),
                    "query": partial(query, ours.heavy, Q),
                    "numpy query": partial(query, rival.heavy, Q),
                },
                rounds,
            )
            each = {name: s / (QUERIES if name.endswith("query") else STEPS) for name, s in times.items()}
            each["append between queries"] = statistics.median(beside.seconds)
            for name in slowest if d == D else ():
                slowest[name] = max(slowest[name], each[name])
            step, other = each["append"] + each["query"], each["numpy append"] + each["numpy query"]
            rows.append([str(d), str(group), str(ours.held), *(f"{1e6 * s:.0f}" for s in each.values())])
            rows[-1].append(f"{other / step:.1f}")
    columns = ["append", "between queries", "numpy append", "query", "numpy query", "numpy / levattn"]
    table(["d", "queries", "held", *columns], rows)
    for name, seconds in slowest.items():
        print(f"{name}, d = {D}, µs:", verdict(1e6 * seconds, 1e6 * APPEND, at_least=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parts = ("passes", "merges", "others", "decoding")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    if "passes" in options.only:
        passes("Gaussian", keys(options.rows), options.rounds)
        passes(REAL, KINDS[REAL](options.rows, D, "float32"), options.rounds)
    if "merges" in options.only:
        merges(options.rounds)
    if "others" in options.only:
        others(options.rounds)
    if "decoding" in options.only:
        decoding(options.rounds)


if __name__ == "__main__":
    main()
