"""Decoding for all sessions: pending updates of different sessions share the target's forwards.

    session a  ──pending──┐                       ┌── update a
    session b  ──pending──┼── one batch per bias ─┼── update b (emitted as soon as it is done)
    session c  (idle)     ┘                       └──

One thread decodes; the session that has waited longest goes first. The rows of a batch that fails,
for whatever reason, are decoded again one by one, with an empty cache and without drafts: a session
that fails does not stop the others.

`speedup_steps` compares drafting with re-translation on a session's own updates and on this
machine, each update alone: times of batches that sessions share would not belong to one session.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

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
from draftsmith.live.translator import InFlightUpdate, LiveEngine, LiveTranslator
from draftsmith.serve.protocol import Refused

if TYPE_CHECKING:
    from draftsmith.serve.sessions import LiveSession, PendingUpdate

_Batch: TypeAlias = "list[tuple[LiveSession, InFlightUpdate]]"
_log = logging.getLogger(__name__)
MOST_ROWS = 32
"""Sessions in one batch."""
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

    Each step decodes one update both ways; the result is emitted after the last.
    """
    sides: list[tuple[LiveTranslator, list[UpdateRecord]]] = [(drafted, []), (plain, [])]
    seg: int | None = None
    for one in updates:
        for translator, records in sides:
            if seg not in (None, one.seg) and translator.last is not None:
                translator.close()
            update = translator.decoded(one.words, final=one.final)
            if update is not None:
                records.append(update)
        seg = one.seg
        yield
    tps, tps_ar = (tokens_per_second(records) for _, records in sides)
    speedup = tps / tps_ar if tps and tps_ar else None
    result = {"updates": len(sides[-1][1]), "tps": tps, "tps_ar": tps_ar, "speedup": speedup}
    session.emit({"type": "measured", **result})


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
        """Decode one update of each session that has any; False: the thread was stopped."""
        with self._changed:
            while wait and not (self._stopping or self.ready() or self._measuring):
                self._changed.wait()
            if self._stopping:
                return False
            sessions, measuring = self.ready(), list(self._measuring.items())
        for batch in _batches(sessions):
            self._decode(batch)
        if not sessions and measuring and not _goes_on(*measuring[0]):
            with self._changed:
                self._measuring.pop(measuring[0][0], None)
        return True

    def ready(self) -> list[LiveSession]:
        """Return the sessions with something pending, the longest wait first."""
        since = [(session.pending_since, session) for session in self._sessions.values()]
        ready = [(when, session) for when, session in since if when is not None]
        return [session for _, session in sorted(ready, key=lambda one: one[0])][:MOST_ROWS]

    def _decode(self, batch: _Batch) -> None:
        began = time.perf_counter()
        done: set[int] = set()

        def complete(row: int) -> None:
            session, update = batch[row]
            record = session.complete(update)
            done.add(row)  # before it is counted: a displayed update is not decoded again
            self.metrics.add(record)

        caches = [session.translator.session for session, _ in batch]
        try:
            self.engine.run_batch([update for _, update in batch], caches, complete)
        except Exception as error:  # from the target, torch, or a model's own code
            left = [row for row in range(len(batch)) if row not in done]
            _log.warning("%d rows of a batch go on alone", len(left), exc_info=error)
            for row in left:
                self._retry(*batch[row], error if len(batch) == 1 else None)
        self.metrics.rows.observe(len(batch))
        self.metrics.seconds.observe(time.perf_counter() - began)

    def _retry(self, session: LiveSession, update: InFlightUpdate, error: Exception | None) -> None:
        """Decode alone and afresh: another row of the batch, or the cache, may have been at fault.

        `error` is reported if this fails too; None: the error of this attempt is.
        """
        session.counts["retried"] += 1
        self.metrics.retried.inc()
        try:
            self.engine.run_afresh(update, session.translator.session)
            record = session.complete(update)
        except Exception as again:  # the other sessions go on
            _log.error("a session cannot be decoded", exc_info=again)
            self.metrics.failed.inc()
            session.fail(error or again)
        else:
            self.metrics.add(record)


def _goes_on(session: LiveSession, steps: Iterator[None]) -> bool:
    """Run one step of a measurement; False: it is over, or has failed."""
    try:
        for _ in steps:
            return True
    except Exception as error:  # only the speed-up shown on one page depends on it
        _log.error("a session cannot be measured", exc_info=error)
        session.emit(Refused("measure", str(error) or repr(error)).message())
    return False


def _batches(sessions: Iterable[LiveSession]) -> Iterator[_Batch]:
    """Yield the next update of each session, in one batch per bias."""
    groups: dict[float, _Batch] = {}
    for session in sessions:
        update = session.next_update()
        if update is not None:
            groups.setdefault(update.bias, []).append((session, update))
    yield from groups.values()
