"""Files of compressed contexts: the model that they are for, and damage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.56")
safetensors = pytest.importorskip("safetensors.torch")

from decoders import base, of_heads, tokens  # noqa: E402

from levattn.integrations.transformers import CompressedCache, compress  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 30
CUT = {(0, 0): 0.3, (1, 1): 0.5}
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
QUESTION = torch.tensor([[3, 14, 15]])
ANOTHER = "was made with another model, or another revision, config or adapter"


def seeded(**options: Any) -> Any:
    torch.manual_seed(0)
    return base(**options)


def saved(model: Any, file: Path, budget: Any = CUT) -> Any:
    """The file of a context, and what is answered on it."""
    cache = compress(model, tokens(1, CONTEXT), budget)
    cache.save(file)
    return cache.ask(model, QUESTION, **GREEDY)


# -- the model ------------------------------------------------------------------------------------------------------


def test_a_model_of_a_gguf_file_is_known_by_its_weights_whatever_the_file_is_called(tmp_path: Path) -> None:
    model, file = seeded(), tmp_path / "a.safetensors"
    model.config.quantization_config = {"quant_method": "gguf", "gguf_file": "a.gguf"}
    told = saved(model, file)
    other, plain = seeded(), seeded()
    other.config.quantization_config = {"quant_method": "gguf", "gguf_file": "b.gguf"}
    for same in (other, plain):
        assert torch.equal(CompressedCache.load(file, same).ask(same, QUESTION, **GREEDY), told)
    plain.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=ANOTHER):
        CompressedCache.load(file, plain)


class Adapted(torch.nn.Linear):
    """A layer with two adapters, as PEFT has them."""

    def __init__(self, of: Any) -> None:
        super().__init__(of.in_features, of.out_features, bias=False)
        self.weight = of.weight
        self.added = torch.nn.ParameterDict({name: torch.randn_like(of.weight) * 0.3 for name in ("one", "two")})
        self.scaling = {"one": 1.0, "two": 1.0}
        self._active_adapter: Any = ["one"]
        self._disable_adapters = False
        self.merged_adapters: list[str] = []

    def forward(self, x: Any) -> Any:
        names = [] if self._disable_adapters else self._active_adapter
        return super().forward(x) + sum(torch.nn.functional.linear(x, self.added[name]) for name in names)


def adapted() -> Any:
    model = seeded()
    for layer in model.model.layers:
        layer.self_attn.k_proj = Adapted(layer.self_attn.k_proj)
    return model.eval()


def set_adapters(model: Any, **figures: Any) -> None:
    for module in model.modules():
        if isinstance(module, Adapted):
            module.__dict__.update(figures)


SWITCHES = {
    "another": {"_active_adapter": ["two"]},
    "both": {"_active_adapter": ["one", "two"]},
    "none": {"_disable_adapters": True},
    "scaled": {"scaling": {"one": 0.5, "two": 1.0}},
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_file_is_for_the_adapters_that_read_it(switch: str, tmp_path: Path) -> None:
    model, file = adapted(), tmp_path / "context"
    expected = saved(model, file)
    cache = compress(model, tokens(1, CONTEXT), CUT)
    set_adapters(model, **SWITCHES[switch])
    with pytest.raises(ValueError, match=ANOTHER):
        CompressedCache.load(file, model)
    with pytest.raises(ValueError, match="changed after it read the context"):
        cache.save(tmp_path / "other")
    with pytest.raises(ValueError, match="with other weights or adapters"):
        cache.ask(model, QUESTION, **GREEDY)
    set_adapters(model, _active_adapter="one", _disable_adapters=False, scaling={"one": 1.0, "two": 1.0})
    set_adapters(model, _active_adapter=["one"])
    assert torch.equal(CompressedCache.load(file, model).ask(model, QUESTION, **GREEDY), expected)
    assert torch.equal(cache.ask(model, QUESTION, **GREEDY), expected)


def test_a_file_is_for_the_adapters_of_peft_that_read_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    how = {"target_modules": ["k_proj", "v_proj"], "init_lora_weights": False}
    wrapped = peft.get_peft_model(seeded(), peft.LoraConfig(**how), adapter_name="one")
    wrapped.add_adapter("two", peft.LoraConfig(**how))
    wrapped.set_adapter("one")
    wrapped.eval()
    model, file = wrapped.get_base_model(), tmp_path / "context"
    expected = saved(model, file)
    wrapped.set_adapter("two")
    with pytest.raises(ValueError, match=ANOTHER):
        CompressedCache.load(file, model)
    wrapped.set_adapter("one")
    with wrapped.disable_adapter(), pytest.raises(ValueError, match=ANOTHER):
        CompressedCache.load(file, model)
    assert torch.equal(CompressedCache.load(file, model).ask(model, QUESTION, **GREEDY), expected)


CHANGING = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 2.0,
        "long_factor": [1.0, 1.5, 2.0, 3.0],
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", CHANGING)
def test_positions_that_change_with_the_length(kind: str, tmp_path: Path) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        key = "rope_parameters" if transformers.__version__ >= "5" else "rope_scaling"
        return base(max_position_embeddings=16, **{key: {"rope_theta": 10000.0, **CHANGING[kind]}})

    model, file = made(), tmp_path / "context"
    with torch.no_grad():
        model(tokens(1, 40))
    cache = compress(model, tokens(1, CONTEXT), 1.0)
    with torch.no_grad():
        model(tokens(1, 12))
        model(tokens(1, 60))
    cache.save(file)
    expected = cache.ask(model, QUESTION, **GREEDY)
    for other in (model, made()):
        found = CompressedCache.load(file, other).ask(other, QUESTION, **GREEDY)
        assert kind == "dynamic" or torch.equal(found, expected)  # "dynamic" rotates by the longest input so far
    with pytest.raises(ValueError, match=f"chunk was given for a LlamaForCausalLM, whose rotary positions .'{kind}'"):
        compress(model, tokens(1, CONTEXT), 1.0, chunk=10)


OTHERS: dict[str, Callable[[], Any]] = {
    "rms_norm_eps": lambda: seeded(rms_norm_eps=1e-3),
    "hidden_act": lambda: seeded(hidden_act="gelu"),
    "attention_bias": lambda: seeded(attention_bias=True),
    "rope_theta": lambda: seeded(
        **(
            {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
            if transformers.__version__ >= "5"
            else {"rope_theta": 500.0}
        )
    ),
    "fewer layers": lambda: seeded(num_hidden_layers=1),
    "weights": base,
    "a norm that was set": lambda: with_other_norm(),
}


def with_other_norm() -> Any:
    model = seeded()
    model.model.layers[0].input_layernorm.variance_epsilon = 1e-2
    return model


@pytest.mark.parametrize("other", OTHERS)
def test_a_file_is_for_a_model_that_computes_the_same(other: str, tmp_path: Path) -> None:
    file = tmp_path / "context"
    expected = saved(seeded(), file)
    with pytest.raises(ValueError, match=ANOTHER):
        CompressedCache.load(file, OTHERS[other]())
    model = seeded(attn_implementation="eager", bos_token_id=5, eos_token_id=7)  # on which no key depends
    assert torch.equal(CompressedCache.load(file, model).ask(model, QUESTION, eos_token_id=None, **GREEDY), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_file_says_that_only_the_dtype_differs(dtype: Any, tmp_path: Path) -> None:
    file, kind = tmp_path / "context", str(dtype).partition(".")[2]
    saved(seeded(), file)
    with pytest.raises(ValueError, match=f"a model in float32, and this LlamaModel is in {kind}; expected the same"):
        CompressedCache.load(file, seeded().to(dtype))
    saved(seeded().to(dtype), file)
    with pytest.raises(ValueError, match=f"a model in {kind}, and this LlamaModel is in float32"):
        CompressedCache.load(file, seeded())
    model = seeded().to(dtype)
    assert CompressedCache.load(file, model).ask(model, QUESTION, **GREEDY).shape == (1, 7)


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@pytest.mark.parametrize("count", [120, pytest.param(4000, marks=pytest.mark.thorough)])
def test_every_flipped_bit_is_refused(family: str, count: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, file = base(family), tmp_path / "context"
    saved(model, file, {(1, 1): 0.5})
    content = bytearray(file.read_bytes())
    head = 8 + int.from_bytes(content[:8], "little")
    rng = np.random.default_rng(0)
    places = [
        *rng.integers(0, head * 8, count // 2),
        *rng.integers(head * 8, len(content) * 8, count // 2),
        *range(64),
    ]
    for place in map(int, places):
        content[place // 8] ^= 1 << place % 8
        file.write_bytes(content)
        with pytest.raises(ValueError, match="context is"):
            CompressedCache.load(file, model)
        content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)
    CompressedCache.load(file, model)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_part_of_a_file_is_refused(part: float, tmp_path: Path) -> None:
    model, file = seeded(), tmp_path / "context"
    saved(model, file)
    content = file.read_bytes()
    for damaged in (content[: int(part * len(content))], content[int(part * len(content)) :], content + b"0"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="context is"):
            CompressedCache.load(file, model)


def resealed(file: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change the head and the arrays of a file, with the digest that they then have."""
    with safetensors.safe_open(file, framework="pt") as opened:
        head = json.loads(opened.metadata()["levattn"])
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    head.pop("digest")
    change(head, arrays)
    arrays = {name: array.contiguous() for name, array in arrays.items()}
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        digest.update(array.reshape(-1).view(torch.uint8).numpy())
    safetensors.save_file(arrays, file, {"levattn": json.dumps({**head, "digest": digest.hexdigest()})})


