"""The text of a chat template around a document and the questions on it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers import BatchEncoding

from levattn._core.checks import whole_number
from levattn.integrations.transformers.calls import check_tokenizer

_MARKS = "@@first@@", "@@answer@@", "@@second@@"  # replace messages while a chat template is read
_TOLD = 3  # first tokens that show that a context begins a message
_TEXTS = "a", "\n1"  # of messages


class Prompt:
    """Tokens of documents and of questions on them, with the text of the tokenizer's chat template around them.

    A document and the first question are one message, with an empty line between them. `document` gives the beginning
    of this message, which `compress` reads once, and `question` gives its end. A question after an answer is the next
    message. Without a chat template the model reads the document as it is. A question then follows on a new line, and
    the model continues it.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        The tokenizer. Its template may hold a system message of its own.

    Attributes
    ----------
    has_template : bool
        Whether the tokenizer has a chat template. If so, it gives the special tokens; otherwise the tokenizer does.

    Raises
    ------
    TypeError, ValueError
        If `tokenizer` is no tokenizer, or its chat template cannot be read.

    Notes
    -----
    Time: the template is rendered twice, and the tokenizer reads each text once.

    References
    ----------
    Own construction, on chat templates of transformers.

    Examples
    --------
    >>> from levattn.integrations.transformers import Prompt, compress
    >>> prompt = Prompt(tokenizer)  # doctest: +SKIP
    >>> cache = compress(model, prompt.document(text), 0.25, heads=profile)  # doctest: +SKIP
    >>> fork = cache.copy()  # doctest: +SKIP
    >>> for words in ("Who wrote the letter?", "And when?"):  # doctest: +SKIP
    ...     question = prompt.question(words, fork)
    ...     print(*prompt.answers(fork.ask(model, question, max_new_tokens=50), question))
    """

    def __init__(self, tokenizer: Any) -> None:
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self._around, self._between = ("", ""), None  # a message, and the text from an answer to the next message
        if self.has_template:
            first, answer, second = _MARKS
            self._around = self._around_message(first)
            try:
                whole = self._rendered([("user", first), ("assistant", answer), ("user", second)])
            except ValueError:  # the template has no such turns
                return
            _, found, after = whole.partition(answer)
            between, also, _ = after.partition(second)
            self._between = between if found and also else None

    def _around_message(self, mark: str) -> tuple[str, str]:
        """Return the text before and after a message, or raise."""
        for content in (mark, [{"type": "text", "text": mark}]):  # the second of templates for several media
            before, found, after = self._rendered([("user", content)]).partition(mark)
            if found:
                return before, after
        raise _unread("it drops the message")

    def _rendered(self, messages: list[tuple[str, Any]]) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except ImportError:
            raise
        except Exception as error:  # of any kind, because templates are programs
            raise _unread(f"{type(error).__name__}: {error}") from error

    def text_of(self, document: str) -> str:
        """Return a document after the start of a message, as `document` reads it.

        Parameters
        ----------
        document : str
            The document.

        Returns
        -------
        str
            The text whose tokens `document` returns.
        """
        return self._around[0] + document

    def document(self, document: str | Sequence[str], tokens: int | None = None) -> BatchEncoding:
        """Return the tokens of a document, to `compress`.

        Parameters
        ----------
        document : str or sequence of str
            The document. Several make a batch, with padding on the left.
        tokens : int, optional
            Maximum number of tokens of each, counted from its start; all if None.

        Returns
        -------
        transformers.BatchEncoding
            ``input_ids`` and ``attention_mask``, tensors of shape (documents, positions) on the CPU.

        Raises
        ------
        TypeError, ValueError
            If a document is no text, or an empty one, or `tokens` is no number above 0.
        """
        tokens = None if tokens is None else whole_number("tokens", tokens)
        special = not self.has_template
        texts = _texts("document", document)
        for i, each in enumerate(texts):
            if not each.strip():  # a chat template would give it tokens
                raise ValueError(f"document {i} is {each!r:.50}; expected a text that is not empty")
        rows = [self._ids(self.text_of(each), special=special) for each in texts]
        return self._batch([row[:tokens] for row in rows])

    def question(self, question: str | Sequence[str], cache: Any = None) -> BatchEncoding:
        """Return the tokens of a question, for ``cache.ask``.

        Parameters
        ----------
        question : str or sequence of str
            The question. Several make a batch, with padding on the left.
        cache : CompressedCache, optional
            The cache that is asked. If it holds an answer, the question is the next message. If its document was read
            without the template, the question is a message of its own. Otherwise, and without a cache, the question
            ends the message of the document.

        Returns
        -------
        transformers.BatchEncoding
            ``input_ids`` and ``attention_mask``, tensors of shape (questions, positions) on the CPU.

        Raises
        ------
        TypeError
            If a question is no text.
        ValueError
            If the cache holds more than one sequence, and not as many as there are questions. If it holds an answer,
            and the chat template has no place for a message after one.
        """
        texts = _texts("question", question)
        if cache is not None and len(cache.tokens) not in (1, len(texts)):
            raise ValueError(
                f"question has {len(texts)} texts and the cache {len(cache.tokens)} rows; expected as many, or a "
                "cache of one row"
            )
        return self._batch([self._asked(text, cache, i) for i, text in enumerate(texts)])

    def answers(self, found: Any, question: Any) -> list[str]:
        """Return the texts of answers.

        Parameters
        ----------
        found : torch.Tensor of shape (questions, positions)
            The output of ``cache.ask``.
        question : mapping
            The output of `question`, which was asked.

        Returns
        -------
        list of str
            The text after each question, without special tokens.
        """
        answers = found[:, question["input_ids"].shape[1] :]
        return [str(text) for text in self.tokenizer.batch_decode(answers, skip_special_tokens=True)]

    def _asked(self, question: str, cache: Any, row: int) -> list[int]:
        if not self.has_template:
            return self._ids(f"\n{question}")
        before, after = self._around
        if cache is None:
            return self._ids(f"\n\n{question}{after}")
        row = row if len(cache.tokens) > 1 else 0
        held = cache.tokens[row][cache.present[row].bool()].tolist()
        if cache.get_seq_length() > cache.context_length:
            return self._after_answer(question, held)
        begun = self._begun()
        return self._ids(f"\n\n{question}{after}" if held[: len(begun)] == begun else f"{before}{question}{after}")

    def _begun(self) -> list[int]:
        """Return the first tokens of a message, without a token that merges with its text."""
        pairs = zip(*(self._ids(self._around[0] + text) for text in _TEXTS), strict=False)
        return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)][:_TOLD]

    def _after_answer(self, question: str, held: list[int]) -> list[int]:
        """Return the tokens of the next message after an answer, which may end as the template ends it."""
        if self._between is None:
            raise ValueError(
                "the cache holds an answer, and the chat template of the tokenizer has no place for a question after "
                "one; expected a cache without answers. Give each question a copy of the cache"
            )
        ids = self._ids(f"{self._between}{question}{self._around[1]}")
        ended = set(self.tokenizer.all_special_ids) & set(held[-1:]) & set(self._ids(self._between))
        return ids[ids.index(held[-1]) + 1 :] if ended else ids

    def _ids(self, text: str, *, special: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def _batch(self, rows: list[list[int]]) -> BatchEncoding:
        length, own = max(map(len, rows)), self.tokenizer
        padding = next((x for x in (own.pad_token_id, own.eos_token_id) if x is not None), 0)
        ids = [[padding] * (length - len(row)) + row for row in rows]
        mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
        found = {"input_ids": torch.tensor(ids).long(), "attention_mask": torch.tensor(mask).long()}
        return BatchEncoding(found)


def _unread(reason: str) -> ValueError:
    return ValueError(
        f"the chat template of the tokenizer cannot be read ({reason}); expected one for messages of a user. Mend it, "
        "or set tokenizer.chat_template = None"
    )


def _texts(name: str, value: Any) -> list[str]:
    """Return an argument that is a text or several, as a list, or raise."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} is of type {type(value).__name__}; expected a text, or a sequence of texts")
    return list(texts)
