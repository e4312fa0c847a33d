"""Arrays of JAX as users have them, without float64: numpy's numbers, on the device of the array; tracers by name."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import levattn
from levattn.attention import (
    Selection,
    TokenForm,
    causal_conv,
    causal_pruned_attention,
    latte,
    macchiato,
    memberships,
    pruned_attention,
    pruned_coverage,
    rates,
    repeated_mass,
    rg_lru,
    rotate_values,
    tssa,
    window_attention,
)
from levattn.sketch import CountSketch, Sketch
from levattn.states import Moments, SoftmaxState

jax = pytest.importorskip("jax")


def arrays(*shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


K = arrays((60, 4))[0]
K[::7] *= 30
MASK = np.arange(60) % 5 > 0
W, X = arrays((2, 3, 30, 4), (2, 30, 4))
GATE = arrays((2, 3, 30))[0]
MEMBERS = np.full((60, 3), 1 / 3, np.float32)
U = np.stack([np.linalg.qr(part)[0][:, :2] for part in arrays((4, 4), (4, 4))]).astype(np.float32)

# Every function that takes arrays: the arrays that are JAX's, and what it returns of the caller's kind.
FUNCTIONS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "leverage_scores": (levattn.leverage_scores, [K]),
    "leverage_scores, mask": (lambda K, mask: levattn.leverage_scores(K, mask=mask, center=True), [K, MASK]),
    "leverage_scores, osnap": (lambda K: levattn.leverage_scores(K, method="osnap"), [K]),
    "universal_set": (lambda K: (lambda found: (found.mask, found.scores))(levattn.universal_set(K, 0.2)), [K]),
    "universal_set, size": (lambda K: levattn.universal_set(K, size=5).mask, [K]),
    "universal_set, f": (lambda K: levattn.universal_set(K, 0.2, f=4).scores, [K]),
    "universal_set, groups": (
        lambda K: levattn.universal_set(K, 0.2).with_groups(K, np.arange(60) // 4).group_scores,
        [K],
    ),
    "universal_set, coverage": (
        lambda K, Q: levattn.covering_set(K, Q, 0.2, coverage=0.8).mask,
        [K, K[::-1].copy()],
    ),
    "universal_set, chunks": (
        lambda K: levattn.universal_set(lambda: iter([K[:20], K[20:]]), 0.2).scores,
        [K],
    ),
    "heavy_attention": (lambda Q, K, V: levattn.heavy_attention(Q, K, 0.1).apply(V)[0], [K[:5], K, K]),
    "sensitivities": (lambda K: levattn.sensitivities(K, 3).upper, [K]),
    "lewis_weights": (lambda K: levattn.lewis_weights(K, 3.0), [K]),
    "online_leverage_scores": (levattn.online_leverage_scores, [K]),
    "expected_scores": (levattn.expected_scores, [K, K[:9]]),
    "moments": (lambda K, w: Moments(4).update(K, weights=w) and K, [K, np.ones(60, np.float32)]),
    "group_leverage": (levattn.group_leverage, [K, np.arange(60) // 4]),
    "near_duplicates": (levattn.near_duplicates, [np.repeat(K[:5], 2, axis=0)]),
    "rates.coding_rate": (rates.coding_rate, [K, 0.5]),
    "rates.coding_rate, batch": (rates.coding_rate, [X, 0.5]),
    "rates.compression_rate": (rates.compression_rate, [K, MEMBERS, 0.5]),
    "rates.rate_reduction": (rates.rate_reduction, [K, MEMBERS, 0.5]),
    "rates.head_rate": (rates.head_rate, [W]),
    "latte": (latte, [X, X, X]),
    "latte, mask": (lambda Q, K, V, mask: latte(Q, K, V, mask=mask), [X, X, X, MASK[:30]]),
    "macchiato": (lambda q, k, V, *logits: macchiato(q, k, V, logits, 4), [W, X[:, None], X[:, None], W, W, GATE]),
    "window_attention": (lambda *given: window_attention(*given, window=4), [W, W, W]),
    "repeated_mass": (lambda *given: repeated_mass(*given, window=4), [W, W, GATE]),
    "rotate_values": (rotate_values, [X, np.arange(30)]),
    "rg_lru": (lambda *given: rg_lru(*given, return_state=True), [X, X, X, np.ones(4, np.float32)]),
    "causal_conv": (causal_conv, [X, np.ones((4, 3), np.float32), np.ones(4, np.float32)]),
    "tssa": (tssa, [W, np.ones(3, np.float32)]),
    "tssa, leverage": (lambda W: tssa(W, form="leverage", causal=False), [W]),
    "tssa, a form with arrays": (
        lambda W, bias, decay: tssa(W, form=TokenForm(bias=bias, decay=decay)),
        [W, W[..., 0], np.array([0.5, 0.9, 1.0], np.float32)],
    ),
    "memberships": (memberships, [W]),
    "pruned_attention": (lambda *given: pruned_attention(*given, Selection(size=6, summaries=3)), [W, W, W]),
    "pruned_attention, certificate": (
        lambda *given: (lambda Y, of: (Y, of.error_bound, of.kept))(
            *pruned_attention(*given, Selection(size=6, summaries=3), return_certificate=True)
        ),
        [W, W, W],
    ),
    "pruned_coverage": (
        lambda *given: pruned_coverage(*given, 0.5, coverage=0.8).queries,
        [np.tile(K, (4, 1))] * 3,
    ),
}  # fmt: skip


def in_jax(values: Any) -> Any:
    return jax.numpy.asarray(values) if isinstance(values, np.ndarray) else values


def parts(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_those_of_numpy_in_arrays_of_jax(function: str) -> None:
    call, given = FUNCTIONS[function]
    expected, found = parts(call(*given)), parts(call(*map(in_jax, given)))
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, jax.Array)
        assert one.device == jax.devices()[0]
        # float64 and int64 of numpy are float32 and int32 in JAX, unless it is asked for them
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other, np.asarray(one).dtype))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_tracer_is_taken(function: str) -> None:
    call, given = FUNCTIONS[function]
    if function == "universal_set, chunks":
        pytest.skip("the call is given a function")
    for place, traced in enumerate(given):
        if isinstance(traced, np.ndarray):

            def of_one(x: Any, place: int = place) -> Any:
                return call(*given[:place], x, *given[place + 1 :])

            with pytest.raises(TypeError, match=r"^[\w.]+ is a tracer of JAX .*concrete array.*jax\.pure_callback"):
                jax.jit(of_one)(traced)


@pytest.mark.parametrize("change", ["vmap", "grad", "jvp", "eval_shape", "make_jaxpr"])
def test_every_transformation_is_named(change: str) -> None:
    calls = {
        "vmap": lambda f: jax.vmap(f)(in_jax(W[0])),
        "grad": lambda f: jax.grad(lambda x: f(x).sum())(in_jax(K)),
        "jvp": lambda f: jax.jvp(f, (in_jax(K),), (in_jax(K),)),
        "eval_shape": lambda f: jax.eval_shape(f, in_jax(K)),
        "make_jaxpr": lambda f: jax.make_jaxpr(f)(in_jax(K)),
    }
    with pytest.raises(TypeError, match=r"^K is a tracer of JAX \(\w*Tracer\)"):
        calls[change](levattn.leverage_scores)
    with pytest.raises(TypeError, match=r"^V is a tracer of JAX \(\w*Tracer\)"):
        calls[change](lambda x: latte(np.ones(x.shape, np.float32), np.ones(x.shape, np.float32), x))


def test_the_remedy_works() -> None:
    shape = jax.ShapeDtypeStruct((60,), np.float32)
    found = jax.jit(lambda x: jax.pure_callback(levattn.leverage_scores, shape, 2 * x))(in_jax(K))
    np.testing.assert_array_equal(found, levattn.leverage_scores(2 * K))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_scores_are_exact_without_float64(dtype: str) -> None:
    held = in_jax(K).astype(dtype)
    exact = levattn.leverage_scores(np.asarray(held, np.float64))
    for method in ("auto", "gram", "qr", "svd"):
        found = levattn.leverage_scores(held, method=method)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, exact, rtol=1e-6)
    Y = latte(in_jax(X).astype(dtype), in_jax(X).astype(dtype), in_jax(X).astype(dtype))
    assert Y.dtype == held.dtype


def test_states_and_streams_take_arrays_of_jax() -> None:
    held = in_jax(K)
    np.testing.assert_array_equal(Moments(4).update(held).result(), Moments(4).update(K).result())
    mask = in_jax(MASK)
    np.testing.assert_array_equal(
        SoftmaxState(4, 4).update(held, held, mask).result(), SoftmaxState(4, 4).update(K, K, MASK).result()
    )
    stream = levattn.StreamingUniversalSet(0.2).update(held, mask=mask, payload=held).result()
    plain = levattn.StreamingUniversalSet(0.2).update(K, mask=MASK, payload=K).result()
    np.testing.assert_array_equal(stream.items[0].indices, plain.items[0].indices)
    sketch = Sketch(CountSketch(20), 1)
    np.testing.assert_array_equal(sketch.apply(held), sketch.apply(K).astype(np.float32))
    Y, state = latte(*map(in_jax, (X[:, :9],) * 3), return_state=True)
    rest = latte(*map(in_jax, (X[:, 9:],) * 3), state=state)
    np.testing.assert_allclose(np.concatenate([Y, rest], axis=1), latte(X, X, X), atol=1e-6)
    _, state = causal_pruned_attention(*map(in_jax, (W[..., :20, :],) * 3), Selection(size=6), return_state=True)
    assert isinstance(causal_pruned_attention(*map(in_jax, (W[..., 20:, :],) * 3), state), jax.Array)


def test_sets_of_jax_warn_of_nothing_and_attend() -> None:
    found = levattn.universal_set(in_jax(K), 0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found.sizes == len(found) == np.asarray(found.mask).sum()
        assert found.indices.dtype == np.int64
        assert repr(found).startswith("UniversalSet(")
    plain = levattn.heavy_attention(K[:5], K, 0.2)
    heavy = levattn.heavy_attention(in_jax(K[:5]), in_jax(K), 0.2, universal=found)
    np.testing.assert_array_equal(heavy.entries.toarray(), plain.entries.toarray())


def test_what_is_no_key_is_refused() -> None:
    for held in (in_jax(K).astype(np.int32), jax.random.key(0), in_jax(K).astype("float8_e4m3fn")):
        with pytest.raises(TypeError, match=r"K has dtype .*K\.astype\('float32'\)"):
            levattn.leverage_scores(held)
    gone = in_jax(K) + 1
    gone.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        levattn.leverage_scores(gone)


SCRIPT = """
import numpy as np, levattn, sys
assert "jax" not in sys.modules
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levattn.attention import latte
K = np.random.default_rng(0).standard_normal((60, 4))
jax.config.update("jax_enable_x64", True)
expected, device = levattn.leverage_scores(K), jax.devices()[2]
there = jax.device_put(K, device)
assert there.dtype == np.float64
for result in (levattn.leverage_scores(there), levattn.universal_set(there, 0.2).scores):
    assert result.device == device and result.committed and result.dtype == np.float64
    assert np.array_equal(result, expected)
assert latte(there, there, there).device == device
with jax.default_device(device):
    loose = jax.numpy.asarray(K)
assert levattn.leverage_scores(loose).device == device and not levattn.leverage_scores(loose).committed
split = jax.device_put(K, NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows")))
result = levattn.leverage_scores(split)
assert np.array_equal(result, expected) and not result.committed
assert np.array_equal(split[:, 0] * result, K[:, 0] * expected)
"""


@pytest.mark.filterwarnings("default")
def test_devices_float64_and_shards_in_a_process_of_its_own() -> None:
    import os

    many = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=many, capture_output=True, text=True, check=False, timeout=300
    )
    assert found.returncode == 0, found.stderr
