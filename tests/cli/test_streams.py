"""The program on every standard output: any encoding, closed, full, a pipe that nobody reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import levattn

HOME = Path(__file__).parents[2]
DEVICE = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
CLOSED = "levattn: standard output is closed; open it, as with > FILE\n"
FULL = "levattn: no space left on the disk; free some, or write elsewhere\n"

# Every command that needs no model, and the files that it makes; the tests of models have the others.
HELPED = (
    "demo",
    "universal-set",
    "scores",
    "inspect",
    "prune-report",
    "profile",
    "compress",
    "ask",
    "warmup",
    "completion",
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "--help": (),
    "": (),
    "--version": (),
    **{f"{name} --help": () for name in HELPED},
    "completion bash": (),
    "universal-set keys.npy --epsilon 0.1 -o set.npz": ("set.npz",),
    "universal-set keys.npy --epsilon 0.1 --json -o set.npz --plot set.svg": ("set.npz", "set.svg"),
    "universal-set two.npz --tensor a --tensor b --epsilon 0.1": (),
    "universal-set keys.npy --epsilon 0.1 --function softmax:1": (),
    "universal-set keys.npy --epsilon 0.1 --scores set.csv": ("set.csv",),
    "scores keys.npy -o scores.jsonl": ("scores.jsonl",),
    "scores keys.npy --json -o scores.npy": ("scores.npy",),
}


def check_ends(program: Any, arguments: list[str], files: tuple[str, ...], errors: tuple[Any, ...] = ("err",)) -> None:
    """Check the status and the error line where standard output takes nothing; files are made all the same."""
    for out, status, line in ((None, 1, CLOSED), ("/dev/full", 1, FULL), ("broken", 141, "")):
        for err in errors:
            assert program(*arguments, out=out, err=err) == (status, b"", line if err == "err" else "")
            check_made(files)


def check_once(program: Any, arguments: list[str], files: tuple[str, ...]) -> None:
    """Check a slow command in ASCII, and where standard output is closed."""
    found = program(*arguments, encoding="ascii")
    assert found.status == 0, found.stderr
    assert found.stdout.isascii()
    assert b"\\u" not in found.stdout + found.stderr.encode()
    check_made(files)
    found = program(*arguments, encoding="ascii", out=None)
    assert (found.status, found.stderr.splitlines()[-1] + "\n") == (1, CLOSED)
    check_made(files)


def check_made(files: tuple[str, ...]) -> None:
    """Check that the files are there and whole, and remove them for the next run."""
    for name in files:
        if name.endswith(".npz"):
            with np.load(name) as found:
                assert found["mask"].all()
        assert Path(name).stat().st_size
        Path(name).unlink()


@DEVICE
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_where_standard_output_takes_nothing(command: str, program: Any) -> None:
    errors = ("err", None, "/dev/full", "broken") if command == "--help" else ("err",)
    check_ends(program, command.split(), COMMANDS[command], errors)


@DEVICE
def test_standard_error_that_takes_nothing_does_not_change_the_status(program: Any) -> None:
    for err in (None, "/dev/full", "broken"):
        assert program("universal-set", "keys.npy", err=err).status == 0
        assert program("universal-set", "nothing.npy", err=err).status == 1
        assert program("universal-set", "--size", "x", err=err).status == 2


def test_names_of_files_that_no_encoding_holds(program: Any) -> None:
    name = os.fsdecode(b"\xe9\xff.npz")
    try:
        np.savez(name, a=np.eye(3), b=np.eye(3))
    except OSError:
        pytest.skip("the file system takes no such name")
    for encoding in ("utf-8", "ascii"):
        found = program("universal-set", name, "--tensor", "a", "--tensor", "b", encoding=encoding)
        assert (found.status, found.stderr) == (0, "")
        assert rb"\udce9" in found.stdout
        found = program("universal-set", name, "--tensor", "a", "--json", encoding=encoding)
        assert json.loads(found.stdout)["file"] == name


@pytest.mark.skipif(os.name == "nt", reason="the shell of POSIX")
def test_processes_with_closed_streams_and_a_posix_locale(tmp_path: Path) -> None:
    np.save(tmp_path / "keys.npy", np.eye(3))
    levattn.universal_set(np.eye(3), 0.1)
    posix = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = f"'{sys.executable}' -m levattn universal-set keys.npy --epsilon 0.1 -o set.npz"
    for redirected, status, line in ((">&- <&-", 1, CLOSED), ("", 0, "")):
        done = subprocess.run(
            ["/bin/sh", "-c", f"{command} {redirected}"],
            cwd=tmp_path,
            capture_output=True,
            check=False,
            env=os.environ | posix | {"PYTHONPATH": str(HOME)},
        )
        assert (done.returncode, done.stderr.decode()) == (status, line)
        assert (b"epsilon |U|" in done.stdout) == (status == 0)
        with np.load(tmp_path / "set.npz") as found:
            assert found["mask"].all()
        (tmp_path / "set.npz").unlink()
