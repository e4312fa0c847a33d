"""Tables of kernels by the names of a task and of a kind of array, and no others."""

from __future__ import annotations

import importlib
import pickle

import pytest

from levattn._kernels import dispatch


def found_by_pickle(name: str) -> None:
    """Stand in for what pickle looks up in every module that is loaded."""


@pytest.mark.parametrize("name", ["torch", "cpu", "_cpu", "own_torch", "csr", "nothing"])
def test_what_names_no_table_is_no_attribute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hasattr(dispatch, name)
    monkeypatch.setattr(found_by_pickle, "__module__", None)  # so that it searches all modules
    monkeypatch.setattr(found_by_pickle, "__qualname__", name)
    monkeypatch.setitem(globals(), name, found_by_pickle)
    assert name.encode() in pickle.dumps(found_by_pickle)


def test_a_table_is_the_module_of_its_name() -> None:
    assert dispatch.gram_cpu is importlib.import_module("levattn._kernels.gram.cpu")
    assert dispatch.gram_torch is dispatch.gram_definition
    with pytest.raises(NotImplementedError, match="precise has no kernels for arrays of torch"):
        dispatch.precise_torch  # noqa: B018
