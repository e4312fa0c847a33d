"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


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
    TypeError
        If `path` is no path.
    ValueError
        If it is empty.
    OSError
        If the folder does not exist or cannot be written, or if the path names a folder, a device or a pipe.

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
    target = checked_target(path)
    try:
        mode = stat.S_IMODE(target.stat().st_mode)
    except OSError:
        mode = None  # a new file, with the mode of the umask
    # Others may not read what is to replace a private file, from the first byte on.
    least = 0o666 if mode is None else 0o600
    temporary = target.with_name(f".{_beginning(target)}.{secrets.token_hex(6)}.tmp")
    try:  # an interrupt may come as soon as the file is there
        try:
            stream = open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, least))  # noqa: SIM115
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None  # of the kind of its number
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


def checked_path(path: Any, name: str = "path", what: str = "file") -> str | os.PathLike[str]:
    """Return `path` as it is, or raise if it cannot be the path of a file, or of another `what`."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f"{name} is of type {type(path).__name__}; expected the path of a {what}")
    if not os.fspath(path):
        raise ValueError(f"{name} is empty (an unset variable?); expected the path of a {what}")
    return path


def checked_target(path: Any, name: str = "path", *, write: bool = False) -> Path:
    """Return the file that a path names, links followed, or raise for a path that no file can have.

    `write`: also raise if the folder takes no file.
    """
    shown = os.fspath(checked_path(path, name))
    target = Path(os.path.realpath(path))
    try:
        mode = Path(path).stat().st_mode  # of what is there, as a pipe need not have a path of its own
    except OSError:
        mode = stat.S_IFDIR if shown.endswith(("/", os.sep)) else stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, f"{name} is a folder; name a file in it", shown)
    if not stat.S_ISREG(mode):
        raise FileExistsError(errno.EEXIST, f"{name} is a device or a pipe, which a file would replace", shown)
    if target.is_symlink():
        raise OSError(errno.ELOOP, f"{name} is a link that leads to itself", shown)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"{name} lies in a folder that does not exist; make it first", shown)
    if write:
        try:
            with tempfile.TemporaryFile(dir=target.parent):
                pass
        except OSError as error:
            raise OSError(error.errno, f"{name}: {error.strerror}", shown) from None
    return target


def remove_halves(target: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote a file."""
    for half in target.parent.glob(glob.escape(f".{_beginning(target)}.") + "?" * 12 + ".tmp"):
        half.unlink(missing_ok=True)


def _beginning(target: Path) -> str:
    """Return a name for temporary files of a file, shortened as most systems take 255 bytes."""
    name = target.name.encode(errors="surrogateescape")
    if len(name) <= 200:
        return target.name
    return f"{name[:180].decode(errors='ignore')}-{hashlib.sha256(name).hexdigest()[:16]}"
