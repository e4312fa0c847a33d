"""The program, its parts.

Inside: failures and interrupts are planted where no command line reaches.
"""

from __future__ import annotations

import ast
import dataclasses
import errno
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
safetensors_numpy = pytest.importorskip("safetensors.numpy")
pytest.importorskip("matplotlib")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from test_cli import Array, assert_columns_explained, file, keys, queries, refused, run  # noqa: E402
from test_cli_contexts import Tags, decoder, text  # noqa: E402
from test_cli_models import encoder, kind_of_encoder  # noqa: E402
from test_streams import COMMANDS, HOME, check_made  # noqa: E402

import levattn  # noqa: E402
from levattn import cli, plots  # noqa: E402
from levattn._core.serialize import pack  # noqa: E402
from levattn.cli import contexts, output  # noqa: E402
from levattn.cli import demo as demonstration  # noqa: E402
from levattn.cli.output import IN_LETTERS, encodable, of_system  # noqa: E402
from levattn.cli.program import _errors_in_one_line  # noqa: E402

__all__ = ["decoder", "encoder", "file", "keys", "queries", "text"]  # fixtures

OUTPUTS = {"--output": "out.npz", "--plot": "out.png", "--checkpoint": "state"}


@pytest.mark.parametrize(
    ("name", "options", "drawn"),
    [
        ("a.png", "--epsilon 0.1", {"leverage scores", "ε = 0.1: |U| = 3", "bound rank/ε = 60"}),
        ("A.PNG", "--size 9", {"leverage scores", "|U| = 9"}),
        ("a.svg", "--epsilon 0.1 --function 1", {"certified bounds", "ε = 0.1: |U| = 3", "bound = 60"}),
        ("a.pdf", "--epsilon 0.1 --function softmax:4", {"certified bounds", "ε = 0.1: |U| = 121"}),
    ],
)
def test_pictures_say_what_the_scores_are(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: str, drawn: set[str]
) -> None:
    figures: list[Any] = []
    figure_bytes = plots.figure_bytes

    def seen(figure: Any, suffix: str) -> bytes:
        figures.append(figure)
        return figure_bytes(figure, suffix)

    monkeypatch.setattr(plots, "figure_bytes", seen)
    picture, text = file.with_name(name), options.partition("--function ")[2]
    assert run("universal-set", file, *options.split(), "--plot", picture).exit_code == 0
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[picture.suffix.lower()]
    assert picture.read_bytes().startswith(start)
    (ax,) = figures[0].axes
    assert {line.get_label() for line in ax.lines} == drawn
    assert ax.get_ylabel() == ("certified bound" if text else "leverage score")
    assert ax.get_title() == (f"keys.npy ({text})" if text else "keys.npy")


@pytest.mark.usefixtures("queries")
@pytest.mark.parametrize("selection", ["--epsilon 0.1", "--size 9"])
def test_a_picture_of_scores_by_queries_has_no_threshold(
    file: Path, monkeypatch: pytest.MonkeyPatch, selection: str
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plots, "figure_bytes", lambda figure, _: figures.append(figure) or b"")
    options = ("--queries", file.with_name("q.npy"), "--coverage", "0.9", "--function", "softmax")
    command = ("universal-set", file, *selection.split(), *options)
    assert run(*command, "--plot", file.with_name("a.png")).exit_code == 0
    (size,) = (found["size"] for found in json.loads(run(*command, "--json").stdout)["sets"])
    (ax,) = figures[0].axes
    assert [line.get_label() for line in ax.lines] == ["scores by queries", f"|U| = {size}"]
    assert [text.get_text() for text in ax.get_legend().texts] == ["scores by queries", f"|U| = {size}"]
    assert (ax.get_ylabel(), ax.get_title()) == ("score by queries", "keys.npy (softmax)")


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path, keys: Array) -> None:
    control = "\x1b]0;title\x07\x1b[2J\x9b2J\x7f\u202e"
    shown = r"\x1b]0;title\x07\x1b[2J\x9b2J\x7f\u202e"
    header = f"{{'descr': '{control[:-1]}', 'fortran_order': False, 'shape': (1, 1)}}".encode("latin-1")
    named, inside, good = (tmp_path / f"{name}.npy" for name in (control, "inside", "good"))
    inside.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    np.save(good, keys)
    checkpoint = tmp_path / f"{control}.bin"
    checkpoint.write_bytes(pack(control, 1, {}, {}))
    set_of = ("universal-set", "--epsilon", "0.1")
    for arguments in (
        (*set_of, named),
        (*set_of, inside),
        (*set_of, good, "--output", tmp_path / control / "a.npz"),
        (*set_of, good, "--checkpoint", checkpoint),
        ("prune-report", tmp_path / control, "--text", good),
    ):
        line = refused(*arguments)
        assert line[:-1].isprintable()
        assert shown[:-6] in line
    for arguments in (("universal-set", good, f"--{control}"), (control,), (*set_of, good, "--function", control)):
        line = refused(*arguments, status=2)
        assert line[:-1].isprintable()
        assert "title" in line


