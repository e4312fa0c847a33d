"""What pruned reading of SmolLM2 costs and saves, and whether to prune, to compress or to do neither.

    python examples/decoders/pruned.py [--lengths 1024 2048 3000 6000] [--rounds 3] [--contexts 2] [--fits] [--avx2]

The first table has seconds of one reading and the loss of the text that is read, beside dense reading. "No attention"
is a model whose attention costs nothing: no pruning can be faster. Seconds are medians of rounds in one process, whose
readings come in any order, with a cache, as a user calls it. Texts are Python's language reference, the GPL and
docstrings. Losses are means over all positions. Bars: as a user calls it, never slower than 1.03 times dense; with 512
slots 1.25 times as fast at 2048 tokens, and 1.7 times at 6000; a loss of at most 1.01 at 25 % of the keys, and of
1.025 at 12 %. `prune` reads texts of at most 2560 tokens densely.

The second table reads contexts and answers questions on them, in all ways to save time or bytes. "Prune" reads with
pruned heads, and keeps all keys. Questions and answers are short calls, which read all keys; "answers too" has a
`Selection.start`, so that they are pruned as well. "Compress" reads densely, and then cuts the cache; in chunks it
reads each chunk with a cache that is already cut. Answers count if each of their tokens is the likeliest. Bytes are
those of the cache after the context. The bar: answers at 25 % of the keys at least 90 % of the dense model's.

The third table tells whether fitted slots serve pruned reading. Each head has 256 slots and the same near keys. The
other slots are chosen and summarized, or fitted to the last queries (`fit_slots`). Errors are of the outputs of the
next 64 positions, and the time is of one renewal of one head.

The fourth table, `--splits 0.06 0.12`, has the losses of `heads="auto"` beside all heads alike at these budgets. The
bar: a split is never worse.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from smollm2 import CACHE, kept_tasks, opened, row, with_answers
from tasks import DAILY, TASKS, Context, contexts, docstrings, reference
from transformers import DynamicCache

from levattn import ProfileWarning, RecallWarning
from levattn.attention import Selection, causal_pruned_attention, fit_slots
from levattn.integrations.transformers import HeadProfile, compress, prune
from levattn.integrations.transformers.pruning import observed

SLOTS, NEAR, NEXT = 256, 96, 64  # of the third table
GPL = Path("/usr/share/common-licenses/GPL-3")  # of Debian and its kin; left out elsewhere
Reading = Callable[[Any], AbstractContextManager[Any]]
READINGS: dict[str, Reading] = {
    "dense": lambda _: nullcontext(),
    "no attention": lambda _: patch(
        "torch.nn.functional.scaled_dot_product_attention", lambda q, *_, **__: torch.zeros_like(q)
    ),
    "512 slots": lambda model: prune(model, 512),
    "512 slots, not measured": lambda model: prune(model, 512, measure=False),
    "512 slots, not measured, no cache": lambda model: prune(model, 512, measure=False),
    "25 %": lambda model: prune(model, 0.25),
    "25 %, heads='auto'": lambda model: prune(model, 0.25, heads="auto"),
    "12 %": lambda model: prune(model, 0.12),
    "12 %, heads='auto'": lambda model: prune(model, 0.12, heads="auto"),
}
WAYS: dict[str, tuple[Any, Any]] = {  # how to read, and how to make a cache of tokens, or None for a cache of all keys
    "dense": (lambda _: nullcontext(), None),
    "prune 25 %": (lambda model: prune(model, 0.25, heads="auto"), None),
    "prune 25 %, answers too": (lambda model: prune(model, Selection(0.25, start=1536), heads="auto"), None),
    "prune 25 %, all heads alike": (lambda model: prune(model, 0.25), None),
    "prune 12 %": (lambda model: prune(model, 0.12, heads="auto"), None),
    "prune 12 %, answers too": (lambda model: prune(model, Selection(0.12, start=1536), heads="auto"), None),
    "prune 512 slots, all heads alike": (lambda model: prune(model, 512), None),
    "compress 25 %": (lambda _: nullcontext(), partial(compress, selection=0.25, heads="auto")),
    "compress 12 %": (lambda _: nullcontext(), partial(compress, selection=0.12, heads="auto")),
    "compress 12 %, in chunks of 512": (
        lambda _: nullcontext(),
        partial(compress, selection=0.12, heads="auto", chunk=512),
    ),
}


def read(model: Any, tokens: Any, way: str, readings: Mapping[str, Reading] = READINGS) -> tuple[float, Any]:
    """Return the seconds of one reading, and its last hidden states."""
    with readings[way](model):
        begin = time.perf_counter()
        hidden = model.model(tokens, use_cache="no cache" not in way).last_hidden_state[0]
        return time.perf_counter() - begin, hidden


def loss(model: Any, tokens: Any, way: str, readings: Mapping[str, Reading] = READINGS) -> float:
    """Return the mean loss of the tokens."""
    _, hidden = read(model, tokens, way, readings)
    each = [
        model.lm_head(part).log_softmax(-1).gather(1, after[:, None])
        for part, after in zip(hidden[:-1].split(512), tokens[0, 1:].split(512), strict=True)
    ]
    return -float(torch.cat(each).mean())


def texts_of(tokenizer: Any) -> dict[str, list[int]]:
    """Return the texts to read, by name."""
    texts = {"language reference": reference(tokenizer)[20_000:], "docstrings": docstrings(tokenizer)[3000:]}
    if GPL.is_file():
        texts["GPL"] = tokenizer(GPL.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    return texts


def show_reading(model: Any, tokenizer: Any, lengths: list[int], rounds: int) -> None:
    """Print the table of readings."""
    rng, texts = np.random.default_rng(0), texts_of(tokenizer)
    heads = " | ".join(texts)
    print(f"| tokens | reading | seconds | times as fast | loss / dense: {heads} |")
    print(f"| ---: | --- | ---: | ---: |{' ---: |' * len(texts)}")
    for length in lengths:
        tokens = {name: torch.tensor([text[:length]]) for name, text in texts.items()}
        found = {(way, name): loss(model, each, way) for name, each in tokens.items() for way in READINGS}
        times: dict[str, list[float]] = {way: [] for way in READINGS}
        for _ in range(rounds):
            for way in rng.permutation(list(times)):  # what a reading finds in memory depends on the one before
                times[way].append(read(model, tokens["language reference"], way)[0])
        dense = np.median(times["dense"])
        for way, taken in times.items():
            each_loss = " | ".join(
                "" if way == "no attention" else f"{found[way, name] / found['dense', name]:.3f}" for name in texts
            )
            seconds = np.median(taken)
            print(f"| {length} | {way} | {seconds:.2f} | {dense / seconds:.2f} | {each_loss} |", flush=True)


def show_splits(model: Any, tokenizer: Any, lengths: list[int], budgets: list[float]) -> None:
    """Print the table of splits: the loss by a profile beside all heads alike."""
    texts, profile = texts_of(tokenizer), HeadProfile.find(model, way="reading")
    heads = " | ".join(f"{name}: alike, split" for name in texts)
    print(f"| tokens | budget | whole heads | slots of the others | loss / dense: {heads} |")
    print(f"| ---: | ---: | ---: | ---: |{' ---: |' * len(texts)}")
    for length, budget in product(lengths, budgets):
        readings: dict[str, Reading] = {
            "dense": lambda _: nullcontext(),
            "alike": partial(prune, selection=budget, measure=False),
            "split": partial(prune, selection=budget, heads="auto", measure=False),
        }
        each_loss = []
        for text in texts.values():
            least, *others = (loss(model, torch.tensor([text[:length]]), way, readings) for way in readings)
            each_loss.append(", ".join(f"{other / least:.3f}" for other in others))
        shares = profile.shares(budget, way="reading", length=length)
        whole, slots = sum(share == 1 for share in shares.values()), round(length * min(shares.values()))
        print(f"| {length} | {budget:.0%} | {whole} | {slots} | {' | '.join(each_loss)} |", flush=True)


def asked(model: Any, context: Context, way: str) -> tuple[Any, dict[str, float]]:
    """Return the share of right answers and the loss of the text that follows; seconds of reading, and bytes."""
    reading, made = WAYS[way]
    tokens = torch.tensor([context.tokens])
    with reading(model):
        begin = time.perf_counter()
        if made is None:
            cache = DynamicCache()
            model.model(tokens, **{CACHE: cache})
        else:
            cache = made(model, tokens)
        seconds = time.perf_counter() - begin
        right = []
        for question in context.questions:
            answer = torch.tensor(question.answer)
            log_p = log_probabilities(model, cache, len(context.tokens), question.asked + question.answer)
            same = log_p[-len(answer) - 1 : -1].argmax(-1) == answer
            right.append(float(same.double().mean() if context.task == "summary" else same.all()))
        log_p = log_probabilities(model, cache, len(context.tokens), context.following)
    following = torch.tensor(context.following[1:])
    loss = -float(log_p[:-1].gather(1, following[:, None]).mean())
    return (float(np.mean(right)), loss), {"seconds": seconds, "bytes": size(cache)}


def log_probabilities(model: Any, cache: Any, length: int, tokens: list[int]) -> Any:
    """Return those of each token (rows) after the context, by a copy of the cache."""
    places = torch.arange(length, length + len(tokens))[None]
    fork = copy.deepcopy(cache) if isinstance(cache, DynamicCache) else cache.copy()
    return model(torch.tensor([tokens]), position_ids=places, **{CACHE: fork}).logits[0].log_softmax(-1)


def size(cache: Any) -> float:
    """Return the bytes of a cache; those of all keys and values for a cache of transformers, with states if pruned."""
    if not isinstance(cache, DynamicCache):
        return float(cache.nbytes)
    held = [each for layer in cache.layers for group in getattr(layer, "states", ()) for each in group]
    rows = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return float(rows + sum(each.nbytes for each in held))


def show_decision(model: Any, tokenizer: Any, lengths: list[int], count: int, tasks: list[str]) -> None:
    """Print the table of ways to read and to answer."""
    print("\n| tokens | way | seconds to read / dense | bytes / dense | answers / dense | loss after it / dense |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for length in lengths:
        every = [
            (n, with_answers(model, each))
            for n in range(count)
            for daily in (False, True)
            for each in contexts(tokenizer, length, 1000 * n + length + 7, daily=daily)
            if each.task in tasks
        ]
        dense = [asked(model, context, "dense") for _, context in every]
        rows = [row(context, n, "dense", 1.0, found[0]) for (n, context), found in zip(every, dense, strict=True)]
        solved = kept_tasks(rows)
        every, dense = map(
            list, zip(*(pair for pair in zip(every, dense, strict=True) if pair[0][1].task in solved), strict=True)
        )
        told = {"dense": dense} | {
            way: [asked(model, context, way) for _, context in every] for way in WAYS if way != "dense"
        }
        base = np.array([(*figures, more["seconds"], more["bytes"]) for figures, more in dense])
        for way, each in told.items():
            mine = np.array([(*figures, more["seconds"], more["bytes"]) for figures, more in each])
            seconds, size = np.median(mine[:, 2] / base[:, 2]), mine[:, 3].sum() / base[:, 3].sum()
            right, loss = mine[:, 0].sum() / base[:, 0].sum(), np.exp(np.log(mine[:, 1] / base[:, 1]).mean())
            print(f"| {length} | {way} | {seconds:.2f} | {size:.2f} | {right:.0%} | {loss:.3f} |", flush=True)
        print(f"# {length} tokens: {len(every)} contexts of {', '.join(solved)}", flush=True)


def show_fits(model: Any, tokenizer: Any) -> None:
    """Print the table of fitted slots."""
    tokens = torch.tensor([reference(tokenizer)[20_000:21_600]])
    errors: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for each in observed(model, {"input_ids": tokens, "use_cache": False}, layers=range(1, 30, 5)).values():
        q, K, V = (X[0].numpy() for X in (each[0].q, each[0].k, each[0].v))
        for at in (900, 1200, 1500):
            end, rows = at + NEXT, slice(at, at + NEXT)
            Y = causal(q[:, rows], K[:, :end], V[:, :end])
            few = SLOTS + (at - SLOTS) % NEXT  # so that the last renewal comes before these positions
            rule = {"window": NEAR, "sinks": 4, "summaries": 32, "renew_every": NEXT}
            selection = Selection(size=few - NEAR - NEXT - 36, **rule)
            begin = time.perf_counter()
            found = causal_pruned_attention(q[:, :end], K[:, :end], V[:, :end], selection)[:, rows]
            count = len(K) * (end - few) / NEXT
            seconds.setdefault("chosen and summarized", []).append((time.perf_counter() - begin) / count)
            errors.setdefault("chosen and summarized", []).extend(error(found, Y))
            old = at - NEAR
            for last in (32, 128, 512):
                begin = time.perf_counter()
                of = Selection(few - NEAR - NEXT, window=0, sinks=4)
                fitted = fit_slots(q[:, at - last : at], K[:, :old], V[:, :old], of)
                name = f"fitted to the last {last} queries"
                seconds.setdefault(name, []).append((time.perf_counter() - begin) / len(K))
                slots = fitted.keys, fitted.values, fitted.log_weights
                errors.setdefault(name, []).extend(error(causal(q[:, rows], K[:, old:end], V[:, old:end], slots), Y))
    print("\n| slots | median error | 90 % below | milliseconds of a renewal |\n| --- | ---: | ---: | ---: |")
    for name, found in errors.items():
        middle, most = np.quantile(found, [0.5, 0.9])
        print(f"| {name} | {middle:.3f} | {most:.3f} | {1000 * np.median(seconds[name]):.1f} |", flush=True)


def causal(q: Any, K: Any, V: Any, slots: Any = None) -> Any:
    """Return attention of the last positions to keys up to their own, and to slots with log-weights if given."""
    each, own = len(q) // len(K), np.arange(K.shape[1]) - K.shape[1] + q.shape[1]
    z = q.reshape(len(K), -1, *q.shape[1:]) @ K[:, None].swapaxes(-1, -2) * q.shape[-1] ** -0.5
    z[..., own > np.arange(q.shape[1])[:, None]] = -np.inf
    values = V
    if slots is not None:
        c, C, log_weights = slots
        others = q.reshape(len(K), -1, *q.shape[1:]) @ c[:, None].swapaxes(-1, -2) * q.shape[-1] ** -0.5
        z = np.concatenate([others + log_weights[:, None, None], z], axis=-1)
        values = np.concatenate([C, V], axis=1)
    weights = np.exp(z - z.max(-1, keepdims=True))
    Y = weights @ values[:, None] / weights.sum(-1, keepdims=True)
    return Y.reshape(len(K) * each, *Y.shape[2:])


def error(found: Any, Y: Any) -> list[float]:
    """Return the relative error of each head of queries."""
    each: list[float] = (np.linalg.norm(found - Y, axis=(1, 2)) / np.linalg.norm(Y, axis=(1, 2))).tolist()
    return each


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 3000, 6000])
    parser.add_argument("--rounds", type=int, default=3, help="of the first table; 0 leaves it out")
    parser.add_argument("--contexts", type=int, default=2, help="of each task in the second table; 0 leaves it out")
    parser.add_argument("--tasks", nargs="+", choices=(*TASKS, *DAILY), help="of the second table; all by default")
    parser.add_argument("--fits", action="store_true", help="the third table")
    parser.add_argument("--splits", type=float, nargs="+", default=[], help="budgets of the fourth table, in shares")
    parser.add_argument("--avx2", action="store_true", help="leave AVX-512 out, in all libraries")
    options = parser.parse_args(arguments)
    if options.avx2:
        sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # last: it has modules of the same names
        from _rivals import limit_to_avx2

        limit_to_avx2()
    for kind in (RecallWarning, ProfileWarning):  # all heads alike, and a profile of a cache
        warnings.simplefilter("ignore", kind)
    torch.set_grad_enabled(False)
    model, tokenizer = opened()
    print(f"\n{torch.get_num_threads()} threads, {model.dtype}\n")
    if options.rounds:
        show_reading(model, tokenizer, options.lengths, options.rounds)
    if options.contexts:
        show_decision(model, tokenizer, options.lengths, options.contexts, options.tasks or [*TASKS, *DAILY])
    if options.fits:
        show_fits(model, tokenizer)
    if options.splits:
        show_splits(model, tokenizer, options.lengths, options.splits)


if __name__ == "__main__":
    main()
