"""A cache that holds a compressed context, and all positions after it."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from transformers.cache_utils import Cache

from levattn.integrations.transformers.changes import check_model
from levattn.integrations.transformers.compression.files import read_context, write_context
from levattn.integrations.transformers.compression.layer import CompressedLayer
from levattn.integrations.transformers.compression.origin import Origin, fingerprint
from levattn.integrations.transformers.compression.reading import prepared

__all__ = ["CompressedCache"]


class CompressedCache(Cache):  # type: ignore[misc]
    """A context that was read once and compressed, and the positions after it: a cache of transformers.

    `compress` makes it. ``model.generate(question, past_key_values=cache)`` answers a question on the context: the
    question follows the context, and the result holds the question and the answer. Each call continues after the last
    position of the cache. A question that begins with the context again is refused. To ask many questions on one
    context, give each a `copy`, which shares the context.

    Attributes
    ----------
    tokens : torch.Tensor of shape (B, n)
        The context, and the tokens that `generate` read and wrote after it.
    present : torch.Tensor of shape (B, n)
        True for tokens that are no padding.
    context_length : int
        Positions of the context, padding included.
    origin : object
        The model that read the context.
    layers : list
        The cache of each layer of the model; layers that slide are classes of transformers.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from levattn.integrations.transformers import compress
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50, eos_token_id=None)
    >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
    >>> cache = compress(model, torch.arange(40)[None], budget={(0, 0): 0.25, (1, 1): 0.5})
    >>> question = torch.tensor([[3, 4]])
    >>> found = model.generate(question, past_key_values=cache.copy(), max_new_tokens=5, do_sample=False)
    >>> found.shape
    torch.Size([1, 7])
    >>> round(cache.nbytes / cache.dense_nbytes, 2)
    0.68
    """

    def __init__(self, layers: list[Any], tokens: Any, present: Any, origin: Origin) -> None:
        super().__init__(layers=layers)
        self.tokens = tokens
        self.present = present
        self.context_length = int(tokens.shape[1])
        self.origin = origin

    @property
    def nbytes(self) -> int:
        """Bytes of all keys, values and weights that are held."""
        return sum(
            layer.nbytes if isinstance(layer, CompressedLayer) else _dense_bytes(layer) for layer in self.layers
        )

    @property
    def dense_nbytes(self) -> int:
        """Bytes that a dense cache of as many positions takes."""
        total = 0
        for layer in self.layers:
            if not isinstance(layer, CompressedLayer):
                total += _dense_bytes(layer)
                continue
            heads = sum(len(group.heads) for group in layer.groups)
            keys, values = layer.groups[0].keys, layer.groups[0].values
            width = keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size()
            total += keys.shape[0] * heads * layer.get_seq_length() * width
        return total

    def copy(self) -> CompressedCache:
        """Return a fork, which shares the context and holds its own further positions.

        Returns
        -------
        CompressedCache
            Its context is not copied; the positions after the context are.
        """
        layers = [
            layer.copy() if isinstance(layer, CompressedLayer) else copy.deepcopy(layer) for layer in self.layers
        ]
        fork = CompressedCache(layers, self.tokens, self.present, self.origin)
        fork.context_length = self.context_length
        return fork

    __copy__ = copy

    def so_far(self) -> tuple[Any, Any]:
        """Return the tokens that were read or generated, (B, n), and a mask of the tokens that are no padding.

        Returns
        -------
        tuple of torch.Tensor of shape (B, n)
            Tokens that the model read without `generate` are zeros here.
        """
        more = self.get_seq_length() - self.tokens.shape[1]
        if more <= 0:
            return self.tokens, self.present
        B = len(self.tokens)
        return (
            torch.cat([self.tokens, self.tokens.new_zeros((B, more))], 1),
            torch.cat([self.present, self.present.new_ones((B, more))], 1),
        )

    def remember(self, tokens: Any, mask: Any) -> None:
        """Store the tokens of all positions, generated ones included.

        Parameters
        ----------
        tokens : torch.Tensor of shape (B, n)
            From the first of the context on. If the number of sequences differs, as with beams, nothing is stored.
        mask : torch.Tensor of shape (B, m)
            The attention mask of the first m tokens.
        """
        if tokens.shape[0] == self.tokens.shape[0]:
            self.tokens = tokens.to(self.tokens)
            more = tokens.new_ones((len(tokens), tokens.shape[1] - mask.shape[1]))
            self.present = torch.cat([mask.to(more), more], 1).to(self.present)

    def reset(self) -> None:
        """Forget the positions after the context.

        Raises
        ------
        ValueError
            If layers slide, because they no longer hold the context.
        """
        for layer in self.layers:
            if not isinstance(layer, CompressedLayer):
                raise ValueError(
                    "the cache has layers that slide, which drop the context as more positions come; expected a cache "
                    "without such layers. Call copy before each question"
                )
        super().reset()
        self.tokens, self.present = (part[:, : self.context_length] for part in (self.tokens, self.present))

    def crop(self, max_length: int) -> None:
        """Keep the first positions. The context cannot be shortened.

        Parameters
        ----------
        max_length : int
            Positions to keep. If negative, its absolute value is the number of positions to forget; 0 forgets none.

        Raises
        ------
        ValueError
            If positions of the context would be forgotten.
        """
        length = self.get_seq_length()
        forgotten = -max_length if max_length <= 0 else max(0, length - max_length)
        if forgotten > length - self.context_length:
            raise ValueError(
                f"crop was called with {max_length}; expected to keep at least the {self.context_length} positions of "
                "the context, which are compressed as a whole. Compress a shorter context"
            )
        if forgotten:
            super().crop(-forgotten)
        length -= forgotten
        self.tokens, self.present = self.tokens[:, :length], self.present[:, :length]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence.

        Parameters
        ----------
        repeats : int
            Number of copies.
        """
        super().batch_repeat_interleave(repeats)
        self.tokens, self.present = (part.repeat_interleave(repeats, 0) for part in (self.tokens, self.present))

    def batch_select_indices(self, indices: Any) -> None:
        """Take the sequences with these numbers.

        Parameters
        ----------
        indices : torch.Tensor of shape (b,)
            The numbers.
        """
        super().batch_select_indices(indices)
        self._take(indices)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the sequences with these numbers, for beam search.

        Parameters
        ----------
        beam_idx : torch.Tensor of shape (b,)
            The numbers.
        """
        super().reorder_cache(beam_idx)
        self._take(beam_idx)

    def _take(self, indices: Any) -> None:
        rows = torch.as_tensor(indices).to(self.tokens.device)
        self.tokens, self.present = self.tokens[rows], self.present[rows]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compressed context to a file, which appears whole or not at all.

        Parameters
        ----------
        path : path-like
            The file, in the format safetensors.

        Raises
        ------
        ValueError
            If the cache holds positions after the context, or the model that made it was deleted or changed.
        ImportError
            If safetensors is not installed.
        """
        more = self.get_seq_length() - self.context_length
        if more:
            raise ValueError(
                f"the cache holds {more} positions after the context; expected none. Save it before any question, or "
                "call reset"
            )
        write_context(path, self.layers, self.tokens, self.present, self.origin.fingerprint())

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any) -> CompressedCache:
        """Read a compressed context for the model that made it, and prepare the model to read such caches.

        Parameters
        ----------
        path : path-like
            A file of `save`.
        model : transformers.PreTrainedModel
            The model: of the same type and weights.

        Returns
        -------
        CompressedCache
            It gives the same answers as the saved cache, to the bit.

        Raises
        ------
        ValueError
            If the file is damaged, is no compressed context, or was made with another model, or the model is pruned.
        TypeError
            If the model is no model of transformers.
        OSError
            If the file cannot be read.
        """
        check_model(model)
        layers, tokens, present, of = read_context(path, model.device)
        if of != fingerprint(model):
            raise ValueError(
                f"{path} was made with another model, or another revision, than this {type(model).__name__}; expected "
                "the same weights. Load that model, or compress the context with this one"
            )
        prepared(model)
        return cls(layers, tokens, present, Origin(known=of))

    def table(self) -> list[dict[str, Any]]:
        """Return the part of the context that each head keeps.

        Returns
        -------
        list of dict
            ``layer``, ``head``; ``slots`` and the number of ``summaries`` among them (means over sequences). ``share``
            of the bytes of a dense head; ``slides``, whether the layer keeps only its window, whatever the budget.
        """
        rows = []
        for number, layer in enumerate(self.layers):
            if not isinstance(layer, CompressedLayer):
                heads, held = layer.keys.shape[1:3]
                figures = {"slots": float(held), "summaries": 0.0, "share": held / max(1, layer.get_seq_length())}
                rows += [{"layer": number, "head": head, **figures, "slides": True} for head in range(heads)]
                continue
            for group in layer.groups:
                there = group.places.new_ones(group.places.shape, dtype=torch.bool)
                if group.log_weight is not None:
                    there = group.log_weight > -torch.inf
                width = group.keys.shape[-1] + group.values.shape[-1]
                wide = width + (0 if group.log_weight is None else 4 / group.keys.element_size())
                for place, head in enumerate(group.heads):
                    rows.append(
                        {
                            "layer": number,
                            "head": head,
                            "slots": float(there[:, place].sum(-1).double().mean()),
                            "summaries": float((there & (group.places < 0))[:, place].sum(-1).double().mean()),
                            "share": group.keys.shape[2] * wide / (layer.length * width),
                            "slides": False,
                        }
                    )
        return sorted(rows, key=lambda row: (row["layer"], row["head"]))

    def __repr__(self) -> str:
        sliding = sum(not isinstance(layer, CompressedLayer) for layer in self.layers)
        told = f"; {sliding} of {len(self.layers)} layers slide and keep their window" if sliding else ""
        return (
            f"<CompressedCache of {self.context_length} positions, {self.nbytes} bytes, "
            f"{self.nbytes / self.dense_nbytes:.0%} of a dense cache{told}>"
        )


def _dense_bytes(layer: Any) -> int:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    return sum(part.numel() * part.element_size() for part in (keys, values) if part is not None)
