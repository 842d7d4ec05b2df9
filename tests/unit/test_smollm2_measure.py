"""The table of the drafters of the real model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "smollm2" / "measure.py"


def test_a_cell_says_speed_tokens_per_step_and_loops() -> None:
    spec = importlib.util.spec_from_file_location("smollm2_measure", FILE)
    assert spec is not None and spec.loader is not None
    measure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measure)
    row = {
        "speedup": 1.73,
        "speedup_ci95": [1.38, 2.09],
        "decode_tokens_per_step": 2.49,
        "decode_tokens_per_step_outside_loops": 2.3,
        "loop_share": 0.175,
    }
    assert measure.cell(row) == "1.73 (1.38 to 2.09), 2.49 / 2.30, 18% in loops"
    unknown = row | {"decode_tokens_per_step_outside_loops": None, "loop_share": None}
    assert measure.cell(unknown) == "1.73 (1.38 to 2.09), 2.49 / -"
