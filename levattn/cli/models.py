"""``levattn inspect`` and ``prune-report``: universal sets and pruning on a text; ``levattn convert``."""

import copy
import math
import time
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

from levattn.cli.opened import (
    check_model_path,
    check_own_tokens,
    check_profile,
    forward_errors_in_one_line,
    most_tokens,
    opened_model,
    profile_of,
    read_text,
    told_of_recall,
)
from levattn.cli.output import HeatMap, check_output, fail, new_console, print_json, table_of, write_page
from levattn.io import replace_file

_PASSES = 3  # of the dense and of the pruned model in turn, whose times are medians
_TRIED = 3  # first tokens of a text, which a trial call reads
ScoreColumn = Literal["residual", "expected", "leverage", "random", "norm", "streaming"]
_PRUNED_HEADS = {
    "layer": "layer",
    "head": "head",
    "slots": "slots:.1f",
    "selected": "selected:.1f",
    "mass": "captured:.3f",
    "error": "error:.2e",
}


@dataclass(frozen=True)
class Inquiry:
    """The options of the command line: a model, a text, and the places of results."""

    model: Path
    text: Path
    tokens: int
    as_json: bool
    plot: Path | None
    html: Path | None = None


def inspect(inquiry: Inquiry, epsilon: float) -> None:
    """Run ``levattn inspect``."""
    model, inputs = _opened(inquiry)
    from levattn.integrations.transformers.inspection import COLUMNS, inspect_model, mean_line, printed

    with forward_errors_in_one_line(inquiry.model, inputs["input_ids"].shape[1]):
        found = inspect_model(model, inputs, epsilon=epsilon)
    draw(inquiry.plot, lambda: found.plot("captured"))
    if inquiry.as_json:
        print_json("levattn.inspect/1", {"tokens": inputs["input_ids"].shape[1], **found.to_dict()})
        return
    console = new_console()
    console.print(table_of(printed(found.rows), COLUMNS))
    for line in mean_line(found.rows):
        console.print(line)
    console.print(
        f"κ: condition number; |U|: universal set for x² at ε = {epsilon}; share: of the keys in U; max: largest "
        "leverage score; mass: mean softmax mass on U; heavy: softmax scores of at least ε among the measured "
        "queries; caught: share of them in U."
    )
    if any(row["vacuous"] for row in found.rows):
        console.print("* vacuous: the bound rank/ε is not below n, so the theorem alone does not promise a small set.")


def convert(path: Path, folder: Path, dtype: str | None) -> None:
    """Run ``levattn convert``."""
    check_model_path(path)
    if folder.exists():
        fail(f"{folder}: there is such a file or folder; name a new folder")
    check_output(folder, "FOLDER")
    model, tokenizer = opened_model(path)
    import torch

    known = getattr(model.config, "architectures", None) or [type(model).__name__]
    if type(model).__name__ not in known:
        fail(f"{path} is a {known[0]}, whose head would be lost; give a causal decoder, or an encoder without a head")
    if path.is_file():
        model = _plain(model)
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.absolute().parent) as made:
        whole = Path(made) / folder.name
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        whole.rename(folder)
    nbytes = sum(file.stat().st_size for file in folder.iterdir())
    console = new_console()
    for name, value in {"folder": folder, "dtype": str(model.dtype).removeprefix("torch."), "bytes": nbytes}.items():
        console.print(f"{name}: {value}")


def _plain(model: Any) -> Any:
    """Return a model with the weights of another, because transformers does not save one that it read from GGUF."""
    import torch

    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        found = type(model)(config)
    found.load_state_dict(model.state_dict(), assign=True)
    found.tie_weights()
    if model.can_generate():
        found.generation_config = model.generation_config
    return found


