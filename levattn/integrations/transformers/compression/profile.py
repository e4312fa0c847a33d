"""The cost of cutting each head of a decoder, and the split of a budget of bytes by these costs."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from levattn._core.checks import check_type, fraction, whole_number
from levattn._core.files import checked_path
from levattn.attention import Selection
from levattn.attention.pruned.baselines import asks_queries
from levattn.attention.pruned.selection import selection_for_models
from levattn.exceptions import ProfileWarning, RecallWarning
from levattn.integrations.transformers.calibration import Calibration, with_budgets
from levattn.integrations.transformers.compression.fingerprint import Fingerprint
from levattn.integrations.transformers.heads_table import HeadsRecord, HeadsTable, by_head, is_number

CACHE, READING = "cache", "reading"  # the ways in which heads are cut: after a dense reading, or while reading
_USERS = {CACHE: "compress", READING: "prune and calibrate"}
_RECALL = 2.0  # factor of the cost of recall; at 1, SmolLM2 recalls less at 6 % of the bytes
AUTO = "auto"  # stands for the profile of the model among those that are known
_FOLDER = "LEVATTN_PROFILES"  # the variable of the environment that names a folder of profiles
_MEASURE = (
    "measure one with head_profile(model, tokenizer), which tells its time in the log, and give it as heads, or save "
    f"it in a folder that {_FOLDER} names"
)
_FIGURES = ("recall", "recall_error", "text", "text_error")
DOUBT = 1.96  # standard errors on each side of a mean, of a confidence of 95 %
_OTHERS = 2 / 3  # of a budget, at least: what heads have that are pruned while a model reads
_FEW = 340  # slots: with fewer of them, whole heads cost the others more than they gain
_PARTS = 192  # of a head's bytes; whole numbers of them add up without rounding, so that budget 1.0 is 1.0 for all
_LEAST = 2.0**-64  # a share that leaves one slot, whatever the context; costs of smaller ones are beyond numbers
_LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, _PARTS)


class HeadProfile(HeadsRecord, HeadsTable):
    """The cost of cutting each head of the keys of a decoder, in nats a token, as `head_profile` measured it.

    A mapping from (layer, head) to the cost: the loss of answers that need recall, plus the loss of plain text.

    `find` returns the profile of a model that comes with levattn, or lies in a folder of yours. A profile knows its
    model by a few entries of each array of its weights. It fits the same weights in float32, bfloat16 or float16, from
    .safetensors or a .gguf file. A model that was trained further is another one. Then norms and biases differ by more
    than 2⁻⁸ of their size, or matrices by more than 1 %. If one of both models was rounded to few bits, the limit for
    matrices is 15 %. So an adapter that was merged into rounded matrices may be overlooked.

    Parameters
    ----------
    rows : sequence of dict
        ``layer`` and ``head`` name the head. Cutting it to `share` raises the mean loss of answers by ``recall``, and
        of the text after the context by ``text``. Both are means over rounds with different shares of other heads.
        ``recall_error`` and ``text_error`` are half the widths of their 95 % confidence intervals over tasks, or None
        where one task tells nothing of them.
    model : str
        The type of the model.
    share : float
        Share of the bytes to which heads were cut.
    fingerprint : object, optional
        A few weights of the model, from `head_profile`. A profile without it is of any model.
    trials : int, default 1
        How often each head was measured: tasks times rounds.
    way : {"cache", "reading"}, default "cache"
        Whether heads were cut in the cache of a dense reading, as `compress` cuts them, or pruned while the model
        read, as `prune` does it. Each way has its own costs, and its own split of a budget.

    Raises
    ------
    ValueError, TypeError
        If `rows` has not one row for each head, or numbers that are not finite, or there is no such way.

    Examples
    --------
    >>> from levattn.integrations.transformers import HeadProfile
    >>> figures = dict(recall_error=0.1, text=0.02, text_error=0.01)
    >>> rows = [dict(layer=0, head=0, recall=2.0, **figures), dict(layer=0, head=1, recall=0.0, **figures)]
    >>> profile = HeadProfile(rows, "LlamaForCausalLM", 1 / 16)
    >>> profile[0, 0]
    2.02
    >>> profile.shares(0.5625)
    {(0, 0): 1.0, (0, 1): 0.125}
    >>> HeadProfile.find("SmolLM2-135M-Instruct").share
    0.0625
    """

    _format: ClassVar = ("head profile", 3)
    _oldest: ClassVar = 2  # earlier files do not know their model
    _again: ClassVar = ". Measure the profile again with head_profile(model, tokenizer)"
    _labels: ClassVar = {
        "recall": "loss of answers if a head is cut (nats)",
        "text": "loss of text if a head is cut (nats)",
    }

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        model: str,
        share: float,
        fingerprint: Fingerprint | None = None,
        trials: int = 1,
        way: str = CACHE,
    ) -> None:
        self._table = by_head("rows", ((row["layer"], row["head"], row) for row in _complete(rows)))
        for (layer, head), row in self._table.items():
            figures = {name: row[name] for name in _FIGURES}
            if not all(is_number(x) or (x is None and name.endswith("error")) for name, x in figures.items()):
                raise ValueError(
                    f"rows hold {figures} for head {head} of layer {layer}; expected finite numbers, or None as an "
                    "error"
                )
            self._table[layer, head] = {name: None if x is None else float(x) for name, x in figures.items()}
        if not self._table:
            raise ValueError("rows is empty; expected one for each head")
        self.model = str(model)
        self.share = fraction("share", share)
        check_type("fingerprint", fingerprint, Fingerprint | None, "that of another profile, or None")
        self.fingerprint = fingerprint
        self.trials = whole_number("trials", trials)
        self.way = way_of(way)

    def __getitem__(self, key: tuple[int, int]) -> float:
        row: dict[str, float] = self._table[key]
        return max(row["recall"], 0.0) + max(row["text"], 0.0)

    def __repr__(self) -> str:
        dearest = max(self, key=self.__getitem__)
        return (
            f"<HeadProfile of {self.model}: {len(self)} heads cut to {self.share:.3g} ({self.way}), the dearest is "
            f"head {dearest[1]} of layer {dearest[0]} ({self[dearest]:.3g} nats)>"
        )

    @classmethod
    def names(cls, folder: str | os.PathLike[str] | None = None) -> list[str]:
        """Return the names of the profiles that `find` searches.

        Parameters
        ----------
        folder : path-like, optional
            As for `find`.

        Returns
        -------
        list of str
            The names of files without their endings, in small letters.

        Raises
        ------
        TypeError
            If `folder` is no path.
        ValueError
            If there is no such folder.

        Examples
        --------
        >>> from levattn.integrations.transformers import HeadProfile
        >>> HeadProfile.names()
        ['smollm2-135m-instruct']
        """
        return sorted(_profiles(folder))

    @classmethod
    def find(cls, model: Any, folder: str | os.PathLike[str] | None = None, *, way: str = CACHE) -> Self:
        """Return the profile of a model, from levattn or from a folder.

        Parameters
        ----------
        model : transformers.PreTrainedModel or str
            The model, whose weights are compared, or the name of a profile. Of a name "organization/model" the second
            part counts, and case does not.
        folder : path-like, optional
            A folder with files of `save`, which go before profiles of levattn. By default the one that the variable
            LEVATTN_PROFILES of the environment names, if it is set.
        way : {"cache", "reading"}, default "cache"
            The way in which the heads were cut. The name of a file may end in it, as in "name.reading.json".

        Returns
        -------
        HeadProfile
            The profile, by the order of names if several fit; files in the folder go first. If there is none of this
            way, one of the other way.

        Raises
        ------
        ValueError
            If there is none, or the file with the name is no profile, or there is no such folder.
        TypeError
            If `model` is neither a name nor a model, or `folder` is no path.

        Warns
        -----
        ProfileWarning
            If files in the folder were left out, because they are no profiles that this release reads.

        Notes
        -----
        Time and memory: a few entries of each array of the weights.
        """
        way_of(way)
        if isinstance(model, str):
            there, name = _profiles(folder), model.rpartition("/")[2].lower()
            endings = f".{way}", "", *(f".{other}" for other in _USERS if other != way)
            name = next((name + ending for ending in endings if name + ending in there), name)
            if name not in there:
                file = ". Open a file with HeadProfile.load" if name.endswith(".json") else ""
                raise ValueError(
                    f"there is no profile {model!r} {_where(folder)}; expected one of {', '.join(sorted(there))}, or "
                    f'"{AUTO}"{file}. For another model {_MEASURE}'
                )
            return cls._read(there[name])
        check_type("model", model, torch.nn.Module, "a model of transformers, or the name of a profile")
        found, others = known_profile(model, folder, way)
        if found is None:
            raise ValueError(
                f"no profile fits this {type(model).__name__}: {', '.join(others)} {_where(folder)}; expected one of "
                f"its weights. Give heads the name of a profile of the model that this one was trained from, or "
                f"{_MEASURE}"
            )
        return found  # type: ignore[no-any-return]

    @classmethod
    def _read(cls, file: Any) -> Self:
        with as_file(file) as path:
            return cls.load(path)

    def fits(self, model: Any) -> bool:
        """Tell whether a model has the weights that the profile was measured on, up to rounding.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            The model.

        Returns
        -------
        bool
            True for a profile without a fingerprint.

        Raises
        ------
        TypeError
            If `model` is no model.
        """
        check_type("model", model, torch.nn.Module, "a model of transformers")
        return self.fingerprint is None or self.fingerprint.fits(Fingerprint.of(model))

    def shares(
        self, budget: float, *, way: str | None = None, by: str = "positions", length: int | None = None
    ) -> dict[tuple[int, int], float]:
        """Return the share of the positions that each head keeps, so that the sum of the costs is least.

        The method assumes that at a share s the cost of recall is proportional to 1 - s^(1/8). The cost of plain text
        is proportional to 1/s - 1, and to its power 3/2 while a model reads. At `share` both equal the measured costs.
        With the first curve, heads that recall stay whole when bytes are few, because a fact outside the remaining
        slots is lost. Recall counts twice, because users notice a lost answer before slightly worse predictions of
        text. The second curve is the squared error of a head's output, which falls in half where slots double. It
        falls faster where the errors of layers add up.

        In a cache, each head has a share of its own. While a model reads, some heads stay whole, or none, and all
        others have the same share, at least two thirds of the budget. So no head has less than it needs for text
        nearby, and a layer has two calls at most. In a text of a known length, so few heads stay whole that the others
        have at least 340 slots.

        Parameters
        ----------
        budget : float in (0, 1]
            The mean of the shares, at most; or of the time.
        way : {"cache", "reading"}, optional
            The use of the shares, which is the way of the profile if None.
        by : {"positions", "time"}, default "positions"
            The unit of the budget. Time is the number of products of queries and keys, relative to dense attention.
            With a share s of a long text, it is ``2 s``, as the mean causal query reads half of the text densely. Only
            for reading.
        length : int, optional
            Number of positions of the text, or None for a long one. Only for reading; `prune` knows it at the first
            call.

        Returns
        -------
        dict
            The share of each (layer, head). `prune` takes it in the place of a selection.

        Raises
        ------
        ValueError, TypeError
            If an argument is out of range, or no number.

        Examples
        --------
        >>> from levattn.integrations.transformers import HeadProfile
        >>> profile = HeadProfile.find("SmolLM2-135M-Instruct")
        >>> shares = profile.shares(0.25, way="reading")
        >>> sorted(set(shares.values()))
        [0.16666666666666666, 1.0]
        >>> set(profile.shares(0.25, way="reading", length=1200).values())
        {0.25}
        """
        budget, way = share_of_bytes("budget", budget), way_of(self.way if way is None else way)
        if by not in ("positions", "time") or (by == "time" and way == CACHE):
            wish = '"positions"' if way == CACHE else '"positions" or "time"'
            raise ValueError(f"by is {by!r}; expected {wish} for the way {way!r}")
        if length is not None and way == CACHE:
            raise ValueError(f"length is {length!r}; expected None for the way {way!r}, whose split does not go by it")
        length = None if length is None else whole_number("length", length)
        if way == READING:
            splits = splits_by_length(self, budget, by)
            return next(shares for least, shares in reversed(splits) if length is None or length >= least)
        return split_bytes(self._factors(way), budget)

    def _factors(self, way: str) -> dict[tuple[int, int], tuple[float, float]]:
        """Return the factors of the `curves` of each head, its costs of recall and of text."""
        floor = 1e-4 * max(self.values()) + 1e-12  # so that no head costs nothing
        recall, text = curves(self.share, way)
        return {
            head: (_RECALL * max(row["recall"], 0.0) / recall, (max(row["text"], 0.0) + floor) / text)
            for head, row in self._table.items()
        }

    def joined(self, other: HeadProfile) -> HeadProfile:
        """Return the profile of all trials of two profiles of the same weights and share.

        Parameters
        ----------
        other : HeadProfile
            The other profile, of other texts.

        Returns
        -------
        HeadProfile
            The means of the costs over all trials, with the confidence intervals of independent means. Where one
            interval is unknown, the trials of both vary alike. Where both are, their means tell how much trials vary.

        Raises
        ------
        TypeError, ValueError
            If `other` is no profile, or of another share or way, of other heads or of other weights.

        Examples
        --------
        >>> from levattn.integrations.transformers import HeadProfile
        >>> row = dict(layer=0, head=0, recall=2.0, recall_error=0.3, text=0.2, text_error=0.1)
        >>> first = HeadProfile([row], "LlamaForCausalLM", 1 / 16)
        >>> other = HeadProfile([row | dict(recall=1.0, recall_error=0.4)], "LlamaForCausalLM", 1 / 16)
        >>> both = first.joined(other).table()[0]
        >>> both["recall"], both["recall_error"]
        (1.5, 0.25)
        """
        check_type("other", other, HeadProfile, "a HeadProfile")
        if (other.share, other.way, set(other)) != (self.share, self.way, set(self)):
            raise ValueError(
                f"other cuts {len(other)} heads to {other.share:.6g} ({other.way}); expected the {len(self)} heads, "
                f"the share {self.share:.6g} and the way {self.way!r} of this profile"
            )
        one, two = self.fingerprint, other.fingerprint
        if one is not None and two is not None and not one.fits(two):
            raise ValueError("other was measured on other weights; expected the weights of this profile")
        total, rows = self.trials + other.trials, []
        a, b = self.trials / total, other.trials / total
        for (layer, head), mine in self._table.items():
            theirs = other._table[layer, head]
            means = {name: a * mine[name] + b * theirs[name] for name in ("recall", "text")}
            errors = {
                f"{name}_error": _joined_error(
                    (a, mine[f"{name}_error"]), (b, theirs[f"{name}_error"]), mine[name] - theirs[name]
                )
                for name in means
            }
            rows.append({"layer": layer, "head": head, **means, **errors})
        return HeadProfile(rows, self.model, self.share, one or two, total, self.way)

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each head.

        Returns
        -------
        list of dict
            Rows in the form of the parameter `rows`.
        """
        return [{"layer": layer, "head": head, **row} for (layer, head), row in sorted(self._table.items())]

    def _facts(self) -> dict[str, Any]:
        known = None if self.fingerprint is None else self.fingerprint.to_dict()
        facts = {"model": self.model, "way": self.way, "share": self.share, "trials": self.trials}
        return {**facts, "fingerprint": known, "heads": self.table()}

    @classmethod
    def _of(cls, document: dict[str, Any]) -> Self:
        known = document["fingerprint"]
        fingerprint = None if known is None else Fingerprint.from_dict(known)
        way = document.get("way", CACHE)  # earlier files have none
        return cls(document["heads"], document["model"], document["share"], fingerprint, document["trials"], way)


