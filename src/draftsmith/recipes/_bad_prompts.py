"""Prompts of a file that nothing can be learnt behind: what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence


def why_not(prompt: Sequence[int], *, context: int | None, vocab_size: int) -> str | None:
    """Why a model with this context and vocabulary cannot continue it; None: it can."""
    if not prompt:
        return "empty prompt"
    if context is not None and len(prompt) >= context:
        return f"longer than the context of {context} tokens"
    return None if known(prompt, vocab_size) else f"token outside the vocabulary of {vocab_size}"


def known(tokens: Sequence[int], vocab_size: int) -> bool:
    """Whether a vocabulary has them all: a tokenizer may hold more than its model was made for."""
    return all(0 <= token < vocab_size for token in tokens)
