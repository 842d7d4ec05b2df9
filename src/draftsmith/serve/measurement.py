"""How much faster drafting is than re-translation, on a session's own words and on this machine.

Both sides do the same updates alone and in turn, whatever others do meanwhile: batches that a
session shared with others would say nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftsmith.live.records import UpdateRecord
from draftsmith.live.translator import LiveTranslator
from draftsmith.serve.hearing import Heard
from draftsmith.serve.room import Room


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
