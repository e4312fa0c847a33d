"""A question after a cache: its tokens, the options of `generate`, and which tokens of the answer are padding."""

from __future__ import annotations

import copy
from typing import Any

import torch

from levattn.integrations.transformers.calls import parameters_of, tokens_of

_DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")  # options of `generate`


def as_question(question: Any, given: Any) -> tuple[Any, Any]:
    """Return the tokens of a question and its mask, or raise; given: a mask beside the question."""
    question, mask = tokens_of("question", question, given)
    if not bool(mask.any(1).all()):
        raise ValueError("question has a row of padding alone; expected at least one token in each. Leave the row out")
    return question, mask


def option_of(model: Any, options: dict[str, Any], name: str) -> Any:
    """Return an option of `generate` as it takes it: from its keywords, or from its configurations."""
    if name in options:
        return options[name]
    for config in (options.get("generation_config"), model.generation_config):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return None


def told_by(model: Any, answer: Any, options: dict[str, Any]) -> Any:
    """Return which tokens of answers are no padding: all up to the first token of the end.

    A row that a criterion of its own stopped is filled with padding from there on.
    """
    ends = option_of(model, options, "eos_token_id")
    if ends is None:
        return torch.ones_like(answer, dtype=torch.bool)  # then all rows go on to the end
    ends = torch.as_tensor(ends, device=answer.device).reshape(-1)
    is_end = torch.isin(answer, ends)
    told = is_end.cumsum(1) - is_end.long() == 0
    if option_of(model, options, "stop_strings") is not None or options.get("stopping_criteria"):
        pad = option_of(model, options, "pad_token_id")
        pad = ends[0] if pad is None else torch.as_tensor(pad, device=answer.device)
        told &= (answer != pad).flip(1).cumsum(1).flip(1).bool() | is_end
    return told


def generated(model: Any, whole: Any, length: int, **options: Any) -> Any:
    """Return the output of `generate` for all tokens, the first of which are in a cache.

    With drafts, releases of transformers read these again, so they get the others alone.
    """
    drafts = any(option_of(model, options, name) for name in _DRAFTS)
    if not drafts or "next_sequence_length" not in parameters_of(model, "prepare_inputs_for_generation")[0]:
        return model.generate(whole, **options)
    streamer, config = options.get("streamer"), options.get("generation_config")
    if isinstance(streamer, FromQuestionOn):
        options["streamer"] = FromQuestionOn(streamer.streamer, streamer.length - length)
    if options.get("max_length") is not None:
        options["max_length"] -= length
    elif config is not None and config.max_length is not None and config.max_new_tokens is None:
        options["generation_config"] = config = copy.deepcopy(config)
        config.max_length -= length
    found = model.generate(whole[:, length:], **options)
    if isinstance(found, torch.Tensor):
        return torch.cat([whole[:, :length], found], 1)
    found.sequences = torch.cat([whole[:, :length], found.sequences], 1)
    return found


class FromQuestionOn:
    """A streamer that hands on all but the first tokens of a prompt."""

    def __init__(self, streamer: Any, length: int) -> None:
        self.streamer, self.length = streamer, length

    def put(self, value: Any) -> None:
        """Take the prompt, and then each token."""
        if self.length:
            value, self.length = value[..., self.length :], 0
        self.streamer.put(value)

    def end(self) -> None:
        """Take notice of the end."""
        self.streamer.end()
