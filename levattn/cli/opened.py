"""Models, texts and profiles of the commands: a folder or a .gguf file, other files, and their errors."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from levattn._core.checks import needing
from levattn.cli.output import fail, report
from levattn.exceptions import ProfileWarning, RecallWarning

_GGUF_NEEDS = ("gguf", "accelerate")


def opened_model(path: Path) -> tuple[Any, Any]:
    """Return the model in a folder or a .gguf file, in evaluation mode, and its tokenizer, or end the program."""
    check_model_path(path)
    with needing("this needs torch and transformers", "transformers"):
        import torch  # noqa: F401 (transformers can be imported without it, but loads nothing)
        import transformers
    if _is_gguf(path):
        _check_gguf(path)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        return _of_gguf(path) if _is_gguf(path) else _of_folder(path)
    except Exception as error:  # of any kind: readers of files, and code that the configuration names, may raise it
        remedy = (
            "it needs a decoder that transformers reads from GGUF, and the whole file, so download it again"
            if _is_gguf(path)
            else "it needs config.json, weights as .safetensors, and a tokenizer, so download the whole folder again"
        )
        fail(f"{path}: transformers cannot load this model ({type(error).__name__}: {error}); {remedy}")


def opened_decoder(path: Path) -> tuple[Any, Any]:
    """Return a model that generates text, and its tokenizer, or end the program."""
    model, tokenizer = opened_model(path)
    if not model.can_generate():
        fail(f"{path} is a {type(model).__name__}, which generates no text; give a causal decoder")
    return model, tokenizer


def check_model_path(path: Path) -> None:
    """End the program unless a path is the folder of a model or a .gguf file."""
    if path.is_file() and _is_gguf(path):
        return
    if _is_gguf(path) and not path.exists():
        fail(f"{path}: no such file; models are read from disk, so download it first: hf download NAME FILE")
    if path.is_file():
        fail(f"{path} is a file; give the folder of a Hugging Face model, or a file that ends in .gguf")
    if not path.is_dir():
        fail(
            f"{path}: no such folder; models are read from disk, so download it first: "
            "hf download NAME --local-dir FOLDER"
        )
    if not (path / "config.json").is_file():
        fail(f"{path} has no config.json; give the folder of a Hugging Face model, or a .gguf file")


def read_text(path: Path, option: str = "--text") -> str:
    """Return the text in a file that an option names, or end the program."""
    if not path.exists():
        fail(f"{path}: no such file; name a text file with {option}")
    try:
        words = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        fail(f"{path} is not UTF-8 text; convert it")
    if option == "--text" and not words.strip():
        fail(f"{path} has 0 tokens; give a longer text")
    return words


def check_own_tokens(path: Path, words: str, tokenizer: Any, count: int, around: int) -> None:
    """End the program unless a text has tokens of its own, and some of them are read.

    count: the tokens that are read.
    around: the tokens that a chat template or the tokenizer puts before or around any text.
    """
    own = len(tokenizer(words, add_special_tokens=False)["input_ids"])
    if not own or own + around < 2:
        fail(f"{path} has {own} tokens; give a longer text")
    if count <= around:
        fail(f"{count} tokens of {path} are read, and {around} of any text are not its own; give more --tokens")


def most_tokens(model: Any, asked: int | None) -> int:
    """Return the number of tokens to read: `asked`, but at most as many as the model has positions."""
    limit = 1 << 30 if asked is None else asked
    positions: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or limit
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            positions -= padding + 1  # the first position follows the padding position: RoBERTa
            break
    return min(limit, positions)


@contextmanager
def forward_errors_in_one_line(path: Path, count: int, remedy: str = "give fewer --tokens") -> Iterator[None]:
    """End the program if a model cannot run on so many tokens."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        said = str(error).strip().partition("\n")[0]
        fail(f"{path} cannot be run on {count} tokens ({type(error).__name__}: {said}); {remedy}, or another model")


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def _check_gguf(path: Path) -> None:
    missing = [name for name in _GGUF_NEEDS if find_spec(name) is None]
    if missing:
        fail(
            f"{path}: transformers reads .gguf files with the packages {' and '.join(_GGUF_NEEDS)}, and "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install {' '.join(missing)}"
        )
    with path.open("rb") as stream:
        begins = stream.read(4)
    if begins != b"GGUF":
        fail(f"{path} is no GGUF file; download it again")


def _of_folder(folder: Path) -> tuple[Any, Any]:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    kinds = " ".join(getattr(config, "architectures", None) or ())
    causal = "CausalLM" in kinds or "LMHead" in kinds
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    model = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype="auto").eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _of_gguf(file: Path) -> tuple[Any, Any]:
    import transformers

    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with redirect_stderr(io.StringIO()):  # hides a progress bar of transformers that cannot be turned off
        model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **where).eval()
        return model, transformers.AutoTokenizer.from_pretrained(file.parent, **where)


def check_profile(heads: str) -> None:
    """End the program if --heads names neither a file nor a known profile."""
    if heads in ("auto", "none") or Path(heads).is_file():
        return
    from levattn.integrations.transformers import HeadProfile

    names = HeadProfile.names()
    if heads.rpartition("/")[2].lower() not in names:
        known = ", ".join([*names, "auto", "none"])
        fail(f"{heads}: no such file; make it with `levattn profile`, or give --heads one of {known}")


def profile_of(model: Any, heads: str, budget: float, way: str = "cache") -> Any:
    """Return the profile that --heads asks for, or None; report a budget that all heads of a decoder share.

    Also report a profile of heads that were cut in another way.
    """
    if budget == 1 and heads in ("auto", "none"):
        return None
    from levattn.integrations.transformers import HeadProfile
    from levattn.integrations.transformers.compression.profile import known_profile

    auto = heads == "auto" and budget < 1
    found, names = known_profile(model, way=way) if auto else (None, [])
    if found is not None:
        report(f"the known profile {names[0]} splits the budget over the heads; --heads none cuts all alike")
    if heads not in ("auto", "none"):
        found = HeadProfile.load(heads) if Path(heads).is_file() else HeadProfile.find(heads, way=way)
    if found is None:
        shown = f"{budget:.0%}" if budget < 1 else f"{budget} slots"
        why = f"no known profile fits this model: {', '.join(names)}" if names else "no profile splits the budget"
        remedy = "make a profile with `levattn profile` and give it with --heads"
        if budget > 1:
            remedy = "give --budget a share up to 1, which a profile splits"
        report(f"all heads are cut to {shown}, because {why}; decoders cannot recall facts of the text then; {remedy}")
    elif found.way != way:
        report(f"the heads of the profile were cut for {found.way}; make one with `levattn profile --way {way}`")
    return found


@contextmanager
def told_of_recall() -> Iterator[None]:
    """Suppress the same warnings of the library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecallWarning)
        warnings.filterwarnings("ignore", "the heads of the profile were cut in another way", ProfileWarning)
        yield
