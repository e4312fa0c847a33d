"""Tables of kernels by the names of a task and of a kind of array, and no others.

Inside: it is about which kernels an array gets.
"""

from __future__ import annotations

import importlib
import pickle

import numpy as np
import pytest

import streams
from levattn._kernels import BLOCK, GRAM, HEAVY, Rows, dispatch, kernels_for


def found_by_pickle(name: str) -> None:
    """Stand in for what pickle looks up in every module that is loaded."""


@pytest.mark.parametrize("name", ["torch", "cpu", "_cpu", "own_torch", "csr", "nothing"])
def test_what_names_no_table_is_no_attribute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hasattr(dispatch, name)
    monkeypatch.setattr(found_by_pickle, "__module__", None)  # so that it searches all modules
    monkeypatch.setattr(found_by_pickle, "__qualname__", name)
    monkeypatch.setitem(globals(), name, found_by_pickle)
    assert name.encode() in pickle.dumps(found_by_pickle)


def test_a_table_has_the_kernels_of_its_file_and_others_of_the_definition() -> None:
    own, definition = (importlib.import_module(f"levattn._kernels.pruned.{file}") for file in ("cuda", "definition"))
    assert not hasattr(own, "mixture")
    assert dispatch.pruned_cuda.cluster is own.cluster
    assert dispatch.pruned_cuda.mixture is definition.mixture
    assert dispatch.pruned_cuda is dispatch.pruned_cuda  # looked up once: torch's compiler reads an attribute


def test_an_array_without_a_file_has_the_definition() -> None:
    assert dispatch.gram_torch is importlib.import_module("levattn._kernels.gram.definition")
    assert dispatch.heavy_cpu is importlib.import_module("levattn._kernels.heavy.cpu")  # there is no definition
    with pytest.raises(NotImplementedError, match="precise has no kernels for arrays of torch"):
        dispatch.precise_torch  # noqa: B018


def test_a_kernel_is_that_of_its_first_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    X = np.ones((1, 3, 2))
    rows = Rows(X, "float64")
    monkeypatch.setattr(kernels_for("gram", X), "longest_run", lambda *given: given)
    monkeypatch.setattr(kernels_for("heavy", X), "query_norms", lambda *given: given)
    assert GRAM.longest_run(rows, 7) == (rows, 7)
    assert HEAVY.query_norms(X, 5) == (X, 5)


def test_blocks_are_as_long_as_tests_take_them() -> None:
    assert streams.BLOCK == BLOCK
