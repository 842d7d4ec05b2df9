"""Decoding for all sessions: pending updates of different sessions share the target's forwards.

    session a  ──pending──┐                       ┌── update a
    session b  ──pending──┼── one batch per bias ─┼── update b (emitted as soon as it is done)
    session c  (idle)     ┘                       └──

One thread decodes, forward by forward. A batch has the target for itself for a `SLICE`; after that
what has come meanwhile is taken in, and the batch goes on whose address has the least work in
flight, then the one with the least work. So nobody waits for a long update of somebody else, and a
session whose client is away costs nothing:

    forwards   A A A A A A A A  B B B  A A A  C  A A        b and c came while a was decoded
               `---- slice ---'

All sessions of one address are one client. They take in, between two forwards, about what one
session may, after one session of everybody else, and share no batch with others:

    waiting    a1 a2 a3 a4 (one address)    b    c
    taken in   a1 b c a2 a3                                 a4 has the next turn
    batches    a1 a2 a3    b c

The rows of a batch that fails, for whatever reason, are decoded again one by one, with an empty
cache and without drafts: a session that fails does not stop the others.

`speedup_steps` compares drafting with re-translation on a session's own updates and on this
machine, each update alone: times of batches that sessions share would not belong to one session.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from draftsmith.live.metrics import tokens_per_second
from draftsmith.live.records import UpdateRecord
from draftsmith.live.translator import PIECE, InFlightUpdate, LiveEngine, LiveTranslator
from draftsmith.serve.protocol import Refused

if TYPE_CHECKING:
    from draftsmith.serve.sessions import LiveSession, PendingUpdate

_log = logging.getLogger(__name__)
MOST_ROWS = 32
"""Sessions in one batch, ..."""
MOST_TOKENS = 512
"""... and tokens in its first forward, padding included, unless it is one row's."""
MOST_TEXT = 16 * 1024
"""Characters that are taken in between two forwards, beside the last text of them, ..."""
ADDRESS_TEXT = 2 * 1024
"""... likewise from one address, ..."""
INTAKE = 128
"""... and what everything that is taken in counts at least, be it settings alone."""
SLICE = 256
"""Work of a batch before others come between: tokens that are fed, and ..."""
FORWARD = 32
"""... so many for each forward, however few it reads."""
_OLDEST = 3
"""The oldest batch has a forward when others have had so many times its work: small updates without
end do not stop a large one."""
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0)


