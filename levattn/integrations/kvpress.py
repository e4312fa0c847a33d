"""Presses of kvpress that keep keys by leverage or expected scores. Needs kvpress and a transformers that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

try:
    import torch
    from kvpress import DMSPress, ScorerPress
    from kvpress.utils import get_prerope_query_states
except ImportError as error:
    raise ImportError(f'this needs kvpress and its dependencies ({error}): pip install "levattn[kvpress]"') from error

from levattn._core.checks import check_type, whole_number
from levattn.functions import Softmax
from levattn.integrations.transformers.masks import seen_by
from levattn.sensitivity.expected import expected_scores
from levattn.sensitivity.leverage import check_epsilon, leverage_scores

__all__ = ["ExpectedPress", "LeveragePress", "universal_press"]


@dataclass
class LeveragePress(ScorerPress):  # type: ignore[misc]
    r"""Scores cached keys by their exact leverage scores, in [0, 1].

    The score of a key k is :math:`\max_q \langle q, k\rangle^2 / \sum_l \langle q, k_l\rangle^2` over all queries,
    where the sum is over the keys of its head in the cache, as they enter the attention (after rotary embedding). No
    sketch, no ridge, no random numbers: the scale of the keys, other sequences of the batch and other heads make no
    difference.

    As a press of a fixed size it keeps the keys of largest scores; inside `DMSPress` (see `universal_press`) those
    of at least a threshold. Keys that come later only lower the scores of those before, so a set by threshold stays a
    superset of the universal set while tokens are generated.

    Parameters
    ----------
    compression_ratio : float, default 0.0
        Share of the keys to remove, in [0, 1).
    center : bool, default False
        Whether the mean key is taken away first, which softmax does not see. Scores are then no bounds for x².
    sinks : int, default 4
        First keys of each sequence that are kept before all others: models that are trained without sink parameters
        use them as such, and fail without.

    Raises
    ------
    ValueError, TypeError
        If an option is out of range.

    Notes
    -----
    Time O(S d²) a head for S keys, memory O(S). Padded keys, by the mask that the layer was given, take no part in the
    scores and have score 0. kvpress masks or drops keys; nothing is summarized as in
    `levattn.attention.pruned_attention`, and for softmax there is no guarantee for what is dropped.

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
            What the layer was called with; its ``attention_mask`` tells which keys are padding.

        Returns
        -------
        torch.Tensor of shape (B, H_kv, S)
            In float32, on the device of the keys, without gradient.

        Raises
        ------
        TypeError, ValueError
            If the mask is of another kind or shape.
        NonFiniteError
            If the keys hold NaN or infinity.
        """
        K = keys.detach()
        present = _present(kwargs.get("attention_mask"), K)
        return _with_sinks(leverage_scores(K, center=self.center, mask=present).float(), present, self.sinks)


@dataclass
class ExpectedPress(ScorerPress):  # type: ignore[misc]
    r"""Scores cached keys by the softmax attention that later queries are expected to give them, in [0, 1].

    Queries are taken to be normal, with the mean and covariance of those of the prompt before rotary embedding, and at
    the positions that follow. Scores are `levattn.expected_scores` of the softmax itself, with its normalizer, in the
    mean over the heads of queries that share keys. (kvpress's ExpectedAttentionPress has the expected numerators, by
    the log-normal mean and an averaged rotation.)

    Parameters
    ----------
    compression_ratio : float, default 0.0
        Share of the keys to remove, in [0, 1).
    horizon : int, default 512
        Positions to come, from which queries are drawn.
    samples : int, default 256
        Queries that are drawn for each head.
    sinks : int, default 4
        First keys of each sequence that are kept before all others; their queries are left out of the statistics.

    Raises
    ------
    ValueError, TypeError
        If an option is out of range.

    Notes
    -----
    Time O(S (d + `samples`) d) for each head of queries, in float64 and main memory. Draws have a fixed seed. There is
    no guarantee for what is dropped: queries of a question need not be like those of the prompt.

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
            The layer of attention, with its projection of queries and its rotary embedding.
        hidden_states : torch.Tensor of shape (B, m, D)
            What the layer read; queries are made of it.
        keys : torch.Tensor of shape (B, H_kv, S, d)
            Keys of the cache.
        values, attentions : object
            Not read.
        kwargs : dict
            What the layer was called with; its ``attention_mask`` tells which keys are padding.

        Returns
        -------
        torch.Tensor of shape (B, H_kv, S)
            In float32, on the device of the keys, without gradient.

        Raises
        ------
        TypeError, ValueError
            If the mask is of another kind or shape.
        NonFiniteError
            If keys or queries hold NaN or infinity.
        """
        K = keys.detach()
        present = _present(kwargs.get("attention_mask"), K)
        Q = get_prerope_query_states(module, hidden_states).detach().double()
        Q = Q * getattr(module, "scaling", Q.shape[-1] ** -0.5)
        mean, covariance = _moments(Q, present, self.sinks)
        ahead = torch.arange(K.shape[2], K.shape[2] + self.horizon, device=K.device)[None]
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
    """Return scores with the first keys of each sequence above every other, which is at most 1."""
    if not sinks:
        return scores
    there = torch.ones_like(scores, dtype=torch.bool) if present is None else present.expand(scores.shape)
    first = there & (there.cumsum(-1) <= sinks)
    return torch.where(first, torch.full_like(scores, 2.0), scores)


def _moments(Q: Any, present: Any, sinks: int) -> tuple[Any, Any]:
    """Return mean and covariance of queries (B, H, m, d), the first of each sequence left out if there are others."""
    m = Q.shape[2]
    there = torch.ones(Q.shape[0], 1, m, dtype=torch.bool, device=Q.device) if present is None else present[..., -m:]
    later = there & (there.cumsum(-1) > sinks)
    counted = torch.where(later.any(-1, keepdim=True), later, there)
    weights = counted / counted.sum(-1, keepdim=True).clamp(min=1)
    mean = (weights[..., None] * Q).sum(2)
    apart = Q - mean[:, :, None]
    return mean, (weights[..., None] * apart).transpose(2, 3) @ apart


def universal_press(
    epsilon: float, *, sliding_window_size: int = 128, center: bool = False, sinks: int = 4, decoding: bool = False
) -> Any:
    """Return a press that keeps the universal set by threshold, the first keys and the last ones.

    Every key that any query could give an x²-attention of at least ε, among the keys of its head, is kept; how many
    that are differs from head to head, and is at most d/ε.

    Parameters
    ----------
    epsilon : float in (0, 1]
        The threshold.
    sliding_window_size : int, default 128
        Last keys that are kept.
    center, sinks : bool, int
        As in `LeveragePress`.
    decoding : bool, default False
        Whether kvpress scores generated tokens as well. It shows a press only the new keys then, among which a single
        one has score 1, so that they are kept.

    Returns
    -------
    kvpress.DMSPress
        To be used as ``with universal_press(0.01)(model): ...``. It masks what it does not keep (kvpress's way for
        sizes that differ between heads), so that no memory is freed.

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
    """Return which keys are no padding, (B, 1, S), or None for all: those that the last query may see."""
    if mask is None:
        return None
    S = K.shape[2]
    seen = seen_by(mask, S)
    present = seen[:, None, -S:] if seen.ndim == 2 else seen[:, -1:, :S]
    return None if bool(present.all()) else present
