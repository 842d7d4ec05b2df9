"""Decoding of updates: the draft is verified in one forward, then decoding goes on to the end.

The decoding loop does the work, on a cache that outlives the update.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
from draftsmith.drafters.base import BindableTarget, Drafter, DraftState
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prediction import FallbackDrafter, PredictionDrafter
from draftsmith.errors import BackendError

FAILURES = (BackendError, RuntimeError, MemoryError)
"""What a target that fails raises; torch's own errors are RuntimeErrors."""


@dataclass(kw_only=True, slots=True)
class InFlightUpdate:
    """One update on its way through the target: the request, and what has been decoded so far.

    The counts are those of `UpdateRecord`.
    """

    source: str
    final: bool
    prompt: tuple[int, ...]
    draft: tuple[int, ...]
    """The last output; empty: there is none. It is shorter than `max_new_tokens`, because the last
    token is the target's."""
    bias: float
    max_new_tokens: int

    reused: int = 0
    """Tokens of the prompt that were in the cache."""
    tokens: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    """Drafted tokens per forward."""
    first_seconds: float = 0.0
    seconds: float = 0.0
    restarts: int = 0
    done: bool = False
    ended: bool = False
    """The target ended the text itself; else it was cut at `max_new_tokens`."""

    def add(self, step: DecodeStep, row: int, seconds: float) -> bool:
        """Add row `row` of a step that ended `seconds` after the start. Returns `done`."""
        most = self.max_new_tokens
        room = most - len(self.tokens) - 1  # alone, no more would have been drafted
        self.tokens += step.emitted[row]
        self.origins += step.origins[row][:room]
        self.offered.append(min(step.offered_depth[row], room))
        self.first_seconds, self.seconds = self.first_seconds or seconds, seconds
        self.ended = step.finish[row] == "stop" and len(self.tokens) <= most
        self.done = step.finish[row] is not None or len(self.tokens) >= most
        del self.tokens[most:]  # other rows of the batch may go on for longer
        return self.done

    def restart(self) -> None:
        """Drop what was decoded, and the draft, which may be at fault."""
        self.draft, self.restarts = (), self.restarts + 1
        self.tokens, self.origins, self.offered = [], [], []
        self.first_seconds = self.seconds = 0.0
        self.done = self.ended = False

    def output(self, end_ids: frozenset[int]) -> tuple[int, ...]:
        """The decoded tokens without ends of sequence."""
        return tuple(token for token in self.tokens if token not in end_ids)

    @property
    def forwards(self) -> int:
        return len(self.offered)

    @property
    def drafted(self) -> int:
        return self.offered[0] if self.draft and self.offered else 0

    @property
    def accepted(self) -> int:
        return sum(origin == ALIGNED for origin in self.origins) if self.draft else 0

    @property
    def redrafted(self) -> int:
        return sum(self.offered) - self.drafted

    @property
    def reaccepted(self) -> int:
        return len(self.origins) - self.accepted

    @property
    def fed(self) -> int:
        return len(self.prompt) - self.reused + sum(self.offered) + self.forwards - 1


@dataclass(frozen=True, slots=True)
class _WholeThenShort(LengthPolicy):
    """Drafts the whole last output in the first step, at most `later` tokens after it."""

    whole: int
    later: int

    def length(self, stats: RowStats) -> int:
        return self.whole if stats.steps == 0 and self.whole else self.later

    @property
    def max_length(self) -> int:
        return max(self.whole, self.later)


class LiveEngine:
    """Decodes updates of live translations greedily, alone or several in one batch.

    Args:
        redraft: use the updates' drafts; without, this is autoregressive re-translation.
        resync: length of drafts from the old tail behind a divergence; 0: none.
        then: drafter for the steps in which nothing is predicted; it is bound here. It serves one
            translation only, because its state is not kept per translation.
    """

    def __init__(
        self,
        target: BindableTarget,
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

    def run(self, update: InFlightUpdate, session: Session) -> None:
        """Decode one update to its end.

        Raises:
            BackendError: the target failed. As after an interrupt, the session is empty.
        """
        self._decode([update], session, lambda _: None)

    def run_afresh(self, update: InFlightUpdate, session: Session) -> None:
        """Decode an update that failed once more: with an empty cache and without its draft."""
        session.clear()
        update.restart()
        self.run(update, session)

    def run_batch(
        self,
        updates: Sequence[InFlightUpdate],
        sessions: Sequence[Session],
        on_done: Callable[[int], None],
    ) -> None:
        """Decode updates of several translations, all with one bias, in the same forwards.

        Args:
            on_done: called with the row of an update as soon as it is done, while others go on.

        Raises:
            BackendError: the target failed; all these sessions are empty.
        """
        assert len({update.bias for update in updates}) == 1, "a rule has one bias"
        if len(updates) == 1:  # no batch cache to fill and to copy back from
            self._decode(updates, sessions[0], on_done)
            return
        cached = [session.tokens[0] if session.tokens else [] for session in sessions]
        parts = [None if one.cache is None else one.cache.contents(0) for one in sessions]
        for session in sessions:
            session.clear()
        longest = max(len(one.prompt) + one.max_new_tokens + len(one.draft) for one in updates)
        cache = self.target.new_cache(len(updates), max(longest, *map(len, cached)) + self._later)
        for row, part in enumerate(parts):
            if part is not None:
                cache.fill(row, part)
        batch = Session(cache=cache, state=self._empty_state(updates), tokens=cached)
        self._decode(updates, batch, on_done)
        assert batch.cache is not None and batch.tokens is not None
        for row, session in enumerate(sessions):
            session.cache = self.target.new_cache(1, longest)
            session.cache.fill(0, batch.cache.contents(row))
            session.state = self._empty_state([updates[row]])
            session.tokens = [batch.tokens[row]]

    def _empty_state(self, updates: Sequence[InFlightUpdate]) -> DraftState:
        """State of a drafter that receives the predictions anew with every update."""
        return self.drafter.start(
            RequestBatch(
                tokens=[update.prompt for update in updates],
                request_ids=tuple(range(len(updates))),
                max_new_tokens=1,
            )
        )

    def _decode(
        self,
        updates: Sequence[InFlightUpdate],
        session: Session,
        on_done: Callable[[int], None],
    ) -> None:
        cached = session.tokens or [[] for _ in updates]
        for update, old in zip(updates, cached, strict=True):
            update.reused = min(common_prefix(list(update.prompt), old), len(update.prompt) - 1)
            if not self.redraft:
                update.draft = ()
        drafts = [update.draft for update in updates]
        rule, verifier_sampler = biased_rule(updates[0].bias if any(drafts) else 0.0, self.sampler)
        policy = _WholeThenShort(max(map(len, drafts)), self._later)
        options = DecodeOptions(
            sampler=self.sampler,
            verifier_sampler=verifier_sampler,
            rule=rule,
            max_new_tokens=max(update.max_new_tokens for update in updates),
            shape=TreeShape.chain(max(policy.max_length, 1)) if self.redraft else None,
            policy=policy if self.redraft else None,
            allow_lossy=rule.lossy,
        )
        began = time.perf_counter()
        steps = decode(
            self.target,
            self.drafter,
            [update.prompt for update in updates],
            options,
            predictions=drafts if self.redraft else (),
            session=session,
        )
        with contextlib.closing(steps):
            for step in steps:
                now = time.perf_counter() - began
                for row, update in enumerate(updates):
                    if not update.done and update.add(step, row, now):
                        on_done(row)
                if all(update.done for update in updates):  # a row may be cut before the others
                    return