def _set(name: str, value: Callable[[Any], Any]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, arrays: arrays.__setitem__(name, value(arrays[name]))


def filled(array: Any, value: float) -> Any:
    array = array.clone()
    array.reshape(-1)[3] = value
    return array


def _of_all(value: Callable[[Any], Any]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(_: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays.update({name: value(array) for name, array in arrays.items() if name[0].isdigit()})

    return change


def _without_positions(_: dict[str, Any], arrays: dict[str, Any]) -> None:
    arrays.update({name: arrays[name][:, :0] for name in ("tokens", "present")})


def _one_head(head: dict[str, Any], arrays: dict[str, Any]) -> None:
    head["layers"][0]["heads"] = [[0]]
    for name in [name for name in arrays if name.startswith("0.1.")]:
        del arrays[name]


def _named_again(head: dict[str, Any], _: dict[str, Any]) -> None:
    head["layers"][0]["heads"] = [[1], [1]]


def _fewer_layers(head: dict[str, Any], _: dict[str, Any]) -> None:
    del head["layers"][1]


RESEALED: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "a head is missing": _one_head,
    "a head twice": _named_again,
    "heads that are no whole numbers": lambda head, _: head["layers"][0].update(heads=[[0.0], [1.0]]),
    "heads that are flags": lambda head, _: head["layers"][0].update(heads=[[False], [True]]),
    "an array is missing": lambda _, arrays: arrays.pop("0.0.values.steps"),
    "no places": lambda _, arrays: arrays.pop("1.1.places"),
    "one layer": _fewer_layers,
    "no layers": lambda head, _: head.update(layers=[]),
    "layers of another kind": lambda head, _: head.update(layers={"0": 1}),
    "keys that are no number": _set("0.0.keys.lows", lambda array: filled(array, float("nan"))),
    "means that are infinite": _set("0.0.values.lows", lambda array: filled(array, float("inf"))),
    "infinite values": _set("0.1.values", lambda array: filled(array, float("inf"))),
    "whole numbers": _set("0.1.keys", lambda array: (100 * array).long()),
    "keys and values of two kinds": _set("0.1.values", lambda array: array.double()),
    "codes that are numbers": _set("0.0.keys.codes", lambda array: array.float()),
    "sizes of the columns of values": lambda _, arrays: arrays.update(
        {"0.0.values.sizes": 1 * arrays["0.0.keys.sizes"]}
    ),
    "another width of codes": lambda head, _: head["layers"][0].update(widths=[8, 6]),
    "fewer codes": _set("0.0.keys.codes", lambda array: array[..., 1:]),
    "fewer scales": _set("0.0.values.steps", lambda array: array[:, :, 1:]),
    "other bits": lambda head, _: head["layers"][0].update(bits=[4, 16]),
    "bits that no code has": lambda head, _: head["layers"][0].update(bits=[2, 16]),
    "fewer bits than heads": lambda head, _: head["layers"][0].update(bits=[8]),
    "a dtype that is none": lambda head, _: head["layers"][0].update(dtype="load"),
    "a dtype of whole numbers": lambda head, _: head["layers"][0].update(dtype="int64"),
    "other numbers than the model's": _of_all(lambda array: array.double() if array.is_floating_point() else array),
    "keys turned": _set("0.1.keys", lambda array: array.transpose(2, 3)),
    "keys and values turned": _of_all(lambda array: array.transpose(2, 3) if array.ndim == 4 else array),
    "another width": _of_all(lambda array: array[..., :4] if array.ndim == 4 else array),
    "fewer values": _set("0.1.values", lambda array: array[:, :, 1:]),
    "fewer slots of all": _of_all(lambda array: array[:, :, :0] if array.ndim > 2 else array),
    "two sequences": _set("0.0.keys.codes", lambda array: array.repeat(2, 1, 1, 1)),
    "weights that are no number": _set("0.0.log_weight", lambda array: filled(array, float("nan"))),
    "infinite weights": _set("0.0.log_weight", lambda array: filled(array, float("inf"))),
    "no slot with a weight": _set("0.0.log_weight", lambda array: array - float("inf")),
    "places after the end": _set("0.1.places", lambda array: array + 5),
    "places that are no whole numbers": _set("0.1.places", lambda array: array.float()),
    "an empty context": _without_positions,
    "a sequence of padding": _set("present", torch.zeros_like),
    "a mask of numbers": _set("present", lambda array: array.long()),
    "tokens that are no whole numbers": _set("tokens", lambda array: array.float()),
    "more tokens": _set("tokens", lambda array: torch.cat([array, array], 1)),
    "another version": lambda head, _: head.update(version=1),
    "another format": lambda head, _: head.update(format="levattn stream"),
    "no fingerprint": lambda head, _: head.pop("fingerprint"),
}


@pytest.mark.parametrize("change", RESEALED)
def test_a_file_whose_parts_do_not_fit_is_refused_though_its_digest_does(change: str, tmp_path: Path) -> None:
    model, file = seeded(), tmp_path / "context"
    saved(model, file)
    resealed(file, lambda *_: None)
    CompressedCache.load(file, model)
    resealed(file, RESEALED[change])
    with pytest.raises(ValueError, match="context "):  # widths and kinds of numbers by the first call
        CompressedCache.load(file, model).ask(model, QUESTION, **GREEDY)


def _set_renewal(**entries: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda head, _: head["layers"][0]["renewal"].update(entries)


def _set_split(**entries: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda head, _: head["layers"][0]["renewal"]["splits"][0].update(entries)


RENEWING: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "no moments": lambda _, arrays: arrays.pop("0.renewal.squares"),
    "moments that are no number": _set("0.renewal.queries", lambda array: filled(array, float("nan"))),
    "moments in float32": _set("1.renewal.squares", lambda array: array.float()),
    "moments of fewer heads": _set("1.renewal.keys", lambda array: array[:, 1:]),
    "more positions than there are": _set("0.present", lambda array: torch.cat([array, array], 1)),
    "fewer positions than the context": _set("0.present", torch.zeros_like),
    "queries that are no number": _set("0.renewal.asked", lambda array: filled(array, float("nan"))),
    "queries of fewer heads": _set("0.renewal.asked", lambda array: array[:, :2]),
    "queries of more heads": _set("0.renewal.asked", lambda array: torch.cat([array, array], 1)),
    "queries of fewer positions": _set("0.renewal.asked", lambda array: array[:, :, 1:]),
    "no slots": _set("0.renewal.slots", torch.zeros_like),
    "never": _set_renewal(every=0),
    "a share above 1": _set_split(summaries=1.5),
    "more than all": _set_split(window=0.75),
    "scores of another kind": _set_split(scores="norms"),
    "scores of queries": _set_split(scores="h2o"),
    "scores that are numbers": _set_split(scores=[1.0]),
    "an option of no selection": _set_split(chunk=3),
    "a split too few": lambda head, _: head["layers"][0]["renewal"]["splits"].pop(),
    "a number of queries below 0": _set_renewal(seen=[[-1, 3]]),
    "queries that no layer has": _set_renewal(seen=[[10**400, 40]]),
    "other keys than there are": _set_renewal(seen=[[40, 41]]),
    "a head that is none": _set_renewal(whole=[7]),
    "no figures": lambda head, _: head["layers"][0].update(renewal={}),
    "no renewal": lambda head, _: head["layers"][0].pop("renewal"),
    "no tail": lambda _, arrays: arrays.pop("0.tail.keys"),
    "a tail of fewer heads": _set("0.tail.values", lambda array: array[:, 1:]),
    "a tail that is no number": _set("0.tail.values", lambda array: filled(array, float("inf"))),
    "a shorter tail": lambda head, _: head.update(positions=head["positions"] - 1),
    "slots of more positions": lambda head, _: head["layers"][1].update(length=99),
    "a longer context": lambda head, _: head.update(context=99),
    "no context": lambda head, _: head.update(context=0),
    "a context that is a flag": lambda head, _: head.update(context=True),
    "a length that is no whole number": lambda head, _: head["layers"][0].update(length=40.0),
    "an array that no layer has": lambda _, arrays: arrays.update({"0.renewal.more": torch.zeros(3)}),
}


@pytest.mark.parametrize("change", RENEWING)
def test_a_conversation_whose_parts_do_not_fit_is_refused_though_its_digest_does(change: str, tmp_path: Path) -> None:
    model, file = seeded(), tmp_path / "context"
    cache = compress(model, tokens(1, CONTEXT), of_heads(CUT, renew_every=5))
    cache.ask(model, QUESTION, **GREEDY)
    cache.ask(model, QUESTION, **GREEDY)
    cache.save(file)
    resealed(file, lambda *_: None)
    assert torch.equal(CompressedCache.load(file, model).tokens, cache.tokens)
    resealed(file, RENEWING[change])
    with pytest.raises(ValueError, match="damaged compressed context"):
        CompressedCache.load(file, model)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_conversation_goes_on_from_its_file(family: str, batch: int, tmp_path: Path) -> None:
    model, file = base(family), tmp_path / "context"
    cache = compress(model, tokens(batch, CONTEXT), {(1, 1): 0.5})
    cache.ask(model, QUESTION.expand(batch, -1), **GREEDY)
    for _ in range(2):
        cache.save(file)
        CompressedCache.load(file, model).save(file)
        loaded = CompressedCache.load(file, model)
        expected = cache.ask(model, QUESTION.expand(batch, -1), **GREEDY)
        assert torch.equal(loaded.ask(model, QUESTION.expand(batch, -1), **GREEDY), expected)
        assert torch.equal(loaded.tokens, cache.tokens)
        assert loaded.dense_nbytes == cache.dense_nbytes


# -- devices --------------------------------------------------------------------------------------------------------
