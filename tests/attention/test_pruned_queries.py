"""Pruned attention whose keys are chosen by other queries than those that attend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from operator_table import PRUNED_FORMS as FORMS

import naive_attention
from levattn.exceptions import NonFiniteError
from libraries import HAS_TORCH, needs_torch, over_storages, stored
from pruned_calls import attend
from strategies import as_float64

if HAS_TORCH:
    import torch

NAMES = {"summaries": "R", "scores": "kind", "f": "power"}
EASY = {"size": 4, "summaries": 4}


def heads(seed: int, *batch: int, n: int = 18) -> tuple[Any, Any, Any, Any]:
    """Give Q of four heads, K and V of two, and other queries of four, of another mean and second moment."""
    rng = np.random.default_rng([55, seed])
    Q, K, V, other = (rng.standard_normal((*batch, *shape)) for shape in ((4, n, 5), (2, n, 5), (2, n, 3), (4, 11, 5)))
    return Q + 0.3, K + 0.5, V, other * np.array([3.0, 1, 0.3, 1, 1]) - rng.standard_normal(5)


def by_loops(Q: Any, K: Any, V: Any, queries: Any, options: dict[str, Any]) -> Any:
    """The rows by the definition, where `queries` has the rows (s, d) for each head of the keys."""
    oracle = {NAMES.get(name, name): value for name, value in options.items()}
    f = oracle.pop("power", "softmax")
    oracle["power"] = None if f == "softmax" else float(getattr(f, "p", f))
    scores = oracle.pop("kind", "residual")
    scores = scores(K, V) if callable(scores) else scores
    rows = []
    for j, (k, v, asked) in enumerate(zip(K, V, queries, strict=True)):
        if not isinstance(scores, str):
            oracle["scores"] = scores[j]
        kind = scores if isinstance(scores, str) else "given"
        center = oracle.get("center", not oracle["power"])
        mine = oracle | {"kind": kind, "center": center, "queries": asked}
        rows.append(naive_attention.pruned(Q[2 * j : 2 * j + 2], k, v, **mine)[0])
    return np.concatenate(rows)


def options_of(form: str, K: Any) -> dict[str, Any]:
    own = {"scores": np.random.default_rng(9).standard_normal(K.shape[:-1])} if form == "own" else {}
    return FORMS[form] | own


@over_storages
@pytest.mark.parametrize("form", FORMS)
def test_keys_are_chosen_by_the_moments_of_these_queries(form: str, storage: str) -> None:
    Q, K, V, other = heads(0)
    options = options_of(form, K)
    given = options | {name: stored(x, storage) for name, x in options.items() if isinstance(x, np.ndarray)}
    q, k, v, asked = (stored(x, storage) for x in (Q, K, V, other))
    Y = attend(q, k, v, queries=asked, **given)
    assert type(Y) is type(v)
    expected = by_loops(Q, K, V, other.reshape(2, -1, 5), options)
    np.testing.assert_allclose(as_float64(Y), expected, rtol=0, atol=1e-11)
    plain, certificate = attend(q, k, v, return_certificate=True, **given)
    same, another = attend(q, k, v, queries=q, return_certificate=True, **given)
    for name in (None, "captured_lower", "captured_upper", "error_bound", "kept"):
        mine, theirs = (x if name is None else getattr(of, name) for x, of in ((plain, certificate), (same, another)))
        np.testing.assert_array_equal(as_float64(mine), as_float64(theirs))
    reads = options.get("summaries") or options.get("scores", "residual") in ("residual", "expected")
    assert (np.abs(as_float64(Y) - as_float64(plain)).max() > 1e-3) == bool(reads)


@pytest.mark.parametrize("form", ["no-window", "expected", "squares"])
def test_queries_come_for_each_head_for_each_that_shares_keys_or_for_all(form: str) -> None:
    Q, K, V, other = heads(1)
    shared = other[:2]  # as if of the heads of the keys
    for queries, rows in (
        (other, other.reshape(2, -1, 5)),
        (shared, shared),
        (other[:1], [other[0]] * 2),
        (other[0], [other[0]] * 2),
    ):
        Y = attend(Q, K, V, queries=queries, **FORMS[form])
        np.testing.assert_allclose(Y, by_loops(Q, K, V, rows, FORMS[form]), rtol=0, atol=1e-11)
    one = attend(Q[0], K[0], V[0], queries=other[0], **FORMS[form])
    np.testing.assert_allclose(one, attend(Q[:1], K[:1], V[:1], queries=other[:1], **FORMS[form])[0], rtol=0)
    several = attend(Q, K, V, queries=np.stack([other, 2 - other]), **EASY)
    for Y, queries in zip(several, (other, 2 - other), strict=True):
        np.testing.assert_array_equal(Y, attend(Q, K, V, queries=queries, **EASY))


@over_storages
@pytest.mark.parametrize("window", [0, 2])
def test_masks_leave_out_keys_and_rows_but_none_of_these_queries(window: int, storage: str) -> None:
    Q, K, V, other = heads(2, 3)
    mask = np.random.default_rng(3).random((3, 18)) > 0.3
    mask[1], mask[2] = True, False
    options = EASY | {"window": window}
    arrays = [stored(x, storage) for x in (Q, K, V, other, mask[:, None, :])]
    Y = as_float64(attend(*arrays[:3], queries=arrays[3], mask=arrays[4], **options))
    for i, there in enumerate(mask):
        rows = there if window else np.ones(18, bool)
        alone = attend(Q[i][:, rows], K[i][:, there], V[i][:, there], queries=other[i], **options)
        np.testing.assert_allclose(Y[i][:, rows], alone, atol=1e-12)
        assert not Y[i][:, ~rows].any()
    some = attend(Q, K, V, queries=other, query_mask=mask[:, None, :], **options)
    whole = attend(Q, K, V, queries=other, **options)
    np.testing.assert_allclose(some, whole * mask[:, None, :, None], atol=1e-13)


def test_a_row_depends_on_no_other_row_that_asks() -> None:
    Q, K, V, other = heads(4)
    whole = attend(Q, K, V, queries=other, **EASY)
    np.testing.assert_allclose(attend(Q[:, 3:5], K, V, queries=other, **EASY), whole[:, 3:5], rtol=1e-13)
    dense = naive_attention.dense(Q, K, V)[0]
    for covering in ({"budget": 1.0}, {"size": 0, "summaries": 18}):
        np.testing.assert_allclose(attend(Q, K, V, queries=other, **covering), dense, atol=1e-12)
    assert attend(Q[:, :0], K, V, queries=other, **EASY).shape == (4, 0, 3)
    assert attend(Q, K[:, :0], V[:, :0], queries=other, **EASY).shape == (4, 18, 3)


@needs_torch
@pytest.mark.parametrize("f", ["softmax", 2])
def test_gradients_reach_all_but_these_queries(f: Any) -> None:
    arrays = heads(5)
    leaves = [torch.from_numpy(x).requires_grad_() for x in arrays]
    Y = attend(*leaves[:3], queries=leaves[3], f=f, **EASY)
    np.testing.assert_allclose(Y.detach(), attend(*arrays[:3], queries=arrays[3], f=f, **EASY), atol=1e-12)
    *found, none = torch.autograd.grad(Y.square().sum(), leaves, allow_unused=True)
    assert none is None
    constant = attend(*leaves[:3], queries=leaves[3].detach(), f=f, **EASY)
    for mine, theirs in zip(found, torch.autograd.grad(constant.square().sum(), leaves[:3]), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.abs().max() > 0
    alone = attend(*(x.detach() for x in leaves[:3]), queries=leaves[3], f=f, **EASY)
    assert not alone.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        single = [x.detach().float().requires_grad_() for x in leaves]
        Y = attend(*single[:3], queries=single[3], f=f, **EASY)
    np.testing.assert_allclose(Y.detach(), constant.detach(), atol=2e-5)


@needs_torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_numbers_are_computed_with_in_float32(dtype: str) -> None:
    narrow = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in heads(6)]
    Y = attend(*narrow[:3], queries=narrow[3], **EASY)
    assert Y.dtype == narrow[2].dtype
    wide = [x.float() for x in narrow]
    assert torch.equal(Y, attend(*wide[:3], queries=wide[3], **EASY).to(Y.dtype))
    if dtype == "float16":
        mine = [x.numpy() for x in narrow]
        np.testing.assert_array_equal(attend(*mine[:3], queries=mine[3], **EASY), Y)


def test_queries_that_will_not_do_are_named() -> None:
    Q, K, V, other = heads(7)
    for queries, error, message in (
        (other[..., :4], ValueError, r"queries has shape \(4, 11, 4\); expected d = 5 along axis -1, as Q has"),
        (other[:3], ValueError, r"queries has shape \(3, 11, 5\); expected 4 heads as the queries have, or 2"),
        (other[0, 0], ValueError, r"queries has shape \(5,\)"),
        (other.astype(int), TypeError, "queries has dtype int64"),
        ("all", TypeError, "queries is of type str"),
        (np.where(other == other[1, 3, 2], np.nan, other), NonFiniteError, "queries hold NaN or infinity"),
        (1e200 * other, NonFiniteError, "queries hold NaN or infinity, or are too large"),
    ):
        with np.errstate(all="ignore"), pytest.raises(error, match=message):
            attend(Q, K, V, queries=queries, **EASY)
    if HAS_TORCH:
        with pytest.raises(TypeError, match="queries"):
            attend(Q, K, V, queries=torch.from_numpy(other), **EASY)
