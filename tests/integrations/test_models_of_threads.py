"""Threads that share a model: each answer equals the answer alone, wherever the other threads are."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import CACHE, base, tokens  # noqa: E402

from levattn.integrations.transformers import compress, prune  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT, NEW = 24, 4
CUT = {(0, 0): 0.3, (1, 1): 0.5}
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
QUESTION, AGAIN = torch.tensor([[3, 14, 15]]), torch.tensor([[7, 8]])


def text(number: int, count: int = 1) -> Any:
    return tokens(12, CONTEXT)[number % 6 : number % 6 + count]


@torch.no_grad()
def logits(model: Any, number: int) -> Any:
    return model(text(number, 2)).logits


def answer(model: Any, number: int, **options: Any) -> Any:
    return model.generate(torch.cat([text(number), QUESTION], 1), **GREEDY, **options)


def compressed(model: Any, number: int, count: int = 1, **options: Any) -> Any:
    cache = compress(model, text(number, count), CUT, **options)
    first = cache.ask(model, QUESTION.repeat(count, 1), **GREEDY)
    return torch.cat([first, cache.ask(model, AGAIN.repeat(count, 1), **GREEDY)], 1)


def forked(model: Any, number: int, shared: Any, **options: Any) -> Any:
    return shared[number % 6].copy().ask(model, QUESTION, **GREEDY, **options)


def whole(model: Any, number: int, shared: Any) -> Any:
    return answer(model, number, **{CACHE: shared[number % 6].copy()})


@dataclass
class Bench:
    """A model, what is asked of it, and the answers alone."""

    model: Any
    requests: dict[str, Callable[[Any, int], Any]]

    def __post_init__(self) -> None:
        self.expected = {
            (name, number): call(self.model, number) for name, call in self.requests.items() for number in range(6)
        }

    def ask(self, name: str, number: int) -> None:
        found = self.requests[name](self.model, number)
        if not torch.equal(found, self.expected[name, number % 6]):
            raise ValueError(f"{name} {number} differs from its answer alone")


@pytest.fixture(scope="module")
def plain() -> Bench:
    torch.manual_seed(0)
    model = base("Llama")
    shared = [compress(model, text(number), CUT) for number in range(6)]
    return Bench(
        model,
        {
            "dense": logits,
            "dense answer": answer,
            "dense beams": partial(answer, num_beams=2),
            "compressed": compressed,
            "compressed in chunks": partial(compressed, chunk=9),
            "compressed, two contexts": partial(compressed, count=2),
            "fork": partial(forked, shared=shared),
            "fork, beams": partial(forked, shared=shared, num_beams=2),
            "fork, whole text": partial(whole, shared=shared),
        },
    )


@pytest.fixture(scope="module")
def pruned() -> Iterator[Bench]:
    torch.manual_seed(0)
    model = base("Llama")
    with prune(model, {0: 8, 1: 8}):
        yield Bench(model, {"pruned": logits, "pruned answer": answer, "pruned beams": partial(answer, num_beams=2)})


@contextmanager
def interrupted(model: Any, often: int, what: Callable[[int], None]) -> Iterator[list[str]]:
    """Let other threads run to their end in the calls of this thread: at each module, before it and after it."""
    own, done, seen = threading.get_ident(), list[str](), 0

    def hook(name: str, *_: Any) -> None:
        nonlocal seen
        if threading.get_ident() != own:
            return
        seen += 1
        if seen % often:
            return
        with ThreadPoolExecutor(1) as pool:
            pool.submit(what, len(done)).result()
        done.append(name)

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(hook, f"before {name}")))
        hooks.append(module.register_forward_hook(partial(hook, f"after {name}")))
    try:
        yield done
    finally:
        for held in hooks:
            held.remove()


OFTEN = {"dense": 5, "pruned": 5}  # and 61 in more than one pass: primes, so that the next passes meet other modules
OUTER = ["dense", "dense answer", "compressed", "compressed in chunks", "fork", "fork, beams", "fork, whole text"]
INNER = ["dense", "dense answer", "compressed", "compressed, two contexts", "fork", "fork, whole text"]


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
def test_a_request_in_the_middle_of_another_changes_neither(outer: str, inner: str, plain: Bench) -> None:
    with interrupted(plain.model, OFTEN.get(outer, 61), lambda number: plain.ask(inner, number)) as done:
        plain.ask(outer, 3)
    assert len(done) > 3
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain.model.modules())


@pytest.mark.parametrize("outer", ["pruned", "pruned answer", "pruned beams"])
@pytest.mark.parametrize("inner", ["pruned", "pruned answer", "pruned beams"])
def test_a_request_in_the_middle_of_another_on_a_pruned_model(outer: str, inner: str, pruned: Bench) -> None:
    with interrupted(pruned.model, OFTEN.get(outer, 61), lambda number: pruned.ask(inner, number)) as done:
        pruned.ask(outer, 3)
    assert len(done) > 3


def test_a_compressed_cache_on_a_pruned_model_is_refused(plain: Bench, pruned: Bench) -> None:
    cache = compress(plain.model, text(0), CUT)
    with pytest.raises(TypeError, match="the cache is of type CompressedCache; expected a DynamicCache"):
        cache.ask(pruned.model, QUESTION, **GREEDY)
    pruned.ask("pruned answer", 0)


def test_a_cache_answers_one_question_at_a_time(plain: Bench) -> None:
    cache = compress(plain.model, text(0), CUT)
    refused = []

    def ask(_: int) -> None:
        with pytest.raises(ValueError, match="the cache is answering another question; expected one at a time"):
            cache.ask(plain.model, AGAIN, **GREEDY)
        refused.append(True)

    with interrupted(plain.model, 50, ask):
        found = cache.ask(plain.model, QUESTION, **GREEDY)
    assert refused
    assert torch.equal(found, compress(plain.model, text(0), CUT).ask(plain.model, QUESTION, **GREEDY))
    assert cache.ask(plain.model, AGAIN, **GREEDY).shape == (1, 2 + NEW)


def soak(bench: Bench, count: int) -> None:
    drawn = random.Random(0)
    asked = [(drawn.choice(list(bench.requests)), drawn.randrange(6)) for _ in range(count)]
    with ThreadPoolExecutor(8) as pool:
        for found in [pool.submit(bench.ask, name, number) for name, number in asked]:
            found.result()


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.thorough)])
def test_eight_threads_get_the_answers_of_one(count: int, plain: Bench, pruned: Bench) -> None:
    soak(plain, count)
    soak(pruned, count // 4)
