"""Which keys a query of pruned attention reads: the selection that a user asks for, and the slots that it gives."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import numpy as np

from levattn._core.arrays import is_torch, on_cuda
from levattn._core.cached import cached_property
from levattn._core.checks import check_bool, check_epsilon, whole_number
from levattn.attention.arguments import namespace_of
from levattn.attention.pruned.baselines import BASELINES, asks_queries, baseline_of
from levattn.exceptions import NonFiniteError
from levattn.functions import Power

SCORES = ("residual", "expected", "leverage")

_OF_KEYS = [name for name, rule in BASELINES.items() if rule.function is not None]
BY_ATTENTION = "attention"  # the scores that need the attention of given queries

_CHUNK = 64  # positions between two selections of causal attention by default
_STRIDE = 4  # of the positions whose queries causal selections go by, at most
_LEAST_QUERIES = 256  # positions before the first selection for each unit of the stride
_NONE = np.zeros(0, np.int64)
_NEAR = 8  # keys on each side of a query at most, where a budget is split
MOST_SUMMARIES = 256  # of a head at most, where a budget is split: more cost time without gain (examples/decoders)
SINKS, LAST = 4, 0.25  # of a cache: sinks, and the share of the others that the last keys get
FITTED_SINKS = 1  # of fitted slots, which are chosen by attention: it finds further sinks where there are any


@dataclass(frozen=True)
class Slots:
    """The slots that each query of `pruned_attention` has, by their kinds; `Selection.slots` returns them.

    Attributes
    ----------
    selected : int
        Keys chosen by their scores, for each head of the keys.
    summaries : int
        Clusters that stand for all keys that are neither selected nor first.
    window : int
        Keys near a query. Not causal: on each side of it, which takes ``2 window + 1`` slots (none for 0).
        Causal: at least this many keys before the last selection.
    sinks : int
        Number of first keys of the sequence, kept whatever their scores.
    chunk : int
        Causal: positions between two selections; a query reads the keys since the last one up to its own. Else 0.

    Examples
    --------
    >>> from levattn.attention import Selection
    >>> Selection(0.2).slots(512)
    Slots(selected=17, summaries=68, window=8, sinks=0, chunk=0)
    >>> Selection(0.2).slots(512).total
    102
    """

    selected: int
    summaries: int = 0
    window: int = 0
    sinks: int = 0
    chunk: int = 0

    @property
    def total(self) -> int:
        """The largest number of slots of a query; causal: of a query after the first selection."""
        near = self.window + self.chunk if self.chunk else (2 * self.window + 1 if self.window else 0)
        return self.selected + self.summaries + self.sinks + near


@dataclass(frozen=True, repr=False, eq=False)
class Selection:
    """Which keys a query reads exactly, and how many summaries stand for the others.

    All functions, layers and integrations that prune attention take one. A bare number stands for
    ``Selection(number)``. **Units**: an int is a count, a float in (0, 1] is a share.

    Parameters
    ----------
    budget : int or float, optional
        Slots for each query: their number, at least 2, or a share of the keys. `slots` tells how the other options,
        where they are None, split it. Give one of budget, size and epsilon.
    size : int or float, optional
        Number or share of the keys that are selected for each head: the keys with the largest scores, on ties the
        first. A share selects at least one key.
    epsilon : float, optional
        Threshold: selects all keys with a score of at least this. With ``scores="leverage"`` and ``center=False``
        these are the `levattn.universal_set` of the keys for f(x) = x².
    summaries : int or float, optional
        Number of clusters of the other keys, or a share of the budget's slots without the sinks. 0 drops these keys.
        It is the default without a budget.
    window : int or float, optional
        Number of keys near a query, as in `Slots`, or the share that they have of the budget's slots without the
        sinks. 0 without a budget. In a cache and in `fit_slots` these are the last positions.
    sinks : int or float, optional
        Number of first keys that are kept whatever their scores, or a share of the budget's slots. The default is 0,
        4 for a budget of a cache or of causal attention, and 1 for a budget whose slots are fitted.
    scores : str, array or function, optional
        The scores that select keys. None is "attention" in `fit_slots` and "residual" elsewhere. "attention", which
        `fit_slots` alone takes: the largest weight that a query of its gives to a key. "expected": the
        logarithm of the expected weight for a normal query with the mean and covariance of the given queries [1]_.
        "residual": the expected score plus the logarithm of the squared distance to the center of the key's own
        cluster. The center is the mean of nearby keys; for causal attention it is a key or an earlier summary. The
        distance is the change of the queries' logits, so keys that a summary would get wrong score high. "leverage":
        leverage scores, whatever the queries. An array of shape (..., G, n): your own scores, for operators. A
        function: your own scores of keys (b, n, d) with values (b, n, D), an array (b, n). It gets the unmasked keys
        of several heads and sequences, JAX's as arrays of numpy. For causal attention it is called at each selection,
        with the kept keys and the new ones. The notes have names of published rules, and functions of queries.
    center : bool, optional
        Whether to subtract the mean key before leverage scores are computed. The default is True for softmax, which
        the mean does not change. It changes other functions, so these take False only. An offset of all keys changes
        no selection, however large.
    renew_every : int, optional
        Causal: positions between two selections. None: with a budget as in `slots`, else 64; a cache then never
        selects among the tokens after its context.
    start : int, optional
        Causal: positions before the first selection, at least. They read all keys before them. The first selection
        also waits for twice as many positions as there are slots (with a threshold, for a chunk). None: 0 for
        functions and layers, and 1536 for `levattn.integrations.transformers.prune`, because shorter texts are read
        as fast without pruning. It then also reads texts that end within 1024 positions after that, and short calls
        after others, with all keys. Selections go by the queries so far. If at least 512 positions come before the
        first one, every second query counts, and from 1024 on every fourth.

    Raises
    ------
    TypeError, ValueError
        If an option has a wrong type or is out of range, or more than one of budget, size and epsilon is given. A
        budget of 1 is refused, because it may mean one slot or all keys.

    See Also
    --------
    levattn.attention.pruned_attention : Attention to selected keys.

    Notes
    -----
    A record of options: time O(1), and no memory beside scores of your own.

    Published rules are baselines to compare with. They bring their own sinks and window where these are None, as many
    as there is room for, and no summaries. Three need keys alone:

    - "random" or "random:3": random numbers by the seed 0 or 3. They are functions of the keys, so that the same keys
      have the same numbers in any order.
    - "norm": keys with small norms [2]_.
    - "streaming": the first 4 keys, and the last keys in all other slots [3]_. It needs a budget.

    Three need the queries of a context, which `levattn.integrations.transformers.compress` alone has:

    - "h2o": the sum of the attention of all queries. The last keys have half of a budget [4]_.
    - "snapkv": the attention of the last 32 queries, as maxima over 7 neighbors. The last 32 keys stay, or the last
      ones alone in fewer slots [5]_.
    - "tova": the attention of the last query, as a mean over the heads of a layer [6]_.

    Your own rule may need queries too. A function with a parameter Q, such as ``lambda K, V, Q: ...``, gets queries
    (b, g, n, d) of the g heads that share the keys. Query i has the position of key i. Queries come times the scale,
    so that ``Q @ K[:, None].mT`` are logits. A call has all heads of a layer, in one sequence, with this function. A
    `functools.partial` that binds Q gets no queries. Only `compress` calls functions of queries.

    References
    ----------
    .. [1] Devoto, Jeblick and Jégou, "Expected Attention", arXiv:2510.00636.
    .. [2] Devoto, Zhao, Scardapane and Minervini, "A Simple and Effective L2 Norm-Based Strategy for KV Cache
       Compression", arXiv:2406.11430.
    .. [3] Xiao, Tian, Chen, Han and Lewis, "Efficient Streaming Language Models with Attention Sinks",
       arXiv:2309.17453.
    .. [4] Zhang et al., "H2O: Heavy-Hitter Oracle", arXiv:2306.14048.
    .. [5] Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv:2404.14469.
    .. [6] Oren, Hassid, Yarden, Adi and Schwartz, "Transformers are Multi-State RNNs", arXiv:2401.06104.

    Examples
    --------
    >>> import numpy as np
    >>> from levattn.attention import Selection, pruned_attention
    >>> Q, K, V = np.random.default_rng(0).standard_normal((3, 500, 16))
    >>> pruned_attention(Q, K, V, Selection(0.2, window=4, scores="leverage")).shape
    (500, 16)
    >>> long_keys = Selection(size=20, scores=lambda K, V: (K**2).sum(2))
    >>> pruned_attention(Q, K, V, long_keys).shape
    (500, 16)
    """

    budget: float | None = None
    _: KW_ONLY
    size: float | None = None
    epsilon: float | None = None
    summaries: float | None = None
    window: float | None = None
    sinks: float | None = None
    scores: Any = None
    center: bool | None = None
    renew_every: int | None = None
    start: int | None = None

    def __post_init__(self) -> None:
        given: dict[str, Any] = dict(vars(self))
        parts, epsilon, kind = ("summaries", "window", "sinks"), given["epsilon"], self.kind
        for name in ("budget", "size", *parts):
            if given[name] is not None:
                given[name] = _number(name, given[name], above=-1.0 if name in parts else 0.0)
        if sum(given[name] is not None for name in ("budget", "size", "epsilon")) > 1:
            raise _not_one(self)
        if given["budget"] in (0, 1) and isinstance(given["budget"], int):
            raise ValueError(
                f"budget is {given['budget']}; expected at least 2 slots, or a share of the keys in (0, 1], which is "
                "1.0 for all keys. For one key give size=1"
            )
        for name in parts:
            if isinstance(given[name], float) and (given["size"] is not None or epsilon is not None):
                raise ValueError(
                    f"{name} is {given[name]!r}, a share of the budget's slots; expected a count where no budget is"
                )
        if given["renew_every"] is not None:
            given["renew_every"] = whole_number("renew_every", given["renew_every"], 1)
        if given["start"] is not None:
            given["start"] = whole_number("start", given["start"], 0)
        if epsilon is not None:
            if isinstance(epsilon, bool) or not isinstance(epsilon, Real) or not math.isfinite(epsilon):
                raise ValueError(f"epsilon is {epsilon!r}; expected a finite number, a threshold of scores")
            given["epsilon"] = float(epsilon)
            if kind == "leverage":
                check_epsilon(epsilon)
        rule = baseline_of(self.scores)
        if isinstance(self.scores, str) and rule is None and self.scores not in (*SCORES, BY_ATTENTION):
            names = ", ".join((*SCORES, f"{BY_ATTENTION} (in fit_slots alone)", *BASELINES))
            raise ValueError(
                f"scores is {self.scores!r}; expected one of {names}, random:SEED, or your own: a function of keys "
                "and values, or for operators an array"
            )
        without = given["budget"] is None and (given["size"] is not None or epsilon is not None)
        if rule is not None and isinstance(rule.window, float) and given["window"] is None and without:
            raise ValueError(
                f"scores is {kind!r}, whose last keys are a share of a budget, and there is none; expected budget, or "
                "a number as window"
            )
        if given["center"] is not None:
            if not isinstance(given["center"], bool | np.bool_):
                raise TypeError(f"center is {self.center!r}; expected True, False or None")
            given["center"] = bool(given["center"])
            if kind != "leverage":
                raise ValueError(
                    f'center is {given["center"]} and scores is {kind!r}; expected center only with scores="leverage"'
                )
        vars(self).update(given)  # numbers and flags of Python

    def __repr__(self) -> str:
        shown = [f"{name}={value!r}" for name, value in vars(self).items() if value is not None]
        return f"Selection({', '.join(shown).removeprefix('budget=')})"

    def _known(self) -> tuple[Any, ...]:
        """Return the options to compare: with types, as 1 and 1.0 differ, and a user's own scores by identity."""
        scores = self.scores if self.scores is None or isinstance(self.scores, str) else id(self.scores)
        return (*((type(value), value) for name, value in vars(self).items() if name != "scores"), scores)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selection) and self._known() == other._known()

    def __hash__(self) -> int:
        return hash(self._known())

    @property
    def kind(self) -> str:
        """The name of the scores, "given" for an array and "function" for a function; "residual" for None."""
        if self.scores is None or isinstance(self.scores, str):
            return self.scores or "residual"
        return "function" if callable(self.scores) else "given"

    def slots(self, n: int, *, causal: bool = False) -> Slots:
        """Return the slots of a query among n keys.

        A budget that covers all keys selects all, and splits nothing. Else, where options are None, two fifths at most
        go to the keys near a query. Four fifths of the rest go to summaries, up to 256. Scores select keys for the
        remaining slots. (On a pretrained encoder near keys matter most with few slots, and summaries with many;
        examples/pruning.) If causal, half of the slots goes to the keys before the last selection, and a quarter to
        the positions since then. A sixteenth goes to summaries (examples/decoders), and sinks are 4 at most. In a
        compressed cache the last positions get a quarter of the slots, and summaries half. `fit_slots` selects keys in
        place of these.

        Parameters
        ----------
        n : int
            Number of keys.
        causal : bool, default False
            Whether the attention is causal.

        Returns
        -------
        Slots
            Slots whose ``total`` is the budget, if there is one.

        Raises
        ------
        TypeError, ValueError
            If no budget, size or epsilon is given, or the options take more slots than the budget has. Also if n is no
            number of keys.

        Examples
        --------
        >>> from levattn.attention import Selection
        >>> Selection(64).slots(1000, causal=True)
        Slots(selected=8, summaries=4, window=32, sinks=4, chunk=16)
        """
        check_bool(causal=causal)
        return slots_for(self, whole_number("n", n, 0), causal=causal)


