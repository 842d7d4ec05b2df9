"""All sessions of a server, and the connections that are subscribed to each."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.drafters.base import BindableTarget
from draftsmith.errors import InputError
from draftsmith.live.config import LiveConfig
from draftsmith.live.engine import LiveEngine
from draftsmith.live.templates import Template
from draftsmith.live.translator import LiveTranslator
from draftsmith.serve.config import SessionLimits
from draftsmith.serve.live.protocol import Outbox, Refused, Settings
from draftsmith.serve.live.session import Event, LiveSession
from draftsmith.serve.scheduler import BatchRecord, Scheduler, SpeedupMeasurement

_LONGEST_LANGUAGE = 64


@dataclass(kw_only=True)
class _Subscriptions:
    """A session and the connections that receive its events."""

    session: LiveSession
    outboxes: dict[Outbox, bool] = field(default_factory=dict)
    """True: the connection keeps the session open; False: it only reads."""
    left: float = field(default_factory=time.monotonic)
    """When the last connection that kept it open was closed."""


class SessionManager:
    """Opens, finds and closes sessions. All methods run in the event loop's thread.

    Args:
        template: makes the template for a language.
        settings: of a session that chooses none; complete but for the two biases that may be None.
        live: how all sessions decode and display; a session's settings override their part of it.
        on_batch: called after each decoded batch.
    """

    def __init__(
        self,
        target: BindableTarget,
        template: Callable[[str], Template],
        *,
        settings: Settings,
        live: LiveConfig | None = None,
        limits: SessionLimits | None = None,
        on_batch: Callable[[BatchRecord], None] | None = None,
    ) -> None:
        self.target, self.template, self._settings = target, template, settings
        self._live, self.limits = live or LiveConfig(), limits or SessionLimits()
        self.engine = LiveEngine(target, resync=self._live.resync)
        self._plain_engine = LiveEngine(target, redraft=False)
        self.scheduler = Scheduler(self.engine, on_batch)
        self.subscriptions: dict[str, _Subscriptions] = {}
        """By the name of the session."""
        self.ending = False

    def __len__(self) -> int:
        return len(self.subscriptions)

    # ------------------------------------------------------------------ sessions

    def open(self, wanted: Settings, cleared: Sequence[str] = ()) -> LiveSession:
        """Open a session.

        Raises:
            Refused: too many are open, the settings are invalid, or decoding has ended.
        """
        self.sweep()
        if self.ending:
            raise Refused("stopping", "the server is about to end", fatal=True)
        if len(self) >= self.limits.sessions:
            raise Refused("busy", f"{len(self)} sessions are open already", fatal=True)
        settings = self.merged(self._settings, wanted, cleared)
        name = secrets.token_urlsafe(16)
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:  # called from any thread
            loop.call_soon_threadsafe(self._deliver, name, event)

        session = LiveSession(name, settings, self._make, emit)
        self.scheduler.add(session)
        self.subscriptions[name] = _Subscriptions(session=session)
        return session

    def find(self, name: str) -> LiveSession:
        """The session of this name.

        Raises:
            Refused: no such session is open, or decoding has ended.
        """
        self.sweep()
        self.scheduler.check()
        if name not in self.subscriptions:
            raise Refused("unknown_session", "there is no such session (any more)", fatal=True)
        return self.subscriptions[name].session

    def end(self) -> None:
        """Refuse new hypotheses, decode what is pending, then send `bye` to all clients."""
        self.ending = True
        for one in self.subscriptions.values():
            one.session.stop()
        self.scheduler.wake()

    def sweep(self) -> None:
        """Close the sessions whose client did not come back; readers keep none open."""
        now = time.monotonic()
        for one in list(self.subscriptions.values()):
            alone = not any(one.outboxes.values())
            if alone and now - one.left > self.limits.keep_seconds:
                self._deliver(one.session.name, one.session.bye())

    def measure(self, session: LiveSession) -> None:
        """Measure the speed-up of drafting on the session's last updates."""
        config = self._config(session.settings)
        template = self.template(str(session.settings.target))
        drafted = LiveTranslator(self.target, template, config, engine=self.engine)
        config = replace(config, redraft=False, resync=0)
        plain = LiveTranslator(self.target, template, config, engine=self._plain_engine)
        self.scheduler.measure(SpeedupMeasurement(session, drafted, plain))

    # ------------------------------------------------------------------ subscriptions

    def subscribe(self, session: LiveSession, outbox: Outbox, *, keeps: bool) -> None:
        """Put all further events of a session into an outbox.

        `keeps`: the session stays open while this connection is there.
        """
        outbox.state = session.full_state
        self.subscriptions[session.name].outboxes[outbox] = keeps

    def unsubscribe(self, session: LiveSession, outbox: Outbox) -> None:
        """Remove an outbox; the session waits `keep_seconds` for its client."""
        found = self.subscriptions.get(session.name)
        if found is not None and found.outboxes.pop(outbox, False):
            found.left = time.monotonic()

    def _deliver(self, name: str, event: Event) -> None:
        found = self.subscriptions.get(name)
        if found is None:
            return
        for outbox in found.outboxes:
            outbox.put(event)
        if event["type"] == "bye":
            del self.subscriptions[name]
            self.scheduler.remove(found.session)

    # ------------------------------------------------------------------ settings

    def merged(self, settings: Settings, wanted: Settings, cleared: Sequence[str] = ()) -> Settings:
        """`settings` with those of `wanted` that are not None, and None for `cleared`.

        Raises:
            Refused: a value is out of its range.
        """
        given: dict[str, Any] = dict.fromkeys(cleared) | {
            name: value for name, value in wanted.as_event().items() if value is not None
        }
        given |= {"target": wanted.target.strip()} if wanted.target is not None else {}
        new = replace(settings, **given)
        try:
            _check(new)
            self._config(new)
            self.template(str(new.target))
        except InputError as error:
            # clients know fields of the protocol, not flags
            sentence = re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), str(error))
            raise Refused("bad_settings", sentence) from None
        return new

    def _config(self, settings: Settings) -> LiveConfig:
        mask_k = settings.mask_k or 0
        return replace(
            self._live,
            bias=settings.bias or 0.0,
            final_bias=settings.final_bias,
            revision_bias=settings.revision_bias,
            trim_draft=mask_k if settings.mask == "draft" else 0,
            context=settings.context or 0,
            display=replace(
                self._live.display,
                mask_k=mask_k,
                no_shrink=bool(settings.no_shrink),
                whole_words=bool(settings.whole_words),
            ),
        )

    def _make(self, settings: Settings, before: LiveTranslator | None) -> LiveTranslator:
        config = self._config(settings)
        if before is not None and before.template.language == settings.target:
            before.configure(config)
            return before
        template = self.template(str(settings.target))
        return LiveTranslator(self.target, template, config, engine=self.engine)


def _check(settings: Settings) -> None:
    language = (settings.target or "").strip()
    good = 0 < len(language) <= _LONGEST_LANGUAGE and language.isprintable()
    good = good and not set(language) & set("{}")  # placeholders of a template
    if not good:
        most = _LONGEST_LANGUAGE
        raise InputError(f"target names a language, in at most {most} letters, no braces")
    if settings.mask not in ("display", "draft"):
        raise InputError(f"mask is display or draft: {settings.mask!r}")
