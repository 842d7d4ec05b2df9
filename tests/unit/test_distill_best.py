"""What `distill` writes: the draft with the best held-out figure, also where the last is worse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.command_cases import (
    Command,
    a_collect,
    a_command,
    distill_words,
    trajectories,
    work_folder,
)

from draftsmith.commands.distill import DistillOptions
from draftsmith.errors import InputError


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return a_command(work_folder(tmp_path), capsys)


def check_the_best_is_written(folder: Path, command: Command, *words: str) -> None:
    """A run that spoils its draft in the end writes the one from before; measured again, as the
    beginning of another run, that has the best figure."""
    store = ["--store", str(folder / "store"), "--hold-out", "0.4"]
    a_collect(folder, command)(folder / "store", "--samples", "3")
    spoiling = ["--eval-every", "1", "--warmup", "12", "--learning-rate", "1"]
    found = command("distill", *distill_words(folder, folder / "out", *store, *spoiling, *words))
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    measured = {
        line["step"]: line["acceptance"] for line in map(json.loads, lines) if "acceptance" in line
    }
    best = max(measured, key=lambda step: measured[step])
    assert found["best_step"] == best < 12
    assert found["acceptance"] == measured[best] > measured[12] + 0.01
    results = json.loads((folder / "out" / "run.json").read_text())["results"]
    assert results["held_out"]["acceptance"] == results["alpha"] == measured[best]
    assert results["held_out"]["tokens"] == results["held_out_before"]["tokens"]
    again = distill_words(folder, folder / "again", *store, "--duration", "1steps")
    again[again.index("--drafter") + 1] = str(folder / "out")
    assert command("distill", *again)["acceptance_before"] == pytest.approx(measured[best])


def test_the_best_draft_is_written_not_the_last(tmp_path: Path, command: Command) -> None:
    check_the_best_is_written(tmp_path, command)


def test_prompts_of_another_store_choose_the_draft(tmp_path: Path, command: Command) -> None:
    """What is printed says of which texts it is, and is measured on these alone."""
    collect = a_collect(tmp_path, command)
    collect(tmp_path / "store", "--samples", "2")
    collect(tmp_path / "unseen", "--limit", "3")
    stores = ["--store", str(tmp_path / "store"), "--evaluate", str(tmp_path / "unseen")]
    found = command("distill", *distill_words(tmp_path, tmp_path / "out", *stores))
    assert "unseen" in found["measured_on"]
    results = json.loads((tmp_path / "out" / "run.json").read_text())["results"]
    asked = trajectories(tmp_path / "unseen")
    assert results["held_out_prompts"] == len({one.prompt for one in asked})
    assert results["held_out"]["tokens"] == sum(len(one.tokens) for one in asked)
    assert [Path(folder).name for folder in results["evaluated_on"]] == ["unseen"]
    other = distill_words(tmp_path, tmp_path / "held", "--store", str(tmp_path / "store"))
    assert "held-out" in command("distill", *other)["measured_on"]


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        ({"store": (Path("a"),), "hold_out": 0.1}, "--hold-out"),
        ({"online": True, "prompts": Path("x")}, "--evaluate"),
    ],
)
def test_what_contradicts_another_store_is_refused(wrong: dict[str, Any], flag: str) -> None:
    options = DistillOptions(target="t", drafter="d", out=Path("o"), evaluate=(Path("b"),), **wrong)
    with pytest.raises(InputError, match=flag):
        options.validate()
