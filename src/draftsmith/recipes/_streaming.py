"""Text that appears as it is decoded, accepted drafts coloured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from draftsmith.detokenize import Detokenizer, Piece
from draftsmith.rows import StopStrings

DRAFTED = "green"
"""Style of tokens that a drafter proposed and the target accepted."""


class Stream:
    """Prints one text while it is decoded; nothing from a stop string on."""

    def __init__(self, tokenizer: Any, console: Console, stop_strings: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._console = console
        self._stops = StopStrings(stop_strings, tokenizer)
        self._held: list[Piece] = []
        self._stopped = False

    def add(self, tokens: Sequence[int], accepted: int) -> None:
        """Take one step's tokens; the first `accepted` of them were drafted."""
        for number, token in enumerate(tokens):
            self._put(self._detokenizer.add(token), number < accepted)

    def finish(self) -> None:
        self._put(self._detokenizer.finish(), False)
        self._print(len(self._text()))
        self._console.print()

    def _text(self) -> str:
        return "".join(piece.text for piece in self._held)

    def _put(self, text: str, drafted: bool) -> None:
        if self._stopped:
            return
        self._held.append(Piece(text=text, drafted=drafted))
        held = self._text()
        whole = len(self._stops.cut(held))
        if whole < len(held):
            self._stopped = True
            self._print(whole)
            self._held.clear()
            return
        # the end of what is held may be the beginning of a stop string
        hidden = max(
            (n for s in self._stops.strings for n in range(1, len(s)) if held.endswith(s[:n])),
            default=0,
        )
        self._print(len(held) - hidden)

    def _print(self, length: int) -> None:
        """Print the first `length` characters of what is held."""
        while length > 0:
            piece = self._held.pop(0)
            shown, rest = piece.text[:length], piece.text[length:]
            length -= len(shown)
            style = DRAFTED if piece.drafted else ""
            self._console.print(Text(shown, style=style), end="", soft_wrap=True)
            if rest:
                self._held.insert(0, Piece(text=rest, drafted=piece.drafted))
        self._console.file.flush()
