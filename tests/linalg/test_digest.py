"""Digests of rows: of their bytes and places, whatever the chunks in which they come.

Inside: a digest is no result; files only compare two of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import levattn
from levattn._core.arrays import as_matrices
from levattn._kernels import Rows, kernels_for
from levattn.linalg.accumulator import second_moments
from levattn.linalg.reading import RowDigest
from levattn.states import Moments
from strategies import examples

N = 5000  # two whole cells of 2048 rows, and a part of one
FORMATS: dict[str, Any] = {"float64": np.uint64, "float32": np.uint32, "float16": np.uint16}
WIDTHS = (1, 2, 3, 4, 7, 8, 31, 64, 65)
in_any_layout = pytest.mark.parametrize(("name", "d"), [(name, d) for name in FORMATS for d in WIDTHS])


def words_of(name: str, d: int, b: int = 1) -> Any:
    """Rows of random bits."""
    dtype = FORMATS[name]
    return np.random.default_rng(d).integers(np.iinfo(dtype).max, size=(b, N, d), dtype=dtype, endpoint=True)


def digest_of(words: Any, sizes: tuple[int, ...] = (N,)) -> RowDigest:
    """The digest of rows in chunks of these sizes in turn."""
    digest, at = RowDigest(), 0
    while at < words.shape[1]:
        for size in sizes:
            digest.add(Rows(words[:, at : at + size], "float32"))
            at += size
    return digest


def differs(one: Any, other: Any) -> tuple[int, int] | None:
    return digest_of(one, (700,)).difference(digest_of(other), whole=True)


@in_any_layout
def test_chunks_and_layouts_do_not_count(name: str, d: int) -> None:
    words = words_of(name, d, 3)
    for sizes in ((1, 2, 3, 700), (2048,), (5, 0, 4000)):
        assert digest_of(words, sizes).difference(digest_of(words), whole=True) is None
    for other in (np.asfortranarray(words), np.concatenate([words, words], axis=2)[:, :, :d], words[::-1][::-1]):
        assert differs(other, words) is None
    with levattn.thread_limit(3):
        assert differs(words, words) is None


@in_any_layout
def test_a_changed_bit_is_seen_where_it_is(name: str, d: int) -> None:
    words, rng = words_of(name, d, 2), np.random.default_rng(0)
    for row in (0, 2047, 2048, N - 1, *rng.integers(N, size=20).tolist()):
        changed = words.copy()
        bit = rng.integers(8 * words.itemsize)
        changed[rng.integers(2), row, rng.integers(d)] ^= FORMATS[name](1) << FORMATS[name](bit)
        first = row // 2048 * 2048
        assert differs(changed, words) == (first, min(first + 2047, N - 1))


@in_any_layout
def test_exchanged_rows_columns_and_matrices_are_seen(name: str, d: int) -> None:
    words = words_of(name, d, 2)
    words[:, 10] = words[:, 11] + 1
    for low, high in ((10, 11), (0, N - 1), (2047, 2048)):
        changed = words.copy()
        changed[:, [low, high]] = words[:, [high, low]]
        assert differs(changed, words) is not None
    assert differs(words[::-1], words) is not None
    assert d == 1 or differs(words[:, :, ::-1], words) is not None


def test_changes_that_cancel_in_plain_sums_are_seen() -> None:
    K = np.random.default_rng(0).standard_normal((1, N, 8))
    for rows in ([0, 1], [0, 2], [0, 1, 2, 3], [0, 2048], slice(0, N)):
        changed = K.copy()
        changed[:, rows] *= -1  # the sign bits of an even number of rows
        assert differs(changed, K) is not None
    units = np.tile(np.eye(8), (1, N // 8, 1))
    changed = units.copy()
    changed[:, [0, 1, 2, 3]] = units[:, [1, 0, 3, 2]]
    assert differs(changed, units) == (0, 2047)


@examples(60)
@given(st.data())
def test_any_two_rows_of_little_that_differ(data: st.DataObject) -> None:
    """Rows of few different numbers, of which some are exchanged or changed."""
    d = data.draw(st.integers(1, 5))
    rows = st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0]), min_size=d, max_size=d), min_size=1, max_size=9)
    one, other = (np.array(data.draw(rows), np.float32)[None] for _ in range(2))
    same = one.shape == other.shape and one.tobytes() == other.tobytes()
    if one.shape == other.shape:
        assert (differs(one, other) is None) == same


def test_a_digest_is_restored() -> None:
    words = words_of("float32", 3, 2)
    begun = digest_of(words[:, :3001])
    again = RowDigest.restored(begun.arrays("x"), "x", 3001, (2,))
    for digest in (begun, again):
        digest.add(Rows(words[:, 3001:], "float32"))
    assert again.difference(digest_of(words), whole=True) is None
    with pytest.raises(ValueError, match="an array has dtype uint64 and shape"):
        RowDigest.restored(begun.arrays("x"), "x", 3001, (3,))


# -- digests that kernels make while they read ----------------------------------------------------


def rows_of(name: str, d: int, b: int = 1) -> Rows:
    """Rows of ordinary numbers."""
    keys = np.random.default_rng(d).standard_normal((b, N, d)).astype(name)
    return Rows(keys.view(np.uint16) if name == "float16" else keys, name)


def summed(rows: Rows) -> None:
    second_moments(rows, range(len(rows.keys)))


def scored(rows: Rows) -> None:
    b, _, d = rows.shape
    kernels_for("gram", rows.keys).sqnorms(rows, np.arange(b), np.tile(np.eye(d), (b, 1, 1)), rows.zeros())


def summed_in_runs(rows: Rows) -> None:
    """As states sum: runs of whole blocks, some after rows that complete a block; a part of a block is left over."""
    moments = Moments(rows.shape[2], rows.shape[:1])
    for part in (rows.between(0, 100), rows.between(100, N)):
        moments.add(as_matrices(np.empty((len(rows.keys), 0, rows.shape[2]), np.float32), "K"), part)


READERS = {reader.__name__: reader for reader in (summed, scored, summed_in_runs)}
by_every_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)
in_any_format = pytest.mark.parametrize(("name", "d"), [(name, d) for name in FORMATS for d in (1, 3, 8, 16, 64, 100)])


def digest_by(read: Any, rows: Rows, sizes: tuple[int, ...] = (N,)) -> RowDigest:
    """The digest of rows in chunks that a kernel reads."""
    digest, at = RowDigest(), 0
    while at < N:
        for size in sizes:
            part = digest.watched(rows.between(at, at + size))
            read(part)
            digest.add(part)
            at += size
    return digest


@by_every_reader
@in_any_format
def test_kernels_digest_what_they_read(name: str, d: int, read: Any) -> None:
    rows = rows_of(name, d, 2)
    expected = digest_of(rows.keys)
    sizes = ((N,),) if read is summed_in_runs else ((N,), (1, 2050, 700, 64), (2048,))
    apart = replace(rows, keys=np.concatenate([rows.keys, rows.keys], axis=2)[:, :, :d])
    for chosen, parts in [(rows, part) for part in sizes] + [(apart, sizes[-1])]:
        for threads in (1, 3):
            with levattn.thread_limit(threads):
                assert digest_by(read, chosen, parts).difference(expected, whole=True) is None


@by_every_reader
@in_any_format
def test_kernels_digest_every_bit(name: str, d: int, read: Any) -> None:
    rows, rng = rows_of(name, d, 2), np.random.default_rng(0)
    expected = digest_of(rows.keys)
    for row in (0, 99, 100, 2047, 2048, N - 1, *rng.integers(N, size=6).tolist()):
        changed = rows.keys.copy()
        words = changed.view(FORMATS[name])
        bit = rng.integers(8 * words.itemsize - 4)  # the others may make a number that is not finite
        words[rng.integers(2), row, rng.integers(d)] ^= FORMATS[name](1) << FORMATS[name](bit)
        if np.isfinite(changed.view(name)).all():
            first = row // 2048 * 2048
            found = digest_by(read, replace(rows, keys=changed)).difference(expected, whole=True)
            assert found == (first, min(first + 2047, N - 1))


@pytest.mark.parametrize("read", [summed, scored])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_digest_is_of_the_bytes_that_a_kernel_read(read: Any, threads: int) -> None:
    """Rows that change after a kernel has read them are not read again, by another kernel or for the digest."""
    rows = rows_of("float32", 64)
    expected, digest = digest_of(rows.keys), RowDigest()
    watched = digest.watched(replace(rows, keys=rows.keys.copy()))
    with levattn.thread_limit(threads):
        read(watched)
    watched.keys[:] = 0
    scored(watched)
    digest.add(watched)
    assert digest.rows == N
    assert digest.difference(expected, whole=True) is None


def test_rows_are_digested_once_and_no_others_for_them() -> None:
    rows = rows_of("float32", 8, 2)
    digest = RowDigest()
    watched = digest.watched(rows)
    scored(replace(watched, keys=rows.keys.copy()))  # in other memory
    scored(watched.item(0))  # not all matrices
    scored(replace(watched, keys=rows.keys[:, :, ::2]))
    scored(replace(watched, keys=rows.keys[:, ::-1]))
    assert digest.rows == 0
    scored(watched.between(300, 4000))
    assert digest.rows == 4000
    scored(watched)
    scored(watched.between(4000, N))
    summed(watched)
    assert digest.rows == N
    digest.add(watched)
    assert digest.difference(digest_of(rows.keys), whole=True) is None
