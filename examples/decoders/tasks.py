"""Recall tasks in plain English, after those of RULER (Hsieh et al., arXiv:2404.06654)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics
from typing import Any

__all__ = ["TASKS", "Context", "Question", "contexts", "reference"]

NAMES = (
    *("apple", "river", "stone", "tiger", "castle", "garden", "window", "bridge"),
    *("silver", "candle", "forest", "harbor", "violin", "rocket", "island"),
)
WORDS = (
    *("anchor", "basket", "cherry", "dragon", "eagle", "falcon", "guitar", "hammer"),
    *("jacket", "kitten", "ladder", "mirror", "needle", "orange", "pencil", "rabbit"),
)
FACTS = {
    "color": ("red", "green", "blue", "yellow", "purple"),
    "fruit": ("banana", "lemon", "mango", "peach", "cherry"),
    "city": ("Paris", "London", "Tokyo", "Berlin", "Madrid"),
}
FREQUENT = "marble", "lantern", "pepper"
TASKS = ("one number", "one of four", "three words", "three facts", "two hops", "frequent words")
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
    """Return one context of each task, all in the same stretch of Python's language reference, of `length` tokens."""
    rng = random.Random(seed)

    def tokens_of(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    text = reference(tokenizer)
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


@cache
def reference(tokenizer: Any) -> list[int]:
    """Return the tokens of the language reference, which comes with Python."""
    found: list[int] = tokenizer("\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False)[
        "input_ids"
    ]
    return found


def _task(task: str, rng: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the lines of a task, in their order in the text, and questions with their answers."""
    names = rng.sample(NAMES, 8)
    numbers = [str(rng.randrange(10000, 99999)) for _ in names]

    def ask(name: str) -> str:
        return f"\nQuestion: What is the secret number of {name}?\nAnswer: The secret number of {name} is"

    if task in ("one number", "one of four"):
        pairs = list(zip(names, numbers, strict=True))[: 1 if task == "one number" else 4]
        lines = [f"The secret number of {name} is {number}." for name, number in pairs]
        return lines, [(ask(name), f" {number}") for name, number in pairs]
    name = names[0].title()
    if task == "three words":
        first, second, third = rng.sample(WORDS, 3)
        question = f"\nQuestion: What are the secret words of {name}?\nAnswer: The secret words of {name} are"
        answer = f" {first}, {second} and {third}"
        return [f"The secret words of {name} are{answer}."], [(question, answer)]
    if task == "three facts":
        lines, asked = [], []
        for kind, values in FACTS.items():
            value = rng.choice(values)
            lines.append(f"The favorite {kind} of {name} is {value}.")
            question = f"What is the favorite {kind} of {name}?\nAnswer: The favorite {kind} of {name} is"
            asked.append((f"\nQuestion: {question}", f" {value}"))
        return lines, asked
    if task == "two hops":
        lines, asked = [], []
        for first, second, number in zip(names[:3], names[3:6], numbers, strict=False):
            lines += [f"The secret number of {first} is {number}.", f"The key of {second} is {first}."]
            question = f"What is the key of {second}, and what is its secret number?\nAnswer: The key of {second} is"
            asked.append((f"\nQuestion: {question}", f" {first}. The secret number of {first} is {number}"))
        return lines, asked
    chosen = rng.choice(FREQUENT)
    words = [chosen] * 12 + [word for word in FREQUENT if word != chosen] * 3
    lines = [f"Today's word is {word}." for word in words]
    rng.shuffle(lines)
    question = "\nQuestion: Which word was today's word most often?\nAnswer: Most often today's word was"
    return lines, [(question, f" {chosen}")]
