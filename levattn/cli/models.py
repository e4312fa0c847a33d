"""``levattn inspect`` and ``levattn prune-report``: models in folders, and texts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from levattn._core.checks import needing
from levattn.cli.output import check_output, fail, new_console, print_json, table_of
from levattn.io import replace_file

__all__ = ["Inquiry", "ScoreColumn", "inspect", "prune_report"]


ScoreColumn = Literal["residual", "expected", "leverage"]
_SETS_OF_HEADS = {
    "layer": "layer",
    "head": "head",
    "n": "n",
    "d": "d",
    "κ": "condition:.3g",
    "|U|": "size:.0f",
    "rank/ε": "bound",
    "max": "largest:.3f",
    "mass": "captured:.3f",
    "heavy": "heavy",
    "caught": "heavy_captured:.0%",
}
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
    """What the command line asked for: a model, a text, and where results go."""

    model: Path
    text: Path
    tokens: int
    as_json: bool
    plot: Path | None


def inspect(inquiry: Inquiry, epsilon: float) -> None:
    """Run ``levattn inspect``."""
    model, inputs = _opened(inquiry)
    from levattn.integrations.transformers import inspect_model

    with _forward_errors_in_one_line(inquiry, inputs):
        found = inspect_model(model, inputs, epsilon=epsilon)
    _draw(inquiry, lambda: found.plot("captured"))
    if inquiry.as_json:
        print_json("levattn.inspect/1", {"tokens": inputs["input_ids"].shape[1], **found.to_dict()})
        return
    rows = [row | {"bound": f"{row['bound']:.0f}{'*' if row['vacuous'] else ''}"} for row in found.rows]
    console = new_console()
    console.print(table_of(rows, _SETS_OF_HEADS))
    console.print(
        f"κ: condition number; |U|: universal set for x² at ε = {epsilon}; max: largest leverage score; mass: mean "
        "softmax mass on U; heavy: softmax scores of at least ε among the queries measured, and how many U caught."
    )
    if any(row["vacuous"] for row in found.rows):
        console.print("* vacuous: the bound rank/ε is not below n, so the theorem alone does not promise a small set.")


def prune_report(inquiry: Inquiry, budget: float, options: dict[str, Any]) -> None:
    """Run ``levattn prune-report``."""
    model, inputs = _opened(inquiry)
    import torch

    from levattn.integrations.transformers import prune

    with torch.no_grad(), _forward_errors_in_one_line(inquiry, inputs):
        _run(model, inputs)  # what is made at first use is not to be timed
        dense, dense_seconds = _run(model, inputs)
        with prune(model, budget, **options) as report:
            _run(model, inputs)
        with prune(model, budget, measure=False, **options):
            pruned, seconds = _run(model, inputs)
    loss = _loss(inputs, dense, pruned)
    _draw(inquiry, lambda: report.plot("captured"))
    outcome = {"tokens": inputs["input_ids"].shape[1], "seconds": seconds, "dense_seconds": dense_seconds, **loss}
    if inquiry.as_json:
        print_json("levattn.prune-report/1", {**outcome, **report.to_dict()})
        return
    console = new_console()
    console.print(table_of(report.table(), _PRUNED_HEADS))
    console.print(
        "selected: keys that a query attends exactly; mass: softmax mass on them; error: of the head's output, "
        "relative to dense attention."
    )
    for name, value in loss.items():
        if value is not None:
            console.print(f"{name.replace('_', ' ')}: {value:.6g}")
    console.print(f"seconds: {seconds:.3g}, dense {dense_seconds:.3g}")


def _opened(inquiry: Inquiry) -> tuple[Any, dict[str, Any]]:
    """Return the model in a folder, in evaluation mode, and the tokens of a text, or end the program."""
    _check_model(inquiry.model)
    check_output(inquiry.plot, "--plot")
    words = _read(inquiry.text)
    with needing("this needs torch and transformers", "transformers"):
        import torch  # noqa: F401 (without which transformers can be imported, and load nothing)
        import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, tokenizer = _loaded(inquiry.model)
    except Exception as error:  # of any kind: of the files' readers, and of what the configuration names
        fail(
            f"{inquiry.model}: transformers cannot load this model ({type(error).__name__}: {error}); it needs "
            "config.json, weights as .safetensors, and a tokenizer, so download the whole folder again"
        )
    inputs = tokenizer(words, truncation=True, max_length=_most_tokens(model, inquiry.tokens), return_tensors="pt")
    count = inputs["input_ids"].shape[1]
    if count < 2:
        fail(f"{inquiry.text} has {count} tokens; give a longer text")
    inputs = dict(inputs)
    if "token_type_ids" not in signature(model.forward).parameters:  # which its tokenizer may give all the same
        inputs.pop("token_type_ids", None)
    return model, inputs


def _check_model(folder: Path) -> None:
    if not folder.is_dir():
        fail(
            f"{folder}: no such folder; models are read from disk, so download it first: "
            "hf download NAME --local-dir FOLDER"
        )
    if not (folder / "config.json").is_file():
        fail(f"{folder} has no config.json; give the folder of a Hugging Face model")


def _read(text: Path) -> str:
    if not text.exists():
        fail(f"{text}: no such file; name a text file with --text")
    try:
        return text.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        fail(f"{text} is not UTF-8 text; convert it")


def _loaded(folder: Path) -> tuple[Any, Any]:
    """Return the model and the tokenizer in a folder."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    kinds = " ".join(getattr(config, "architectures", None) or ())
    kind = transformers.AutoModelForCausalLM if "CausalLM" in kinds else transformers.AutoModel
    model = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _most_tokens(model: Any, asked: int) -> int:
    """Return how many tokens to read: those asked for, or as many as the model has positions."""
    positions: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or asked
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            positions -= padding + 1  # the first position comes after that of padding: RoBERTa
            break
    return min(asked, positions)


@contextmanager
def _forward_errors_in_one_line(inquiry: Inquiry, inputs: dict[str, Any]) -> Iterator[None]:
    """End the program if the model cannot be run on the tokens."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        count, said = inputs["input_ids"].shape[1], str(error).strip().partition("\n")[0]
        fail(
            f"{inquiry.model} cannot be run on {count} tokens ({type(error).__name__}: {said}); give fewer --tokens, "
            "or another model"
        )


def _run(model: Any, inputs: dict[str, Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    output = model(**inputs)
    return output, time.perf_counter() - start


def _loss(inputs: dict[str, Any], dense: Any, pruned: Any) -> dict[str, float | None]:
    """Return how far two outputs of a model are apart; None where that is not told of such a model."""
    import torch

    from levattn.integrations.transformers.calibration.losses import embeddings, following, perplexity

    found: dict[str, float | None] = dict.fromkeys(("embedding_cosine", "dense_perplexity", "perplexity"))
    if getattr(dense, "logits", None) is None:
        first, second = (embeddings(inputs, output) for output in (dense, pruned))
        return found | {"embedding_cosine": float(torch.nn.functional.cosine_similarity(first, second).mean())}
    before, after = (perplexity([following(inputs, output)]) for output in (dense, pruned))
    return found | {"dense_perplexity": before, "perplexity": after}


def _draw(inquiry: Inquiry, picture: Any) -> None:
    """Write the picture that was asked for."""
    if inquiry.plot is None:
        return
    from levattn.plots import figure_bytes

    content = figure_bytes(picture().figure_, inquiry.plot.suffix)
    with replace_file(inquiry.plot) as stream:
        stream.write(content)
