"""`collect` and `distill` from the command line: what their tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith import cli
from draftsmith.distill.datasets import held_out, prompt_key
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.distill.trajectories.types import Trajectory
from tests.tiny_models import save_family, save_pair

Command = Callable[..., Any]
PROMPTS = [
    {"id": "one", "prompt": "def add(left, right):\n", "reference": "return left"},
    {"id": "two", "prompt": "the cat sat", "tag": "animals"},
    {"id": "none", "prompt": ""},
    {"id": "long", "prompt": "return left " * 400},
    {"id": "three", "prompt": "return right", "reference": "- left"},
    {"id": "four", "prompt": "the dog saw"},
]


def work_folder(folder: Path) -> Path:
    """A pair of models, prompts of all kinds, and many short ones."""
    save_pair(folder, context=128)
    lines = "".join(json.dumps(prompt) + "\n" for prompt in PROMPTS)
    (folder / "prompts.jsonl").write_text(lines)
    words = "def add left right return the cat sat on mat dog log and saw".split()
    pairs = [f"{first} {second}" for first in words for second in words]
    (folder / "many.txt").write_text("\n".join(pairs) + "\n")
    return folder


def family_folder(folder: Path, family: str) -> Path:
    """A target of this family, and short prompts."""
    save_family(folder, family)
    words = "def add left right return cat".split()
    texts = [f"{first} {second}" for first in words for second in words]
    (folder / "prompts.txt").write_text("\n".join(texts) + "\n")
    return folder


def a_store(folder: Path, command: Command, name: str, *words: str) -> Path:
    """Short answers to these prompts, collected once."""
    store = folder / name
    if not store.exists():
        fixed = ["--prompts", str(folder / "prompts.txt"), "--max-new-tokens", "8"]
        command("collect", *fixed, "--out", str(store), *words)
    return store


def ran(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """Runs a command line in this process: its JSON, or the sentence it failed with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main(list(words))
    out, err = capsys.readouterr()
    assert end.value.code == code, err
    return json.loads(out) if code == 0 else err.strip().splitlines()[-1]


def a_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a verb in this process: its JSON, or the sentence and code it failed with."""

    def run(verb: str, *words: str, code: int = 0) -> Any:
        return ran(capsys, verb, "--target", str(folder / "target"), "--json", *words, code=code)

    return run


def a_collect(folder: Path, command: Command) -> Command:
    """Runs `collect` with these prompts, two per shard, and short texts."""

    def run(out: Path, *words: str, code: int = 0) -> Any:
        prompts = str(folder / "prompts.jsonl")
        fixed = ["--prompts", prompts, "--max-new-tokens", "6", "--shard-size", "2"]
        return command("collect", *fixed, "--out", str(out), *words, code=code)

    return run


def distill_words(folder: Path, out: Path, *words: str) -> list[str]:
    training = (
        "--duration 12steps --block-length 32 --batch-tokens 64 --learning-rate 0.01 --warmup 2"
    )
    fixed = ["--drafter", str(folder / "draft"), "--out", str(out), "--dtype", "float32"]
    return [*fixed, "--save-dtype", "float32", "--save-every", "4", *training.split(), *words]


def network_words(steps: int) -> list[str]:
    """A short training of a small network over hidden states."""
    fixed = "--block-length 32 --batch-tokens 64 --learning-rate 0.003 --warmup 1"
    numbers = "--dtype float32 --save-dtype float32 --hold-out 0.2 --eval-every 0"
    return ["--duration", f"{steps}steps", *fixed.split(), *numbers.split()]


def trajectories(store: Path) -> list[Trajectory]:
    return list(TrajectoryStore.open(store).trajectories())


def learnt_from(store: Path, hold_out: float) -> list[Trajectory]:
    """Without those of the prompts that --hold-out leaves out."""
    texts = trajectories(store)
    chosen = held_out([prompt_key(one.prompt) for one in texts], hold_out)
    return [one for one in texts if prompt_key(one.prompt) not in chosen]
