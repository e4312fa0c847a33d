"""Recall tasks in plain English, after those of RULER (Hsieh et al., arXiv:2404.06654), and tasks from daily use."""

from __future__ import annotations

import ast
import importlib.util
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

__all__ = ["DAILY", "TASKS", "Context", "Question", "contexts", "reference"]

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
# Nothing in levattn was chosen by them
DAILY = "phones", "appointments", "table", "passage", "code", "chat", "summary"
DAYS = "Monday", "Tuesday", "Wednesday", "Thursday", "Friday"
PEOPLE = "Ames", "Burke", "Costa", "Dunn", "Ellis", "Ferro", "Grant", "Hicks"
TOWNS = "Lisbon", "Oslo", "Cairo", "Delhi", "Quito", "Seoul", "Turin", "Perth"
PASSAGE, GIVEN = 32, 26  # tokens that are to be copied, and the first of them, which are given
MODULES = "turtle", "statistics", "difflib", "_pydecimal", "unittest.mock", "doctest", "optparse", "fractions"
FOLLOWING = 200  # tokens of the text after the context


@dataclass(frozen=True)
class Question:
    """A question and its answer, in tokens; without an answer, it is the first 40 tokens of the dense model."""

    asked: list[int]
    answer: list[int] | None


@dataclass(frozen=True)
class Context:
    """Tokens of a text with something hidden in it, the questions on it, and the tokens of the text that follow."""

    task: str
    tokens: list[int]
    questions: list[Question]
    following: list[int]


def contexts(tokenizer: Any, length: int, seed: int, *, daily: bool = False) -> list[Context]:
    """Return one context of each task, all in the same stretch of a text, of `length` tokens.

    The text is Python's language reference, or for the tasks from daily use the docstrings of some of its modules.
    """
    rng = random.Random(seed)

    def tokens_of(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    text = docstrings(tokenizer) if daily else reference(tokenizer)
    start = rng.randrange(len(text) - length - FOLLOWING)
    found = []
    for task in DAILY if daily else TASKS:
        lines, asked = (_daily if daily else _task)(task, rng)
        hidden = [tokens_of(f"\n{line}\n") for line in lines]
        room = length - sum(map(len, hidden))
        body = text[start : start + room]
        cuts = sorted(rng.sample(range(room // 20, room - room // 20), len(hidden)))
        whole: list[int] = []
        for first, last, line in zip([0, *cuts], cuts, hidden, strict=False):
            whole += body[first:last] + line
        whole += body[cuts[-1] :] if cuts else body
        if task == "passage":
            found.append(Context(task, whole, _copies(whole, rng), text[start + room : start + room + FOLLOWING]))
            continue
        questions = [Question(tokens_of(ask), None if answer is None else tokens_of(answer)) for ask, answer in asked]
        found.append(Context(task, whole, questions, text[start + room : start + room + FOLLOWING]))
    return found


def _copies(tokens: list[int], rng: random.Random) -> list[Question]:
    """Return four passages of a context, to go on with after their first tokens."""
    starts = sorted(rng.sample(range(len(tokens) - PASSAGE), 4))
    return [Question(tokens[at : at + GIVEN], tokens[at + GIVEN : at + PASSAGE]) for at in starts]


@cache
def docstrings(tokenizer: Any) -> list[int]:
    """Return the tokens of the docstrings of modules that come with Python."""
    texts = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        tree = ast.parse(Path(str(spec.origin if spec else None)).read_text(encoding="utf-8"))
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        texts += [text for text in found if text and len(text) > 80]
    tokens: list[int] = tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"]
    return tokens


@cache
def reference(tokenizer: Any) -> list[int]:
    """Return the tokens of the language reference, which comes with Python."""
    found: list[int] = tokenizer("\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False)[
        "input_ids"
    ]
    return found


def _daily(task: str, rng: random.Random) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Return the lines of a task from daily use, in their order in the text, and questions with their answers."""
    if task == "phones":
        numbers = [(name, str(rng.randrange(100000, 999999))) for name in rng.sample(PEOPLE, 2)]
        lines = [f"The phone number of Doctor {name} is {number}." for name, number in numbers]
        ask = "\nQ: What is the phone number of Doctor {0}?\nA: The phone number of Doctor {0} is"
        return lines, [(ask.format(name), f" {number}") for name, number in numbers]
    if task == "appointments":
        name, day, town = rng.choice(PEOPLE), rng.choice(DAYS), rng.choice(TOWNS)
        lines = [f"The meeting with {name} is on {day}.", f"The office of {name} is in {town}."]
        asked = [(f"\nQ: When is the meeting with {name}?\nA: The meeting with {name} is on", f" {day}")]
        return lines, [*asked, (f"\nQ: Where is the office of {name}?\nA: The office of {name} is in", f" {town}")]
    if task == "code":
        numbers = [(name.upper(), str(rng.randrange(1000, 9999))) for name in rng.sample(PEOPLE, 3)]
        lines = [f"RETRIES_{name} = {number}" for name, number in numbers]
        return lines, [(f"\n>>> assert RETRIES_{name} ==", f" {number}") for name, number in numbers]
    if task == "chat":
        return _chat(rng)
    if task == "summary":
        return [], [("\n\nIn summary, the text above describes", None)]
    if task == "table":
        pairs = [(town, str(rng.randrange(100, 999))) for town in rng.sample(TOWNS, 4)]
        rows = [f"| {town} | {number} |" for town, number in pairs]
        head = ["| Town | Orders |", "| --- | --- |"]
        return ["\n".join([*head, *rows])], [
            ("\n".join(["\nThe table once more:", *head, *rows[:i], f"| {town} |"]), f" {number}")
            for i, (town, number) in enumerate(pairs)
        ]
    return [], []


def _chat(rng: random.Random) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Return the lines and the five turns of a conversation, each with all turns before it."""
    name = rng.choice(PEOPLE)
    facts = [
        ("meeting with {} is on", rng.choice(DAYS)),
        ("office of {} is in", rng.choice(TOWNS)),
        ("phone number of {} is", str(rng.randrange(10000, 99999))),
        ("favorite color of {} is", rng.choice(FACTS["color"])),
        ("hotel of {} is in", rng.choice(FACTS["city"])),
    ]
    lines = [f"The {fact.format(name)} {value}." for fact, value in facts]
    rng.shuffle(facts)
    turns, asked = "", []
    for fact, value in facts:
        turns += f"\nUser: Complete the sentence on the {fact.split()[0]} of {name}."
        turns += f"\nAssistant: The {fact.format(name)}"
        asked.append((turns, f" {value}"))
        turns += f" {value}."
    return lines, asked


def _task(task: str, rng: random.Random) -> tuple[list[str], list[tuple[str, str | None]]]:
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
