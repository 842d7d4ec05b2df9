"""One session of `live serve`: what was heard, what waits, what is shown.

    heard      0.0  0.1  0.2  0.3 final  1.0  1.1      segment.revision
    waiting                   0.3 final  1.1           the newest of a segment wins (0.2, 1.0 are
                                                       coalesced); a final is never dropped

The network side calls `hear`, `configure` and `finish` from its own thread; the decoding side takes
`next_asked` and gives back `take_in` or `fail`. A lock guards what both touch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.errors import InputError
from draftsmith.live.engine import Job, Outcome
from draftsmith.live.metrics import CHARACTERS, report
from draftsmith.live.records import UpdateRecord
from draftsmith.live.translator import LiveTranslator, Update
from draftsmith.serve.messages import Refused, Settings, Source

MOST_WAITING = 64
"""Segments that may wait for their turn."""
KEPT_SEGMENTS = 200
KEPT_RECORDS = 200
"""Updates that the running figures look back on."""

Said = dict[str, Any]
Tell = Callable[[Said], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """A hypothesis that waits."""

    seg: int
    rev: int
    text: str
    final: bool
    came: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A hypothesis on its way through the target."""

    heard: Heard
    source: str
    job: Job


Make = Callable[[Settings, LiveTranslator | None], LiveTranslator]
"""A translator for these settings; from the one before, if only its options differ."""


