"""Records of a live translation: its input and its output, one per update.

    source        "This is"    "This is an exam"    "This is an example."  final
    Hypothesis    seg 0 rev 0  seg 0 rev 1          seg 0 rev 2
    UpdateRecord  seg 0 rev 0  seg 0 rev 1          seg 0 rev 2

Both are lines of JSON files; an unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.config import from_dict
from draftsmith.data.prompts import check_whole
from draftsmith.errors import InputError
from draftsmith.provenance import write_text_atomic

T = TypeVar("T")
OnBad = Callable[[InputError], None]
"""Called with the error of an invalid line; without it, the error is raised."""
NUMBERS = 2**53
"""Whole numbers below it are exact in every JSON parser."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """The text of a whole segment as a recogniser has it at one moment."""

    seg: int
    """Number of the segment; segments come one after the other."""
    rev: int
    """Number of the hypothesis within its segment, ascending."""
    text: str
    final: bool = False
    """The recogniser will not change the text any more."""
    reference: str | None = None
    """A translation of the whole segment, to compare with."""
    time: float | None = None
    """Arrival in seconds from the beginning; None: unknown."""

    def __post_init__(self) -> None:
        for name, number in (("seg", self.seg), ("rev", self.rev)):
            if not 0 <= number < NUMBERS:
                raise InputError(f"{name} must be 0 or more and below 2^53, got {number}")
        if self.time is not None and not 0 <= self.time < math.inf:  # NaN is not
            raise InputError(f"time must be 0 or more seconds, got {self.time}")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRecord:
    """One update of a live translation. Counts are in the target's tokens, without end tokens."""

    seg: int
    rev: int
    source: str
    shown: str
    """The displayed text."""
    full: str
    """The text of the whole output, including the hidden end."""
    final: bool
    tokens: int
    """Tokens of the whole output."""
    drafted: int
    """Tokens of the previous output that were drafted in the first step."""
    accepted: int
    """Accepted tokens among `drafted`."""
    redrafted: int = 0
    """Tokens drafted in later steps: from the old tail found again, or by another drafter."""
    reaccepted: int = 0
    """Accepted tokens among `redrafted`."""
    forwards: int = 0
    """Forward passes of the target."""
    fed: int = 0
    """Tokens that the forward passes read; the others were in the cache."""
    seconds: float = 0.0
    """Time of the whole update."""
    first_seconds: float = 0.0
    """Time of the first forward pass, which reads the source and verifies the draft."""
    restarts: int = 0
    """1: the target failed, and the update was decoded again with an empty cache and no draft."""
    degenerate: bool = False
    """The output is empty or did not end: the previous text is still shown, and drafted from."""
    reference: str | None = None


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """Read the records of a JSONL file; empty lines are skipped.

    Raises:
        InputError: the file cannot be read, or a line (named by its number) is invalid.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}") from None
    for where, values in json_objects(lines, f"{path}, "):
        yield as_record(kind, values, where)


def as_record(kind: type[T], values: dict[str, Any], where: str) -> T:
    """Build a record from these values; errors name the line."""
    try:
        return from_dict(kind, values, where=where)
    except InputError as error:
        if where in str(error):
            raise
        raise InputError(f"{where}: {error}") from None


@contextlib.contextmanager
def skipping(on_bad: OnBad | None) -> Iterator[None]:
    """Pass an InputError raised inside to `on_bad`, if given, so that the next line is read."""
    try:
        yield
    except InputError as error:
        if on_bad is None:
            raise
        on_bad(error)


def numbered(
    lines: Iterable[str], source: str = "", on_bad: OnBad | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (where, line) for every line that is text; `where` begins with `source`.

    Raises:
        InputError: a line is not UTF-8 (read with `surrogateescape`), or has a NUL character.
    """
    for number, line in enumerate(lines, 1):
        where, good = f"{source}line {number}", False
        with skipping(on_bad):
            if not line.isascii() and any("\ud800" <= char <= "\udfff" for char in line):
                raise InputError(
                    f"{where} is not UTF-8: convert the text, or its recogniser's output"
                )
            if "\0" in line:
                raise InputError(f"{where} holds a NUL character: is it UTF-16, or no text?")
            good = True
        if good:
            yield where, line


def json_objects(
    lines: Iterable[str], source: str = "", on_bad: OnBad | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, object) for every line that is not empty.

    Raises:
        InputError: a line is no JSON object, or has an unpaired surrogate.
    """
    for where, line in numbered(lines, source, on_bad):
        values = None
        with skipping(on_bad):
            values = _object(where, line) if line.strip() else None
        if values is not None:
            yield where, values


def _whole(digits: str) -> int:
    if len(digits) > 20:  # Python itself reads thousands, and then fails to write them
        raise ValueError(f"expected a number below 2^53, got {len(digits)} digits")
    return int(digits)


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"expected a finite number, got {text[:20]}")
    return float(text)


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON: {error.msg}") from None
    except RecursionError:
        raise InputError(
            f"{where} is not JSON that can be read: its brackets are too deep"
        ) from None
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{where}: expected a JSON object, got {line.strip()[:80]}")
    check_whole(json.dumps(values, ensure_ascii=False), where)
    return values


def write_lines(path: Path, records: Iterable[Hypothesis | UpdateRecord]) -> None:
    """Write a JSONL file atomically. Keys whose value is None are left out."""
    lines = (
        json.dumps({k: v for k, v in asdict(one).items() if v is not None}, ensure_ascii=False)
        for one in records
    )
    write_text_atomic(path, "".join(f"{line}\n" for line in lines))
