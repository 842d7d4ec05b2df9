"""Vocabularies of drafters' own: the tokens that answers hold most often."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.command_cases import (
    Command,
    a_command,
    a_store,
    family_folder,
    network_words,
    trajectories,
)

from draftsmith import cli

SIZE = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_folder(tmp_path_factory.mktemp("work"), "llama")


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return a_command(folder, capsys)


@pytest.fixture
def store(folder: Path, command: Command) -> Path:
    return a_store(folder, command, "store", "--features", "eagle3")


def distil(command: Command, out: Path, *words: str, code: int = 0) -> str:
    return command("distill", "--out", str(out), *network_words(4), *words, code=code)


def test_the_most_frequent_tokens_are_kept_and_decoding_stays_exact(
    tmp_path: Path, command: Command, store: Path
) -> None:
    own = ["--drafter", "eagle3", "--drafter-option", f"draft_vocab={SIZE}"]
    distil(command, tmp_path / "made", "--store", str(store), *own, "--hold-out", "0")
    weights = load_file(tmp_path / "made" / "model.safetensors")
    assert weights["lm_head.weight"].shape[0] == SIZE
    ids = (weights["d2t"] + torch.arange(SIZE)).tolist()
    counts = Counter(token for one in trajectories(store) for token in one.tokens)
    assert len(counts) > SIZE
    outside = 1 - sum(counts[token] for token in ids) / counts.total()
    assert results(tmp_path / "made")["share_outside_vocabulary"] == pytest.approx(outside)
    least = min(counts[token] for token in ids)
    assert ids == sorted(set(ids))
    assert all(counts[token] <= least for token in counts if token not in ids)
    text = ["--prompt", "def add", "--max-new-tokens", "20"]
    plain = command("generate", *text, "--drafter", "none")
    drafted = command("generate", *text, "--drafter", str(tmp_path / "made"))
    assert drafted["results"][0]["token_ids"] == plain["results"][0]["token_ids"]


def test_medusas_heads_know_the_most_frequent_tokens(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    """They begin as the target's rows of them, learn over them alone, and drafts change no text."""
    store = a_store(folder, command, "medusa-store", "--features", "medusa")
    own = ["--drafter", "medusa", "--drafter-option", f"draft_vocab={SIZE}"]
    distil(command, tmp_path / "made", "--store", str(store), *own, "--hold-out", "0")
    weights = load_file(tmp_path / "made" / "medusa_lm_head.safetensors")
    assert weights["0.1.weight"].shape[0] == SIZE
    counts = Counter(token for one in trajectories(store) for token in one.tokens)
    ids = (weights["d2t"] + torch.arange(SIZE)).tolist()
    least = min(counts[token] for token in ids)
    assert all(counts[token] <= least for token in counts if token not in ids)
    text = ["--prompt", "def add", "--max-new-tokens", "20"]
    plain = command("generate", *text, "--drafter", "none")
    drafted = command("generate", *text, "--drafter", str(tmp_path / "made"))
    assert drafted["results"][0]["token_ids"] == plain["results"][0]["token_ids"]


def results(made: Path) -> Any:
    return json.loads((made / "run.json").read_text())["results"]


@pytest.mark.parametrize("kind", ["eagle", "medusa", "parallel"])
def test_what_a_vocabulary_lacks_is_said_and_bounds_the_acceptance(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = a_command(folder, capsys)
    store = a_store(folder, command, f"{kind}-store", "--features", kind)
    words = ["distill", "--target", str(folder / "target"), "--store", str(store)]
    words += [*network_words(4), "--drafter", kind, "--laws", "teacher"]
    own = ["--drafter-option", f"draft_vocab={SIZE}"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main([*words, "--out", str(tmp_path / "small"), *own])
    said, found = capsys.readouterr().err, results(tmp_path / "small")
    share = found["share_outside_vocabulary"]
    assert 0 < share < 1 and f"\n{100 * share:.2f} % of the answers' tokens" in f"\n{said}"
    assert "  outside 0." in said
    for held in (found["held_out"], found["held_out_before"]):
        depths = [name.removeprefix("outside_") for name in held if name.startswith("outside_")]
        assert depths and all(
            held[f"acceptance_{depth}"] <= 1 - held[f"outside_{depth}"] + 1e-6 for depth in depths
        )
    with pytest.raises(SystemExit):
        cli.main([*words, "--out", str(tmp_path / "whole")])
    assert "outside" not in capsys.readouterr().err
    assert "outside" not in json.dumps(results(tmp_path / "whole"))


def test_training_goes_on_with_the_same_vocabulary(
    tmp_path: Path, command: Command, store: Path
) -> None:
    own = ["--store", str(store), "--drafter-option", f"draft_vocab={SIZE}"]
    distil(command, tmp_path / "first", "--drafter", "eagle3", *own)
    distil(command, tmp_path / "second", "--drafter", str(tmp_path / "first"), *own[:2])
    one, other = (
        load_file(tmp_path / name / "model.safetensors")["d2t"] for name in ("first", "second")
    )
    assert torch.equal(one, other)
    # the vocabulary is measured once more, but was chosen by other answers
    again = results(tmp_path / "second")
    assert "share_outside_vocabulary" not in again and 0 < again["held_out"]["outside_1"] < 1


@pytest.mark.parametrize("size", [-1, 301])
def test_impossible_sizes_are_refused(
    tmp_path: Path, command: Command, store: Path, size: int
) -> None:
    own = ["--drafter", "eagle3", "--drafter-option", f"draft_vocab={size}"]
    said = distil(command, tmp_path / "made", "--store", str(store), *own, code=2)
    assert "draft_vocab must lie between 0 (all) and 300" in said


def test_nothing_can_be_counted_before_it_is_drawn(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    own = ["--drafter", "eagle3", "--drafter-option", f"draft_vocab={SIZE}"]
    online = ["--online", "--prompts", str(folder / "prompts.txt"), "--max-new-tokens", "8"]
    said = distil(command, tmp_path / "made", *online, *own, code=2)
    assert "--store" in said
