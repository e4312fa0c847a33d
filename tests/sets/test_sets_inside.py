"""Sets of keys, their parts.

Inside: sizes of blocks are made small, and changes and failures are planted within a pass.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_changed_keys import (
    EPSILON,
    K0,
    N,
    between_the_passes,
    changed,
    every_change,
    in_each_pass,
    left_at,
    one_row,
    restored,
    rewritten,
    save,
)
from test_coverage import FUNCTIONS, WISHES, covering, keys_of, rng_of

import levattn
import naive
from levattn.exceptions import KeyFileError
from levattn.io import source as io_source
from levattn.sensitivity import shares, two_pass
from levattn.sets import universal
from levattn.sets.coverage import conformal_quantile, least_queries


@pytest.mark.parametrize("percent", [1, 7, 29, 50, 55, 58, 80, 90, 95, 99])
def test_the_quantile_and_the_least_number_are_those_of_fractions(percent: int) -> None:
    exact, coverage = Fraction(percent, 100), percent / 100
    least = next(m for m in range(1, 200) if math.ceil((m + 1) * exact) <= m)
    assert least_queries(coverage) == least
    for m in (least, least + 1, 99, 199, 1000):
        values = np.sort(rng_of(percent, m).standard_normal(m).round(1))
        if m >= least:
            assert conformal_quantile(values, coverage) == naive.conformal(values, exact)
    K, Q = rng_of(1).standard_normal((5, 2)), rng_of(2).standard_normal((2 * least + 1, 2))
    enough = max(2, 2 * least - 1)
    assert len(covering(K, Q[:enough], epsilon=0.3, coverage=coverage).needs) == enough - enough // 2
    assert len(covering(K, Q[:least], epsilon=0.3, coverage=coverage, scores=np.zeros(5)).needs) == least
    for count, options, named in ((enough - 1, {}, enough), (least - 1, {"scores": np.zeros(5)}, least)):
        if count:
            with pytest.raises(
                ValueError, match=rf"queries are {count} for each.*\b{named}\b.*for coverage {coverage:g}"
            ):
                covering(K, Q[:count], epsilon=0.3, coverage=coverage, **options)


@pytest.mark.parametrize("entries", [1, 50, 400])
@pytest.mark.parametrize(
    ("name", "wish"), [("x²", "mass"), ("softmax", "epsilon"), ("softmax", "mass"), ("|x|", "size")]
)
def test_sets_do_not_depend_on_blocks(name: str, wish: str, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    f, _ = FUNCTIONS[name]
    K, Q = keys_of(9, 60), rng_of(10).standard_normal((50, 4))
    expected = covering(K, Q, f=f, **WISHES[wish])
    monkeypatch.setattr(shares, "BLOCK_ENTRIES", entries)
    monkeypatch.setattr(shares, "_QUERIES", 7)
    found = covering(K, Q, f=f, **WISHES[wish])
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-11, atol=1e-18)
    np.testing.assert_allclose(found.needs, expected.needs, rtol=1e-11)
    assert np.array_equal(found.mask, expected.mask)


@pytest.fixture(params=["new", "old"])
def age(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of a file that is older than a tick of the clock tell every change; a digest those of a newer one."""
    if request.param == "new":
        monkeypatch.setattr(two_pass, "record_of", lambda *_, **__: None)
    else:
        monkeypatch.setattr(io_source, "_TICK", 0)


@every_change
@pytest.mark.usefixtures("age")
def test_a_file_that_changes_within_a_pass(tmp_path: Path, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_pass, "_TOGETHER", 0)  # chunk by chunk
    file = tmp_path / "keys.npy"
    for moment in (700, 4000, N + 700):  # before its rows are read, after, and before they are read again
        save(file, K0)
        source, acted = levattn.open_keys(file, chunk_rows=700), []

        def act(done: int, _: int | None, moment: int = moment, acted: list[int] = acted) -> None:
            if done >= moment and not acted:
                acted.append(done)
                time.sleep(0.02)
                rewritten(file, changed(change))

        with pytest.raises(KeyFileError, match=r"keys\.npy"):
            levattn.scan_set(source, EPSILON, progress=act)


