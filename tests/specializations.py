"""How many specializations of kernels the suite compiles or loads: each takes a user some tenth of a second.

Importing the tests must need none: each process imports all of them, and would compile what one of them needs.

A plugin of pytest, which conftest registers. Processes of pytest-xdist tell theirs to the one that started them.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

MOST = 250

_others: set[str] = set()
_imported: set[str] = set()  # those that were there when the last file had been imported


def here() -> set[str]:
    """The specializations of this process, as a kernel and the types of its arguments."""
    found = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("levattn._kernels."):
            for kernel in vars(module).values():
                for signature in getattr(kernel, "signatures", ()) or ():
                    found.add(f"{kernel.__module__}.{kernel.__name__}{signature}")
    return found


class Counter:
    """The hooks that count."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        _others.update(output.get("specializations", ()))
        _imported.update(output.get("imported", ()))

    def pytest_collection_finish(self) -> None:
        _imported.update(here())

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output.update(specializations=sorted(here()), imported=sorted(_imported))
        elif (len(_others | here()) > MOST or _imported) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        count = len(_others | here())
        terminalreporter.write_line(f"{count} specializations of kernels were compiled or loaded; {MOST} may be.")
        if _imported:
            terminalreporter.write_line(f"Importing the tests took {len(_imported)}; none may be: {sorted(_imported)}")
