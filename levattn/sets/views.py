"""Universal sets of arrays and of streams: as a line, as a table, as a file, and the set of one matrix of a batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_numpy
from levattn._core.checks import needing
from levattn._core.device import where_arrays_are
from levattn.io.common import replace_file

if TYPE_CHECKING:
    from levattn.sets.result import UniversalSet
    from levattn.sets.streaming import StreamedSet

_KEYS_SHOWN = 10  # in a notebook


def span(values: Any) -> str:
    """Return a figure, or the least and the largest figure of a batch."""
    found = np.asarray(values)
    if not found.size:
        return "none"
    low, high = f"{found.min():.6g}", f"{found.max():.6g}"
    return low if low == high else f"{low} to {high}"


def _size(found: UniversalSet | StreamedSet) -> str:
    batch = f" in each of {found.batch}" if found.batch else ""
    return f"{span(found.sizes)} of {_rows(found)} keys{batch}"


def _rows(found: UniversalSet | StreamedSet) -> int:
    return found.n if hasattr(found, "n") else int(found.mask.shape[-1])


def _figures(found: Any) -> list[tuple[str, str]]:
    """Return the properties of a set, as names and figures; a name alone is a flag."""
    if getattr(found, "coverage", None) is not None:
        return _of_coverage(found)
    figures = [("epsilon", span(found.epsilon)), ("guarantee", repr(found.guarantee))]
    figures += [("rank", span(found.rank)), ("bound", span(found.size_bound))]
    vacuous = int(np.sum(found.is_vacuous))
    if vacuous:
        figures.append(("vacuous" if vacuous == np.size(found.is_vacuous) else f"{vacuous} vacuous", ""))
    if getattr(found, "groups", None) is not None:
        figures.append((f"{found.hidden_groups.sum()} hidden groups", ""))
    return figures


def _of_coverage(universal: UniversalSet) -> list[tuple[str, str]]:
    wish = "mass" if universal.mass is not None else "epsilon"
    queries = 0 if universal.needs is None else universal.needs.shape[-1]
    asked = span(universal.mass if wish == "mass" else universal.epsilon)
    given = [("guarantee", "'coverage'"), (wish, asked), ("coverage", f"{universal.coverage:.6g}")]
    return [*given, (f"{queries} queries", "")]


def line_of(found: UniversalSet | StreamedSet) -> str:
    """Return the figures of a set on one line."""
    figures = (f"{name}={figure}" if figure else name for name, figure in _figures(found))
    return f"{type(found).__name__}({', '.join((_size(found), *figures))})"


def html_of(found: UniversalSet | StreamedSet) -> str:
    """Return the figures of a set as a table, with its first keys if it is of one matrix."""
    rows = [("keys", _size(found)), *((name, figure or "yes") for name, figure in _figures(found))]
    if not found.batch:
        indices, scores = found.indices, to_numpy(found.scores)
        scores = scores[indices] if len(scores) > len(indices) else scores  # of all keys, or of these
        shown = ", ".join(f"{i} ({x:.3g})" for i, x in zip(indices[:_KEYS_SHOWN].tolist(), scores, strict=False))
        more = f", and {len(indices) - _KEYS_SHOWN} more" if len(indices) > _KEYS_SHOWN else ""
        rows.append(("indices (scores)", (shown or "none") + more))
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(figure)}</td></tr>" for name, figure in rows)
    return f"<table><caption>{type(found).__name__}</caption><tbody>{''.join(cells)}</tbody></table>"


def frame_of(places: tuple[npt.NDArray[np.int64], ...], scores: npt.NDArray[Any]) -> Any:
    """Return the keys of a set as a pandas table, a row for each; `places` are axes of the batch and indices."""
    with needing("a table needs pandas", "frame"):
        import pandas as pd
    *batch, key = places
    names = [f"axis_{i}" for i in range(len(batch))]
    return pd.DataFrame(dict(zip(names, batch, strict=True)) | {"key": key, "score": scores})


def save_arrays(path: str | os.PathLike[str], arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Write the arrays of a set to an ``.npz`` file, completely or not at all."""
    if Path(path).suffix != ".npz":
        raise ValueError(f"path is {os.fspath(path)!r}; expected a name that ends in .npz")
    with replace_file(path) as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def saved_arrays(universal: UniversalSet) -> dict[str, npt.NDArray[Any]]:
    """Return the properties of a set as arrays, none of which needs pickling."""
    names = ["mask", "scores", "sizes", "epsilon", "guarantee", "rank", "size_bound", "is_vacuous", "condition"]
    if universal.coverage is not None:
        names += ["coverage", "mass", "needs", "threshold_queries"]
    if universal.groups is not None:
        names += ["groups", "group_scores"]
    if not universal.batch:
        names.append("indices")
    needs = universal.needs
    counted = {"threshold_queries": None if needs is None else needs.shape[-1]}
    return storable_arrays(
        {name: counted[name] if name in counted else getattr(universal, name) for name in (*names, "f")}
    )


