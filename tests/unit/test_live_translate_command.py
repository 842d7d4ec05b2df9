"""`draftsmith live translate` on a stream that is not as it should be: it goes on, and says so."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.live_cases import WORDS
from tests.tiny_models import save_pair

from draftsmith import cli
from draftsmith.data.jsonl import read_records
from draftsmith.live.records import UpdateRecord
from draftsmith.live.translator import LiveTranslator

CONTEXT = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("live")
    save_pair(made, context=CONTEXT)
    config = made / "target" / "generation_config.json"
    values = json.loads(config.read_text())
    values["eos_token_id"] = list(range(0, 300, 5))  # so that its texts end
    config.write_text(json.dumps(values))
    return made


class Translated:
    """What one run said."""

    def __init__(self, code: int, out: str, err: str, kept: Path) -> None:
        self.code, self.err = code, err
        self.said = json.loads(out) if out.startswith("{") else {}
        self.lines = out.splitlines()
        self.records = list(read_records(kept, UpdateRecord)) if kept.read_text() else []


@pytest.fixture
def translate(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Translated]:
    def run(stdin: Any, *words: str) -> Translated:
        monkeypatch.setattr("sys.stdin", stdin)
        kept = tmp_path / "kept.jsonl"
        own = ["--target", str(folder / "target"), "--dtype", "float64", "--out", str(kept)]
        with pytest.raises(SystemExit) as end:
            cli.main(["live", "translate", *own, *words])
        assert isinstance(end.value.code, int)
        return Translated(end.value.code, *capsys.readouterr(), kept)

    return run


def finals(made: Translated) -> list[tuple[int, str]]:
    return [(one.seg, one.source) for one in made.records if one.final]


def test_bytes_that_are_no_text_are_named_and_left_out(translate: Any) -> None:
    raw = b"the cat\nthe \xff cat\nthe cat sat\nthe \0 cat\n\nthe dog\n"
    made = translate(io.TextIOWrapper(io.BytesIO(raw), encoding="ascii"), "--json")
    assert made.code == 0 and finals(made) == [(0, "the cat sat"), (1, "the dog")]
    assert [one.split(":")[0] for one in made.said["left_out"]] == [
        "line 2 is not UTF-8", "line 4 holds a NUL character",
    ]  # fmt: skip
    assert "line 2" in made.err and "2 left out" in made.err


def test_records_that_cannot_be_written_are_refused_before_anything_is_translated(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
    with pytest.raises(SystemExit) as end:
        cli.main(["live", "translate", f"--target={folder / 'target'}", f"--out={tmp_path}"])
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "") and str(tmp_path) in said.err


def test_a_closed_stdin_is_said_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(SystemExit) as end:
        cli.main(["live", "translate", "--target=./nowhere"])
    assert (end.value.code, "stdin is closed" in capsys.readouterr().err) == (2, True)


def test_letters_beyond_ascii_arrive_whatever_the_locale_says(translate: Any) -> None:
    made = translate(io.TextIOWrapper(io.BytesIO("die Tür".encode()), encoding="ascii"), "--json")
    assert finals(made) == [(0, "die Tür")]


def test_a_line_of_another_form_is_left_out(translate: Any) -> None:
    lines = [
        {"seg": 0, "rev": 0, "text": "the cat"},
        {"seg": 0, "rev": 1, "txt": "the cat sat"},
        {"seg": 0, "rev": 2, "text": "the \0 cat"},
        {"seg": 0, "rev": 3, "text": "the cat sat on", "final": True},
    ]
    stdin = io.StringIO("".join(json.dumps(line) + "\n" for line in lines))
    made = translate(stdin, "--format", "jsonl", "--json")
    assert made.code == 0 and finals(made) == [(0, "the cat sat on")]
    bad, nul = made.said["left_out"]
    assert "txt" in bad and "line 2" in bad
    assert nul.startswith("segment 0 revision 2: the text holds a NUL")


def test_an_input_of_another_form_is_an_error(translate: Any) -> None:
    made = translate(io.StringIO("the cat\nthe dog\n"), "--format", "google")
    assert made.code == 2 and "line 1" in made.err


def test_a_source_that_is_too_long_ends_with_what_could_be_read(translate: Any) -> None:
    long = " ".join(WORDS * 8)
    made = translate(io.StringIO(f"the cat\nthe cat sat\n{long}\n\nthe dog\n{long}\nthe log\n"))
    assert made.code == 0 and finals(made) == [(0, "the cat sat"), (1, "the log")]
    shown = [one.full for one in made.records if one.final]
    assert made.lines == [line for text in shown for line in text.split("\n")]
    assert "segment 0 revision 2" in made.err
    never = translate(io.StringIO(f"{long}\n\nthe dog\n"), "--json")
    assert finals(never) == [(1, "the dog")]


class Typed(io.StringIO):
    """Lines, and then somebody presses Ctrl-C."""

    def __init__(self, text: str, ends: bool = True) -> None:
        super().__init__(text)
        self.ends = ends

    def __iter__(self) -> Iterator[str]:
        yield from self.getvalue().splitlines(keepends=True)
        if self.ends:
            raise KeyboardInterrupt


@pytest.mark.parametrize("final", [True, False])
def test_an_interrupt_makes_what_was_heard_last_final(translate: Any, final: bool) -> None:
    made = translate(Typed("the cat\nthe cat sat\n" + "\n" * final))
    assert made.code == 130 and finals(made) == [(0, "the cat sat")]
    assert "\n".join(made.lines) == made.records[-1].full.rstrip("\n")


@pytest.mark.parametrize("at", range(4))
def test_an_interrupt_in_mid_update_does_so_too(
    translate: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    calls = 0
    inner = LiveTranslator.begin

    def interrupted(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise KeyboardInterrupt
        return inner(*given, **named)

    monkeypatch.setattr(LiveTranslator, "begin", interrupted)
    made = translate(Typed("the cat\nthe cat sat\n\nthe dog\n", ends=False))
    heard = [(0, "the cat"), (0, "the cat sat"), (0, "the cat sat"), (1, "the dog")]
    assert made.code == 130 and finals(made)[-1] == heard[at]
    assert len(finals(made)) == 1 + heard[at][0]


def test_a_large_bias_is_warned_of(translate: Any) -> None:
    assert "note:" in translate(io.StringIO("the cat\n"), "--bias", "0.5").err
    assert "note:" in translate(io.StringIO("the cat\n"), "--final-bias", "1").err
    assert "note:" not in translate(io.StringIO("the cat\n"), "--bias", "0.4").err
