"""Sequence shards on the ranks of a torch process group: the set of all keys on each, and what traveled for it.

The ranks are processes on this machine with the backend gloo. They are started once and run a table of cases; each
answer is a test of its own.
"""

from __future__ import annotations

import datetime
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import levattn
from levattn.exceptions import NonFiniteError
from strategies import Cauchy, as_float64, conditioned, graded, integer_deficient, tiny_direction

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)

from levattn.distributed.torch import (  # noqa: E402 (no use without torch)
    Traffic,
    softmax_state,
    universal_set,
)
from levattn.states import SoftmaxState  # noqa: E402

RANKS = 3


@dataclass(frozen=True)
class Case:
    """Keys, how they are cut, and what is asked; `wrong` is a rank and how its arguments are changed."""

    keys: Callable[[], Any]
    cuts: tuple[int, ...]  # rows of each rank but the last
    epsilon: float = 0.05
    f: float = 2
    values: Callable[[Any], Any] | None = None
    mask: Callable[[Any], Any] | None = None
    wrong: tuple[int, dict[str, Callable[[Any], Any]]] = (-1, {})

    @property
    def size(self) -> int:
        return len(self.cuts) + 1

    def arguments(self, rank: int) -> dict[str, Any]:
        K = self.keys()
        edges = [*np.cumsum([0, *self.cuts]).tolist(), K.shape[-2]]
        part = slice(edges[rank], edges[rank + 1])
        found: dict[str, Any] = {
            "K": K[..., part, :],
            "epsilon": self.epsilon,
            "payload": None,
            "mask": None,
            "f": self.f,
        }
        if self.values is not None:
            V = self.values(K)
            found["payload"] = V[(*(slice(None),) * (K.ndim - 2), part)]
        if self.mask is not None:
            found["mask"] = self.mask(K)[..., part]
        if rank == self.wrong[0]:
            found |= {name: change(found[name]) for name, change in self.wrong[1].items()}
        return found


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def keys(n: int = 9000, d: int = 6, dtype: str = "float64", seed: int = 0) -> Any:
    """Gaussian keys with some that are large."""
    K = generator(seed).standard_normal((n, d))
    K[:: max(1, n // 7)] *= 40
    return torch.from_numpy(K).to(getattr(torch, dtype))


def heads() -> Any:
    K = generator(1).standard_normal((2, 3, 5000, 4))
    K[..., ::700, 0] *= np.array([30.0, 60, 90])[None, :, None]
    return torch.from_numpy(K)


def row_numbers(K: Any) -> Any:
    """Values by which a row is known: its number, and its keys."""
    rows = np.broadcast_to(np.arange(K.shape[-2], dtype=np.float64)[:, None], (*K.shape[:-1], 1))
    return torch.cat([torch.from_numpy(rows.copy()), K.to(torch.float64)], dim=-1)


def padded() -> Any:
    K = keys()
    K[::3] = torch.nan
    return K


def random_cuts(seed: int) -> tuple[int, ...]:
    first, second = sorted(generator(seed).integers(0, 9000, 2).tolist())
    return first, second - first


SOUND = {
    "one": Case(keys, ()),
    "two": Case(keys, (2500,)),
    "three": Case(keys, (4000, 1)),
    "an empty shard": Case(keys, (0, 9000)),
    "nothing but empty shards": Case(lambda: keys(0), (0, 0)),
    "fewer rows than columns": Case(lambda: keys(5, 8), (2, 2)),
    "numpy": Case(lambda: keys().numpy(), (4096, 2048)),
    "ill-conditioned": Case(lambda: torch.from_numpy(conditioned(generator(2), 7000, 8, 1e10)), (2048, 3000)),
    "ill-conditioned of 1e6": Case(lambda: torch.from_numpy(conditioned(generator(3), 7000, 8, 1e6)), (3500,)),
    "a direction of one shard": Case(lambda: torch.from_numpy(tiny_direction(generator(4), 900, 5, 1e-9)), (300, 300)),
    "rank-deficient": Case(lambda: torch.from_numpy(integer_deficient(generator(5), 3000, 6, 3)), (1, 1500)),
    "columns of all sizes": Case(lambda: torch.from_numpy(graded(generator(6), 3000, 6) * 1e170), (1000, 1000)),
    "heads": Case(heads, (2000, 10), values=lambda K: 2 * K),
    "fourth power": Case(lambda: keys(d=3), (2500, 4000), f=4),
    "padding": Case(padded, (3000, 3000), mask=lambda K: torch.isfinite(K[:, 0]), values=row_numbers),
    "gradients": Case(lambda: keys().requires_grad_(), (3000, 3000), values=lambda K: 3 * K),
    **{
        f"{dtype} keys": Case(lambda t=dtype: keys(dtype=t), (2000, 3000))
        for dtype in ("float32", "float16", "bfloat16")
    },
    **{f"random cuts {seed}": Case(keys, random_cuts(seed), values=row_numbers) for seed in range(4)},
    **{
        f"{dtype} values": Case(keys, (2000, 3000), values=lambda K, t=dtype: K.to(getattr(torch, t)))
        for dtype in ("bfloat16", "float16", "int64")
    },
}


class Wrong(NamedTuple):
    """What one rank gives that it should not, and what is said: by that rank and by the others, or by all."""

    rank: int
    change: dict[str, Callable[[Any], Any]]
    error: type[Exception]
    said: str
    others: str | None = None  # as the rank itself if it is None
    given: dict[str, Any] = {}  # noqa: RUF012 (which nobody changes)


def with_nan(K: Any) -> Any:
    K[17] = torch.nan
    return K


VALUES: dict[str, Any] = {"values": row_numbers}
MASKED: dict[str, Any] = {"mask": lambda K: K[:, 0] > 0}
ERRORS = {
    "not finite": Wrong(1, {"K": with_nan}, NonFiniteError, "row 17, counted", "rank 1: NonFiniteError: K holds NaN"),
    "epsilon": Wrong(2, {"epsilon": lambda _: 2}, ValueError, "epsilon is 2", "rank 2: ValueError: epsilon is 2"),
    "no matrix": Wrong(0, {"K": lambda K: K[0]}, ValueError, "K_local has shape", "rank 0: ValueError: K_local"),
    "values too few": Wrong(
        2,
        {"payload": lambda V: V[:7]},
        ValueError,
        r"payload has shape \(7, 7\)",
        "rank 2: ValueError: payload has",
        VALUES,
    ),
    "values in a list": Wrong(
        1,
        {"payload": lambda V: V.tolist()},
        TypeError,
        "payload is of type list",
        "rank 1: TypeError: payload is",
        VALUES,
    ),
    "mask too long": Wrong(
        0, {"mask": lambda m: torch.cat([m, m])}, ValueError, "mask has shape", "rank 0: ValueError: mask", MASKED
    ),
    "columns": Wrong(1, {"K": lambda K: K[:, :5]}, ValueError, r"^d differs .* \[6, 5, 6\]"),
    "dtypes": Wrong(1, {"K": lambda K: K.float()}, ValueError, "dtype of K_local differs"),
    "epsilons": Wrong(1, {"epsilon": lambda _: 0.2}, ValueError, r"epsilon differs .* \[0.05, 0.2, 0.05\]"),
    "functions": Wrong(1, {"f": lambda _: 4}, ValueError, "^f differs"),
    "values on one": Wrong(0, {"payload": lambda _: None}, ValueError, r"^payload \(its dtype", None, VALUES),
}
WRONG = {
    name: Case(keys, (3000, 3000), wrong=(wrong.rank, wrong.change), **wrong.given) for name, wrong in ERRORS.items()
}
WRONG_STATES: dict[str, Any] = {"another size": SoftmaxState(2, 4), "no state": 3}


def softmax_chunks() -> list[tuple[Any, Any]]:
    """Logits and values of each rank; the second has none."""
    return [
        (generator(rank).normal(3 * rank, 20, (2, n, 4)), generator(9 + rank).normal(size=(2, n, 5)))
        for rank, n in enumerate((70, 0, 300))
    ]


def softmax_shards() -> list[SoftmaxState]:
    return [SoftmaxState(4, 5, (2,)).update(logits, V) for logits, V in softmax_chunks()]


# -- the ranks ----------------------------------------------------------------------------------------


def run_rank(rank: int, folder: str) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=90))
    groups = {size: dist.new_group(list(range(RANKS - size, RANKS))) for size in range(1, RANKS)}
    traveled: list[bytes] = []
    for name in ("broadcast", "all_gather"):
        setattr(dist, name, recorded(getattr(dist, name), traveled))
    answers: dict[str, Any] = {}
    with levattn.thread_limit(1):
        for name, case in (SOUND | WRONG).items():
            place = rank - (RANKS - case.size)  # the last ranks form the smaller groups: their numbers are not those
            if place >= 0:
                traveled.clear()
                answers[name] = answer(case, place, groups.get(case.size)), list(traveled)
        answers["softmax"] = [softmax_state(softmax_shards()[rank], before=before) for before in (False, True)]
        for name, wrong in WRONG_STATES.items():
            try:
                softmax_state(wrong if rank == 1 else SoftmaxState(2, 3))
            except (TypeError, ValueError) as error:
                answers[name] = error
        try:
            universal_set(keys(), 0.1, group=groups[1])
        except ValueError as error:
            answers["outsider"] = error
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


