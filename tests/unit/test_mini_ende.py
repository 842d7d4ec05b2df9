"""The recipe of models/mini-ende is the one that its records tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mini_ende
from draftsmith.commands.pretrain import PretrainOptions
from draftsmith.config import as_dict, from_dict

FOLDER = Path(__file__).parents[2] / "models" / "mini-ende"


def recorded(name: str) -> dict[str, Any]:
    record = json.loads((FOLDER / name / "run.json").read_text(encoding="utf-8"))
    return as_dict(from_dict(PretrainOptions, record["options"], where="run.json"))


def test_the_recipe_asks_for_what_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = Path("mini-ende/examples")
    examples.mkdir(parents=True)
    for name in ("train.jsonl", "held_out.jsonl"):  # written once: no pairs are read
        (examples / name).touch()
    asked: list[PretrainOptions] = []
    monkeypatch.setattr(mini_ende, "train_missing", asked.extend)
    mini_ende.main(Path("no-pairs.tsv"), Path("mini-ende"))
    assert [as_dict(options) for options in asked] == [recorded("target"), recorded("draft")]
