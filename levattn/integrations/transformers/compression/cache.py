"""A cache that holds a compressed context, and all positions after it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache

from levattn.integrations.transformers.calls import as_cache_of, inputs_device, parameters_of
from levattn.integrations.transformers.compression.files import check_layers, read_context, write_context
from levattn.integrations.transformers.compression.layer import CompressedLayer
from levattn.integrations.transformers.compression.origin import Origin
from levattn.integrations.transformers.compression.questions import (
    FromQuestionOn,
    as_question,
    generated,
    option_of,
    told_by,
)
from levattn.integrations.transformers.heads_table import HeadsTable
from levattn.integrations.transformers.interface import check_model

_BOUNDARY = 4  # last tokens of a context that may change if a question is written after it
_CHANGING = ("tail", "renewal")  # parts of a layer that a call changes
_FEWEST = 16  # tokens of a context that no question repeats by chance


class CompressedCache(Cache, HeadsTable):  # type: ignore[misc]
    """A context that was read once and compressed, and the positions after it: a cache of transformers.

    `compress` makes it. It is used as any cache that holds a prefix:
    ``model.generate(tokens of context and question, cache=cache)`` reads the question and answers (before transformers
    5.24: ``past_key_values=cache``). Where the question is alone, ``cache.ask(model, question)`` puts the context
    before it. Both go on after the last position of the cache. To ask many questions on one context, give each a
    `copy`, which shares the context.

    Nothing is changed on the model, and any number of threads may use it, each with a cache of its own. Its attention
    must be of the kind "sdpa" (the default of transformers) or "eager".

    Attributes
    ----------
    tokens : torch.Tensor of shape (B, n)
        The context, and the tokens that `ask` read and wrote after it.
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
    >>> found = cache.copy().ask(model, question, max_new_tokens=5, do_sample=False)
    >>> found.shape
    torch.Size([1, 7])
    >>> round(cache.nbytes / cache.dense_nbytes, 2)
    0.68
    """

    _labels: ClassVar[dict[str, str]] = {
        "share": "share of a dense head's bytes",
        "slots": "slots",
        "summaries": "summaries",
    }

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
        layers = [layer.copy() if isinstance(layer, CompressedLayer) else copy.copy(layer) for layer in self.layers]
        fork = CompressedCache(layers, self.tokens, self.present, self.origin)
        fork.context_length = self.context_length
        return fork

    __copy__ = copy

    def so_far(self) -> tuple[Any, Any]:
        """Return the tokens that were read or generated, (B, n), and a mask of the tokens that are no padding.

        Returns
        -------
        tuple of torch.Tensor of shape (B, n)
            Tokens that the model read without `ask` are zeros here, and count as no padding.
        """
        more = self.get_seq_length() - self.tokens.shape[1]
        if more <= 0:
            return self.tokens, self.present
        B = len(self.tokens)
        return (
            torch.cat([self.tokens, self.tokens.new_zeros((B, more))], 1),
            torch.cat([self.present, self.present.new_ones((B, more))], 1),
        )

    def ask(self, model: Any, question: Any, **options: Any) -> Any:
        """Answer a question that follows the tokens so far, by ``model.generate``.

        The cache then holds the question and the answer, and a further question follows them. Padding after an answer
        that ended early stays padding. After beams the chosen answer is read once more. With ``num_return_sequences``
        the cache stays as it was, and so it does if the call fails.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            The model that made the cache.
        question : tensor of shape (B, m), or mapping
            Tokens, or the output of a tokenizer; 0 in its ``attention_mask`` for padding on either side.
        **options
            Of ``model.generate``.

        Returns
        -------
        torch.Tensor of shape (B, m + k), or a ``ModelOutput`` of transformers
            The output of ``generate``, without the tokens before the question.

        Raises
        ------
        TypeError
            If the question is no tensor of whole numbers.
        ValueError
            If the question is empty, begins with the context again, or has another number of rows. If the model is
            another one, or an option excludes caches. If another thread asks this cache.
        """
        ids, mask = as_question(question, options.pop("attention_mask", None))
        with self._kept():
            return self._answered(model, ids, mask, options)

    def _answered(self, model: Any, ids: Any, mask: Any, options: dict[str, Any]) -> Any:
        self._check(model, ids, options)
        before, present = (part.to(ids.device) for part in self.so_far())
        whole, seen = torch.cat([before.to(ids), ids], 1), torch.cat([present.to(mask), mask.to(present.device)], 1)
        check_padding(model, self.layers, seen.bool())
        length = before.shape[1]
        beams, many = (int(option_of(model, options, name) or 1) for name in ("num_beams", "num_return_sequences"))
        self._renew_before(present.bool(), paused=len(ids) > 1)
        cache = self.copy() if beams > 1 or many > 1 else self
        if cache is not self:
            cache.batch_repeat_interleave(max(beams, many))
        streamer = options.get("streamer")
        if streamer is not None:
            options["streamer"] = FromQuestionOn(streamer, length)
        given = {**as_cache_of(model, cache), **options, "use_cache": True}
        found = generated(model, whole, cache.get_seq_length(), attention_mask=seen, **given)
        sequences = found if isinstance(found, torch.Tensor) else found.sequences
        if many == 1:
            told = torch.cat([seen.bool(), told_by(model, sequences[:, whole.shape[1] :], options)], 1)
            if cache is not self:
                self._read(model, sequences[:, self.get_seq_length() : -1], told[:, :-1])
            self.tokens, self.present = sequences.to(self.tokens), told.to(self.present)
        self._renew_before(None, paused=False)
        if isinstance(found, torch.Tensor):
            return found[:, length:]
        found.sequences = sequences[:, length:]
        return found

    def _renew_before(self, present: Any, *, paused: bool) -> None:
        """Let layers renew their slots, knowing the padding so far (B, n); then let them wait if `paused`."""
        for layer in self.layers:
            renewal = getattr(layer, "renewal", None)
            if renewal is None:
                continue
            if present is not None and paused:
                renewal.present = present[:, layer.length : layer.get_seq_length()]
                layer.renew()
            renewal.paused = paused

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Put all layers back as they were if the block fails; raise if another thread is in such a block."""
        own = object()
        if self.__dict__.setdefault("_asked", own) is not own:  # a single step for all threads
            raise ValueError(
                "the cache is answering another question; expected one at a time. Give each question a copy of the "
                "cache, which shares the context"
            )
        before: list[tuple[Any, dict[str, Any]]] = []
        try:
            for layer in self.layers:  # whose arrays are replaced, or written after the last position
                parts = [layer, *(getattr(layer, name, None) for name in _CHANGING)]
                before += [(part, dict(vars(part))) for part in parts if part is not None]
            yield
        except BaseException:
            for part, held in before:
                vars(part).clear()
                vars(part).update(held)
            raise
        finally:
            del self._asked

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_asked"}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append the keys and values of a layer, as the model calls it.

        Parameters
        ----------
        key_states, value_states : torch.Tensor of shape (B, G, T, d)
            Keys and values of further positions.
        layer_idx : int
            The layer.
        *args, **kwargs
            Further arguments of some models.

        Returns
        -------
        tuple of torch.Tensor of shape (B, G, n + T, d)
            Stand-ins for all keys and values, for attention.

        Raises
        ------
        ValueError
            If there are more or fewer sequences than in the cache, or a call before failed between two layers.
        """
        if layer_idx == 0:
            self._check_step(len(key_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]

    def _check_step(self, rows: int) -> None:
        if rows != len(self.tokens):
            raise ValueError(
                f"the input has {rows} rows and the cache {len(self.tokens)}; expected as many. Call "
                "batch_repeat_interleave on a copy of the cache"
            )
        lengths = sorted({layer.get_seq_length() for layer in self.layers})
        if len(lengths) > 1:
            raise ValueError(
                f"layers of the cache hold {lengths[0]} and {lengths[-1]} positions, because a call failed between "
                f"them; expected as many in all. Call crop({lengths[0]}), or take a copy of an earlier cache"
            )

    def _check(self, model: Any, ids: Any, options: dict[str, Any]) -> None:
        """Raise for a question that the cache cannot take."""
        if not hasattr(model, "generate"):
            raise TypeError(f"model is of type {type(model).__name__}; expected a model that generates")
        self.origin.check(model)
        config = options.get("generation_config")
        if options.get("use_cache") is False or getattr(config, "use_cache", None) is False:
            raise ValueError("use_cache is False; expected True, as the context is in the cache alone")
        for name in ("cache", "past_key_values", "position_ids", "inputs_embeds"):
            if options.get(name) is not None:
                raise ValueError(f"{name} was given to ask; expected options of generate alone, as the cache has it")
        if len(ids) != len(self.tokens):
            raise ValueError(
                f"question has {len(ids)} rows and the cache {len(self.tokens)}; expected as many. Call "
                "batch_repeat_interleave on a copy of the cache"
            )
        n = self.context_length - _BOUNDARY
        if self.context_length < _FEWEST or ids.shape[1] < n:
            return
        if torch.equal(ids[:, :n].to(self.tokens), self.tokens[:, :n]):
            raise ValueError(
                f"question has {ids.shape[1]} tokens that begin with the {self.context_length} of the context, which "
                "the cache holds; expected the question alone. Or give all tokens to model.generate, with "
                "past_key_values=cache"
            )

    def _read(self, model: Any, ids: Any, mask: Any) -> None:
        """Read further tokens; `mask`: of all positions so far and these."""
        base, positions = model.base_model, token_positions(model, mask)
        inputs = {} if positions is None else {"position_ids": positions[:, -ids.shape[1] :]}
        with torch.no_grad():
            base(input_ids=ids, attention_mask=mask, use_cache=True, **inputs, **as_cache_of(base, self))

    def reset(self) -> None:
        """Forget the positions after the context.

        Raises
        ------
        ValueError
            If layers slide, because they no longer hold the context.
        """
        for layer in self.layers:
            if not isinstance(layer, CompressedLayer) or layer.length > self.context_length:
                raise ValueError(
                    "the cache has layers that slide, or has renewed its slots, and so no longer holds the context "
                    "alone; expected a cache without further positions. Call copy before each question"
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
        kept = length - forgotten
        fixed = max((layer.length for layer in self.layers if isinstance(layer, CompressedLayer)), default=0)
        if kept < max(fixed, self.context_length):
            raise ValueError(
                f"crop was called with {max_length}; expected to keep at least the {fixed} positions of the context, "
                "which are compressed as a whole. Compress a shorter context"
            )
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, CompressedLayer)):  # others may raise
            more = max(0, layer.get_seq_length() - kept)
            if more or getattr(layer, "record_past", False):
                layer.crop(-more)
        if forgotten:
            self.tokens, self.present = self.tokens[:, :kept], self.present[:, :kept]

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
        if any(getattr(layer, "renewal", None) is not None for layer in self.layers):
            raise ValueError(
                "the cache renews its slots, and files do not hold the statistics for it; expected a cache that was "
                "compressed without renew_every. Compress the context again where it is used"
            )
        more = self.get_seq_length() - self.context_length
        if more:
            raise ValueError(
                f"the cache holds {more} positions after the context; expected none. Save it before any question, or "
                "call reset"
            )
        write_context(path, self.layers, self.tokens, self.present, self.origin.fingerprint())

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any) -> CompressedCache:
        """Read a compressed context for the model that made it.

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
        layers, tokens, present, of = read_context(path, inputs_device(model))
        origin = Origin(model, of)
        origin.check_file(path)
        check_layers(path, layers, model)
        return cls(layers, tokens, present, origin)

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

    _rows = table

    def __repr__(self) -> str:
        sliding = sum(not isinstance(layer, CompressedLayer) for layer in self.layers)
        told = f"; {sliding} of {len(self.layers)} layers slide and keep their window" if sliding else ""
        return (
            f"<CompressedCache of {self.context_length} positions, {self.nbytes} bytes, "
            f"{self.nbytes / self.dense_nbytes:.0%} of a dense cache{told}>"
        )


def token_positions(model: Any, present: Any) -> Any:
    """Return the positions that `generate` gives tokens, (B, n), or None if the model takes none.

    RoBERTa and others count otherwise where none are given.
    """
    if any("position_ids" not in parameters_of(part)[0] for part in (model, model.base_model)):
        return None
    return (present.long().cumsum(1) - 1).clamp(min=0)


def check_padding(model: Any, layers: Any, present: Any) -> None:
    """Raise for padding after tokens, if it would fill windows of layers that slide, or count as positions."""
    slides, counts = any(layer.is_sliding for layer in layers), token_positions(model, present) is None
    if (slides or counts) and bool((present[:, :-1] & ~present[:, 1:]).any()):
        what = "fill the windows of layers that slide" if slides else "count, as the model takes no position_ids"
        raise ValueError(
            f"a sequence has padding after tokens, which would {what}; expected padding on the left alone. Give "
            "padding_side='left' to the tokenizer, or one sequence at a time"
        )


def _dense_bytes(layer: Any) -> int:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    return sum(part.numel() * part.element_size() for part in (keys, values) if part is not None)
