"""The table of the drafters of the real model."""

from __future__ import annotations

import json
from pathlib import Path

from smollm2 import measure


def test_a_record_takes_rows_of_its_own_machine_alone(tmp_path: Path) -> None:
    record = tmp_path / "speeds.json"
    here = {"cpu": "X", "cpus": 2, "accelerators": []}
    assert measure.of_another_machine(record, here) is None
    row = {"weights": "auto", "drafter": "suffix", "temperature": 0.0, "suite": "gsm8k"}
    measure.add_to(record, [row | {"speedup": 1.2}, row | {"suite": "mt", "speedup": 1.1}], here)
    measure.add_to(record, [row | {"speedup": 1.3}], here)
    rows = json.loads(record.read_text())["rows"]
    assert [(one["suite"], one["speedup"]) for one in rows] == [("mt", 1.1), ("gsm8k", 1.3)]
    assert measure.of_another_machine(record, here | {"memory_gib": 9}) is None
    said = measure.of_another_machine(record, here | {"cpus": 4})
    assert said == f"{record} is of a machine with cpus 2, this one: 4"


def test_a_cell_says_speed_tokens_per_step_and_loops() -> None:
    row = {
        "speedup": 1.73,
        "speedup_ci95": [1.38, 2.09],
        "speedup_outside_loops": 1.61,
        "decode_tokens_per_step": 2.49,
        "decode_tokens_per_step_outside_loops": 2.3,
        "loop_share": 0.175,
    }
    assert measure.cell(row) == "1.73 (1.38 to 2.09) / 1.61, 2.49 / 2.30, 18% in loops"
    unknown = row | {"decode_tokens_per_step_outside_loops": None, "loop_share": None}
    unknown["speedup_outside_loops"] = None
    assert measure.cell(unknown) == "1.73 (1.38 to 2.09), 2.49 / -"
