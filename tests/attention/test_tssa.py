"""Token statistics attention: its definitions, its properties, its states, and what it does at the edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_table import TSSA_FORMS as FORMS

import naive
import naive_attention
import strategies
from levattn import attention
from levattn.attention import TokenForm
from levattn.states import Moments, TokenState
from libraries import over_storages, stored
from strategies import ALL_STORAGE, STORAGE, Float, as_float64
from token_calls import memberships, tssa

SETTINGS = strategies.examples(20)
TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
WIDE = tuple(name for name in ALL_STORAGE if name.endswith(("64", "32")))

CAUSAL = [name for name, options in FORMS.items() if options.get("causal", True)]
BIDIRECTIONAL = [name for name in FORMS if name not in CAUSAL]


def by_loops(W: Float, form: str, **more: Any) -> tuple[Float, Float]:
    """What the oracle says of a form: outputs and memberships."""
    options = dict(FORMS[form])
    mean = options.pop("normalize", "sum") == "mean"
    return naive_attention.token_statistics(W, THETA, mean=mean, **options, **more)


def tokens(seed: int, T: int = 37, h: int = 3, d: int = 4, *, batch: Any = (), scale: float = 1.0) -> Float:
    return np.random.default_rng(seed).standard_normal((*batch, h, T, d)) * scale


THETA = np.array([0.5, 1.0, 1.7])


# -- the definition ----------------------------------------------------------------------


@strategies.stores(*ALL_STORAGE)
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_loop_over_tokens(storage: str, form: str) -> None:
    options = FORMS[form]
    W = STORAGE[storage](tokens(0, 21))
    held = as_float64(W)
    mask = np.random.default_rng(1).random(21) > 0.2
    for more in ({}, {"mask": mask}, {"offsets": [0, 9, 9, 21]}):
        Y, P = by_loops(held, form, **more)
        theta = STORAGE[storage](THETA[None])[0, :]
        P_seen = memberships(W, theta, **{k: v for k, v in options.items() if k != "c"}, **more)
        out = tssa(W, theta, **options, **more)
        atol = TOLERANCE[storage.rpartition("-")[2]]
        assert out.dtype == W.dtype
        if not storage.endswith("16"):
            np.testing.assert_allclose(as_float64(P_seen), P, atol=atol, err_msg=str(more))
        np.testing.assert_allclose(as_float64(out), Y, atol=4 * atol * max(1.0, np.abs(Y).max()), err_msg=str(more))


@pytest.mark.parametrize("causal", [True, False])
def test_positional_bias_and_logits_of_ones_own(causal: bool) -> None:
    W = tokens(2, batch=(2,))
    rng = np.random.default_rng(3)
    bias, logits = rng.standard_normal((3, 37)), rng.standard_normal((2, 3, 37))
    Y = tssa(W, THETA, bias=bias, causal=causal)
    own = tssa(W, THETA, membership=logits, bias=bias, causal=causal)
    for i in range(2):
        expected = naive_attention.token_statistics(W[i], THETA, causal=causal, offset=4 * bias)[0]
        np.testing.assert_allclose(Y[i], expected, atol=1e-12)
        offset = 4 * bias + logits[i]
        expected = naive_attention.token_statistics(W[i], THETA, "logits", causal, offset=offset)[0]
        np.testing.assert_allclose(own[i], expected, atol=1e-12)


def test_exact_leverage_memberships_are_the_softmax_of_leverage_scores() -> None:
    W = tokens(4)
    W[:, :, 1] = W[:, :, 0]  # rank 3
    scores = np.stack([naive.leverage_svd(head) for head in W])
    for normalize, factor in (("sum", 1), ("mean", 37)):
        P = memberships(W, THETA, membership="leverage", normalize=normalize, causal=False)
        expected = np.array([naive_attention.softmax(THETA * factor * scores[:, t]) for t in range(37)]).T
        np.testing.assert_allclose(P, expected, atol=1e-10)
        by_logits = tssa(W, THETA, membership=factor * scores, causal=False)
        Y = tssa(W, THETA, membership="leverage", normalize=normalize, causal=False)
        np.testing.assert_allclose(Y, by_logits, atol=1e-10)
    packed = memberships(W, membership="leverage", causal=False, offsets=[0, 20, 37])
    np.testing.assert_allclose(packed[:, :20], memberships(W[:, :20], membership="leverage", causal=False), atol=1e-12)


# -- T1 to T5: memberships and sizes --------------------------------------------------------


@SETTINGS
@given(
    seed=st.integers(0, 2**32),
    T=st.integers(1, 40),
    h=st.integers(1, 5),
    scale=st.sampled_from([1e-6, 1.0, 30.0]),
    form=st.sampled_from(sorted(FORMS)),
    dtype=st.sampled_from([np.float64, np.float32]),
)
def test_memberships_are_distributions_and_outputs_are_shrunk_tokens(
    seed: int, T: int, h: int, scale: float, form: str, dtype: Any
) -> None:
    W = tokens(seed, T, h, scale=scale).astype(dtype)
    options = dict(FORMS[form])
    if isinstance(options.get("decay"), list):
        options["decay"] = 0.9
    c = options.pop("c", 1.0)
    P = memberships(W, **options)
    room = 8 * np.finfo(dtype).eps
    assert P.min() >= 0
    np.testing.assert_allclose(P.sum(axis=0), 1, rtol=room)
    Y = tssa(W, c=c, **options)
    bound = c * P[..., None] * np.abs(W)
    assert np.all(np.abs(Y) <= bound * (1 + room))
    assert np.all(Y * W <= 0)


@pytest.mark.parametrize("form", BIDIRECTIONAL)
def test_bidirectional_is_equivariant_to_the_order_of_tokens(form: str) -> None:
    W, order = tokens(5), np.random.default_rng(6).permutation(37)
    Y = tssa(W, THETA, **FORMS[form])
    np.testing.assert_allclose(tssa(W[:, order], THETA, **FORMS[form]), Y[:, order], atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
def test_released_memberships_do_not_depend_on_the_scale_of_channels(causal: bool) -> None:
    W, sizes = tokens(7), np.exp(np.random.default_rng(8).uniform(-3, 3, (3, 1, 4)))
    for normalize in ("sum", "mean"):
        P = memberships(W, THETA, normalize=normalize, causal=causal)
        np.testing.assert_allclose(memberships(W * sizes, THETA, normalize=normalize, causal=causal), P, atol=1e-13)
    paper = memberships(W, THETA, membership="norm", causal=causal)
    assert np.abs(memberships(W * sizes, THETA, membership="norm", causal=causal) - paper).max() > 0.1


@pytest.mark.parametrize("causal", [True, False])
def test_small_tokens_are_weighted_and_large_ones_vanish(causal: bool) -> None:
    W = tokens(9)
    small, large = W * 1e-9, W * 1e9
    mean = {"normalize": "mean", "causal": causal}
    np.testing.assert_allclose(tssa(small, **mean) / 1e-9, -memberships(W, **mean)[..., None] * W, rtol=1e-9)
    np.testing.assert_allclose(tssa(small, membership="norm", causal=causal) / 1e-9, -W / 3, rtol=1e-9)
    small = W * 1e-4  # above the constants of the released code
    shares = memberships(small, causal=causal)[..., None]
    np.testing.assert_allclose(tssa(small, causal=causal) / 1e-4, -shares * W, rtol=1e-5)
    for membership in ("diag_leverage", "norm"):
        assert np.abs(tssa(large, membership=membership, causal=causal)).max() < 1e-6


def test_uniform_where_the_temperature_is_zero_and_a_constant_bias_shifts_logits() -> None:
    W, bias = tokens(10), np.random.default_rng(11).standard_normal((3, 37))
    np.testing.assert_array_equal(memberships(W, 0.0, bias=bias), 1 / 3)
    np.testing.assert_allclose(tssa(W, 0.0, bias=bias), tssa(W, membership="uniform"), rtol=1e-6)  # up to the 1e-8
    shifted = np.zeros((3, 37))
    shifted[1] = 0.3  # moves the logit of head 1 by θ d b
    log = np.log(memberships(W, THETA, bias=shifted)) - np.log(memberships(W, THETA))
    np.testing.assert_allclose(log[1] - log[0], THETA[1] * 4 * 0.3, rtol=1e-10)
    np.testing.assert_allclose(log[2] - log[0], 0, atol=1e-12)


# -- T6, T7: prefixes, chunks, steps ------------------------------------------------------------


@pytest.mark.parametrize("form", ["paper", "uniform", "scaled"])
def test_paper_rows_are_the_last_rows_of_the_bidirectional_form_on_their_prefix(form: str) -> None:
    W, options = tokens(14), FORMS[form]
    Y = tssa(W, THETA, **options)
    for t in range(37):
        prefix = tssa(W[:, : t + 1], THETA, causal=False, **options)
        np.testing.assert_allclose(Y[:, t], prefix[:, -1], atol=1e-13)


def test_released_rows_are_not() -> None:
    W = tokens(14)
    off = [tssa(W)[:, t] - tssa(W[:, : t + 1], causal=False)[:, -1] for t in range(37)]
    assert 0.01 < np.abs(off).max() < 1


@pytest.mark.parametrize("kind", ["float64", "float32"])
@pytest.mark.parametrize("form", [form for form in CAUSAL if "bias" not in FORMS[form]])
def test_a_step_has_the_bits_of_one_with_a_mask_however_arrays_lie_in_memory(form: str, kind: str) -> None:
    """Where something is masked, or does not lie as the kernel reads it, the way to the kernel is another."""
    W, options = tokens(33, 21, batch=(2,)).astype(kind), {**FORMS[form], "return_state": True}
    theta = THETA.astype(kind)
    _, state = tssa(W[..., :20, :], theta, **options)
    step, kept = W[..., 20:, :].copy(), state.to_bytes()
    expected, after = tssa(step, theta, state=state, mask=np.ones(1, np.bool_), **options)
    for layout in (np.array, *strategies.LAYOUTS.values()):
        held = [
            part and Moments.from_arrays(*map(layout, part.sums()), part.count, decay=options.get("decay", 1.0))
            for part in (state.norms, state.tokens)
        ]
        for before in (state, TokenState(*held)):
            Y, new = tssa(layout(step), theta, state=before, **options)
            np.testing.assert_array_equal(Y, expected)
            for found, wanted in ((new.norms, after.norms), (new.tokens, after.tokens)):
                if wanted is not None:
                    np.testing.assert_array_equal(found.result(), wanted.result())
                    np.testing.assert_array_equal(found.weight, wanted.weight)
                    np.testing.assert_array_equal(found.count, wanted.count)
    assert state.to_bytes() == kept


def test_a_refilled_array_of_decays_changes_no_later_call() -> None:
    W = tokens(34, 9)
    expected, state = tssa(W, decay=0.9, return_state=True)
    state.tokens.decay[...] = 0.1
    np.testing.assert_array_equal(tssa(W, decay=0.9), expected)


def test_shards_of_a_sequence_merge() -> None:
    W = tokens(16, 60)
    for options in ({"membership": "norm"}, {"membership": "norm", "decay": 0.9}, {"membership": "uniform"}):
        _, whole = tssa(W, THETA, return_state=True, **options)
        parts = [tssa(W[:, low:high], THETA, return_state=True, **options)[1] for low, high in ((0, 25), (25, 60))]
        state = TokenState.from_bytes(parts[0].to_bytes()).merge(parts[1])
        np.testing.assert_allclose(state.tokens.result(), whole.tokens.result(), rtol=1e-12)
        np.testing.assert_allclose(state.tokens.weight, whole.tokens.weight, rtol=1e-12)
        again = tssa(W[:, 25:], THETA, state=parts[0], **options)
        np.testing.assert_allclose(again, tssa(W, THETA, **options)[:, 25:], atol=1e-12)


def test_shards_whose_memberships_depend_on_tokens_before_merge_in_two_rounds() -> None:
    W = tokens(16, 60)
    for options in ({}, {"normalize": "mean"}, {"decay": 0.9}):
        Y, whole = tssa(W, THETA, return_state=True, **options)
        form = {"diagonal": True, "decay": options.get("decay", 1.0)}
        shards = W[:, :25], W[:, 25:]
        before = Moments(4, (3,), **form).update(shards[0])
        states = []
        for shard, norms in zip(shards, (None, before), strict=True):
            weights = memberships(shard, THETA, state=None if norms is None else TokenState(norms), **options)
            sums = Moments(4, (3,), **form).update(shard, weights=weights)
            states.append(TokenState(Moments(4, (3,), **form).update(shard), sums))
        np.testing.assert_allclose(tssa(shards[1], THETA, state=states[0], **options), Y[:, 25:], atol=1e-12)
        merged = states[0].copy().merge(states[1])
        for mine, theirs in ((merged.norms, whole.norms), (merged.tokens, whole.tokens)):
            np.testing.assert_allclose(mine.result(), theirs.result(), rtol=1e-12)
            np.testing.assert_array_equal(mine.count, theirs.count)


@pytest.mark.parametrize("form", BIDIRECTIONAL)
@pytest.mark.parametrize("masked", [False, True])
def test_a_complete_state_is_read_and_not_added_to(form: str, masked: bool) -> None:
    W, options = tokens(17, 60), FORMS[form]
    mask = np.random.default_rng(18).random(60) > 0.3 if masked else np.ones(60, bool)
    Y, complete = tssa(W, THETA, mask=mask, return_state=True, **options)
    before = complete.to_bytes()
    for low, high in ((0, 20), (20, 60)):
        part, after = tssa(W[:, low:high], THETA, mask=mask[low:high], state=complete, return_state=True, **options)
        np.testing.assert_allclose(part, Y[:, low:high], atol=1e-13)
        assert after.to_bytes() == complete.to_bytes() == before
    there = mask[None].repeat(3, axis=0)
    norms, sums = Moments(4, (3,), diagonal=True).update(W, there), Moments(4, (3,), diagonal=True)
    for low, high in ((0, 20), (20, 60)):
        P = memberships(W[:, low:high], THETA, mask=mask[low:high], state=TokenState(norms), **options)
        sums.update(W[:, low:high], there[:, low:high], weights=P)
    part = tssa(W[:, :20], THETA, mask=mask[:20], state=TokenState(norms, sums), **options)
    np.testing.assert_allclose(part, Y[:, :20], atol=1e-13)


@over_storages
def test_exact_leverage_is_read_from_a_full_moment(storage: str) -> None:
    W = stored(tokens(19, 60), storage)
    for normalize in ("sum", "mean"):
        options = {"membership": "leverage", "normalize": normalize, "causal": False}
        Y, state = tssa(W, return_state=True, **options)
        assert not state.norms.diagonal
        assert state.numbers() == 3 * (4 * 4 + 1) + 3 * (4 + 1)
        tail = tssa(W[:, 20:, :], state=state, **options)
        np.testing.assert_allclose(as_float64(tail), as_float64(Y)[:, 20:], atol=1e-11)


# -- masks, packing, layouts, T13, T14 ---------------------------------------------------------------


@strategies.stores("float16", "bfloat16", "torch-bfloat16", "torch-float16")
def test_halves_are_summed_in_single_precision(storage: str) -> None:
    W = STORAGE[storage](np.full((2, 3000, 4), 0.1))  # sums of halves end at 4 or 0.3
    Y = as_float64(tssa(W))
    expected = tssa(as_float64(W))
    np.testing.assert_allclose(Y, expected, rtol=8e-3)


@strategies.stores("torch-bfloat16", "torch-float16")
def test_a_temperature_of_python_is_not_rounded_to_halves(storage: str) -> None:
    W = STORAGE[storage](tokens(34))
    for temperature in (0.3, 1e5):
        expected = tssa(W.float(), temperature, membership="norm").to(W.dtype)
        np.testing.assert_array_equal(as_float64(tssa(W, temperature, membership="norm")), as_float64(expected))
    P = memberships(W, causal=False)
    assert str(P.dtype) == "torch.float32"
    sums = Moments(4, (3,), diagonal=True).update(W, weights=P.to(W.dtype).requires_grad_())
    seen = TokenState(Moments(4, (3,), diagonal=True).update(W), sums)
    close = as_float64(tssa(W, causal=False, state=seen)) - as_float64(tssa(W, causal=False))
    assert np.abs(close).max() < 0.03


@pytest.mark.parametrize("kind", ["random", "equal"])
def test_errors_of_single_precision_do_not_grow_with_the_number_of_tokens(kind: str) -> None:
    T = 100_000
    W = tokens(27, T, 2, 3) if kind == "random" else np.full((2, T, 3), 0.7)
    single = W.astype(np.float32)
    for form in ("released", "paper", "mean", "released-bidirectional"):
        theta = 0.3 if form == "mean" else 1.0
        exact, found = (tssa(X, theta, **FORMS[form]) for X in (single.astype(np.float64), single))
        assert np.abs(found - exact).max() <= 1e-6, form


# -- T13: the bridge, and dilution -----------------------------------------------------------------------


def test_released_memberships_dilute_and_the_others_do_not() -> None:
    """Mean logit d / t, and so h·|Π − 1/h| near 0; the figures are those of random tokens of 12 heads, d = 64."""
    h, d, T = 12, 64, 1025
    W = tokens(29, T, h, d)

    def spread(theta: float, **options: Any) -> list[float]:
        P = memberships(W, theta, **options)
        return [float(np.abs(h * P[:, t - 8 : t] - 1).max()) for t in (16, 256, 1024)]

    first, middle, last = spread(1.0)
    assert 1.0 < first < 4
    assert 0.03 < middle < 0.15
    assert 0.008 < last < 0.03
    assert min(spread(d**-0.5, normalize="mean")) > 1
    assert min(spread(1.0, decay=1 - 1 / 16)) > 0.5


# -- edges ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_single_tokens_and_zeros(form: str) -> None:
    options = FORMS[form]
    np.testing.assert_array_equal(tssa(np.zeros((3, 5, 4)), THETA, **options), 0)
    one = tokens(30, 1)
    expected = by_loops(one, form)[0]
    np.testing.assert_allclose(tssa(one, THETA, **options), expected, atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_forms_of_ours_do_not_depend_on_the_scale(scale: float, causal: bool) -> None:
    W, options = tokens(31), {"normalize": "mean", "causal": causal}
    np.testing.assert_allclose(memberships(W * scale, 0.3, **options), memberships(W, 0.3, **options), rtol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_nonfinite_tokens_spread_to_what_sees_them(causal: bool) -> None:
    W = tokens(32, 40)
    W[1, 20] = np.nan
    with np.errstate(invalid="ignore"):
        Y = tssa(W, causal=causal)
    assert np.isnan(Y[:, 20]).all()
    assert np.isfinite(Y[:, :20]).all() == causal
    assert np.isnan(Y[1, 21:]).all()


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "membership": ({"membership": "key"}, ValueError, "membership is 'key'; expected one of"),
    "membership-shape": (
        {"membership": np.zeros((3, 5))},
        ValueError,
        r"membership has shape \(3, 5\); expected T = 37",
    ),
    "normalize": ({"normalize": "max"}, ValueError, "normalize is 'max'"),
    "mean-norm": ({"normalize": "mean", "membership": "norm"}, ValueError, "expected leverage scores"),
    "mean-logits": (
        {"membership": np.zeros((3, 37)), "normalize": "mean"},
        ValueError,
        "normalize is 'mean' and membership is an array",
    ),
    "leverage-causal": ({"membership": "leverage"}, ValueError, "expected causal=False.*online_leverage_scores"),
    "uniform-bias": ({"membership": "uniform", "bias": np.zeros((3, 37))}, ValueError, "expected no bias"),
    "bias": ({"bias": np.zeros((2, 37))}, ValueError, r"bias has shape \(2, 37\); expected h = 3"),
    "decay": ({"decay": 1.5}, ValueError, "decay is 1.5; expected numbers above 0 and at most 1"),
    "decay-shape": ({"decay": [0.5, 0.5]}, ValueError, "one for each of 3 heads"),
    "decay-order": ({"decay": 0.5, "causal": False}, ValueError, "expected causal=True"),
    "c": ({"c": 0}, ValueError, "c is 0; expected a finite number above 0"),
    "state": ({"state": 3}, TypeError, "state is of type int; expected a levattn.states.TokenState"),
    "state-empty": ({"state": TokenState()}, ValueError, "state has no norms"),
    "state-tokens": (
        {"state": TokenState(Moments(4, (3,), diagonal=True)), "causal": False},
        ValueError,
        "state has no tokens",
    ),
    "state-shape": (
        {"state": TokenState(*(Moments(4, (2,), diagonal=True) for _ in "An"))},
        ValueError,
        r"batch \(2,\) and d = 4; expected diagonal=True, batch \(3,\)",
    ),
    "state-decay": (
        {"state": TokenState(*(Moments(4, (3,), diagonal=True, decay=0.5) for _ in "An"))},
        ValueError,
        "with decay 0.5",
    ),
    "state-full": (
        {"membership": "leverage", "causal": False, "state": TokenState(Moments(4, (3,), diagonal=True))},
        ValueError,
        "no full second moment",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        tssa(tokens(33), **options)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((tokens(33)[0],), ValueError, r"W has shape \(37, 4\); expected \(..., h, T, d\)"),
        ((np.ones((3, 5, 4), np.int64),), TypeError, "W has dtype int64"),
        ((np.ones((0, 5, 4)),), ValueError, "expected at least one head"),
        ((tokens(33), np.ones(2)), ValueError, r"temperature has shape \(2,\); expected h = 3"),
        ((tokens(33), 10**400), ValueError, "temperature is 10+; expected a number in the range of float64"),
        ((tokens(33), float("nan")), ValueError, "temperature is nan"),
    ],
)
def test_bad_tokens_and_temperatures_are_named(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tssa(*given)


def test_bad_states_are_named() -> None:
    with pytest.raises(ValueError, match="tokens is a full second moment"):
        TokenState(None, Moments(2))
    with pytest.raises(ValueError, match=r"norms has batch, d and decay .* expected the same"):
        TokenState(Moments(4), Moments(3, (2,), diagonal=True))
    with pytest.raises(TypeError, match="norms is of type int"):
        TokenState(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="other holds nothing; expected norms"):
        TokenState(Moments(2, diagonal=True)).merge(TokenState())
    with pytest.raises(TypeError, match="other is of type Moments"):
        TokenState().merge(Moments(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "form", [None, ("norm", "sum"), {"membership": "norm"}, TokenForm, TokenForm(None), [0.5, 1.0]]
)
def test_what_is_no_form_is_named(form: Any) -> None:
    for call in (attention.tssa, attention.memberships):
        with pytest.raises(
            TypeError, match=r"form is, or has a membership, of type .*; expected a TokenForm, one of 'diag"
        ):
            call(tokens(0), form=form)
