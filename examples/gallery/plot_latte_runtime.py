r"""
Latte in linear time, softmax attention in quadratic
====================================================

Latent attention reads a sequence through L averages, in time linear in its length. This measures
`~levattn.attention.latte` beside torch's softmax attention on the processor that this page was built on: causal,
float32, forward alone.
"""

# %%
# What is timed
# -------------
#
# Both get four heads of 64 channels; Latte has 64 latents. Each round times every call once, one kind after the other,
# so that whatever else the machine does falls on both alike; a call that is not timed goes before each one that is, as
# do pauses in which threads that the other left waiting fall asleep. What counts is the median of the rounds.

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
        "softmax attention": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
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
# Time against length. A line of slope 1 is linear time, one of slope 2 quadratic.

figure, ax = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
styles = {"softmax attention": ("#D55E00", "s--"), "Latte": ("#0072B2", "o-")}
for name, (color, style) in styles.items():
    ax.plot(lengths, 1e3 * times[name], style, color=color, lw=2, label=name)
ends = lengths[-3:]
for name, power in (("softmax attention", 2), ("Latte", 1)):
    guide = 1e3 * times[name][-1] * (ends / ends[-1]) ** float(power)
    ax.plot(ends, 0.6 * guide, color="#8C8C8C", ls=":", lw=1.5)
    ax.annotate(f"slope {power}", (ends[1], 0.55 * guide[1]), color="#5C5C5C", ha="left", va="top", fontsize="small")
ax.set_xscale("log", base=2)
ax.set(yscale="log", xlabel="positions", ylabel="time of a call, ms", xticks=lengths, xticklabels=lengths)
ax.grid(alpha=0.25, lw=0.5)
ax.legend(loc="upper left")
for name, found in times.items():
    print(f"slope of {name} over the last three lengths: {np.polyfit(np.log(ends), np.log(found[-3:]), 1)[0]:.2f}")

# %%
# The same in numbers: milliseconds, and how many times as long attention takes.

print("positions   attention       Latte   ratio")
for T, a, b in zip(lengths, times["softmax attention"], times["Latte"], strict=True):
    print(f"{T:9d}  {1e3 * a:7.2f} ms  {1e3 * b:7.2f} ms  {a / b:6.2f}")
behind = lengths[times["Latte"] > times["softmax attention"]]
print("lengths at which Latte takes longer:", ", ".join(map(str, behind)) or "none of these")

# %%
# Latte is another operator, not an approximation of softmax attention: its logits come from weights of its own, which
# have to be trained. A latent keeps one average, so that recall of more associations than there are latents gets
# worse. For short sequences the overhead of a call counts; the last line says where Latte was behind here. Times of
# other machines differ.
