"""The validation study of the planner runs from end to end, where it is told to."""

from __future__ import annotations

import json
import subprocess
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
def test_a_quick_run_measures_predicts_and_keeps_its_results_to_itself(tmp_path: Path) -> None:
    before = kept()
    script = str(BENCHMARKS / "planner" / "validation.py")
    done = subprocess.run(
        [sys.executable, script, "--quick", "--work", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
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
