"""Read a context once, and keep as much of it as its budget allows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral, Real
from statistics import median
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from levattn._core.blas import side_by_side
from levattn._core.checks import whole_number
from levattn._core.threads import reported
from levattn.attention import Selection
from levattn.attention.pruned.baselines import baseline_of
from levattn.exceptions import ResidualWarning
from levattn.integrations.transformers.calibration import Calibration
from levattn.integrations.transformers.calls import as_cache_of
from levattn.integrations.transformers.compression import slots
from levattn.integrations.transformers.compression.cache import (
    CompressedCache,
    check_padding,
    token_positions,
    tokens_and_present,
)
from levattn.integrations.transformers.compression.coding import (
    check_bits,
    columns_nbytes,
    position_nbytes,
    positions_of_one,
    slot_nbytes,
)
from levattn.integrations.transformers.compression.files import Origin, changing_positions
from levattn.integrations.transformers.compression.layer import CompressedLayer, Renewal, seen_by_layer
from levattn.integrations.transformers.compression.observed import scores_of
from levattn.integrations.transformers.compression.profile import CACHE, HeadSelections, profile_for
from levattn.integrations.transformers.compression.references import References, counted
from levattn.integrations.transformers.compression.rotation import FixedError, rotations
from levattn.integrations.transformers.compression.stand_in import UnreadError
from levattn.integrations.transformers.interface import check_model

_LEARNED = ("embed_positions", "position_embeddings", "wpe")  # modules with a weight for each position
_FEW = 0.1  # a share of the bytes below which codes have 4 bits: more slots are then worth more than finer ones
_MANY = 6  # heads that are cut, of which one can be an outlier
_LARGE, _FAR = 0.8, 4  # a residual beyond this, and beyond so many times the median, is an outlier
_ASKING = 2048  # at least so many queries score the keys of a head, if the context has more


def compress(
    model: Any,
    context: Any,
    selection: Any = 0.25,
    *,
    heads: Any = None,
    references: Any = None,
    bits: int | None = None,
    chunk: int | None = None,
    progress: bool | Callable[[int, int | None], None] | None = None,
) -> CompressedCache:
    """Read a context with a decoder, and keep a share of the keys and values of each head.

    The model reads the context with its own attention. Then each head of the keys keeps all of them, or fewer slots.
    The slots are the first positions, the last positions, and the positions that queries attend to most. Least
    squares fit a weight and a value of each slot (`levattn.attention.fit_slots`), so that these queries get the
    outputs that all keys give them. The function takes queries of the second half of the context, as they would be
    right after it. With rotary positions a rotation moves a query there, and its angles are measured on the model. (A
    chunk takes the queries of its own second half, moved behind it.) Nothing is trained, no question is known yet, and
    nothing is read twice.

    Without a fit, slots are the first and the last positions, positions selected by scores, and summaries. A summary
    stands for a cluster of the other keys, and its weight is added to its logit. The queries of the context give the
    scores: keys that a summary would represent badly are selected (as `levattn.attention.pruned_attention` does with
    "residual").

    **Guarantee.** Heads whose budget is 1.0 keep everything: if all do, answers equal the answers of a dense cache.
    Each sequence of a padded batch is compressed as it would be alone. If the slots of a head are fitted, its output
    stays in the ball that holds its values, whatever the question. Rounding to `bits` may move an entry by half of a
    step. A step is the range of a block of entries over :math:`2^{bits} - 1`, and at most 2⁻⁷ of the range and of the
    largest entry more. A block is 32 entries of a row (4 bits) or 256 (8 bits). Any other loss is measured, not
    bounded, and questions unlike the text may lose more: `head_profile` measures which heads may be cut. With one
    budget for all heads, decoders fail to recall facts of the context.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder, which stays as it is.
    context : tensor of shape (B, P), or mapping
        Tokens, or the output of a tokenizer: ``input_ids`` and ``attention_mask``, 0 for padding on either side. With
        rotary positions, nothing is raised for a context, or a question after it, beyond the
        ``max_position_embeddings`` of the config. Such models then read worse than their context allows.
    selection : Selection, number or mapping, default 0.25
        The slots of each head. A float is a share of the bytes of a dense cache, of all layers that do not slide. An
        int is a number of slots. A mapping from (layer, head) names the heads to cut; the others keep everything. A
        `Calibration` is such a mapping. Without further options a head keeps the first position, and a quarter of its
        other slots are the last positions. If slots are not fitted, the first 4 are kept, and half are summaries, at
        most 256 of a head and chunk. Scores of your own are a function here, of keys, values and perhaps queries.

        The names of published rules, such as ``Selection(0.25, scores="snapkv")``, are baselines. Their slots are the
        keys of the context as they are, in the dtype of the model, so a share is one of the positions. `references`
        and `bits`, if they are given, apply to them too. In chunks, the queries of a chunk score its keys.

        A head that has ``summaries`` is not fitted, nor is any with ``renew_every``. With ``renew_every`` the cache
        holds so many positions after the context in full, before it compresses them as well. A head that is cut then
        keeps its number of slots. The queries so far choose among its slots and the new keys, the last positions stay,
        and summaries stand for the others. So a long conversation stays in bounded memory, but for heads that keep
        everything. In a batch, `CompressedCache.ask` does it between questions, as rows may end early.
    heads : HeadProfile or str, optional
        The cost of cutting each head, which decides how the budget is split. "auto" is the profile of this model that
        comes with levattn or lies in your folder (`HeadProfile.find`), and another text the name of one. Without it
        all heads have the same share.
    references : str, mapping, or tensor of shape (1 or B, R), optional
        The queries that slots are fitted to. "own" are the queries of the context, and "none" is no fit. By default
        slots are fitted to "own" if the model and the selection allow it. Tokens, which may be the output of a
        tokenizer, are read after the context and forgotten. Their queries count beside the own ones: questions like
        those to come, for example. "repeat" stands for the tokens of the context. A model without rotary positions is
        fitted to the tokens alone.
    bits : int, optional
        Bits of an entry of the keys and values in slots: 4, 8, or 16 for the dtype of the model. By default 4 if
        `selection` is one share below a tenth, 16 with a published rule, and 8 otherwise. With 4 or 8 bits a share is
        one of the bytes of a dense cache of 16 bits, whatever the dtype. Scales and weights of the slots count. (In a
        head that keeps all positions, two numbers for each column do not.) So there are three times, or nearly twice,
        as many slots in the same bytes. Weights and values are fitted to the keys as they are held. Heads with the
        budget 1.0 and later positions stay in the dtype of the model.
    chunk : int, optional
        Positions that the model reads at once, all of them if None. Each chunk is compressed before the model reads
        the next, so that no more than a chunk is held in full. Later chunks then attend to the slots of earlier ones.
        Numbers of slots are split over the chunks, and each chunk has its own last positions.
    progress : bool or function, optional
        True for a bar, or a function of the positions read and their number.

    Returns
    -------
    CompressedCache
        The cache: ``cache.ask(model, question, max_new_tokens=50)`` answers a question on the context.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range, or `heads` is "auto" and no profile fits, unless nothing is cut. If the model
        is pruned or extended, keeps no cache, is not causal, or has attention that `prune` refuses. If random numbers
        renew slots of fewer than 16 bits. If its layers keep latents or states, or compute more than the attention
        "sdpa" does. If its positions are learned, and the context has more. If padding follows tokens, and layers
        slide. If
        `references` are given with summaries or ``renew_every``, or for a model that bounds its logits or has angles
        that depend on the length. If "own" is given for a model without rotary positions. If tokens are given, and the
        context is read in chunks, or layers slide.

    Warns
    -----
    RecallWarning
        If all heads are cut alike, because there is no profile of them.
    ProfileWarning
        If `heads` was measured on other weights.
    ResidualWarning
        If one of six or more heads that are cut has a residual of more than 0.8, and of more than four times the
        median.

    Notes
    -----
    Layers that slide keep their window, which the budget does not count. Time: reading the context. A
    head with s slots takes O(m n d + m² s) for m queries, 480 or 96 of each head of
    queries. (Without a fit O(n r d) for r summaries.)
    Memory: the slots and one layer (or with `chunk` the chunk) in full.

    On SmolLM2, a second reading of the context gives no better queries than its own ones do ("repeat"). Queries that
    are not moved give far worse slots than none.

    References
    ----------
    The fit: Zweiger, Fu, Guo and Kim, "Fast KV Compaction via Attention Matching", arXiv:2602.16284, who read
    references after the context. Queries that are moved are an own construction. Summaries are those of
    `levattn.attention.pruned_attention`. That few heads recall: Xiao et al., "DuoAttention", arXiv:2410.10819.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from levattn.integrations.transformers import compress
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=50, eos_token_id=None)
    >>> model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
    >>> cache = compress(model, torch.arange(40)[None], {(0, 0): 0.25})
    >>> [row["slots"] for row in cache.table()]
    [10.0, 40.0, 40.0, 40.0]
    """
    tokens, present = tokens_and_present("context", context)
    check_model(model)
    bits = _bits_of(selection, bits)
    _check(model, present, chunk)
    P = tokens.shape[1]
    chunk = P if chunk is None else min(P, whole_number("chunk", chunk))
    layers = _empty_layers(model)
    sliding = {number for number, layer in enumerate(layers) if layer.is_sliding}
    gain = positions_of_one(_width(model), bits)
    profile = profile_for(model, heads, selection, CACHE)
    of_heads = HeadSelections.of(selection, profile, set(range(len(layers))) - sliding, sliding, gain)
    of_heads.check_codes(bits)
    cache = CompressedCache(layers, tokens, present, Origin(model))
    cache.origin.check_attention()  # now: masks of flex attention take seconds to compile
    base = model.base_model
    check_padding(model, layers, present)
    # out of inference mode, so that gradients may read the slots
    with torch.inference_mode(mode=False), torch.no_grad(), reported(progress, P, "positions") as advance:
        fit = _references(model, references, cache, of_heads, chunk)
        keeper = _Keeper(cache, of_heads, fit, bits, rules=references is not None)
        if fit is not None and fit.tokens.shape[1]:
            tokens, present = torch.cat([tokens, fit.tokens], 1), torch.cat([present, fit.present], 1)
            _check(model, present, None, "context and references have")
        positions = token_positions(model, present)
        for first in range(0, P, chunk):
            last = min(first + chunk, P)
            end = last if last < P else tokens.shape[1]  # references are read with the last positions
            inputs: dict[str, Any] = {"input_ids": tokens[:, first:end], "use_cache": True}
            if not bool(present.all()):
                inputs["attention_mask"] = present[:, :end].long()
            if positions is not None:
                inputs["position_ids"] = positions[:, first:end]
            try:
                with keeper.reading(model, first, last):
                    base(**inputs, **as_cache_of(base, cache))
            except UnreadError as error:
                raise ValueError(f"{type(model).__name__}: {error}") from error
            advance(last - first)
        keeper.close()
    _tell_of_outliers(cache)
    return cache


def _tell_of_outliers(cache: CompressedCache) -> None:
    """Warn of heads whose outputs err much on queries that were not fitted, and far more than other heads do."""
    cut = [row for row in cache.table() if "residual" in row and row["slots"] < cache.context_length]
    rows = [row for row in cut if row["residual"] > 0]
    usual = median(row["residual"] for row in rows) if rows else 0.0
    far = [row for row in rows if row["residual"] > max(_LARGE, _FAR * usual)] if len(rows) >= _MANY else []
    if far:
        worst = max(far, key=lambda row: float(row["residual"]))
        warnings.warn(
            f"{len(far)} of {len(rows)} heads that are cut lose far more than the others on queries that were not "
            f"fitted: the outputs of head {worst['head']} of layer {worst['layer']} err by {worst['residual']:.0%} of "
            f"their size, and by {usual:.0%} in the median. Give them more slots; cache.table() has all residuals",
            ResidualWarning,
            stacklevel=3,
        )


def _references(
    model: Any, references: Any, cache: CompressedCache, of_heads: HeadSelections, chunk: int
) -> References | None:
    """Return the tokens and rotations for a fit, or None for no fit; raise if references are given in vain."""
    P, text = cache.tokens.shape[1], isinstance(references, str)
    if text and references not in ("own", "repeat", "none"):
        raise ValueError(f"references is {references!r}; expected 'own', 'repeat', 'none', tokens, or None")
    if text and references == "none":
        return None
    found = References.of("own" if references is None else references, cache.tokens, cache.present, None)
    cut = [selection for selection in of_heads.distinct() if selection.budget != 1.0]
    if not cut or (references is None and all(baseline_of(selection.scores) for selection in cut)):
        return None
    own, reason = references is None or (text and references == "own"), _unfitted(model, of_heads, references)
    if reason is None and not own and (chunk < P or any(layer.is_sliding for layer in cache.layers)):
        reason = f"reads chunks of {chunk} positions" if chunk < P else "has layers that slide"
    if reason is None:
        try:
            return replace(found, rotations=rotations(model, _empty_layers(model), cache.origin, P))
        except FixedError as error:
            if not (own or error.always):
                return found
            reason = str(error)
    if references is None:
        return None
    shown = repr(references) if text else "tokens"
    raise ValueError(f"references are {shown}, and {type(model).__name__} {reason}; expected none. Leave them out")


def _unfitted(model: Any, of_heads: HeadSelections, references: Any) -> str | None:
    """Return why no slots can be fitted, or not all of them if references are given; or None."""
    kind = changing_positions(model)
    if kind is not None:
        return f"has rotary positions ({kind!r}) that change with the length of the context"
    for own in of_heads.distinct():
        if own.budget != 1.0 and own.renew_every is not None:
            return f"renews its slots every {own.renew_every} positions, but a fit is made once"
        if own.budget != 1.0 and own.summaries and references is not None:
            return f"keeps summaries={own.summaries} of a head, but slots that are fitted are keys"
    return None


def _check(model: Any, present: Any, chunk: int | None, what: str = "context has") -> None:
    """Raise for a model that is no decoder, or whose positions allow no such context or no chunks."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None  # without the part that reads images
    kinds = ("is_causal", "is_decoder")  # attributes of modules of attention, by version and family
    causal = [
        getattr(module, kind) for module in (decoder or model).modules() for kind in kinds if hasattr(module, kind)
    ]
    if getattr(model.config, "is_encoder_decoder", False) or not all(causal):
        raise ValueError(f"{name} is no decoder; expected one that keeps a cache, e.g. Llama or Qwen")
    if getattr(config, "is_causal", None) is False:  # later tokens change the keys of earlier ones
        raise ValueError(
            f"the config of the {name} has is_causal=False, so each token sees all others; expected a causal decoder. "
            "Set model.config.is_causal = True"
        )
    most, longest = getattr(config, "max_position_embeddings", None), int(present.sum(1).max())
    for where, module in model.named_modules():
        learned = where.rpartition(".")[2] in _LEARNED and isinstance(module, torch.nn.Embedding)
        if learned and most is not None and longest > most:
            raise ValueError(
                f"{what} {longest} tokens; expected at most max_position_embeddings={most}, as {where} of the "
                f"{name} has no more positions. Give a shorter context"
            )
    kind = changing_positions(model)
    if kind is not None and chunk is not None:  # keys of early positions depend on how many positions follow
        raise ValueError(
            f"chunk was given for a {name}, whose rotary positions ({kind!r}) change with the length of the context; "
            "expected None. Read the context at once"
        )