@pytest.mark.parametrize("command", [("universal-set", "--size", "2"), ("scores",)])
def test_identifiers_do_not_reach_the_terminal_as_they_are(tmp_path: Path, command: tuple[str, ...]) -> None:
    pytest.importorskip("pyarrow")
    table = tmp_path / "keys.csv"
    table.write_text('id,a,b\n"\x1b[31mred\x1b]0;title\x07",1.5,2.5\n"two\nlines [bold]",2.5,1.5\n')
    found = run(command[0], table, "--id", "id", *command[1:]).stdout
    assert all(line.isprintable() for line in found.splitlines())
    assert r"\x1b[31mred\x1b]0;title\x07" in found
    assert r"two\nlines [bold]" in found


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_warning_of_levattn_is_one_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = levattn.open_keys

    def warn(*arguments: Any, **options: Any) -> Any:
        warnings.warn("compiled code\ncannot be \x1bkept", levattn.CacheWarning, stacklevel=1)
        warnings.warn("another", UserWarning, stacklevel=1)
        return opened(*arguments, **options)

    monkeypatch.setattr(levattn, "open_keys", warn)
    with pytest.warns(UserWarning, match="another"):
        result = run("universal-set", file, "--epsilon", "0.1")
    assert (result.exit_code, result.stderr) == (0, "levattn: compiled code cannot be \\x1bkept\n")


