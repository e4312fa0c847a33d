"""When causal pruned attention selects: first after twice its slots, then after each chunk, in whatever calls.

Inside: the state without outputs, as pruned models take it, has no public name.
"""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import naive_attention
import strategies
from levattn import thread_limit
from levattn.attention import Selection, causal_pruned_attention
from levattn.attention.pruned.pruned import state_alone
from libraries import needs_torch
from pruned_calls import attend, selected, walk

T, BUDGET = 150, 40
FIRST = 2 * BUDGET  # positions before the first selection
OPTIONS: dict[str, dict[str, Any]] = {  # of as many slots
    "budget": {"budget": BUDGET},
    "expected": {"budget": BUDGET, "scores": "expected", "sinks": 2},
    "leverage": {"budget": BUDGET, "scores": "leverage"},
    "dropped": {"size": 30, "window": 3, "renew_every": 7},
    "squares": {"budget": BUDGET, "f": 2},
    "late": {"budget": 20, "start": FIRST},
    "late leverage": {"size": 8, "window": 3, "renew_every": 6, "scores": "leverage", "start": FIRST},
    "no later": {"budget": BUDGET, "start": FIRST - 1},
}


def arrays(seed: int, n: int = T, heads: int = 4) -> Any:
    Q, K, V = np.random.default_rng(seed).standard_normal((3, heads, n, 6))
    return Q + 0.5, K, V


@pytest.mark.parametrize("name", OPTIONS)
def test_positions_up_to_twice_the_slots_are_dense(name: str) -> None:
    Q, K, V = arrays(0)
    Y = attend(Q, K, V, causal=True, **OPTIONS[name])
    expected, _ = naive_attention.dense(Q, K, V, OPTIONS[name].get("f"), True)
    np.testing.assert_allclose(Y[:, :FIRST], expected[:, :FIRST], atol=1e-12)
    assert np.all(np.abs(Y - expected)[:, FIRST:].max(axis=(1, 2)) > 1e-3)


# roundings of means, which are computed in single precision for formats of 16 bits
ROUNDINGS = {"float64": 2.0**-46, "float32": 2.0**-17, "float16": 2.0**-10, "bfloat16": 2.0**-7}


KINDS = [name for name in strategies.ALL_STORAGE if not name.startswith("cupy")]  # emulated, it has no Cholesky factor


@strategies.stores(*KINDS)
@pytest.mark.parametrize("f", ["softmax", 2])
def test_twice_the_slots_are_dense_and_decoding_is_the_whole_there_and_beyond(f: Any, storage: str) -> None:
    """By every kind of arrays. For n = 2 · slots positions, and for more."""
    slots = Selection(12).slots(99, causal=True)
    first = 2 * slots.total
    n = first + 4 * slots.chunk + 1
    Q, K, V = (strategies.STORAGE[storage](X) for X in arrays(7, n))
    exact = [strategies.as_float64(X) for X in (Q, K, V)]
    room = ROUNDINGS[storage.rpartition("-")[2]] * np.abs(exact[2]).max()
    dense, _ = naive_attention.dense(*exact, None if f == "softmax" else f, True)
    alone = causal_pruned_attention(*(X[:, :first, :] for X in (Q, K, V)), Selection(12), f=f)
    np.testing.assert_allclose(strategies.as_float64(alone), dense[:, :first], rtol=0, atol=room)
    whole, _ = causal_pruned_attention(Q, K, V, Selection(12), f=f, return_state=True)
    whole = strategies.as_float64(whole)
    np.testing.assert_allclose(whole[:, :first], dense[:, :first], rtol=0, atol=room)
    assert np.abs(whole - dense)[:, first:].max() > 0.1
    held: Any = Selection(12)
    for i in range(n):
        row, held = causal_pruned_attention(*(X[:, i : i + 1, :] for X in (Q, K, V)), held, f=f, return_state=True)
        np.testing.assert_allclose(strategies.as_float64(row)[:, 0], whole[:, i], rtol=0, atol=room)


def test_a_threshold_selects_no_earlier_than_it_is_asked_to() -> None:
    Q, K, V = arrays(9)
    options = {"epsilon": 0.95, "scores": "leverage", "center": False, "renew_every": 7, "f": 2}
    expected, _ = naive_attention.dense(Q, K, V, 2, True)
    for start, first in ((0, 7), (6, 7), (30, 30)):
        far = np.abs(attend(Q, K, V, causal=True, start=start, **options) - expected).max(axis=(0, 2))
        assert far[:first].max() < 1e-12 < 1e-3 < far[first]


