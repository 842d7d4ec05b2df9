"""Decoding for all sessions: pending updates of different sessions share the target's forwards.

    session a  ──pending──┐                       ┌── update a
    session b  ──pending──┼── one batch per bias ─┼── update b (emitted as soon as it is done)
    session c  (idle)     ┘                       └──

One thread decodes; the session that has waited longest goes first. The rows of a batch that fails,
for whatever reason, are decoded again one by one, with an empty cache and without drafts: a session
that fails does not stop the others.

A measurement compares drafting with re-translation on a session's own updates and on this machine.
It decodes the same updates both ways in turn, each alone: times of batches that sessions share
would not belong to one session.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from draftsmith.live.engine import InFlightUpdate, LiveEngine
from draftsmith.live.records import UpdateRecord
from draftsmith.live.translator import LiveTranslator
from draftsmith.serve.live.protocol import Refused
from draftsmith.serve.live.session import LiveSession, PendingUpdate

_log = logging.getLogger(__name__)
MOST_ROWS = 32
"""Sessions in one batch."""
_Batch = list[tuple[LiveSession, InFlightUpdate]]


@dataclass
class _MeasuredTranslator:
    """A translator, and the time that it took for its tokens."""

    translator: LiveTranslator
    seconds: float = 0.0
    tokens: int = 0

    def add(self, one: PendingUpdate) -> UpdateRecord | None:
        before = self.translator.last
        update = self.translator.update(one.text, final=one.final)
        if update is None or update is before:
            return None
        self.seconds += update.record.seconds
        self.tokens += update.record.tokens
        return update.record

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


class SpeedupMeasurement:
    """Compares drafting with re-translation on the last updates of a session."""

    def __init__(
        self, session: LiveSession, drafted: LiveTranslator, plain: LiveTranslator
    ) -> None:
        self.session = session
        self._drafted, self._plain = _MeasuredTranslator(drafted), _MeasuredTranslator(plain)
        self._steps = self._run(session.to_measure())
        self._updates = 0

    def _run(self, updates: list[PendingUpdate]) -> Iterator[None]:
        seg: int | None = None
        for one in updates:
            for side in (self._drafted, self._plain):
                if seg is not None and seg != one.seg and side.translator.last is not None:
                    side.translator.close()
                counted = side.add(one)
            self._updates += counted is not None
            seg = one.seg
            yield

    def step(self) -> bool:
        """Decode one update both ways; False: there was none left, and the result was emitted."""
        for _ in self._steps:
            return True
        tps, plain = self._drafted.tokens_per_second, self._plain.tokens_per_second
        self.session.emit(
            {
                "type": "measured",
                "updates": self._updates,
                "tps": tps,
                "tps_ar": plain,
                "speedup": tps / plain if tps and plain else None,
            }
        )
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRecord:
    """One decoded batch, for the metrics."""

    rows: int
    seconds: float
    records: tuple[UpdateRecord, ...]
    retried: int
    failed: int


class Scheduler(threading.Thread):
    """The decoding thread; it runs until `stop`.

    Args:
        engine: decodes for all sessions.
        on_batch: called after each batch.
    """

    def __init__(
        self, engine: LiveEngine, on_batch: Callable[[BatchRecord], None] | None = None
    ) -> None:
        super().__init__(name="decoding", daemon=True)
        self.engine, self._on_batch = engine, on_batch
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
        """Sessions with something pending, the longest wait first."""
        since = [(session.pending_since, session) for session in self._sessions.values()]
        ready = [(when, session) for when, session in since if when is not None]
        return [session for _, session in sorted(ready, key=lambda one: one[0])][:MOST_ROWS]

    def _decode(self, batch: _Batch) -> None:
        began = time.perf_counter()
        records: list[UpdateRecord] = []
        done: set[int] = set()

        def complete(row: int) -> None:
            session, update = batch[row]
            records.append(session.complete(update))
            done.add(row)

        caches = [session.translator.session for session, _ in batch]
        left: _Batch = []
        try:
            self.engine.run_batch([update for _, update in batch], caches, complete)
        except Exception as error:  # from the target, torch, or a model's own code
            left = [one for row, one in enumerate(batch) if row not in done]
            _log.warning("%d rows of a batch go on alone", len(left), exc_info=error)
            for session, update in left:
                self._retry(session, update, error if len(batch) == 1 else None, records)
        if self._on_batch is not None:
            self._on_batch(
                BatchRecord(
                    rows=len(batch),
                    seconds=time.perf_counter() - began,
                    records=tuple(records),
                    retried=len(left),
                    failed=len(batch) - len(records),
                )
            )

    def _retry(
        self,
        session: LiveSession,
        update: InFlightUpdate,
        error: Exception | None,
        records: list[UpdateRecord],
    ) -> None:
        """Decode alone and afresh: another row of the batch, or the cache, may have been at fault.

        `error` is reported if this fails too; None: the error of this attempt is.
        """
        session.retried += 1
        try:
            self.engine.run_afresh(update, session.translator.session)
            records.append(session.complete(update))
        except Exception as again:  # the other sessions go on
            _log.error("a session cannot be decoded", exc_info=again)
            session.fail(error or again)


def _goes_on(measurement: SpeedupMeasurement) -> bool:
    """Run one step of a measurement; False: it is over, or has failed."""
    try:
        return measurement.step()
    except Exception as error:  # only the speed-up shown on one page depends on it
        _log.error("a session cannot be measured", exc_info=error)
        measurement.session.emit(Refused("measure", str(error) or repr(error)).message())
        return False


def _batches(sessions: Iterable[LiveSession]) -> Iterator[_Batch]:
    """The next update of each session, in one batch per bias."""
    groups: dict[float, _Batch] = {}
    for session in sessions:
        update = session.next_update()
        if update is not None:
            groups.setdefault(update.bias, []).append((session, update))
    yield from groups.values()
