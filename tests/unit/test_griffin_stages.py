"""The published stages and their controls: what each goes on from, and that lines take as long."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli import parse
from griffin_table import order, stages

BY_NAME = {stage.name: stage for stage in stages.STAGES}
TRAINED = ("eagle", "fspad", "hass", "griffin")
"""Kinds that train.py has trained."""


def line(stage: stages.Stage) -> list[stages.Stage]:
    """A stage and those before it."""
    before = BY_NAME.get(stage.begun)
    return [*(line(before) if before else []), stage]


def test_every_stage_goes_on_from_one_before_it_or_from_a_trained_drafter() -> None:
    seen = set(TRAINED)
    for stage in stages.STAGES:
        assert not stage.begun or stage.begun in seen
        assert (stage.kind, stage.forwards) in stages.COSTS
        assert stage.name not in seen
        seen.add(stage.name)


def test_all_lines_go_on_for_the_same_time_whatever_their_forwards() -> None:
    begun = {stage.begun for stage in stages.STAGES}
    ends = [stage for stage in stages.STAGES if stage.name not in begun]
    assert len(ends) == 7
    for end in ends:
        going_on = [stage for stage in line(end) if stage.begun]
        spent = sum(
            stage.steps(330) * stages.COSTS[stage.kind, stage.forwards] for stage in going_on
        )
        # each stage is rounded to whole steps
        most = sum(stages.COSTS[stage.kind, stage.forwards] / 2 for stage in going_on)
        assert spent == pytest.approx(330, abs=most)


def test_stages_are_the_published_ones_and_controls_have_one_forward() -> None:
    def published(name: str) -> list[tuple[str, int, float]]:
        return [(one.kind, one.forwards, one.top) for one in line(BY_NAME[name])]

    griffin = [("griffin", 1, 0.0), ("griffin", 2, 0.5), ("griffin", 3, 0.5)]
    assert published("griffin-three") == griffin
    assert published("hass-two") == [("hass", 3, 0.0), ("hass", 3, 1.0)]
    for name in ("griffin-control", "fspad-control", "eagle-control"):
        assert {(one.forwards, one.top) for one in line(BY_NAME[name])} == {(1, 0.0)}


@pytest.fixture
def work(tmp_path: Path) -> stages.Work:
    for kind in TRAINED:
        folder = tmp_path / "drafters" / f"{kind}-2e-3"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        (folder / "drafter.json").write_text(json.dumps({"kind": kind, "options": {}}))
    given = dict.fromkeys(stages.Work.kept, 1) | {"drafters": tmp_path / "drafters"}
    return stages.Work(argparse.Namespace(out=tmp_path / "out", **given))


def test_what_a_stage_begins_as(work: stages.Work, tmp_path: Path) -> None:
    assert work.drafter(BY_NAME["griffin-one"]) == ["--drafter", "griffin", *stages.VOCABULARY]
    first = tmp_path / "out" / "runs" / "griffin-one"
    first.mkdir()
    (first / "drafter.json").write_text(json.dumps({"kind": "griffin", "options": {}}))
    assert work.drafter(BY_NAME["griffin-two"]) == ["--drafter", f"griffin:{first}"]
    eagle = tmp_path / "drafters" / "eagle-2e-3"
    assert work.drafter(BY_NAME["eagle-control"]) == ["--drafter", f"eagle:{eagle}"]
    kind, _, copy = work.drafter(BY_NAME["hass-one"])[1].partition(":")
    assert kind == json.loads((Path(copy) / "drafter.json").read_text())["kind"] == "hass"
    assert json.loads((eagle / "drafter.json").read_text())["kind"] == "eagle"


@pytest.mark.parametrize("program", [order, stages])
def test_draftsmith_takes_every_command(
    program: Any, tmp_path: Path, work: stages.Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, options = tmp_path / program.__name__, argparse.Namespace(**vars(work.options))
    options.out, options.stores, options.target = out, tmp_path, "target"
    (tmp_path / "store-0").mkdir()
    (out / "exam").mkdir(parents=True)
    (out / "exam" / "run.json").write_text("{}")
    asked = []

    def call(own: order.Work, name: str, words: Sequence[str]) -> None:
        (verb, *rest) = words
        asked.append(parse(verb, rest))
        asked[-1].out.mkdir()
        begun = {"kind": asked[-1].drafter.partition(":")[0], "options": {}}
        (asked[-1].out / "drafter.json").write_text(json.dumps(begun))

    monkeypatch.setattr(order.Work, "call", call)
    program.Work(options).run()
    expected = order.SETTINGS if program is order else stages.STAGES
    assert len(asked) == len(expected)
    assert {one.evaluate for one in asked} == {(out / "exam",)}


def test_the_report_has_the_time_of_what_has_ended(work: stages.Work, tmp_path: Path) -> None:
    def held_out(first: float, steps: float) -> dict[str, float]:
        return {f"accuracy_{n}": first / n for n in range(1, 6)} | {"tokens_per_step": steps}

    results: dict[str, Any] = {"steps": 10, "tokens": 40_960}
    results |= {"held_out_before": held_out(0.5, 1.5), "held_out": held_out(0.6, 1.7)}
    folder = tmp_path / "out" / "runs" / "griffin-two"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"results": results}))
    work.report(stages.table)
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    (row,) = record["rows"]
    assert (row["stage"], row["time"]) == ("griffin-two", 10 * stages.COSTS["griffin", 2])
    expected = "| griffin-two | griffin-one | 2 | 0.5 | 0.04 M | 21 | 1.500 | 1.700 | 0.600 0.300"
    assert expected in (tmp_path / "out" / "table.md").read_text()
