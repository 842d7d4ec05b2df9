"""Recordings of every feed: messages of the services, and writers that say the same in all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from draftsmith.live.feeds import open_feed

Said = list[tuple[int, int, str, bool]]
Segment = list[str]
"""What was heard of a segment, one text after the other; the last one is final."""


def heard(name: str, feed: Sequence[str]) -> Said:
    return [(one.seg, one.rev, one.text, one.final) for one in open_feed(name).read(feed)]


def as_lines(*messages: Any) -> list[str]:
    return [json.dumps(message) + "\n" for message in messages]


def result(*texts: str, **more: Any) -> dict[str, Any]:
    return {"alternatives": [{"transcript": text} for text in texts], **more}


def transcript(text: str, name: str, partial: bool) -> dict[str, Any]:
    alternatives = [{"Transcript": text, "Items": []}, {"Transcript": "something else"}]
    return {
        "Transcript": {
            "Results": [{"Alternatives": alternatives, "IsPartial": partial, "ResultId": name}]
        }
    }


def piece(text: str, is_final: bool, speech_final: bool) -> dict[str, Any]:
    return {
        "type": "Results",
        "channel_index": [0, 1],
        "is_final": is_final,
        "speech_final": speech_final,
        "channel": {"alternatives": [{"transcript": text, "confidence": 0.9, "words": []}]},
    }


def write_lines(segments: list[Segment]) -> Iterator[str]:
    for texts in segments:
        yield from texts[:-1]
        yield ""


def write_jsonl(segments: list[Segment]) -> Iterator[str]:
    for seg, texts in enumerate(segments):
        for rev, text in enumerate(texts):
            final = rev == len(texts) - 1
            yield json.dumps({"seg": seg, "rev": rev, "text": text, "final": final})


def write_simulstreaming(segments: list[Segment]) -> Iterator[str]:
    for texts in segments:
        for before, text in zip(["", *texts], texts[:-1], strict=False):
            yield json.dumps({"text": text.removeprefix(before), "is_final": False})
        yield json.dumps({"is_final": True})


def write_textflow(segments: list[Segment]) -> Iterator[str]:
    for number, texts in enumerate(segments, 1):
        for text in texts[:-1]:
            yield f"{number}00 {number}01 {text}"
        yield f"{number}00 {number + 1}00 {texts[-1]}"


def write_google(segments: list[Segment]) -> Iterator[str]:
    for texts in segments:
        for text in texts[:-1]:
            stable, space, rest = text.partition(" ")
            parts = [stable, space + rest] if space else [stable]
            yield json.dumps({"results": [result(part) for part in parts]})
        yield json.dumps({"results": [result(" " + texts[-1], isFinal=True)]})


def write_aws(segments: list[Segment]) -> Iterator[str]:
    for number, texts in enumerate(segments):
        for text in texts[:-1]:
            yield json.dumps(transcript(text, f"id{number}", True))
        yield json.dumps(transcript(texts[-1], f"id{number}", False))


def write_deepgram(segments: list[Segment]) -> Iterator[str]:
    for texts in segments:
        yield from (json.dumps(piece(text, False, False)) for text in texts[:-1])
        yield json.dumps(piece(texts[-1], True, True))


def write_azure(segments: list[Segment]) -> Iterator[str]:
    for texts in segments:
        yield from (json.dumps({"Text": text}) for text in texts[:-1])
        yield json.dumps({"RecognitionStatus": "Success", "DisplayText": texts[-1]})


Writer = Callable[[list[Segment]], Iterator[str]]
WRITERS: dict[str, Writer] = {
    "lines": write_lines,
    "jsonl": write_jsonl,
    "simulstreaming": write_simulstreaming,
    "textflow": write_textflow,
    "google": write_google,
    "aws": write_aws,
    "deepgram": write_deepgram,
    "azure": write_azure,
}