def with_usual(selection: Selection) -> Selection:
    """Return a selection with the options of its published rule where they are None, if its scores are one."""
    rule = baseline_of(selection.scores)
    if rule is None:
        return selection
    usual: dict[str, Any] = {"sinks": rule.sinks, "window": rule.window, "summaries": 0}
    return replace(selection, **{name: value for name, value in usual.items() if getattr(selection, name) is None})


def function_of(selection: Selection) -> Callable[[Any, Any], Any] | None:
    """Return the function of keys and values that scores are: a user's own, or of a published rule; or None."""
    rule = baseline_of(selection.scores)
    if rule is not None:
        return rule.function
    return selection.scores if selection.kind == "function" else None


def as_selection(selection: Any, name: str = "selection", *, fitted: bool = False, queries: bool = False) -> Selection:
    """Return a selection, or the selection of a bare number; raise for anything else.

    fitted: whether slots are fitted to queries, whose attention may select keys then. queries: whether there are the
    queries of a context.
    """
    if isinstance(selection, Selection):
        if selection.kind == BY_ATTENTION and not fitted:
            raise ValueError(
                f'{name} has scores="attention", which levattn.attention.fit_slots alone takes, for its queries; '
                f"expected one of {', '.join(SCORES)}, or your own scores"
            )
        if not queries and asks_queries(selection.scores):
            shown = f"scores={selection.kind!r}" if isinstance(selection.scores, str) else "a function of queries"
            raise ValueError(
                f"{name} has {shown}, which scores the keys of a context by its queries once it is read; "
                "levattn.integrations.transformers.compress alone does so. Expected one of "
                f"{', '.join((*SCORES, *_OF_KEYS))}, or your own scores of keys and values"
            )
        return selection
    if isinstance(selection, bool) or not isinstance(selection, int | float | np.integer | np.floating):
        raise TypeError(
            f"{name} is of type {type(selection).__name__}; expected a Selection, or a number of slots or a share of "
            "the keys as its budget, as in Selection(0.25, window=8)"
        )
    try:
        return Selection(selection)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def selection_for_models(selection: Any, name: str, *, queries: bool = False) -> Selection:
    """Return a selection, or raise if it has scores of certain keys, which a model does not have twice."""
    found = as_selection(selection, name, queries=queries)
    if found.kind == "given":
        raise TypeError(
            f"{name} has an array of scores; expected a name of scores, or a function of keys and values, because the "
            "keys of a model change"
        )
    return found


