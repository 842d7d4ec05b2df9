"""Tokens to text: all at once with the origin of each piece, or token by token for streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of text and where it came from."""

    text: str
    drafted: bool


class Detokenizer:
    """Tokens to text, a piece at a time; the pieces add up to the decoded whole.

    A token is not a piece of text of its own: a character may span several, and a leading blank
    depends on what stands before. So a short run is decoded with and without the new tokens:

        tokens   ... a b c | d            decode(a b c d) - decode(a b c) = the text of d
                     ^start ^read         held back while it ends inside a character
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = self._read = 0

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character is not whole."""
        self._tokens.append(token)
        return self._take(force=False)

    def finish(self) -> str:
        """What was held back."""
        return self._take(force=True)

    def _take(self, *, force: bool) -> str:
        before = self._decode(self._tokens[self._start : self._read])
        after = self._decode(self._tokens[self._start :])
        if len(after) <= len(before) or (after.endswith("\N{REPLACEMENT CHARACTER}") and not force):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return after[len(before) :]


def pieces(tokenizer: Any, tokens: Sequence[int], drafted: Sequence[bool]) -> tuple[Piece, ...]:
    """The text of the tokens, in runs of one origin. A character belongs to its last token."""
    detokenizer = Detokenizer(tokenizer)
    runs: list[Piece] = []

    def add(text: str, origin: bool) -> None:
        if not text:
            return
        if runs and runs[-1].drafted == origin:
            text = runs.pop().text + text
        runs.append(Piece(text=text, drafted=origin))

    for token, origin in zip(tokens, drafted, strict=True):
        add(detokenizer.add(token), origin)
    add(detokenizer.finish(), bool(drafted[-1]) if len(drafted) else False)
    return tuple(runs)
