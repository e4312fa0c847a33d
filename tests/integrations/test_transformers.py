"""Pretrained decoders extended by latents: tiny random models, against a T × T computation of the same layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")

from decoders import (  # noqa: E402
    CACHE,
    LEFT,
    PADDED,
    SIZES,
    T,
    base,
    difference,
    output,
    position_ids,
    tokens,
    written_out,
)

from levattn.integrations.transformers import (  # noqa: E402
    latent_parameters,
    latent_state_dict,
    load_latent_state_dict,
    macchiato_from,
    remove,
    state_size,
)

FAMILIES = ["Llama", "Gemma2", "Qwen2", "Mistral", "GPTNeoX"]
WINDOW, LATENTS = 6, 3

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def trained(model: Any) -> Any:
    """Give the latents of a model weights as if they had been trained."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in latent_parameters(model):
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
        for name, tensor in latent_state_dict(model).items():
            if name.endswith("gate.bias"):
                tensor.sub_(3)  # so that latents have much of the weight
    return model


def extended(family: str = "Llama", **options: Any) -> Any:
    return trained(macchiato_from(base(family), **{"window": WINDOW, "latents": LATENTS, **options}))


# The explicit computation


@dataclass
class Explicit:
    """The attention of a base model, computed with matrices of T × T × L in float64.

    `weights` by module: query, key and gate of the latents. A module without has its own attention.
    """

    weights: dict[Any, dict[str, Any]]
    window: int
    overlap: str
    real: Any

    def __call__(
        self,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        _: Any,
        *,
        scaling: float,
        softcap: float | None = None,
        sliding_window: int | None = None,
        **__: Any,
    ) -> tuple[Any, None]:
        batch, heads, length, _d = query.shape
        group = heads // key.shape[1]
        q, k, V = query.double(), *(x.double().repeat_interleave(group, 1) for x in (key, value))
        weights = self.weights.get(module)
        window = length if weights is None else self.window
        window = window if sliding_window is None else min(window, sliding_window)
        t, s = torch.arange(length)[:, None], torch.arange(length)[None, :]
        real = torch.ones(batch, length).bool() if self.real is None else self.real.bool()
        sees = (s <= t) & real[:, None, None, :]  # (batch, 1, T, T)
        near = sees & (s > t - window)
        far = sees if self.overlap == "mixture" else sees & (s <= t - window)
        scores = scaling * q @ k.transpose(-1, -2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        P = torch.softmax(scores.masked_fill(~near, -torch.inf), -1).nan_to_num()
        if weights is not None:
            hidden = module.hidden.double()
            Q = self.project(hidden, weights["query.weight"], heads)  # (batch, heads, T, L)
            K = self.project(hidden, weights["key.weight"], heads // group).repeat_interleave(group, 1)
            g = hidden @ weights["gate.weight"].double().T + weights["gate.bias"].double()
            K = K[:, :, None].expand(-1, -1, length, -1, -1)  # (batch, heads, T, T, L): the logits that row t sees
            R = torch.softmax(K.masked_fill(~far[..., None], -torch.inf), 3).nan_to_num()
            Q = Q.masked_fill(~far.any(-1)[..., None], -torch.inf)
            p = torch.softmax(torch.cat([g.transpose(1, 2)[..., None], Q], -1), -1)
            P = p[..., :1] * P + torch.einsum("bhtl,bhtsl->bhts", p[..., 1:], R)
            rows = P.sum(-1)[real[:, None].expand(-1, heads, -1)]
            assert torch.allclose(rows, torch.ones_like(rows))
        return (P @ V).transpose(1, 2).to(query.dtype), None

    @staticmethod
    def project(hidden: Any, weight: Any, heads: int) -> Any:
        return (hidden @ weight.double().T).unflatten(-1, (heads, -1)).transpose(1, 2)


def explicit(model: Any, *, window: int, overlap: str = "mixture", learned: dict[str, Any], real: Any = None) -> Any:
    """A copy of a base model whose attention is the explicit mixture, with weights by their names."""
    model = copy.deepcopy(model)
    weights: dict[Any, dict[str, Any]] = {}
    for name, module in model.named_modules():
        mine = {
            key.rpartition("macchiato.")[2]: w for key, w in learned.items() if key.startswith(f"{name}.macchiato.")
        }
        if mine:
            weights[module] = mine

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module.hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    for module in weights:
        module.register_forward_pre_hook(keep, with_kwargs=True)
    return written_out(model, Explicit(weights, window, overlap, real))


# What the model computes


@pytest.mark.parametrize("overlap", ["mixture", "exclusive"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_is_the_explicit_mixture(family: str, overlap: str) -> None:
    model, ids = base(family), tokens()
    plain = copy.deepcopy(model)
    learned = latent_state_dict(trained(macchiato_from(model, window=WINDOW, latents=LATENTS, overlap=overlap)))
    for real in (None, LEFT, LEFT.flip(-1)):
        positions = {} if real is None else {"position_ids": position_ids(real)}
        other = explicit(plain, window=WINDOW, overlap=overlap, learned=learned, real=real)
        wanted = output(other, ids, **positions)
        found = output(model, ids, attention_mask=real, **positions)
        assert difference(found, wanted, real) < 2e-4  # of about 10
    assert difference(wanted, output(plain, ids)) > 0.1


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_layers_left_out_keep_their_attention(family: str, implementation: str) -> None:
    plain, ids = base(family, attn_implementation=implementation), tokens()
    model = trained(macchiato_from(copy.deepcopy(plain), window=WINDOW, latents=LATENTS, layers=[1]))
    learned = latent_state_dict(model)
    assert all(".1." in name for name in learned)
    for real in (None, LEFT):
        positions = {} if real is None else {"position_ids": position_ids(real)}
        wanted = output(explicit(plain, window=WINDOW, learned=learned, real=real), ids, **positions)
        assert difference(output(model, ids, attention_mask=real, **positions), wanted, real) < 2e-4
    assert set(state_size(model(ids)[CACHE])) == {1}
    generated = model.generate(ids, attention_mask=LEFT, max_new_tokens=6, do_sample=False)
    alone = model.generate(ids[1:, PADDED:], max_new_tokens=6, do_sample=False)
    assert torch.equal(generated[1:, PADDED:], alone)


@pytest.mark.parametrize("feature", ["conv", "rg_lru"])
def test_features_are_trained_and_saved(feature: str) -> None:
    plain, ids = base().train(), tokens()
    macchiato_from(plain, window=WINDOW, latents=LATENTS, feature=feature)
    plain(ids, labels=ids).loss.backward()
    new = list(latent_parameters(plain))
    assert len(new) == 2 * (4 + {"conv": 2, "rg_lru": 5}[feature])
    assert all(parameter.grad.abs().max() > 0 for parameter in new)
    other = macchiato_from(remove(copy.deepcopy(plain)), window=WINDOW, latents=LATENTS, feature=feature)
    assert difference(output(other, ids), output(plain, ids)) > 0
    load_latent_state_dict(other, latent_state_dict(plain))
    assert torch.equal(output(other, ids), output(plain, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_of_decoding_is_constant(family: str) -> None:
    model = extended(family)
    past, held = None, []
    for part in tokens(length=40).split([10] * 4, 1):
        with torch.no_grad():
            past = model(part, use_cache=True, **{CACHE: past})[CACHE]
        held.append(state_size(past))
    assert set(held[0]) == {0, 1}
    assert held[0] == held[1] == held[3]
    assert 0 < max(held[0].values()) < 2 * 4 * (WINDOW + LATENTS + 2) * 2 * (8 + 4 + LATENTS) * 8
    assert all(layer.keys is None for layer in past.layers)


# Where it starts, and what is trained


@pytest.mark.parametrize("family", FAMILIES)
def test_it_starts_as_the_base_model_where_latents_have_no_weight(family: str) -> None:
    model, ids = base(family), tokens()
    wanted = output(model, ids), output(model, ids, attention_mask=LEFT)
    macchiato_from(model, window=T, delta=1e-9)
    assert difference(output(model, ids), wanted[0]) < 1e-4
    assert difference(output(model, ids, attention_mask=LEFT), wanted[1], LEFT) < 1e-4


@pytest.mark.parametrize("delta", [0.05, 0.5])
def test_the_weight_of_latents_at_the_start_is_delta(delta: float) -> None:
    model = macchiato_from(base(), latents=7, delta=delta)
    part = model.model.layers[0].self_attn.macchiato
    Q, K, gate, _ = part(torch.randn(2, 5, 32), None, None)
    assert Q.shape == (2, 4, 5, 7)
    assert K.shape == (2, 2, 5, 7)  # a head of keys and values has one state for its group
    weights = torch.softmax(torch.cat([gate[..., None], Q], -1), -1)
    assert torch.allclose(weights[..., 0], torch.tensor(1 - delta))


@pytest.mark.parametrize("overlap", ["mixture", "exclusive"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_gradients_reach_all_that_is_new_and_nothing_else(family: str, overlap: str) -> None:
    plain, ids = base(family).train(), tokens()
    fixed = list(plain.parameters())
    fixed[0].requires_grad_(False)
    untouched = copy.deepcopy(plain)
    model = trained(macchiato_from(plain, window=WINDOW, latents=LATENTS, overlap=overlap))
    assert not any(parameter.requires_grad for parameter in fixed)
    new = list(latent_parameters(model))
    assert len(new) == 8
    assert all(parameter.requires_grad for parameter in new)
    weights = torch.randn(2, T, SIZES["vocab_size"])
    (model(ids, attention_mask=LEFT).logits * weights)[LEFT.bool()].sum().backward()
    assert all(parameter.grad is None for parameter in fixed)
    learned = {name: tensor.clone() for name, tensor in latent_state_dict(model).items()}
    wanted = [tensor.requires_grad_() for name, tensor in learned.items() if "settings" not in name]
    other = explicit(untouched, window=WINDOW, overlap=overlap, learned=learned, real=LEFT)
    (other(ids).logits * weights)[LEFT.bool()].sum().backward()
    for parameter, tensor in zip(new, wanted, strict=True):
        assert tensor.grad.abs().max() > 0
        assert difference(parameter.grad, tensor.grad) < 1e-4 * float(tensor.grad.abs().max()) + 1e-4


def test_checkpoints_of_activations_give_the_same_gradients() -> None:
    model, ids = extended().train(), tokens()

    def gradients() -> list[Any]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in latent_parameters(model)]

    wanted = gradients()
    name = (
        "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    )
    getattr(model, f"{name}_enable")({"use_reentrant": False})
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients(), wanted, strict=True))


def test_a_model_in_half_precision_learns_in_float32() -> None:
    plain, ids = base(initializer_range=0.05), tokens()
    torch.manual_seed(5)
    wanted = macchiato_from(copy.deepcopy(plain), window=WINDOW, latents=LATENTS)
    torch.manual_seed(5)
    model = macchiato_from(plain.bfloat16(), window=WINDOW, latents=LATENTS)
    assert {parameter.dtype for parameter in latent_parameters(model)} == {torch.float32}
    found = output(model, ids)
    assert found.dtype == torch.bfloat16
    assert difference(found.float(), output(wanted, ids)) < 0.05
    assert torch.equal(
        model.generate(ids[:, :5], max_new_tokens=3, do_sample=False)[:, :5], ids[:, :5]
    )  # with its state too


# Taking it off, keeping what was learned


def test_save_pretrained_takes_latents_along(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, ids = extended(), tokens()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in latent_state_dict(model).items())
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    macchiato_from(again, window=WINDOW, latents=LATENTS)
    saved = load_file(tmp_path / "model.safetensors")
    load_latent_state_dict(again, {name: saved[name] for name in latent_state_dict(again)})
    assert torch.equal(output(again, ids), output(model, ids))


def test_weights_of_another_mixture_are_refused() -> None:
    learned = latent_state_dict(extended())
    for options, message in (
        ({"window": WINDOW + 1}, "was trained with window=6"),
        ({"overlap": "exclusive"}, "overlap='mixture'"),
        ({"latents": LATENTS + 1}, "expected \\(16, 32\\)"),
        ({"layers": [0]}, "has besides 'model.layers.1"),
    ):
        other = extended(**options)
        before = {name: tensor.clone() for name, tensor in latent_state_dict(other).items()}
        with pytest.raises(ValueError, match=message):
            load_latent_state_dict(other, learned)
        assert all(torch.equal(before[name], tensor) for name, tensor in latent_state_dict(other).items())
    with pytest.raises(ValueError, match=r"state lacks 'model.layers.0"):
        load_latent_state_dict(extended(), {})


@pytest.mark.parametrize("case", ["no mapping", "arrays", "numbers", "an overlap of no name"])
def test_a_state_that_holds_no_weights_is_refused_and_changes_nothing(case: str) -> None:
    model, learned = extended(), latent_state_dict(extended())
    last, settings = list(learned)[-1], next(name for name in learned if name.endswith(".settings"))
    state, message = {
        "no mapping": (3, "state is of type int; expected a mapping from names to tensors"),
        "arrays": (learned | {last: learned[last].numpy()}, "is of type ndarray; expected a tensor of torch"),
        "numbers": (learned | {last: 3}, "is of type int; expected a tensor of torch"),
        "an overlap of no name": (learned | {settings: torch.tensor([6, 5])}, "with window=6, overlap=5, and the"),
    }[case]
    before = {name: tensor.clone() for name, tensor in latent_state_dict(model).items()}
    with pytest.raises((TypeError, ValueError), match=message):
        load_latent_state_dict(model, state)
    assert all(torch.equal(before[name], tensor) for name, tensor in latent_state_dict(model).items())
    for call in (latent_state_dict, lambda given: list(latent_parameters(given))):
        with pytest.raises(TypeError, match="model is of type NoneType; expected a model of transformers"):
            call(None)


# What is refused


def small(family: str, **options: Any) -> Callable[[], Any]:
    return lambda: macchiato_from(base(family, **options))


def of_kind(kind: str) -> Callable[[], Any]:
    def extend() -> Any:
        model = base()
        model.config.layer_types = [kind] * 2
        return macchiato_from(model)

    return extend


def sequence_to_sequence() -> Any:
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20)
    return macchiato_from(transformers.T5ForConditionalGeneration(config))


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "encoder-decoder": (sequence_to_sequence, "T5ForConditionalGeneration, an encoder-decoder"),
    "ALiBi": (small("Falcon", alibi=True), "ALiBi"),
    "ALiBi without a switch": (small("Bloom", n_head=4, n_layer=2), "BloomAttention does not use"),
    "no interface": (
        small("GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global"], 2]]),
        "GPTNeo.*Attention.* does not use",
    ),
    "no attention": (small("Mamba"), "no attention function was reached"),
    "layers of another kind": (of_kind("linear_attention"), "layer 0 is of type 'linear_attention'"),
    "windows of their own": (of_kind("sliding_attention"), "slides, but does not pass its window to its attention"),
    "twice": (lambda: macchiato_from(extended()), "extended by macchiato_from already"),
    "window": (lambda: macchiato_from(base(), window=0), "window is 0"),
    "latents": (lambda: macchiato_from(base(), latents=2.5), "latents is 2.5"),
    "delta": (lambda: macchiato_from(base(), delta=1.0), "delta is 1.0"),
    "overlap": (lambda: macchiato_from(base(), overlap="both"), "overlap is 'both'"),
    "feature": (lambda: macchiato_from(base(), feature="fourier"), "feature is 'fourier'"),
    "layers": (
        lambda: macchiato_from(base(), layers=[2]),
        r"layers is \[2\]; expected different numbers among \[0, 1\]",
    ),
    "no layers": (lambda: macchiato_from(base(), layers=[]), "at least one"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_extended_are_refused_by_name(case: str) -> None:
    call, message = MODELS[case]
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_options_of_another_type_are_refused_by_name() -> None:
    for options, message in (
        ({"layers": 0}, "layers is 0; expected numbers"),
        ({"layers": [True]}, r"layers is \[True\]; expected whole numbers"),
        ({"layers": [[0]]}, r"layers is \[\[0\]\]; expected whole numbers"),
        ({"delta": "0.1"}, "delta is '0.1'; expected"),
    ):
        with pytest.raises(TypeError, match=message):
            macchiato_from(base(), **options)
    with pytest.raises(ValueError, match="feature is"):
        macchiato_from(base(), feature=["conv"])
    macchiato_from(base(), delta=np.float32(0.1), layers=np.arange(1))


@pytest.mark.filterwarnings("ignore:`output_attentions=True` is not supported:UserWarning:transformers")
def test_attention_weights_are_never_made_up() -> None:
    try:
        attentions = extended()(tokens(), output_attentions=True).attentions
    except ValueError as error:
        assert "output_attentions" in str(error)  # noqa: PT017
    else:  # transformers has warned, and gives none
        assert set(attentions) == {None}
