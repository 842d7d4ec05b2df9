"""Decoding for all sessions: what waits in different rooms goes through the target together.

    room a   ──asked──┐                       ┌── update a
    room b   ──asked──┼── one batch per bias ─┼── update b (as soon as it is through)
    room c   (waits)  ┘                       └──

One thread. What waits longest goes first. A batch that fails, for whatever reason, is tried again
row by row, from scratch and without drafts: one broken session does not take others with it.

How much faster drafting is than re-translation, on a session's own words and on this machine.

Both sides do the same updates alone and in turn, whatever others do meanwhile: batches that a
session shared with others would say nothing about it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from draftsmith.live.engine import Engine, Outcome
from draftsmith.live.records import UpdateRecord
from draftsmith.live.translator import LiveTranslator
from draftsmith.serve.live.protocol import Refused
from draftsmith.serve.live.session import Asked, Heard, Room


@dataclass
class _Side:
    """One way to translate."""

    translator: LiveTranslator
    seconds: float = 0.0
    tokens: int = 0

    def add(self, heard: Heard) -> UpdateRecord | None:
        before = self.translator.last
        update = self.translator.update(heard.text, final=heard.final)
        if update is None or update is before:
            return None
        self.seconds += update.record.seconds
        self.tokens += update.record.tokens
        return update.record

    @property
    def pace(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


class Measurement:
    """An update at a time, when nothing else waits."""

    def __init__(self, room: Room, drafted: LiveTranslator, plain: LiveTranslator) -> None:
        self.room = room
        self._drafted, self._plain = _Side(drafted), _Side(plain)
        self._steps = self._run(room.to_measure())
        self._updates = 0

    def _run(self, heard: list[Heard]) -> Iterator[None]:
        seg: int | None = None
        for one in heard:
            for side in (self._drafted, self._plain):
                if seg is not None and seg != one.seg and side.translator.last is not None:
                    side.translator.close()
                counted = side.add(one)
            self._updates += counted is not None
            seg = one.seg
            yield

    def step(self) -> bool:
        """One update; False: there are no more, and the room has been told."""
        for _ in self._steps:
            return True
        tps, plain = self._drafted.pace, self._plain.pace
        self.room.tell(
            {
                "type": "measured",
                "updates": self._updates,
                "tps": tps,
                "tps_ar": plain,
                "speedup": tps / plain if tps and plain else None,
            }
        )
        return False


_log = logging.getLogger(__name__)
MOST_ROWS = 32
"""Sessions in one batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one batch did, for the metrics."""

    rows: int
    seconds: float
    records: tuple[UpdateRecord, ...]
    retried: int
    failed: int


class Pump(threading.Thread):
    """Runs until it is stopped.

    Args:
        engine: of all rooms.
        on_batch: told what each batch did.
    """

    def __init__(self, engine: Engine, on_batch: Callable[[Batch], None] | None = None) -> None:
        super().__init__(name="decoding", daemon=True)
        self.engine, self._on_batch = engine, on_batch
        self._rooms: dict[str, Room] = {}
        self._measuring: list[Measurement] = []
        self._changed = threading.Condition()
        self._stopping = False
        self.broken: str | None = None
        """Why it does not run any more; None: it does."""

    # ------------------------------------------------------------------ from other threads

    def check(self) -> None:
        """Refused: it does not run any more, and who waits would wait in vain."""
        if self.broken is not None:
            raise Refused("broken", self.broken, fatal=True)

    def add(self, room: Room) -> None:
        """Raises Refused like `check`."""
        with self._changed:
            self.check()
            self._rooms[room.name] = room

    def remove(self, room: Room) -> None:
        with self._changed:
            self._rooms.pop(room.name, None)
            self._measuring = [one for one in self._measuring if one.room is not room]

    def wake(self) -> None:
        """Something waits."""
        with self._changed:
            self._changed.notify()

    def measure(self, measurement: Measurement) -> None:
        """When there is time; one at a time for each room."""
        with self._changed:
            if not any(one.room is measurement.room for one in self._measuring):
                self._measuring.append(measurement)
            self._changed.notify()

    def stop(self) -> None:
        """Let the batch end, then return."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    # ------------------------------------------------------------------ its own thread

    def run(self) -> None:
        try:
            while self.turn(wait=True):
                pass
        finally:
            if not self._stopping:  # a fault of ours: nobody may wait for an answer in vain
                with self._changed:
                    self.broken = f"decoding has ended: {sys.exception()!r}"
                    rooms = list(self._rooms.values())
                for room in rooms:
                    room.tell(Refused("broken", self.broken, fatal=True).message())

    def turn(self, *, wait: bool = False) -> bool:
        """Everything that waits once; False: it has been stopped."""
        with self._changed:
            while wait and not (self._stopping or self._waiting() or self._measuring):
                self._changed.wait()
            if self._stopping:
                return False
            rooms, measuring = self._waiting(), list(self._measuring)
        for room_asked in _batches(rooms):
            self._decode(room_asked)
        if not rooms and measuring and not _goes_on(measuring[0]):
            with self._changed:
                self._measuring = [one for one in self._measuring if one is not measuring[0]]
        return True

    def _waiting(self) -> list[Room]:
        """Rooms with something to do, who waits longest first."""
        since = [(room.waits_since, room) for room in self._rooms.values()]
        some = [(when, room) for when, room in since if when is not None]
        return [room for _, room in sorted(some, key=lambda one: one[0])][:MOST_ROWS]

    def _decode(self, batch: list[tuple[Room, Asked]]) -> None:
        began = time.perf_counter()
        records: list[UpdateRecord] = []
        done: set[int] = set()

        def take_in(row: int, outcome: Outcome) -> None:
            room, asked = batch[row]
            records.append(room.take_in(asked, outcome))
            done.add(row)

        sessions = [room.translator.session for room, _ in batch]
        left: list[tuple[Room, Asked]] = []
        try:
            self.engine.run_together([asked.job for _, asked in batch], sessions, take_in)
        except Exception as error:  # of the target, of torch, or of a model's own code
            left = [one for row, one in enumerate(batch) if row not in done]
            _log.warning("%d rows of a batch go on alone", len(left), exc_info=error)
            for room, asked in left:
                self._again(room, asked, error if len(batch) == 1 else None, records)
        if self._on_batch is not None:
            self._on_batch(
                Batch(
                    rows=len(batch),
                    seconds=time.perf_counter() - began,
                    records=tuple(records),
                    retried=len(left),
                    failed=len(batch) - len(records),
                )
            )

    def _again(
        self, room: Room, asked: Asked, error: Exception | None, records: list[UpdateRecord]
    ) -> None:
        """Alone and from scratch: the fault may have been a neighbour's, or the cache's."""
        room.retried += 1
        try:
            outcome = self.engine.run_afresh(asked.job, room.translator.session)
            records.append(room.take_in(asked, outcome))
        except Exception as again:  # likewise: the other sessions go on
            _log.error("a session cannot be decoded", exc_info=again)
            room.fail(asked, error or again)


def _goes_on(measurement: Measurement) -> bool:
    """One step of it; one that fails is over."""
    try:
        return measurement.step()
    except Exception as error:  # likewise; nobody waits for it but the gauge of one page
        _log.error("a session cannot be measured", exc_info=error)
        measurement.room.tell(Refused("measure", str(error) or repr(error)).message())
        return False


def _batches(rooms: Iterable[Room]) -> Iterator[list[tuple[Room, Asked]]]:
    """What these rooms ask, by bias."""
    groups: dict[float, list[tuple[Room, Asked]]] = {}
    for room in rooms:
        asked = room.next_asked()
        if asked is not None:
            groups.setdefault(asked.job.bias, []).append((room, asked))
    yield from groups.values()
