"""A cache that holds a compressed context, and all of what came after it."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from transformers.cache_utils import Cache

from levattn.integrations.transformers.compression.files import read_context, write_context
from levattn.integrations.transformers.compression.layer import CompressedLayer
from levattn.integrations.transformers.compression.origin import Origin, fingerprint
from levattn.integrations.transformers.compression.reading import prepared

__all__ = ["CompressedCache"]


class CompressedCache(Cache):  # type: ignore[misc]
    """A context that was read once and compressed, and whatever came after it: a cache of transformers.

    `compress` makes it. ``model.generate(question, past_key_values=cache)`` answers a question on the context: the
    question follows the context, and the result holds the question and the answer. Each call goes on from where the
    cache is; `copy` makes a fork, which shares the context, so that each of many questions can start from it.

    Attributes
    ----------
    tokens : torch.Tensor of shape (B, n)
        The context, and what `generate` took in and gave after it.
    present : torch.Tensor of shape (B, n)
        Which of these are no padding.
    context_length : int
        Positions of the context, padding included.
    origin : object
        Which model read it.
    layers : list
        What each layer of the model keeps; those that slide are of transformers.

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
        """Bytes that the keys and values of as many positions have in a dense cache."""
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
        """Return a fork: it shares the context, and goes on by itself.

        Returns
        -------
        CompressedCache
            Its further positions are its own. Cost: a copy of what came after the context.
        """
        layers = [
            layer.copy() if isinstance(layer, CompressedLayer) else copy.deepcopy(layer) for layer in self.layers
        ]
        fork = CompressedCache(layers, self.tokens, self.present, self.origin)
        fork.context_length = self.context_length
        return fork

    def so_far(self) -> tuple[Any, Any]:
        """Return the tokens that were read or generated, (B, n), and which are no padding.

        Returns
        -------
        tuple of torch.Tensor of shape (B, n)
            Tokens that came to the model without `generate` are told as zeros.
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
        """Take in the tokens of all positions, those that were generated among them.

        Parameters
        ----------
        tokens : torch.Tensor of shape (B, n)
            From the first of the context. Of another number of sequences, as beams have it, nothing is kept.
        mask : torch.Tensor of shape (B, m)
            Which of the first of these are no padding.
        """
        if tokens.shape[0] == self.tokens.shape[0]:
            self.tokens = tokens.to(self.tokens)
            more = tokens.new_ones((len(tokens), tokens.shape[1] - mask.shape[1]))
            self.present = torch.cat([mask.to(more), more], 1).to(self.present)

    def reset(self) -> None:
        """Forget what came after the context.

        Raises
        ------
        ValueError
            If layers slide: they have lost what came before.
        """
        for layer in self.layers:
            if not isinstance(layer, CompressedLayer):
                raise ValueError(
                    "the cache has layers that slide, whose context is gone once more positions came; expected a copy "
                    "of the cache as it was. Call copy before each question"
                )
        super().reset()
        self.tokens, self.present = (part[:, : self.context_length] for part in (self.tokens, self.present))

    def crop(self, max_length: int) -> None:
        """Keep the first positions; those of the context cannot be forgotten.

        Parameters
        ----------
        max_length : int
            Positions to keep; if negative how many to forget, and 0 forgets none.

        Raises
        ------
        ValueError
            If positions of the context would go.
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
            How often.
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
            If the cache holds positions after the context, or the model that made it is gone or was changed.
        ImportError
            If safetensors is not installed.
        """
        more = self.get_seq_length() - self.context_length
        if more:
            raise ValueError(
                f"the cache holds {more} positions after the context; expected none. Save it before it is asked, or "
                "call reset"
            )
        write_context(path, self.layers, self.tokens, self.present, self.origin.fingerprint())

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any) -> CompressedCache:
        """Read a compressed context for the model that made it, which from then on reads such caches.

        Parameters
        ----------
        path : path-like
            A file of `save`.
        model : transformers.PreTrainedModel
            The model: of the same type and weights.

        Returns
        -------
        CompressedCache
            It answers as the one that was saved, to the bit.

        Raises
        ------
        ValueError
            If the file is none of these, is damaged, or was made with another model, or if the model is pruned.
        TypeError
            If the model is none of transformers.
        OSError
            If it cannot be read.
        """
        layers, tokens, present, of = read_context(path, model.device)
        if of != fingerprint(model):
            raise ValueError(
                f"{path} was made with another model, or another revision, than this {type(model).__name__}; expected "
                "the same weights. Load that model, or compress the context with this one"
            )
        prepared(model)
        return cls(layers, tokens, present, Origin(known=of))

    def table(self) -> list[dict[str, Any]]:
        """Return what each head keeps of the context.

        Returns
        -------
        list of dict
            ``layer``, ``head``; ``slots``, ``summaries`` among them (means over sequences); ``share`` of the bytes of
            a dense head; ``slides``, whether the layer keeps its window alone, whatever the budget.
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
