"""Keys from files: sources of row chunks that can be read again and again.

`open_keys` reads the headers of files and returns a `KeySource`; the numbers themselves are read when the source is
iterated, read or loaded. Nothing here ever unpickles, or runs anything that a file names.
"""

from __future__ import annotations

from levattn.io.source import KeySource, open_keys
from levattn.io.write import replace_file

__all__ = ["KeySource", "open_keys", "replace_file"]
