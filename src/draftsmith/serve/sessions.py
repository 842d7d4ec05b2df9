"""The sessions of `live serve`, and the manager that opens, finds and closes them.

What one session has still to decode, and what a newer hypothesis replaces:

    received   0.0  0.1  0.2  0.3 final  1.0  1.1      segment.revision
    pending                   0.3 final  1.1           the newest of a segment replaces those before
                                                       it (0.1, 0.2 and 1.0 are coalesced); a final
                                                       one is never dropped

A coalesced hypothesis is remembered by the one that replaced it: if the newer one does not fit into
the model's context, the older one is translated after all.

What waits is bounded by count and by characters, and it waits for its client, too: while nobody is
connected, nothing of a session is decoded.

The event loop calls `add`, `configure`, `finish` and `stop` of a session; the decoding thread calls
`take_in`, then `complete` or `fail`. A lock guards what both use.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from draftsmith.config import require
from draftsmith.drafters.base import BindableTarget
from draftsmith.errors import InputError
from draftsmith.live.config import LiveConfig, PromptConfig, SessionLimits
from draftsmith.live.metrics import displayed_erasure
from draftsmith.live.records import UpdateRecord
from draftsmith.live.templates import Template
from draftsmith.live.translator import (
    KEPT_SEGMENTS,
    InFlightUpdate,
    LiveEngine,
    LiveTranslator,
    SourceTooLong,
)
from draftsmith.serve.pace import Pace
from draftsmith.serve.protocol import MOST_BYTES, Outbox, Refused, Settings, Source
from draftsmith.serve.scheduler import Scheduler, ServerMetrics, speedup_steps

MOST_COALESCED = 64
"""Coalesced hypotheses that a pending update remembers, with `MOST_BYTES` characters in all."""
MOST_PENDING = 64
"""Pending updates before a hypothesis that is not final is refused ..."""
MOST_FINALS = 1024
"""... and before a final one is; the client has to send it again."""
MOST_TEXT = 16 * MOST_BYTES
"""Pending characters before any other segment is refused."""
MOST_STATE = 4 * MOST_BYTES
"""Characters of the segments in a full state, unless the last one alone has more."""
KEPT_UPDATES = 200
"""Updates that the running metrics and a measurement cover."""
RELEASE_SECONDS = 2.0
"""How long a session waits for its client if another one wants its place."""
_LONGEST_LANGUAGE = 64
_DECODED = ("bias", "final_bias", "revision_bias", "context")
_DISPLAYED = ("mask_k", "no_shrink", "whole_words")
"""Settings of a session that are fields of `LiveConfig`, and of its display."""
_TEXTS = ("source", "text", "hidden")
"""Parts of a segment without a limit of their own."""

Event = dict[str, Any]
"""A message to the clients, as it goes over the wire."""
Emit = Callable[[Event], None]
MakeTranslator = Callable[[Settings, LiveTranslator | None], LiveTranslator]
"""Makes a translator for these settings; reuses the given one if only its options differ."""


class Shutdown:
    """Stands behind everything pending; the session ends when it is reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingUpdate(Source):
    """A hypothesis that waits for its turn."""

    words: str
    """The text to translate: that of the hypothesis before it where its own is blank."""
    since: float = field(default_factory=time.monotonic)
    coalesced: tuple[PendingUpdate, ...] = ()
    """Shorter hypotheses that it replaced, the newest first: they may fit where it does not."""

    def replacing(self, before: PendingUpdate) -> PendingUpdate:
        """Return this update in the place of one that was pending."""
        old = (replace(before, coalesced=()), *before.coalesced)
        shorter = [one for one in old if len(one.words) < len(self.words)]
        while len(shorter) > MOST_COALESCED or sum(len(one.words) for one in shorter) > MOST_BYTES:
            shorter = shorter[::-1][::2][::-1]  # keeps the shortest
        return replace(self, since=before.since, coalesced=tuple(shorter))

    @property
    def characters(self) -> int:
        """Those that it holds, remembered ones included."""
        return len(self.words) + sum(len(one.words) for one in self.coalesced)

    def fallback(self, translated: str) -> PendingUpdate | None:
        """Return what is translated instead of this update, which does not fit; None: nothing.

        `translated` is the last translated source of the segment. It is translated again only to
        end the segment.
        """
        older = replace(self.coalesced[0], coalesced=self.coalesced[1:]) if self.coalesced else None
        if not self.final or self.text.strip():
            return older
        words = translated if older is None else older.words
        same = not words or words == self.words
        return None if same else replace(self, words=words, coalesced=self.coalesced[1:])

    def withdrawn(self, words: str) -> PendingUpdate:
        """Return what stands in the place of this update, which failed and may be sent again."""
        return replace(self, rev=self.rev - 1, text="", words=words, final=False, coalesced=())


