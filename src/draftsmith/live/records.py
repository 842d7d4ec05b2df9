"""What comes into a live translation and what it did, one record per update.

    source        "This is"    "This is an exam"    "This is an example."  final
    Hypothesis    seg 0 rev 0  seg 0 rev 1          seg 0 rev 2
    UpdateRecord  seg 0 rev 0  seg 0 rev 1          seg 0 rev 2

Both are lines of JSON files; unknown keys are errors that name the nearest known one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.config import from_dict
from draftsmith.errors import InputError
from draftsmith.provenance import write_text_atomic

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """What a recogniser holds a segment to be, whole, at one moment."""

    seg: int
    """Number of the segment; segments come one after the other."""
    rev: int
    """Number of the hypothesis within its segment, ascending."""
    text: str
    final: bool = False
    """It will not change any more."""
    reference: str | None = None
    """A translation of the whole segment, to compare with."""
    time: float | None = None
    """Seconds from the beginning at which it came; None: not known."""

    def __post_init__(self) -> None:
        if min(self.seg, self.rev) < 0:
            raise InputError(f"seg and rev are 0 or more, got {self.seg} and {self.rev}")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRecord:
    """One update of a live translation. Tokens are the target's; ends of sequence do not count."""

    seg: int
    rev: int
    source: str
    shown: str
    """What the reader sees after it."""
    full: str
    """The whole output, hidden tail included."""
    final: bool
    tokens: int
    """Of the whole output."""
    drafted: int
    """Of the previous output, offered from the beginning."""
    accepted: int
    """Of these, those that stayed."""
    redrafted: int = 0
    """Offered later in the same update: found again in the old tail, or by another drafter."""
    reaccepted: int = 0
    """Of these, those that stayed."""
    forwards: int = 0
    """Of the target."""
    fed: int = 0
    """Tokens that these read; the others were in the cache."""
    seconds: float = 0.0
    """Of the whole update."""
    first_seconds: float = 0.0
    """Of its first forward, which reads the source and judges the draft."""
    degenerate: bool = False
    """Nothing was said, or too much: the text before is still shown, and drafted from."""
    reference: str | None = None


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """The records of a JSONL file; empty lines are skipped.

    Raises:
        InputError: the file, or one of its lines (by number), cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    for where, values in json_objects(lines, f"{path}, "):
        yield from_dict(kind, values, where=where)


def json_objects(lines: Iterable[str], source: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of every line that is not empty; `source` begins what names a line.

    Raises:
        InputError: a line is no JSON object, or holds half a character.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{source}line {number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{where} is not JSON: {error.msg}") from None
        if not isinstance(values, dict):
            raise InputError(f"{where}: expected a JSON object, got {line.strip()[:80]}")
        try:  # half an emoji, written as an escape, is JSON but no text
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InputError(f"{where}: expected whole characters, got a lone surrogate") from None
        yield where, values


def write_lines(path: Path, records: Iterable[Hypothesis | UpdateRecord]) -> None:
    """A JSONL file, whole or not at all. What is None is left out."""
    lines = (
        json.dumps({k: v for k, v in asdict(one).items() if v is not None}, ensure_ascii=False)
        for one in records
    )
    write_text_atomic(path, "".join(f"{line}\n" for line in lines))
