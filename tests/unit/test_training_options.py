"""Options that only training reads: documented, and obeyed from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.command_cases import Command, a_command, a_store, family_folder, network_words

from draftsmith.drafters.base import TRAINING as MARK
from draftsmith.drafters.base import options_marked
from draftsmith.drafters.registry import drafter_class

DOCS = Path(__file__).resolve().parents[2] / "docs" / "distill.md"
TRAINING = ["--drafter", "hass", *network_words(2), "--hold-out", "0"]


@pytest.mark.parametrize(
    "kind",
    ["eagle", "eagle3", "fspad", "griffin", "hass", "medusa", "p_eagle", "parallel", "unrolled"],
)
def test_the_table_names_every_one_and_its_drafter(kind: str) -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    for name in options_marked(drafter_class(kind).Config, MARK):
        (row,) = (line for line in rows if f"`{name}`" in line.split("|")[1])
        drafters = row.split("|")[2]
        assert f"`{kind}`" in drafters or "all but" in drafters, (kind, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_folder(tmp_path_factory.mktemp("work"), "llama")


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return a_command(folder, capsys)


def test_distill_obeys_block_length_noise_and_attention(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    store = a_store(folder, command, "store", "--features", "hass")
    cases = {
        "plain": ["--drafter-option", "noise=0"],
        "again": ["--drafter-option", "noise=0", "--drafter-option", "attention=exact"],
        "leaks": ["--drafter-option", "noise=0", "--drafter-option", "attention=official"],
        "noisy": [],
        "short": ["--drafter-option", "noise=0", "--block-length", "16"],
    }
    weights = {}
    for name, own in cases.items():
        out = tmp_path / name
        command("distill", "--store", str(store), "--out", str(out), *TRAINING, *own)
        weights[name] = load_file(out / "model.safetensors")["fc.weight"]
    assert torch.equal(weights["plain"], weights["again"])
    for name in ("leaks", "noisy", "short"):
        assert not torch.equal(weights["plain"], weights[name]), name
    said = json.loads((tmp_path / "leaks" / "drafter.json").read_text())["options"]
    assert (said["attention"], said["noise"]) == ("official", 0)


def test_an_attention_that_does_not_exist_is_refused(folder: Path, command: Command) -> None:
    own = [*TRAINING, "--drafter-option", "attention=leaky"]
    said = command("distill", "--store", "none", "--out", str(folder / "no"), *own, code=2)
    assert "attention" in said and "official" in said