def _empty_layers(model: Any) -> list[Any]:
    """Return the layers of a cache of a model, or raise if a layer keeps anything but keys and values."""
    layers: list[Any] = DynamicCache(config=model.config).layers
    for number, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise _without_keys(model, number)
    return [layer if layer.is_sliding else CompressedLayer(number) for number, layer in enumerate(layers)]


def _bits_of(selection: Any, bits: Any) -> int:
    """Return the bits of an entry, which are fewer by default where a share of the bytes leaves few slots."""
    if bits is not None:
        return check_bits("bits", bits)
    selection = selection.selections() if isinstance(selection, Calibration) else selection
    several = selection.values() if isinstance(selection, Mapping) else [selection]
    if any(isinstance(each, Selection) and baseline_of(each.scores) for each in several):
        return 16
    budget = selection.budget if isinstance(selection, Selection) else selection
    share = 1.0 if isinstance(budget, Integral) or not isinstance(budget, Real) else float(budget)
    return 4 if share < _FEW else 8


def _width(model: Any) -> int:
    """Return the width of the keys of a decoder, as its config tells it."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "is_heterogeneous", False):  # the last layer does not slide where others do
        config = config.per_layer_config[config.num_hidden_layers - 1]
    width = getattr(config, "head_dim", None)
    if width is None:
        width = getattr(config, "hidden_size", 64) // max(1, getattr(config, "num_attention_heads", None) or 1)
    return max(1, int(width))


def _in_batches(k: Any) -> bool:
    """Return whether heads that are alike are kept in one batch, which a device needs, or side by side on threads.

    In main memory one head's matrices fill the cores. On a device torch's linear algebra fails where threads begin it
    together (pytorch issue 90613).
    """
    return bool(k.device.type != "cpu")


def _without_keys(model: Any, number: int) -> ValueError:
    return ValueError(
        f"layer {number} of {type(model).__name__} keeps no keys and values of its own; expected layers that "
        "keep them, of all positions or of a window. Such models cannot be compressed"
    )


class _Keeper:
    """Keeps the slots of each layer, while the model reads a context chunk by chunk."""

    def __init__(
        self, cache: CompressedCache, of_heads: HeadSelections, fit: References | None, bits: int, *, rules: bool
    ) -> None:
        self.cache, self.of_heads, self.renew_every = cache, of_heads, of_heads.renew_every()
        self.present = cache.present.cpu()  # each number that a layer asks of a device waits for it
        self.fit, self.bits, self.rules = fit, bits, rules  # whether slots of published rules are fitted too
        self.layers = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
        self.found: dict[int, tuple[slots.HeadSlots, ...]] = {}  # slots of layers that read the chunk
        self.seen: dict[int, list[slots.Seen]] = {}  # of layers that will renew their slots
        self.first, self.last = 0, 0
        for layer in self.layers:
            layer.look = self._look

    @contextmanager
    def reading(self, model: Any, first: int, last: int) -> Iterator[None]:
        """Keep the slots of the positions from `first` to `last`, which the model reads in the block."""
        self.first, self.last = first, last
        try:
            yield
        except AttributeError as error:
            if error.obj is not self.cache:
                raise
            # a layer of states asks the cache for what no layer of keys has
            read = (number for number, layer in enumerate(self.cache.layers) if number not in self.found)
            raise _without_keys(model, next(read, 0)) from error
        for number, layer in enumerate(self.cache.layers):
            if number in self.found:
                layer.keep(self.found.pop(number), self.cache.present[:, :last])
            if layer.get_seq_length() != last or getattr(layer, "fresh", 0):
                raise _without_keys(model, number)
            if layer.is_sliding:  # frees the array of all positions, as the window is a view of it
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    def _look(self, number: int, q: Any, k: Any, v: Any, scale: float, softcap: float | None) -> None:
        """Keep the slots of a layer for the chunk that the model reads."""
        layer = self.cache.layers[number]
        groups = self._kept(number, q * scale, k, v, softcap)
        if layer.groups:
            groups = tuple(slots.appended(a, b) for a, b in zip(layer.groups, groups, strict=True))
        if self.last == self.cache.context_length:
            own = self.of_heads.of_layer(number, k.shape[1])
            whole = [own[group.heads[0]].budget == 1.0 for group in groups]
            groups = tuple(group.coded(16 if same else self.bits) for group, same in zip(groups, whole, strict=True))
        self.found[number] = groups
        if self.renew_every is not None:
            here = self.cache.present[:, self.first : self.last]
            self.seen[number] = seen_by_layer(q * scale, k, here, _ASKING, self.seen.get(number))

    def close(self) -> None:
        """Let the layers be read, as the whole context is there."""
        for layer in self.layers:
            layer.look = None
            if self.renew_every is not None:
                own = self.of_heads.of_layer(layer.number, sum(len(group.heads) for group in layer.groups))
                coded = {head for number, head in self.of_heads.whole if number == layer.number}
                whole = coded | {head for head, selection in enumerate(own) if selection.budget == 1.0}
                held = torch.stack([slots.slot_counts(group) for group in layer.groups])
                splits = tuple(slots.Split.of(own[group.heads[0]]) for group in layer.groups)
                layer.renewal = Renewal(self.renew_every, splits, frozenset(whole), self.seen[layer.number], held)

    def _kept(self, number: int, q: Any, k: Any, v: Any, softcap: float | None) -> tuple[slots.HeadSlots, ...]:
        """Return the slots of all heads of a layer, in a group for each selection."""
        (B, G), q = k.shape[:2], q.unflatten(1, (k.shape[1], -1))
        own = self.of_heads.of_layer(number, G)
        alike = {same: tuple(head for head in range(G) if own[head] == same) for same in dict.fromkeys(own)}
        ranked = sorted(alike, key=lambda same: (same.budget or 0.0) % 1, reverse=True)  # slow heads first
        batched = _in_batches(k)
        together = (
            [alike[same] for same in ranked] if batched else [(head,) for same in ranked for head in alike[same]]
        )
        jobs = [(b, heads) for heads in together for b in range(B)]
        found: dict[tuple[int, int], slots.SlotArrays] = {}
        errors = torch.zeros((B, G))
        scores = [self._scores(b, own, q[b], k[b], v[b], softcap) for b in range(B)]

        def keep(i: int) -> None:
            b, heads = jobs[i]
            given = [scores[b][head] for head in heads if head in scores[b]]
            arrays = (array[b, list(heads)] if batched else array[b, heads[0] : heads[0] + 1] for array in (q, k, v))
            kept, error = self._of_sequence(number, b, own[heads[0]], torch.cat(given) if given else None, *arrays)
            for j, head in enumerate(heads):
                found[b, head] = slots.of_head(kept, j)
                errors[b, head] = error[j]
            # other scores are finite
            none = slots.without_weight(kept) if given and bool(self.present[b, self.first : self.last].any()) else []
            if none:
                raise ValueError(
                    f"scores of head {heads[none[0]]} of layer {number} are -inf for all keys of row {b}; expected a "
                    "number for one key at least"
                )

        side_by_side(keep, len(jobs), threads=1 if batched else None)
        groups = []
        for heads in alike.values():
            parts = [slots.together([found[b, head] for head in heads]) for b in range(B)]
            group = slots.padded_together(heads, parts)
            if self.fit is not None:
                group = replace(group, residuals=errors[:, list(heads)])
            groups.append(group)
        return tuple(groups)

    def _scores(self, b: int, own: list[Selection], q: Any, k: Any, v: Any, softcap: float | None) -> dict[int, Any]:
        """Return the scores (1, n) of the keys of each head of a sequence that has a function or a published rule.

        Heads of a layer with the same scores are scored together, and threads run no code of a user.
        """
        found: dict[int, Any] = {}
        of: dict[Any, tuple[Any, list[int]]] = {}  # by name, or by identity: functions need not be hashable
        for head, selection in enumerate(own):
            if callable(selection.scores) or baseline_of(selection.scores):
                scores = selection.scores
                of.setdefault(scores if isinstance(scores, str) else id(scores), (scores, []))[1].append(head)
        here = self.present[b, self.first : self.last]
        for scores, heads in of.values():
            if bool(here.any()) and any(own[head].budget != 1.0 for head in heads):
                rows = here.nonzero()[:, 0].to(k.device)
                Q, K, V = q[heads][:, :, rows], k[heads][:, rows], v[heads][:, rows]
                each = scores_of(scores, Q, K, V, softcap)
                found |= {head: each[i : i + 1] for i, head in enumerate(heads)}
        return found

    def _of_sequence(
        self, number: int, b: int, selection: Selection, scores: Any, Q: Any, K: Any, V: Any
    ) -> tuple[slots.SlotArrays, Any]:
        """Return keys, values, log-weights and places that heads of a sequence keep, and the residuals of their fits.

        `Q`: (h, g, n, d). `K`, `V`: (h, n, ·). `scores`: (h, n) of a function or a published rule, or None.
        """
        here, before = self.present[b, self.first : self.last], int(self.present[b, : self.first].sum())
        later = Q[:, :, len(here) :], K[:, len(here) :]
        Q, K, V = Q[:, :, : len(here)], K[:, : len(here)], V[:, : len(here)]
        if not bool(here.all()):
            here = here.to(K.device)
            Q, K, V = Q[:, :, here], K[:, here], V[:, here]
        n, widths, own = K.shape[1], (K.shape[2], V.shape[2]), K.element_size()
        chunk, of = range(before, before + n), int(self.present[b].sum())
        fit = None if selection.summaries or (baseline_of(selection.scores) and not self.rules) else self.fit
        split = slots.Split.of(selection if fit is None else replace(selection, summaries=0)).of_chunk(chunk, of)
        position = position_nbytes(widths, own, self.bits)
        weighted = bool(split.summaries) or fit is not None
        slot, unweighted = (slot_nbytes(widths, own, self.bits, weight=weight) for weight in (weighted, False))
        columns = columns_nbytes(widths, self.bits) / max(1, of)  # for each position
        budget, factor = selection.budget, position / slot
        whole = budget == 1.0
        if isinstance(budget, float):
            whole = whole or budget * position >= unweighted * (1 - 1e-9)
            factor = max(0.0, position - columns / budget) / slot
        count = n if whole else split.slots(selection, chunk, of, factor)
        if count == n and (fit is None or self.bits == 16 or budget == 1.0):
            places = torch.arange(before, before + n, dtype=torch.int32, device=K.device)
            return (K.clone(), V.clone(), None, places.expand(K.shape[:2])), torch.zeros(len(K))
        if fit is not None:
            how = counted(selection, split, count, scores)
            (*kept, where), error = fit.slots_of(number, b, (Q, K, V), later, how, self.bits)
            keys, values, weight = kept
            return (keys, values, None if count == n else weight, torch.where(where < 0, where, where + before)), error
        step = max(1, Q.shape[1] * n // _ASKING)
        seen = slots.Seen.of(Q[:, :, ::step].flatten(1, 2), K)
        return slots.slots_of(seen, K, V, count, split, before, given=scores), torch.full((len(K),), math.nan)
