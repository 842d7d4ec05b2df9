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

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from draftsmith.data.jsonl import OnBad, as_record, json_objects, numbered, skipping
from draftsmith.errors import InputError, nearest
from draftsmith.live.records import Hypothesis

T = TypeVar("T")
Feed = Callable[[Iterable[str], OnBad | None], Iterator[Hypothesis]]

_COMPLETE, _EXPECTED, _INCOMING = 100, 10, 1
_TEXTFLOW = re.compile(r"(\d{1,15}) +(\d{1,15})(?: +(.*))?")
_GOOGLE_EVENTS = {
    *("speechEventType", "speech_event_type", "totalBilledTime", "total_billed_time"),
    *("requestId", "request_id", "metadata"),
}
_AZURE_EVENTS = {"recognizing": False, "recognized": True}
_NAMES = {str: "a text", bool: "true or false", list: "a list", dict: "an object"}


def open_feed(name: str) -> Feed:
    """Return the feed of this name.

    Raises:
        InputError: the name is unknown.
    """
    if name not in FEEDS:
        raise InputError(f"unknown feed {name!r}{nearest(name, FEEDS)}")
    return FEEDS[name]


def lines(feed: Iterable[str], on_bad: OnBad | None = None) -> Iterator[Hypothesis]:
    """Parse one whole hypothesis per line; an empty line makes the one before it final."""
    segments = _SegmentNumbers()
    for _, line in numbered(feed, on_bad):
        yield from segments.add(line, final=not line.strip())
    yield from segments.close()


def jsonl(feed: Iterable[str], on_bad: OnBad | None = None) -> Iterator[Hypothesis]:
    """Parse `Hypothesis` records, with their numbers: `{"seg": 0, "rev": 2, "text": "This is"}`.

    Raises:
        InputError: a record is invalid, numbers do not ascend, or a final segment goes on.
    """
    last: Hypothesis | None = None
    words = ""
    for where, message in json_objects(feed, on_bad):
        with skipping(on_bad):
            one = as_record(Hypothesis, message, where)
            if last is not None and (one.seg, one.rev) <= (last.seg, last.rev):
                raise InputError(
                    f"{where}: expected numbers above seg {last.seg} rev {last.rev}, "
                    f"got seg {one.seg} rev {one.rev}"
                )
            if last is not None and one.seg != last.seg:
                yield from _ended(last, words)
                words = ""
            elif last is not None and last.final:
                raise InputError(f"{where}: segment {one.seg} was final before, begin another one")
            last = one
            if one.text.strip():
                words = one.text
            if not one.final:
                yield one
            elif words:
                yield replace(one, text=words)
    if last is not None:
        yield from _ended(last, words)


def simulstreaming(feed: Iterable[str], on_bad: OnBad | None = None) -> Iterator[Hypothesis]:
    """Parse SimulStreaming rows, which hold the new text only, with its own leading space.

    A row that only ends the segment may have no text.
    """
    segments = _SegmentNumbers()
    words = ""
    for where, message in json_objects(feed, on_bad):
        with skipping(on_bad):
            final = _flag(message, where, "is_final")
            if "text" in message or not final:
                words += _get(message, where, str, "text")
            at = _time(message, where, "emission_time")
            yield from segments.add(words, final=final, time=at)
            if final:
                words = ""
    yield from segments.close()


