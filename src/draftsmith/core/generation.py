"""`generate`: prompts in, texts and statistics out; a consumer of the decoding loop.

Tokens to text: all at once with the origin of each piece, or token by token for streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.rows import StopStrings
from draftsmith.core.transfer import Recorder
from draftsmith.core.types import DecodeStep
from draftsmith.drafters.base import Drafter
from draftsmith.errors import InputError
from draftsmith.targets.base import Target


@dataclass(slots=True)
class DraftCounts:
    """Counts of one text (or, added up, of many). Only emitted tokens count."""

    steps: int = 0
    """Target forwards, the one that carries the prompt included (it emits and verifies too)."""
    emitted: int = 0
    accepted: int = 0
    offered: int = 0
    """Sum over steps of the depth offered on the best path."""
    proposed: int = 0
    """Candidate nodes in all trees."""
    by_position: list[tuple[int, int]] = field(default_factory=list)
    """Per depth: (times offered with all its predecessors accepted, times accepted)."""
    by_origin: dict[int, int] = field(default_factory=dict)
    """Accepted tokens per origin of the draft."""

    def add_step(self, step: DecodeStep, row: int) -> None:
        if not step.active[row]:
            return
        accepted, offered = step.accepted[row], step.offered_depth[row]
        self.steps += 1
        self.emitted += len(step.emitted[row])
        self.accepted += accepted
        self.offered += offered
        self.proposed += step.proposed[row]
        for depth in range(min(accepted + 1, offered)):
            if depth == len(self.by_position):
                self.by_position.append((0, 0))
            tried, took = self.by_position[depth]
            self.by_position[depth] = (tried + 1, took + (depth < accepted))
        for origin in step.origins[row]:
            self.by_origin[origin] = self.by_origin.get(origin, 0) + 1

    def __add__(self, other: DraftCounts) -> DraftCounts:
        deeper, shorter = sorted((self.by_position, other.by_position), key=len, reverse=True)
        positions = [
            (tried + more[0], took + more[1])
            for (tried, took), more in zip(
                deeper, [*shorter, *[(0, 0)] * (len(deeper) - len(shorter))], strict=True
            )
        ]
        origins = {
            o: self.by_origin.get(o, 0) + other.by_origin.get(o, 0)
            for o in sorted({*self.by_origin, *other.by_origin})
        }
        return DraftCounts(
            steps=self.steps + other.steps,
            emitted=self.emitted + other.emitted,
            accepted=self.accepted + other.accepted,
            offered=self.offered + other.offered,
            proposed=self.proposed + other.proposed,
            by_position=positions,
            by_origin=origins,
        )

    @property
    def tokens_per_step(self) -> float:
        """Block efficiency tau: emitted tokens per target forward."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted tokens / depth offered on the best path; None when nothing was offered."""
        return self.accepted / self.offered if self.offered else None

    @property
    def node_acceptance_rate(self) -> float | None:
        """Accepted nodes / nodes proposed; equal to `acceptance_rate` for chains."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Conditional rates: accepted at depth d given that d was offered behind accepted ones."""
        return [took / tried for tried, took in self.by_position]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One continued prompt."""

    prompt_tokens: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated ones only, an end token included."""
    text: str | None
    """Decoded without special tokens and cut before a stop string; None without a tokenizer."""
    finish_reason: str
    """`stop`, `length` or `context`."""
    counts: DraftCounts
    accepted_mask: tuple[bool, ...]
    """Per generated token: it was drafted (else it is the target's own)."""


def generate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    *,
    batch_size: int = 1,
    predictions: Sequence[Sequence[int]] = (),
    first_request_id: int = 0,
    recorder: Recorder | None = None,
    on_step: Callable[[DecodeStep, range], None] | None = None,
) -> list[Generation]:
    """Continue all prompts, `batch_size` at a time, in their order.

    A prompt's request id is its number, so its text does not depend on the batch size.

    Args:
        on_step: called with every step and the prompt numbers of its rows (to stream).

    Raises:
        InputError: see `decode`; or a batch size below 1.
    """
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}.")
    stops = StopStrings(options.stop_strings, target.tokenizer)
    results: list[Generation] = []
    for start in range(0, len(prompts), batch_size):
        numbers = range(start, min(start + batch_size, len(prompts)))
        batch = [prompts[i] for i in numbers]
        tokens: list[list[int]] = [[] for _ in batch]
        drafted: list[list[bool]] = [[] for _ in batch]
        counts = [DraftCounts() for _ in batch]
        finish = ["length"] * len(batch)
        for step in decode(
            target,
            drafter,
            batch,
            options,
            request_ids=[first_request_id + i for i in numbers],
            predictions=[predictions[i] for i in numbers] if predictions else (),
            recorder=recorder,
        ):
            for b in range(len(batch)):
                new, accepted = step.emitted[b], step.accepted[b]
                tokens[b].extend(new)
                drafted[b].extend([True] * accepted + [False] * (len(new) - accepted))
                counts[b].add_step(step, b)
                finish[b] = step.finish[b] or finish[b]
            if on_step is not None:
                on_step(step, numbers)
        for b, prompt in enumerate(batch):
            text = None
            if target.tokenizer is not None:
                text = stops.cut(target.tokenizer.decode(tokens[b], skip_special_tokens=True))
            results.append(
                Generation(
                    prompt_tokens=tuple(prompt),
                    token_ids=tuple(tokens[b]),
                    text=text,
                    finish_reason=finish[b],
                    counts=counts[b],
                    accepted_mask=tuple(drafted[b]),
                )
            )
    return results


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
