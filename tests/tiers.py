"""Which tests are left to `make test-all`: of large tables of parameters those that vary more than one axis at once.

A plugin of pytest, which conftest registers. A test of several axes (decorators `parametrize`) keeps all of its items
if they are few, or if it is marked `crossed`, because what it looks for lies in the combinations. Else an item that
departs from the first value of more than one axis is thorough.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

FEW = 24


def departs(item: Any, first: Any) -> int:
    """Of how many axes the item has another value than the first."""
    axes = [marker.args[0] for marker in item.iter_markers("parametrize")]
    names = [axis.replace(",", " ").split() if isinstance(axis, str) else list(axis) for axis in axes]
    value, base = item.callspec.params, first.callspec.params
    return sum(any(name in value and value[name] is not base[name] for name in axis) for axis in names)


class Tiers:
    """The hook that marks items."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        tests: dict[object, list[Any]] = defaultdict(list)
        for item in items:
            if hasattr(item, "callspec"):
                tests[item.getparent(pytest.Module), item.getparent(pytest.Class), item.originalname].append(item)
        for same in tests.values():
            if len(same) > FEW and not any(same[0].iter_markers("crossed")):
                for item in same:
                    if departs(item, same[0]) > 1:
                        item.add_marker(pytest.mark.thorough)
