"""Presses for kvpress that keep keys by leverage or expected scores. Needs kvpress and a transformers it supports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

try:
    import torch
    from kvpress import DMSPress, ScorerPress
    from kvpress.utils import get_prerope_query_states
except ImportError as error:
    raise ImportError(f'this needs kvpress and its dependencies ({error}): pip install "levattn[kvpress]"') from error

from levattn._core.checks import check_epsilon, check_type, whole_number
from levattn.functions import Softmax
from levattn.integrations.transformers.calls import seen_by
from levattn.sensitivity.expected import expected_scores
from levattn.sensitivity.leverage import leverage_scores

__all__ = ["ExpectedPress", "LeveragePress", "universal_press"]


@dataclass
class LeveragePress(ScorerPress):  # type: ignore[misc]
    r"""Score cached keys by their exact leverage scores, in [0, 1].

    The score of a key k is :math:`\max_q \langle q, k\rangle^2 / \sum_l \langle q, k_l\rangle^2` over all queries q.
    The sum is over the cached keys of its head, after rotary embedding. The scores use no sketch, no ridge and no
    random numbers. They do not depend on the scale of the keys, other sequences of the batch or other heads.

    Used alone, this press keeps a fixed number of keys, with the largest scores. Inside `DMSPress` (see
    `universal_press`) it keeps all keys with scores of at least a threshold. Later keys only lower the scores of
    earlier ones, so this set stays a superset of the universal set while tokens are generated.

    Parameters
    ----------
    compression_ratio : float, default 0.0
        Share of the keys to remove, in [0, 1).
    center : bool, default False
        Whether to subtract the mean key first, which does not change softmax. Scores are then no bounds for x².
    sinks : int, default 4
        Number of first keys of each sequence that are kept before all others. Models trained without sink parameters
        use these keys as attention sinks, and fail without them.

    Raises
    ------
    ValueError, TypeError
        If an option is out of range.

    Notes
    -----
    Time O(S d²) a head for S keys, memory O(S). Keys that the layer's mask marks as padding have score 0 and do not
    affect other scores. Unlike `levattn.attention.pruned_attention`, kvpress does not summarize keys, but masks or
    drops them. For softmax there is no guarantee for the dropped keys.

    References
    ----------
    Kannan, Bhattacharyya, Kacham and Woodruff, LevAttention, arXiv:2410.05462, Theorem 1 (the guarantee for x²).

    Examples
    --------
    >>> import torch
    >>> from levattn.integrations.kvpress import LeveragePress
    >>> keys = torch.tensor([[1.0, 0], [0, 1], [0, 1]])[None, None]
    >>> LeveragePress(sinks=0).score(None, None, keys, None, None, {})
    tensor([[[1.0000, 0.5000, 0.5000]]])
    """

    center: bool = False
    sinks: int = 4

    def __post_init__(self) -> None:
        """Check the options."""
        _check_ratio(self.compression_ratio)
        self.sinks = whole_number("sinks", self.sinks, 0)
        check_type("center", self.center, bool, "True or False")

    def score(
        self,
        module: Any,  # noqa: ARG002 (the interface is kvpress's)
        hidden_states: Any,  # noqa: ARG002
        keys: Any,
        values: Any,  # noqa: ARG002
        attentions: Any,  # noqa: ARG002
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the scores of cached keys.

        Parameters
        ----------
        module, hidden_states : object
            Not read.
        keys : torch.Tensor of shape (B, H_kv, S, d)
            Keys of the cache.
        values, attentions : object
            Not read.
        kwargs : dict
            Keyword arguments of the layer; its ``attention_mask`` tells which keys are padding.

        Returns
        -------
        torch.Tensor of shape (B, H_kv, S)
            Scores in float32, on the device of the keys, without gradient.

        Raises
        ------
        TypeError, ValueError
            If the mask has another type or shape.
        NonFiniteError
            If the keys hold NaN or infinity.
        """
        K = keys.detach()
        present = _present(kwargs.get("attention_mask"), K)
        return _with_sinks(leverage_scores(K, center=self.center, mask=present).float(), present, self.sinks)


