"""Vision transformers of timm with attention to few patches. Needs the extra ``timm``.

Pass `LevAttention` to timm as the attention class to train a model with it. `prune` changes an existing model until
you remove the pruning, and `kept_patches` returns the patches that its heads attend to exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from levattn._core.checks import check_type, needing
from levattn.attention import Selection, causal_pruned_attention, pruned_attention
from levattn.attention.pruned.selection import as_selection

with needing("this needs torch and timm>=1.0.20", "timm"):
    import torch
    from timm.layers import Attention

from levattn.nn.levattention import Prunable, attend_to_all, checked_selection

__all__ = ["LevAttention", "Pruning", "kept_patches", "prune"]


class LevAttention(Prunable, Attention):  # type: ignore[misc]
    """`timm.layers.Attention` that attends to a few keys, by `levattn.attention.pruned_attention`.

    The class has the same parameters as timm's class, so ``load_state_dict`` works both ways. Because timm constructs
    the layers itself and passes no selection to them, `of` returns a class with your selection. `levattn.nn.set_dense`
    switches between all keys (for the first part of training) and few.

    Parameters
    ----------
    *args, **kwargs
        Arguments of `timm.layers.Attention`.

    Raises
    ------
    TypeError
        If the class has no selection; `of` returns a class with one.
    ValueError
        If a call passes `attn_mask`, or the layer trains with dropout of attention weights. Attention to few keys
        would ignore both.

    Notes
    -----
    Time and memory of a call as for `levattn.attention.pruned_attention`, and O(NC²) for the linear maps, for N tokens
    of C channels.

    References
    ----------
    Kannan, Bhattacharyya, Kacham and Woodruff, LevAttention, arXiv:2410.05462, section 6 (vision transformers).

    Examples
    --------
    >>> import timm, torch
    >>> from levattn.attention import Selection
    >>> from levattn.integrations.timm import LevAttention
    >>> few = LevAttention.of(Selection(size=8, scores="leverage"))
    >>> options = dict(img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=2, attn_layer=few)
    >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **options)
    >>> model(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 5])
    """

    selection: Selection
    f: Any = "softmax"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(self, "selection"):
            raise TypeError("LevAttention has no selection; expected a class with one, as LevAttention.of(0.25)")

    @classmethod
    def of(cls, selection: Any, *, f: Any = "softmax") -> type[LevAttention]:
        """Return a layer class with a selection.

        Parameters
        ----------
        selection : Selection or number
            The keys that a token attends to; a number is a budget. In timm's models the class token and registers come
            first; ``sinks=1`` (or their number) always keeps them.
        f : "softmax", float or Power
            The attention function, as for `levattn.attention.pruned_attention`.

        Returns
        -------
        type
            A class for timm's ``attn_layer``.

        Raises
        ------
        TypeError, ValueError
            If the selection or `f` is invalid.
        """
        own = {"selection": checked_selection(selection, f=f), "f": f, "__module__": cls.__module__}
        return type(cls.__name__, (cls,), own)

    def forward(self, x: Any, attn_mask: Any = None, is_causal: bool = False) -> Any:
        """Return the attention of tokens.

        Parameters
        ----------
        x : tensor of shape (B, N, C)
            The tokens.
        attn_mask : None
            Not supported.
        is_causal : bool
            Whether a token sees only itself and earlier tokens.

        Returns
        -------
        tensor of shape (B, N, C)
            The output.

        Raises
        ------
        TypeError, ValueError
            If there is a mask or dropout of attention weights, or as for `levattn.attention.pruned_attention`.
        """
        if attn_mask is not None:
            raise ValueError("attn_mask was given; expected None, as attention to few keys does not support it")
        if self.training and self.attn_drop.p:
            raise ValueError(
                f"attn_drop is {self.attn_drop.p}; expected 0 in training, as attention to few keys has no dropout"
            )
        Y = self._attention(*self._projected(x), is_causal)
        gate = getattr(self, "gate", None)
        Y = self.norm(Y.transpose(1, 2).flatten(-2))
        return self.proj_drop(self.proj(Y if gate is None else Y * gate(x).sigmoid()))

    def _projected(self, x: Any) -> tuple[Any, Any, Any]:
        Q, K, V = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.q_norm(Q), self.k_norm(K), V

    def _attention(self, Q: Any, K: Any, V: Any, causal: bool) -> Any:
        if self.dense:
            return attend_to_all(Q, K, V, causal=causal, f=self.f)
        if causal:
            return causal_pruned_attention(Q, K, V, self.selection, f=self.f)
        return pruned_attention(Q, K, V, self.selection, f=self.f)

    def kept(self, x: Any) -> npt.NDArray[np.bool_]:
        """Return which keys the heads attend to exactly, whatever the query.

        Parameters
        ----------
        x : tensor of shape (B, N, C)
            The tokens.

        Returns
        -------
        array of bool, shape (B, H, N)
            True for the selected keys and the first keys.

        Raises
        ------
        TypeError, ValueError
            As for `levattn.attention.pruned_attention`.
        """
        Q, K, V = self._projected(x)
        if self.dense:
            return np.ones(K.shape[:3], bool)
        _, certificate = pruned_attention(Q, K, V, self.selection, f=self.f, return_certificate=True)
        return np.asarray(certificate.kept.cpu())


class Pruning:
    """The pruned layers of a model, and the way to restore them. Also a context: ``with prune(model, ...):``.

    Parameters
    ----------
    changed : dict of str to LevAttention
        The pruned layers, by their names.

    Attributes
    ----------
    layers : tuple of str
        The names of the pruned layers, in the order of the model; empty after `remove`.

    Examples
    --------
    >>> import timm
    >>> from levattn.integrations.timm import prune
    >>> options = dict(img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=2)
    >>> pruning = prune(timm.create_model("vit_tiny_patch16_224", **options), 0.25)
    >>> pruning.layers
    ('blocks.0.attn', 'blocks.1.attn')
    >>> pruning.remove()
    """

    def __init__(self, changed: dict[str, Any]) -> None:
        self._changed = changed

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the pruned layers."""
        return tuple(self._changed)

    def remove(self) -> None:
        """Let the layers attend to all keys again, as in timm. A second call does nothing."""
        for layer in self._changed.values():
            layer.__class__ = Attention
            for name in ("selection", "f", "dense"):
                layer.__dict__.pop(name, None)
        self._changed = {}

    def __enter__(self) -> Pruning:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def prune(model: Any, selection: Any, *, layers: Iterable[int] | None = None, f: Any = "softmax") -> Pruning:
    """Let layers of a vision transformer attend to a few patches, and to summaries of the others.

    Each layer of the class `timm.layers.Attention` computes `levattn.attention.pruned_attention` of its own queries,
    keys and values. Pruning needs no training, and parameters stay the same objects with the same names.

    Parameters
    ----------
    model : torch.nn.Module
        A timm model, e.g. a ViT or DeiT. It is changed in place.
    selection : Selection or number
        The patches that a token attends to; a number is a budget, and 1.0 is dense. By default ``sinks`` is the number
        of class tokens and registers of the model, so they are kept.
    layers : iterable of int, optional
        Numbers of the attention layers to prune, from 0; all if None.
    f : "softmax", float or Power
        The attention function, as for `levattn.attention.pruned_attention`.

    Returns
    -------
    Pruning
        The names of the pruned layers, and the way to restore them.

    Raises
    ------
    TypeError, ValueError
        If the selection is invalid, or the model has no layer of this class or is already pruned. Also if it has other
        attention layers, such as in Eva, Beit or Swin; the message names them. The model then stays unchanged.

    Notes
    -----
    Time and memory of each layer as for `LevAttention`. Nothing is copied.

    References
    ----------
    Kannan, Bhattacharyya, Kacham and Woodruff, LevAttention, arXiv:2410.05462, section 6 (vision transformers).

    Examples
    --------
    >>> import timm, torch
    >>> from levattn.attention import Selection
    >>> from levattn.integrations.timm import prune
    >>> options = dict(img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5)
    >>> model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    >>> images = torch.randn(2, 3, 32, 32)
    >>> dense = model(images)
    >>> with prune(model, Selection(0.5, window=0)):
    ...     few = model(images)
    >>> torch.equal(model(images), dense), torch.equal(few, dense)
    (True, False)
    """
    check_type("model", model, torch.nn.Module, "a torch.nn.Module of timm")
    selection = as_selection(selection)
    if selection.sinks is None:
        selection = replace(selection, sinks=getattr(model, "num_prefix_tokens", None))
    selection = checked_selection(selection, f=f)
    there = _layers_of(model)
    names = list(there)
    if layers is not None:
        wanted = list(layers)
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < len(names) for i in wanted):
            raise ValueError(f"layers is {wanted}; expected numbers of attention layers, from 0 to {len(names) - 1}")
        names = [names[i] for i in sorted(set(wanted))]
    changed = {name: there[name] for name in names}
    for layer in changed.values():
        layer.__class__ = LevAttention
        layer.selection, layer.f, layer.dense = selection, f, False
    return Pruning(changed)


