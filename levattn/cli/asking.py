"""``levattn ask`` and ``levattn evaluate``: questions on a text that a decoder has read."""

from __future__ import annotations

import sys
import time
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levattn.cli.contexts import size_of
from levattn.cli.opened import (
    check_model_path,
    check_profile,
    forward_errors_in_one_line,
    opened_decoder,
    profile_of,
    read_text,
    told_of_recall,
)
from levattn.cli.output import check_output, fail, new_console, print_json, report, table_of, write_page

_MARK = BOM_UTF8.decode()  # with which some programs begin a text


@dataclass(frozen=True)
class Asking:
    """The options of ``levattn ask``."""

    model: Path
    context: Path
    question: str | None
    questions: Path | None
    follow: bool
    max_tokens: int
    as_json: bool


@dataclass(frozen=True)
class Trial:
    """The options of ``levattn evaluate``."""

    model: Path
    text: Path
    questions: Path | None
    budgets: list[float]
    scores: list[str] | None
    seeds: int
    heads: str
    method: str
    max_tokens: int
    as_json: bool
    html: Path | None


def ask(asked: Asking) -> None:
    """Run ``levattn ask``."""
    check_model_path(asked.model)
    if not asked.context.exists():
        fail(f"{asked.context}: no such file; make it with `levattn compress`")
    texts = iter([asked.question or ""]) if asked.questions is None else _lines(asked.questions)
    model, tokenizer = opened_decoder(asked.model)
    from levattn.integrations.transformers import CompressedCache, Prompt

    cache, prompt = CompressedCache.load(asked.context, model), Prompt(tokenizer)
    sizes = {"positions": cache.context_length, "bytes": cache.nbytes, "dense_bytes": cache.dense_nbytes}
    alone = asked.questions is None
    for text in texts:
        inputs = prompt.question(text, cache)
        if not text.strip() or not inputs["input_ids"].numel():  # a template gives tokens to an empty one as well
            fail("the question has no tokens; ask something")
        if not alone and not asked.as_json:
            sys.stdout.write(f"> {text}\n")
            sys.stdout.flush()
        clock = _Clock(None if asked.as_json else tokenizer)
        found = _answered(asked, model, cache if asked.follow else cache.copy(), inputs, clock)
        answer = found[0, inputs["input_ids"].shape[1] :]
        if asked.as_json:
            outcome = {"question": text, "answer": prompt.answers(found, inputs)[0]}
            times = {"first_seconds": clock.first, "token_seconds": clock.each}
            print_json("levattn.ask/1", {**outcome, "tokens": len(answer), **sizes, **times})
            sys.stdout.flush()
            continue
        each = "" if clock.each is None else f", {clock.each:.3g} seconds for each further one"
        report(
            f"context of {sizes['positions']} positions in {size_of(sizes['bytes'])}, dense "
            f"{size_of(sizes['dense_bytes'])}; {len(answer)} tokens, the first after {clock.first:.3g} seconds{each}"
        )


def _answered(asked: Asking, model: Any, cache: Any, inputs: Any, clock: Any) -> Any:
    """Return the question and its greedy answer in tokens."""
    from levattn.integrations.transformers.calls import greedy

    count = cache.get_seq_length() + inputs["input_ids"].shape[1]
    with forward_errors_in_one_line(asked.model, count, "ask a shorter question"):
        return cache.ask(model, inputs.to(model.device), streamer=clock, **greedy(model, asked.max_tokens))


class _Clock:
    """A streamer that notes the times of tokens, and shows their text if it has a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        import transformers

        self._shown = None
        if tokenizer is not None:
            self._shown = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._start = time.perf_counter()
        self._times: list[float] = []

    def put(self, tokens: Any) -> None:
        """Receive the prompt, and then each token."""
        self._times.append(time.perf_counter())
        if self._shown is not None:
            self._shown.put(tokens)

    def end(self) -> None:
        """Show the remaining text."""
        if self._shown is not None:
            self._shown.end()

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self._times[1] - self._start

    @property
    def each(self) -> float | None:
        """Seconds for each further token; None if there is none."""
        further = len(self._times) - 2
        return (self._times[-1] - self._times[1]) / further if further else None


def _lines(path: Path) -> Iterator[str]:
    """Return the lines of a file, or of standard input for "-" as they come, without empty ones."""
    if str(path) == "-":
        return _given()
    found = [line.strip(" \r") for line in read_text(path, "--questions").splitlines() if line.strip()]
    if not found:
        fail(f"{path} has no questions; write one on each line")
    return iter(found)


def _given() -> Iterator[str]:
    """Yield the lines of standard input."""
    count = 0
    try:
        for line in sys.stdin:
            if line.strip(_MARK + " \t\r\n"):
                count += 1
                yield line.strip(_MARK + " \r\n")
    except UnicodeDecodeError:
        fail("standard input is not UTF-8 text; convert it")
    if not count:
        fail("standard input has no questions; write one on each line")


def try_budgets(asked: Trial) -> None:
    """Run ``levattn evaluate``."""
    check_model_path(asked.model)
    check_output(asked.html, "--html")
    words = read_text(asked.text)
    check_profile(asked.heads)
    questions = None if asked.questions is None else _with_answers(_lines(asked.questions))
    model, tokenizer = opened_decoder(asked.model)
    from levattn.integrations.transformers import evaluate

    how: dict[str, Any] = {
        "budgets": sorted(asked.budgets, reverse=True),
        "scores": asked.scores,
        "seeds": asked.seeds,
        "heads": profile_of(model, asked.heads, min(asked.budgets)),
        "method": asked.method,
        "answer_tokens": asked.max_tokens,
        "progress": sys.stderr.isatty(),
    }
    with told_of_recall(), forward_errors_in_one_line(asked.model, len(words), "give a shorter text"):
        found = evaluate(model, tokenizer, words, questions, **how)
    at = found.changes_at
    if asked.html is not None:
        facts = {"positions": str(found.positions), "method": asked.method}
        facts["answers change at"] = "no budget" if at is None else str(at) if isinstance(at, int) else f"{at:g}"
        write_page(asked.html, f"{asked.text.name} with fewer bytes", facts, [], found.printed(), found.columns)
    if asked.as_json:
        outcome = {"positions": found.positions, "method": asked.method, "changes_at": at}
        print_json("levattn.evaluate/1", {**outcome, "budgets": found.table(), "answers": found.answers})
        return
    console = new_console()
    console.print(table_of(found.printed(), found.columns))
    console.print(found.legend)


def _with_answers(lines: Iterator[str]) -> list[str] | dict[str, str]:
    """Return questions, with the answers that follow them after a tab if there are any."""
    pairs = [line.partition("\t") for line in lines]
    for i, (question, _, _) in enumerate(pairs):
        if not question.strip():
            fail(f"question {i + 1} of --questions is empty; write it before the tab")
        if question.strip() in (earlier.strip() for earlier, _, _ in pairs[:i]):
            fail(f"--questions has {question.strip()!r} twice; ask each question once")
    known = [bool(answer.strip()) for _, _, answer in pairs]
    if any(known) and not all(known):
        fail("--questions has answers for some questions; write an answer after a tab for all of them, or for none")
    questions = [question.strip() for question, _, _ in pairs]
    if not all(known):
        return questions
    return dict(zip(questions, (answer.strip() for _, _, answer in pairs), strict=True))
