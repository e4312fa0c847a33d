"""The profile of heads for a command, and the message if there is none."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from levattn.cli.output import fail, report
from levattn.exceptions import RecallWarning


def check_profile(path: Path | None) -> None:
    """End the program if there is no such file."""
    if path is not None and not path.exists():
        fail(f"{path}: no such file; make it with `levattn profile`")


def profile_of(path: Path | None, budget: float) -> Any:
    """Return the profile in a file, or None; report a budget that all heads of a decoder share."""
    if path is not None:
        from levattn.integrations.transformers import HeadProfile

        return HeadProfile.load(path)
    if budget != 1:
        shown = f"{budget:.0%}" if budget < 1 else f"{budget} slots"
        report(
            f"all heads are cut to {shown}, because no profile is given: decoders cannot recall facts of the text; "
            "make a profile with `levattn profile` and give it with --heads"
        )
    return None


@contextmanager
def told_of_recall() -> Iterator[None]:
    """Suppress the same warning of the library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecallWarning)
        yield