def test_certificates_know_that_nothing_was_left_out_of_the_first_positions() -> None:
    Y, _, certificate = causal_pruned_attention(*arrays(1), BUDGET, return_certificate=True, return_state=True)
    np.testing.assert_array_equal(certificate.captured_lower[:, :FIRST], 1)
    np.testing.assert_array_equal(certificate.error_bound[:, :FIRST], 0)
    assert np.all(certificate.error_bound[:, FIRST:] > 0)
    assert certificate.slots.tolist() == [*range(1, FIRST + 1), *[BUDGET] * (T - FIRST)]
    assert Y.shape == (4, T, 6)


@strategies.examples(20)
@given(
    name=st.sampled_from([*OPTIONS]),
    cuts=st.sets(st.integers(1, T - 1), max_size=6),
    around=st.sets(st.sampled_from([BUDGET, FIRST - 1, FIRST, FIRST + 1, FIRST + 9, FIRST + 10, FIRST + 11])),
    seed=strategies.seeds(),
)
def test_chunks_of_any_size_are_the_whole(name: str, cuts: set[int], around: set[int], seed: int) -> None:
    X = arrays(seed)
    whole, state = walk(*X, **OPTIONS[name])
    pieces, held = [], None
    for low, high in pairwise([0, *sorted(cuts | around), T]):
        piece, held = walk(*(x[:, low:high] for x in X), state=held, **OPTIONS[name])
        rows = held.parts[0].kept.shape[1] + held.parts[0].recent.shape[1]
        assert rows <= held.slots.total if held.positions >= FIRST else rows == held.positions
        pieces.append(piece)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=1e-10)
    assert held is not None
    assert (held.positions, held.nbytes) == (T, state.nbytes)
    np.testing.assert_array_equal(held.parts[0].kept_places, state.parts[0].kept_places)


LATE: dict[str, dict[str, Any]] = {  # selections go by the queries of every second or fourth position
    "second": {"size": 6, "summaries": 4, "window": 3, "renew_every": 5, "start": 515},
    "fourth": {"size": 6, "summaries": 4, "window": 3, "renew_every": 7, "start": 1026},
    "fourth, in whole chunks": {"size": 6, "summaries": 4, "window": 3, "renew_every": 8, "start": 1024},
    "fourth, expected": {"size": 6, "scores": "expected", "window": 3, "renew_every": 6, "start": 1024},
    "fourth, squares": {"size": 6, "summaries": 4, "window": 3, "renew_every": 7, "start": 1024, "f": 2},
}


@strategies.stores("float64", "torch-float64")
@pytest.mark.parametrize("name", LATE)
def test_late_selections_go_by_some_queries_in_any_chunks(name: str, storage: str) -> None:
    Q, K, V = arrays(10, LATE[name]["start"] + 41, heads=2)
    start, oracle = LATE[name]["start"], {"summaries": "R", "scores": "kind", "f": "power", "renew_every": "chunk"}
    options = {oracle.get(option, option): value for option, value in LATE[name].items()}
    options["center"] = "power" not in options
    expected = np.stack(
        [naive_attention.pruned(q[None], k, v, **options)[0][0] for q, k, v in zip(Q, K, V, strict=True)]
    )
    stored = strategies.STORAGE[storage]
    for cuts in ([], [start], [1, 2, 300, start - 1, start + 3, start + 20], [start + 2 * i for i in range(20)]):
        pieces, held = [], None
        for low, high in pairwise([0, *cuts, K.shape[1]]):
            piece, held = walk(*(stored(X[:, low:high]) for X in (Q, K, V)), state=held, **LATE[name])
            pieces.append(strategies.as_float64(piece))
        np.testing.assert_allclose(np.concatenate(pieces, axis=1)[:, start:], expected[:, start:], atol=1e-10)


def test_steps_of_decoding_are_the_whole() -> None:
    Q, K, V = (x.astype(np.float32) for x in arrays(2))
    whole = causal_pruned_attention(Q, K, V, BUDGET)
    state, rows = None, []
    for i in range(T):
        step = slice(i, i + 1)
        row, state = walk(Q[:, step], K[:, step], V[:, step], state=state, budget=BUDGET)
        rows.append(row)
    np.testing.assert_allclose(np.concatenate(rows, axis=1), whole, atol=1e-5)