def textflow(feed: Iterable[str], on_bad: OnBad | None = None) -> Iterator[Hypothesis]:
    """Parse ELITR online-text-flow events, `BEG END TEXT` with a sentence each.

        100 110 A b.     END - BEG = 10: expected, may still change
        200 201 c d      1: incoming, the last one, still growing
        100 200 A b.     100: complete, comes once

    The hypothesis is everything that is not complete, so that no word waits for the sentence
    before it; a complete sentence ends the segment, and what follows it begins the next one.
    """
    segments = _SegmentNumbers()
    sentences: dict[int, str] = {}
    complete = last = -1
    shown = ""
    for where, line in numbered(feed, on_bad):
        with skipping(on_bad):
            if not line.strip():
                continue
            match = _TEXTFLOW.fullmatch(line.strip())
            begin, end = (int(match[1]), int(match[2])) if match else (0, 0)
            kind = end - begin
            if match is None or kind not in (_COMPLETE, _EXPECTED, _INCOMING):
                raise InputError(
                    f"{where}: expected BEG END TEXT where END is BEG + 100, 10 or 1 "
                    f"(what online-text-flow-events writes), got {line.strip()[:80]!r}"
                )
            if begin <= last:  # another round began: what the last one did not reach is gone
                sentences = {at: text for at, text in sentences.items() if at <= last}
            last = begin
            if begin <= complete:
                continue
            sentences[begin] = (match[3] or "").strip()
            if kind == _COMPLETE:
                yield from segments.add(_joined(sentences, upto=begin), final=True)
                sentences = {at: text for at, text in sentences.items() if at > begin}
                complete, shown = begin, ""
                continue
            if kind == _INCOMING:
                sentences = {at: text for at, text in sentences.items() if at <= begin}
            text = _joined(sentences, upto=max(sentences))
            if text != shown:  # every round repeats the sentences that did not change
                yield from segments.add(text)
            shown = text
    yield from segments.close()


def google(feed: Iterable[str], on_bad: OnBad | None = None) -> Iterator[Hypothesis]:
    """Parse Google Cloud Speech `StreamingRecognizeResponse` JSON, with names of either style.

    Within a message a final result comes first; the others, stable before unstable, are one
    hypothesis together.
    """
    segments = _SegmentNumbers()
    for where, message in json_objects(feed, on_bad):
        with skipping(on_bad):
            if "results" not in message and _GOOGLE_EVENTS & message.keys():
                continue
            interim: list[str] = []
            for i in range(len(_get(message, where, list, "results"))):
                result = _get(message, where, dict, "results", i)
                if not result.get("alternatives"):
                    continue
                text = _get(message, where, str, "results", i, "alternatives", 0, "transcript")
                if _flag(result, where, "is_final", "isFinal"):
                    yield from segments.add(text, final=True)
                else:
                    interim.append(text)
            if interim:
                yield from segments.add("".join(interim))
    yield from segments.close()


def aws(feed: Iterable[str], on_bad: OnBad | None = None) -> Iterator[Hypothesis]:
    """Parse Amazon Transcribe `TranscriptEvent`s, with or without that name around them."""
    segments = _SegmentNumbers()
    current: str | None = None
    closed: set[str] = set()
    for where, message in json_objects(feed, on_bad):
        with skipping(on_bad):
            event = message.get("TranscriptEvent", message)
            for i in range(len(_get(event, where, list, "Transcript", "Results"))):
                at = ("Transcript", "Results", i)
                partial = _get(event, where, bool, *at, "IsPartial")
                text = _get(event, where, str, *at, "Alternatives", 0, "Transcript")
                name = _get(event, where, str, *at, "ResultId")
                if name in closed:
                    raise InputError(
                        f"{where}: result {name!r} comes back after another one; "
                        "feed one channel at a time"
                    )
                if current not in (None, name):
                    yield from segments.close()
                    closed.add(str(current))
                current = name if partial else None
                if not partial:
                    closed.add(name)
                yield from segments.add(text, final=not partial)
    yield from segments.close()


def deepgram(feed: Iterable[str], on_bad: OnBad | None = None) -> Iterator[Hypothesis]:
    """Parse Deepgram live results. A segment is an utterance: it ends with `speech_final` or an
    `UtteranceEnd` message, so switch one of them on; pieces with `is_final` stay until then."""
    segments = _SegmentNumbers()
    kept: list[str] = []
    for where, message in json_objects(feed, on_bad):
        with skipping(on_bad):
            kind = message.get("type", "Results")
            if kind == "UtteranceEnd":
                yield from segments.add(" ".join(kept), final=True)
                kept = []
            if kind != "Results":
                continue
            text = _get(message, where, str, "channel", "alternatives", 0, "transcript").strip()
            pieces = [*kept, text] if text else kept
            final = _flag(message, where, "speech_final")
            yield from segments.add(" ".join(pieces), final=final)
            if final:
                kept = []
            elif _flag(message, where, "is_final"):
                kept = pieces
    yield from segments.close()


