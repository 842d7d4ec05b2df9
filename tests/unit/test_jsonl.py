"""JSON Lines end at line feeds alone: U+2028, U+0085 and the like are text inside a string."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.bench import records
from draftsmith.bench.records import RunRecord
from draftsmith.core.generation import Piece
from draftsmith.data import text as _text
from draftsmith.errors import InputError
from draftsmith.provenance import append_jsonl

ODD = "a\u2028b\u0085c\u2029d\x1ce\x0bf\rg\nh"


def a_record(text: str) -> RunRecord:
    return RunRecord(
        prompt="p",
        drafter="none",
        temperature=0.0,
        repeat=0,
        seed=0,
        place=0,
        group=0,
        prompt_tokens=1,
        tokens=1,
        decode_tokens=0,
        finish_reason="length",
        seconds=1.0,
        prefill_seconds=1.0,
        decode_seconds=0.0,
        digest="ab" * 8,
        prompt_tail=text,
        pieces=(Piece(text=text, drafted=True),),
    )


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b", ODD])
def test_records_with_odd_line_ends_come_back_as_they_were_written(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "records.jsonl"
    append_jsonl(path, a_record(text), a_record("plain"))
    assert text[1] in path.read_text(encoding="utf-8"), "written as it is, not as an escape"
    assert records.read(path) == (a_record(text), a_record("plain"))


def test_lines_of_records_are_counted_by_line_feeds(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"")
    assert records.read(path) == ()
    append_jsonl(path, a_record(ODD))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert records.read(path) == (a_record(ODD),)
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
