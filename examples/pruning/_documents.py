"""Real texts for an encoder of 512 tokens, and short queries that ask for each of them.

The texts are what every Python carries: the topics of ``help()``, English prose and definitions under the license of
Python, and two speeches in the public domain. A passage is the first 510 word pieces of a text between the two marks
of the model. The text that follows the passage is one query for it, its heading is another.

Which topics there are is fixed below: those whose passages share no text with one another. Their wording is that of
the Python that runs; figures change by a few units of the last digit from one version to another.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LENGTH = 512  # tokens of a passage, which is what the model reads at most
MARKS = 2  # of these, the model's own at both ends
QUERY = 30  # tokens of a query at most: fewer than the smallest budget has slots
LEAST = 12  # tokens of a continuation that says something

TOPICS = (
    "specialnames",
    "compound",
    "types",
    "formatstrings",
    "string-methods",
    "debugger",
    "typesmapping",
    "execmodel",
    "import",
    "try",
    "async",
    "strings",
    "comparisons",
    "calls",
    "function",
    "identifiers",
    "objects",
    "sequence-types",
    "attribute-access",
    "assignment",
    "with",
    "numeric-types",
    "raise",
)
SPEECHES = "Gettysburg Address and Declaration of Independence"


class Document(NamedTuple):
    """A passage as token ids, and its queries as token ids."""

    title: str
    passage: list[int]
    queries: list[list[int]]


def _speeches() -> str:
    """Return the text of which the library's own data are made."""
    path = Path(__file__).parents[1] / "make_minilm_data.py"
    spec = importlib.util.spec_from_file_location("make_minilm_data", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is missing; it belongs to the examples")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.TEXT)


def _texts() -> Iterator[tuple[str, str]]:
    """Yield headings and texts."""
    from pydoc_data.topics import topics

    yield SPEECHES, _speeches()
    for name in TOPICS:
        if name in topics:
            text = topics[name].strip()
            yield text.partition("\n")[0].replace('"', ""), text


def documents(tokenizer: Any, count: int | None = None) -> list[Document]:
    """Return so many documents, or all; each passage has 512 tokens.

    tokenizer: of transformers, with marks ``cls_token_id`` and ``sep_token_id``.
    """
    found = []
    for title, text in _texts():
        if len(found) == count:
            break
        pieces, heading = (
            tokenizer(part, add_special_tokens=False, truncation=True, max_length=most)["input_ids"]
            for part, most in ((text, LENGTH + QUERY - 2 * MARKS), (title, QUERY - MARKS))
        )
        passage, following = pieces[: LENGTH - MARKS], pieces[LENGTH - MARKS :]
        if len(following) < LEAST:
            continue
        marked = [[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id] for ids in (passage, heading, following)]
        found.append(Document(title, marked[0], marked[1:]))
    if count is not None and len(found) < count:
        raise ValueError(f"count is {count}; this Python carries {len(found)} documents. Ask for at most that many")
    return found
