"""Memberships dilute: what is left of the heads' preferences after t tokens.

Tokens are standard normal, those of each head by themselves, so nothing distinguishes them but chance. Of each draw
and form it is computed, at each place, the mean logit over the heads, and h·max|Π − 1/h|, how far a token is from
being shared out evenly; means over the draws are shown, and where nine tenths of the latter lie.

    python examples/tost/dilution.py [--quick] [--heads 12] [--channels 64] [--draws 32] [--out build/tost]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from _recipe import arguments, pyplot, save, table
from scipy.signal import lfilter

from levattn.attention import TokenForm, memberships

PLACES = (16, 256, 1024, 4095)  # places begin with 0, so that place t sees t + 1 tokens
RATE = 0.99  # of the decay: sums over about a hundred tokens

# Of Okabe and Ito; the dashes tell the curves apart as well.
STYLES: dict[str, tuple[str, Any]] = {
    "released": ("#0072B2", "-"),
    "mean, θ = 1": ("#D55E00", "-."),
    "mean, θ = 1/√d": ("#009E73", "--"),
    f"decay {RATE}": ("#CC79A7", (0, (5, 1))),
}


def options(channels: int) -> dict[str, dict[str, Any]]:
    """Return the temperature and the fields of each `levattn.attention.TokenForm`, and what its logits are made of."""
    return {
        "released": {"temperature": 1.0},
        "mean, θ = 1": {"temperature": 1.0, "normalize": "mean"},
        "mean, θ = 1/√d": {"temperature": channels**-0.5, "normalize": "mean"},
        f"decay {RATE}": {"temperature": 1.0, "decay": RATE},
    }


def logits(
    W: npt.NDArray[np.float64], temperature: float, normalize: str = "sum", decay: float = 1.0
) -> npt.NDArray[np.float64]:
    """Return the logits (h, T) of causal tokens (h, T, d), by their definition."""
    X = W**2
    seen, count = (lfilter([1.0], [1.0, -decay], each, axis=-2) for each in (X, np.ones((X.shape[1], 1))))
    scores = (X / seen).sum(-1)
    return temperature * (scores * count[:, 0] if normalize == "mean" else scores)


def measured(W: npt.NDArray[np.float64], options: dict[str, Any]) -> npt.NDArray[np.float64]:
    """Return the mean logit, and h·max|Π − 1/h|, at each place, (2, T)."""
    options = dict(options)
    temperature = options.pop("temperature")
    P = memberships(W, temperature, form=TokenForm(**options))
    uneven = np.abs(len(W) * P - 1).max(axis=0)
    return np.stack([logits(W, temperature, **options).mean(axis=0), uneven])


def whole(tokens: int, channels: int, heads: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return the least and the largest h·Π of tokens that see all others."""
    P = heads * memberships(rng.standard_normal((heads, tokens, channels)), causal=False)
    return float(P.min()), float(P.max())


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(given)
    draws = 4 if chosen.quick else chosen.draws
    rng = np.random.default_rng(chosen.seed)
    forms = options(chosen.channels)
    tokens = max(PLACES) + 1
    curves = {name: np.empty((draws, 2, tokens)) for name in forms}
    for i in range(draws):
        W = rng.standard_normal((chosen.heads, tokens, chosen.channels))
        for name, form in forms.items():
            curves[name][i] = measured(W, form)
    least, largest = whole(196, 48, 8, rng)
    results = {
        "heads": chosen.heads,
        "channels": chosen.channels,
        "draws": draws,
        "seed": chosen.seed,
        "places": PLACES,
        "mean logit": {name: curve[:, 0, PLACES].mean(axis=0).tolist() for name, curve in curves.items()},
        "uneven": {name: curve[:, 1, PLACES].mean(axis=0).tolist() for name, curve in curves.items()},
        "nine tenths": {
            name: np.quantile(curve[:, 1, PLACES], (0.05, 0.95), axis=0).T.tolist() for name, curve in curves.items()
        },
        # d/(t + 1) is the mean that exchangeable tokens have
        "t + 1 times the released logit": float((curves["released"][:, 0] * np.arange(1, tokens + 1)).mean()),
        "all of 196 tokens": {"least": least, "largest": largest},
    }

    titled = f"at place t; {chosen.heads} heads of {chosen.channels} channels, means of {draws} draws"
    columns = ("form", *(f"t = {t}" for t in PLACES))
    table(
        f"mean logit {titled}",
        columns,
        ((name, *(f"{number:.3g}" for number in numbers)) for name, numbers in results["mean logit"].items()),
    )
    table(
        f"h·max|Π − 1/h| {titled}, and nine tenths of these",
        columns,
        (
            (name, *(f"{x:.2g} ({a:.2g} to {b:.2g})" for x, (a, b) in zip(numbers, parts, strict=True)))
            for (name, numbers), parts in zip(results["uneven"].items(), results["nine tenths"].values(), strict=True)
        ),
    )
    table(
        "h·Π over 196 tokens that see each other, 8 heads of 48 channels: one draw",
        ("form", "least", "largest"),
        [("released", f"{least:.2f}", f"{largest:.2f}")],
    )
    save(chosen.out, "dilution", results, dilution=_drawn(curves, chosen.heads))
    return 0


def _drawn(curves: dict[str, Any], heads: int) -> Any:
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    # Means of neighboring places too, a quarter of an octave at a time: those of few draws are ragged. A first token
    # is shared out evenly, so the curves begin with the second.
    last = next(iter(curves.values())).shape[-1]
    ends = np.unique(np.round(2.0 ** np.arange(1, np.log2(last) + 0.01, 0.25)).astype(int))
    middles = [(low + high - 1) / 2 for low, high in pairwise(ends)]
    for i, (ax, what) in enumerate(zip(axes, ("mean logit", f"h·max|Π − 1/h|, at most {heads - 1}"), strict=True)):
        for name, curve in curves.items():
            color, dashes = STYLES[name]
            spans = [curve[:, i, low - 1 : high - 1].mean() for low, high in pairwise(ends)]
            ax.plot(middles, spans, color=color, linestyle=dashes, label=name)
        ax.set(xscale="log", yscale="log", xlabel="tokens seen, t + 1", title=what)
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    return figure


if __name__ == "__main__":
    sys.exit(main())
