"""The validation study of the planner runs from end to end, where it is told to."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TARGET = BENCHMARKS.parent / "models" / "mini-code" / "target"


def kept() -> dict[Path, bytes]:
    """What full runs have left."""
    found = (BENCHMARKS / "results").rglob("planner_validation*")
    return {path: path.read_bytes() for path in found if path.is_file()}


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
    sizes = [draft["params"] for draft in record["drafts"]]
    assert len(sizes) == 5
    assert sizes == sorted(sizes)
    for draft in record["drafts"]:
        for kind in ("by_parameters", "by_costs"):
            assert str(draft[kind]["length"]) in draft["measured"]
        assert len(draft["step_seconds"]) == 1 + len(draft["tokens_per_step"])
        assert all(one["latency"]["tpot"][0] > 0 for one in draft["measured"].values())
    assert kept() == before