class Room:
    """A session.

    Args:
        name: unguessable: who knows it may take the session over.
        settings: with no None that the server can fill in.
        make: of translators.
        tell: receives every message for the clients; called from either side.
    """

    def __init__(self, name: str, settings: Settings, make: Make, tell: Tell) -> None:
        self.name, self.settings, self._make, self.tell = name, settings, make, tell
        self.wanted = settings
        """As they will be when what waits is through."""
        self.translator = make(settings, None)
        self.lock = threading.Lock()
        self.last_id = 0
        self.coalesced = 0
        self.lost = 0
        """Finals that could not be answered: the target failed twice."""
        self._waiting: deque[Heard | Settings] = deque()
        self._heard: Heard | None = None
        """The newest of all, as the network side knows it."""
        self._closed = -1
        """The last segment that was declared final."""
        self._seg: int | None = None
        """The one that is being translated."""
        self._segments: dict[int, Said] = {}
        self._records: deque[UpdateRecord] = deque(maxlen=KEPT_RECORDS)
        self._streams: dict[int, list[Heard]] = {}

    # ------------------------------------------------------------------ the network side

    def hear(self, source: Source) -> None:
        """Take a hypothesis in; what comes twice changes nothing.

        Raises:
            Refused: it is older than another, contradicts one, or its segment is over.
        """
        with self.lock:
            self._check(source)
            last = self._heard
            if last is not None and (last.seg, last.rev) == (source.seg, source.rev):
                return
            text = source.text
            if source.final and not text.strip() and last is not None and last.seg == source.seg:
                text = last.text
            heard = Heard(seg=source.seg, rev=source.rev, text=text, final=source.final)
            before = self._waiting[-1] if self._waiting else None
            if isinstance(before, Heard) and before.seg == heard.seg and not before.final:
                self._waiting[-1] = replace(heard, came=before.came)
                self.coalesced += 1
                self.tell({"type": "coalesced", "seg": heard.seg, "revs": [before.rev]})
            elif len(self._waiting) >= MOST_WAITING:
                raise Refused("busy", f"{MOST_WAITING} segments wait already", rev=source.rev)
            else:
                self._waiting.append(heard)
            self._heard = heard
            if source.final:
                self._closed = source.seg

    def _check(self, source: Source) -> None:
        last = self._heard
        if last is None:
            return
        same = (last.seg, last.rev) == (source.seg, source.rev)
        if same and last.text == source.text and last.final == source.final:
            return
        if source.seg <= self._closed:
            raise Refused("segment_closed", f"segment {source.seg} is final", rev=source.rev)
        if same:
            sentence = f"revision {source.rev} of segment {source.seg} came with another text"
            raise Refused("conflict", sentence, rev=source.rev)
        if (source.seg, source.rev) < (last.seg, last.rev):
            sentence = f"segment {last.seg} is at revision {last.rev} already"
            raise Refused("stale_rev", sentence, rev=source.rev)

    def finish(self, seg: int) -> None:
        """The segment is final with what it is.

        Raises:
            Refused: it is over, or not there.
        """
        last = self._heard
        if last is None or last.seg != seg:
            raise Refused("unknown_segment", f"there is no open segment {seg}")
        self.hear(Source(seg=seg, rev=last.rev + 1, text=last.text, final=True))

    def configure(self, settings: Settings) -> None:
        """From what is heard next on. The new settings have been checked."""
        with self.lock:
            self.wanted = settings
            self._waiting.append(settings)

    def full_state(self) -> Said:
        """All that a reader who comes late must know."""
        with self.lock:
            return {
                "type": "full_state",
                "session": self.name,
                "id": self.last_id,
                "settings": spelt(self.settings),
                "segments": list(self._segments.values()),
                "stats": self._figures(),
            }

    def bye(self) -> Said:
        """The last message, with a report."""
        with self.lock:
            figures = self._figures() | {"coalesced": self.coalesced, "updates": self.last_id}
            return {"type": "bye", "report": figures}

    # ------------------------------------------------------------------ the decoding side

    @property
    def waits_since(self) -> float | None:
        """When the oldest that waits came; None: nothing does. Settings wait for nobody."""
        with self.lock:
            if not self._waiting:
                return None
            return next((one.came for one in self._waiting if isinstance(one, Heard)), 0.0)

    def next_asked(self) -> Asked | None:
        """What is to be decoded next, after everything before it that needs no decoding."""
        while True:
            with self.lock:
                if not self._waiting:
                    return None
                one = self._waiting.popleft()
            if isinstance(one, Settings):
                self._apply(one)
                continue
            try:
                asked = self._asked(one)
            except InputError as error:
                self._refuse(one, "source_too_long" if "long" in str(error) else "bad_text", error)
                continue
            if asked is not None:
                return asked

    def _apply(self, settings: Settings) -> None:
        before = self.translator
        with self.lock:
            self.settings = settings
        self.translator = self._make(settings, before)
        if self.translator is not before:
            self._seg = None  # the segment goes on in the other language as a new one
        shown = self.translator.last
        old = self._segments.get(-1 if self._seg is None else self._seg)
        if shown is not None and old is not None:
            self._tell_update(shown, seg=old["seg"], rev=old["rev"], waited=0.0)

    def _asked(self, heard: Heard) -> Asked | None:
        if self._seg is not None and self._seg != heard.seg and self.translator.last is not None:
            self.translator.close()
        self._seg = heard.seg
        source = self.translator.wanted(heard.text)
        if source is None or (self.translator.is_known(source) and not heard.final):
            if heard.final:  # never a word: the segment is dropped
                self.translator.close()
                self._seg = None
            return None
        return Asked(heard=heard, source=source, job=self.translator.job(source, final=heard.final))

    def take_in(self, asked: Asked, outcome: Outcome) -> UpdateRecord:
        """The decoding is through: tell everyone."""
        heard = asked.heard
        update = self.translator.take_in(asked.source, outcome, final=heard.final)
        record = replace(update.record, seg=heard.seg, rev=heard.rev)
        with self.lock:
            self._records.append(record)
            self._streams.setdefault(heard.seg, []).append(heard)
            while len(self._streams) > 3:
                del self._streams[next(iter(self._streams))]
        waited = time.monotonic() - heard.came - outcome.seconds
        self._tell_update(update, seg=heard.seg, rev=heard.rev, waited=max(0.0, waited))
        if heard.final:
            self._seg = None
        return record

    def fail(self, asked: Asked, error: Exception) -> None:
        """The target failed, also on its own: what was there stays."""
        self._refuse(asked.heard, "backend", error)

    def _refuse(self, heard: Heard, code: str, error: Exception) -> None:
        if heard.final:
            with self.lock:
                self.lost += 1
            self.translator.close()
            self._seg = None
        self.tell(Refused(code, str(error), rev=heard.rev).message() | {"seg": heard.seg})

    def _tell_update(self, update: Update, *, seg: int, rev: int, waited: float) -> None:
        record = update.record
        with self.lock:
            self.last_id += 1
            segment = {
                "seg": seg,
                "rev": rev,
                "source": record.source,
                "text": update.text,
                "stable": update.stable,
                "final": record.final,
            }
            self._segments[seg] = segment
            while len(self._segments) > KEPT_SEGMENTS:
                del self._segments[next(iter(self._segments))]
            stats = {
                "tokens": record.tokens,
                "drafted": record.drafted,
                "accepted": record.accepted,
                "forwards": record.forwards,
                "ms": 1000 * record.seconds,
                "waited_ms": 1000 * waited,
                **self._figures(),
            }
            said = {
                "type": "update",
                "id": self.last_id,
                **segment,
                "hidden": record.full[len(update.text) :],
                "erased": update.erased,
                "degenerate": record.degenerate,
                "stats": stats,
            }
        self.tell(said)

    def _figures(self) -> Said:
        """Running figures of the last updates."""
        found = report(list(self._records), CHARACTERS)
        return {
            "ne": found.erasure_macro,
            "ad": found.accepted_of_drafted,
            "ao": found.accepted_of_tokens,
        }

    def to_measure(self) -> tuple[list[Heard], list[UpdateRecord]]:
        """The updates of the last segments that ended, and what they took."""
        with self.lock:
            ended = {seg for seg, heard in self._streams.items() if heard[-1].final}
            heard = [one for seg in ended for one in self._streams[seg]]
            known = {(one.seg, one.rev) for one in heard}
            return heard, [one for one in self._records if (one.seg, one.rev) in known]


def spelt(settings: Settings) -> Said:
    """As it goes over the wire."""
    return {name: getattr(settings, name) for name in Settings.__dataclass_fields__}
