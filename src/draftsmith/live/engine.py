"""The decoding of one update: the draft judged in one forward, then on to the end.

An update of a live translation is a `Job`: a prompt, the last output as a draft, and how far
verification leans towards it. The decoding loop does the rest, on a cache that outlives the job.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.lossy_rules import biased_rule
from draftsmith.core.rows import common_prefix
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import (
    ALIGNED,
    DecodeStep,
    LengthPolicy,
    RequestBatch,
    RowStats,
    TreeShape,
)
from draftsmith.drafters.base import Drafter, DraftState, TargetView
from draftsmith.drafters.chain import FallbackDrafter
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prediction import PredictionDrafter
from draftsmith.errors import BackendError
from draftsmith.targets.base import Target

FAILURES = (BackendError, RuntimeError, MemoryError)
"""What a target that fails raises; torch's own errors are of the second kind."""


class LiveTarget(Target, TargetView, Protocol):
    """A target that drafters can be bound to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What an update asks of the target."""

    prompt: tuple[int, ...]
    draft: tuple[int, ...]
    """Empty: nothing is expected. Shorter than `max_new_tokens`: the last token is the target's."""
    bias: float
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the target answered; counts as in `UpdateRecord`."""

    tokens: tuple[int, ...]
    """Without an end of sequence."""
    whole: bool
    """It ended by itself."""
    drafted: int
    accepted: int
    redrafted: int
    reaccepted: int
    forwards: int
    fed: int
    seconds: float
    first_seconds: float
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class _FirstWhole(LengthPolicy):
    """The whole last output at first; later drafts are short."""

    whole: int
    later: int

    def length(self, stats: RowStats) -> int:
        return self.whole if stats.steps == 0 and self.whole else self.later

    @property
    def max_length(self) -> int:
        return max(self.whole, self.later)


class Engine:
    """Runs jobs of live translations, greedily: one after the other, or several side by side.

    Args:
        redraft: use the jobs' drafts; without, this is autoregressive re-translation.
        resync: length of drafts from the old tail behind a divergence; 0: none.
        then: drafts where nothing is expected; it is bound here. For one translation alone: what it
            remembers of a text is not carried from row to row.
    """

    def __init__(
        self,
        target: LiveTarget,
        *,
        redraft: bool = True,
        resync: int = 0,
        then: Drafter | None = None,
    ) -> None:
        self.target, self.redraft, self.sampler = target, redraft, Sampler()
        self._later = max(resync, 0 if then is None else then.default_shape.depth)
        first = PredictionDrafter(PredictionDrafter.Config(resync=resync > 0))
        self.drafter: Drafter = then or NoDrafter()
        if redraft:
            self.drafter = first if then is None else FallbackDrafter(first, then)
        self.drafter.bind(target)

    def run(self, job: Job, session: Session) -> Outcome:
        """One update's decoding. After an error or an interrupt the session starts afresh."""
        found: list[Outcome] = []
        self._decode([job], session, lambda _, outcome: found.append(outcome))
        return found[0]

    def run_afresh(self, job: Job, session: Session) -> Outcome:
        """The same behind a failure: from nothing, and without the draft, which may be at fault."""
        session.clear()
        return replace(self.run(replace(job, draft=()), session), restarts=1)

    def run_together(
        self,
        jobs: Sequence[Job],
        sessions: Sequence[Session],
        on_done: Callable[[int, Outcome], None],
    ) -> None:
        """Updates of several translations, all with one bias, in the same forwards.

        `on_done` is told (which, outcome) as soon as one is through, while others may go on.

        Raises:
            BackendError: the target failed; all these sessions start afresh.
        """
        assert len({job.bias for job in jobs}) == 1, "a rule has one bias"
        held = [session.tokens[0] if session.tokens else [] for session in sessions]
        parts = [None if one.cache is None else one.cache.contents(0) for one in sessions]
        for session in sessions:
            session.clear()
        longest = max(len(job.prompt) + job.max_new_tokens + len(job.draft) for job in jobs)
        cache = self.target.new_cache(len(jobs), max(longest, *map(len, held)) + self._later)
        for row, part in enumerate(parts):
            if part is not None:
                cache.fill(row, part)
        together = Session(cache=cache, state=self._no_state(jobs), tokens=held)
        self._decode(jobs, together, on_done)
        assert together.cache is not None and together.tokens is not None
        for row, session in enumerate(sessions):
            session.cache = self.target.new_cache(1, longest)
            session.cache.fill(0, together.cache.contents(row))
            session.state, session.tokens = self._no_state([jobs[row]]), [together.tokens[row]]

    def _no_state(self, jobs: Sequence[Job]) -> DraftState:
        """Of a drafter that is told the predictions with every job."""
        return self.drafter.start(
            RequestBatch(
                tokens=[job.prompt for job in jobs],
                request_ids=tuple(range(len(jobs))),
                max_new_tokens=1,
            )
        )

    def _decode(
        self, jobs: Sequence[Job], session: Session, on_done: Callable[[int, Outcome], None]
    ) -> None:
        drafts = [job.draft if self.redraft else () for job in jobs]
        rule, verifier_sampler = biased_rule(jobs[0].bias if any(drafts) else 0.0, self.sampler)
        policy = _FirstWhole(max(map(len, drafts)), self._later)
        options = DecodeOptions(
            sampler=self.sampler,
            verifier_sampler=verifier_sampler,
            rule=rule,
            max_new_tokens=max(job.max_new_tokens for job in jobs),
            shape=TreeShape.chain(max(policy.max_length, 1)) if self.redraft else None,
            policy=policy if self.redraft else None,
            allow_lossy=rule.lossy,
        )
        held = session.tokens or [[] for _ in jobs]
        rows = []
        for job, draft, old in zip(jobs, drafts, held, strict=True):
            kept = min(common_prefix(list(job.prompt), old), len(job.prompt) - 1)
            rows.append(_Row(job=job, draft=draft, kept=kept))
        began = time.perf_counter()
        steps = decode(
            self.target,
            self.drafter,
            [job.prompt for job in jobs],
            options,
            predictions=drafts if self.redraft else (),
            session=session,
        )
        with contextlib.closing(steps):
            for step in steps:
                now = time.perf_counter() - began
                for number, row in enumerate(rows):
                    if not row.done and row.take_in(step, number, now):
                        on_done(number, row.outcome(self.target.end_ids))
                if all(row.done for row in rows):  # a row may be cut before the batch's limit
                    return


