"""Groups of query heads that share keys and values: their common form, and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from levattn.attention.common.space import namespace_of


@dataclass(frozen=True)
class Heads:
    """Numbers of heads."""

    shared: int  # key and value heads, G
    group: int  # query heads that read each of them
    bare: bool  # whether no argument has an axis of heads

    def per_query(self, name: str, array: Any, axes: int) -> Any:
        """Return a dense array (..., H, axes) as (..., G, H / G, axes).

        It may also have one head for each group, or for all; the other size is then 1.
        """
        xp = namespace_of(array)
        last = tuple(array.shape[array.ndim - axes :])
        if array.ndim == axes:
            return array[None, ...]
        lead, heads = tuple(array.shape[: array.ndim - axes - 1]), array.shape[array.ndim - axes - 1]
        if heads == self.shared * self.group:
            split = (self.shared, self.group)
        elif heads in (1, self.shared):
            split = (heads, 1)
        else:
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}; expected {self.shared * self.group} heads as the queries have"
                + (f", or {self.shared} as the keys have" if self.group > 1 else "")
            )
        return xp.reshape(array, (*lead, *split, *last))

    def of_queries(self, **arrays: Any) -> dict[str, tuple[Any, int]]:
        """Return dense arrays (..., H, T, n) in the form for `stacked`: (..., G, H / G, T, n), of 3 axes each."""
        return {name: (self.per_query(name, array, 2), 3) for name, array in arrays.items()}

    def joined(self, array: Any, axes: int = 2) -> Any:
        """Return a result (..., G, H / G, axes) as (..., H, axes)."""
        shape = self.leading(tuple(array.shape[: array.ndim - axes - 1])) + tuple(array.shape[array.ndim - axes :])
        return namespace_of(array).reshape(array, shape)

    def leading(self, batch: tuple[int, ...]) -> tuple[int, ...]:
        """Return the leading axes of a result from the leading axes of keys and values."""
        return batch if self.bare else (*batch[:-1], self.shared * self.group)


def heads_of(q: Any, k: Any, V: Any, *, names: tuple[str, str, str] = ("q", "k", "V")) -> Heads:
    """Return the heads of dense queries, keys and values, or raise an error with the caller's names."""
    heads = [array.shape[-3] if array.ndim > 2 else 1 for array in (q, k, V)]
    shared = max(heads[1:])
    if not all(heads):
        raise ValueError(f"{', '.join(names)} have {heads} heads; expected at least one of each")
    if any(count not in (1, shared) for count in heads[1:]):
        raise ValueError(f"{names[1]} has {heads[1]} heads and {names[2]} has {heads[2]}; expected as many")
    if heads[0] % shared and heads[0] != 1:
        raise ValueError(
            f"{names[0]} has {heads[0]} heads and {names[1]} has {shared}; expected a multiple, so that each head of "
            f"{names[1]} serves equally many of {names[0]}"
        )
    return Heads(shared, max(1, heads[0] // shared), all(array.ndim == 2 for array in (q, k, V)))
