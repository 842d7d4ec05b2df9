"""Text that appears as it is decoded, accepted drafts coloured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from draftsmith.detokenize import Detokenizer, Piece
from draftsmith.rows import StopStrings

DRAFTED = "green"
"""Style of tokens that a drafter proposed and the target accepted."""
_GREEN, _RESET = "\x1b[32m", "\x1b[0m"
# What a terminal would act on: a model must not ring bells or move the cursor.
_ACTIVE = {code: None for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)}


def write_text(console: Console, text: str, *, drafted: bool = False) -> None:
    """A model's text as it is (rich would turn its tabs into blanks), coloured in a terminal."""
    if console.is_terminal:
        text = text.translate(_ACTIVE)
    if drafted and console.color_system is not None and not console.legacy_windows:
        text = f"{_GREEN}{text}{_RESET}"
    console.file.write(text)


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
        write_text(self._console, "\n")

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
            write_text(self._console, shown, drafted=piece.drafted)
            if rest:
                self._held.insert(0, Piece(text=rest, drafted=piece.drafted))
        self._console.file.flush()
