"""``levattn profile`` and ``levattn compress``: contexts that a decoder reads once."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levattn.cli.models import draw
from levattn.cli.opened import (
    check_model_path,
    check_own_tokens,
    check_profile,
    forward_errors_in_one_line,
    most_tokens,
    opened_decoder,
    profile_of,
    read_text,
    told_of_recall,
)
from levattn.cli.output import (
    HeatMap,
    KeptText,
    check_output,
    fail,
    new_console,
    print_json,
    report,
    table_of,
    write_page,
)

_COSTS = {
    "layer": "layer",
    "head": "head",
    "cost": "cost:.3f",
    "recall": "recall:.3f",
    "±recall": "recall_error:.3f",
    "text": "text:.3f",
    "±text": "text_error:.3f",
}
_KEPT_HEADS = {
    "layer": "layer",
    "head": "head",
    "slots": "slots:.0f",
    "summaries": "summaries:.0f",
    "share": "share:.3f",
}
_ROOM = 256  # positions that a context leaves for question and answer


@dataclass(frozen=True)
class Measurement:
    """The options of ``levattn profile``."""

    model: Path
    output: Path
    tasks: int
    positions: int
    rounds: int
    way: str
    refine: Path | None
    as_json: bool
    plot: Path | None
    html: Path | None


@dataclass(frozen=True)
class Compression:
    """The options of ``levattn compress``."""

    model: Path
    text: Path
    output: Path
    budget: float
    heads: str
    tokens: int | None
    chunk: int | None
    bits: int | None
    as_json: bool
    html: Path | None


def profile(asked: Measurement) -> None:
    """Run ``levattn profile``."""
    check_model_path(asked.model)
    for path, option in ((asked.output, "--output"), (asked.plot, "--plot"), (asked.html, "--html")):
        check_output(path, option)
    if asked.refine is not None and not asked.refine.is_file():
        fail(f"{asked.refine}: no such file; give --refine a file that `levattn profile` made, or leave it out")
    model, tokenizer = opened_decoder(asked.model)
    from levattn.integrations.transformers import HeadProfile, head_profile

    start = time.perf_counter()
    options: dict[str, Any] = {"tasks": asked.tasks, "positions": asked.positions, "rounds": asked.rounds}
    options["way"] = asked.way
    with forward_errors_in_one_line(asked.model, asked.positions, "give fewer --positions"):
        earlier = None if asked.refine is None else HeadProfile.load(asked.refine)
        found = head_profile(model, tokenizer, **options, earlier=earlier, progress=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    found.save(asked.output)
    draw(asked.plot, lambda: found.plot("recall"))
    rows = [{**row, "cost": found[row["layer"], row["head"]]} for row in found.table()]
    if asked.html is not None:
        facts = {
            name: f"{value:.4g}" if isinstance(value, float) else str(value)
            for name, value in {**options, "seconds": seconds}.items()
        }
        costs = HeatMap.of(rows, "cost", "Cost of cutting a head, in nats a token", ".3f", by_root=True)
        title = f"Cost of cutting each head of {asked.model.name}"
        write_page(asked.html, title, facts, [costs], rows, _COSTS)
    if asked.as_json:
        outcome = {
            "file": str(asked.output),
            "model": type(model).__name__,
            **options,
            "share": found.share,
            "seconds": seconds,
        }
        outcome |= {"refined": None if asked.refine is None else str(asked.refine), "trials": found.trials}
        print_json("levattn.profile/1", {**outcome, "heads": rows})
        return
    console = new_console()
    console.print(table_of(rows, _COSTS))
    console.print(
        f"cost: rise of the loss, in nats a token, if the head is cut to {found.share:.3g}, for answers that must be "
        "recalled and for plain text; ±: half of a 95% confidence interval, over tasks."
    )
    console.print(f"seconds: {seconds:.3g}")


def compress_text(asked: Compression) -> None:
    """Run ``levattn compress``."""
    check_model_path(asked.model)
    for path, option in ((asked.output, "--output"), (asked.html, "--html")):
        check_output(path, option)
    words = read_text(asked.text)
    check_profile(asked.heads)
    model, tokenizer = opened_decoder(asked.model)
    from levattn.integrations.transformers import Prompt
    from levattn.integrations.transformers import compress as compressed

    heads, prompt = profile_of(model, asked.heads, asked.budget), Prompt(tokenizer)
    inputs = _tokens_of(asked, words, model, prompt)
    count = inputs["input_ids"].shape[1]
    start = time.perf_counter()
    how: dict[str, Any] = {"heads": heads, "chunk": asked.chunk, "bits": asked.bits, "progress": sys.stderr.isatty()}
    with told_of_recall(), forward_errors_in_one_line(asked.model, count):
        cache = compressed(model, inputs, asked.budget, **how)
    seconds = time.perf_counter() - start
    cache.save(asked.output)
    rows = cache.table()
    sliding = len({row["layer"] for row in rows if row["slides"]})
    sizes = {"positions": count, "bytes": cache.nbytes, "dense_bytes": cache.dense_nbytes, "seconds": seconds}
    if asked.html is not None:
        facts = dict(_facts(sizes))
        shares = HeatMap.of(rows, "share", "Share of its bytes that each head keeps", ".3f", top=1.0)
        text = _kept(cache, prompt, words)
        write_page(asked.html, f"{asked.text.name}, compressed", facts, [shares], rows, _KEPT_HEADS, text)
    if sliding:
        report(f"{sliding} of {len(cache.layers)} layers slide and keep their window, which the budget does not count")
    if asked.as_json:
        outcome = {"file": str(asked.output), "model": type(model).__name__, "budget": asked.budget}
        print_json("levattn.compress/1", {**outcome, "chunk": asked.chunk, **sizes, "heads": rows})
        return
    console = new_console()
    for name, value in _facts(sizes):
        console.print(f"{name}: {value}")


def _tokens_of(asked: Compression, words: str, model: Any, prompt: Any) -> dict[str, Any]:
    """Return the first tokens of a text, after the start of a message if the model has a chat template."""
    ids = prompt.document(words)["input_ids"]
    most = most_tokens(model, None)
    limit = most - min(_ROOM, most // 8) if asked.tokens is None else min(asked.tokens, most)
    count = ids.shape[1]
    own = prompt.tokenizer
    around = len(own(prompt.text_of(""), add_special_tokens=not prompt.has_template)["input_ids"])
    check_own_tokens(asked.text, words, own, min(count, limit), around)
    if count > limit and asked.tokens is None:
        report(f"{asked.text} has {count} tokens and the model {most} positions: the first {limit} tokens are read")
    return {"input_ids": ids[:, :limit]}


def _kept(cache: Any, prompt: Any, words: str) -> KeptText | None:
    """Return the text of a context with the number of cut heads that keep each token; None if it is unknown."""
    message, tokenizer = prompt.text_of(words), prompt.tokenizer
    if not tokenizer.is_fast:
        return None
    import torch

    P = cache.context_length
    kept, cut = torch.zeros(P, dtype=torch.long), 0
    for layer in cache.layers:
        for group in getattr(layer, "groups", ()):  # sliding layers have none
            if group.places.shape[2] < P:
                cut += len(group.heads)
                places = group.places[0].long().cpu()
                kept += torch.bincount(places[places >= 0], minlength=P)
    if not cut:
        return None
    spans = tokenizer(message, add_special_tokens=not prompt.has_template, return_offsets_mapping=True)[
        "offset_mapping"
    ][:P]
    pieces, done = [], 0
    for _, end in spans:  # tokens of one letter's bytes share a span; the first token gets the letter
        pieces.append(message[done:end])
        done = max(done, end)
    return KeptText(pieces, kept.tolist(), cut)


def _facts(sizes: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the figures of a compressed context, as text."""
    yield "positions", str(sizes["positions"])
    yield "bytes", f"{size_of(sizes['bytes'])} ({sizes['bytes'] / sizes['dense_bytes']:.1%} of dense)"
    yield "dense bytes", size_of(sizes["dense_bytes"])
    yield "seconds", f"{sizes['seconds']:.3g}"


def size_of(nbytes: int) -> str:
    """Return a number of bytes as text."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} bytes"