def storable_arrays(values: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Return values as arrays that need no pickling; missing ones are left out, and a function f is its text."""
    f = values["f"]
    values = values | {"f": f if isinstance(f, int | float) else repr(f)}
    pairs = values.items()
    arrays = {name: to_numpy(value) if hasattr(value, "shape") else np.asarray(value) for name, value in pairs}
    return {name: array for name, array in arrays.items() if array.dtype != object}


def refuse_batch(batch: tuple[int, ...], use: str) -> None:
    """Raise if a set is of a batch; `use` says which use is of one matrix."""
    if batch:
        place = ", ".join({1: ["head"], 2: ["layer", "head"]}.get(len(batch), ["0"] * len(batch)))
        raise ValueError(
            f"{use} of one matrix, but this set has batch {batch}; take one by universal[{place}]. sizes has the "
            "numbers of keys of all"
        )


def number_of(index: Any, batch: tuple[int, ...]) -> int:
    """Return the number of one matrix of a batch, leading axes flattened, or raise."""
    if not batch:
        raise TypeError("the set is of one matrix, which has no axes to choose from; use its indices or `in`")
    place = index if isinstance(index, tuple) else (index,)
    if len(place) != len(batch) or any(isinstance(i, slice) for i in place):
        raise IndexError(
            f"the index is {index!r}; expected {len(batch)} whole numbers, one for each axis of the batch {batch}"
        )
    return int(np.arange(np.prod(batch, dtype=int)).reshape(batch)[place])


def item_of(universal: UniversalSet, number: int) -> UniversalSet:
    """Return the set of one matrix by its number, leading axes flattened."""
    if not universal.batch:
        return universal
    place = tuple(int(i) for i in np.unravel_index(number, universal.batch))

    def figure(values: Any) -> Any:
        return values[place].item() if np.ndim(values) else values

    lift = universal._lift
    rows: dict[str, Any] = {}
    for name in ("mask", "scores", "_leverage", "_present", "groups", "group_scores", "needs"):
        array = getattr(universal, name)
        rows[name] = None if array is None else array[place]
    return replace(
        universal,
        **rows,
        epsilon=figure(universal.epsilon),
        rank=figure(universal.rank),
        total_bound=figure(universal.total_bound),
        factor=universal.factor.item(number),
        _lift=None if lift is None else lift.item(number),
    )


class ListedKeys:
    """The keys in the set of one matrix, as Python lists them, and the line and the table that show a set."""

    @where_arrays_are
    def __len__(self: Any) -> int:
        """Return the number of keys in the set of one matrix."""
        refuse_batch(self.batch, "len() is")
        return len(self.indices)

    @where_arrays_are
    def __contains__(self: Any, key: object) -> bool:
        """Tell whether the key of an index is in the set of one matrix."""
        refuse_batch(self.batch, "`in` tells keys")
        return key in self.indices.tolist()

    def __iter__(self: Any) -> Iterator[int]:
        """Yield the indices of the keys in the set of one matrix."""
        refuse_batch(self.batch, "iteration is over the keys")
        return iter(self.indices.tolist())

    @where_arrays_are
    def __repr__(self: Any) -> str:
        """Return the figures on one line; for a batch their least and largest values."""
        return line_of(self)

    @where_arrays_are
    def _repr_html_(self: Any) -> str:
        return html_of(self)
