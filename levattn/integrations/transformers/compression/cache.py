"""A cache that holds a compressed context, and all positions after it."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad
from transformers import __version__ as version
from transformers.cache_utils import Cache

from levattn._core.checks import whole_number
from levattn.integrations.transformers.calls import (
    as_cache_of,
    cache_keyword,
    check_generates,
    counting_from,
    parameters_of,
    refuse_wrapper,
    tokens_of,
)
from levattn.integrations.transformers.compression.files import Origin, held_by, read_context, write_context
from levattn.integrations.transformers.compression.layer import CompressedLayer
from levattn.integrations.transformers.compression.slots import HeadSlots
from levattn.integrations.transformers.heads_table import HeadsTable
from levattn.integrations.transformers.interface import check_model

_DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")  # options of `generate`
# options of `generate` that read the tokens so far
_READING = (
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("min_length", "bad_words_ids", "sequence_bias", "guidance_scale", "watermarking_config"),
    *("stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn"),
)
_BOUNDARY = 4  # last tokens of a context that may change if a question is written after it
_CHANGING = ("tail", "renewal")  # parts of a layer that a call changes
_FEWEST = 16  # tokens of a context that no question repeats by chance
_PICTURES_FROM = 5  # the version of transformers from which on a question after a cache may have pictures
_TOKENS_ALONE = ("attention_mask", "logits_to_keep")  # tensors that a question of text may have beside its tokens


class CompressedCache(Cache, HeadsTable):  # type: ignore[misc]
    """A context that was read once and compressed, and the positions after it: a cache of transformers.

    `compress` makes it. It is used as any cache that holds a prefix:
    ``model.generate(tokens of context and question, cache=cache)`` reads the question and answers (before transformers
    5.24: ``past_key_values=cache``). Where the question is alone, ``cache.ask(model, question)`` puts the context
    before it. With drafts (of an assistant model, or looked up in the question) `ask` alone works. Both go on after
    the last position of the cache. To ask many questions on one context, give each a `copy`, which shares the context.

    Nothing is changed on the model, and any number of threads may use it, each with a cache of its own. (Models that
    keep their count of positions after a picture, as Qwen2-VL does, answer one `ask` at a time.) Its attention must be
    of the kind "sdpa" (the default of transformers) or "eager". A mask may hide the padding of the context, and no
    other position of it.

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
    >>> cache = compress(model, torch.arange(40)[None], {(0, 0): 0.25, (1, 1): 0.5})
    >>> question = torch.tensor([[3, 4]])
    >>> found = cache.copy().ask(model, question, max_new_tokens=5, do_sample=False)
    >>> found.shape
    torch.Size([1, 7])
    >>> round(cache.nbytes / cache.dense_nbytes, 2)
    0.59
    """

    _labels: ClassVar[dict[str, str]] = {
        "share": "share of a dense head's bytes",
        "bits": "bits of an entry",
        "slots": "slots",
        "summaries": "summaries",
        "residual": "error of outputs on unseen queries (relative)",
    }

    def __init__(self, layers: list[Any], tokens: Any, present: Any, origin: Origin) -> None:
        super().__init__(layers=layers)
        self.tokens = tokens
        self.present = present
        self.context_length = int(tokens.shape[1])
        self.origin = origin
        self._shifts: list[tuple[int, dict[str, Any]]] = []  # of calls of `ask`, by their first position

    @property
    def nbytes(self) -> int:
        """Bytes of all keys, values and weights that are held, and of statistics for their renewal."""
        windows = sum(group.nbytes for layer in self.layers if layer.is_sliding for group in held_by(layer))
        return windows + sum(int(layer.nbytes) for layer in self.layers if not layer.is_sliding)

    @property
    def dense_nbytes(self) -> int:
        """Bytes that a dense cache of as many positions takes."""
        return sum(
            _position_nbytes(group) * (group.keys.shape[2] if layer.is_sliding else layer.get_seq_length())
            for layer in self.layers
            for group in held_by(layer)
        )

    def copy(self) -> CompressedCache:
        """Return a fork, which shares the context and holds its own further positions.

        Returns
        -------
        CompressedCache
            Its context is not copied; the positions after the context are.
        """
        fork = CompressedCache([copy.copy(layer) for layer in self.layers], self.tokens, self.present, self.origin)
        fork.context_length, fork._shifts = self.context_length, [*self._shifts]
        return fork

    __copy__ = copy

    def so_far(self) -> tuple[Any, Any]:
        """Return the tokens that were read or generated, (B, n), and a mask of the tokens that are no padding.

        Returns
        -------
        tuple of torch.Tensor of shape (B, n)
            Tokens that the model read without `ask` are zeros here, and count as no padding.
        """
        more = max(0, self.get_seq_length() - self.tokens.shape[1])
        return pad(self.tokens, (0, more)), pad(self.present, (0, more), value=True)

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
            Of ``model.generate``. With drafts none that read all tokens, as ``repetition_penalty`` does: in
            newer releases of transformers, generate gets the question alone then.

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
            another one, or an option excludes caches. If another thread asks this cache. If pictures are given with
            beams, or before transformers 5.0.
        """
        ids, mask = tokens_and_present("question", question, options.pop("attention_mask", None))
        with self._kept(), self._shifted(model):
            self._check(model, ids, options)
            if not bool((mask[:, :-1] & ~mask[:, 1:]).any()):
                return self._answered(model, ids, mask, options)
            order = mask.long().argsort(dim=1, stable=True)  # padding first, as answers follow the last column
            found = self._answered(model, ids.gather(1, order), mask.gather(1, order), options)
        sequences = found if isinstance(found, torch.Tensor) else found.sequences
        told = ids.repeat_interleave(len(sequences) // len(ids), 0).to(sequences)
        sequences = torch.cat([told, sequences[:, ids.shape[1] :]], 1)
        if isinstance(found, torch.Tensor):
            return sequences
        found.sequences = sequences
        return found

    def _answered(self, model: Any, ids: Any, mask: Any, options: dict[str, Any]) -> Any:
        before, present = (part.to(ids.device) for part in self.so_far())
        whole, seen = torch.cat([before.to(ids), ids], 1), torch.cat([present, mask.to(ids.device)], 1)
        check_padding(model, self.layers, seen)
        beams, many = (int(_option(model, options, name) or 1) for name in ("num_beams", "num_return_sequences"))
        self._renew_before(present, paused=len(ids) > 1)
        cache = self.copy() if beams > 1 or many > 1 else self
        if cache is not self:
            cache.batch_repeat_interleave(max(beams, many))
        given = {**as_cache_of(model, cache), **options, "use_cache": True, "attention_mask": seen.long()}
        found = _generated(model, whole, before.shape[1], cache.get_seq_length(), given)
        sequences = found if isinstance(found, torch.Tensor) else found.sequences
        if many == 1:
            told = torch.cat([seen, _told(model, sequences[:, whole.shape[1] :], options)], 1)
            if cache is not self:
                self._read(model, sequences[:, self.get_seq_length() : -1], told[:, :-1])
            self.tokens, self.present = sequences.to(self.tokens), told.to(self.present)
        self._renew_before(seen, paused=False)
        if isinstance(found, torch.Tensor):
            return found[:, before.shape[1] :]
        found.sequences = sequences[:, before.shape[1] :]
        return found

    def _renew_before(self, present: Any, *, paused: bool) -> None:
        """Let layers wait with their next renewal if `paused`, but first renew, knowing the padding so far (B, n)."""
        for layer in self.layers:
            if getattr(layer, "renewal", None) is not None:
                if paused:
                    layer.renewal.present = present[:, layer.length : layer.get_seq_length()]
                    layer.renew()
                layer.renewal.paused = paused

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

    @contextmanager
    def _shifted(self, model: Any) -> Iterator[None]:
        """Let a model count positions as after this cache's last call, and keep how it does after the block."""
        first = self.get_seq_length()
        with counting_from(model, self._shifts[-1][1] if self._shifts else {}) as shifts_now:
            yield
            if self.get_seq_length() > first and (now := shifts_now()):
                self._shifts = [*self._shifts, (first, now)]

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
            If there are more or fewer sequences than in the cache, or the model has more layers. If a call before
            failed between two layers, or was of a model with fewer layers.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"the model has a layer {layer_idx} and the cache {len(self.layers)} layers; expected the cache's "
                "model. Compress the context with this model"
            )
        if layer_idx == 0:
            self.origin.check_attention()
            self._check_rows("the input", len(key_states))
            self._check_layers()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]

    def _check_rows(self, what: str, rows: int) -> None:
        if rows != len(self.tokens):
            raise ValueError(
                f"{what} has {rows} rows and the cache {len(self.tokens)}; expected as many. Call "
                "batch_repeat_interleave on a copy of the cache"
            )

    def _check_layers(self) -> None:
        lengths = sorted({layer.get_seq_length() for layer in self.layers})
        if len(lengths) > 1:
            raise ValueError(
                f"layers of the cache hold {lengths[0]} and {lengths[-1]} positions, because a call failed between "
                f"them; expected as many in all {len(self.layers)} layers. Call crop({lengths[0]}), or take a copy of "
                "an earlier cache. A model with fewer layers cannot read this one"
            )

    def _check(self, model: Any, ids: Any, options: dict[str, Any]) -> None:
        """Raise for a question that the cache cannot take."""
        refuse_wrapper(model)
        check_generates(model)
        self.origin.check(model)
        self.origin.check_attention()
        self._check_rows("question", len(ids))
        config, n = options.get("generation_config"), self.context_length - _BOUNDARY
        for name in ("cache", "past_key_values", "position_ids", "inputs_embeds"):
            if options.get(name) is not None:
                raise ValueError(f"{name} was given to ask; expected options of generate alone, as the cache has it")
        if options.get("use_cache") is False or getattr(config, "use_cache", None) is False:
            raise ValueError("use_cache is False; expected True, as the context is in the cache alone")
        if _option(model, options, "output_attentions"):
            raise ValueError(
                "output_attentions is True; expected False, as weights of attention are not formed over slots. Leave "
                "it out, or give a DynamicCache to generate"
            )
        self._check_pictures(model, options)
        if self.context_length >= _FEWEST and torch.equal(ids[:, :n].to(self.tokens), self.tokens[:, :n]):
            raise ValueError(
                f"question has {ids.shape[1]} tokens that begin with the {self.context_length} of the context, which "
                "the cache holds; expected the question alone. Or give all tokens to model.generate, with "
                f"{cache_keyword(model)}=cache"
            )

    def _check_pictures(self, model: Any, options: dict[str, Any]) -> None:
        """Raise for pictures and the like beside the question, where the model would not read them."""
        names = set(parameters_of(model)[0]).difference(_TOKENS_ALONE)
        read = sorted(name for name in names if isinstance(options.get(name), torch.Tensor))
        if read and int(_option(model, options, "num_beams") or 1) > 1:
            raise ValueError(
                f"{read[0]} was given with beams; expected tokens alone, as the model reads the chosen answer once "
                "more. Leave out the beams"
            )
        if read and int(version.partition(".")[0]) < _PICTURES_FROM:
            raise ValueError(
                f"{read[0]} was given to ask; expected tokens alone, as transformers {version} leaves the rest out "
                f"where a cache holds positions. Use transformers {_PICTURES_FROM}.0 or newer"
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
        self._shifts = []
        self.tokens, self.present = (part[:, : self.context_length] for part in (self.tokens, self.present))

    def crop(self, max_length: int) -> None:
        """Keep the first positions. The context cannot be shortened.

        Parameters
        ----------
        max_length : int
            Positions to keep. If negative, its absolute value is the number of positions to forget; 0 forgets none.

        Raises
        ------
        TypeError
            If `max_length` is no whole number.
        ValueError
            If positions of the context would be forgotten.
        """
        try:
            max_length = operator.index(max_length)
        except TypeError:
            raise TypeError(f"max_length is {max_length!r}; expected a whole number of positions") from None
        length = self.get_seq_length()
        forgotten = -max_length if max_length <= 0 else max(0, length - max_length)
        kept = length - forgotten
        fixed = max([self.context_length, *(getattr(layer, "length", 0) for layer in self.layers)])
        if kept < fixed:
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
            self._shifts = [(first, shift) for first, shift in self._shifts if first < kept]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence.

        Parameters
        ----------
        repeats : int
            Number of copies.

        Raises
        ------
        TypeError, ValueError
            If `repeats` is no whole number of at least 1.
        """
        repeats = whole_number("repeats", repeats)
        self.batch_select_indices(torch.arange(len(self.tokens)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Take the sequences with these numbers.

        Parameters
        ----------
        indices : torch.Tensor of shape (b,)
            The numbers, or flags of all sequences.

        Raises
        ------
        ValueError
            If they are none, or not all numbers of sequences.
        """
        graded, rows = torch.is_grad_enabled(), torch.as_tensor(indices)
        fit = rows.ndim == 1 and len(rows) > 0 and not rows.is_floating_point()
        if rows.dtype == torch.bool:
            fit = fit and len(rows) == len(self.tokens)
        elif fit and rows.device.type == "cpu":  # others would be waited for
            fit = 0 <= int(rows.min()) <= int(rows.max()) < len(self.tokens)
        if not fit:
            raise ValueError(
                f"indices are {rows.tolist()}; expected the numbers of some of the {len(self.tokens)} sequences"
            )
        with torch.inference_mode(mode=False), torch.set_grad_enabled(graded):  # gradients may read the slots later
            super().batch_select_indices(rows)
            rows = rows.to(self.tokens.device)
            self.tokens, self.present = self.tokens[rows], self.present[rows]
            self._shifts = [
                (first, {name: x[rows.to(x.device)] for name, x in shift.items()}) for first, shift in self._shifts
            ]

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take the sequences with these numbers, for beam search.

        Parameters
        ----------
        beam_idx : torch.Tensor of shape (b,)
            The numbers.

        Raises
        ------
        ValueError
            As for `batch_select_indices`.
        """
        self.batch_select_indices(beam_idx)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the context, and the positions after it, to a file that appears whole or not at all.

        Parameters
        ----------
        path : path-like
            The file, in the format safetensors.

        Raises
        ------
        ValueError
            If the model that made the cache was deleted or changed, or a call failed between two layers. If `ask` read
            pictures, after which models count positions otherwise.
        TypeError
            If `path` is no path.
        OSError
            If the file cannot be written.
        ImportError
            If safetensors is not installed.
        """
        self._check_layers()
        if any(bool(x.any()) for _, shift in self._shifts for x in shift.values()):
            raise ValueError(
                "the cache holds pictures, after which the model counts positions otherwise, and files do not tell; "
                "expected text alone. Save a copy from before the pictures"
            )
        write_context(path, self)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any) -> CompressedCache:
        """Read a cache that `save` wrote, for the model that made it.

        Parameters
        ----------
        path : path-like
            A file of `save`.
        model : transformers.PreTrainedModel
            The model: of the same type and weights.

        Returns
        -------
        CompressedCache
            It gives the same answers as the saved cache, to the bit. Slots are where the layers of the model compute.

        Raises
        ------
        ValueError
            If the file is damaged, is no compressed context, or was made with another model, or the model is pruned.
            If `path` is empty.
        TypeError
            If the model is no model of transformers, or `path` is no path.
        OSError
            If the file cannot be read.
        """
        check_model(model)
        with torch.inference_mode(mode=False), torch.no_grad():
            layers, tokens, present, length, origin = read_context(path, model)
        cache = cls(layers, tokens, present, origin)
        cache.context_length = length
        return cache

    def table(self) -> list[dict[str, Any]]:
        """Return the part of the context that each head keeps.

        Returns
        -------
        list of dict
            ``layer``, ``head``; ``slots`` and the number of ``summaries`` among them (means over sequences). ``share``
            of the bytes of a dense head in the dtype of the model. ``bits`` of an entry, 16 for that dtype. ``slides``
            tells whether the layer keeps only its window, whatever the budget.
            ``residual``, if slots are fitted: the relative error of the outputs on queries that were left out of the
            fit, the largest of the sequences. It is NaN if there was no such query.
        """
        rows = []
        for number, layer in enumerate(self.layers):
            length = max(1, layer.get_seq_length() if layer.is_sliding else layer.length)
            for group in held_by(layer):
                there = torch.ones_like(group.places, dtype=torch.bool)
                if group.log_weight is not None:
                    there = group.log_weight > -torch.inf
                share = group.nbytes / (length * _position_nbytes(group))
                for place, head in enumerate(group.heads):
                    found = {"slots": there[:, place], "summaries": (there & (group.places < 0))[:, place]}
                    figures = {name: float(flags.sum(-1).double().mean()) for name, flags in found.items()}
                    if group.residuals is not None:
                        known = group.residuals[:, place].nan_to_num(-torch.inf).max()
                        figures["residual"] = float(known) if known >= 0 else torch.nan
                    kept = {"share": share, "bits": group.bits, "slides": layer.is_sliding}
                    rows.append({"layer": number, "head": head, **figures, **kept})
        return sorted(rows, key=lambda row: (row["layer"], row["head"]))

    def __repr__(self) -> str:
        sliding = sum(layer.is_sliding for layer in self.layers)
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