class LiveSession:
    """One session.

    Args:
        name: a random name; a client that has it may take the session over.
        make: makes translators.
        emit: receives every event for the clients; called from either thread.
    """

    def __init__(self, name: str, settings: Settings, make: MakeTranslator, emit: Emit) -> None:
        self.name, self.settings, self._make, self.emit = name, settings, make, emit
        self.wanted = settings
        """The settings after everything pending has been decoded."""
        self.translator = make(settings, None)
        self.lock = threading.Lock()
        self.last_id = 0
        self.counts = {"coalesced": 0, "failed": 0, "retried": 0}
        """failed: updates that could not be decoded; clients may send them again. retried: updates
        that were decoded a second time, from an empty cache."""
        self._pending: deque[PendingUpdate | Settings | Shutdown] = deque()
        self.newest: PendingUpdate | None = None
        """The last hypothesis that was accepted."""
        self._decoding: PendingUpdate | None = None
        """The update in flight."""
        self._stopping = False
        self._seg: int | None = None
        """The segment that is being translated."""
        self.turn = 0
        """The scheduler's last turn in which something was taken in."""
        self._segments: dict[int, Event] = {}
        self._records: deque[UpdateRecord] = deque(maxlen=KEPT_UPDATES)
        self._decoded: deque[PendingUpdate] = deque(maxlen=KEPT_UPDATES)
        self.address = ""
        """The network from which it was opened."""
        # used by the manager, in the event loop alone
        self.outboxes: dict[Outbox, bool] = {}
        """Each connection receives events through its outbox. True: the connection keeps the
        session open; False: it only reads."""
        self.left = time.monotonic()
        """When the last connection that kept it open was closed."""

    # ------------------------------------------------------------------ the event loop

    def add(self, source: Source) -> bool:
        """Accept a hypothesis; a repeated one changes nothing. True: it replaced a pending one.

        Raises:
            Refused: the hypothesis is older than another or contradicts it, its segment is over, or
                too many are pending.
        """
        with self.lock:
            if self._stopping:
                raise Refused("stopping", "the session is about to end", place=source.place)
            last = self.newest
            if last is not None and self._is_known(source, last):
                return False
            blank = last is not None and last.seg == source.seg and not source.text.strip()
            words = last.words if last and blank else source.text
            update = PendingUpdate(**asdict(source), words=words)
            before = self._pending[-1] if self._pending else None
            if isinstance(before, PendingUpdate) and before.seg == update.seg:
                self._pending[-1] = self.newest = update.replacing(before)
                self.counts["coalesced"] += 1
                self.emit({"type": "coalesced", "seg": update.seg, "revs": [before.rev]})
                return True
            pending = [one for one in self._pending if isinstance(one, PendingUpdate)]
            many = len(self._pending) >= (MOST_FINALS if update.final else MOST_PENDING)
            if many or sum(one.characters for one in pending) > MOST_TEXT:
                raise Refused("busy", f"{len(self._pending)} updates wait", place=source.place)
            self._pending.append(update)
            self.newest = update
            return False

    @staticmethod
    def _is_known(source: Source, last: PendingUpdate) -> bool:
        """Whether this is the last hypothesis again; Refused: it cannot follow the last one."""
        same = (last.seg, last.rev) == (source.seg, source.rev) and last.text == source.text
        if same and last.final == source.final:
            return True
        if source.seg < last.seg or (source.seg == last.seg and last.final):
            raise Refused("segment_closed", f"segment {source.seg} is over", place=source.place)
        if same:  # the same words, now final
            return False
        if (source.seg, source.rev) == (last.seg, last.rev):
            sentence = f"revision {source.rev} of segment {source.seg} came with another text"
            raise Refused("conflict", sentence, place=source.place)
        if source.seg == last.seg and source.rev < last.rev:
            sentence = f"segment {last.seg} is at revision {last.rev} already"
            raise Refused("stale_rev", sentence, place=source.place)
        return False

    def finish(self, seg: int) -> None:
        """Make the last hypothesis of a segment final.

        Raises:
            Refused: the segment is over or unknown.
        """
        last = self.newest
        if last is None or last.seg != seg:
            raise Refused("unknown_segment", f"there is no open segment {seg}", place={"seg": seg})
        self.add(Source(seg=seg, rev=last.rev + 1, text="", final=True))

    def configure(self, settings: Settings) -> None:
        """Use these settings, which have been checked, for all later hypotheses."""
        with self.lock:
            self.wanted = settings
            if self._pending and isinstance(self._pending[-1], Settings):
                self._pending.pop()
            self._pending.append(settings)

    def stop(self) -> None:
        """Refuse new hypotheses, decode what is pending, then emit `bye`."""
        with self.lock:
            if not self._stopping:
                self._stopping = True
                self._pending.append(Shutdown())

    def full_state(self) -> Event:
        """Return everything that a client needs that connects in the middle."""
        with self.lock:
            return {
                "type": "full_state",
                "session": self.name,
                "id": self.last_id,
                "settings": asdict(self.settings),
                "segments": list(self._segments.values()),
                "stats": self._metrics(),
            }

    def bye(self) -> Event:
        """Return the last event, with a report."""
        with self.lock:
            report = self._metrics() | self.counts | {"updates": self.last_id}
            return {"type": "bye", "report": report}

    # ------------------------------------------------------------------ the decoding thread

    @property
    def is_left(self) -> bool:
        """Whether no client keeps it open."""
        return not any(self.outboxes.values())

    @property
    def is_attended(self) -> bool:
        """Whether any client is connected."""
        return bool(self.outboxes)

    @property
    def is_deserted(self) -> bool:
        """Whether it is about to end and nobody hears it."""
        return self._stopping and not self.outboxes

    @property
    def pending_since(self) -> float | None:
        """When the oldest pending update arrived; None: nothing has to be done, as nothing is
        pending or no client is there. Settings count as 0."""
        with self.lock:
            if not self._pending or not (self.outboxes or self._stopping):
                return None
            return next((one.since for one in self._pending if isinstance(one, PendingUpdate)), 0.0)

    def take_in(self) -> tuple[int, InFlightUpdate | None]:
        """Take in the first thing that is pending.

        Returns:
            The characters that were encoded, and the update to decode; None: there is none yet.
        """
        with self.lock:
            if self.is_deserted:
                self._pending = deque([Shutdown()])
            one = self._pending.popleft()
        if isinstance(one, Settings):
            self._apply(one)
            return 0, None
        if isinstance(one, Shutdown):
            self.emit(self.bye())
            return 0, None
        try:
            update = self._begin(one)
        except SourceTooLong as error:
            self._fall_back(one, error)
            update = None
        except Exception as error:  # a text that the tokenizer fails on: others go on
            self._refuse(one, "backend", error)
            update = None
        if update is not None:
            self._decoding = one
        return len(one.words), update

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
            update = replace(shown, erased=0, seg=old["seg"], rev=old["rev"])
            self._emit_update(update, waited=0.0)

    def _begin(self, one: PendingUpdate) -> InFlightUpdate | None:
        if self._seg is not None and self._seg != one.seg and self.translator.last is not None:
            self.translator.close()
        self._seg = one.seg
        source = self.translator.wanted(one.words)
        if source is None or (self.translator.is_known(source) and not one.final):
            if one.final:  # a segment that never had a word is dropped
                self.translator.close()
                self._seg = None
            return None
        return self.translator.begin(source, final=one.final)

    def complete(self, decoded: InFlightUpdate) -> UpdateRecord:
        """Display the decoded update and emit it."""
        one = self._in_flight()
        update = self.translator.finish(decoded)
        update = replace(update, seg=one.seg, rev=one.rev)
        with self.lock:
            self._records.append(update)
            self._decoded.append(replace(one, coalesced=()))
        waited = time.monotonic() - one.since - decoded.seconds
        self._emit_update(update, waited=max(0.0, waited))
        if one.final:
            self._seg = None
        return update

    def fail(self, error: Exception) -> None:
        """Refuse the update in flight: the target failed on it twice. The display stays."""
        self._refuse(self._in_flight(), "backend", error)

    def _in_flight(self) -> PendingUpdate:
        assert self._decoding is not None, "no update is in flight"
        return self._decoding

    def _fall_back(self, one: PendingUpdate, error: SourceTooLong) -> None:
        """Queue an older hypothesis for one that does not fit; without one the display stays."""
        translated = self.translator.source
        older = one.fallback(translated)
        if older is not None:
            with self.lock:
                self._pending.appendleft(older)
        self._refuse(one, "source_too_long", error, older or one.withdrawn(translated))

    def _refuse(
        self, one: PendingUpdate, code: str, error: Exception, newest: PendingUpdate | None = None
    ) -> None:
        """Report that an update failed. Unless a newer one was accepted, it may be sent again.

        `newest`: the newest hypothesis now; None: the segment has the words of the refused one.
        """
        with self.lock:
            self.counts["failed"] += 1
            if self.newest is not None and self.newest.place == one.place:
                self.newest = newest or one.withdrawn(one.words)
        self.emit(Refused(code, str(error) or type(error).__name__, place=one.place).message())

    def _emit_update(self, update: UpdateRecord, *, waited: float) -> None:
        with self.lock:
            self.last_id += 1
            segment = _part(update, ("seg", "rev", "source", "stable", "final", "degenerate"))
            segment |= {"text": update.shown, "hidden": update.full[len(update.shown) :]}
            self._segments[update.seg] = segment
            self._forget_segments()
            counts = _part(update, ("tokens", "drafted", "accepted", "forwards"))
            stats = counts | self._metrics()
            stats |= {"ms": 1000 * update.seconds, "waited_ms": 1000 * waited}
            head = {"type": "update", "id": self.last_id, "erased": update.erased, "stats": stats}
            event = head | segment
        self.emit(event)

    def _forget_segments(self) -> None:
        """Drop the first segments if a client that comes back would get too many."""
        sizes = [sum(len(one[text]) for text in _TEXTS) for one in self._segments.values()]
        left = sum(sizes)
        for seg, size in zip([*self._segments], sizes[:-1], strict=False):
            if left <= MOST_STATE and len(self._segments) <= KEPT_SEGMENTS:
                break
            left -= size
            del self._segments[seg]

    def _metrics(self) -> Event:
        """Compute running metrics of the last updates; each computes them, so texts stay unread."""
        records = list(self._records)
        accepted = sum(one.accepted for one in records)
        drafted, tokens = (sum(getattr(one, n) for one in records) for n in ("drafted", "tokens"))
        return {
            "ne": displayed_erasure(records),
            "ad": accepted / drafted if drafted else None,
            "ao": accepted / tokens if tokens else None,
        }

    def to_measure(self) -> list[PendingUpdate]:
        """Return the last updates, without a segment whose beginning has been forgotten."""
        with self.lock:
            known = list(self._decoded)
        first = known[0].seg if len(known) == KEPT_UPDATES else None
        return [one for one in known if one.seg != first]


