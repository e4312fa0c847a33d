"""One token that attends to slots in main memory: against the definition in float64, as numbers and as codes.

Inside: the slots of a cache are made by hand, at the borders of chunks and of vectors.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import threading
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import CACHE, base, of_heads, tokens  # noqa: E402

import levattn  # noqa: E402
from levattn._kernels.pruned import decode  # noqa: E402
from levattn._kernels.pruned.torch import attended_token  # noqa: E402
from levattn.integrations.transformers import compress  # noqa: E402
from levattn.integrations.transformers.compression.slots import HeadSlots, held_by_kernels  # noqa: E402

KINDS = torch.float32, torch.float16, torch.bfloat16
SUMS = 3e-6  # the error of sums in float32, of values of about 1
ROUNDING = {torch.float32: 0.0, torch.float16: 1.01 * 2.0**-11, torch.bfloat16: 1.01 * 2.0**-8}  # of the output
CHUNK = decode.TASK_KEYS


@dataclass(frozen=True)
class Step:
    """A token that attends to slots and to the tokens after them."""

    q: Any
    groups: tuple[HeadSlots, ...]
    near: tuple[Any, Any]
    present: Any = None
    scale: float = 0.3
    softcap: float | None = None

    def run(self) -> Any:
        held = held_by_kernels(self.groups, self.q.dtype)
        assert held is not None
        Y = attended_token(self.q, held, (*self.near, self.present), self.scale, self.softcap)
        assert Y is not None
        return Y

    def defined(self) -> Any:
        """The output by its definition, in float64."""
        (B, H), (G, t), D = self.q.shape[:2], self.near[0].shape[1:3], self.near[1].shape[3]
        Y = torch.zeros(B, H, 1, D, dtype=torch.float64)
        hidden = torch.zeros(B, t) if self.present is None else torch.where(self.present, 0, -torch.inf)
        hidden = hidden.expand(B, t).clone()
        hidden[:, -1] = 0
        for group in self.groups:
            numbers = group.opened(torch.float64)
            for place, head in enumerate(group.heads):
                K, V = (
                    torch.cat([slots[:, place], near[:, head].double()], 1)
                    for slots, near in zip((numbers.keys, numbers.values), self.near, strict=True)
                )
                weight = torch.zeros(B, K.shape[1] - t) if group.log_weight is None else group.log_weight[:, place]
                rows = slice(head * (H // G), (head + 1) * (H // G))
                z = self.q[:, rows, 0].double() @ K.mT * self.scale
                z = z if self.softcap is None else torch.tanh(z / self.softcap) * self.softcap
                P = torch.softmax(z + torch.cat([weight, hidden], 1)[:, None].double(), -1)
                Y[:, rows, 0] = P @ V
        return Y

    def check(self) -> None:
        found, expected = self.run(), self.defined()
        assert found.dtype == self.q.dtype
        assert found.shape == expected.shape
        torch.testing.assert_close(found.double(), expected, rtol=ROUNDING[found.dtype], atol=self.error())

    def error(self) -> float:
        """The error of sums and of weights: a logit errs by γ_n Σ |q k| for n roundings."""
        d, q = self.q.shape[3], self.q.double().abs().amax((0, 1, 2))
        slots = [group.opened(torch.float64) for group in self.groups]
        K = torch.cat([X.double().abs().flatten(0, 2) for X in (self.near[0], *(group.keys for group in slots))])
        V = max(float(X.abs().max()) for X in (self.near[1], *(group.values for group in slots)))
        return SUMS + 2 * (d / decode.FLOATS + 6) * 2.0**-24 * self.scale * float((K @ q).max()) * V


def drawn(
    sizes: tuple[int, ...],
    t: int,
    d: int = 16,
    D: int = 16,
    *,
    kind: Any = torch.float32,
    B: int = 2,
    sharing: int = 2,
    bits: int = 16,
    weighted: bool = True,
    padded: bool = False,
    **options: Any,
) -> Step:
    """Rows at random, a group of slots for each head; some slots have no weight, and some later tokens are padding."""
    draw = torch.Generator().manual_seed(sum(sizes) + 1000 * t + d)

    def rows(*shape: int) -> Any:
        return torch.randn(shape, generator=draw).to(kind)

    groups = []
    for head, s in enumerate(sizes):
        weight = torch.randn((B, 1, s), generator=draw) if weighted and head else None
        if weight is not None:
            weight[torch.rand(weight.shape, generator=draw) < 0.2] = -torch.inf
        keys = rows(B, 1, s, d) * torch.logspace(-1, 1, d).to(kind) + 1
        group = HeadSlots((head,), keys, rows(B, 1, s, D), weight, torch.zeros(B, 1, s, dtype=torch.int32))
        groups.append(group.coded(bits) if head or len(sizes) == 1 else group)
    q = rows(B, sharing * len(sizes), 1, d) / torch.logspace(-1, 1, d).to(kind)
    near = rows(B, len(sizes), t, d), rows(B, len(sizes), t, D)
    present = torch.rand((B, t), generator=draw) < 0.5 if padded else None
    return Step(q, tuple(groups), near, present, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("sharing", [1, 2, 3, 4, 9])
@pytest.mark.parametrize(("d", "D"), [(1, 3), (5, 5), (64, 64), (72, 72), (80, 24), (136, 128), (300, 40)])
def test_outputs_are_those_of_the_definition(d: int, D: int, sharing: int, bits: int, kind: Any) -> None:
    drawn((70, 33), 9, d, D, kind=kind, sharing=sharing, bits=bits, B=1).check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7, 50.0])
def test_weights_padding_and_bounds_of_logits(weighted: bool, padded: bool, softcap: float | None, kind: Any) -> None:
    drawn((21, 40), 13, kind=kind, weighted=weighted, padded=padded, softcap=softcap).check()


@pytest.mark.parametrize("s", [1, 31, 32, 33, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
@pytest.mark.parametrize("t", [1, 32, CHUNK, CHUNK + 1])
def test_lengths_around_the_borders_of_chunks(s: int, t: int) -> None:
    drawn((s, 3, s + 1), t, padded=True, bits=8).check()


def test_heads_of_a_group_need_not_follow_each_other() -> None:
    step = drawn((40, 40, 40), 5)
    arrays = [torch.cat([step.groups[place].arrays[i] for place in (1, 2)], 1) for i in range(4)]
    groups = HeadSlots((0, 2), *arrays), replace(step.groups[0], heads=(1,))
    replace(step, groups=groups).check()


def test_views_are_read_where_they_lie() -> None:
    step = drawn((70, 300), 9, 16, 8, padded=True)
    expected = step.run()

    def apart(X: Any) -> Any:
        larger = torch.full([2 * size + 3 for size in X.shape], torch.nan).to(X.dtype)
        view = larger[tuple(slice(2, 2 + 2 * size, 2) for size in X.shape[:-1])][..., 1 : 1 + X.shape[-1]]
        view[...] = X
        return view

    groups = tuple(
        replace(
            group,
            keys=apart(group.keys),
            values=apart(group.values),
            log_weight=None if group.log_weight is None else apart(group.log_weight),
        )
        for group in step.groups
    )
    near = tuple(map(apart, step.near))
    turned = step.present.repeat_interleave(2, 1)[:, ::2]
    assert torch.equal(Step(apart(step.q), groups, near, turned).run(), expected)
    heads_last = tuple(X.transpose(1, 2).contiguous().transpose(1, 2) for X in step.near)
    assert torch.equal(replace(step, near=heads_last).run(), expected)
    same = replace(step, present=step.present[:1].expand(2, -1))
    assert torch.equal(replace(step, present=step.present[:1]).run(), same.run())


@pytest.mark.parametrize("bits", [16, 8])
def test_no_bit_depends_on_threads_or_on_the_batch(bits: int) -> None:
    step = drawn((3000, 2000), 700, 64, 64, B=6, sharing=4, bits=bits, padded=True)
    with levattn.thread_limit(1):
        alone = step.run()
    with levattn.thread_limit(3):
        assert torch.equal(step.run(), alone)
    rows = torch.tensor([4])
    groups = tuple(group.of_sequences(rows) for group in step.groups)
    if bits == 16:  # the scales of codes belong to each sequence, but the rest does not
        groups = tuple(
            HeadSlots(group.heads, *(x if x is None else x[4:5] for x in group.arrays)) for group in step.groups
        )
    near = tuple(X[4:5] for X in step.near)
    found = Step(step.q[4:5], groups, near, step.present[4:5]).run()
    assert torch.equal(found, alone[4:5])


def test_slots_without_weight_count_for_nothing() -> None:
    step = drawn((3 * CHUNK, 2 * CHUNK), 2 * CHUNK, padded=True, scale=3.0)
    step.groups[1].log_weight[0, 0, CHUNK:] = -math.inf
    step.groups[1].log_weight[1] = -math.inf
    step.present[1] = False
    step.check()
    far = replace(step, q=-1e3 * step.q.abs(), near=tuple(X.abs() for X in step.near), softcap=None)
    assert far.run().isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-3, 30.0, 1e4, 1e30])
def test_logits_of_any_size(size: float) -> None:
    step = drawn((150, 90), 20, 4, 4, weighted=size < 1)
    found = replace(step, q=step.q * size)
    error = (found.run().double() - found.defined()).abs().max()
    assert error < SUMS * max(1.0, min(size, 1e2))


def test_numbers_that_are_not_finite_reach_their_rows() -> None:
    step = drawn((80, 300), 70, B=1, weighted=False)
    step.near[0][0, 0, 66, 3] = step.groups[1].values[0, 0, 270, 5] = math.nan
    found = step.run()[0, :, 0]
    assert found[:2].isnan().all()
    assert found[2:, 5].isnan().all()
    assert found[2:, [0, 1, 2, 3, 4, 6, 7]].isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_at_the_end_of_the_range_of_half_precision_stay_finite(bits: int) -> None:
    V = torch.full((1, 1, 4, 64), 65504.0).half()
    V[..., ::2] *= -1
    K = torch.zeros(1, 1, 4, 64).half()
    K[0, 0, 0] = 1
    group = HeadSlots((0,), K, V, None, torch.zeros(1, 1, 4, dtype=torch.int32)).coded(bits)
    q, near = torch.full((1, 1, 1, 64), 10.0).half(), (torch.zeros(1, 1, 1, 64).half(),) * 2
    found = Step(q, (group,), near, scale=1.0).run()
    torch.testing.assert_close(found.float(), V[:, :, :1].float(), rtol=0.05, atol=0)
    beyond = V.clone()
    beyond[:, :, 0] *= 2
    infinite = HeadSlots((0,), K, beyond, None, torch.zeros(1, 1, 4, dtype=torch.int32))
    assert Step(q, (infinite,), near, scale=1.0).run().isinf().all()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_keys_that_nobody_sees_need_not_be_finite(softcap: float | None) -> None:
    step = drawn((300, 40), 30, padded=True, softcap=softcap)
    step.present[:, 3], step.groups[1].log_weight[:, :, 7] = False, -torch.inf
    expected = step.run()
    step.near[0][:, :, 3], step.groups[1].keys[:, :, 7] = torch.nan, torch.inf
    assert torch.equal(step.run(), expected)


def test_other_numbers_are_left_to_other_code() -> None:
    step = drawn((20,), 4)
    held, near = held_by_kernels(step.groups, torch.float32), (*step.near, None)
    assert held_by_kernels(step.groups, torch.float16) is None
    assert held_by_kernels(drawn((20,), 4, kind=torch.float64).groups, torch.float64) is None
    leaf = step.q.clone().requires_grad_()
    assert attended_token(leaf, held, near, 1.0, None) is None
    with torch.no_grad():
        assert attended_token(leaf, held, near, 1.0, None) is not None
    for q in (step.q.half(), step.q[..., ::2], step.q[:1]):
        assert attended_token(q, held, near, 1.0, None) is None
    for q in (torch._neg_view(step.q), torch._efficientzerotensor(step.q.shape)):  # which have no such memory
        assert attended_token(q, held, near, 1.0, None) is None
    inside = torch.func.vmap(lambda q: torch.zeros(1) * (attended_token(q, held, near, 1.0, None) is None))
    inside(step.q[None])


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_copies_of_a_cache_go_on_alike(bits: int) -> None:
    """Also where torch moves its arrays, to share them with another process."""
    model, steps = base(), [torch.tensor([[3]]), torch.tensor([[14]]), torch.tensor([[15]])]
    cache = compress(model, tokens(1), of_heads({(0, 0): 0.5, (1, 1): 0.4}), bits=bits)

    def answers(held: Any) -> list[Any]:
        with torch.no_grad():
            return [model(ids, **{CACHE: held}).logits for ids in steps]

    with torch.no_grad():
        model(torch.tensor([[9]]), **{CACHE: cache})
    copies = {
        "copied": copy.deepcopy(cache),
        "pickled": pickle.loads(pickle.dumps(cache)),
        "its own": cache.copy(),
    }
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    copies["saved by torch"] = torch.load(buffer, weights_only=False)
    moved = copies["moved"] = copy.deepcopy(cache)
    with torch.no_grad():
        model(torch.tensor([[9]]), **{CACHE: moved.copy()})
    for layer in moved.layers:
        for group in layer.groups:
            for rows in (group.keys, group.values):
                for array in rows.stored.arrays if hasattr(rows, "stored") else [rows]:
                    array.share_memory_()
    expected = answers(cache)
    for held in copies.values():
        for a, b in zip(answers(held), expected, strict=True):
            assert torch.equal(a, b)


def test_threads_ask_copies_of_a_cache_at_once() -> None:
    step = drawn((900, 50, 300), 20, 64, 64, bits=8)
    held = held_by_kernels(step.groups, torch.float32)
    near = {t: tuple(X[:, :, :t].contiguous() for X in step.near) for t in (1, 20)}  # other numbers of chunks
    expected = {t: attended_token(step.q, held, (*near[t], None), 0.3, None) for t in near}
    found: dict[int, list[Any]] = {t: [] for t in near}

    def ask(t: int) -> None:
        for _ in range(50):
            found[t].append(attended_token(step.q, held, (*near[t], None), 0.3, None))

    threads = [threading.Thread(target=ask, args=(t,)) for t in near]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for t, outputs in found.items():
        assert len(outputs) == 50
        assert all(torch.equal(Y, expected[t]) for Y in outputs)
