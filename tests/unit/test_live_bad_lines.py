"""A line that cannot be read is named by its number; the segment that is open goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import InputError
from draftsmith.live.feeds import FEEDS, open_feed
from draftsmith.live.records import Hypothesis, read_lines


def heard(name: str, feed: Sequence[str]) -> list[Hypothesis]:
    return list(open_feed(name)(feed))


def as_lines(*messages: Any) -> list[str]:
    return [json.dumps(message) + "\n" for message in messages]


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
    "{\n": "line 2 is not JSON",
    "[" * 100_000 + "\n": "line 2 is not JSON",
    '{"n": ' + 5000 * "1" + "}\n": "line 2: expected a number below",
    '{"n": NaN}\n': "line 2: expected a finite number",
    '{"n": -1e999}\n': "line 2: expected a finite number",
    '{"nobody": "knows", "type": "Results", "event": [], "Text": 3}\n': "line 2",
    "[1, 2]\n": "line 2: expected a JSON object",
    '{"text": "\\ud800"}\n': "line 2: expected whole characters",
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
        made = open_feed(name)([feed[0], bad, *feed[1:]], told.append)
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


@pytest.mark.parametrize("values", [{"time": math.nan}, {"time": math.inf}, {"seg": 2**53}])
def test_a_hypothesis_has_numbers_that_every_reader_can_read(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be 0 or more"):
        Hypothesis(**{"seg": 0, "rev": 0, "text": "to", **values})


def test_a_textflow_place_of_many_digits_is_refused() -> None:
    with pytest.raises(InputError, match="line 1: expected BEG END TEXT"):
        heard("textflow", ["1" * 5000 + " 7 to"])


def test_a_file_that_is_not_utf_8_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "stream.jsonl"
    path.write_bytes(b'{"seg": 0, "rev": 0, "text": "to"}\n{"seg": 0, "rev": 1, "text": "\xff"}\n')
    with pytest.raises(InputError, match=r"stream\.jsonl, line 2 is not UTF-8"):
        list(read_lines(path, Hypothesis))
