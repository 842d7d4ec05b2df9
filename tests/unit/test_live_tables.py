"""Tables of replays, what stands below them, and replays of several languages side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.command_cases import ran
from tests.tiny_models import save_pair

from draftsmith.commands.live.replay import cues
from draftsmith.data.jsonl import read_records
from draftsmith.live.metrics import CHARACTERS, WORDS, units_of, verification_cost
from draftsmith.live.records import Hypothesis, UpdateRecord

STREAM = [
    Hypothesis(seg=0, rev=0, text="the cat", time=1.0),
    Hypothesis(seg=0, rev=1, text="the cat sat", time=0.5),
    Hypothesis(seg=0, rev=2, text="the cat sat on", final=True),
    Hypothesis(seg=1, rev=0, text="the dog", final=True, time=9.0),
]


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    return ran(capsys, "live", *words, code=code)


def line(one: Hypothesis) -> str:
    return json.dumps({name: getattr(one, name) for name in Hypothesis.__slots__}) + "\n"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its texts do not end: every output runs away."""
    made = tmp_path_factory.mktemp("live")
    save_pair(made)
    return made / "target"


def test_replays_are_joined_and_say_what_ran_away(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = tmp_path / "stream.jsonl"
    stream.write_text("".join(map(line, STREAM)))
    rows = {}
    for language in ("German", "Japanese"):
        folder = tmp_path / "replays" / language
        own = ["--target", str(target), "--language", language, "--out", str(folder), "--json"]
        words = ["--bias", "0,0.3", "--mask-k", "0,2", "--max-ratio", "0.5"]
        made = run(capsys, "replay", str(stream), *own, *words)
        records = list(read_records(folder / "ssbd-bias0.3" / "records.jsonl", UpdateRecord))
        assert made["updates"] == 4 and len(made["degenerate"]) == len(made["rows"]) == 6
        odd = sum(one.degenerate for one in records)
        assert made["degenerate"]["ssbd-bias0.3"] == odd > 0
        tables = (folder / "tables.md").read_text()
        assert f"ssbd-bias0.3 {odd}," in tables and "of 4 per setting" in tables
        (full,) = (row for row in made["rows"] if row["bias"] == 0.3 and not row["mask_k"])
        assert f"| {verification_cost(full['speedup'], full['ao']):.3f} |" in tables
        rows[language] = [made["rows"][0], full]
        log = (folder / "ar" / "instances.log").read_text().splitlines()
        finals = [one.full for one in records if one.final]
        units = len if language == "Japanese" else lambda text: len(text.split())
        expected = [units(text) for text in finals]
        delays = (folder / "ssbd-bias0.3" / "instances.log").read_text().splitlines()
        assert log and [len(json.loads(one)["delays"]) for one in delays] == expected
    joined = run(capsys, "score", str(tmp_path / "replays"), "--json")["replays"]
    assert [(one["language"], one["target"]) for one in joined] == [
        ("German", str(target)), ("Japanese", str(target)),
    ]  # fmt: skip
    assert {one["language"]: one["rows"] for one in joined} == rows
    assert "--out needs the records" in run(
        capsys, "score", str(tmp_path / "replays"), "--out", str(tmp_path / "x"), code=2
    )
    assert "holds no folder" in run(capsys, "score", str(target), code=2)
    broken = tmp_path / "replays" / "German" / "table.json"
    broken.write_text(broken.read_text().replace("erasure:", "other:"))
    assert "count NE alike" in run(capsys, "score", str(tmp_path / "replays"), code=2)
    broken.write_text("{}")
    assert "make it again" in run(capsys, "score", str(tmp_path / "replays"), code=2)


def test_subtitles_follow_each_other() -> None:
    """A time that is missing or goes back is no time to go back to."""
    records = [
        UpdateRecord(
            seg=one.seg, rev=one.rev, source=one.text, shown=one.text, full=one.text,
            final=one.final, tokens=1, drafted=0, accepted=0,
        )
        for one in STREAM
    ]  # fmt: skip
    shown = cues(records, STREAM)
    assert [(begin, end) for begin, end, _ in shown] == [(1, 1), (1, 2), (2, 9), (9, 10)]
    untimed = cues([records[2], records[3]], [STREAM[2], replace(STREAM[3], time=None)])
    assert [(begin, end) for begin, end, _ in untimed] == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("language", "units"),
    [
        *((name, WORDS) for name in ("German", "en", "Klingon")),
        *((name, CHARACTERS) for name in ("Japanese", "zh", "zh-TW", "th-TH", "Khmer")),
    ],
)
def test_scripts_without_blanks_are_counted_by_characters(language: str, units: Any) -> None:
    assert units_of(language) is units
