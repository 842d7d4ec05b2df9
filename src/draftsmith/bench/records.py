"""One line of records.jsonl: one prompt, one drafter, one temperature, one repeat.

Every metric of a report can be rebuilt from these lines alone. Seconds are wall-clock. The step
that carries the prompt is kept apart (`prefill_*`): speed-ups compare the decoding behind it.

Prompts that were decoded together form a group; seconds are the whole group's, on each of its
lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.config import from_dict
from draftsmith.core.generation import Piece
from draftsmith.errors import InputError
from draftsmith.provenance import append_jsonl

BASELINE = "none"
"""Our own autoregressive loop: what a speed-up is measured against."""
TRANSFORMERS = "transformers"
"""The second column: `generate` of transformers, without any draft."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSeconds:
    """Where the seconds of the decoding phase went (the group's)."""

    draft: float
    """The drafter: proposing, and taking in what was settled."""
    target: float
    """The target's forwards, their masks and cache writes included."""
    verify: float
    """Laws, draws, accepting."""
    other: float
    """The rest of the loop: stopping, committing, bookkeeping."""

    @property
    def total(self) -> float:
        return self.draft + self.target + self.verify + self.other


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSeconds:
    """What the decoding phase should have cost by the cost table, which is measured apart."""

    baseline: float
    """Its tokens, one by one: tokens * t_target(1)."""
    draft: float
    """Sum over its steps of t_draft(tokens fed)."""
    target: float
    """Sum over its steps of t_target(tokens fed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDivergence:
    """Where a text first differs from plain decoding's, and how near the target's choice was."""

    at: int
    """Number of generated tokens before it."""
    gap: float
    """Largest minus second largest logit of the target there, one by one, in its own dtype."""
    bound: float
    """A gap below this is a near-tie that rounding may flip (see `equality`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The target against itself: the same text scored again in chunks, at temperature 0."""

    tokens: int
    """Tokens compared: up to each first flip."""
    flips: int
    """Scorings (one per chunk size) with a token that plain decoding did not choose."""
    largest_gap: float | None
    """The largest gap among the flips, as in `FirstDivergence`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One prompt decoded once."""

    prompt: str
    """The prompt's id in its suite."""
    turn: int = 0
    tag: str | None = None
    language: str | None = None
    drafter: str
    temperature: float
    repeat: int
    seed: int
    place: int
    """When in its round this arm ran (rounds rotate the order)."""
    group: int
    prompt_tokens: int
    tokens: int
    """Generated tokens, those of the prompt's step included."""
    decode_tokens: int
    """Generated tokens behind the prompt's step."""
    steps: int | None = None
    """Target forwards, the prompt's included. None here and below: transformers does not say."""
    decode_steps: int | None = None
    accepted: int | None = None
    offered: int | None = None
    """Sum over steps of the depth offered on the best path."""
    proposed: int | None = None
    """Nodes in all trees."""
    by_position: tuple[tuple[int, int], ...] = ()
    """Per depth: (times offered behind accepted ones, times accepted)."""
    by_origin: dict[str, int] | None = None
    """Accepted tokens per origin of the draft."""
    finish_reason: str
    seconds: float
    """Wall-clock time from the prompt to the last token."""
    prefill_seconds: float
    """The prompt's step, cache allocation included."""
    decode_seconds: float
    phases: PhaseSeconds | None = None
    costs: CostSeconds | None = None
    digest: str
    """Digest of the generated token ids: equal digests, equal texts."""
    identical: bool | None = None
    """Same tokens as plain decoding; None above temperature 0 and under a lossy rule."""
    divergence: FirstDivergence | None = None
    floor: Floor | None = None
    """On lines of plain decoding only."""
    prompt_tail: str | None = None
    """The last characters of the prompt, to read the text with; first repeat only."""
    pieces: tuple[Piece, ...] | None = None
    """The text with origins; first repeat only."""
    lossy_rule: str | None = None
    """What it was verified by, if the output law is then not the target's."""


def digest(tokens: Sequence[int]) -> str:
    """Return eight bytes of SHA-256 over the token ids, in hexadecimal."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


def append(path: Path, records: Iterable[RunRecord]) -> None:
    """Append lines, all or none."""
    append_jsonl(path, *records)


def read(path: Path) -> tuple[RunRecord, ...]:
    """Read the records of a file.

    Raises:
        InputError: no such file, or a line that is no record; it is named.
    """
    try:
        # not splitlines: U+2028, U+0085 and the like stand in our strings as they are
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the records {path}: {error}") from None
    if not lines[-1]:
        lines.pop()  # behind the last line feed
    out = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
        out.append(from_dict(RunRecord, values, where=where))
    return tuple(out)
