"""The text of a chat template around a document and the questions on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchEncoding

_MARKS = "@@first@@", "@@answer@@", "@@second@@"  # replace messages while a chat template is read
_TOLD = 3  # first tokens that show that a context begins a message


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
    ValueError
        If the chat template cannot be read.

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
        self.tokenizer = tokenizer
        self._parts: tuple[str, str, str] | None = None  # before, after and between messages
        if getattr(tokenizer, "chat_template", None):
            first, answer, second = _MARKS
            alone = self._rendered([("user", first)])
            before, mark, after = alone.partition(first)
            if mark:
                whole = self._rendered([("user", first), ("assistant", answer), ("user", second)])
                self._parts = before, after, whole.partition(answer)[2].partition(second)[0]
        self.has_template = self._parts is not None

    def _rendered(self, messages: list[tuple[str, str]]) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except ImportError:
            raise
        except Exception as error:  # of any kind, because templates are programs
            raise ValueError(
                f"the chat template of the tokenizer cannot be read ({type(error).__name__}: {error}); expected one "
                "for messages of a user and an assistant. Mend it, or set tokenizer.chat_template = None"
            ) from error

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
        return document if self._parts is None else self._parts[0] + document

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
        TypeError
            If a document is no text.
        """
        special = not self.has_template
        rows = [self._ids(self.text_of(each), special=special) for each in _texts("document", document)]
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
            If the cache holds more than one sequence, and not as many as there are questions.
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
        if self._parts is None:
            return self._ids(f"\n{question}")
        before, after, between = self._parts
        if cache is None:
            return self._ids(f"\n\n{question}{after}")
        row = row if len(cache.tokens) > 1 else 0
        held = cache.tokens[row][cache.present[row].bool()].tolist()
        if cache.tokens.shape[1] > cache.context_length:  # after an answer, which may end as the template ends it
            ids = self._ids(f"{between}{question}{after}")
            return ids[held[-1:] == ids[:1] :]
        begun = self._ids(before)[:_TOLD]
        return self._ids(f"\n\n{question}{after}" if held[: len(begun)] == begun else f"{before}{question}{after}")

    def _ids(self, text: str, *, special: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def _batch(self, rows: list[list[int]]) -> BatchEncoding:
        length, own = max(map(len, rows)), self.tokenizer
        padding = next((x for x in (own.pad_token_id, own.eos_token_id) if x is not None), 0)
        ids = [[padding] * (length - len(row)) + row for row in rows]
        mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
        found = {"input_ids": torch.tensor(ids).long(), "attention_mask": torch.tensor(mask).long()}
        return BatchEncoding(found)


def _texts(name: str, value: Any) -> list[str]:
    """Return an argument that is a text or several, as a list, or raise."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} is of type {type(value).__name__}; expected a text, or a sequence of texts")
    return list(texts)
