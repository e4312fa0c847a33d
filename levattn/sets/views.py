"""A universal set as a line, as a table, as arrays for a file, and as the set of one matrix of its batch."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from levattn._core.arrays import to_numpy
from levattn._core.checks import needing

if TYPE_CHECKING:
    from levattn.sets.result import UniversalSet

__all__ = ["frame_of", "html_of", "item_of", "line_of", "part_of", "saved_arrays", "span"]

_KEYS_SHOWN = 10  # in a notebook


def span(values: Any) -> str:
    """Return a figure, or the least and the largest figure of a batch."""
    found = np.asarray(values)
    if not found.size:
        return "none"
    low, high = f"{found.min():.6g}", f"{found.max():.6g}"
    return low if low == high else f"{low} to {high}"


def _size(universal: UniversalSet) -> str:
    batch = f" in each of {universal.batch}" if universal.batch else ""
    return f"{span(universal.sizes)} of {universal.mask.shape[-1]} keys{batch}"


def _figures(universal: UniversalSet) -> list[tuple[str, str]]:
    """Return the properties of a set, as names and figures; a name alone is a flag."""
    if universal.coverage is not None:
        wish = "mass" if universal.mass is not None else "epsilon"
        queries = 0 if universal.needs is None else universal.needs.shape[-1]
        asked = span(universal.mass if wish == "mass" else universal.epsilon)
        given = [("guarantee", "'coverage'"), (wish, asked), ("coverage", f"{universal.coverage:.6g}")]
        return [*given, (f"{queries} queries", "")]
    figures = [("epsilon", span(universal.epsilon)), ("guarantee", repr(universal.guarantee))]
    figures += [("rank", span(universal.rank)), ("bound", span(universal.size_bound))]
    vacuous = int(np.sum(universal.is_vacuous))
    if vacuous:
        figures.append(("vacuous" if vacuous == np.size(universal.is_vacuous) else f"{vacuous} vacuous", ""))
    if universal.groups is not None:
        figures.append((f"{universal.hidden_groups.sum()} hidden groups", ""))
    return figures


def line_of(universal: UniversalSet) -> str:
    """Return the figures of a set on one line."""
    figures = (f"{name}={figure}" if figure else name for name, figure in _figures(universal))
    return f"UniversalSet({', '.join((_size(universal), *figures))})"


def html_of(universal: UniversalSet) -> str:
    """Return the figures of a set as a table, with its first keys if it is of one matrix."""
    rows = [("keys", _size(universal)), *((name, figure or "yes") for name, figure in _figures(universal))]
    if not universal.batch:
        indices, scores = universal.indices, to_numpy(universal.scores)
        shown = ", ".join(f"{i} ({scores[i]:.3g})" for i in indices[:_KEYS_SHOWN].tolist())
        more = f", and {len(indices) - _KEYS_SHOWN} more" if len(indices) > _KEYS_SHOWN else ""
        rows.append(("indices (scores)", (shown or "none") + more))
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(figure)}</td></tr>" for name, figure in rows)
    return f"<table><caption>UniversalSet</caption><tbody>{''.join(cells)}</tbody></table>"


def frame_of(universal: UniversalSet) -> Any:
    """Return the keys of a set as a pandas table, a row for each."""
    with needing("a table needs pandas", "frame"):
        import pandas as pd
    *batch, key = np.nonzero(to_numpy(universal.mask))
    names = [f"axis_{i}" for i in range(len(batch))]
    columns = dict(zip(names, batch, strict=True))
    return pd.DataFrame(columns | {"key": key, "score": to_numpy(universal.scores)[(*batch, key)]})


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
    values = ((name, counted[name] if name in counted else getattr(universal, name)) for name in names)
    arrays = {name: to_numpy(value) if hasattr(value, "shape") else np.asarray(value) for name, value in values}
    f = universal.f
    arrays["f"] = np.asarray(f if isinstance(f, int | float) else repr(f))
    return {name: array for name, array in arrays.items() if array.dtype != object}  # leaves out missing figures


def part_of(universal: UniversalSet, index: Any) -> UniversalSet:
    """Return the set of one matrix of a batch."""
    if not universal.batch:
        raise TypeError("the set is of one matrix, which has no axes to choose from; use indices, mask or `in`")
    place = index if isinstance(index, tuple) else (index,)
    if len(place) != len(universal.batch):
        raise IndexError(
            f"the index is {index!r}; expected {len(universal.batch)} whole numbers, one for each axis of the batch "
            f"{universal.batch}"
        )
    return item_of(universal, int(np.arange(np.prod(universal.batch, dtype=int)).reshape(universal.batch)[place]))


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