def _position_nbytes(group: HeadSlots) -> int:
    """Return the bytes of a position's keys and values in all sequences and heads of a group."""
    widths = sum(array.shape[-1] * array.dtype.itemsize for array in (group.keys, group.values))
    return int(group.keys.shape[0] * len(group.heads) * widths)


def tokens_and_present(name: str, value: Any, mask: Any = None) -> tuple[Any, Any]:
    """Return tokens and which are no padding, both (B, n), or raise; `mask`: one that was given beside them."""
    ids, mask = tokens_of(name, value, mask)
    if not bool(mask.any(1).all()):
        raise ValueError(
            f"{name} has a row of padding alone, a sequence without positions; expected at least one token in each. "
            "Leave the row out"
        )
    return ids, mask.bool()


# -- questions: the options of `generate`, and which tokens of an answer are padding ----------------------------------


def _option(model: Any, options: dict[str, Any], name: str) -> Any:
    """Return an option of `generate` as it takes it: from its keywords, or from its configurations."""
    if name in options:
        return options[name]
    for config in (options.get("generation_config"), model.generation_config):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return None


def _told(model: Any, answer: Any, options: dict[str, Any]) -> Any:
    """Return which tokens of answers are no padding: all up to the first token of the end.

    A row that a criterion of its own stopped is filled with padding from there on.
    """
    ends = _option(model, options, "eos_token_id")
    if ends is None:
        return torch.ones_like(answer, dtype=torch.bool)  # then all rows go on to the end
    ends = torch.as_tensor(ends, device=answer.device).reshape(-1)
    is_end = torch.isin(answer, ends)
    told = is_end.cumsum(1) - is_end.long() == 0
    if _option(model, options, "stop_strings") is not None or options.get("stopping_criteria"):
        pad = _option(model, options, "pad_token_id")
        pad = ends[0] if pad is None else torch.as_tensor(pad, device=answer.device)
        told &= (answer != pad).flip(1).cumsum(1).flip(1).bool() | is_end
    return told