def prune_report(inquiry: Inquiry, budget: float, heads: str, **options: Any) -> None:
    """Run ``levattn prune-report``."""
    check_profile(heads)
    model, inputs = _opened(inquiry)
    import torch

    from levattn.attention import Selection
    from levattn.integrations.transformers import prune

    selection = Selection(budget, start=0, **options)  # a report on few tokens shows what pruning loses
    profile = profile_of(model, heads, budget if model.can_generate() else 1, "reading")
    ours = {"heads": profile, "example": {name: x[:, :_TRIED] for name, x in inputs.items()}}
    with told_of_recall(), torch.no_grad(), forward_errors_in_one_line(inquiry.model, inputs["input_ids"].shape[1]):
        with prune(model, selection, **ours, measure=True) as report:
            _run(model, inputs)
        _run(model, inputs)  # the first call of each kind compiles and makes buffers
        times: dict[str, list[float]] = {"dense": [], "pruned": []}
        for _ in range(_PASSES):
            dense, passed = _run(model, inputs)
            times["dense"].append(passed)
            with prune(model, selection, **ours, measure=False):
                pruned, passed = _run(model, inputs)
            times["pruned"].append(passed)
    seconds, dense_seconds = median(times["pruned"]), median(times["dense"])
    loss = _loss(inputs, dense, pruned)
    draw(inquiry.plot, lambda: report.plot("captured"))
    outcome = {"tokens": inputs["input_ids"].shape[1], "seconds": seconds, "dense_seconds": dense_seconds, **loss}
    _page_of(inquiry, report.table(), {"budget": budget, **outcome})
    if inquiry.as_json:
        print_json("levattn.prune-report/1", {**outcome, **report.to_dict()})
        return
    console = new_console()
    if report.table():
        console.print(table_of(report.table(), _PRUNED_HEADS))
        console.print(
            "selected: keys that a query attends exactly; mass: softmax mass on them; error: of the head's output, "
            "relative to dense attention."
        )
    else:
        console.print(str(report))
    for name, value in loss.items():
        if value is not None:
            console.print(f"{name.replace('_', ' ')}: {value:.6g}")
    console.print(f"seconds: {seconds:.3g}, dense {dense_seconds:.3g} (medians of {_PASSES} interleaved passes)")


def _opened(inquiry: Inquiry) -> tuple[Any, dict[str, Any]]:
    """Return the model in a folder, in evaluation mode, and the tokens of a text, or end the program."""
    check_model_path(inquiry.model)
    check_output(inquiry.plot, "--plot")
    check_output(inquiry.html, "--html")
    words = read_text(inquiry.text)
    model, tokenizer = opened_model(inquiry.model)
    inputs = tokenizer(words, truncation=True, max_length=most_tokens(model, inquiry.tokens), return_tensors="pt")
    around = tokenizer.num_special_tokens_to_add()
    check_own_tokens(inquiry.text, words, tokenizer, inputs["input_ids"].shape[1], around)
    inputs = dict(inputs)
    if "token_type_ids" not in signature(model.forward).parameters:  # the tokenizer may return them all the same
        inputs.pop("token_type_ids", None)
    return model, inputs


def _run(model: Any, inputs: dict[str, Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    output = model(**inputs)
    return output, time.perf_counter() - start


def _loss(inputs: dict[str, Any], dense: Any, pruned: Any) -> dict[str, float | None]:
    """Return the difference of two outputs of a model; None for figures that do not apply to the model."""
    import torch

    from levattn.integrations.transformers.losses import embeddings, following

    found: dict[str, float | None] = dict.fromkeys(("embedding_cosine", "dense_perplexity", "perplexity"))
    if getattr(dense, "logits", None) is None:
        first, second = (embeddings(inputs, output) for output in (dense, pruned))
        return found | {"embedding_cosine": float(torch.nn.functional.cosine_similarity(first, second).mean())}
    for name, output in (("dense_perplexity", dense), ("perplexity", pruned)):
        log_p, counted = following(inputs, output)
        found[name] = math.exp(-float(log_p[counted].mean()))
    return found


def draw(path: Path | None, picture: Any) -> None:
    """Draw a picture into a file, if one is named."""
    if path is None:
        return
    from levattn.plots import figure_bytes

    content = figure_bytes(picture().figure_, path.suffix)
    with replace_file(path) as stream:
        stream.write(content)


def _page_of(inquiry: Inquiry, rows: list[dict[str, Any]], outcome: dict[str, Any]) -> None:
    """Write the page with the figures of the heads of a pruned model, if a file is named."""
    if inquiry.html is None:
        return
    mass = HeatMap.of(rows, "captured", "Softmax mass on the keys attended exactly", ".3f", top=1.0)
    facts = {name.replace("_", " "): f"{value:.6g}" for name, value in outcome.items() if value is not None}
    title = f"Pruned attention of {inquiry.model.name}"
    write_page(inquiry.html, title, facts, [mass], rows, _PRUNED_HEADS)
