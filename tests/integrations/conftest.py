"""Models of tests are small, and their texts short: they are pruned from twice the slots on.

Inside: sets how many positions `prune` reads densely where a selection does not say.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True, scope="session")
def pruned_from_the_start() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("torch") and find_spec("transformers"):
            patch.setattr("levattn.integrations.transformers.pruned.START", 0)
        yield