class ServerMetrics:
    """The metrics of one server, as `/metrics` serves them for Prometheus."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.sessions = Gauge("live_sessions", "Open sessions", registry=registry)
        counter = partial(Counter, registry=registry)
        self.hypotheses = counter("live_hypotheses", "Hypotheses taken in")
        self.coalesced = counter("live_coalesced", "Hypotheses whose place a newer one took")
        self.updates = counter("live_updates", "Updates decoded")
        self.finals = counter("live_finals", "Final updates decoded")
        self.retried = counter("live_retried", "Updates decoded once more, from scratch")
        self.failed = counter("live_failed", "Updates that could not be decoded")
        self.tokens = counter("live_tokens", "Tokens of outputs")
        self.drafted = counter("live_drafted", "Tokens drafted")
        self.accepted = counter("live_accepted", "Drafted tokens that stayed")
        self.errors = counter("live_errors", "Refused frames", ["code"])
        histogram = partial(Histogram, registry=registry)
        together = "Sessions decoded side by side"
        self.rows = histogram("live_batch_rows", together, buckets=(1, 2, 4, 8, 16, 32))
        self.seconds = histogram("live_batch_seconds", "Duration of a batch", buckets=_SECONDS)

    def add(self, update: UpdateRecord) -> None:
        """Count one decoded update."""
        self.updates.inc()
        self.finals.inc(update.final)
        self.tokens.inc(update.tokens)
        self.drafted.inc(update.drafted)
        self.accepted.inc(update.accepted)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def speedup_steps(
    session: LiveSession,
    updates: Iterable[PendingUpdate],
    drafted: LiveTranslator,
    plain: LiveTranslator,
) -> Iterator[None]:
    """Compare drafting with re-translation on these updates of a session.

    Each step is one forward; the result is emitted after the last.
    """
    sides: list[tuple[LiveTranslator, list[UpdateRecord]]] = [(drafted, []), (plain, [])]
    seg: int | None = None
    for one in updates:
        for translator, records in sides:
            if seg not in (None, one.seg) and translator.last is not None:
                translator.close()
            update = yield from translator.steps(one.words, final=one.final)
            if update is not None:
                records.append(update)
        seg = one.seg
    tps, tps_ar = (tokens_per_second(records) for _, records in sides)
    speedup = tps / tps_ar if tps and tps_ar else None
    result = {"updates": len(sides[-1][1]), "tps": tps, "tps_ar": tps_ar, "speedup": speedup}
    session.emit({"type": "measured", **result})


@dataclass(eq=False, slots=True)
class _Batch:
    """Updates on their way through the target, in the same forwards."""

    rows: list[tuple[LiveSession, InFlightUpdate]]
    width: int
    """Tokens per row in the first forward."""
    error: Exception | None = None
    """What these rows failed with before, if it was theirs."""
    afresh: bool = False
    """Whether they have failed before."""
    steps: Iterator[None] | None = None
    done: set[int] = field(default_factory=set)
    work: int = 0
    """Since the beginning."""
    seconds: float = 0.0

    @property
    def sessions(self) -> list[LiveSession]:
        """Whose updates are not done."""
        return [one for number, (one, _) in enumerate(self.rows) if number not in self.done]

    @property
    def is_wanted(self) -> bool:
        """Whether any client waits for it."""
        return any(session.is_attended for session in self.sessions)

    @property
    def next_work(self) -> int:
        """Work of the next forward."""
        rows, begins = len(self.rows), self.work < self.width * len(self.rows)
        return FORWARD + rows * (min(self.width, PIECE) if begins else 1)

    @property
    def size(self) -> int:
        """Work that is known of: whoever has a long prompt stands back from the beginning."""
        return max(self.work, self.width * len(self.rows))


class Scheduler(threading.Thread):
    """The decoding thread; it runs until `stop`.

    Args:
        engine: decodes for all sessions.
        metrics: count each batch.
    """

    def __init__(self, engine: LiveEngine, metrics: ServerMetrics) -> None:
        super().__init__(name="decoding", daemon=True)
        self.engine, self.metrics = engine, metrics
        self._sessions: dict[str, LiveSession] = {}
        self._measuring: dict[LiveSession, Iterator[None]] = {}
        """The steps of measurements that run while nothing is pending."""
        self._running: list[_Batch] = []
        """Batches that have begun, the oldest first."""
        self._last: _Batch | None = None
        """The one that had the last forward."""
        self._others = 0
        """Work for others since the oldest one had a forward."""
        self._turns = 0
        self._changed = threading.Condition()
        self._stopping = False
        self.broken: str | None = None
        """The error that ended the thread; None: there was none."""

    # ------------------------------------------------------------------ called by other threads

    def check(self) -> None:
        """Raise Refused when the thread has ended: a client would wait forever."""
        if self.broken is not None:
            raise Refused("broken", self.broken, fatal=True)

    def add(self, session: LiveSession) -> None:
        """Decode for this session from now on. Raises Refused like `check`."""
        with self._changed:
            self.check()
            session.turn = self._turns  # who opens one session after the other is not always first
            self._sessions[session.name] = session

    def remove(self, session: LiveSession) -> None:
        with self._changed:
            self._sessions.pop(session.name, None)
            self._measuring.pop(session, None)

    def wake(self) -> None:
        """Look for pending updates."""
        with self._changed:
            self._changed.notify()

    def measure(self, session: LiveSession, steps: Iterator[None]) -> None:
        """Run a measurement while nothing is pending; at most one per session."""
        with self._changed:
            self._measuring.setdefault(session, steps)
            self._changed.notify()

    def stop(self) -> None:
        """End the thread after the current batch."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    # ------------------------------------------------------------------ the decoding thread

    def run(self) -> None:
        try:
            while self.turn(wait=True):
                pass
        finally:
            if not self._stopping:  # a bug: no client may wait for an answer forever
                with self._changed:
                    self.broken = f"decoding has ended: {sys.exception()!r}"
                    sessions = list(self._sessions.values())
                for session in sessions:
                    session.emit(Refused("broken", self.broken, fatal=True).message())

    def turn(self, *, wait: bool = False) -> bool:
        """Take in what is pending, and run one forward; False: the thread was stopped."""
        with self._changed:
            self._forget()
            while wait and not (self._stopping or self._has_work()):
                self._changed.wait()
                self._forget()
            if self._stopping:
                return False
            ready = self.ready() if self._last is None or self._last.work >= SLICE else []
        self._turns += 1
        self._running += self._taken_in(ready)
        if running := [batch for batch in self._running if batch.is_wanted]:
            oldest = running[0]
            due = self._others >= _OLDEST * oldest.next_work
            batch = oldest if due else min(running, key=self._burden())
            self._others = 0 if batch is oldest else self._others + batch.next_work
            self._step(batch)
        elif not ready:
            self._measure()
        return True

    def _burden(self) -> Callable[[_Batch], tuple[float, int]]:
        """Return what a batch stands back for: the work of its client, then its own.

        All sessions of one address are one client: who opens many is served no sooner.
        """
        work: dict[str, float] = defaultdict(float)
        for batch in self._running:
            for session in batch.sessions:
                work[session.address] += batch.size / len(batch.sessions)
        return lambda batch: (min(work[one.address] for one in batch.sessions), batch.size)

    def ready(self) -> list[LiveSession]:
        """Return the sessions with something to take in: one of each address, then another one of
        each. Among addresses, and among sessions of one, who had no turn for longest is first, then
        who has waited for longest."""
        busy = {session for batch in self._running for session in batch.sessions}
        turns: dict[str, int] = defaultdict(int)
        waiting: list[tuple[int, float, LiveSession]] = []
        for one in self._sessions.values():
            turns[one.address] = max(turns[one.address], one.turn)
            since = None if one in busy else one.pending_since
            if since is not None:
                waiting.append((one.turn, since, one))
        seen: dict[str, int] = defaultdict(int)
        ready = []
        for _, since, one in sorted(waiting, key=lambda one: one[:2]):
            ready.append((seen[one.address], turns[one.address], since, one))
            seen[one.address] += 1
        return [session for *_, session in sorted(ready, key=lambda one: one[:3])]

    def _has_work(self) -> bool:
        wanted = any(batch.is_wanted for batch in self._running)
        return bool(wanted or self.ready() or self._measuring)

    def _forget(self) -> None:
        """Drop the batches of sessions that are over, and measurements that nobody waits for."""
        known = {one for one in self._sessions.values() if not one.is_deserted}
        self._running = [one for one in self._running if not known.isdisjoint(one.sessions)]
        if self._last is not None and not (self._last in self._running and self._last.is_wanted):
            self._last = None
        for session in [one for one in self._measuring if not one.is_attended]:
            del self._measuring[session]

    def _taken_in(self, sessions: Iterable[LiveSession]) -> Iterator[_Batch]:
        """Take in one thing of each session; yield the updates in batches of the same bias."""
        taken: dict[str, int] = defaultdict(int)
        mine: dict[str, list[tuple[float, int, LiveSession, InFlightUpdate]]] = defaultdict(list)
        for session in sessions:
            if sum(taken.values()) >= MOST_TEXT or sum(map(len, mine.values())) >= MOST_ROWS:
                break
            if taken[session.address] >= ADDRESS_TEXT:
                continue
            session.turn = self._turns
            text, update = session.take_in()
            taken[session.address] += max(text, INTAKE)
            if update is not None:
                width = self.engine.width(update, session.translator.session)
                mine[session.address].append((update.bias, width, session, update))
        together = [rows[0] for rows in mine.values() if len(rows) == 1]
        for rows in (together, *(rows for rows in mine.values() if len(rows) > 1)):
            yield from self._batches(rows)

    @staticmethod
    def _batches(
        rows: list[tuple[float, int, LiveSession, InFlightUpdate]],
    ) -> Iterator[_Batch]:
        """Put rows (bias, width, session, update) of the same bias and similar width together."""
        batch, last = _Batch([], 0), None
        for bias, width, session, update in sorted(rows, key=lambda row: row[:2]):
            if bias != last or width * (len(batch.rows) + 1) > MOST_TOKENS:
                if batch.rows:
                    yield batch
                batch, last = _Batch([], width), bias
            batch.rows.append((session, update))
            batch.width = width
        if batch.rows:
            yield batch

    def _measure(self) -> None:
        """One forward of a measurement; they take turns."""
        with self._changed:
            session, steps = next(iter(self._measuring.items()), (None, iter(())))
            if session is None:
                return
            del self._measuring[session]
        if _goes_on(session, steps):
            with self._changed:
                if session.name in self._sessions:
                    self._measuring[session] = steps

    def _begun(self, batch: _Batch) -> Iterator[None]:
        def complete(row: int) -> None:
            session, update = batch.rows[row]
            record = session.complete(update)
            batch.done.add(row)  # before it is counted: a displayed update is not decoded again
            self.metrics.add(record)

        updates = [update for _, update in batch.rows]
        caches = [session.translator.session for session, _ in batch.rows]
        if batch.afresh:
            return self.engine.steps_afresh(updates[0], caches[0], complete)
        return self.engine.steps(updates, caches, complete)

    def _step(self, batch: _Batch) -> None:
        """Run one forward of a batch."""
        began, work = time.perf_counter(), batch.next_work
        try:
            if batch.steps is None:
                batch.steps = self._begun(batch)
            next(batch.steps)
            over = False
        except StopIteration:
            over = True
        except Exception as error:  # from the target, torch, or a model's own code
            self._fail(batch, error)
            over = True
        batch.work += work
        batch.seconds += time.perf_counter() - began
        self._last = batch
        if over:
            self._last = None
            self._running.remove(batch)
            self.metrics.rows.observe(len(batch.rows))
            self.metrics.seconds.observe(batch.seconds)

    def _fail(self, batch: _Batch, error: Exception) -> None:
        """Decode the rows of a batch that failed alone and afresh: another row, or the cache, may
        have been at fault. What fails again is reported with its first error."""
        left = [row for number, row in enumerate(batch.rows) if number not in batch.done]
        if batch.afresh:
            for session, _ in left:
                _log.error("a session cannot be decoded", exc_info=error)
                self.metrics.failed.inc()
                session.fail(batch.error or error)
            return
        _log.warning("%d rows of a batch go on alone", len(left), exc_info=error)
        first = error if len(batch.rows) == 1 else None
        for session, update in left:
            session.counts["retried"] += 1
            self.metrics.retried.inc()
            self._running.append(_Batch([(session, update)], batch.width, first, afresh=True))


def _goes_on(session: LiveSession, steps: Iterator[None]) -> bool:
    """Run one step of a measurement; False: it is over, or has failed."""
    try:
        for _ in steps:
            return True
    except Exception as error:  # only the speed-up shown on one page depends on it
        _log.error("a session cannot be measured", exc_info=error)
        session.emit(Refused("measure", str(error) or repr(error)).message())
    return False
