"""Make transformers call an attention of levattn by its name: a change of a model, which can be undone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Number
from types import FunctionType
from typing import Any

import torch
from transformers import PretrainedConfig

from levattn._core.checks import check_type
from levattn.integrations.transformers.calls import cache_among, layer_of, parameters_of, refuse_wrapper
from levattn.integrations.transformers.states import state_layer

PART = "_levattn_pruned"  # the attribute of an attention module that says how it is pruned
EXTENSION = "macchiato"  # the submodule of an attention module that holds the trained parameters
RECORD = "_levattn_changes"  # the attribute of a changed model that records its changes
# Keywords of attentions that change nothing, and those that would be ignored
_HARMLESS = {
    "cache_position",
    "num_items_in_batch",
    "output_hidden_states",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}
_FIGURES = (Number, torch.Tensor, list, tuple, dict, FunctionType)  # what an attention may compute with
_REFUSED = {
    "cache": "the paged cache of continuous batching",
    "encoder_hidden_states": "cross-attention",
    "head_mask": "a mask of heads",
    "indices": "keys selected for each query",
    "output_attentions": "attention weights, which are never formed",
    "position_bias": "biases of relative positions",
    "s_aux": "attention sinks",
    "softcap": "bounded logits",
    **dict.fromkeys(("cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q"), "packed sequences"),
}


def check_model(model: Any) -> None:
    """Raise if this is not a transformers model, is already changed, or has an unsupported kind of attention."""
    from transformers import PreTrainedModel  # two seconds, which the caller's imports have already spent

    refuse_wrapper(model)
    check_type("model", model, PreTrainedModel, "a transformers.PreTrainedModel")
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        raise ValueError(f"model is {name}, whose attention has ALiBi biases; expected rotary or absolute positions")
    if getattr(config, "num_kv_shared_layers", None):
        raise ValueError(f"model is {name}, whose layers share keys and values; expected keys of each layer's own")
    if getattr(config, "attention_chunk_size", None):
        raise ValueError(f"model is {name}, whose attention is cut into chunks; expected full or sliding attention")
    bare = any(parameter.is_meta for parameter in model.parameters())
    if bare and not any(hasattr(module, "_hf_hook") for module in model.modules()):  # of accelerate, which brings them
        raise ValueError(
            f"model is {name}, with weights on the device meta, which holds no numbers; expected weights in memory. "
            "Load them, e.g. by from_pretrained"
        )
    for module in model.modules():
        for part, change in ((PART, "pruned"), (EXTENSION, "extended by macchiato_from")):
            if hasattr(module, part):
                raise ValueError(
                    f"model is {name}, and its {layer_of(module)} is {change} already; expected an unchanged model. "
                    "Leave the with block of prune, or call remove on the model, first"
                )


class Changes:
    """A record of the changes in a model, to undo them; a copy of the model has a copy of the record."""

    def __init__(self) -> None:
        self.hooks: list[Any] = []
        self._before: list[tuple[Any, str, Any]] = []  # objects, names of attributes and their former values
        self._configs: list[tuple[Any, Any, dict[str, Any]]] = []  # configs, their copies, attributes of these

    @property
    def active(self) -> bool:
        """Whether there are changes that were not undone."""
        return bool(self._before)

    def give(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute of an object."""
        self._before.append((target, name, getattr(target, name, ...)))  # the ellipsis: there was none
        setattr(target, name, value)

    def give_configs(self, model: Any, configs: Iterable[Any], implementation: str) -> None:
        """Let a model read copies of its configs, with another attention; other models may have the same configs."""
        chosen = {id(config) for config in configs}
        copies: dict[int, Any] = {}
        for module in model.modules():
            for name, config in [*vars(module).items()]:
                if isinstance(config, PretrainedConfig):
                    own = self._copied(config, chosen, implementation, copies)
                    if own is not config:
                        self.give(module, name, own)

    def _copied(self, config: Any, chosen: set[int], implementation: str, copies: dict[int, Any]) -> Any:
        """Return the copy of a chosen config, or of one that holds such a config, else the config itself.

        A copy holds the same configs as the modules do: copies of the chosen ones, and the others themselves.
        """
        if id(config) not in copies:
            parts = {name: part for name, part in vars(config).items() if isinstance(part, PretrainedConfig)}
            own_parts = {name: self._copied(part, chosen, implementation, copies) for name, part in parts.items()}
            own = config
            if id(config) in chosen or any(own_parts[name] is not part for name, part in parts.items()):
                own = copy.deepcopy(config)
                if id(config) in chosen:
                    own._attn_implementation = implementation  # also of its parts, which are replaced next
                vars(own).update(own_parts)
                same = {id(part): part for part in own_parts.values()}
                self._configs.append((config, own, copy.deepcopy(vars(own), same)))
            copies[id(config)] = own
        return copies[id(config)]

    def undo(self) -> None:
        """Restore the model; a second call does nothing, or continues one that was interrupted."""
        for hook in self.hooks:
            hook.remove()
        for config, own, before in self._configs:  # what a user has set or deleted meanwhile stays
            now = vars(own)
            vars(config).update({k: v for k, v in now.items() if k not in before or not _alike(before[k], v)})
            for name in before.keys() - now.keys():
                vars(config).pop(name, None)
        for target, name, value in reversed(self._before):
            if value is not ...:
                setattr(target, name, value)
            elif hasattr(target, name):
                delattr(target, name)
        self.hooks, self._before, self._configs = [], [], []


