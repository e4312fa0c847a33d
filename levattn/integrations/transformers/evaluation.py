"""Compare the answers of a decoder on a document with its answers from fewer bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Any, Literal

import torch
import transformers

from levattn._core.checks import whole_number
from levattn._core.threads import reported
from levattn.attention import Selection
from levattn.attention.pruned.selection import as_selection, selection_for_models
from levattn.integrations.transformers.calls import (
    as_cache_of,
    check_generates,
    counting_from,
    greedy,
    inputs_device,
    time_on,
)
from levattn.integrations.transformers.compression.compress import compress
from levattn.integrations.transformers.compression.profile import selection_of_cache
from levattn.integrations.transformers.heads_table import in_columns
from levattn.integrations.transformers.interface import check_model
from levattn.integrations.transformers.prompt import Prompt
from levattn.integrations.transformers.pruning import prune

_PASSAGES = 16  # questions that are made up where none are given
_GIVEN, _EXPECTED = 24, 8  # tokens of a passage that a made-up question gives, and that a right answer begins with
_CONTINUED = 16  # tokens of an answer to it, at most
_CONTINUE = "Continue the text, word by word, from where these words stand in it."
_STEPS = 9  # tokens whose time is measured; the first one may allocate
_CONFIDENCE = 0.95
_DEFAULT = "default"  # stands for the scores of a selection that names none
_RANDOM = "random"  # the scores that seeds change
BUDGET_COLUMNS = {
    "budget": "budget",
    "scores": "scores",
    "share": "share:.1%",
    "MB": "megabytes:.4g",
    "seconds": "seconds:.3g",
    "s/token": "token_seconds:.3g",
    "changed": "changed:.0%",
    "±changed": "changed_spread:.0%",
    "limit": "changed_most:.0%",
    "loss": "loss:.3f",
    "±loss": "loss_spread:.3f",
    "worst": "worst_loss:.3f",
    "right": "right:.0%",
}


class Evaluation:
    """The answers of a decoder to questions on a document, with its dense cache and with smaller budgets.

    `evaluate` makes it.

    Attributes
    ----------
    rows : list of dict
        The rows that `table` returns.
    answers : list of dict
        A row for each row of `table` and question, with its ``budget``, ``scores`` and ``seed``. ``question`` and
        ``answer`` are texts. ``loss`` is the loss of the dense answer, in nats a token, less its loss with the dense
        cache. ``changed`` tells whether a token differs from the dense answer, and ``right`` whether the expected
        words occur (None without any).
    method : str
        "compress" or "prune".
    positions : int
        Tokens of the document.

    Examples
    --------
    >>> from levattn.integrations.transformers import Evaluation
    >>> figures = dict(nbytes=100, share=1.0, seconds=1.0, token_seconds=0.1, loss=0.0, worst_loss=0.0, right=None)
    >>> rows = [dict(budget=None, scores=None, seed=None, changed=0.0, changed_most=None, **figures)]
    >>> for seed, changed in enumerate((0.5, 0.6)):
    ...     rows += [dict(budget=0.1, scores="random", seed=seed, changed=changed, changed_most=0.9, **figures)]
    >>> found = Evaluation(rows, [], "compress", 1000)
    >>> found.changes_at, found.means()[1]["changed"], round(found.means()[1]["changed_spread"], 3)
    (0.1, 0.55, 0.071)
    """

    def __init__(self, rows: list[dict[str, Any]], answers: list[dict[str, Any]], method: str, positions: int) -> None:
        self.rows = rows
        self.answers = answers
        self.method = method
        self.positions = positions

    def table(self) -> list[dict[str, Any]]:
        """Return a row for the dense cache, and one for each budget, kind of scores and seed.

        Returns
        -------
        list of dict
            ``budget`` is None for the dense cache, and so are ``scores`` if none were given, and ``seed`` if nothing
            is drawn. ``nbytes`` are the bytes of the cache, and ``share`` is their share of the dense ones.
            ``seconds`` is the time to read the document, and to compress it. ``token_seconds`` is the median time of a
            further token. ``changed`` is the share of the answers in which a token differs. ``changed_most`` is its
            upper limit by Clopper and Pearson, with a confidence of 95 %, for questions of the same kind. ``loss`` is
            the mean rise of the loss of the dense answers, in nats a token, and ``worst_loss`` the largest. ``right``
            is the share of the expected answers that occur, None without any.
        """
        return [dict(row) for row in self.rows]

    def means(self) -> list[dict[str, Any]]:
        """Return a row for the dense cache, and one for each budget and kind of scores: means over the seeds.

        Returns
        -------
        list of dict
            The keys of `table` without ``seed``, where ``changed_most`` and ``worst_loss`` are the largest. ``seeds``
            is their number. ``changed_spread`` and ``loss_spread`` are standard deviations over them, None for one.
        """
        groups: list[list[dict[str, Any]]] = []
        for row in self.rows:
            if not row["seed"]:  # None or the first
                groups.append([])
            groups[-1].append(row)
        return [_mean(rows) for rows in groups]

    @property
    def changes_at(self) -> Any:
        """The largest budget at which an answer changed (if all are numbers, else the first); None if none did.

        Of several kinds of scores it is the first kind's.
        """
        first = [row["scores"] for row in self.rows if row["budget"] is not None][:1]
        rows = [row for row in self.rows if row["changed"] and [row["scores"]] == first]
        found = [row["budget"] for row in rows]
        numbers = found and all(isinstance(budget, int | float) for budget in found)
        return max(found) if numbers else next(iter(found), None)

    def __str__(self) -> str:
        return f"{in_columns(self.printed(), self.columns)}\n{self.legend}"

    def printed(self) -> list[dict[str, Any]]:
        """Return the rows of `means` as they are shown.

        Returns
        -------
        list of dict
            Rows in which ``budget`` is a text, with ``megabytes``.
        """
        return [{**row, "budget": _shown(row["budget"]), "megabytes": row["nbytes"] / 1e6} for row in self.means()]

    @property
    def columns(self) -> dict[str, str]:
        """The columns that are shown: headings, with keys of a row of `printed` and formats."""
        hidden = set() if any(row["scores"] is not None for row in self.rows) else {"scores"}
        if all(row["seed"] in (None, 0) for row in self.rows):
            hidden |= {"±changed", "±loss"}
        return {heading: column for heading, column in BUDGET_COLUMNS.items() if heading not in hidden}

    @property
    def legend(self) -> str:
        """One sentence on the columns."""
        count, seeds = sum(row["budget"] is None for row in self.answers), max(row["seeds"] for row in self.means())
        spread = f" ±: standard deviation over {seeds} seeds; the other columns are means over them."
        return (
            f"{count} questions on {self.positions} tokens. changed: answers with another token than the dense ones; "
            "limit: the same at most, with a confidence of 95%, for questions like these; loss: rise of the loss of "
            "the dense answers, in nats a token, in the mean and the worst case; right: expected answers that occur."
            f"{spread if seeds > 1 else ''}"
        )

    def __repr__(self) -> str:
        at = self.changes_at
        found = "no answer changed" if at is None else f"answers change from {_shown(at)} on"
        kinds = len({row["scores"] for row in self.rows[1:]})
        budgets = f"{(len(self.means()) - 1) // max(1, kinds)} budgets"
        of = f"{budgets} and {kinds} kinds of scores" if kinds > 1 else budgets
        return f"<Evaluation of {self.method} at {of}: {found}>"


@dataclass(frozen=True)
class _Trial:
    """A budget, kind of scores and seed of a row, and the selection that they are."""

    budget: Any
    scores: Any
    seed: int | None
    selection: Any

    @property
    def named(self) -> dict[str, Any]:
        """The first entries of a row."""
        return {"budget": self.budget, "scores": self.scores, "seed": self.seed}


_DENSE = _Trial(None, None, None, None)


@dataclass(frozen=True)
class _Question:
    """A question in tokens (1, m), as text, the answer that is expected, if any, and the most tokens of an answer."""

    ids: Any
    text: str
    expected: str | None
    count: int


@dataclass(frozen=True)
class _Answer:
    """An answer in tokens (k,), the loss of the dense one in nats a token, and whether the two differ."""

    tokens: Any
    loss: float
    changed: bool


@dataclass(frozen=True)
class _Reading:
    """A document that was read: its cache, the seconds that it took, and how to fork it."""

    model: Any
    tokens: Any
    cache: Any
    seconds: float

    def fork(self) -> Any:
        """Return a cache for one question."""
        return self.cache.copy() if hasattr(self.cache, "ask") else copy.deepcopy(self.cache)

    def answer(self, question: Any, count: int) -> Any:
        """Return the tokens of a greedy answer, (k,)."""
        whole = torch.cat([self.tokens, question], 1)
        given = {"attention_mask": torch.ones_like(whole), **as_cache_of(self.model, self.fork())}
        return self.model.generate(whole, **greedy(self.model, count), **given)[0, whole.shape[1] :]

    def log_p(self, question: Any, answer: Any) -> Any:
        """Return the log-probabilities of all tokens at the places of an answer (rows)."""
        logits = self._read(torch.cat([question, answer[None]], 1), self.fork())
        return logits[-len(answer) - 1 : -1].double().log_softmax(-1)

    def token_seconds(self, question: Any, answer: Any) -> float:
        """Return the median time of a further token."""
        cache, times = self.fork(), []
        self._read(question, cache)
        for place in range(_STEPS):
            token, start = answer[place % len(answer)], time_on(self.model.device)
            self._read(token.reshape(1, 1), cache)
            times.append(time_on(self.model.device) - start)
        return median(times[1:])

    def _read(self, ids: Any, cache: Any) -> Any:
        return self.model(ids, **as_cache_of(self.model, cache)).logits[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        own = getattr(self.cache, "nbytes", None)
        if own is not None:
            return int(own)
        held = [(layer.keys, layer.values) for layer in self.cache.layers]
        return sum(part.numel() * part.element_size() for pair in held for part in pair)


def evaluate(
    model: Any,
    tokenizer: Any,
    document: str,
    questions: Sequence[str] | Mapping[str, str] | None = None,
    *,
    budgets: Iterable[Any] = (0.5, 0.25, 0.12, 0.06, 0.03),
    scores: Iterable[Any] | None = None,
    seeds: int = 1,
    method: Literal["compress", "prune"] = "compress",
    answer_tokens: int = 32,
    progress: bool | Callable[[int, int | None], None] | None = None,
    **options: Any,
) -> Evaluation:
    """Ask a decoder about a document, with its dense cache and with smaller budgets, and compare the answers.

    The model reads the document once densely and once for each budget, as `compress` reads it, or pruned by `prune`.
    Then it answers each question by greedy decoding on a copy of each cache. An answer counts as changed if one of its
    tokens differs. So a changed answer may say the same in other words. The loss of the dense
    answer tells how far the model has moved, also where no token changed.

    **Guarantee.** None beyond these questions. ``changed_most`` is a limit for further questions *drawn as these
    were*: with 16 questions and no change it is 17 %, with 60 questions 5 %.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder, in evaluation mode. It stays as it is.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer. `Prompt` puts its chat template around document and questions, if it has one.
    document : str
        The text.
    questions : sequence of str, or mapping of str to str, optional
        Questions, or questions and words that a right answer contains (case and spaces do not matter). By default 16
        passages from all parts of the document: 24 tokens are given, and the model is to continue them, by at most 16.
        A right answer contains the next 8 tokens of the document. So these questions need recall to the letter.
    budgets : iterable, default (0.5, 0.25, 0.12, 0.06, 0.03)
        The arguments `selection` of `compress` or `prune`, largest first.
    scores : iterable, optional
        Kinds of scores to compare at each budget: names and functions that a `Selection` takes, published rules among
        them. None or "default" are the scores that a budget has by itself. Budgets are then numbers, or selections
        without scores.
    seeds : int, default 1
        Number of seeds, from 0 on, of the scores "random".
    method : {"compress", "prune"}, default "compress"
        Compress the cache after dense reading, or prune the attention while reading and answering. `prune` reads the
        first 1536 positions, texts of at most 2560 and short answers densely unless selections have a `start`.
    answer_tokens : int, default 32
        Maximum number of tokens of an answer.
    progress : bool or function, optional
        True for a bar, or a function of the answers compared and their number.
    **options
        Options of `compress` or `prune`, such as ``heads="auto"``.

    Returns
    -------
    Evaluation
        ``print`` shows a table. ``evaluation.answers`` has all texts, and ``changes_at`` the largest budget at which
        an answer changed.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range, or the model is in training mode. If `compress` or `prune` refuses the model or
        an option. If document, question and answer have more tokens than the model has positions.

    Notes
    -----
    Time: for each budget, kind of scores and seed one reading and one pass over each question with its dense answer.
    Each changed answer takes `answer_tokens` steps more. Memory: two caches of the document and the compressed one.

    References
    ----------
    The limit of a share: Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the
    binomial", Biometrika 26, 1934.

    Examples
    --------
    >>> from levattn.integrations.transformers import evaluate
    >>> found = evaluate(model, tokenizer, text, ["Who wrote the letter?"], heads=profile)  # doctest: +SKIP
    >>> print(found)  # doctest: +SKIP
    >>> rules = ["default", "snapkv", "random"]
    >>> found = evaluate(model, tokenizer, text, budgets=[0.25, 0.12], scores=rules, seeds=5)  # doctest: +SKIP
    """
    check_model(model)
    check_generates(model)
    if model.training:
        raise ValueError("model is in training mode; expected evaluation mode. Call eval()")
    if method not in ("compress", "prune"):
        raise ValueError(f"method is {method!r}; expected 'compress' or 'prune'")
    if not isinstance(document, str) or not document.strip():
        raise TypeError(f"document is {document!r:.50}; expected a text")
    count = whole_number("answer_tokens", answer_tokens)
    if isinstance(budgets, str | Mapping) or not isinstance(budgets, Iterable):
        raise TypeError(f"budgets is {budgets!r}; expected a list of budgets, such as [0.25, 0.12]")
    trials = list(_trials(list(budgets), scores, seeds, method))
    prompt, device = Prompt(tokenizer), inputs_device(model)
    tokens = prompt.document(document)["input_ids"].to(device)
    asked = list(_questions(prompt, questions, document, count, device))
    _check_length(model, tokens.shape[1] + max(each.ids.shape[1] + max(each.count, _STEPS) for each in asked))
    rows, answers, told = [], [], []
    steps = len(asked) * (1 + len(trials))
    with torch.no_grad(), counting_from(model, {}), reported(progress, steps, "answers") as advance:
        dense = _read_densely(model, tokens)
        for each in asked:
            told.append(_told(dense, each, None))
            answers.append(_row(prompt, _DENSE, each, told[-1]))
            advance(1)
        first, of_dense = (asked[0].ids, told[0].tokens), dense.nbytes
        rows.append(_summary(_DENSE, dense, of_dense, answers, dense.token_seconds(*first)))
        del dense
        for trial in trials:
            with _read_with(model, tokens, trial.selection, method, options) as reading:
                new = []
                for each, own in zip(asked, told, strict=True):
                    new.append(_row(prompt, trial, each, _told(reading, each, own)))
                    advance(1)
                rows.append(_summary(trial, reading, of_dense, new, reading.token_seconds(*first)))
            answers += new
    return Evaluation(rows, answers, method, int(tokens.shape[1]))


def _trials(budgets: list[Any], scores: Any, seeds: Any, method: str) -> Iterator[_Trial]:
    """Yield what is compared, or raise."""
    if not budgets:
        raise ValueError("budgets is empty; expected at least one, such as 0.25")
    count = whole_number("seeds", seeds)
    if isinstance(scores, str | Mapping) or not isinstance(scores, Iterable | None):
        raise TypeError(f'scores is {scores!r}; expected a list of scores, such as ["default", "snapkv"], or None')
    kinds = None if scores is None else [None if _is(kind, _DEFAULT) else kind for kind in scores]
    if count > 1 and not any(_is(kind, _RANDOM) for kind in kinds or ()):
        raise ValueError(
            f'seeds is {count}, and scores is {scores!r}; expected "random" among scores, as no others have seeds'
        )
    if kinds is None:
        for place, budget in enumerate(budgets):
            if not isinstance(budget, Mapping):
                _check_selection(budget, f"budgets[{place}]", method)
            yield _Trial(budget, None, None, budget)
        return
    for kind in kinds:
        if kind is not None and not isinstance(kind, str) and not callable(kind):
            raise TypeError(f"scores has a {type(kind).__name__}; expected names and functions of keys and values")
    if not kinds or len({_named(kind) for kind in kinds}) < len(kinds):
        raise ValueError(f"scores is {scores!r}; expected at least one, and each name once, of functions too")
    for place, budget in enumerate(budgets):
        name = f"budgets[{place}]"
        if isinstance(budget, Mapping) or (isinstance(budget, Selection) and budget.scores is not None):
            shown = f"{name} is {budget!r}"
            raise ValueError(f"{shown:.80}, and scores is given; expected a number, or a Selection without scores")
        base = as_selection(budget, name)
        for kind in kinds:
            for seed in range(count) if _is(kind, _RANDOM) else [None]:
                own = replace(base, scores=kind if seed is None else f"{_RANDOM}:{seed}")
                _check_selection(own, name, method)
                yield _Trial(budget, _named(kind), seed, own)


def _check_selection(selection: Any, name: str, method: str) -> None:
    """Raise for a selection that `compress` or `prune` refuses, before a model reads anything."""
    if method == "prune":
        selection_for_models(selection, name)
    else:
        selection_of_cache(name, selection)


def _is(kind: Any, name: str) -> bool:
    """Tell whether a kind of scores, which may be anything, is the one with a name."""
    return isinstance(kind, str) and kind == name


def _questions(prompt: Prompt, questions: Any, document: str, count: int, device: Any) -> Iterator[_Question]:
    """Yield the questions, or passages of the document if there are none, or raise."""
    if questions is None:
        yield from _passages(prompt, document, min(count, _CONTINUED), device)
        return
    if isinstance(questions, str) or not isinstance(questions, Sequence | Mapping) or not questions:
        raise TypeError(
            f"questions is {questions!r:.50}; expected a sequence of texts, a mapping from them to expected answers, "
            "or None"
        )
    for text in questions:
        expected = questions[text] if isinstance(questions, Mapping) else None
        empty = not isinstance(text, str) or not text.strip() or (isinstance(expected, str) and not expected.strip())
        if empty or not isinstance(expected, str | None):
            raise TypeError(f"questions has {text!r:.50}: {expected!r:.50}; expected texts that are not empty")
        yield _Question(prompt.question(text)["input_ids"].to(device), text, expected, count)


def _passages(prompt: Prompt, document: str, count: int, device: Any) -> Iterator[_Question]:
    """Yield questions to continue passages from all parts of a document."""
    tokenizer = prompt.tokenizer
    ids = tokenizer(document, add_special_tokens=False, return_tensors="pt")["input_ids"].long()
    room = ids.shape[1] - 2 * _GIVEN
    if room < 1:
        raise ValueError(
            f"document has {ids.shape[1]} tokens; expected more than {2 * _GIVEN} to make up questions. Give questions"
        )
    start = prompt.question(_CONTINUE if prompt.has_template else "")["input_ids"]
    for place in sorted({int(x) for x in torch.linspace(0, room - 1, _PASSAGES)}):
        given, rest = ids[:, place : place + _GIVEN], ids[0, place + _GIVEN :][: min(_EXPECTED, count)]
        text, expected = (tokenizer.decode(part, skip_special_tokens=True) for part in (given[0], rest))
        yield _Question(torch.cat([start, given], 1).to(device), text, expected, count)


def _check_length(model: Any, positions: int) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and positions > most:
        raise ValueError(
            f"document, question and answer have up to {positions} tokens, and the model has {most} positions; "
            "expected no more. Give a shorter document"
        )


def _read_densely(model: Any, tokens: Any) -> _Reading:
    """Read a document into a cache of transformers."""
    base = model.base_model
    base(tokens[:, :_STEPS], use_cache=True)  # the first call makes buffers
    start, cache = time_on(model.device), transformers.DynamicCache(config=model.config)
    base(tokens, use_cache=True, **as_cache_of(base, cache))
    return _Reading(model, tokens, cache, time_on(model.device) - start)


@contextmanager
def _read_with(model: Any, tokens: Any, budget: Any, method: str, options: dict[str, Any]) -> Iterator[_Reading]:
    """Give a document that was read with a budget; a pruned model stays pruned meanwhile."""
    if method == "prune":
        with prune(model, budget, **{"measure": False} | options):
            yield _read_densely(model, tokens)
        return
    start = time_on(model.device)
    cache = compress(model, tokens, budget, **options)
    yield _Reading(model, tokens, cache, time_on(model.device) - start)


def _told(reading: _Reading, question: _Question, dense: _Answer | None) -> _Answer:
    """Return the answer to a question; `dense`: the answer of the dense cache, or None for that answer itself."""
    own = reading.answer(question.ids, question.count) if dense is None else dense.tokens
    log_p = reading.log_p(question.ids, own)
    loss = -float(log_p.gather(1, own[:, None]).mean())
    if dense is None:
        return _Answer(own, loss, changed=False)
    if bool((log_p.argmax(1) == own).all()):
        return _Answer(own, loss - dense.loss, changed=False)
    found = reading.answer(question.ids, question.count)
    return _Answer(found, loss - dense.loss, changed=not torch.equal(found, own))


def _row(prompt: Prompt, trial: _Trial, question: _Question, answer: _Answer) -> dict[str, Any]:
    """Return the row of an answer."""
    text = str(prompt.tokenizer.decode(answer.tokens, skip_special_tokens=True))
    right = None if question.expected is None else _plain(question.expected) in _plain(text)
    loss = 0.0 if trial is _DENSE else answer.loss
    told = {"question": question.text, "answer": text}
    return {**trial.named, **told, "loss": loss, "changed": answer.changed, "right": right}


def _summary(trial: _Trial, reading: _Reading, of_dense: int, answers: list[dict[str, Any]], seconds: float) -> Any:
    """Return the row of a trial."""
    changed = sum(row["changed"] for row in answers)
    known = [row["right"] for row in answers if row["right"] is not None]
    losses = [row["loss"] for row in answers]
    return {
        **trial.named,
        "nbytes": reading.nbytes,
        "share": reading.nbytes / of_dense,
        "seconds": reading.seconds,
        "token_seconds": seconds,
        "changed": changed / len(answers),
        "changed_most": None if trial is _DENSE else _most(changed, len(answers)),
        "loss": fmean(losses),
        "worst_loss": max(losses),
        "right": fmean(known) if known else None,
    }


def _mean(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of rows that differ in their seed."""
    found = {name: value for name, value in rows[0].items() if name != "seed"}
    for name in ("nbytes", "share", "seconds", "token_seconds", "changed", "loss", "right"):
        if found[name] is not None and len(rows) > 1:
            found[name] = fmean(row[name] for row in rows)
    for name in ("changed_most", "worst_loss"):
        if found[name] is not None:
            found[name] = max(row[name] for row in rows)
    spread = dict.fromkeys(("changed_spread", "loss_spread"))
    if len(rows) > 1:
        spread = {name: stdev(row[name.partition("_")[0]] for row in rows) for name in spread}
    return {**found, "seeds": len(rows), **spread}


def _named(scores: Any) -> str:
    """Return the name of a kind of scores."""
    return (
        _DEFAULT if scores is None else scores if isinstance(scores, str) else getattr(scores, "__name__", str(scores))
    )


def _most(changed: int, count: int) -> float:
    """Return Clopper and Pearson's upper limit of a share of which `changed` of `count` were seen."""
    from scipy.special import betaincinv

    return 1.0 if changed == count else float(betaincinv(changed + 1, count - changed, _CONFIDENCE))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _shown(budget: Any) -> str:
    return "dense" if budget is None else f"{budget:.3g}" if isinstance(budget, float) else str(budget)
