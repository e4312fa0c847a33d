"""Keys from files: re-iterable sources of row chunks.

`open_keys` reads the headers of files and returns a `KeySource`. The numbers themselves are read when the caller
iterates, reads or loads the source. This package never unpickles, and never runs code that a file names.
"""

from __future__ import annotations

from levattn._core.files import replace_file
from levattn.io.source import KeySource, open_keys

__all__ = ["KeySource", "open_keys", "replace_file"]
