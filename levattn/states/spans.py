"""The numbers of the rows of a stream, in spans: no number comes twice."""

from __future__ import annotations

from typing import Any

from levattn._core.serialize import whole

MOST_NUMBERS = 2**62  # numbers of rows are below

Spans = list[tuple[int, int]]  # of row numbers, ascending


def with_span(spans: Spans, new: tuple[int, int]) -> Spans:
    """Return the spans of row numbers with one more, or raise if it overlaps another or ends too late."""
    if new[0] == new[1]:
        return spans
    if new[1] >= MOST_NUMBERS:
        raise ValueError(
            f"rows {new[0]} to {new[1] - 1} come; expected numbers below 2**62. Begin at another row_start="
        )
    if spans and spans[-1][1] == new[0]:
        return [*spans[:-1], (spans[-1][0], new[1])]
    out: Spans = []
    for start, stop in sorted([*spans, new]):
        if out and start < out[-1][1]:
            raise ValueError(
                f"rows {max(start, out[-1][0])} to {min(stop, out[-1][1]) - 1} are there already; expected others. "
                "Number them by row_start="
            )
        if out and start == out[-1][1]:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


def with_spans(spans: Spans, others: Spans, shift: int = 0) -> Spans:
    """Return the spans of two states, of which the second begins `shift` rows later, or raise."""
    for start, stop in others:
        spans = with_span(spans, (start + shift, stop + shift))
    return spans


def stored_spans(stored: Any, next_row: int) -> Spans:
    """Return the spans of a stored state, or raise ValueError if none can be those before the row `next_row`."""
    spans, last = [], -1
    for start, stop in stored:
        spans.append((whole(start, last + 1), whole(stop, start + 1)))
        last = stop
    if not last <= next_row < MOST_NUMBERS:
        raise ValueError(f"the next row is {next_row}, after rows up to {last}")
    return spans