class SessionManager:
    """Opens, finds and closes sessions. All methods run in the event loop's thread.

    Args:
        prompt: its language is that of a session that chooses none.
        live: how all sessions decode and display; a session's settings override their part of it.
    """

    def __init__(
        self, target: BindableTarget, prompt: PromptConfig, live: LiveConfig, limits: SessionLimits
    ) -> None:
        live = replace(live, then=None)  # a drafter whose state is kept for one translation
        self.target, self._prompt, self._live, self.limits = target, prompt, live, limits
        own, shown = _part(live, _DECODED), _part(live.display, _DISPLAYED)
        self._settings = Settings(target=prompt.language, **own, **shown)
        self.engine = LiveEngine(target, live)
        self._plain_engine = LiveEngine(target, replace(live, redraft=False, resync=0))
        self.metrics = ServerMetrics()
        self.scheduler = Scheduler(self.engine, self.metrics)
        self.pace = Pace()
        self.sessions: dict[str, LiveSession] = {}
        """By name."""
        self.ending = False

    def __len__(self) -> int:
        return len(self.sessions)

    # ------------------------------------------------------------------ sessions

    def open(self, wanted: Mapping[str, Any], address: str = "") -> LiveSession:
        """Open a session with these settings for a client at an address; the other settings are the
        server's.

        Raises:
            Refused: too many are open, the settings are invalid, or decoding has ended.
        """
        self.sweep()
        if self.ending:
            raise Refused("stopping", "the server is about to end", fatal=True)
        settings = self.merged(self._settings, wanted)
        here = network(address)
        own = [one for one in self.sessions.values() if one.address == here]
        self._make_room(own, self.limits.most_of_one, " of one address")
        self._make_room([*self.sessions.values()], self.limits.sessions)
        name = secrets.token_urlsafe(16)
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:  # called from any thread
            loop.call_soon_threadsafe(self._deliver, name, event)

        session = LiveSession(name, settings, self._make, emit)
        session.address = here
        self.scheduler.add(session)
        self.sessions[name] = session
        return session

    def _make_room(self, sessions: Sequence[LiveSession], most: int, whose: str = "") -> None:
        """End the session that was left first if there are too many.

        Raises:
            Refused: all have clients, or had them a moment ago.
        """
        if len(sessions) < most:
            return
        before = time.monotonic() - RELEASE_SECONDS
        left = [one for one in sessions if one.is_left and one.left <= before]
        if not left:
            sentence = f"{len(sessions)} sessions{whose} are open already, and no more may be"
            raise Refused("busy", sentence, fatal=True)
        first = min(left, key=lambda one: one.left)
        self._deliver(first.name, first.bye())

    def find(self, name: str) -> LiveSession:
        """Return the session of this name.

        Raises:
            Refused: no such session is open, or decoding has ended.
        """
        self.sweep()
        self.scheduler.check()
        if name not in self.sessions:
            raise Refused("unknown_session", "there is no such session (any more)", fatal=True)
        return self.sessions[name]

    def end(self) -> None:
        """Refuse new hypotheses, decode what is pending, then send `bye` to all clients."""
        self.ending = True
        for session in self.sessions.values():
            session.stop()
        self.scheduler.wake()

    def dismiss(self) -> None:
        """Send `bye` to the clients that still wait."""
        for session in list(self.sessions.values()):
            self._deliver(session.name, session.bye())

    def sweep(self) -> None:
        """Close the sessions whose client did not come back; readers keep none open."""
        now = time.monotonic()
        for session in list(self.sessions.values()):
            if session.is_left and now - session.left > self.limits.keep_seconds:
                self._deliver(session.name, session.bye())

    def measure(self, session: LiveSession) -> None:
        """Measure the speed-up of drafting on the session's last updates."""
        config = self._config(session.settings)
        template = self.template(session.settings.target)
        drafted = LiveTranslator(self.target, template, config, engine=self.engine)
        config = replace(config, redraft=False, resync=0)
        plain = LiveTranslator(self.target, template, config, engine=self._plain_engine)
        updates = session.to_measure()
        self.scheduler.measure(session, speedup_steps(session, updates, drafted, plain))

    # ------------------------------------------------------------------ subscriptions

    def subscribe(self, session: LiveSession, outbox: Outbox, *, keeps: bool) -> None:
        """Put all further events of a session into an outbox.

        `keeps`: the session stays open while this connection is there.
        """
        outbox.state = session.full_state
        session.outboxes[outbox] = keeps
        self.scheduler.wake()

    def unsubscribe(self, session: LiveSession, outbox: Outbox) -> None:
        """Remove an outbox; the session waits `keep_seconds` for its client."""
        if session.outboxes.pop(outbox, False):
            session.left = time.monotonic()
        self.scheduler.wake()

    def _deliver(self, name: str, event: Event) -> None:
        session = self.sessions.get(name)
        if session is None:
            return
        for outbox in session.outboxes:
            outbox.put(event)
        if event["type"] == "bye":
            del self.sessions[name]
            self.scheduler.remove(session)

    # ------------------------------------------------------------------ settings

    def merged(self, settings: Settings, wanted: Mapping[str, Any]) -> Settings:
        """Return `settings` with these changes, whose types are right.

        Raises:
            Refused: a value is out of its range.
        """
        new = replace(settings, **wanted)
        new = replace(new, target=new.target.strip())
        try:
            _check(new)
            self._config(new)
            self.template(new.target)
        except InputError as error:
            # clients know fields of the protocol, not flags
            sentence = re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), str(error))
            raise Refused("bad_settings", sentence) from None
        return new

    def template(self, language: str) -> Template:
        """Make the template for a language."""
        return Template.of(replace(self._prompt, language=language), self.target.tokenizer)

    def _config(self, settings: Settings) -> LiveConfig:
        display = replace(self._live.display, **_part(settings, _DISPLAYED))
        trim = settings.mask_k if settings.mask == "draft" else 0
        return replace(self._live, **_part(settings, _DECODED), trim_draft=trim, display=display)

    def _make(self, settings: Settings, before: LiveTranslator | None) -> LiveTranslator:
        config = self._config(settings)
        if before is not None and before.template.language == settings.target:
            before.configure(config)
            return before
        template = self.template(settings.target)
        return LiveTranslator(self.target, template, config, engine=self.engine)


@functools.lru_cache(maxsize=1024)
def network(address: str) -> str:
    """Whose an address is: itself, or its IPv6 network, of which one machine has all addresses."""
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped or ipaddress.ip_network((int(parsed), 64), strict=False))


def _part(values: object, names: Iterable[str]) -> dict[str, Any]:
    """Return these attributes by name."""
    return {name: getattr(values, name) for name in names}


def _check(settings: Settings) -> None:
    language, most = settings.target, _LONGEST_LANGUAGE
    good = 0 < len(language) <= most and language.isprintable()
    # braces are placeholders of a template
    sentence = f"target names a language, in at most {most} letters, no braces"
    require(good and not set(language) & set("{}"), sentence)
    known = settings.mask in ("display", "draft")
    require(known, f"mask is display or draft: {settings.mask!r}")