def _generated(model: Any, whole: Any, told: int, held: int, options: dict[str, Any]) -> Any:
    """Return the output of `generate` for all tokens, the first of which are in a cache.

    `told`: tokens that a streamer does not get. `held`: tokens in the cache, which releases of transformers read again
    if they make drafts. So they get the others alone.
    """
    drafts = any(_option(model, options, name) for name in _DRAFTS)
    again = drafts and "next_sequence_length" in parameters_of(model, "prepare_inputs_for_generation")[0]
    first, config = held if again else 0, options.get("generation_config")
    if options.get("streamer") is not None:
        options["streamer"] = _FromQuestionOn(options["streamer"], told - first)
    if not first:
        return model.generate(whole, **options)
    _refuse_with_drafts(model, options)
    most = None if config is None or config.max_new_tokens is not None else config.max_length
    most = options.get("max_length", most)
    if most is not None:
        options["max_length"] = most - first
    found = model.generate(whole[:, first:], **options)
    if isinstance(found, torch.Tensor):
        return torch.cat([whole[:, :first], found], 1)
    found.sequences = torch.cat([whole[:, :first], found.sequences], 1)
    return found


def _refuse_with_drafts(model: Any, options: dict[str, Any]) -> None:
    """Raise for options that read the tokens so far, of which releases of transformers get a part with drafts."""
    for name in _READING:
        given = _option(model, options, name)
        if given is not None and not (
            isinstance(given, bool | int | float | list | tuple) and given in (0, 1.0, [], ())
        ):
            raise ValueError(
                f"{name} is {given!r} in a call that makes drafts; expected none, as generate gets the question alone "
                f"there, and {name} reads all tokens. Leave it out, or the drafts ({', '.join(_DRAFTS)})"
            )


class _FromQuestionOn:
    """A streamer that hands on all but the first tokens of a prompt."""

    def __init__(self, streamer: Any, length: int) -> None:
        self.streamer, self.length = streamer, length

    def put(self, value: Any) -> None:
        """Take the prompt, and then each token."""
        if self.length:
            value, self.length = value[..., self.length :], 0
        self.streamer.put(value)

    def end(self) -> None:
        """Take notice of the end."""
        self.streamer.end()
