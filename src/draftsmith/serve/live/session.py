"""One session of `live serve`: what was heard, what waits, what is shown.

    heard      0.0  0.1  0.2  0.3 final  1.0  1.1      segment.revision
    waiting                   0.3 final  1.1           the newest of a segment wins (0.2, 1.0 are
                                                       coalesced); a final is never dropped

The network side calls `hear`, `configure` and `finish` from its own thread; the decoding side takes
`next_asked` and gives back `take_in` or `fail`. A lock guards what both touch.

What a session heard and has not translated yet.

0.1 .... waits
0.2 .... takes its place ("coalesced"), and remembers it
0.2 does not fit into the model's context: refused, and 0.1 is translated after all
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.live.engine import Job, Outcome
from draftsmith.live.metrics import CHARACTERS, report
from draftsmith.live.records import UpdateRecord
from draftsmith.live.translator import LiveTranslator, SourceTooLong, Update
from draftsmith.serve.live.protocol import Refused, Settings, Source

MOST_INSTEAD = 64
"""Hypotheses that one which took their place remembers."""


class Stopping:
    """Waits behind everything that was heard: then the session is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """A hypothesis that waits."""

    seg: int
    rev: int
    said: str
    """As it came."""
    text: str
    """Silence stands for the words before it."""
    final: bool
    came: float = field(default_factory=time.monotonic)
    instead: tuple[Heard, ...] = ()
    """Shorter ones whose place it took, the newest first: they may fit where it does not."""

    @property
    def ends(self) -> bool:
        """The segment is over with what there is."""
        return self.final and not self.said.strip()

    def over(self, before: Heard) -> Heard:
        """This one, in the place of one that waited."""
        old = (replace(before, instead=()), *before.instead)
        shorter = [one for one in old if len(one.text) < len(self.text)]
        if len(shorter) > MOST_INSTEAD:
            shorter = shorter[::-1][::2][::-1]  # the shortest stays
        return replace(self, came=before.came, instead=tuple(shorter))

    def next_best(self, shown: str) -> Heard | None:
        """What is translated in place of this, which does not fit; None: nothing.

        `shown` is what was translated last of this segment: there is no need to do it again, except
        to end the segment with it.
        """
        best = replace(self.instead[0], instead=self.instead[1:]) if self.instead else None
        if not self.ends:
            return best
        text = shown if best is None else best.text
        same = not text or text == self.text
        return None if same else replace(self, text=text, instead=self.instead[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A hypothesis on its way through the target."""

    heard: Heard
    source: str
    job: Job


MOST_WAITING = 64
"""Hypotheses that may wait for their turn ..."""
MOST_FINALS = 1024
"""... and final ones: who is refused has to say them again."""
KEPT_SEGMENTS = 200
KEPT_UPDATES = 200
"""That the running figures, and a measurement, look back on."""

Said = dict[str, Any]
Tell = Callable[[Said], None]


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
        self.failed = 0
        """Updates that could not be decoded; their clients may say them again."""
        self.retried = 0
        """Updates that were decoded once more, from scratch."""
        self._waiting: deque[Heard | Settings | Stopping] = deque()
        self._heard: Heard | None = None
        """The newest of all, as the network side knows it."""
        self._stopping = False
        self._seg: int | None = None
        """The one that is being translated."""
        self._segments: dict[int, Said] = {}
        self._records: deque[UpdateRecord] = deque(maxlen=KEPT_UPDATES)
        self._decoded: deque[Heard] = deque(maxlen=KEPT_UPDATES)

    # ------------------------------------------------------------------ the network side

    def hear(self, source: Source) -> bool:
        """Take a hypothesis in; what comes twice changes nothing. True: it took another's place.

        Raises:
            Refused: it is older than another, contradicts one, its segment is over, or too many
                wait.
        """
        with self.lock:
            if self._stopping:
                raise Refused("stopping", "the session is about to end", place=source.place)
            last = self._heard
            if last is not None and self._is_known(source, last):
                return False
            same = last is not None and last.seg == source.seg
            text = last.text if same and last and not source.text.strip() else source.text
            heard = Heard(
                seg=source.seg, rev=source.rev, said=source.text, text=text, final=source.final
            )
            before = self._waiting[-1] if self._waiting else None
            if isinstance(before, Heard) and before.seg == heard.seg:
                self._waiting[-1] = self._heard = heard.over(before)
                self.coalesced += 1
                self.tell({"type": "coalesced", "seg": heard.seg, "revs": [before.rev]})
                return True
            if len(self._waiting) >= (MOST_FINALS if heard.final else MOST_WAITING):
                raise Refused("busy", f"{len(self._waiting)} updates wait", place=source.place)
            self._waiting.append(heard)
            self._heard = heard
            return False

    @staticmethod
    def _is_known(source: Source, last: Heard) -> bool:
        """Whether this has been heard; Refused: it cannot follow the last one."""
        same = (last.seg, last.rev) == (source.seg, source.rev) and last.said == source.text
        if same and last.final == source.final:
            return True
        if source.seg < last.seg or (source.seg == last.seg and last.final):
            raise Refused("segment_closed", f"segment {source.seg} is over", place=source.place)
        if same:  # it has become final, word for word
            return False
        if (source.seg, source.rev) == (last.seg, last.rev):
            sentence = f"revision {source.rev} of segment {source.seg} came with another text"
            raise Refused("conflict", sentence, place=source.place)
        if source.seg == last.seg and source.rev < last.rev:
            sentence = f"segment {last.seg} is at revision {last.rev} already"
            raise Refused("stale_rev", sentence, place=source.place)
        return False

    def finish(self, seg: int) -> None:
        """The segment is final with what it is.

        Raises:
            Refused: it is over, or not there.
        """
        last = self._heard
        if last is None or last.seg != seg:
            raise Refused("unknown_segment", f"there is no open segment {seg}", place={"seg": seg})
        self.hear(Source(seg=seg, rev=last.rev + 1, text="", final=True))

    def configure(self, settings: Settings) -> None:
        """From what is heard next on. The new settings have been checked."""
        with self.lock:
            self.wanted = settings
            if self._waiting and isinstance(self._waiting[-1], Settings):
                self._waiting.pop()
            self._waiting.append(settings)

    def stop(self) -> None:
        """No more is heard; what waits is still answered, then `bye` is said."""
        with self.lock:
            if not self._stopping:
                self._stopping = True
                self._waiting.append(Stopping())

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
            counts = {"coalesced": self.coalesced, "updates": self.last_id, "failed": self.failed}
            counts["retried"] = self.retried
            return {"type": "bye", "report": self._figures() | counts}

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
            if isinstance(one, Stopping):
                self.tell(self.bye())
                continue
            try:
                asked = self._asked(one)
            except SourceTooLong as error:
                self._go_back(one, error)
                continue
            except Exception as error:  # one text that the tokenizer cannot take is no one else's
                self._refuse(one, "backend", error)
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
            self._tell_update(replace(shown, erased=0), seg=old["seg"], rev=old["rev"], waited=0.0)

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
            self._decoded.append(heard)
        waited = time.monotonic() - heard.came - outcome.seconds
        self._tell_update(update, seg=heard.seg, rev=heard.rev, waited=max(0.0, waited))
        if heard.final:
            self._seg = None
        return record

    def fail(self, asked: Asked, error: Exception) -> None:
        """The target failed, also on its own: what was there stays."""
        self._refuse(asked.heard, "backend", error)

    def _go_back(self, heard: Heard, error: SourceTooLong) -> None:
        """The newest does not fit: what it took the place of does, or what is shown stays."""
        shown = self.translator.source
        best = heard.next_best(shown)
        if best is not None:
            with self.lock:
                self._waiting.appendleft(best)
        self._refuse(heard, "source_too_long", error, known=best, text=shown)

    def _refuse(
        self,
        heard: Heard,
        code: str,
        error: Exception,
        *,
        known: Heard | None = None,
        text: str | None = None,
    ) -> None:
        """Nothing came of it. Unless more was heard since, it may be said again, word for word.

        Args:
            known: what is the newest now; None: nothing is, and `text` is the segment's.
            text: None: that of the refused one.
        """
        said = heard.text if text is None else text
        before = known or replace(
            heard, rev=heard.rev - 1, said="", text=said, final=False, instead=()
        )
        with self.lock:
            self.failed += 1
            last = self._heard
            if last is not None and (last.seg, last.rev) == (heard.seg, heard.rev):
                self._heard = before
        place = {"seg": heard.seg, "rev": heard.rev}
        sentence = str(error) or type(error).__name__
        self.tell(Refused(code, sentence, place=place).message())

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
                "hidden": record.full[len(update.text) :],
                "final": record.final,
                "degenerate": record.degenerate,
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
                "erased": update.erased,
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

    def to_measure(self) -> list[Heard]:
        """The last updates, of whole segments as far as they are remembered."""
        with self.lock:
            known = list(self._decoded)
        first = known[0].seg if len(known) == KEPT_UPDATES else None
        return [one for one in known if one.seg != first]


def spelt(settings: Settings) -> Said:
    """As it goes over the wire."""
    return {name: getattr(settings, name) for name in Settings.__dataclass_fields__}
