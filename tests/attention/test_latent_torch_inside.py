"""Gradients of latent attention and of its memories, in the operators that torch calls.

Inside: rules of torch are of the operators, and slices and gates are made that lengths of tests do not reach.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from operator_table import MEMORIES, WINDOWS  # noqa: E402
from test_latent_torch import STATE, leaf, leaves  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

from differences import assert_gradients  # noqa: E402
from levattn._kernels import LatentArguments  # noqa: E402
from levattn._kernels.latent import torch as operators  # noqa: E402
from levattn.attention.arguments import latent_attention  # noqa: E402
from levattn.attention.latent import window as latent_window  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")


def flags(T: int, *left_out: int) -> Any:
    """A mask (T,) of all positions but some."""
    mask = torch.ones(T, dtype=torch.bool)
    mask[list(left_out)] = False
    return mask


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "cross": {"causal": False, "U": 5},
    "masked": {"mask": True},
    "masked-bidirectional": {"mask": True, "causal": False},
    "packed": {"offsets": [0, 3, 3, 9]},
    "packed-bidirectional": {"offsets": [0, 3, 9], "causal": False, "mask": True},
    "state": {"state": 1},
    "gate": {"gate": True},
    "gate-bidirectional": {"gate": True, "causal": False},
    "behind": {"gate": True, "ahead": -2},
    "ahead": {"ahead": 2, "T": 5, "U": 7},
    "all": {"gate": True, "ahead": -1, "mask": True, "offsets": [0, 2, 9], "state": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_kernel_are_those_of_finite_differences(name: str) -> None:
    case = {"causal": True, "ahead": 0, "T": 9, **CASES[name]}
    arrays = leaves(case["T"], U=case.get("U"))
    if case.get("gate"):
        arrays += [leaf(2, 9, seed=3), leaf(2, 9, 2, seed=4)]
    options: dict[str, Any] = {"causal": case["causal"], "ahead": case["ahead"]}
    if case.get("mask"):
        options["mask"] = torch.from_numpy(np.random.default_rng(6).random((2, 9)) > 0.3)
    if "offsets" in case:
        options["offsets"] = np.array(case["offsets"])
    if "state" in case:
        options["state"] = tuple(part[:, : case["state"]] for part in STATE)

    def run(Q: Any, K: Any, V: Any, gate: Any = None, value: Any = None) -> Any:
        return latent_attention(Q, K, V, gate=gate, gate_value=value, **options)

    with torch.no_grad():
        plain = run(*arrays)
    assert torch.equal(run(*arrays), plain)
    assert_gradients(run, arrays)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["window", "rg_lru", "rg_lru by definition"])
def test_a_packed_sequence_that_is_not_finite_has_no_part_in_gradients_of_others(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "definition" in name:
        monkeypatch.setattr(operators, "follows_definition", lambda _: True)
    operator = {**WINDOWS, **MEMORIES}[name.partition(" ")[0]]
    run, clean = operator.run, operator.leaves(13)
    rows, others, count = slice(4, 8), torch.tensor([0, 1, 2, 3, 8, 9, 10, 11, 12]), 3

    def gradients(arrays: Any, spoilt: bool) -> Any:
        inputs = [x.detach().clone().requires_grad_() for x in arrays]
        Y = run(*inputs, offsets=[0, 4, 8, 13])
        flow = leaf(*Y.shape, seed=9).detach()
        if spoilt:
            flow[..., rows, :] = value
        Y.backward(flow)
        return [x.grad[..., others, :] for x in inputs[:count]]

    expected = gradients(clean, False)
    for which in range(count):
        dirty = [x.detach().clone() for x in clean]
        dirty[which][..., rows, :] = value
        cases = [(dirty, False), (dirty, True)] + ([] if name == "window" else [(clean, True)])
        for arrays, spoilt in cases:
            for one, other in zip(gradients(arrays, spoilt), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"offsets": [0, 4, 9]}, {"mask": flags(9, 0, 3, 4)}], ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_gradients_of_windows_in_slices(name: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_window, "_MANY_PAIRS", 300)
    monkeypatch.setattr(latent_window, "_LEAST", 2)
    assert_gradients(partial(WINDOWS[name].run, **options), WINDOWS[name].leaves(9))


def test_the_scan_has_gradients_of_all_orders() -> None:
    a, x, first = (torch.sigmoid(leaf(2, 6, 3)).detach().requires_grad_(), leaf(2, 6, 3, seed=1), leaf(2, 3, seed=2))
    h, rows = first, []
    for t in range(6):
        h = a[:, t] * h + x[:, t]
        rows.append(h)
    torch.testing.assert_close(operators.decayed_scan(a, x, first), torch.stack(rows, 1))
    assert gradcheck(operators.decayed_scan, (a, x, first))
    assert gradcheck(operators.decayed_scan, (a, x))
    assert gradgradcheck(operators.decayed_scan, (a, x, first))
    assert operators.decayed_scan(a[:, :0], x[:, :0], first).shape == (2, 0, 3)


@pytest.mark.parametrize("gradients", [True, False])
def test_operators_keep_the_rules_of_torch(gradients: bool) -> None:
    Q, K, V, gate, value = (
        x.detach().requires_grad_(gradients) for x in (*leaves(), leaf(2, 9, seed=3), leaf(2, 9, 2, seed=4))
    )
    mask, offsets = flags(9).expand(2, 9).clone(), np.array([0, 4, 9])
    for x in (
        LatentArguments(Q, K, V, np.array([0, 9]), True),
        LatentArguments(Q, K, V, offsets, True, -1, gate, value, mask, STATE),
    ):
        torch.library.opcheck(operators.ATTENTION.forward, operators.ATTENTION.arguments(x))
    torch.library.opcheck(operators.SCAN, (Q, K, leaf(2, 3).detach().requires_grad_(gradients), False))
    torch.library.opcheck(operators.SCAN, (Q, K, None, True))
