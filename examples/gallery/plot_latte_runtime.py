r"""
Latte in linear time, softmax attention in quadratic
====================================================

Latent attention reads a sequence through L averages, in time linear in its length. This example times
`~levattn.attention.latte` and torch's softmax attention on the processor that built this page: causal, float32,
forward alone.
"""

# %%
# How the times are measured
# --------------------------
#
# Both get four heads of 64 channels, and Latte has 64 latents. Each round times every call once, one kind after the
# other, so that other work of the machine affects both alike. Before each timed call come a call that is not timed,
# and a pause in which waiting threads of the other call fall asleep. The result is the median of the rounds.

import time

import matplotlib.pyplot as plt
import numpy as np
import torch

from levattn.attention import latte

HEADS, CHANNELS, LATENTS, ROUNDS = 4, 64, 64, 3
lengths = np.array([64, 128, 256, 512, 1024, 2048, 4096])
torch.manual_seed(0)


def calls_of(T):
    q, k, v = torch.randn(3, 1, HEADS, T, CHANNELS)
    q_logits, k_logits = torch.randn(2, 1, HEADS, T, LATENTS)
    return {
        "softmax attention": lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True
        ),
        "Latte": lambda: latte(q_logits, k_logits, v, causal=True),
    }


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


times = {"softmax attention": [], "Latte": []}
with torch.no_grad():
    for T in lengths:
        calls = calls_of(int(T))
        rounds = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                time.sleep(0.12)
                call()
                rounds[name].append(seconds(call))
        for name, found in rounds.items():
            times[name].append(np.median(found))
times = {name: np.array(found) for name, found in times.items()}

# %%
# The picture shows time against length. The dotted lines have slope 1 for linear time and slope 2 for quadratic time:
# the longer the sequence, the closer Latte comes to the first and softmax attention to the second.

figure, ax = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
styles = {"softmax attention": ("#D55E00", "s--"), "Latte": ("#0072B2", "o-")}
for name, (color, style) in styles.items():
    ax.plot(lengths, 1e3 * times[name], style, color=color, lw=2, label=name)
ends = lengths[-3:]
for name, power in (("softmax attention", 2), ("Latte", 1)):
    guide = 1e3 * times[name][-1] * (ends / ends[-1]) ** float(power)
    ax.plot(ends, 0.6 * guide, color="#8C8C8C", ls=":", lw=1.5)
    ax.annotate(
        f"slope {power}",
        (ends[1], 0.55 * guide[1]),
        color="#5C5C5C",
        ha="left",
        va="top",
        fontsize="small",
    )
ax.set_xscale("log", base=2)
ax.set(
    yscale="log",
    xlabel="positions",
    ylabel="time of a call, ms",
    xticks=lengths,
    xticklabels=lengths,
)
ax.grid(alpha=0.25, lw=0.5)
ax.legend(loc="upper left")
for name, found in times.items():
    print(
        f"slope of {name} over the last three lengths: {np.polyfit(np.log(ends), np.log(found[-3:]), 1)[0]:.2f}"
    )

# %%
# Here are the same times in numbers: milliseconds, and the ratio of attention to Latte.

print("positions   attention       Latte   ratio")
for T, a, b in zip(lengths, times["softmax attention"], times["Latte"], strict=True):
    print(f"{T:9d}  {1e3 * a:7.2f} ms  {1e3 * b:7.2f} ms  {a / b:6.2f}")
behind = lengths[times["Latte"] > times["softmax attention"]]
print(
    "lengths at which Latte takes longer:",
    ", ".join(map(str, behind)) or "none of these",
)

# %%
# Latte is another operator, not an approximation of softmax attention. Its logits come from weights of its own, which
# need training. A latent keeps one average, so recall gets worse once there are more associations than latents. For
# short sequences the overhead of a call counts; the last line lists the lengths at which Latte was slower here. Other
# machines give other times.