def recorded(collective: Callable[..., Any], traveled: list[bytes]) -> Callable[..., Any]:
    """A collective that notes what this rank gives and gets, once it is done."""

    class Noted:
        def __init__(self, work: Any, tensors: list[Any]) -> None:
            self.work, self.tensors = work, tensors

        def wait(self) -> None:
            if self.work is not None:
                self.work.wait()
            traveled.extend(tensor.numpy().tobytes() for tensor in self.tensors)

    def call(target: Any, *others: Any, **options: Any) -> Any:
        noted = Noted(collective(target, *others, **options), target if isinstance(target, list) else [target])
        if not options.get("async_op"):
            noted.wait()
        return noted

    return call


def answer(case: Case, rank: int, group: Any) -> Any:
    given = case.arguments(rank)
    try:
        return universal_set(
            given["K"], given["epsilon"], payload=given["payload"], mask=given["mask"], group=group, f=given["f"]
        )
    except (TypeError, ValueError) as error:
        return error


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, (str(folder),), nprocs=RANKS)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(RANKS)]


def of_case(answers: list[dict[str, Any]], name: str) -> list[Any]:
    """The answers of the ranks of a case, in order."""
    found = [of_rank[name][0] for of_rank in answers if name in of_rank]
    assert len(found) == (SOUND | WRONG)[name].size
    return found