def test_states_hold_no_more_rows_than_they_need_and_share_no_memory_with_the_arguments() -> None:
    X = arrays(3, 400)
    slots = Selection(BUDGET).slots(400, causal=True)
    sizes = []
    for n in (*range(BUDGET, 400, 23), FIRST - 1, FIRST):
        _, state = causal_pruned_attention(*(x[:, :n] for x in X), BUDGET, return_state=True)
        (part,) = state.parts
        rows = part.recent.shape[1]
        assert rows == n if n < FIRST else rows < slots.window + slots.chunk
        assert part.recent.base is None or part.recent.base.nbytes == part.recent.nbytes
        assert not any(np.shares_memory(part.recent, x) for x in X)
        sizes.append(state.nbytes)
    assert max(sizes) < 40_000


def test_what_is_not_finite_is_named_from_a_thread_as_well() -> None:
    Q, K, V = arrays(6, 300)
    K[2, 20] = np.inf
    with np.errstate(all="ignore"), thread_limit(2), pytest.raises(ValueError, match="give finite"):
        causal_pruned_attention(Q, K, V, BUDGET, return_state=True)


def numbers_of(state: Any) -> list[Any]:
    """Return the arrays of a state."""
    values = [value for part in state.parts for value in vars(part).values()]
    values += [array for value in values if hasattr(value, "__dict__") for array in vars(value).values()]
    return [array for array in values if hasattr(array, "shape")]


def test_no_call_changes_a_result_or_a_state_of_another() -> None:
    """Calls leave memory to later calls, and a state shares the arrays that a step does not change."""
    pieces = [tuple(X[:, a:b] for X in arrays(3, 300)) for a, b in ((0, 130), (130, 131), (131, 220), (220, 300))]
    alone, state = [], BUDGET
    for piece in pieces:
        Y, state = causal_pruned_attention(*piece, state, return_state=True)
        alone.append(Y.copy())
    results, state = [], BUDGET
    for piece in pieces:
        causal_pruned_attention(*arrays(4, 300, heads=6), BUDGET)
        Y, state = causal_pruned_attention(*piece, state, return_state=True)
        results.append((Y, state, copy.deepcopy(state)))
    for (Y, state, as_it_was), expected in zip(results, alone, strict=True):
        np.testing.assert_array_equal(Y, expected)
        for one, other in zip(numbers_of(state), numbers_of(as_it_was), strict=True):
            np.testing.assert_array_equal(one, other)


@needs_torch
@pytest.mark.parametrize("positions", [70, 90, 131])
def test_copies_of_a_state_of_tensors_go_on_alike(positions: int) -> None:
    import torch

    whole = [torch.from_numpy(X) for X in arrays(5, positions + 20)]
    first, step = ([X[:, part] for X in whole] for part in (slice(0, positions), slice(positions, None)))
    _, state = causal_pruned_attention(*first, BUDGET, return_state=True)
    expected, after = causal_pruned_attention(*step, state, return_state=True)
    copies = [copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    for other in copies:
        Y, later = causal_pruned_attention(*step, other, return_state=True)
        torch.testing.assert_close(Y, expected, rtol=0, atol=0)
        assert (other.nbytes, later.nbytes) == (state.nbytes, after.nbytes)
        assert len(pickle.dumps(other)) < 2 * state.nbytes
    for array in numbers_of(copies[1]):
        array[...] = 0  # its memory is its own
    followed = [X.clone().requires_grad_() for X in step]
    Y, _ = causal_pruned_attention(*followed, state, return_state=True)
    torch.testing.assert_close(Y.detach(), expected)
    Y.sum().backward()
    assert all(bool((X.grad != 0).any()) for X in followed[1:])


@pytest.mark.parametrize("storage", ["numpy", "torch", "torch with gradients"])
@pytest.mark.parametrize("name", [name for name in OPTIONS if "f" not in OPTIONS[name]])
def test_a_state_without_outputs_is_the_state_of_the_call(name: str, storage: str) -> None:
    whole = arrays(8, 300)
    if storage != "numpy":
        torch = pytest.importorskip("torch")
        whole = [torch.from_numpy(X).requires_grad_(storage.endswith("gradients")) for X in whole]
    selection: Any = selected(OPTIONS[name])[0]
    state = other = selection
    for cut in (slice(0, 33), slice(33, 130), slice(130, 131), slice(131, 300)):
        part = [X[:, cut] for X in whole]
        _, state = causal_pruned_attention(*part, state, return_state=True)
        other = state_alone(*part, other)
        for one, two in zip(numbers_of(state), numbers_of(other), strict=True):
            one, two = (X.detach() if hasattr(X, "detach") else X for X in (one, two))
            np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
