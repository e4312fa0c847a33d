"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Write a file atomically: it appears complete, or not at all.

    Yields a binary stream to a temporary file in the folder of `path`. On success that file replaces
    `path`. If the block raises, the temporary file is removed and `path` stays as it was.

    Parameters
    ----------
    path : path-like
        The file to write. A symbolic link is followed. A file that is replaced keeps its mode; a new one gets the mode
        of the user's umask.

    Yields
    ------
    binary file
        Open for writing.

    Raises
    ------
    OSError
        If the folder does not exist or cannot be written.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from levattn.io import replace_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replace_file(pathlib.Path(folder, "a.bin")) as stream:
    ...         _ = stream.write(b"all of it")
    ...     pathlib.Path(folder, "a.bin").read_bytes()
    b'all of it'
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        mode = stat.S_IMODE(target.stat().st_mode)
    except OSError:
        mode = None  # a new file, with the mode of the umask
    # Others may not read what is to replace a private file, from the first byte on.
    least = 0o666 if mode is None else 0o600
    stream = open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, least))  # noqa: SIM115 (see below)
    try:
        if mode is not None:
            with contextlib.suppress(OSError):  # a file system without modes
                temporary.chmod(mode)
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
