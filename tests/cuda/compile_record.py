"""What releases of NVRTC made of the sources, on record, because they make the same of the same text.

`compiled.json` holds, for a source and a card, the release, a digest of all that was compiled, and the faults found.
Where the digest is another, the source is compiled, and the record is left as it is. ``COMPILED=write make cuda``
writes a record of what it asked for, and ``COMPILED=again`` takes nothing from it (`make test-all`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

PATH = Path(__file__).parent / "compiled.json"


@dataclass
class Record:
    """Findings by what was compiled: first the digest, then the faults."""

    held: dict[str, list[str]]
    mode: str
    asked: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Record:
        return cls(json.loads(PATH.read_text(encoding="utf-8")), os.environ.get("COMPILED", ""))

    def found(self, name: str, library: str, text: Iterable[str], compute: Callable[[], list[str]]) -> list[str]:
        """The faults of a text that a release compiled, or compiles now."""
        key, digest = f"{name} {library}", sha256("\0".join(text).encode()).hexdigest()[:24]
        known = self.held.get(key, [""])
        if known[0] != digest or self.mode == "again":
            known = [digest, *compute()]
        self.asked[key] = known
        return known[1:]

    def write(self) -> None:
        """Write what was asked for, if the mode says so."""
        if self.mode == "write":
            lines = [f"{json.dumps(key)}: {json.dumps(self.asked[key])}" for key in sorted(self.asked)]
            PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
