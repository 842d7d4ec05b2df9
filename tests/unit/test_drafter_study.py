"""What the study of drafters shows follows from what it has recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(BENCHMARKS / "distillation")


@pytest.mark.parametrize("name", ["drafters-mini-code", "drafters-mini-ende"])
def test_tables_are_those_of_the_record(name: str) -> None:
    from drafters.tables import write

    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert write(record) == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["drafters-mini-code", "drafters-mini-ende"])
@pytest.mark.every(2)
def test_every_picture_of_the_record_can_be_drawn(name: str, tmp_path: Path) -> None:
    from drafters.pictures import save_pictures

    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    save_pictures(record, tmp_path)
    kept = {path.name for path in (RESULTS / name).iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == kept
