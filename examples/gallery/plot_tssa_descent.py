r"""
Token statistics attention descends a coding rate
=================================================

A step of token statistics attention with tied outputs is a step down the gradient of a variational coding rate. The
rate does not rise up to a step size that is known beforehand; at twice that size it can.
"""

# %%
# Tokens near three subspaces
# ---------------------------
#
# Each token of 12 channels lies near one of three subspaces of dimension 4, which have orthonormal bases :math:`U_k`.
# Memberships are a softmax of the squared norms of the projected tokens, and then stay fixed.

import matplotlib.pyplot as plt
import numpy as np

from levattn.attention import TokenForm, memberships, rates, tssa

n, d, groups, p, eps = 300, 12, 3, 4, 0.5
rng = np.random.default_rng(0)
U = (
    np.linalg.qr(rng.standard_normal((d, d)))[0]
    .T.reshape(groups, p, d)
    .transpose(0, 2, 1)
)

group = np.arange(n) % groups
Z = np.einsum("tdi,ti->td", U[group], rng.standard_normal((n, p)) * [2, 1, 0.5, 0.25])
Z += 0.2 * rng.standard_normal((n, d))

temperature = 5.0
Pi = memberships(Z @ U, temperature, form="norm", causal=False).T  # (tokens, groups)
print(
    f"tokens whose largest membership is that of their subspace: {(Pi.argmax(axis=1) == group).mean():.3f}"
)

# %%
# Rate against steps
# ------------------
#
# `~levattn.attention.rates.largest_step` is the bound: 2ε²/d for orthonormal bases. It holds for all tokens. The left
# picture shows tokens for which larger steps mostly work too. The right picture shows why there is a bound. For the
# same tokens made smaller, the logarithm is nearly straight, and the rate rises at twice the bound.

bound = float(rates.largest_step(U, eps))
styles = {
    0.05: ("#009E73", ":"),
    0.25: ("#CC79A7", "-."),
    1.0: ("#0072B2", "-"),
    2.0: ("#D55E00", "--"),
}
steps = 24

figure, axes = plt.subplots(1, 2, figsize=(8.4, 4), layout="constrained")
for ax, scale in zip(axes, (1.0, 0.05), strict=True):
    for share, (color, dashes) in styles.items():
        tokens = scale * Z
        path = [rates.variational_rate(tokens, Pi, U, eps)]
        for _ in range(steps):
            tokens = rates.descent_step(tokens, Pi, U, eps, step=share * bound)
            path.append(rates.variational_rate(tokens, Pi, U, eps))
        ax.plot(path, color=color, ls=dashes, lw=2, label=f"{share:g} × bound")
        rises = np.count_nonzero(np.diff(path) > 1e-12 * path[0])
        print(
            f"tokens × {scale:<4g}  step {share:4g} × bound: {path[0]:.3f} to {path[-1]:.3f} nats, {rises} rises"
        )
    ax.set(title=f"tokens × {scale:g}", xlabel="steps", ylim=0)
    ax.grid(alpha=0.25, lw=0.5)
axes[0].set_ylabel("variational rate, nats")
axes[1].legend(loc="center right", fontsize="small")
print(f"bound: a step of {bound:.4f}")

# %%
# What a step does to tokens
# --------------------------
#
# With orthonormal bases a step multiplies the part of a token in direction i of subspace k by
# :math:`1 - \alpha c\,\Pi_{tk}/(1 + c\,m_{ki})`. Here m is the second moment of the group in that direction, and c =
# d/ε². A direction in which a group is large shrinks little, and a direction in which it is small goes first. So each
# group comes nearer to few directions: in the picture the small moments fall most.


def moments(tokens):
    """Return the second moments of each group along its basis, (groups, p)."""
    squares = (tokens @ U) ** 2
    return np.einsum("tk,kti->ki", Pi, squares) / Pi.sum(axis=0)[:, None]


figure, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
place = np.arange(groups * p)
tokens, done, ratios = Z, 0, {}
for count, color, marker in (
    (0, "#8C8C8C", "o"),
    (4, "#0072B2", "s"),
    (16, "#D55E00", "D"),
):
    for _ in range(count - done):
        tokens = rates.descent_step(tokens, Pi, U, eps, step=0.25 * bound)
    done = count
    ax.plot(
        place,
        moments(tokens).ravel(),
        marker,
        color=color,
        ms=7,
        label=f"after {count} steps",
    )
    ratios[count] = moments(tokens).max(axis=1) / moments(tokens).min(axis=1)
for edge in range(1, groups):
    ax.axvline(p * edge - 0.5, color="#8C8C8C", lw=0.8)
ax.set(
    yscale="log",
    xlabel="direction i of subspace k",
    ylabel="second moment of the group",
)
ax.set_xticks(place, [f"{i + 1}" for _ in range(groups) for i in range(p)])
ax.grid(alpha=0.25, lw=0.5, axis="y")
ax.legend(fontsize="small")
for count, found in ratios.items():
    print(
        f"after {count:2d} steps: largest over least moment, group by group:",
        *(f"{ratio:.0f}" for ratio in found),
    )

# %%
# The operator
# ------------
#
# `~levattn.attention.tssa` computes the same step from projected tokens, with the bases multiplied back: these are
# tied outputs. As a layer it computes memberships anew from its input tokens, and then nothing is promised.

form = TokenForm("norm", c=d / eps**2)


def layer_output(tokens):
    Y = tssa(tokens @ U, temperature, form=form, causal=False)
    return tokens + 0.25 * bound * np.einsum("ktp,kdp->td", Y, U)


layer = layer_output(Z)
step = rates.descent_step(Z, Pi, U, eps, step=0.25 * bound)
print(f"largest difference from descent_step: {np.abs(layer - step).max():.1e}")

tokens, path = Z, []
for _ in range(steps):
    W = tokens @ U
    members = memberships(W, temperature, form="norm", causal=False).T
    path.append(float(rates.variational_rate(tokens, members, U, eps)))
    tokens = layer_output(tokens)
rises = np.count_nonzero(np.diff(path) > 0)
print(
    f"memberships anew in each step: {path[0]:.3f} to {path[-1]:.3f} nats, {rises} rises"
)

# %%
# The steps lower one rate, and shrinking all tokens lowers it too. Nothing is promised about the reduction R − R_c,
# which should be large:

for name, X in (("before", Z), (f"after {steps} steps", tokens)):
    print(
        f"{name:15s} R = {rates.coding_rate(X, eps):.3f}, R − R_c = {rates.rate_reduction(X, Pi, eps):.3f} nats"
    )
