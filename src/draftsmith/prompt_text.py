"""Texts that become prompts: with places for a source and a language, and of whole characters."""

from __future__ import annotations

import re

from draftsmith.errors import InputError

MINI = "Translate to {language}: {source}\n"
"""What the shipped translation model was trained with."""
SOURCE = "{source}"


def filled(text: str, *, language: str, source: str) -> str:
    """A prompt's text with these in their places; what they hold themselves stays as it is."""
    values = {"language": language, "source": source}
    return re.sub(r"\{(language|source)\}", lambda found: values[found[1]], text)


def check_prompt(text: str, name: str) -> None:
    """Raise `InputError` unless a source has one place in this text."""
    if text.count(SOURCE) != 1:
        raise InputError(f"{name} must hold {SOURCE} once, got {text!r}")


def check_whole(text: str, where: str) -> None:
    """Raise `InputError` for half a character: half an emoji, written as an escape, is JSON but no
    text, and no tokenizer or file takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: expected whole characters, got a lone surrogate") from None
