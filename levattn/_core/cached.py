"""An attribute that is computed at its first use."""

from __future__ import annotations

import functools
from typing import Any, Self, TypeVar, overload

_T = TypeVar("_T")


class cached_property(functools.cached_property[_T]):  # noqa: N801
    """The one of `functools` without a lock, as it is from Python 3.12 on.

    Before, threads waited for each other if they computed the attribute of two objects, and a process that was forked
    meanwhile waited forever. Now two threads may compute the attribute of one object, and both get the first value.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> _T: ...
    def __get__(self, instance: object, owner: type[Any] | None = None) -> Self | _T:
        if instance is None:
            return self
        known: dict[Any, Any] = vars(instance)
        name = self.attrname
        if name not in known:
            known.setdefault(name, self.func(instance))
        found: _T = known[name]
        return found