def test_scores_that_do_not_add_up_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What neither the times of a file nor a digest told, as of a page that another process had open to write."""
    monkeypatch.setattr(two_pass, "record_of", lambda *_, **__: ["the same"])
    save(tmp_path / "keys.npy", K0)
    source = levattn.open_keys(tmp_path / "keys.npy")
    act = between_the_passes(lambda: restored(tmp_path / "keys.npy", changed(one_row)))
    with pytest.raises(KeyFileError, match=r"add up to [\d.]+, not to the rank 4"):
        levattn.scan_set(source, EPSILON, progress=act)


def test_keys_that_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that load the file read its pages more than once."""
    certify = universal.certify

    def late(*args: Any, **options: Any) -> Any:
        replaced(tmp_path / "keys.npy", changed(one_row))
        return certify(*args, **options)

    save(tmp_path / "keys.npy", K0)
    source = levattn.open_keys(tmp_path / "keys.npy")
    assert len(levattn.expected_scores(source, K0[:50])) == N
    monkeypatch.setattr(universal, "certify", late)
    with pytest.raises(KeyFileError, match="another file took its place"):
        levattn.universal_set(source, EPSILON, f=levattn.Huber())


def replaced(path: Path, K: Any) -> None:
    """Another file in its place, of the same time."""
    other = path.with_name(f"other{path.suffix}")
    save(other, K)
    shutil.copystat(path, other)
    other.replace(path)


def appended(path: Path, K: Any) -> None:
    """More rows."""
    rewritten(path, np.concatenate([K, K[:1]]))


def cut(path: Path, K: Any) -> None:
    """Fewer rows."""
    rewritten(path, K[:-1])


def truncated(path: Path, _: Any) -> None:
    """Fewer bytes."""
    os.truncate(path, path.stat().st_size - 5)


WAYS = (rewritten, restored, replaced, appended, cut, truncated)


every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@pytest.fixture(params=["keys.npy", "keys.safetensors", "keys.npz"])
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / request.param
    save(path, K0)
    return path


@every_change
@every_way
@pytest.mark.usefixtures("age")
def test_a_file_that_changes_between_the_passes(file: Path, change: Any, way: Any) -> None:
    source = levattn.open_keys(file, chunk_rows=700)
    act = between_the_passes(lambda: way(file, changed(change)))
    with pytest.raises(KeyFileError, match=file.name):
        levattn.scan_set(source, EPSILON, progress=act)


@in_each_pass
@every_change
@every_way
@pytest.mark.usefixtures("age")
def test_a_file_that_changes_between_the_runs(tmp_path: Path, rows: int, change: Any, way: Any) -> None:
    file, checkpoint = tmp_path / "keys.npy", tmp_path / "checkpoint"
    save(file, K0)
    left_at(rows, levattn.open_keys(file, chunk_rows=700), checkpoint)
    before = checkpoint.read_bytes()
    time.sleep(0.02)
    way(file, changed(change))
    with pytest.raises(ValueError, match="truncated" if way is truncated else "other keys|rows in the first pass"):
        levattn.scan_set(levattn.open_keys(file), EPSILON, checkpoint=checkpoint)
    assert way in (appended, cut) or checkpoint.read_bytes() == before


@in_each_pass
@pytest.mark.usefixtures("age")
def test_the_same_keys_in_another_file(tmp_path: Path, rows: int) -> None:
    file, checkpoint = tmp_path / "keys.npy", tmp_path / "checkpoint"
    save(file, K0)
    expected = levattn.universal_set(levattn.open_keys(file), EPSILON)

    def moved() -> Path:
        return Path(shutil.copy(file, tmp_path / "copy.npy"))

    def touched() -> Path:
        os.utime(file)
        return file

    def linked() -> Path:
        os.link(file, tmp_path / "link.npy")
        return file

    for other in (moved, touched, linked, lambda: file):
        left_at(rows, levattn.open_keys(file, chunk_rows=700), checkpoint)
        found = levattn.scan_set(levattn.open_keys(other()), EPSILON, checkpoint=checkpoint)
        assert np.array_equal(found.scores, expected.scores)
        assert not checkpoint.exists()