def test_a_file_without_permission_is_refused_with_status_1(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer's own check of the permission would take it for a wrong command line; a superuser may read all files."""

    def forbidden(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **how: mode != os.R_OK and access(path, mode, **how))
    monkeypatch.setattr(Path, "open", forbidden)
    for command in ("universal-set", "scores"):
        assert f"{file}: no permission; choose another place" in refused(command, file)


def test_a_scheduler_that_does_not_answer_is_one_line_with_a_remedy(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed")

    class Client:
        def __init__(self, address: str, **_: object) -> None:
            raise OSError(f"Timed out trying to connect to {address} after 30 s")  # as distributed does

    monkeypatch.setattr(distributed, "Client", Client)
    line = refused("universal-set", file, "--epsilon", "0.1", "--scheduler", "tcp://127.0.0.1:1")
    assert line.endswith(" after 30 s; check --scheduler, and whether it is running\n")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("option", OUTPUTS)
def test_outputs_that_cannot_be_written(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    command = ("universal-set", file, "--epsilon", "0.3", option)
    line = refused(*command, tmp_path / "none" / OUTPUTS[option])
    assert "there is no folder" in line
    assert "make it first" in line
    path = tmp_path / OUTPUTS[option]
    path.mkdir()
    assert refused(*command, path) == f"levattn: {path} is a folder; name another file with {option}\n"
    path.rmdir()
    path.symlink_to("/dev/null")
    assert "not a regular file; name another" in refused(*command, path)
    path.unlink()
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    assert refused(*command, path) == (
        f"levattn: {tmp_path}: no permission to write there; name another file with {option}\n"
    )


@pytest.mark.usefixtures("no_work")
def test_folders_that_the_demo_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("")
    for out in ("taken", "taken/inside"):
        assert "taken is not a folder" in refused("demo", "--out", tmp_path / out)
    (tmp_path / "demo.svg").mkdir()
    line = refused("demo", "--out", tmp_path)
    assert line == f"levattn: {tmp_path / 'demo.svg'} is a folder; name another folder with --out\n"
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    assert refused("demo", "--out", tmp_path / "new") == (
        f"levattn: {tmp_path}: no permission to write there; name another folder with --out\n"
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [(OSError("No space left on device"), "No space left on device"), (MemoryError(), "not enough memory")],
)
def test_failed_drawing_writes_no_file_at_all(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    def fail(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(plots, "figure_bytes", fail)
    command = ("universal-set", file, "--size", "3", "-o", tmp_path / "out.npz", "--plot", tmp_path / "out.png")
    assert refused(*command).startswith(f"levattn: {line}")
    assert [path.name for path in tmp_path.iterdir()] == ["keys.npy"]


def test_failed_writing_keeps_the_old_file(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.npz"
    output.write_bytes(b"the old one")

    def fail(stream: Any, **_: object) -> None:
        stream.write(b"half")
        raise PermissionError(13, "Permission denied", str(output))

    monkeypatch.setattr(np, "savez", fail)
    assert "no permission; choose another place" in refused("universal-set", file, "--size", "3", "-o", output)
    assert output.read_bytes() == b"the old one"
    assert {path.name for path in tmp_path.iterdir()} == {"keys.npy", "out.npz"}


@pytest.mark.usefixtures("two_layers")
def test_demo_fails_loudly_if_an_entry_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstration, "_missed", lambda *_: 1)
    result = run("demo", "--json", "--out", tmp_path)
    assert result.exit_code == 1
    assert "48 heavy entries were missed" in result.stderr
    assert json.loads(result.stdout)["summary"]["missed"] == 48


def test_misses_are_counted_by_brute_force() -> None:
    keys = np.eye(3)
    heavy = levattn.heavy_attention(keys, keys, 0.5)
    A = demonstration._x2_attention(keys, keys)
    assert demonstration._missed(A, heavy, 0.5) == 0
    A[0, 1] = A[2, 0] = 0.5
    assert demonstration._missed(A, heavy, 0.5) == 2
    without_attention = demonstration._x2_attention(np.zeros((1, 3)), keys)
    np.testing.assert_array_equal(without_attention, [[0.0, 0.0, 0.0]])


def test_ctrl_c_is_one_line_and_names_the_checkpoint(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, output = file.with_name("state"), file.with_name("set.npz")

    def interrupt(*_: object, checkpoint: Path | None = None, **__: object) -> None:
        if checkpoint is not None:
            checkpoint.write_bytes(b"so far")
        raise KeyboardInterrupt

    monkeypatch.setattr(levattn, "scan_set", interrupt)
    options = ("universal-set", file, "--epsilon", "0.1", "-o", output)
    assert refused(*options, status=130) == "levattn: interrupted\n"
    line = refused(*options, "--checkpoint", state, status=130)
    assert line == f"levattn: interrupted; {state} holds the progress, so run the same command again to continue\n"
    assert not output.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize(("status", "expected"), [(0, 1), (None, 1), (3, 3)])
def test_text_that_is_lost_at_the_end_is_no_success(
    status: int | None, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        full.write("text")
        with pytest.raises(SystemExit) as ending, _errors_in_one_line():
            sys.exit(status)
    assert ending.value.code == expected
    reason = "" if status else "levattn: no space left on the disk; free some, or write elsewhere\n"
    assert capsys.readouterr().err == reason


def test_a_closed_output_leaves_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open("w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
    with pytest.raises(SystemExit) as ending, _errors_in_one_line():
        sys.exit(130)
    assert ending.value.code == 130


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EACCES, "Permission denied", "/a/b"), "/a/b: no permission; choose another place or change"),
        (OSError(errno.ENOENT, "No such file", "/a/.b.npz.0123456789ab.tmp"), "/a/b.npz: no such file or folder"),
        (OSError(errno.ENOSPC, "No space left on device"), "no space left on the disk; free some"),
        (OSError(errno.EIO, "Input/output error", "a"), "a: Input/output error"),
        (OSError("of a library"), "of a library"),
    ],
)
def test_what_the_system_refuses_is_told_with_its_remedy(error: OSError, line: str) -> None:
    assert of_system(error).startswith(line)


def test_text_beyond_the_positions_of_the_model_is_said(decoder, text, tmp_path, monkeypatch):
    monkeypatch.setattr(contexts, "most_tokens", lambda *_: 64)
    result = run("compress", decoder, "--text", text, "-o", tmp_path / "a.safetensors", "--budget", "1")
    assert result.exit_code == 0, result.output
    assert "positions: 56\n" in result.stdout
    assert "tokens and the model 64 positions: the first 56 tokens are read" in result.stderr


def test_gguf_files(decoder, text, tmp_path, monkeypatch):
    file = tmp_path / "a.gguf"
    assert "no such file; models are read from disk" in refused("inspect", file, "--text", text)
    file.write_bytes(b"no such thing")
    monkeypatch.setattr("levattn.cli.opened.find_spec", lambda _: None)
    assert "gguf and accelerate are not installed: pip install gguf" in refused("inspect", file, "--text", text)
    monkeypatch.setattr("levattn.cli.opened.find_spec", lambda _: sys)
    assert "is no GGUF file; download it again" in refused("inspect", file, "--text", text)
    assert "is a file; give the folder" in refused("inspect", text, "--text", text)
    file.write_bytes(b"GGUF and no more")
    assert "transformers cannot load this model" in refused("inspect", file, "--text", text)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(decoder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(decoder)
    for kind, part in ((transformers.AutoModelForCausalLM, loaded), (transformers.AutoTokenizer, tokenizer)):
        monkeypatch.setattr(kind, "from_pretrained", lambda *_, part=part, **__: part)
    assert run("inspect", file, "--text", text).exit_code == 0


def test_a_page_escapes_what_it_shows_and_marks_what_is_missing(tmp_path):
    path = tmp_path / "a.html"
    values = {(0, 0): None, (0, 1): 2.0, (3, 1): float("nan")}
    heat = output.HeatMap("<i>", values, ".1f")
    kept = output.KeptText(["<b>", "&", "a", "\U0001f642"], [0, 0, 0, 2], 2)
    output.write_page(path, "</title>", {"<dt>": "&"}, [heat], [{"x": None}], {"<td>": "x:.1f"}, kept)
    shown = Tags(path)
    assert "".join(shown.words) == "<b>&a\U0001f642"
    assert shown.titles == [
        "layer 0, head 0: -",
        "layer 0, head 1: 2.0",
        "layer 3, head 0: -",
        "layer 3, head 1: -",
        "tokens 0 to 2: kept by 0 of 2 cut heads",
        "token 3: kept by 2 of 2 cut heads",
    ]


@pytest.mark.parametrize("command", ["inspect", "prune-report"])
@pytest.mark.parametrize("error", [RuntimeError, IndexError])
def test_a_model_that_cannot_be_run_is_refused_in_one_line(encoder, text, command, error, monkeypatch):
    def fail(*_, **__):
        raise error("index 66 is out of bounds\nand more")

    monkeypatch.setattr(kind_of_encoder(), "forward", fail)
    result = run(command, encoder, "--text", text)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"levattn: {encoder} cannot be run on 93 tokens ({error.__name__}: index 66 is out of bounds); "
        "give fewer --tokens, or another model\n"
    )


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused is refused before the work starts."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work has started")

    for name in ("universal_set", "scan_set", "covering_set", "heavy_attention"):
        monkeypatch.setattr(levattn, name, work)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("how", ["by name", "by another name", "by symbolic link", "by hard link"])
def test_the_keys_are_not_overwritten(tmp_path: Path, keys: Array, how: str) -> None:
    own, other = tmp_path / "own.npz", tmp_path / "other.npz"
    np.savez(own, K=keys)
    before = own.read_bytes()
    if how == "by name":
        other = own
    elif how == "by another name":
        (tmp_path / "sub").mkdir()
        other = tmp_path / "sub" / ".." / "own.npz"
    elif how == "by symbolic link":
        other.symlink_to(own)
    else:
        other.hardlink_to(own)
    for source, target in ((own, other), (other, own)):
        line = refused("universal-set", source, "--epsilon", "0.3", "-o", target)
        assert f"{target} is the file of the keys, which --output would overwrite; name another" in line
    picture = tmp_path / "a.png"
    picture.symlink_to(own)
    assert "--plot would overwrite" in refused("universal-set", own, "--epsilon", "0.3", "--plot", picture)
    assert "--checkpoint would overwrite" in refused("universal-set", own, "--epsilon", "0.3", "--checkpoint", own)
    assert own.read_bytes() == before


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("inside", ["", "part=1", "link"])
def test_no_file_of_a_folder_of_keys_is_overwritten_or_added(tmp_path: Path, keys: Array, inside: str) -> None:
    folder, own = tmp_path / "keys", tmp_path / "keys" / inside / "own.npz"
    folder.mkdir()
    if inside == "link":
        folder.rmdir()
        (tmp_path / "real").mkdir()
        folder.symlink_to("real")
        own = tmp_path / "real" / "own.npz"
    own.parent.mkdir(exist_ok=True)
    np.savez(own, K=keys)
    before = own.read_bytes()
    command = "universal-set", folder, "--epsilon", "0.3"
    assert f"{own} is the file of the keys, which --output would overwrite; name another" in refused(
        *command, "-o", own
    )
    assert "which --checkpoint would overwrite" in refused(*command, "--checkpoint", own)
    for option, new in (("--output", "new.npz"), ("--scores", "new.csv"), ("--checkpoint", "new.NPY")):
        line = refused(*command, option, own.with_name(new))
        assert f"would become a file of the keys in {folder}; name another folder with {option}" in line
    assert [*own.parent.iterdir()] == [own]
    assert own.read_bytes() == before


@pytest.mark.parametrize("name", ["set.png", "state.checkpoint", ".hidden.npz", "sub/set.npz"])
def test_other_files_may_lie_beside_the_keys(tmp_path: Path, keys: Array, name: str) -> None:
    folder = tmp_path / "keys"
    (folder / "sub").mkdir(parents=True)
    np.save(folder / "own.npy", keys)
    option = {".png": "--plot", ".checkpoint": "--checkpoint"}.get(Path(name).suffix, "--output")
    for _ in range(2):
        result = run("universal-set", folder, "--epsilon", "0.3", option, folder / name)
        assert result.exit_code == 0, result.stderr


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(("--plot", "--output", "--checkpoint"), 2)])
def test_outputs_that_are_one_file(tmp_path: Path, file: Path, one: str, other: str) -> None:
    first, second = tmp_path / OUTPUTS[one], tmp_path / OUTPUTS[other]
    first.symlink_to(second)  # which does not exist yet
    line = refused("universal-set", file, "--epsilon", "0.3", one, first, other, second)
    assert f"are the same file; name two with {one} and {other}" in line


@pytest.fixture
def two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the heads of two layers alone, and draw nothing, which is faster."""
    monkeypatch.setattr(plots, "figure_bytes", lambda *_: b"")
    encoder = levattn.datasets.minilm()
    few = dataclasses.replace(encoder, **{name: getattr(encoder, name)[:2] for name in ("queries", "keys", "values")})
    monkeypatch.setattr(levattn.datasets, "minilm", lambda: few)


@pytest.mark.usefixtures("two_layers")
def test_demo_prints_a_table_and_says_what_it_does_not_cover(tmp_path: Path) -> None:
    result = run("demo", "--epsilon", "0.05", "--out", tmp_path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert_columns_explained("demo", result.stdout)
    rows = [line.split() for line in lines if line.rstrip().endswith("%") and "yes" in line]
    assert len(rows) == 24
    assert {len(row) for row in rows} == {14}
    assert {row[10] for row in rows} == {"0"}
    assert max(len(line) for line in lines[: lines.index("")]) <= 80
    text = " ".join(lines)
    assert "does not cover softmax" in text
    assert "vacuous: the bound rank/ε is not below n" in text
    assert "missed: 0" in text
    assert re.search(r"real queries: C, the set with coverage 0\.9 for softmax, .* it holds [\d.]+% of the keys", text)
    assert str(tmp_path / "demo.png") in text


@pytest.mark.usefixtures("two_layers")
def test_demo_prints_on_every_standard_output(program: Any) -> None:
    found = program("demo", "--out", "drawn", encoding="ascii")
    assert (found.status, found.stderr) == (0, "")
    assert b"epsilon = 0.1" in found.stdout
    found = program("demo", "--out", "drawn", out=None)
    assert (found.status, found.stderr.count("\n")) == (1, 1)
    assert sorted(path.name for path in Path("drawn").iterdir()) == ["demo.png", "demo.svg"]


ENCODINGS = {"cp1252": "strict", "latin-1": "strict", "ascii": "strict", "POSIX": "surrogateescape"}


BLANK = dict.fromkeys(map(ord, "-\n"), " ")  # lines of tables are as wide as their headings


def check_encodings(program: Any, arguments: list[str], files: tuple[str, ...]) -> None:
    """Compare what a command prints in each encoding with what it prints in UTF-8."""
    expected = program(*arguments)
    assert (expected.status, expected.stderr) == (0, "")
    check_made(files)
    for name, errors in ENCODINGS.items():
        encoding = "ascii" if name == "POSIX" else name
        found = program(*arguments, encoding=encoding, errors=errors)
        assert (found.status, found.stderr) == (0, "")
        check_made(files)
        shown, said = found.stdout.decode(encoding), expected.stdout.decode("utf-8")
        if "--json" in arguments:
            assert json.loads(shown).keys() == json.loads(said).keys()
            continue
        held = bytes(range(256)).decode(encoding, "ignore")
        for character, plain in IN_LETTERS.items():
            said = said if character in held else said.replace(character, plain)
        lines = [text for text in zip(shown.splitlines(), said.splitlines(), strict=True) if "seconds" not in text[0]]
        words = (" ".join(text).translate(BLANK).split() for text in zip(*lines, strict=True))
        assert next(words) == next(words)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_in_every_encoding(command: str, program: Any) -> None:
    check_encodings(program, command.split(), COMMANDS[command])


def test_errors_are_readable_in_every_encoding(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("ε is −∞ ≥ κ² for é")

    monkeypatch.setattr(levattn, "open_keys", refuse)
    found = program("universal-set", "keys.npy", encoding="ascii")
    assert found == (1, b"", "levattn: epsilon is -inf >= kappa^2 for \\xe9\n")


def test_replacements_are_aligned_and_cover_what_the_library_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert encodable("ε          a\nκ  b\n² c") == "epsilon    a\nkappa  b\n^2 c"
    assert all(plain.isascii() and plain for plain in IN_LETTERS.values())
    package = HOME / "levattn"
    drawn = {"plots.py", "data", "_kernels", "datasets.py"}  # pictures are no text
    said = {
        character
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] not in drawn and path != package / "cli" / "output.py"  # the table
        for text in texts_of(path.read_text(encoding="utf-8"))
        for character in text
        if not character.isascii()
    }
    assert said <= IN_LETTERS.keys()


def texts_of(source: str) -> Iterator[str]:
    """All texts of a module but its docstrings."""
    tree = ast.parse(source)
    lonely = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in lonely:
            yield node.value


def test_help_of_a_program_within_another_is_readable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import typer

    from levattn.cli import build_app

    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        typer.main.get_command(build_app()).main(["universal-set", "--help"], standalone_mode=False)
        assert "epsilon" in (out.flush(), (tmp_path / "out").read_text("ascii"))[1]


# -- signals -------------------------------------------------------------------------------------------

RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it, and so do their children
from levattn.sensitivity import two_pass
two_pass._CHECKPOINT_ROWS = 3000
write = two_pass._Run._write_if_due
def waiting(run):
    write(run)
    if run._written:
        print("here", file=sys.stderr, flush=True)
        while True:
            pass
two_pass._Run._write_if_due = waiting
from levattn import cli
sys.argv = ["levattn", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize("command", ["universal-set", "scores"])
@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_leaves_the_checkpoint_and_says_where(
    tmp_path: Path, command: str, number: signal.Signals, status: int, word: str
) -> None:
    K = np.random.default_rng(4).standard_normal((9000, 4))
    path, state = tmp_path / "keys.npy", tmp_path / "state"
    np.save(path, K)
    arguments = [command, str(path), "--checkpoint", str(state)]
    process = subprocess.Popen([sys.executable, "-c", RUN, *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr:
        while "here" not in (line := process.stderr.readline()):
            assert line
        process.send_signal(number)
        said = process.stderr.read()
    assert process.wait(60) == status
    assert said == (f"levattn: {word}; {state} holds the progress, so run the same command again to continue\n")
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["keys.npy", "state"]
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    assert not state.exists()
    if command == "universal-set":
        assert json.loads(result.stdout)["sets"][0]["indices"] == levattn.universal_set(K, 0.1).indices.tolist()


def test_ctrl_c_while_the_program_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_app", load)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "levattn: interrupted\n")
