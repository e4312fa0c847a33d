"""What the tests of the adversary share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import ranks


@pytest.fixture(scope="module", autouse=True)
def leaves_no_ranks() -> Iterator[None]:
    yield
    ranks.stop()
