"""Records of a live translation: its input and its output, one per update.

    source        "This is"    "This is an exam"    "This is an example."  final
    Hypothesis    seg 0 rev 0  seg 0 rev 1          seg 0 rev 2
    UpdateRecord  seg 0 rev 0  seg 0 rev 1          seg 0 rev 2

Both are lines of JSON files; an unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import TypeAlias, TypeVar

from draftsmith.data.jsonl import IN_MEMORY, in_memory, write_objects
from draftsmith.errors import InputError

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
        if self.time is not None and not 0 <= self.time < NUMBERS:  # NaN is not
            raise InputError(f"time must be 0 or more and below 2^53 seconds, got {self.time}")


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
    output: tuple[int, ...] = field(default=(), metadata=IN_MEMORY)
    """The whole output, without end tokens; not written."""
    stable: int = field(default=0, metadata=IN_MEMORY)
    """Characters of `shown` that are not expected to change; not written."""
    erased: int = field(default=0, metadata=IN_MEMORY)
    """Characters that were removed from the display; not written."""

    def numbered_as(self, hypothesis: Hypothesis) -> UpdateRecord:
        """Take over the segment, revision and reference of the hypothesis."""
        seg, rev, reference = hypothesis.seg, hypothesis.rev, hypothesis.reference
        return replace(self, seg=seg, rev=rev, reference=reference)


Record: TypeAlias = "Hypothesis | UpdateRecord"
R = TypeVar("R", Hypothesis, UpdateRecord)


def write_lines(path: Path, records: Iterable[Record]) -> None:
    """Write a JSONL file atomically. Keys whose value is None are left out."""
    lines = (
        {k: v for k, v in asdict(one).items() if v is not None and k not in in_memory(type(one))}
        for one in records
    )
    write_objects(path, lines)


def check_order(before: Record, after: Record, *, repeats: bool = False) -> None:
    """Raise InputError where `after` cannot follow `before` in one stream.

    repeats: a revision that was not final may come again.
    """
    over = before.final and after.seg == before.seg
    if over or (after.seg, after.rev + repeats) <= (before.seg, before.rev):
        raise InputError(
            f"segment {after.seg} revision {after.rev} cannot follow segment {before.seg} revision "
            f"{before.rev}{' (final)' if before.final else ''}: give one stream at a time, in order"
        )


def segments(records: Iterable[R], *, repeats: bool = True) -> list[list[R]]:
    """Split records by segment. Raises InputError like `check_order`."""
    records = list(records)
    for before, after in pairwise(records):
        check_order(before, after, repeats=repeats)
    return [list(part) for _, part in groupby(records, lambda one: one.seg)]
