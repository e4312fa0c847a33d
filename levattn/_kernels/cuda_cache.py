"""A disk cache of compiled CUDA kernels, one file each, in CuPy's own cache folder.

The folder is CUPY_CACHE_DIR, else ~/.cupy/kernel_cache; there is none where CUPY_CACHE_IN_MEMORY is 1. A file appears
whole or not at all, even if other processes write it too. It begins with a digest of its name and of its other bytes.
So a damaged file, a truncated file, or a file of another kernel counts as missing.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

from levattn._kernels.cache import say_uncached

_DIGEST = 32  # bytes


def key_of(*parts: str) -> str:
    """Return the name of the file for code that depends on some texts."""
    whole = b"".join(len(part.encode()).to_bytes(8, "little") + part.encode() for part in parts)
    return f"levattn-{_digest(whole).hex()}"


def kept_code(key: str) -> tuple[str, bytes] | None:
    """Return the kernel's name within its code, and the code, or None if the cache does not hold them."""
    folder = _folder()
    if folder is not None:
        with suppress(OSError):
            content = folder.joinpath(key).read_bytes()
            digest, rest = content[:_DIGEST], content[_DIGEST:]
            if digest == _digest(key.encode() + rest):
                name, _, code = rest.partition(b"\n")
                return name.decode(), code
    return None


def keep_code(key: str, name: str, code: bytes) -> None:
    """Keep code, in which the kernel is called `name`; warn once if that fails."""
    folder = _folder()
    if folder is None:
        return
    rest = name.encode() + b"\n" + code
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{key}.{secrets.token_hex(8)}"  # not a tempfile: the umask sets its permissions
        try:
            part.write_bytes(_digest(key.encode() + rest) + rest)
            part.replace(folder / key)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        if kept_code(key) != (name, code):  # Windows replaces no file that another process reads
            say_uncached(error.strerror or str(error), "CUPY_CACHE_DIR")


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


def _folder() -> Path | None:
    if os.environ.get("CUPY_CACHE_IN_MEMORY") == "1":
        return None
    named = os.environ.get("CUPY_CACHE_DIR")
    if named:
        return Path(named)
    with suppress(RuntimeError):  # there may be no home
        return Path("~/.cupy/kernel_cache").expanduser()
    return None
