"""The models that ship with draftsmith: complete, small, signed, and made by the recipe."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mini_code
from draftsmith.commands.pretrain import PretrainOptions
from draftsmith.config import as_dict, from_dict

FOLDER = Path(__file__).parents[2] / "models" / "mini-code"
NAMES = ("target", "draft")


def record(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "run.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_loads_and_knows_python_better_than_chance(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / name)
    assert model.dtype == torch.bfloat16
    code = "import os\n\ndef main(self, name=None):\n    if name is None:\n        return self\n"
    ids = tokenizer(code, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == code
    with torch.no_grad():
        loss = float(model.float()(ids, labels=ids).loss)
    assert loss < 0.75 * math.log(model.config.vocab_size)


def test_target_and_draft_share_their_tokenizer() -> None:
    target, draft = (AutoTokenizer.from_pretrained(FOLDER / name) for name in NAMES)
    assert target.get_vocab() == draft.get_vocab()
    assert target.eos_token_id == draft.eos_token_id


def test_together_they_take_at_most_30_megabytes() -> None:
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    assert size <= 30_000_000


def test_sizes_are_those_that_the_project_promises() -> None:
    target, draft = (record(name)["results"]["parameters"] for name in NAMES)
    assert 8_000_000 <= target <= 14_000_000
    assert draft <= target / 10


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_is_what_was_run(name: str) -> None:
    # read as today's options: what has been added since has its default
    options = as_dict(from_dict(PretrainOptions, record(name)["options"], where="run.json"))
    expected = as_dict(getattr(mini_code, name)(Path("models/mini-code")))
    for key in ("model", "training", "seed", "dtype", "save_dtype"):
        assert options[key] == expected[key], key
    assert options["data"] == expected["data"]


@pytest.mark.parametrize("name", NAMES)
def test_files_say_nothing_about_the_machine_they_were_made_on(name: str) -> None:
    for file in ("config.json", "generation_config.json", "tokenizer_config.json", "run.json"):
        content = (FOLDER / name / file).read_text(encoding="utf-8")
        assert not re.search(r'"[^"]*(/root|/home|/usr|/opt|/work|/tmp|C:)\b', content), file


def test_figures_are_recorded_and_better_for_the_target() -> None:
    target, draft = (record(name)["results"] for name in NAMES)
    assert target["data"]["held_out_sha256"] == draft["data"]["held_out_sha256"]
    assert target["data"]["held_out_files"] and target["data"]["train_sha256"]
    assert 0 < target["bits_per_byte"] < draft["bits_per_byte"] < 4
    for name, results in zip(NAMES, (target, draft), strict=True):
        assert f"{results['bits_per_byte']:.3f}" in (FOLDER / name / "README.md").read_text()
