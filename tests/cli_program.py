"""The program in this process, on streams like those of a process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest


class Done(NamedTuple):
    status: int
    stdout: bytes
    stderr: str


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Done]]:
    """Run the program in a folder of its own, with two files of keys.

    out, err: the files of its streams; None for a closed one, "broken" for a pipe that nobody reads.
    """
    from levattn import cli

    monkeypatch.chdir(tmp_path)
    np.save("keys.npy", np.diag([3.0, 2.0, 1.0]))
    np.savez("two.npz", a=np.eye(3), b=np.eye(3))
    with ExitStack() as open_files:

        def stream(where: Any, encoding: str, errors: str) -> Any:
            if where is None:
                return None
            if where == "broken":
                reading, end = os.pipe()
                os.close(reading)
                return open_files.enter_context(os.fdopen(end, "w", encoding=encoding, errors=errors))
            return open_files.enter_context(Path(where).open("w", encoding=encoding, errors=errors))

        def run(
            *arguments: str, encoding: str = "utf-8", errors: str = "strict", out: Any = "out", err: Any = "err"
        ) -> Done:
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", stream(out, encoding, errors))
                patch.setattr(sys, "stderr", stream(err, encoding, "backslashreplace"))
                patch.setattr(sys, "argv", ["levattn", *arguments])
                with pytest.raises(SystemExit) as end:
                    cli.main()
                sys.stdout.flush()  # as Python does at the end, where it must not fail
                sys.stderr.flush()
            assert isinstance(end.value.code, int)
            printed = Path(out).read_bytes() if out == "out" else b""
            said = Path(err).read_text(encoding=encoding) if err == "err" else ""
            return Done(end.value.code, printed, said)

        yield run