@dataclass
class ExpectedPress(ScorerPress):  # type: ignore[misc]
    r"""Score cached keys by the expected softmax attention of later queries, in [0, 1].

    Later queries are modeled as normal, with the mean and covariance of the prompt's queries before rotary embedding,
    and at the positions after the prompt. Scores are `levattn.expected_scores` of the softmax itself, with its
    normalizer, averaged over the query heads that share keys. (In contrast, ExpectedAttentionPress of kvpress has the
    expected numerators, by the log-normal mean and an averaged rotation.)

    Parameters
    ----------
    compression_ratio : float, default 0.0
        Share of the keys to remove, in [0, 1).
    horizon : int, default 512
        Number of positions after the prompt, at which queries are drawn.
    samples : int, default 256
        Number of queries drawn for each head.
    sinks : int, default 4
        Number of first keys of each sequence that are kept before all others. The statistics leave out their queries.

    Raises
    ------
    ValueError, TypeError
        If an option is out of range.

    Notes
    -----
    Time O(S (d + `samples`) d) for each query head, in float64 and main memory. The random draws have a fixed seed.
    There is no guarantee for the dropped keys, because the queries of a question may differ from the prompt's.

    References
    ----------
    Devoto, Jeblick and Jégou, "Expected Attention", arXiv:2510.00636.

    Examples
    --------
    >>> from levattn.integrations.kvpress import ExpectedPress
    >>> ExpectedPress(0.5).samples
    256
    """

    horizon: int = 512
    samples: int = 256
    sinks: int = 4

    def __post_init__(self) -> None:
        """Check the options."""
        _check_ratio(self.compression_ratio)
        self.horizon, self.samples = whole_number("horizon", self.horizon), whole_number("samples", self.samples)
        self.sinks = whole_number("sinks", self.sinks, 0)

    def score(
        self,
        module: Any,
        hidden_states: Any,
        keys: Any,
        values: Any,  # noqa: ARG002 (the interface is kvpress's)
        attentions: Any,  # noqa: ARG002
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the scores of cached keys.

        Parameters
        ----------
        module : torch.nn.Module
            The attention layer, with its query projection and its rotary embedding.
        hidden_states : torch.Tensor of shape (B, m, D)
            The layer's input, from which queries are computed.
        keys : torch.Tensor of shape (B, H_kv, S, d)
            Keys of the cache.
        values, attentions : object
            Not read.
        kwargs : dict
            Keyword arguments of the layer; its ``attention_mask`` tells which keys are padding.

        Returns
        -------
        torch.Tensor of shape (B, H_kv, S)
            Scores in float32, on the device of the keys, without gradient.

        Raises
        ------
        TypeError, ValueError
            If the mask has another type or shape.
        NonFiniteError
            If keys or queries hold NaN or infinity.
        """
        K = keys.detach()
        present = _present(kwargs.get("attention_mask"), K)
        Q = get_prerope_query_states(module, hidden_states).detach().double()
        Q = Q * getattr(module, "scaling", Q.shape[-1] ** -0.5)
        m = Q.shape[2]
        mean, covariance = _moments(Q, _present_rows(kwargs.get("attention_mask"), m), self.sinks)
        last = max(K.shape[2], m)  # layers that slide hold fewer keys
        ahead = torch.arange(last, last + self.horizon, device=K.device)[None]
        rotary = tuple(part[0].double() for part in module.rotary_emb(K, ahead))
        groups = Q.shape[1] // K.shape[1]
        total = torch.zeros(K.shape[:3], dtype=torch.float32, device=K.device)
        for i in range(groups):
            known = mean[:, i::groups].cpu().numpy(), covariance[:, i::groups].cpu().numpy()
            total += expected_scores(
                K, known, f=Softmax(), rotary=rotary, mask=present, samples=self.samples, rng=i
            ).float()
        return _with_sinks(total / groups, present, self.sinks)


def _check_ratio(ratio: Any) -> None:
    if not 0 <= ratio < 1:
        raise ValueError(f"compression_ratio is {ratio!r}; expected a number in [0, 1)")


def _with_sinks(scores: Any, present: Any, sinks: int) -> Any:
    """Raise the scores of each sequence's first keys above all others, which are at most 1."""
    if not sinks:
        return scores
    there = torch.ones_like(scores, dtype=torch.bool) if present is None else present.expand(scores.shape)
    first = there & (there.cumsum(-1) <= sinks)
    return torch.where(first, torch.full_like(scores, 2.0), scores)


def _moments(Q: Any, present: Any, sinks: int) -> tuple[Any, Any]:
    """Return mean and covariance of queries (B, H, m, d), without the first of each sequence if there are others."""
    there = torch.ones_like(Q[:, :1, :, 0], dtype=torch.bool) if present is None else present
    later = there & (there.cumsum(-1) > sinks)
    counted = torch.where(later.any(-1, keepdim=True), later, there)
    weights = counted / counted.sum(-1, keepdim=True).clamp(min=1)
    mean = (weights[..., None] * Q).sum(2)
    apart = Q - mean[:, :, None]
    return mean, (weights[..., None] * apart).transpose(2, 3) @ apart


def universal_press(
    epsilon: float, *, sliding_window_size: int = 128, center: bool = False, sinks: int = 4, decoding: bool = False
) -> Any:
    """Return a press that keeps the universal set by threshold, the first keys and the last keys.

    The press keeps every key that some query could give an x²-attention of at least ε among the keys of its head.
    The number of these keys differs from head to head, and is at most d/ε.

    Parameters
    ----------
    epsilon : float in (0, 1]
        The threshold.
    sliding_window_size : int, default 128
        Number of last keys that are kept.
    center, sinks : bool, int
        As in `LeveragePress`.
    decoding : bool, default False
        Whether kvpress scores generated tokens as well. It then shows a press only the new keys; a single new key has
        score 1, so it is kept.

    Returns
    -------
    kvpress.DMSPress
        Use it as ``with universal_press(0.01)(model): ...``. It masks the other keys, as kvpress does for sizes that
        differ between heads, so no memory is freed.

    Raises
    ------
    TypeError, ValueError
        If an option is out of range.

    Notes
    -----
    Time as for `LeveragePress`.

    References
    ----------
    Kannan, Bhattacharyya, Kacham and Woodruff, LevAttention, arXiv:2410.05462, Theorem 1.

    Examples
    --------
    >>> from levattn.integrations.kvpress import universal_press
    >>> universal_press(0.01).threshold
    0.01
    """
    return DMSPress(
        press=LeveragePress(center=center, sinks=sinks),
        threshold=check_epsilon(epsilon),
        sliding_window_size=whole_number("sliding_window_size", sliding_window_size, 0),
        decoding=decoding,
    )


def _present(mask: Any, K: Any) -> Any:
    """Return which keys are not padding, (B, 1, S), or None for all: the keys that the last query may see.

    Layers that slide hold the last of the keys that have a column in the mask.
    """
    if mask is None:
        return None
    S = K.shape[2]
    seen = seen_by(mask, S)
    present = seen[:, None, -S:] if seen.ndim == 2 else seen[:, -1:, -S:]
    return None if bool(present.all()) else present


def _present_rows(mask: Any, m: int) -> Any:
    """Return which of the last m positions, at which the queries are, hold no padding: (B, 1, m), or None for all."""
    if mask is None:
        return None
    seen = seen_by(mask, m)[..., -m:]  # a window hides earlier positions from the last query, none from itself
    if seen.ndim == 3:
        square = seen.shape[1] == m  # rows of padding see nothing, or in some versions everything
        seen = seen.diagonal(dim1=1, dim2=2) & ~seen.triu(1).any(-1) if square else seen[:, -1]
    return None if bool(seen.all()) else seen[:, None]
