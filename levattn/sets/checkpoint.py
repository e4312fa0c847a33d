"""The file in which two passes save their progress."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levattn._core.checks import whole_number

_CHECKPOINT_ROWS = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """The file in which the passes save their progress, how often, and for which job."""

    path: str | os.PathLike[str] | None  # of the file; None for no checkpoints
    every: int  # rows from one to the next
    job: dict[str, Any]  # options that must be the same when the passes resume

    @classmethod
    def checked(cls, path: Any, every: Any, job: dict[str, Any]) -> Checkpoint:
        """Return a checkpoint, or raise for options of the wrong kind."""
        if every is None:
            every = _CHECKPOINT_ROWS
        elif path is None:
            raise ValueError(f"checkpoint_rows is {every!r} without checkpoint; expected the path of a file as well")
        every = whole_number("checkpoint_rows", every, what="a whole number of rows")
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(f"checkpoint is of type {type(path).__name__}; expected the path of a file")
        return cls(path, every, job)

    def tidy(self) -> None:
        """Remove the temporary files of a run that was killed while it wrote."""
        if self.path is not None:
            target = Path(os.path.realpath(self.path))
            for half in target.parent.glob(f".{glob.escape(target.name)}.{'?' * 12}.tmp"):
                half.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the file when the work is done."""
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)
