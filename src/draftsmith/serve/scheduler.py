"""Decoding for all sessions: pending updates of different sessions share the target's forwards.

    session a  ──pending──┐                       ┌── update a
    session b  ──pending──┼── one batch per bias ─┼── update b (emitted as soon as it is done)
    session c  (idle)     ┘                       └──

One thread decodes; the session that has waited longest goes first. The rows of a batch that fails,
for whatever reason, are decoded again one by one, with an empty cache and without drafts: a session
that fails does not stop the others.

A `SpeedupMeasurement` compares drafting with re-translation on a session's own updates and on this
machine. It decodes the same updates both ways in turn, each alone: times of batches that sessions
share would not belong to one session.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from draftsmith.live.engine import InFlightUpdate, LiveEngine
from draftsmith.live.metrics import tokens_per_second
from draftsmith.live.records import UpdateRecord
from draftsmith.live.translator import LiveTranslator
from draftsmith.serve.protocol import Refused

if TYPE_CHECKING:
    from draftsmith.serve.sessions import LiveSession

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

        def counter(name: str, meaning: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"live_{name}", meaning, labels, registry=registry)

        self.sessions = Gauge("live_sessions", "Open sessions", registry=registry)
        self.hypotheses = counter("hypotheses", "Hypotheses taken in")
        self.coalesced = counter("coalesced", "Hypotheses whose place a newer one took")
        self.updates = counter("updates", "Updates decoded")
        self.finals = counter("finals", "Final updates decoded")
        self.retried = counter("retried", "Updates decoded once more, from scratch")
        self.failed = counter("failed", "Updates that could not be decoded")
        self.tokens = counter("tokens", "Tokens of outputs")
        self.drafted = counter("drafted", "Tokens drafted")
        self.accepted = counter("accepted", "Drafted tokens that stayed")
        self.errors = counter("errors", "Refused frames", ["code"])
        self.rows = Histogram(
            "live_batch_rows",
            "Sessions decoded side by side",
            buckets=(1, 2, 4, 8, 16, 32),
            registry=registry,
        )
        self.seconds = Histogram(
            "live_batch_seconds", "Duration of a batch", buckets=_SECONDS, registry=registry
        )

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


class SpeedupMeasurement:
    """Compares drafting with re-translation on the last updates of a session."""

    def __init__(
        self, session: LiveSession, drafted: LiveTranslator, plain: LiveTranslator
    ) -> None:
        self.session = session
        self._left = deque(session.to_measure())
        self._sides: list[tuple[LiveTranslator, list[UpdateRecord]]] = [(drafted, []), (plain, [])]
        self._seg: int | None = None

    def step(self) -> bool:
        """Decode one update both ways; False: there was none left, and the result was emitted."""
        if not self._left:
            tps, plain = (tokens_per_second(records) for _, records in self._sides)
            self.session.emit(
                {
                    "type": "measured",
                    "updates": len(self._sides[-1][1]),
                    "tps": tps,
                    "tps_ar": plain,
                    "speedup": tps / plain if tps and plain else None,
                }
            )
            return False
        one = self._left.popleft()
        for translator, records in self._sides:
            if self._seg not in (None, one.seg) and translator.last is not None:
                translator.close()
            before = translator.last
            update = translator.update(one.text, final=one.final)
            if update is not None and update is not before:
                records.append(update)
        self._seg = one.seg
        return True


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
        self._measuring: list[SpeedupMeasurement] = []
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
            self._measuring = [one for one in self._measuring if one.session is not session]

    def wake(self) -> None:
        """Look for pending updates."""
        with self._changed:
            self._changed.notify()

    def measure(self, measurement: SpeedupMeasurement) -> None:
        """Run a measurement while nothing is pending; at most one per session."""
        with self._changed:
            if not any(one.session is measurement.session for one in self._measuring):
                self._measuring.append(measurement)
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
            sessions, measuring = self.ready(), list(self._measuring)
        for batch in _batches(sessions):
            self._decode(batch)
        if not sessions and measuring and not _goes_on(measuring[0]):
            with self._changed:
                self._measuring = [one for one in self._measuring if one is not measuring[0]]
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
        session.retried += 1
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


def _goes_on(measurement: SpeedupMeasurement) -> bool:
    """Run one step of a measurement; False: it is over, or has failed."""
    try:
        return measurement.step()
    except Exception as error:  # only the speed-up shown on one page depends on it
        _log.error("a session cannot be measured", exc_info=error)
        measurement.session.emit(Refused("measure", str(error) or repr(error)).message())
        return False


def _batches(sessions: Iterable[LiveSession]) -> Iterator[_Batch]:
    """Yield the next update of each session, in one batch per bias."""
    groups: dict[float, _Batch] = {}
    for session in sessions:
        update = session.next_update()
        if update is not None:
            groups.setdefault(update.bias, []).append((session, update))
    yield from groups.values()