# -- their answers ------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOUND)
def test_all_ranks_have_the_set_of_all_keys_together(answers: list[dict[str, Any]], name: str) -> None:
    case = SOUND[name]
    K = case.keys()
    mask = None if case.mask is None else case.mask(K)
    (sets, traffic), *others = of_case(answers, name)
    assert sets.n == K.shape[-2]
    assert sets.guarantee == ("exact" if case.f == 2 else "superset")
    alone = levattn.StreamingUniversalSet(case.epsilon, f=case.f).update(K, mask=mask).result()
    assert np.array_equal(sets.rank, alone.rank)
    assert np.array_equal(sets.present, alone.present)
    for item, expected in zip(sets.items, alone.items, strict=True):
        assert np.array_equal(item.indices, expected.indices)
        assert np.array_equal(item.keys, expected.keys)
        assert item.keys.dtype == expected.keys.dtype
        np.testing.assert_allclose(item.scores, expected.scores, rtol=1e-8)
    if case.f == 2 and K.shape[-2]:
        in_memory = levattn.universal_set(K, case.epsilon, mask=mask)
        rows = as_float64(in_memory.mask).reshape(-1, K.shape[-2])
        assert all(np.array_equal(i.indices, np.flatnonzero(r)) for i, r in zip(sets.items, rows, strict=True))
    for theirs, their_traffic in others:
        assert their_traffic == traffic
        assert np.array_equal(theirs.factor.whitening, sets.factor.whitening)
        assert np.array_equal(theirs.rank, sets.rank)
        assert np.array_equal(theirs.present, sets.present)
        assert (theirs.n, theirs.guarantee) == (sets.n, sets.guarantee)
        for one, other in zip(theirs.items, sets.items, strict=True):
            for part in ("scores", "indices", "keys", "payload"):
                np.testing.assert_array_equal(getattr(one, part), getattr(other, part), strict=True)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name, case in SOUND.items() if case.values is not None])
def test_values_come_with_the_keys(answers: list[dict[str, Any]], name: str) -> None:
    case = SOUND[name]
    K = case.keys()
    V = case.values(K)  # type: ignore[misc]
    numbers = V.detach().to(torch.float32 if V.dtype == torch.bfloat16 else V.dtype).numpy()
    sets, _ = of_case(answers, name)[0]
    for item, values in zip(sets.items, numbers.reshape(-1, *numbers.shape[K.ndim - 2 :]), strict=True):
        assert len(item)
        np.testing.assert_array_equal(item.payload, values[item.indices], strict=True)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["three", "random cuts 0", "heads"])