def _layers_of(model: Any) -> dict[str, Any]:
    """Return the layers of timm's own class by their names, or raise."""
    there, others = {}, set()
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, Prunable):
            raise ValueError(f"{name} of the model is pruned already; expected an unpruned model")
        if kind is Attention:
            there[name] = module
        elif _attends(kind.__name__.lower()):
            others.add(f"{kind.__module__}.{kind.__name__}")
    if others or not there:
        found = f"layers of {', '.join(sorted(others))}" if others else "no attention layer"
        raise ValueError(
            f"the model is a {type(model).__name__} with {found}; expected timm.layers.Attention in all its blocks, "
            "as ViT and DeiT have"
        )
    return there


def _attends(name: str) -> bool:
    """Tell by its name whether a class attends; a pool, which reads the final output, does not count."""
    return ("attn" in name or "attention" in name) and "pool" not in name


def kept_patches(model: Any, images: Any) -> npt.NDArray[np.bool_]:
    """Return which patches the heads of a pruned model attend to exactly, whatever the query.

    Parameters
    ----------
    model : torch.nn.Module
        A timm model that `prune` changed, or with layers of `LevAttention`. It is called once.
    images : tensor of shape (B, channels, height, width)
        The images for the call.

    Returns
    -------
    array of bool, shape (layers, B, H, rows, columns)
        True for the selected patches, in each pruned layer. Class tokens and registers are left out.

    Raises
    ------
    ValueError
        If no layer is pruned, or the tokens do not lie on a grid.

    Notes
    -----
    Time: one call of the model, with one additional attention in each pruned layer.

    Examples
    --------
    >>> import timm, torch
    >>> from levattn.attention import Selection
    >>> from levattn.integrations.timm import kept_patches, prune
    >>> options = dict(img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5)
    >>> model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    >>> _ = prune(model, Selection(size=6, scores="leverage"))
    >>> kept = kept_patches(model, torch.randn(1, 3, 32, 32))
    >>> kept.shape, kept.sum(axis=(3, 4)).tolist()
    ((2, 1, 2, 8, 8), [[[6, 6]], [[6, 6]]])
    """
    layers = [module for module in model.modules() if isinstance(module, LevAttention)]
    if not layers:
        raise ValueError(f"model is a {type(model).__name__} without a pruned layer; expected one that prune changed")
    found: list[Any] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, arguments: found.append(layer.kept(arguments[0])))
        for layer in layers
    ]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    flags = np.stack(found)[..., int(getattr(model, "num_prefix_tokens", 0)) :]
    embed = model.patch_embed
    rows, columns = (-(-size // patch) for size, patch in zip(images.shape[-2:], embed.patch_size, strict=True))
    if rows * columns != flags.shape[-1]:
        raise ValueError(
            f"{flags.shape[-1]} tokens are no grid of {rows} × {columns} patches; expected a model with all tokens"
        )
    return flags.reshape(*flags.shape[:-1], rows, columns)