def _alike(one: Any, two: Any) -> bool:
    """Tell whether two settings are equal; arrays of several numbers do not tell, and count as changed."""
    try:
        return one is two or (type(one) is type(two) and bool(one == two))
    except Exception:
        return False


@dataclass
class Call:
    """One call of an attention module, on its way from the hook in front to the attention function."""

    held: Any = None  # the layer of the cache
    hidden: Any = None  # the hidden states, input of the module
    passed: frozenset[str] = frozenset()  # names of the keywords of the module's call
    reached: bool = False


@dataclass(frozen=True)
class Interface:
    """An attention of levattn, under the name by which transformers calls it."""

    name: str  # without "flash", "sdpa", "flex_attention", "/" and ":", which have a meaning to transformers
    part: str  # the attribute of an attention module that describes its attention
    function: Callable[..., Any]  # of the module, as that of masks, so that models can be pickled
    masks: Callable[..., Any]
    cache_layers: tuple[type[Any], type[Any]]  # that hold states: of full and of sliding layers
    maker: str  # the function that gives models this attention
    attention: str  # its name in messages
    remedy: str  # the advice in messages about arguments that it would ignore

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the attention in the process that loads a pickled model, whose hooks have this object."""
        vars(self).update(state)
        self.register()

    def register(self) -> None:
        """Register the attention function and its masks with transformers."""
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(self.name, self.function)
        AttentionMaskInterface.register(self.name, self.masks)

    def change(
        self, model: Any, layers: Sequence[Any], parts: Iterable[Any], *, masks: bool, frozen: Iterable[Any] = ()
    ) -> Changes:
        """Let `ModelLayer`s of a model call this attention, with a part of each; a model that fails stays unchanged.

        masks: whether the model makes the masks of this attention. frozen: parameters that need no more gradients.
        """
        changes, configs = Changes(), {id(layer.module.config): layer.module.config for layer in layers}
        try:
            changes.give(model, RECORD, changes)
            self.give_parts(changes, layers, parts)
            for layer in layers:
                if layer.handed:
                    self.hook(layer.module, changes.hooks)
            if masks:
                changes.give_configs(model, configs.values(), self.name)
            for parameter in frozen:
                changes.give(parameter, "requires_grad", False)
        except BaseException:
            changes.undo()
            raise
        return changes

    def give_parts(self, changes: Changes, layers: Iterable[Any], parts: Iterable[Any]) -> None:
        """Let modules call this attention, by a copy of their config; modules with one config share the copy."""
        copies: dict[int, Any] = {}
        for layer, part in zip(layers, parts, strict=True):
            config = layer.module.config
            if id(config) not in copies:
                copies[id(config)] = copy.deepcopy(config)
                copies[id(config)]._attn_implementation = self.name
            changes.give(layer.module, "config", copies[id(config)])
            changes.give(layer.module, self.part, part)

    def hook(self, module: Any, hooks: list[Any], entered: list[Any] | None = None) -> None:
        """Hook a module, to hand each `Call` to its attention, and check that it arrives; `hooks` takes the hooks.

        entered: for a trial call, the list that takes each module and its arguments by their names.
        """
        before = partial(self._hand_on, *parameters_of(module), entered)
        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if entered is None:
            hooks.append(module.register_forward_hook(self._check_reached, with_kwargs=True))

    def _hand_on(
        self, names: tuple[str, ...], others: bool, entered: Any, module: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        cache, held = cache_among(given), None
        if entered is not None:
            entered.append((module, given))
        elif cache is not None:
            held = state_layer(cache, module, self.cache_layers, self.attention)
        if others and hasattr(module, self.part):
            kwargs = {**kwargs, self.name: Call(held, given.get("hidden_states"), frozenset(kwargs))}
        return args, kwargs

    def _check_reached(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG002
        if not kwargs[self.name].reached:
            raise RuntimeError(
                f"{layer_of(module)} did not call the attention of {self.maker}; expected the attention "
                f"implementation {self.name!r} in its config, found {module.config._attn_implementation!r}. Do not "
                "change it, or call remove(model)"
            )

    def begin(self, module: Any, dropout: float, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the part of a module, and its `Call` or None; raise for arguments that the attention would ignore.

        Among keywords of the model's own call are things of `generate` that no attention reads, such as a tokenizer.
        """
        part, call, layer = getattr(module, self.part, None), kwargs.pop(self.name, None), layer_of(module)
        if part is None:
            raise ValueError(
                f"the attention implementation {self.name!r} was chosen by hand for {layer}; expected a layer that "
                f"{self.maker} changed. Call {self.maker} on the model, or choose another implementation"
            )
        if dropout:
            raise ValueError(
                f"{layer} drops attention weights with probability {dropout}; expected none, as {self.attention} "
                "drops none. Set attention_dropout = 0 in the config and the layers, or call model.eval()"
            )
        for name, value in kwargs.items():
            if value is None or value is False or name in _HARMLESS:
                continue
            passed = call is not None and name in call.passed
            if passed and name not in _REFUSED and not isinstance(value, _FIGURES):
                continue
            raise ValueError(
                f"{layer} passes {name} to its attention ({_REFUSED.get(name, 'which is not known here')}); expected "
                f"nothing that {self.attention} would ignore. Leave it out, or {self.remedy}"
            )
        if call is not None:
            call.reached = True
        return part, call