def _complete(rows: Any) -> list[Any]:
    """Return rows, or raise unless each has all figures of a head."""
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise TypeError(f"rows is of type {type(rows).__name__}; expected a list of mappings, one for each head")
    listed = list(rows)
    for row in listed:
        lacks = {"layer", "head", *_FIGURES}.difference(row if isinstance(row, Mapping) else ())
        if lacks:
            raise ValueError(
                f"rows has {row!r:.100}, which lacks {', '.join(sorted(lacks))}; expected the keys of a row of table"
            )
    return listed


def _joined_error(one: tuple[float, float | None], two: tuple[float, float | None], apart: float) -> float:
    """Return the error of the mean of two means: each with its share of the trials, and its error or None."""
    (a, mine), (b, theirs) = one, two
    if mine is not None and theirs is not None:
        return math.hypot(a * mine, b * theirs)
    if mine is None and theirs is None:
        return DOUBT * math.sqrt(a * b) * abs(apart)
    return math.sqrt(a) * mine if mine is not None else math.sqrt(b) * (theirs or 0.0)


def _profiles(folder: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return files of profiles by name: first the files of the folder, which hide files of levattn, and then these."""
    named = os.environ.get(_FOLDER) or None if folder is None else checked_path(folder, "folder", "folder of profiles")
    of_library = list((files("levattn") / "data" / "profiles").iterdir())
    own: list[Any] = []
    if named is not None:
        if not Path(named).is_dir():
            raise ValueError(
                f"{named}: there is no such folder; expected a folder of profiles. Mend folder or {_FOLDER}"
            )
        own = list(Path(named).iterdir())
    found: dict[str, Any] = {}
    for files_of in (own, of_library):
        for file in sorted(files_of, key=lambda file: str(file.name)):
            if file.name.lower().endswith(".json"):
                found.setdefault(file.name[:-5].lower(), file)
    return found


def known_profile(model: Any, folder: str | os.PathLike[str] | None = None, way: str = CACHE) -> tuple[Any, list[str]]:
    """Return the profile of a model or None; and its name, or the names of all with the reasons.

    A profile of another way stands in where there is none of this one.
    """
    own, config, others = Fingerprint.of(model), model.config.get_text_config(decoder=True), []
    layers, each, most = (
        getattr(config, f"num_{of}", None) or 0 for of in ("hidden_layers", "key_value_heads", "attention_heads")
    )
    heads = {(layer, head) for layer in range(layers) for head in range(each or most)}
    unread, stands_in = [], None
    for name, file in _profiles(folder).items():
        try:
            profile = HeadProfile._read(file)
        except (ValueError, OSError) as error:
            unread.append(str(error))
            others.append(f"{name} (cannot be read: {error})")
            continue
        known = profile.fingerprint
        if known is None:
            others.append(f"{name} (does not know its model, so give it by name)")
            continue
        if known.fits(own):
            stands_in = stands_in or (profile, [name])
            if profile.way == way:
                stands_in = profile, [name]
                break
            continue
        alike = known.alike(own) and set(profile) <= heads
        others.append(f"{name} ({'has other weights' if alike else 'is of another model'})")
    if stands_in is not None and unread:
        warnings.warn(
            f"files in the folder of profiles were left out: {'; '.join(unread)}. Take them out of the folder",
            ProfileWarning,
            stacklevel=3,
        )
    return stands_in or (None, others)


def _where(folder: Any) -> str:
    """Return which places were searched."""
    named = os.environ.get(_FOLDER) or None if folder is None else checked_path(folder, "folder", "folder of profiles")
    return f"among those of levattn{f', and {_FOLDER} is not set' if named is None else f' and in {named}'}"


def profile_for(model: Any, heads: Any, selection: Any, way: str) -> HeadProfile | None:
    """Return the profile that the argument `heads` stands for, or None; warn if it is of other weights or another way.

    None stands for "auto" where the selection keeps everything.
    """
    budget = selection.budget if isinstance(selection, Selection) else selection
    if heads is None or (isinstance(heads, str) and heads == AUTO and isinstance(budget, float) and budget == 1):
        return None
    if isinstance(heads, str):
        heads = HeadProfile.find(model if heads == AUTO else heads, way=way)
    wanted = f'a HeadProfile, the name of one, "{AUTO}", or None. A mapping as selection names heads'
    check_type("heads", heads, HeadProfile, wanted)
    if not heads.fits(model):
        warnings.warn(
            f"heads is a profile of other weights than this {type(model).__name__} has, so heads that recall may be "
            "cut; expected the profile of this model. Measure one with head_profile(model, tokenizer)",
            ProfileWarning,
            stacklevel=3,
        )
    found: HeadProfile = heads
    if found.way != way:
        warnings.warn(
            f"the heads of the profile were cut in another way ({found.way}) than by {_USERS[way]}; its split keeps "
            "heads that recall, but their costs are others. Measure one with "
            f"head_profile(model, tokenizer, way={way!r})",
            ProfileWarning,
            stacklevel=3,
        )
    return found


def way_of(way: Any) -> str:
    """Return a way of cutting heads, or raise."""
    if not isinstance(way, str) or way not in _USERS:
        raise ValueError(f"way is {way!r}; expected {' or '.join(map(repr, _USERS))}")
    return way


@dataclass(frozen=True)
class HeadSelections:
    """The selection that each head keeps.

    named: by (layer, head).

    rest: of heads that are not named, or None if `named` must have all heads.

    source: the argument that named heads, for messages.

    whole: heads that keep all positions, in codes.
    """

    named: Mapping[tuple[int, int], Selection]
    rest: Selection | None
    source: str
    whole: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def of(
        cls, selection: Any, profile: Any, full: Collection[int], sliding: Collection[int], gain: float
    ) -> HeadSelections:
        """Return the selections from the arguments of `compress`, for a model with these layers, or raise.

        `gain`: how many positions of a head can be held in the bytes of one.
        """
        if isinstance(selection, HeadProfile):
            raise TypeError(
                "selection is a HeadProfile; expected a share, and the profile as heads: compress(model, context, "
                "0.25, heads=profile)"
            )
        selection = selection.selections() if isinstance(selection, Calibration) else selection
        if isinstance(selection, Mapping):
            if profile is not None:
                raise ValueError("selection names heads, and heads is given; expected one of the two. Leave heads out")
            found = cls(_named(selection), Selection(1.0), "selection")
        elif profile is None:
            found = cls({}, selection_of_cache("selection", selection), "selection")
        else:
            whole = selection_of_cache("selection", selection)
            if not isinstance(whole.budget, float):
                raise ValueError(
                    f"heads is a HeadProfile and selection is {whole}; expected a share of the bytes as budget, which "
                    "the profile splits"
                )
            gain = 1.0 if whole.budget == 1.0 else gain
            shares = profile.shares(min(1.0, whole.budget * gain), way=CACHE)  # of the positions
            coded = frozenset(head for head, share in shares.items() if share == 1.0)
            budgets = {head: share / gain for head, share in shares.items()}
            found = cls(with_budgets(whole, budgets), None, "heads", coded)
        for layer, head in found.named:
            if layer in sliding:
                raise ValueError(
                    f"{found.source} names head {head} of layer {layer}, which slides and keeps its window; expected "
                    "layers that attend to all positions"
                )
            if layer not in full:
                raise ValueError(f"{found.source} names layer {layer}; expected one of the {len(full)} of the model")
        cut = found.rest is not None and found.rest.budget != 1.0
        if not full and cut:
            raise ValueError(
                "all layers of the model slide and keep their windows, so nothing is cut; expected the budget 1.0"
            )
        share = 0.0 if found.rest is None or not isinstance(found.rest.budget, float) else found.rest.budget
        if cut and share * gain < 1:
            warnings.warn(
                f"all heads are cut alike ({found.rest}), because there is no profile of them: decoders then fail to "
                f'recall facts of the context. Give heads="{AUTO}" if the model has a profile, or '
                "heads=head_profile(model, tokenizer)",
                RecallWarning,
                stacklevel=3,
            )
        return found

    def distinct(self) -> set[Selection]:
        """Return all selections."""
        return {own for own in (*self.named.values(), self.rest) if own is not None}

    def of_layer(self, layer: int, heads: int) -> list[Selection]:
        """Return the selections of the heads of a layer, or raise if a named head does not exist or one is missing."""
        for number, head in self.named:
            if number == layer and not 0 <= head < heads:
                raise ValueError(f"{self.source} names head {head} of layer {layer}; expected one of {heads} heads")
        found: list[Any] = [self.named.get((layer, head), self.rest) for head in range(heads)]
        if None in found:
            head = found.index(None)
            raise ValueError(f"{self.source} has no cost of head {head} of layer {layer}; expected all heads")
        return found

    def renew_every(self) -> int | None:
        """Return how often a cache renews its slots, or raise if heads differ in it."""
        every = {own.renew_every for own in self.distinct() if own.budget != 1.0}
        if len(every) > 1:
            raise ValueError(f"selection has several values of renew_every, {every}; expected one for all heads")
        return every.pop() if every else None if self.rest is None else self.rest.renew_every

    def check_codes(self, bits: int) -> None:
        """Raise if random numbers of keys renew slots, because rounding to codes would change them each time."""
        for own in self.distinct():
            drawn = isinstance(own.scores, str) and own.scores.partition(":")[0] == "random"
            if drawn and own.renew_every is not None and own.budget != 1.0 and bits < 16:
                raise ValueError(
                    f"bits is {bits} and renew_every is {own.renew_every}, with scores={own.scores!r}, whose numbers "
                    "change with the rounding of keys; expected bits=16, or renew_every=None"
                )


def curves(share: Any, way: str = CACHE) -> Any:
    """Return the costs of recall and of plain text at a share of a head's bytes, (2,), up to factors of the head."""
    return np.array([1 - share**0.125, (1 / share - 1) ** (1.0 if way == CACHE else 1.5)])


def split_bytes(costs: Mapping[tuple[int, int], tuple[float, float]], budget: float) -> dict[tuple[int, int], float]:
    """Return a share for each head, their mean at most a budget, so that the sum of the costs is least.

    costs: (a, b) of each head, the factors of its `curves`.

    Shares take few levels, so that heads of a layer share groups. All begin at the lowest level. Steps to the next
    level come in the order in which the sum falls most for each byte. This is optimal but for the steps that the
    budget cuts off, because costs are convex. The remaining bytes go to the heads with the lowest share.
    """
    if budget * _PARTS <= _LEVELS[0]:
        return dict.fromkeys(costs, budget)
    steps = [(high - low, *(curves(low / _PARTS) - curves(high / _PARTS))) for low, high in pairwise(_LEVELS)]
    order = sorted(
        (-(a * recall + b * text) / more, head, i)
        for head, (a, b) in costs.items()
        for i, (more, recall, text) in enumerate(steps)
    )
    at, left = dict.fromkeys(costs, 0), (budget * _PARTS - _LEVELS[0]) * len(costs)
    for _, head, i in order:
        more = steps[i][0]
        if at[head] == i and more <= left * (1 + 1e-12):
            left, at[head] = left - more, i + 1
    shares = {head: _LEVELS[i] / _PARTS for head, i in at.items()}
    low = min(shares.values())
    few = [head for head, share in shares.items() if share == low]
    return shares | dict.fromkeys(few, min(1.0, low + left / _PARTS / len(few)))


def splits_by_length(
    profile: HeadProfile, budget: float, by: str = "positions"
) -> list[tuple[int, dict[tuple[int, int], float]]]:
    """Return splits while a model reads, 1 for some heads and one share for all others, as the sum of costs is least.

    Each comes with the least length of a text that has it, in ascending order from 0 on.

    The others have at least `_OTHERS` of the budget, and `_FEW` slots. With less, a model lost more of plain text than
    without any whole head. Costs of single heads do not tell that.

    by: as for `HeadProfile.shares`.
    """
    names, of, n = sorted(profile), profile._factors(READING), len(profile)
    if budget == 1:
        return [(0, dict.fromkeys(names, 1.0))]
    factors, best, found = np.array([of[head] for head in names]), math.inf, []
    for count in range(n):
        share = (budget * n - count) / (n - count)
        if share < _OTHERS * budget * (1 - 1e-12):
            break
        share = share / 2 if by == "time" else share
        each = factors @ curves(max(share, _LEAST), READING)
        order = np.argsort(-each, kind="stable")
        if each[order[count:]].sum() < best:
            best = each[order[count:]].sum()
            shares = dict.fromkeys(names, share) | {names[i]: 1.0 for i in order[:count]}
            found.append((math.ceil(_FEW / share) if count else 0, shares))
    return found


def share_of_bytes(name: str, value: Any) -> float:
    """Return an argument that is a share of the bytes, or raise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} is {value!r}; expected a share of the bytes in (0, 1]")
    return float(value)


def _named(selection: Mapping[Any, Any]) -> dict[tuple[int, int], Selection]:
    """Return the selections of heads that a mapping names, or raise."""
    found = {}
    for key, own in selection.items():
        pair = key if isinstance(key, tuple) else ()
        if len(pair) != 2 or any(isinstance(x, bool) or not isinstance(x, Integral) for x in pair):
            raise TypeError(f"selection has the key {key!r}; expected (layer, head)")
        found[int(key[0]), int(key[1])] = selection_of_cache(f"selection[{key!r}]", own)
    return found


def selection_of_cache(name: str, selection: Any) -> Selection:
    """Return a selection that a cache can keep, or raise."""
    found = selection_for_models(selection, name, queries=True)
    if asks_queries(found.scores) and found.renew_every is not None:  # raises for some functions, before the reading
        raise ValueError(
            f"{name} is {found}, whose scores need queries of the context, which are gone when slots are renewed; "
            "expected renew_every=None, or other scores"
        )
    if found.budget is None and found.size is None:
        raise ValueError(f"{name} is {found}; expected a budget or a size of a cache")
    if found.start:
        raise ValueError(f"{name} is {found}, and a context is read densely; expected start=None")
    return found