def azure(feed: Iterable[str], on_bad: OnBad | None = None) -> Iterator[Hypothesis]:
    """Parse Azure Speech results: `event.result.json` in the handlers of `recognizing` and
    `recognized`, or lines `{"event": "recognizing", "text": "to be"}`."""
    segments = _SegmentNumbers()
    for where, message in json_objects(feed, on_bad):
        with skipping(on_bad):
            if "event" in message:
                name = _get(message, where, str, "event")
                if name not in _AZURE_EVENTS:
                    raise InputError(
                        f"{where}: unknown event {name!r}{nearest(name, _AZURE_EVENTS)}"
                    )
                text, final = _get(message, where, str, "text"), _AZURE_EVENTS[name]
            elif "RecognitionStatus" not in message:
                text, final = _get(message, where, str, "Text"), False
            elif message["RecognitionStatus"] != "Success":
                # silence, or speech that was not recognised
                text, final = "", True
            elif "DisplayText" in message:
                text, final = _get(message, where, str, "DisplayText"), True
            else:
                text, final = _get(message, where, str, "NBest", 0, "Display"), True
            yield from segments.add(text, final=final)
    yield from segments.close()


FEEDS: dict[str, Feed] = {
    feed.__name__: feed
    for feed in (lines, jsonl, simulstreaming, textflow, google, aws, deepgram, azure)
}


# --------------------------------------------------------------------------- inside


class _SegmentNumbers:
    """Numbers hypotheses, and keeps the last words of the open segment."""

    def __init__(self) -> None:
        self.seg = 0
        self.rev = 0
        self.words = ""

    def add(self, text: str, *, final: bool = False, time: float | None = None) -> list[Hypothesis]:
        """Return the numbered hypothesis, or none."""
        text = text.strip()
        if final:
            text = text or self.words
            if not text:
                return []
        one = Hypothesis(seg=self.seg, rev=self.rev, text=text, final=final, time=time)
        if final:
            self.seg, self.rev, self.words = self.seg + 1, 0, ""
        else:
            self.rev, self.words = self.rev + 1, text or self.words
        return [one]

    def close(self) -> list[Hypothesis]:
        return self.add("", final=True)


def _ended(last: Hypothesis, words: str) -> list[Hypothesis]:
    """Return the final hypothesis for a segment that got none."""
    if last.final or not words:
        return []
    return [replace(last, rev=last.rev + 1, text=words, final=True, time=None)]


def _joined(sentences: dict[int, str], *, upto: int) -> str:
    return " ".join(text for at, text in sorted(sentences.items()) if at <= upto and text)


def _get(message: Any, where: str, kind: type[T], *path: str | int) -> T:
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
        raise InputError(
            f"{where}: expected {_NAMES[kind]} at {'.'.join(map(str, path))}, "
            f"got {json.dumps(message, ensure_ascii=False)[:80]}"
        )
    return value


def _time(message: dict[str, Any], where: str, name: str) -> float | None:
    """Return the seconds from the beginning; None: the message has none."""
    time: Any = message.get(name)
    if time is None:
        return None
    if type(time) not in (int, float) or time < 0:
        raise InputError(f"{where}: expected 0 or more seconds at {name}, got {time!r}")
    return float(time)


def _flag(message: dict[str, Any], where: str, *names: str) -> bool:
    """Return the value of the first name that is present; False if none is."""
    for name in names:
        if name in message:
            return _get(message, where, bool, name)
    return False
