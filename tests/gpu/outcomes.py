"""A plugin of pytest: counts of outcomes in the file that ``GPU_OUTCOMES`` names, after each test.

So a run that is ended by its limit tells how far it came.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Outcomes:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts = {"tests passed": 0, "tests skipped": 0, "tests failed": 0}
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._counts["tests failed"] += 1
            self._failed.append(report.nodeid)
        elif report.skipped:
            self._counts["tests skipped"] += 1
        elif report.when == "call":
            self._counts["tests passed"] += 1
        else:
            return
        beside = self._path.with_name(f"{self._path.name}.part")
        beside.write_text(json.dumps({"counts": self._counts, "failed": self._failed}), "utf-8")
        beside.replace(self._path)


def pytest_configure(config: Any) -> None:
    path = os.environ.get("GPU_OUTCOMES")
    if path and not hasattr(config, "workerinput"):  # of several processes, the one that hears of all tests
        config.pluginmanager.register(Outcomes(Path(path)))
