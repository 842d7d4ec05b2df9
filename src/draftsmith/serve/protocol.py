"""The protocol of `live serve`: one JSON object per text frame.

    client    start  source  config  finish  resume  measure  ping  stop
    server    ready  warning  update  full_state  coalesced  measured  error  pong  bye

A `source` is the whole hypothesis of a segment, with an ascending revision; an `update` is the
whole text of a segment. A client that missed messages loses nothing, and repeats do no harm.

An `Outbox` holds what one connection has still to send; a slow connection sends the newest state
only:

    put     update s1 r0   update s1 r1   coalesced   update s1 r2 final
    sends   (slow)                        coalesced   update s1 r2 final
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from draftsmith.config import check_text, from_dict
from draftsmith.errors import DraftsmithError, InputError, nearest

VERSION = 1
MOST_BYTES = 64 * 1024
"""Largest frame."""
_MOST_DIGITS = 15
"""Longest integer: one digit more than every client can hold exactly."""
CLEARED = ("final_bias", "revision_bias")
"""Settings that null resets to `bias`. For all others null changes nothing."""
_MOST_LETTERS = 1000
"""Longest sentence of a refusal, which may repeat what a client sent."""
_FAULTS = frozenset(
    ("binary", "too_large", "not_json", "unknown_type", "bad_field", "bad_text", "version")
)


class Refused(DraftsmithError):
    """The server refuses a message: a code for programs, a sentence for people."""

    exit_code = InputError.exit_code

    def __init__(
        self,
        code: str,
        sentence: str,
        *,
        fatal: bool = False,
        place: Mapping[str, int] | None = None,
    ) -> None:
        """`place`: segment and revision of the refused message, as far as they are known."""
        much = len(sentence) > _MOST_LETTERS
        super().__init__(f"{sentence[: _MOST_LETTERS - 3]}..." if much else sentence)
        self.code, self.fatal, self.place = code, fatal, dict(place or {})

    @property
    def is_fault(self) -> bool:
        """Whether the frame was malformed; else it was only late, repeated or misplaced."""
        return self.code in _FAULTS

    def message(self) -> dict[str, Any]:
        """Return the message that is sent."""
        error = {"type": "error", "code": self.code, "message": str(self), "fatal": self.fatal}
        return error | self.place


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a session may choose."""

    target: str = "German"
    """The language to translate into."""
    bias: float = 0.2
    final_bias: float | None = None
    revision_bias: float | None = None
    mask_k: int = 0
    mask: str = "display"
    """display or draft."""
    no_shrink: bool = True
    whole_words: bool = False
    context: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Open a session."""

    v: int = VERSION
    settings: dict[str, Any] = field(default_factory=dict)
    """Those of `Settings` that the message names; the others are the server's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The hypothesis of a segment."""

    seg: int
    rev: int
    text: str
    final: bool = False
    stability: float | None = None
    """Accepted from recognisers that send one; unused."""
    t: float | None = None
    """Likewise: seconds from the beginning."""

    @property
    def place(self) -> dict[str, int]:
        """Segment and revision, repeated in answers."""
        return {"seg": self.seg, "rev": self.rev}


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Change settings from the next update on; another language ends the segment."""

    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """Make the last hypothesis of a segment final."""

    seg: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Take over a session that another connection opened."""

    session: str
    last_id: int = 0
    """Last update that the client has; if it is the newest, the state is not sent again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Measure the speed-up over re-translation without drafts, on the last updates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ping:
    """Answer with `pong`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """End the session."""


Message = Start | Source | Config | Finish | Resume | Measure | Ping | Stop
_KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Message)}
"""By the type that frames give."""
_SETTINGS = Settings.__dataclass_fields__.keys()


def parse(frame: str) -> Message:
    """Parse a frame.

    Raises:
        Refused: the frame is too large or no JSON object, a type or field is unknown, or a value
                has the wrong type.
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
    code, where = "bad_text", f"the {kind} message"
    try:
        if kind == "source" and isinstance(values.get("text"), str):
            check_text(values["text"], "the text")
        code = "bad_field"
        if kind in ("start", "config"):  # settings are keys of the message itself
            if "settings" in values:
                raise InputError(f"unknown option 'settings' in {where}")
            given = {name: values.pop(name) for name in [*values] if name in _SETTINGS}
            known = {k: v for k, v in given.items() if v is not None or k in CLEARED}
            checked = from_dict(Settings, known, where=where)
            values["settings"] = {name: getattr(checked, name) for name in known}
        message: Message = from_dict(_KINDS[kind], values, where=where)
    except InputError as error:
        raise Refused(code, str(error), place=_place(values)) from None
    if isinstance(message, Source) and min(message.seg, message.rev) < 0:
        raise Refused("bad_field", "seg and rev are 0 or more", place=message.place)
    if isinstance(message, Start) and message.v != VERSION:
        raise Refused("version", f"this server speaks version {VERSION}, not {message.v}")
    return message


def _integer(digits: str) -> int:
    """Raise Refused for an integer that no client could increment."""
    if len(digits) > _MOST_DIGITS:
        raise Refused("bad_field", f"an integer has at most {_MOST_DIGITS} digits")
    return int(digits)


def _place(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the segment and the revision of a message, as far as it has them."""
    return {name: values[name] for name in ("seg", "rev") if type(values.get(name)) is int}


MOST = 256
"""Messages in an outbox. Beyond that all but the last are replaced by the full state."""


_STATE = "state"
"""Key of the full state in an outbox."""


class Outbox:
    """Messages that one connection has still to send. Belongs to one event loop."""

    def __init__(self) -> None:
        self._messages: OrderedDict[object, dict[str, Any]] = OrderedDict()
        self._count = 0
        self._some = asyncio.Event()
        self.state: Callable[[], dict[str, Any]] | None = None
        """Gives the full state, sent for messages that were dropped; None: no session yet."""

    def put(self, message: dict[str, Any]) -> None:
        """Append a message; an update replaces an earlier one of its segment."""
        key: object = message["seg"] if message["type"] == "update" else None
        if key is None:
            self._count += 1
            key = (self._count,)
        self._messages.pop(key, None)
        if len(self._messages) >= MOST:
            self._messages.clear()
            if self.state is not None:
                self.put_state()
        self._messages[key] = message
        self._some.set()

    def put_state(self) -> None:
        """Append the full state."""
        self._messages[_STATE] = {}
        self._some.set()

    async def some(self) -> None:
        """Wait for a message."""
        while not self._messages:
            self._some.clear()
            await self._some.wait()

    def next(self) -> dict[str, Any]:
        """Take out the oldest message; there must be one."""
        key, message = self._messages.popitem(last=False)
        # whoever reads nothing costs nothing: the state is that of the moment in which it is sent
        return self.state() if key == _STATE and self.state is not None else message