def test_counts_all_that_traveled_and_sends_keys_of_the_set_alone(answers: list[dict[str, Any]], name: str) -> None:
    K = SOUND[name].keys().numpy()
    for of_rank in answers:
        (sets, traffic), traveled = of_rank[name]
        assert sum(map(len, traveled)) == traffic.gathered
        all_of_it = b"".join(traveled)
        for item, rows in zip(sets.items, K.reshape(-1, *K.shape[-2:]), strict=True):
            sent = np.flatnonzero([row.tobytes() in all_of_it for row in rows])
            span_of_a_shard = [4000] if name == "three" else []  # which has this row alone
            assert np.array_equal(np.setdiff1d(sent, span_of_a_shard), item.indices)


@pytest.mark.thorough
def test_traffic_does_not_grow_with_the_rows(answers: list[dict[str, Any]]) -> None:
    [(sets, traffic)] = of_case(answers, "one")
    assert traffic.dense == 9000 * 6 * 8
    assert traffic.moments < 6 * 7 // 2 * 8 + 2500  # a triangle, and what describes it
    assert traffic.selected < len(sets) * (6 + 1) * 8 + 500
    assert traffic.ratio > 20
    assert of_case(answers, "heads")[0][1].dense == 2 * 2 * 3 * 5000 * 4 * 8
    assert of_case(answers, "bfloat16 values")[0][1].dense == 9000 * 6 * (8 + 2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRONG)
def test_if_one_rank_fails_all_do(answers: list[dict[str, Any]], name: str) -> None:
    wrong = ERRORS[name]
    for rank, error in enumerate(of_case(answers, name)):
        own = wrong.others is None or rank == wrong.rank
        assert type(error) is (wrong.error if own else ValueError)
        assert re.search(wrong.said if own else wrong.others, str(error))


@pytest.mark.thorough
def test_others_are_no_members(answers: list[dict[str, Any]]) -> None:
    assert "outsider" in answers[0]
    assert "not in the group" in str(answers[0]["outsider"])
    assert "outsider" not in answers[RANKS - 1]


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("f", [levattn.Huber(), 1.5])
def test_other_functions(alone: None, f: Any) -> None:
    sets, _ = universal_set(keys(), 0.02, f=f)
    expected = levattn.StreamingUniversalSet(0.02, f=f).update(keys()).result()
    assert np.array_equal(sets.indices, expected.indices)
    assert sets.guarantee == "superset"


def test_lists_and_words(alone: None) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    V = np.arange(6.0).astype(ml_dtypes.bfloat16)
    sets, _ = universal_set(np.eye(6, 2).tolist(), 0.5, payload=V, mask=[True, False] * 3)
    assert sets.indices.tolist() == [0]
    assert sets.payload.dtype == np.float32
    assert sets.payload.tolist() == [0.0]


def test_functions_of_ones_own_do_not_travel(alone: None) -> None:
    with pytest.raises(TypeError, match="only states of the functions of levattn"):
        universal_set(keys(), 0.1, f=Cauchy())


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        universal_set(np.eye(3), 0.5)


def test_traffic_adds_up() -> None:
    traffic = Traffic(shapes=10, moments=20, selected=30, dense=600)
    assert (traffic.gathered, traffic.saved, traffic.ratio) == (60, 540, 10)


# -- softmax states -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_softmax_states_are_merged_in_order(answers: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(answers):
        for state, count in zip(of_rank["softmax"], (RANKS, rank), strict=True):
            logits, V = (np.concatenate(parts, axis=1) for parts in zip(*softmax_chunks(), strict=True))
            n = sum(chunk.shape[1] for chunk, _ in softmax_chunks()[:count])
            E = np.exp(logits[:, :n] - logits[:, :n].max(axis=1, keepdims=True, initial=-1e9))
            expected = np.einsum("btl,btd->bld", E / np.maximum(E.sum(axis=1, keepdims=True), 1e-300), V[:, :n])
            np.testing.assert_allclose(state.result(), expected, rtol=1e-12, atol=1e-14)
    assert len({of_rank["softmax"][0].to_bytes() for of_rank in answers}) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRONG_STATES)
def test_softmax_states_that_differ_are_refused_on_all_ranks(answers: list[dict[str, Any]], name: str) -> None:
    said = {str(of_rank[name]) for of_rank in answers}
    assert any("differs between the ranks" in each or "expected SoftmaxState" in each for each in said)
    assert all(isinstance(of_rank[name], TypeError | ValueError) for of_rank in answers)
