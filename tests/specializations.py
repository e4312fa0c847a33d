"""How many specializations of kernels the suite compiles or loads: each takes a user some tenth of a second.

A plugin of pytest, which conftest registers. Processes of pytest-xdist tell theirs to the one that started them.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

MOST = 250

_others: set[str] = set()


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
        _others.update(getattr(node, "workeroutput", {}).get("specializations", ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["specializations"] = sorted(here())
        elif len(_others | here()) > MOST and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        count = len(_others | here())
        terminalreporter.write_line(f"{count} specializations of kernels were compiled or loaded; {MOST} may be.")
