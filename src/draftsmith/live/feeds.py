"""Parsers of the messages that speech recognisers send, line by line -> `Hypothesis`.

    google    {"results": [{"alternatives": [{"transcript": "to be"}], "stability": 0.9},
                           {"alternatives": [{"transcript": " or not"}], "stability": 0.01}]}
    becomes   Hypothesis(seg=0, rev=2, text="to be or not")

Rules of all feeds: segments and revisions are numbered here (`jsonl` has its own numbers); white
space around a text is removed; an empty final text repeats the last words of its segment, and is
dropped where there were none; a segment that is open when the input ends becomes final. Each line
is parsed as soon as it is read. A feed is one speaker on one channel. An invalid line is an error;
with `on_bad` it is passed to that function and left out.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from draftsmith.config import check_text, from_dict
from draftsmith.data.jsonl import parse_object
from draftsmith.errors import InputError, nearest
from draftsmith.live.records import Hypothesis, check_order

T = TypeVar("T")
OnBad = Callable[[InputError], None]
"""Called with the error of an invalid line; without it, the error is raised."""

_COMPLETE, _EXPECTED, _INCOMING = 100, 10, 1
_TEXTFLOW = re.compile(r"(\d{1,15}) +(\d{1,15})(?: +(.*))?")
_GOOGLE_EVENTS = {
    *("speechEventType", "speech_event_type", "totalBilledTime", "total_billed_time"),
    *("requestId", "request_id", "metadata"),
}
_AZURE_EVENTS = {"recognizing": False, "recognized": True}
_NAMES = {str: "a text", bool: "true or false", list: "a list", dict: "an object"}


class Feed(abc.ABC):
    """Reads one input: `parse` of each kind reads a message, and `add` numbers what it holds."""

    plain = False
    """A message is a line of text; else it is a JSON object, and empty lines are skipped."""

    def __init__(self) -> None:
        self.seg = self.rev = 0
        self.words = ""
        """The last words of the open segment."""

    def read(self, lines: Iterable[str], on_bad: OnBad | None = None) -> Iterator[Hypothesis]:
        """Yield the hypotheses of these lines.

        Raises:
            InputError: a line (named by its number) is invalid, and there is no `on_bad`.
        """
        for number, line in enumerate(lines, 1):
            where = f"line {number}"
            try:
                check_text(line, where)
                if self.plain or line.strip():
                    yield from self.parse(line if self.plain else parse_object(line, where))
            except InputError as error:
                named = error if where in str(error) else InputError(f"{where}: {error}")
                if on_bad is None:
                    raise named from None
                on_bad(named)
        yield from self.close()

    @abc.abstractmethod
    def parse(self, message: Any) -> Iterator[Hypothesis]:
        """Yield the hypotheses of one message."""

    def add(
        self, text: str, *, final: bool = False, time: float | None = None
    ) -> Iterator[Hypothesis]:
        """Yield the numbered hypothesis, or none."""
        text = text.strip() or (self.words if final else "")
        if final and not text:
            return
        one = Hypothesis(seg=self.seg, rev=self.rev, text=text, final=final, time=time)
        if final:
            self.seg, self.rev, self.words = self.seg + 1, 0, ""
        else:
            self.rev, self.words = self.rev + 1, text or self.words
        yield one

    def close(self) -> Iterator[Hypothesis]:
        """End the open segment."""
        return self.add("", final=True)


class Lines(Feed):
    """One whole hypothesis per line; an empty line makes the one before it final."""

    plain = True

    def parse(self, message: str) -> Iterator[Hypothesis]:
        return self.add(message, final=not message.strip())


class Jsonl(Feed):
    """`Hypothesis` records, with their own numbers: `{"seg": 0, "rev": 2, "text": "This is"}`."""

    last: Hypothesis | None = None

    def parse(self, message: dict[str, Any]) -> Iterator[Hypothesis]:
        one = from_dict(Hypothesis, message)
        if self.last is not None:
            check_order(self.last, one)
            if one.seg != self.last.seg:
                yield from self.close()
        self.last = one
        self.words = one.text if one.text.strip() else self.words
        if not one.final:
            yield one
        elif self.words:
            yield replace(one, text=self.words)

    def close(self) -> Iterator[Hypothesis]:
        last, words = self.last, self.words
        self.words = ""
        if last is not None and not last.final and words:
            yield replace(last, rev=last.rev + 1, text=words, final=True, time=None)


class SimulStreaming(Feed):
    """SimulStreaming rows, which hold the new text only, with its own leading space.

    A row that only ends the segment may have no text.
    """

    heard = ""

    def parse(self, message: dict[str, Any]) -> Iterator[Hypothesis]:
        final, time = _flag(message, "is_final"), message.get("emission_time")
        if "text" in message or not final:
            self.heard += _get(message, str, "text")
        if time is not None and type(time) not in (int, float):
            raise InputError(f"expected seconds at emission_time, got {time!r}")
        yield from self.add(self.heard, final=final, time=time)
        if final:
            self.heard = ""


class TextFlow(Feed):
    """ELITR online-text-flow events, `BEG END TEXT` with a sentence each.

        100 110 A b.     END - BEG = 10: expected, may still change
        200 201 c d      1: incoming, the last one, still growing
        100 200 A b.     100: complete, comes once

    The hypothesis is everything that is not complete, so that no word waits for the sentence
    before it; a complete sentence ends the segment, and what follows it begins the next one.
    """

    plain = True

    def __init__(self) -> None:
        super().__init__()
        self.sentences: dict[int, str] = {}
        self.complete = self.last = -1
        self.shown = ""

    def parse(self, message: str) -> Iterator[Hypothesis]:
        if not message.strip():
            return
        match = _TEXTFLOW.fullmatch(message.strip())
        begin, end = (int(match[1]), int(match[2])) if match else (0, 0)
        kind = end - begin
        if match is None or kind not in (_COMPLETE, _EXPECTED, _INCOMING):
            raise InputError(
                "expected BEG END TEXT where END is BEG + 100, 10 or 1 (what "
                f"online-text-flow-events writes), got {message.strip()[:80]!r}"
            )
        sentences = self.sentences
        if begin <= self.last:  # another round began: what the last one did not reach is gone
            sentences = {at: text for at, text in sentences.items() if at <= self.last}
        self.last = begin
        if begin > self.complete:
            sentences[begin] = (match[3] or "").strip()
            if kind == _INCOMING:
                sentences = {at: text for at, text in sentences.items() if at <= begin}
            upto = begin if kind == _COMPLETE else max(sentences)
            text = " ".join(text for at, text in sorted(sentences.items()) if at <= upto and text)
            if kind == _COMPLETE or text != self.shown:  # a round repeats what did not change
                yield from self.add(text, final=kind == _COMPLETE)
            self.shown = text
            if kind == _COMPLETE:
                sentences = {at: text for at, text in sentences.items() if at > begin}
                self.complete, self.shown = begin, ""
        self.sentences = sentences


class Google(Feed):
    """Google Cloud Speech `StreamingRecognizeResponse` JSON, with names of either style.

    Within a message a final result comes first; the others, stable before unstable, are one
    hypothesis together.
    """

    def parse(self, message: dict[str, Any]) -> Iterator[Hypothesis]:
        if "results" not in message and _GOOGLE_EVENTS & message.keys():
            return
        interim: list[str] = []
        for i in range(len(_get(message, list, "results"))):
            result = _get(message, dict, "results", i)
            if not result.get("alternatives"):
                continue
            text = _get(message, str, "results", i, "alternatives", 0, "transcript")
            if _flag(result, "is_final", "isFinal"):
                yield from self.add(text, final=True)
            else:
                interim.append(text)
        if interim:
            yield from self.add("".join(interim))


class Aws(Feed):
    """Amazon Transcribe `TranscriptEvent`s, with or without that name around them."""

    def __init__(self) -> None:
        super().__init__()
        self.current: str | None = None
        self.closed: set[str] = set()

    def parse(self, message: dict[str, Any]) -> Iterator[Hypothesis]:
        event = message.get("TranscriptEvent", message)
        for i in range(len(_get(event, list, "Transcript", "Results"))):
            at = ("Transcript", "Results", i)
            partial = _get(event, bool, *at, "IsPartial")
            text = _get(event, str, *at, "Alternatives", 0, "Transcript")
            name = _get(event, str, *at, "ResultId")
            if name in self.closed:
                raise InputError(
                    f"result {name!r} comes back after another one; feed one channel at a time"
                )
            if self.current not in (None, name):
                yield from self.close()
                self.closed.add(str(self.current))
            self.current = name if partial else None
            if not partial:
                self.closed.add(name)
            yield from self.add(text, final=not partial)


class Deepgram(Feed):
    """Deepgram live results. A segment is an utterance: it ends with `speech_final` or an
    `UtteranceEnd` message, so switch one of them on; pieces with `is_final` stay until then."""

    kept: tuple[str, ...] = ()

    def parse(self, message: dict[str, Any]) -> Iterator[Hypothesis]:
        kind = message.get("type", "Results")
        if kind == "UtteranceEnd":
            yield from self.add(" ".join(self.kept), final=True)
            self.kept = ()
        if kind != "Results":
            return
        text = _get(message, str, "channel", "alternatives", 0, "transcript").strip()
        pieces = (*self.kept, text) if text else self.kept
        final = _flag(message, "speech_final")
        yield from self.add(" ".join(pieces), final=final)
        if final:
            self.kept = ()
        elif _flag(message, "is_final"):
            self.kept = pieces


class Azure(Feed):
    """Azure Speech results: `event.result.json` in the handlers of `recognizing` and
    `recognized`, or lines `{"event": "recognizing", "text": "to be"}`."""

    def parse(self, message: dict[str, Any]) -> Iterator[Hypothesis]:
        status = message.get("RecognitionStatus")
        if "event" in message:
            name = _get(message, str, "event")
            if name not in _AZURE_EVENTS:
                raise InputError(f"unknown event {name!r}{nearest(name, _AZURE_EVENTS)}")
            yield from self.add(_get(message, str, "text"), final=_AZURE_EVENTS[name])
        elif "RecognitionStatus" not in message:
            yield from self.add(_get(message, str, "Text"))
        elif status != "Success":  # silence, or speech that was not recognised
            yield from self.close()
        else:
            path = ("DisplayText",) if "DisplayText" in message else ("NBest", 0, "Display")
            yield from self.add(_get(message, str, *path), final=True)


FEEDS: dict[str, type[Feed]] = {
    kind.__name__.lower(): kind
    for kind in (Lines, Jsonl, SimulStreaming, TextFlow, Google, Aws, Deepgram, Azure)
}


def open_feed(name: str) -> Feed:
    """Return a new feed of this name.

    Raises:
        InputError: the name is unknown.
    """
    if name not in FEEDS:
        raise InputError(f"unknown feed {name!r}{nearest(name, FEEDS)}")
    return FEEDS[name]()


def _get(message: Any, kind: type[T], *path: str | int) -> T:
    """Return the value at `path` in a message.

    Raises:
        InputError: there is none, or it has another type.
    """
    value = message
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            value = None
    if not isinstance(value, kind):
        found = json.dumps(message, ensure_ascii=False)[:80]
        raise InputError(f"expected {_NAMES[kind]} at {'.'.join(map(str, path))}, got {found}")
    return value


def _flag(message: dict[str, Any], *names: str) -> bool:
    """Return the value of the first name that is present; False if none is."""
    return next((_get(message, bool, name) for name in names if name in message), False)
