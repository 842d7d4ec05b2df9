"""A line that cannot be read is named by its number; the segment that is open goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.feed_cases import WRITERS, as_lines

from draftsmith.commands.live.replay import read_stream
from draftsmith.data.jsonl import read_records
from draftsmith.errors import InputError
from draftsmith.live.feeds import FEEDS, open_feed
from draftsmith.live.records import Hypothesis, UpdateRecord


def heard(name: str, feed: Sequence[str]) -> list[Hypothesis]:
    return list(open_feed(name).read(feed))


OF_EACH = {
    "lines": ["to be", "to be or", "", "not"],
    "jsonl": as_lines(*({"seg": 0, "rev": rev, "text": "to be"[: rev + 3]} for rev in range(3))),
    "simulstreaming": as_lines({"text": "to"}, {"text": " be"}, {"text": " or", "is_final": True}),
    "textflow": ["100 101 to", "100 101 to be", "100 200 to be or"],
    "google": as_lines(
        *(
            {"results": [{"alternatives": [{"transcript": text}], "isFinal": final}]}
            for text, final in (("to", False), ("to be", False), ("to be or", True))
        )
    ),
    "aws": as_lines(
        *(
            {"Transcript": {"Results": [
                {"ResultId": "a", "IsPartial": part, "Alternatives": [{"Transcript": text}]}
            ]}}
            for part, text in ((True, "to"), (True, "to be"), (False, "to be or"))
        )
    ),
    "deepgram": as_lines(
        *(
            {"channel": {"alternatives": [{"transcript": text}]}, "speech_final": final}
            for text, final in (("to", False), ("to be", True), ("or", True))
        )
    ),
    "azure": as_lines({"Text": "to"}, {"event": "recognizing", "text": "to be"}, {"Text": "or"}),
}  # fmt: skip
BAD = {
    "to \udcff be\n": "line 2 is not UTF-8",
    "to \0 be\n": "line 2 holds a NUL",
    "{\n": "line 2: not JSON",
    "[" * 100_000 + "\n": "line 2: not JSON",
    '{"n": ' + 5000 * "1" + "}\n": "line 2: expected a number below",
    '{"n": NaN}\n': "line 2: expected a finite number",
    '{"n": -1e999}\n': "line 2: expected a finite number",
    '{"nobody": "knows", "type": "Results", "event": [], "Text": 3}\n': "line 2",
    "[1, 2]\n": "line 2: expected a JSON object",
    '{"text": "\\ud800"}\n': "line 2: a text in it is not UTF-8",
}


@pytest.mark.parametrize("name", list(FEEDS))
def test_a_bad_line_is_told_by_number_and_the_segment_goes_on(name: str) -> None:
    feed = OF_EACH[name]
    expected = heard(name, feed)
    assert len(expected) > 2
    for bad, words in BAD.items():
        if name == "lines" and "\udcff" not in bad and "\0" not in bad:
            continue  # any text is a hypothesis
        told: list[InputError] = []
        made = open_feed(name).read([feed[0], bad, *feed[1:]], told.append)
        assert list(made) == expected
        (error,) = told
        assert ("line 2" if name == "textflow" else words) in str(error)
        with pytest.raises(InputError, match="line 2"):
            heard(name, [feed[0], bad])


@pytest.mark.parametrize("time", [-3, -0.5, "1", True, [], 10**400])
def test_a_time_that_is_none_is_refused(time: Any) -> None:
    with pytest.raises(InputError, match="line 1"):
        heard("jsonl", as_lines({"seg": 0, "rev": 0, "text": "to", "time": time}))
    with pytest.raises(InputError, match=r"line 1.*(time|2\^53)"):
        heard("simulstreaming", as_lines({"text": "to", "emission_time": time}))


@pytest.mark.parametrize(
    "values", [{"time": math.nan}, {"time": math.inf}, {"time": 1e306}, {"seg": 2**53}]
)
def test_a_hypothesis_has_numbers_that_every_reader_can_read(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="0 or more"):
        Hypothesis(**{"seg": 0, "rev": 0, "text": "to", **values})


def test_a_textflow_place_of_many_digits_is_refused() -> None:
    with pytest.raises(InputError, match="line 1"):
        heard("textflow", ["1" * 5000 + " 7 to"])


def test_a_file_that_is_not_utf_8_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "stream.jsonl"
    path.write_bytes(b'{"seg": 0, "rev": 0, "text": "to"}\n{"seg": 0, "rev": 1, "text": "\xff"}\n')
    with pytest.raises(InputError, match=r"stream\.jsonl, line 2"):
        list(read_records(path, Hypothesis))


def test_a_stream_that_is_broken_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "stream.jsonl"
    second = {"seg": 0, "rev": 0, "text": "to be"}
    for line in ("{", json.dumps({**second, "rev": -1}), json.dumps(second)):
        path.write_text(f'{{"seg": 0, "rev": 0, "text": "to"}}\n{line}\n')
        with pytest.raises(InputError) as caught:
            read_stream(path, None)
        assert str(caught.value).count(str(path)) == 1


@pytest.mark.parametrize("key", ["output", "stable", "erased"])
def test_what_is_known_while_decoding_only_is_no_key_of_a_file(tmp_path: Path, key: str) -> None:
    path = tmp_path / "records.jsonl"
    update = {"seg": 0, "rev": 0, "source": "a", "shown": "b", "full": "b", "final": True}
    update |= {"tokens": 1, "drafted": 0, "accepted": 0}
    path.write_text(as_lines(update)[0])
    assert [one.shown for one in read_records(path, UpdateRecord)] == ["b"]
    path.write_text("".join(as_lines(update, {**update, key: 0})))
    with pytest.raises(InputError, match=rf"records\.jsonl, line 2: .*{key}"):
        list(read_records(path, UpdateRecord))


# --------------------------------------------------------------------------- of each feed


JSON_FEEDS = sorted(WRITERS.keys() - {"lines", "textflow"})


@pytest.mark.parametrize("name", JSON_FEEDS)
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("to be", ": not JSON"),
        ("[1]", "expected a JSON object"),
        ('{"text": "\\ud83d"}', "lone surrogate"),
    ],
)
def test_a_line_that_is_no_message_is_refused_by_its_number(
    name: str, line: str, words: str
) -> None:
    feed = [*WRITERS[name]([["a", "a"]]), "", line]
    with pytest.raises(InputError, match=rf"line {len(feed)}\b.*{words}"):
        heard(name, feed)


@pytest.mark.parametrize(
    ("name", "message", "words"),
    [
        ("jsonl", {"seg": 0, "rev": 0, "txt": "a"}, "unknown option 'txt'.*did you mean 'text'"),
        ("jsonl", {"seg": 0, "rev": 0}, "line 1: option 'text' of Hypothesis is missing"),
        ("jsonl", {"seg": -1, "rev": 0, "text": ""}, "seg must be 0 or more"),
        ("simulstreaming", {"start": 0.0}, "line 1: expected a text at text, got"),
        ("simulstreaming", {"text": "a", "is_final": "no"}, "expected true or false at is_final"),
        ("google", {"result": []}, "expected a list at results"),
        ("google", {"results": ["a"]}, "expected an object at results.0"),
        (
            "google",
            {"results": [{"alternatives": [{}]}]},
            "expected a text at results.0.alternatives.0.transcript",
        ),
        ("aws", {"Results": []}, "expected a list at Transcript.Results"),
        (
            "aws",
            {"Transcript": {"Results": [{"ResultId": "a"}]}},
            "expected true or false at Transcript.Results.0.IsPartial",
        ),
        ("deepgram", {"channel": {}}, "expected a text at channel.alternatives.0.transcript"),
        ("azure", {"Offset": 1}, "expected a text at Text"),
        ("azure", {"event": "recognised", "text": "a"}, "did you mean 'recognized'"),
        ("azure", {"RecognitionStatus": "Success"}, "expected a text at NBest.0.Display"),
    ],
)
def test_a_message_of_another_form_is_refused(name: str, message: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        heard(name, as_lines(message))


@pytest.mark.parametrize("line", ["100 there", "there have been", "0 17550 there", "100 101x a"])
def test_a_textflow_line_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(InputError, match="line 2"):
        heard("textflow", ["100 101 a", line])


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"seg": 1, "rev": 3}, "line 2: segment 1 revision 3 cannot follow segment 1 revision 3"),
        ({"seg": 0, "rev": 9}, "line 2: segment 0 revision 9 cannot follow segment 1 revision 3"),
        ({"seg": 1, "rev": 4}, "line 2: segment 1 revision 4 cannot follow .*final"),
    ],
)
def test_jsonl_numbers_that_do_not_ascend_are_refused(second: dict[str, int], words: str) -> None:
    first = {"seg": 1, "rev": 3, "text": "a", "final": True}
    with pytest.raises(InputError, match=words):
        heard("jsonl", as_lines(first, {**second, "text": "b"}))
