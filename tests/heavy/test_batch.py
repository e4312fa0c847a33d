"""Heavy attention of batches: each head is as it is alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import levattn

M, N, D = 7, 50, 4


def pair(queries: tuple[int, ...], keys: tuple[int, ...], m: int = M) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((*queries, m, D)), rng.standard_normal((*keys, N, D)) * [1, 1, 1, 5]


# Leading axes of queries and keys, and which keys a query attends to
SHAPES = {
    "same": ((2, 3), (2, 3), tuple),
    "shared keys": ((2, 6), (2, 3), lambda place: (place[0], place[1] // 2)),
    "one set of keys": ((5,), (), lambda _: ()),
    "one set of queries": ((), (2, 3), tuple),
}
CALLS: dict[str, Any] = {
    "plain": levattn.heavy_attention,
    "huber": partial(levattn.heavy_attention, f="huber"),
    "countsketch": partial(levattn.heavy_attention, method="countsketch"),
    "causal": levattn.causal_heavy_attention,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_head_is_as_it_is_alone(shape: str, name: str) -> None:
    (queries, keys, of), call = SHAPES[shape], CALLS[name]
    Q, K = pair(queries, keys, N if name == "causal" else M)
    V = np.random.default_rng(1).standard_normal((*keys, N, 3))
    mask = np.random.default_rng(2).random((*keys, N)) < 0.8
    found = call(Q, K, 0.1, mask=mask)
    assert found.batch == (queries or keys)
    output, bound = found.apply(V, compensate="mean")
    for place in np.ndindex(found.batch):
        mine, theirs = place if queries else (), of(place)
        alone = call(Q[mine], K[theirs], 0.1, mask=mask[theirs])
        np.testing.assert_array_equal(found[place].entries.toarray(), alone.entries.toarray())
        for name in ("normalizers", "error", "captured_mass", "residual_mass"):
            np.testing.assert_array_equal(getattr(found, name)[place], getattr(alone, name))
        expected = alone.apply(V[theirs], compensate="mean")
        np.testing.assert_array_equal(output[place], expected[0])
        np.testing.assert_array_equal(bound[place], expected[1])
    assert len(found) == len(list(found)) == np.prod(found.batch)
    assert f"in each of {found.batch}" in repr(found)


def test_a_batch_of_sets_serves_and_another_is_refused() -> None:
    Q, K = pair((2, 3), (2, 3))
    universal = levattn.universal_set(K, 0.1)
    mine = levattn.heavy_attention(Q, K, 0.1, universal=universal)
    np.testing.assert_array_equal(mine.normalizers, levattn.heavy_attention(Q, K, 0.1).normalizers)
    with pytest.raises(ValueError, match="universal is of other keys than K"):
        levattn.heavy_attention(Q, K[::-1], 0.1, universal=universal)
    with pytest.raises(ValueError, match=r"keys of shape \(50,\); expected the set of K, \(2, 3, 50\)"):
        levattn.heavy_attention(Q, K, 0.1, universal=universal[0, 0])


def test_tensors_give_tensors() -> None:
    torch = pytest.importorskip("torch")
    Q, K = (torch.from_numpy(array).to(torch.bfloat16) for array in pair((4,), (2,)))
    output, _ = levattn.heavy_attention(Q, K, 0.1).apply(K)
    assert isinstance(output, torch.Tensor)
    assert output.shape == (4, M, D)


@pytest.mark.parametrize(("queries", "keys"), [((4,), (3,)), ((3, 2), (2, 2)), ((2, 2), ()), ((2,), (0,))])
def test_leading_axes_that_do_not_go_together_are_refused(queries: Any, keys: Any) -> None:
    with pytest.raises(ValueError, match="a multiple of K"):
        levattn.heavy_attention(*pair(queries, keys), 0.1)


def test_errors_name_the_head() -> None:
    Q, K = pair((2, 3), (2, 3))
    found = levattn.heavy_attention(Q, K, 0.1)
    with pytest.raises(IndexError, match="one for each axis of the batch"):
        found[0]
    with pytest.raises(ValueError, match=r"leading axes \(2, 3\) of the keys"):
        found.apply(np.ones((N, 2)))
    Q[1, 2, 3, 0] = np.nan
    with pytest.raises(levattn.NonFiniteError, match=r"at \(1, 2\) of the batch \(2, 3\): "):
        levattn.heavy_attention(Q, K, 0.1)
