"""The order of the gallery, with the three main uses first, and what is kept between its examples."""

from __future__ import annotations

import gc
from typing import Any

__all__ = ["MainUsesFirst", "keep"]

_MAIN = ("plot_universal_set.py", "plot_prune_encoder.py", "plot_stream_chunks.py")


class MainUsesFirst:
    """The key of an example, for sphinx-gallery."""

    def __init__(self, folder: Any) -> None:
        del folder

    def __call__(self, name: str) -> tuple[int, str]:
        """Return the place of an example, by the name of its file."""
        return (_MAIN.index(name) if name in _MAIN else len(_MAIN), name)

    def __repr__(self) -> str:
        return type(self).__name__  # of which sphinx keeps a digest


def keep(*_: Any) -> None:
    """Let no collection between examples look through what was made before."""
    gc.freeze()
