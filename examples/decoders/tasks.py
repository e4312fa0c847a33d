"""Recall tasks in plain English, after those of RULER (Hsieh et al., arXiv:2404.06654)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["TASKS", "Context", "Question", "contexts"]

DOCS = Path(__file__).parents[2] / "docs"
NAMES = (
    *("apple", "river", "stone", "tiger", "castle", "garden", "window", "bridge"),
    *("silver", "candle", "forest", "harbor", "violin", "rocket", "island"),
)
FREQUENT = "marble", "lantern", "pepper"
TASKS = ("one number", "one of eight", "three values", "two hops", "frequent words")
FOLLOWING = 200  # tokens of the text after the context


@dataclass(frozen=True)
class Question:
    """A question and its answer, in tokens."""

    asked: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Context:
    """Tokens of a text with something hidden in it, the questions on it, and the tokens of the text that follow."""

    task: str
    tokens: list[int]
    questions: list[Question]
    following: list[int]


def contexts(tokenizer: Any, length: int, seed: int) -> list[Context]:
    """Return one context of each task, all in the same pages of the documentation, of `length` tokens."""
    rng = random.Random(seed)
    pages = [*sorted((DOCS / "guide").glob("*.md")), DOCS / "design.md", DOCS / "program.md"]

    def tokens_of(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    text = tokens_of(" ".join(page.read_text() for page in pages))
    start = rng.randrange(len(text) - length - FOLLOWING)
    found = []
    for task in TASKS:
        lines, asked = _task(task, rng)
        hidden = [tokens_of(f"\n{line}\n") for line in lines]
        room = length - sum(map(len, hidden))
        body = text[start : start + room]
        cuts = sorted(rng.sample(range(room // 20, room - room // 20), len(hidden)))
        whole: list[int] = []
        for first, last, line in zip([0, *cuts], cuts, hidden, strict=False):
            whole += body[first:last] + line
        whole += body[cuts[-1] :]
        questions = [Question(tokens_of(question), tokens_of(answer)) for question, answer in asked]
        found.append(Context(task, whole, questions, text[start + room : start + room + FOLLOWING]))
    return found


def _task(task: str, rng: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the lines of a task, in their order in the text, and questions with their answers."""
    names = rng.sample(NAMES, 8)
    numbers = [str(rng.randrange(10000, 99999)) for _ in names]

    def ask(name: str) -> str:
        return f"\nQuestion: What is the secret number of {name}?\nAnswer: The secret number of {name} is"

    if task == "one number":
        return [f"The secret number of {names[0]} is {numbers[0]}."], [(ask(names[0]), f" {numbers[0]}")]
    if task == "one of eight":
        lines = [f"The secret number of {name} is {number}." for name, number in zip(names, numbers, strict=True)]
        return lines, [(ask(name), f" {number}") for name, number in zip(names, numbers, strict=True)]
    if task == "three values":
        name = names[0]
        lines = [f"One of the secret numbers of {name} is {number}." for number in numbers[:3]]
        question = (
            f"\nQuestion: What are the three secret numbers of {name}?\nAnswer: The secret numbers of {name} are"
        )
        return lines, [(question, f" {numbers[0]}, {numbers[1]}, {numbers[2]}")]
    if task == "two hops":
        lines, asked = [], []
        for first, second, number in zip(names[:3], names[3:6], numbers, strict=False):
            lines += [f"The secret number of {first} is {number}.", f"The key of {second} is the word {first}."]
            question = f"\nQuestion: What is the secret number of the key of {second}?\nAnswer: The key of {second} is"
            asked.append((question, f" the word {first}, and the secret number of {first} is {number}"))
        return lines, asked
    chosen = rng.choice(FREQUENT)
    lines = [f"Today's word is {chosen}."] * 12 + [
        f"Today's word is {word}." for word in FREQUENT if word != chosen
    ] * 3
    rng.shuffle(lines)
    question = "\nQuestion: Which word was today's word most often?\nAnswer: Most often today's word was"
    return lines, [(question, f" {chosen}")]
