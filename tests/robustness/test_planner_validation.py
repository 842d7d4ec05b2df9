"""The validation study of the planner runs from end to end, where it is told to."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.measurements import a_record

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TARGET = BENCHMARKS.parent / "models" / "mini-code" / "target"


def kept() -> dict[Path, bytes]:
    """What full runs have left."""
    found = (BENCHMARKS / "results").rglob("planner_validation*")
    return {path: path.read_bytes() for path in found if path.is_file()}


def measured(name: str, speedup: float, low: float, high: float) -> dict[str, Any]:
    best = {"speedup": speedup, "length": 3}
    speeds = {
        "speedup": speedup,
        "speedup_ci95": [low, high],
        "latency": {"tpot": (1 / speedup, 0)},
    }
    return {"name": name, "by_parameters": best, "by_costs": best, "measured": {"3": speeds}}


def test_the_fastest_draft_is_tied_with_those_it_cannot_be_told_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS / "planner")
    from validation_predict import verdict

    drafts = [
        measured("slow", 0.6, 0.5, 0.7),
        measured("good", 1.26, 1.13, 1.40),
        measured("best", 1.34, 1.08, 1.68),
    ]
    by_intervals = verdict(drafts)
    assert by_intervals["by_the_clock"] == "best"
    assert by_intervals["tied_by_the_clock"] == ["good"]
    # prompts differ by far more than the drafts do on one prompt
    pace = {"slow": 4.0, "good": 1.1, "best": 1.0}
    records = [
        a_record(f"{name}:3", prompt, seconds=(1 + prompt) * pace[name])
        for name in pace
        for prompt in range(6)
    ]
    in_pairs = verdict(drafts, records)
    assert in_pairs["tied_by_the_clock"] == []
    assert in_pairs["faster_than"]["good"]["ratio"] == pytest.approx(1.1)
    # now the better one on a prompt changes from prompt to prompt
    mixed = [
        a_record(one.drafter, one.group, seconds=one.decode_seconds * (0.8 + 0.3 * (one.group % 2)))
        if one.drafter == "good:3"
        else one
        for one in records
    ]
    assert verdict(drafts, mixed)["tied_by_the_clock"] == ["good"]


@pytest.mark.skipif(not TARGET.is_dir(), reason="models/mini-code is not here")
def test_the_study_of_the_length_policy_counts_the_loops_of_its_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder in (BENCHMARKS, BENCHMARKS / "planner"):
        monkeypatch.syspath_prepend(folder)
    from controller_prices import PromptSet, loop_share

    from draftsmith.targets.hf import load_target

    target = load_target(str(TARGET), dtype="float32")
    again = tuple(target.tokenizer.encode("x = 1\n" * 24, add_special_tokens=False))
    shares = [
        loop_share(target, PromptSet(name="", prompts=(again,), temperature=at, first_id=0), 48)
        for at in (0.0, 4.0)  # at 4 the law is almost uniform
    ]
    assert shares[0] > 0.9 and shares[1] < 0.1, shares


def test_the_study_decodes_by_the_policy_that_it_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (BENCHMARKS, BENCHMARKS / "planner"):
        monkeypatch.syspath_prepend(folder)
    from controller_prices import Noted

    from draftsmith.core.decode import DecodeOptions
    from draftsmith.core.types import StepCount
    from draftsmith.plan.length_policy import CostAware, Learning, StepCosts

    costs = StepCosts(target_D=(1.0, 1.1), draft_D=(0.0, 0.1), in_vain=1.0)
    noted = Noted(policy=Learning(CostAware(costs=costs)), rows=[])
    assert DecodeOptions(policy=noted).policy is noted  # a policy of another kind is refused
    assert noted.keeps(9, StepCount(asked=1, offered=1, accepted=1))


@pytest.mark.full
@pytest.mark.skipif(not TARGET.is_dir(), reason="models/mini-code is not here")
def test_a_quick_run_measures_predicts_and_keeps_its_results_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kept()
    script = BENCHMARKS / "planner" / "validation.py"
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--quick", "--work", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    record = json.loads((tmp_path / "planner_validation_quick.json").read_text())
    timed = [one for draft in record["drafts"] for one in draft["measured"].values()]
    assert all(0 <= one["loop_share"] <= 1 for one in timed)
    assert all("tokens_per_step_outside_loops" in one for one in timed)
    sizes = [draft["params"] for draft in record["drafts"]]
    assert len(sizes) == 5
    assert sizes == sorted(sizes)
    for draft in record["drafts"]:
        for kind in ("by_parameters", "by_costs"):
            assert str(draft[kind]["length"]) in draft["measured"]
        assert len(draft["step_seconds"]) == 1 + len(draft["tokens_per_step"])
        assert all(one["latency"]["tpot"][0] > 0 for one in draft["measured"].values())
    found = record["best_of_the_five"]
    for name, ratio in found["faster_than"].items():
        assert (name in found["tied_by_the_clock"]) == (ratio["ci95"][0] <= 1)
    assert kept() == before
