"""All sessions of a server, and who listens to which."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.errors import InputError
from draftsmith.live.engine import Engine, LiveTarget
from draftsmith.live.templates import Template
from draftsmith.live.translator import LiveConfig, LiveTranslator
from draftsmith.serve.live.protocol import Outbox, Refused, Settings
from draftsmith.serve.live.session import Room, Said
from draftsmith.serve.scheduler import Batch, Measurement, Pump

_LONGEST_LANGUAGE = 64


@dataclass(frozen=True, kw_only=True)
class HallOptions:
    """What holds for all sessions."""

    settings: Settings
    """What a session has unless it says otherwise; none of them is None but the two biases."""
    live: LiveConfig = field(default_factory=LiveConfig)
    """How all decode and show; of this a session chooses what is in its settings."""
    sessions: int = 32
    keep_seconds: float = 60.0
    """How long a session waits for its client to come back."""


@dataclass(kw_only=True)
class _Seat:
    """A room and its listeners."""

    room: Room
    outboxes: dict[Outbox, bool] = field(default_factory=dict)
    """Who listens, and whether they keep the session open."""
    left: float = field(default_factory=time.monotonic)
    """When the last one went."""


class Hall:
    """Opens, finds and closes rooms. Everything here runs in the event loop's thread.

    Args:
        template: of a language.
        on_batch: told what each batch of decoding did.
    """

    def __init__(
        self,
        target: LiveTarget,
        template: Callable[[str], Template],
        options: HallOptions,
        on_batch: Callable[[Batch], None] | None = None,
    ) -> None:
        self.target, self.options, self._template = target, options, template
        self.engine = Engine(target, resync=options.live.resync)
        self._plain_engine = Engine(target, redraft=False)
        self.pump = Pump(self.engine, on_batch)
        self._seats: dict[str, _Seat] = {}
        self._ending = False

    def __len__(self) -> int:
        return len(self._seats)

    # ------------------------------------------------------------------ rooms

    def open(self, wanted: Settings, cleared: Sequence[str] = ()) -> Room:
        """A new session.

        Raises:
            Refused: there are too many, these settings cannot be, or nothing is decoded any more.
        """
        self.sweep()
        if self._ending:
            raise Refused("stopping", "the server is about to end", fatal=True)
        if len(self._seats) >= self.options.sessions:
            raise Refused("busy", f"{len(self._seats)} sessions are open already", fatal=True)
        settings = self.merged(self.options.settings, wanted, cleared)
        name = secrets.token_urlsafe(16)
        loop = asyncio.get_running_loop()

        def tell(message: Said) -> None:  # from any thread
            loop.call_soon_threadsafe(self._deliver, name, message)

        room = Room(name, settings, self._make, tell)
        self.pump.add(room)
        self._seats[name] = _Seat(room=room)
        return room

    def find(self, name: str) -> Room:
        """The session of this name.

        Raises:
            Refused: there is none (any more), or nothing is decoded any more.
        """
        self.sweep()
        self.pump.check()
        if name not in self._seats:
            raise Refused("unknown_session", "there is no such session (any more)", fatal=True)
        return self._seats[name].room

    def end(self) -> None:
        """No more is heard. What waits is still answered, then everyone is told."""
        self._ending = True
        for seat in self._seats.values():
            seat.room.stop()
        self.pump.wake()

    def close(self, room: Room) -> None:
        """Everyone is told, and the session is forgotten."""
        self._deliver(room.name, room.bye())

    def sweep(self) -> None:
        """Close the sessions that nobody came back to; who only looks on keeps none open."""
        now = time.monotonic()
        for seat in list(self._seats.values()):
            alone = not any(seat.outboxes.values())
            if alone and now - seat.left > self.options.keep_seconds:
                self.close(seat.room)

    def measure(self, room: Room) -> None:
        """How much faster is drafting on what was said there?"""
        config = self._config(room.settings)
        template = self._template(str(room.settings.target))
        drafted = LiveTranslator(self.target, template, config, engine=self.engine)
        config = replace(config, redraft=False, resync=0)
        plain = LiveTranslator(self.target, template, config, engine=self._plain_engine)
        self.pump.measure(Measurement(room, drafted, plain))

    # ------------------------------------------------------------------ listeners

    def join(self, room: Room, outbox: Outbox, *, keeps: bool) -> None:
        """Someone listens from now on. `keeps`: the session stays open for them."""
        outbox.state = room.full_state
        self._seats[room.name].outboxes[outbox] = keeps

    def leave(self, room: Room, outbox: Outbox) -> None:
        """Someone is gone; the session waits for a while."""
        seat = self._seats.get(room.name)
        if seat is not None and seat.outboxes.pop(outbox, False):
            seat.left = time.monotonic()

    def _deliver(self, name: str, message: dict[str, Any]) -> None:
        seat = self._seats.get(name)
        if seat is None:
            return
        for outbox in seat.outboxes:
            outbox.put(message)
        if message["type"] == "bye":
            del self._seats[name]
            self.pump.remove(seat.room)

    # ------------------------------------------------------------------ settings

    def merged(self, settings: Settings, wanted: Settings, cleared: Sequence[str] = ()) -> Settings:
        """`wanted`, and the others as they are, but None for those that are `cleared`.

        Raises:
            Refused: a value that cannot be, with its range.
        """
        given: dict[str, Any] = dict.fromkeys(cleared) | {
            name: value
            for name in Settings.__dataclass_fields__
            if (value := getattr(wanted, name)) is not None
        }
        given |= {"target": wanted.target.strip()} if wanted.target is not None else {}
        new = replace(settings, **given)
        try:
            _check(new)
            self._config(new)
            self._template(str(new.target))
        except InputError as error:
            raise Refused("bad_settings", str(error)) from None
        return new

    def _config(self, settings: Settings) -> LiveConfig:
        mask_k = settings.mask_k or 0
        return replace(
            self.options.live,
            bias=settings.bias or 0.0,
            final_bias=settings.final_bias,
            revision_bias=settings.revision_bias,
            trim_draft=mask_k if settings.mask == "draft" else 0,
            context=settings.context or 0,
            display=replace(
                self.options.live.display,
                hide=mask_k,
                no_shrink=bool(settings.no_shrink),
                whole_words=bool(settings.whole_words),
            ),
        )

    def _make(self, settings: Settings, before: LiveTranslator | None) -> LiveTranslator:
        config = self._config(settings)
        if before is not None and before.template.language == settings.target:
            before.configure(config)
            return before
        template = self._template(str(settings.target))
        return LiveTranslator(self.target, template, config, engine=self.engine)


def _check(settings: Settings) -> None:
    language = (settings.target or "").strip()
    good = 0 < len(language) <= _LONGEST_LANGUAGE and language.isprintable()
    good = good and not set(language) & set("{}")  # as a template writes what is filled in
    if not good:
        most = _LONGEST_LANGUAGE
        raise InputError(f"target names a language, in at most {most} letters, no braces")
    if settings.mask not in ("display", "draft"):
        raise InputError(f"mask is display or draft: {settings.mask!r}")
