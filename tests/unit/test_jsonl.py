"""JSON Lines end at line feeds alone: U+2028, U+0085 and the like are text inside a string."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.measurements import a_record

from draftsmith.bench import records
from draftsmith.bench.records import RunRecord
from draftsmith.commands.live import score
from draftsmith.core.config import parse_tree
from draftsmith.core.generation import Piece
from draftsmith.data import text as _text
from draftsmith.data.jsonl import read_records
from draftsmith.data.suites import load_prompts
from draftsmith.distill.model_sizes import read_config
from draftsmith.distill.trajectories.shards import read_sealed
from draftsmith.drafters.config import drafter_manifest
from draftsmith.drafters.hidden import checkpoint
from draftsmith.errors import DraftsmithError, InputError
from draftsmith.live.records import Hypothesis
from draftsmith.plan.fit import read_law
from draftsmith.plan.ladder import read_predictions
from draftsmith.provenance import append_jsonl, parse_json

ODD = "a\u2028b\u0085c\u2029d\x1ce\x0bf\rg\nh"


def written(text: str) -> RunRecord:
    return a_record(prompt_tail=text, pieces=(Piece(text=text, drafted=True),))


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b", ODD])
def test_records_with_odd_line_ends_come_back_as_they_were_written(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "records.jsonl"
    append_jsonl(path, written(text), written("plain"))
    assert text[1] in path.read_text(encoding="utf-8"), "written as it is, not as an escape"
    assert records.read(path) == (written(text), written("plain"))


def test_lines_of_records_are_counted_by_line_feeds(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"")
    assert records.read(path) == ()
    append_jsonl(path, written(ODD))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert records.read(path) == (written(ODD),)
    path.write_bytes(path.read_bytes() + b"{oops\n")
    with pytest.raises(InputError, match=r"records\.jsonl, line 2: not JSON"):
        records.read(path)


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b", ODD])
def test_training_text_with_odd_line_ends_is_one_document(tmp_path: Path, text: str) -> None:
    path = tmp_path / "text.jsonl"
    append_jsonl(path, {"text": text}, {"text": "plain"})
    assert list(_text.documents(_text.find_files([str(path)]))) == [text, "plain"]
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n{oops")
    with pytest.raises(InputError, match=r"text\.jsonl, line 4"):
        list(_text.documents(_text.find_files([str(path)])))


# --------------------------------------------------------------------------- what JSON can hide

READERS: dict[str, Callable[[Path], Any]] = {
    "text.jsonl": lambda path: list(_text.documents(_text.find_files([str(path)]))),
    "examples.jsonl": lambda path: list(_text.examples(_text.find_files([str(path)]))),
    "prompts.jsonl": load_prompts,
    "prompts.json": load_prompts,
    "records.jsonl": records.read,
    "stream.jsonl": lambda path: list(read_records(path, Hypothesis)),
    "tree.json": lambda path: parse_tree(str(path)),
    "law.json": read_law,
    "ladder.json": read_predictions,
    "drafter.json": lambda path: drafter_manifest(path.parent),
    "config.json": lambda path: read_config(path.parent),
    "network/config.json": lambda path: checkpoint.read_config(path.parent),
    "manifest.json": lambda path: read_sealed(path, "collect again"),
    "de/table.json": lambda path: score.join(path.parents[1]),
}
HIDDEN = {
    "brackets without end": "[" * 100_000,
    "brackets that close": "[" * 100_000 + "]" * 100_000,
    "as deep as the parser goes": "[" * 900 + "]" * 900,
    "objects": '{"text":' * 500 + "1" + "}" * 500,
    "half a character": json.dumps(
        {"text": "a \ud83d b", "prompt": "\ud83d", "completion": "\udc00"}
    ),
    "thousands of digits": '{"text": "x", "id": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_json_can_hide_is_refused_by_the_name_of_the_file(
    name: str, hidden: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(HIDDEN[hidden])
    with pytest.raises(DraftsmithError) as caught:
        READERS[name](path)
    message = str(caught.value)
    assert path.name in message
    assert len(message) < 400 and "\n" not in message
    assert "set_int_max_str_digits" not in message, "advice for programmers"


def test_json_that_hides_nothing_is_read() -> None:
    deep = "[" * 100 + "]" * 100
    assert json.dumps(parse_json(deep, "x")) == deep
    assert parse_json('{"a": "' + "[" * 1000 + '"}', "x") == {"a": "[" * 1000}
    assert parse_json('"\\ud83d\\ude00"', "x") == "\U0001f600"
    assert parse_json('"\\\\ud83d"', "x") == "\\ud83d"
    with pytest.raises(InputError, match=r"x: not JSON .*line 3, column 1"):
        parse_json('{"a":\n1,\n', "x")
