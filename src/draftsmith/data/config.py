"""Which texts are read, and which are held out."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.config import Configuration, require


@dataclass(frozen=True, kw_only=True)
class TextConfig(Configuration):
    """What is learnt from, and what is held out."""

    text: tuple[str, ...]
    """Files, folders or glob patterns: plain text (a file is a document), JSONL with a field
    `text` (a line is one), also .gz and .xz. python:stdlib is the folder of Python's sources."""
    include: tuple[str, ...] = ("*",)
    """Names to take from folders, relative to the folder: patterns such as *.py."""
    exclude: tuple[str, ...] = ()
    """Names to leave out of folders."""
    eval_text: tuple[str, ...] = ()
    """Held-out files, read like --text."""
    hold_out: float = 0.0
    """Without --eval-text: the share of files to hold out, chosen by a hash of their names."""
    attend_across_documents: bool = True
    """Tokens of a packed block may look at the documents before their own."""

    def validate(self) -> None:
        require(bool(self.text), "--text must name at least one file or folder")
        require(0 <= self.hold_out < 1, "--hold-out must be at least 0 and less than 1")