@dataclass(slots=True)
class _Row:
    """One job on its way."""

    job: Job
    draft: tuple[int, ...]
    kept: int
    """Tokens of the prompt that the cache had."""
    tokens: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    first: float = 0.0
    seconds: float = 0.0
    done: bool = False
    whole: bool = False

    def take_in(self, step: DecodeStep, number: int, now: float) -> bool:
        """Whether it is through with this step."""
        most = self.job.max_new_tokens
        room = most - len(self.tokens) - 1  # alone, no more would have been drafted
        self.tokens += step.emitted[number]
        self.origins += step.origins[number][:room]
        self.offered.append(min(step.offered_depth[number], room))
        self.first, self.seconds = self.first or now, now
        self.whole = step.finish[number] == "stop" and len(self.tokens) <= most
        self.done = step.finish[number] is not None or len(self.tokens) >= most
        del self.tokens[most:]  # others in the batch may go on for longer
        return self.done

    def outcome(self, end_ids: frozenset[int]) -> Outcome:
        """What came of it."""
        drafted = self.offered[0] if self.draft else 0
        accepted = sum(origin == ALIGNED for origin in self.origins) if self.draft else 0
        more = sum(self.offered) - drafted
        return Outcome(
            tokens=tuple(token for token in self.tokens if token not in end_ids),
            whole=self.whole,
            drafted=drafted,
            accepted=accepted,
            redrafted=more,
            reaccepted=len(self.origins) - accepted,
            forwards=len(self.offered),
            fed=len(self.job.prompt) - self.kept + drafted + more + len(self.offered) - 1,
            seconds=self.seconds,
            first_seconds=self.first,
        )
