"""The protocol of `live serve`: one JSON object per text frame.

    client    start  source  config  finish  resume  measure  ping  stop
    server    ready  warning  update  full_state  coalesced  measured  error  pong  bye

A `source` is the whole hypothesis of a segment, with a revision that ascends; an `update` is the
whole text of a segment. So whoever missed some loses nothing, and what comes twice does no harm.

What one connection is still to be sent: a reader who is slow gets the newest state only.

put     update s1 r0   update s1 r1   coalesced   update s1 r2 final
sends   (slow)                        coalesced   update s1 r2 final
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.config import from_dict
from draftsmith.errors import DraftsmithError, InputError, nearest
from draftsmith.live.templates import check_text

VERSION = 1
MOST_BYTES = 64 * 1024
"""Of a frame."""
_MOST_DIGITS = 15
"""Of an integer: what every client can hold, and one more."""
CLEARED = ("final_bias", "revision_bias")
"""Settings that may be null: then the bias holds there, too. Of others null changes nothing."""
_FAULTS = frozenset(
    ("binary", "too_large", "not_json", "unknown_type", "bad_field", "bad_text", "version")
)


class Refused(DraftsmithError):
    """What the server says instead of an answer: a code for programs, a sentence for people."""

    exit_code = InputError.exit_code

    def __init__(
        self,
        code: str,
        sentence: str,
        *,
        fatal: bool = False,
        place: Mapping[str, int] | None = None,
    ) -> None:
        """`place`: the segment and the revision that it is about, as far as they are known."""
        super().__init__(sentence)
        self.code, self.fatal, self.place = code, fatal, dict(place or {})

    @property
    def is_fault(self) -> bool:
        """The frame made no sense; else it only came late, or twice, or to the wrong place."""
        return self.code in _FAULTS

    def message(self) -> dict[str, Any]:
        """As it goes over the wire."""
        said = {"type": "error", "code": self.code, "message": str(self), "fatal": self.fatal}
        return said | self.place


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a session may choose; None: as it was, at first the server's own."""

    target: str | None = None
    """The language to translate into."""
    bias: float | None = None
    final_bias: float | None = None
    revision_bias: float | None = None
    mask_k: int | None = None
    mask: str | None = None
    """display or draft."""
    no_shrink: bool | None = None
    whole_words: bool | None = None
    context: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A session begins."""

    v: int = VERSION
    settings: Settings = Settings()
    cleared: tuple[str, ...] = ()
    """Of CLEARED."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What a segment is held to be now."""

    seg: int
    rev: int
    text: str
    final: bool = False
    stability: float | None = None
    """For recognisers that say one; nothing is made of it."""
    t: float | None = None
    """Likewise: seconds at which it was heard."""

    @property
    def place(self) -> dict[str, int]:
        """What an answer says to be found again."""
        return {"seg": self.seg, "rev": self.rev}


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Other settings from the next update on; another language ends the segment."""

    settings: Settings
    cleared: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """A segment is over with what it is."""

    seg: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """A connection takes a session over again."""

    session: str
    last_id: int = 0
    """Of the last update that it has seen: with the newest there is nothing to send again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """How much faster is this than re-translation without drafts, on what was said so far?"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ping:
    """Still there?"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """The session is over."""


Message = Start | Source | Config | Finish | Resume | Measure | Ping | Stop
_KINDS: dict[str, type[Any]] = {
    "start": Start,
    "source": Source,
    "config": Config,
    "finish": Finish,
    "resume": Resume,
    "measure": Measure,
    "ping": Ping,
    "stop": Stop,
}
_SETTINGS = frozenset(Settings.__dataclass_fields__)


def parse(frame: str) -> Message:
    """The message of a frame.

    Raises:
        Refused: too large, no JSON object, an unknown type or field, a value of another type.
    """
    size = len(frame.encode("utf-8", "surrogatepass"))
    if size > MOST_BYTES:
        raise Refused("too_large", f"a frame has at most {MOST_BYTES} bytes, this has {size}")
    try:
        values = json.loads(frame, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise Refused("not_json", f"the frame is not JSON: {error}") from None
    if not isinstance(values, Mapping):
        raise Refused("not_json", "a frame is one JSON object")
    values = dict(values)
    kind = values.pop("type", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        hint = nearest(kind, _KINDS) if isinstance(kind, str) else f": {', '.join(_KINDS)}"
        raise Refused("unknown_type", f"unknown type {kind!r}{hint}", place=_place(values))
    if kind in ("start", "config"):  # settings stand beside the type
        own = {key: values.pop(key) for key in list(values) if key in _SETTINGS}
        for name in ("settings", "cleared"):
            if name in values:
                raise Refused("bad_field", f"unknown option {name!r} in the {kind} message")
        cleared = [name for name in CLEARED if name in own and own[name] is None]
        values |= {"settings": own, "cleared": cleared}
    try:
        message: Message = from_dict(_KINDS[kind], values, where=f"the {kind} message")
    except InputError as error:
        raise Refused("bad_field", str(error), place=_place(values)) from None
    if isinstance(message, Source):
        if min(message.seg, message.rev) < 0:
            raise Refused("bad_field", "seg and rev are 0 or more", place=message.place)
        try:
            check_text(message.text)
        except InputError as error:
            raise Refused("bad_text", str(error), place=message.place) from None
    if isinstance(message, Start) and message.v != VERSION:
        raise Refused("version", f"this server speaks version {VERSION}, not {message.v}")
    return message


def _integer(digits: str) -> int:
    """Refused: one that no client could count on from."""
    if len(digits) > _MOST_DIGITS:
        raise Refused("bad_field", f"an integer has at most {_MOST_DIGITS} digits")
    return int(digits)


def _place(values: Mapping[str, Any]) -> dict[str, int]:
    """The segment and the revision that a message speaks of, as far as it says them."""
    return {name: values[name] for name in ("seg", "rev") if type(values.get(name)) is int}


MOST = 256
"""Messages that wait. Of more all but the last are dropped, and the whole state is sent."""


class Outbox:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._messages: OrderedDict[object, dict[str, Any]] = OrderedDict()
        self._count = 0
        self._some = asyncio.Event()
        self.state: Callable[[], dict[str, Any]] | None = None
        """What makes up for messages that were dropped; None: there is no session yet."""

    def put(self, message: dict[str, Any]) -> None:
        """An update takes the place of an earlier one of its segment, at the end of the line."""
        key: object = message["seg"] if message["type"] == "update" else None
        if key is None:
            self._count += 1
            key = (self._count,)
        self._messages.pop(key, None)
        if len(self._messages) >= MOST:
            self._messages.clear()
            if self.state is not None:
                self._messages["state"] = self.state()
        self._messages[key] = message
        self._some.set()

    async def next(self) -> dict[str, Any]:
        """The oldest; waits for one."""
        while not self._messages:
            self._some.clear()
            await self._some.wait()
        _, message = self._messages.popitem(last=False)
        return message
