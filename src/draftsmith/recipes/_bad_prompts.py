"""Prompts of a file that nothing can be learnt behind: what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.distill.store_records import Skipped
from draftsmith.errors import InputError
from draftsmith.option_groups import BadPromptOptions


def why_not(prompt: Sequence[int], *, context: int | None, vocab_size: int) -> str | None:
    """Why a model with this context and vocabulary cannot continue it; None: it can."""
    if not prompt:
        return "empty prompt"
    if context is not None and len(prompt) >= context:
        return f"longer than the context of {context} tokens"
    if not in_vocabulary(prompt, vocab_size):
        return f"token outside the vocabulary of {vocab_size}"
    return None


def in_vocabulary(tokens: Sequence[int], vocab_size: int) -> bool:
    """Whether a vocabulary has them all: a tokenizer may hold more than its model was made for."""
    return all(0 <= token < vocab_size for token in tokens)


def refuse(options: BadPromptOptions, bad: Sequence[Skipped]) -> None:
    """InputError for these prompts, where --on-bad-prompt asks for one."""
    if bad and options.on_bad_prompt == "error":
        raise InputError(
            f"prompt {bad[0].prompt_id}: {bad[0].reason} ({len(bad)} such prompts; "
            "--on-bad-prompt skip leaves them out)"
        )