def slots_for(selection: Selection, n: int, *, causal: bool, aligned: bool = True, endless: bool = False) -> Slots:
    """Return `Selection.slots`.

    `aligned`: whether queries and keys share positions. `endless`: whether more keys may follow the n of which shares
    are taken, so that no budget covers all.
    """
    rule, asked, selection = baseline_of(selection.scores), selection, with_usual(selection)
    budget = selection.budget
    if budget is None and selection.size is None and selection.epsilon is None:
        raise _not_one(selection)
    if selection.renew_every is not None and not causal:
        raise ValueError(
            f"renew_every is {selection.renew_every!r}, and the attention is not causal; expected it only for causal "
            "attention"
        )
    if selection.start and not causal:
        raise ValueError(
            f"start is {selection.start!r}, and the attention is not causal; expected it only for causal attention"
        )
    if selection.window and not aligned:
        raise ValueError(
            f"window is {selection.window!r}, but there are not as many queries as keys; expected window=0, as no key "
            "is near a query"
        )
    total = 0 if budget is None else max(1, _count(budget, n))
    if budget is not None and total >= n and not endless:
        return Slots(n, chunk=_CHUNK if causal else 0)
    usual = Slots(0, chunk=_CHUNK if causal else 0) if budget is None else _split(total, causal)
    chunk = 0 if not causal else usual.chunk if selection.renew_every is None else selection.renew_every
    sinks = _count(selection.sinks, total, usual.sinks)
    if asked.sinks is None and budget is not None:  # what a rule brings gives way as well
        summaries, window = (part if isinstance(part, int) else 0 for part in (asked.summaries, asked.window))
        least = chunk if rule is not None or selection.renew_every is not None else min(chunk, 1)
        sinks = min(sinks, max(0, total - Slots(0, summaries, window, 0, least).total))
    if causal and budget is not None and selection.renew_every is None and rule is None:
        summaries, window = _count(selection.summaries, total - sinks), _count(selection.window, total - sinks)
        chunk = max(1, min(chunk, total - sinks - summaries - window))
    window = _count(selection.window, total - sinks, usual.window if aligned else 0)
    if causal and rule is not None and isinstance(selection.window, float):  # of which the rule knows no chunk
        window = min(window, max(0, total - sinks - chunk)) if budget is not None else window
    if not causal and isinstance(selection.window, float):  # on both sides of a query
        window = max(0, (window - 1) // 2)
    summaries = _count(selection.summaries, total - sinks, usual.summaries)
    if budget is None:
        return Slots(n if selection.size is None else _of_size(selection.size, n), summaries, window, sinks, chunk)
    if selection.summaries is None:  # what is open gives way to what was asked for
        summaries = min(summaries, max(0, total - Slots(0, 0, window, sinks, chunk).total))
    if asked.window is None:
        spare = total - Slots(0, summaries, 0, sinks, chunk).total
        window = min(window, max(0, spare if causal else (spare - 1) // 2))
    taken = Slots(0, summaries, window, sinks, chunk).total
    if taken > total:
        names = {"summaries": summaries, "window": window, "sinks": sinks, "renew_every": chunk}
        shown = ", ".join(f"{name}={value}" for name, value in names.items())
        raise ValueError(f"budget={budget!r} is {total} slots, and {shown} take {taken}; expected a larger budget")
    return Slots(total - taken, summaries, window, sinks, chunk)


def slots_to_fit(selection: Selection, n: int) -> Slots:
    """Return the slots of a head of n keys that are fitted: as in a compressed cache, `window` is the last keys.

    Slots that a cache would give to summaries go to selected keys.
    """
    rule, asked, selection = baseline_of(selection.scores), selection, with_usual(selection)
    budget, size = selection.budget, selection.size
    refused = {
        "epsilon": (selection.epsilon, "a number of slots: give budget= or size="),
        "summaries": (selection.summaries, "0 or None, as slots that are fitted are keys"),
        "renew_every": (selection.renew_every, "None, as slots are fitted once"),
        "start": (selection.start or None, "0 or None, as all keys are there when slots are fitted"),
    }
    for name, (value, expected) in refused.items():
        if value is not None and not (name == "summaries" and value == 0):
            raise ValueError(f"selection has {name}={value!r}; expected {expected}")
    if budget is None and size is None:
        raise _not_one(selection)
    if budget is None:
        found = Slots(_of_size(size, n), 0, _count(selection.window, 0), _count(selection.sinks, 0))
        total = found.selected + found.window + found.sinks
        if n and not total:
            raise ValueError(f"size={size!r} of {n} keys leaves no slot; expected at least one")
        return Slots(n) if total >= n else found
    total = max(1, _count(budget, n))
    if total >= n:
        return Slots(n)
    open_sinks = total if not isinstance(selection.window, int) else max(0, total - selection.window)
    sinks = _count(selection.sinks, total, min(FITTED_SINKS, open_sinks))
    if rule is not None and asked.sinks is None:  # what a rule brings gives way
        sinks = min(sinks, max(0, total - asked.window) if isinstance(asked.window, int) else total)
    left = max(0, total - sinks)
    window = _count(selection.window, left, share_of(LAST, left))
    if rule is not None and asked.window is None:
        window = min(window, left)
    if sinks + window > total:
        raise ValueError(
            f"budget={budget!r} is {total} slots, and sinks={sinks}, window={window} take {sinks + window}; expected "
            "a larger budget"
        )
    return Slots(total - sinks - window, 0, window, sinks)


def _split(total: int, causal: bool) -> Slots:
    """Return the usual slots of a budget."""
    if causal:
        sinks, chunk, window = min(SINKS, total // 16), max(1, total // 4), total // 2
        left = total - window - chunk  # slots that kernels take in whole vectors where the budget is a power of two
        summaries = min(max(1, total // 16), max(0, left - sinks))
        return Slots(left - sinks - summaries, summaries, window, sinks, chunk)
    window = max(0, min(_NEAR, (total * 2 // 5 - 1) // 2))
    near = 2 * window + 1 if window else 0
    summaries = min((total - near) * 4 // 5, MOST_SUMMARIES)
    return Slots(total - near - summaries, summaries, window)


def _not_one(selection: Selection) -> ValueError:
    return ValueError(
        f"budget={selection.budget!r}, size={selection.size!r} and epsilon={selection.epsilon!r} were given; expected "
        "one of the three"
    )


def _number(name: str, value: Any, *, above: float) -> float:
    """Return a count of at least 0 as an int, or a share above a number and at most 1 as a float, or raise."""
    wish = "a count, or a share in (0, 1]" if above == 0 else "a count, or a share of the budget's slots in [0, 1]"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; expected {wish}")
    count = isinstance(value, Integral)
    number: float = operator.index(value) if count else float(value)  # type: ignore[arg-type]
    if number < 0 or not (count or above < number <= 1):
        raise ValueError(f"{name} is {value!r}; expected {wish}")
    return number


def _count(value: Any, of: int, default: int = 0) -> int:
    """Return a count, or a share of a number as a count, rounded down."""
    if value is None:
        return default
    return share_of(value, of) if isinstance(value, float) else int(value)


def _of_size(size: Any, n: int) -> int:
    """Return how many of n keys a size selects; a share selects at least one."""
    return max(_count(size, n), min(n, 1)) if isinstance(size, float) else int(size)


def share_of(share: float, n: int) -> int:
    """Return a share of n as a count, rounded down."""
    return int(share * n + 1e-9)


class Checks:
    """Conditions that hold unless numbers are not finite or out of range, each with its message.

    Reading a condition from a device waits for the device, so conditions of tensors and of CuPy wait until `settle`.
    Other conditions are checked at once.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, str, type[ValueError]]] = []

    def expect(self, holds: Any, message: str, kind: type[ValueError] = NonFiniteError) -> None:
        """Raise an error with a message, now or in `settle`, unless all flags `holds` are true."""
        if is_torch(holds) or on_cuda(holds):  # few flags wait, however many selections there are
            holds = holds if holds.ndim < 2 else namespace_of(holds).all(holds)
            self._waiting.append((holds, message, kind))
        elif not bool(namespace_of(holds).all(holds)):
            raise kind(message)

    def settle(self) -> None:
        """Raise for the first condition so far that does not hold, with one wait for all."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        xp = namespace_of(waiting[0][0])
        if not bool(xp.all(xp.concat([xp.reshape(holds, (-1,)) for holds, *_ in waiting]))):
            message, kind = next((message, kind) for holds, message, kind in waiting if not bool(xp.all(holds)))
            raise kind(message)


@dataclass(frozen=True)
class SelectionRule:
    """How keys are chosen, the same for all positions of a sequence.

    `kind`: one of `SCORES`, "given" or "function"; `function`: of keys and values, for the last. `start`: the least
    number of positions before the first selection.
    """

    slots: Slots
    kind: str
    epsilon: float | None
    center: bool
    power: float | None
    function: Callable[[Any, Any], Any] | None = None
    start: int = 0

    @property
    def own(self) -> bool:
        """Whether the scores are a user's own, which may be −∞ for keys that are never selected."""
        return self.kind in ("given", "function")

    @property
    def at_once(self) -> bool:
        """Whether all steps of a causal selection may be one kernel."""
        return self.power is None and self.epsilon is None and self.kind in ("residual", "expected")

    @cached_property
    def first(self) -> int:
        """Causal: the number of positions before the first selection: twice the slots, or a chunk with a threshold.

        The mean query of these positions reads as many keys as there are slots. `start` may ask for more positions.
        """
        return max(self.start, self.slots.chunk if self.epsilon is not None else 2 * self.slots.total)

    @cached_property
    def stride(self) -> int:
        """Causal: the distance of positions whose queries selections go by; at least 256 come before the first one."""
        return min(_STRIDE, max(1, self.first // _LEAST_QUERIES))

    def asking(self, positions: int, count: int) -> Any:
        """Return which of the next `count` positions have a query that selections go by: their numbers, int64."""
        if count == 1:  # a step of decoding
            return _NONE if self.since_selection(positions) % self.stride else np.array([positions])
        return _asking(self.first, self.slots.chunk, self.stride, positions, count)

    def until_selection(self, positions: int) -> int:
        """Return how many positions come before the next selection, at least one."""
        return (self.first if positions < self.first else self.slots.chunk) - self.since_selection(positions)

    def since_selection(self, positions: int) -> int:
        """Return how many positions came after the last selection, or so far before the first one."""
        return positions if positions < self.first else (positions - self.first) % self.slots.chunk

    def selects_at(self, positions: int) -> bool:
        """Tell whether a selection follows after this number of positions."""
        return positions >= self.first and not self.since_selection(positions)


@lru_cache(maxsize=16)  # the layers of a model ask alike, and after its products this takes a millisecond
def _asking(first: int, chunk: int, stride: int, positions: int, count: int) -> Any:
    at = np.arange(positions, positions + count)
    since = np.where(at < first, at, (at - first) % chunk)
    found = np.flatnonzero(since % stride == 0) + positions
    found.flags.writeable = False
    return found


def exponent_of(f: Any) -> float | None:
    """Return the exponent of an attention function, or None for softmax."""
    if isinstance(f, str) and f == "softmax":
        return None
    f = f.p if isinstance(f, Power) else f
    if not isinstance(f, bool) and isinstance(f, Real) and 1 <= float(f) < math.inf:
        return float(f)
    raise ValueError(f'f is {f!r}; expected "softmax", a number p >= 1 for |x|^p, or levattn.Power(p)')


def rule_of(
    selection: Selection, n: int, *, power: float | None, causal: bool, aligned: bool, endless: bool = False
) -> SelectionRule:
    """Return the rule of a selection with n keys, or raise; `aligned` and `endless` as for `slots_for`."""
    center, function = selection.center, function_of(selection)
    if center and power is not None:
        raise ValueError("center is True and f is a power; expected center only for softmax")
    return SelectionRule(
        slots_for(selection, n, causal=causal, aligned=aligned, endless=endless),
        selection.kind if function is None else "function",
        selection.epsilon,
        power is None if center is None else center,
        power,
        function,
        selection.start or 0,
    )
