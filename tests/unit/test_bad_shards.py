"""Damaged shards of a store: they stop `distill`, or are said, counted and left out."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.command_cases import Command, a_command, distill_words, network_words, work_folder
from tests.unit.test_stored_features import rewrite

from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill import trainer as module
from draftsmith.distill.datasets import read_shards
from draftsmith.distill.trajectories import readers, shards
from draftsmith.distill.trajectories.readers import ByteCache
from draftsmith.distill.trajectories.store import TrajectoryStore

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flipped bit": lambda content: content[:40] + bytes([content[40] ^ 4]) + content[41:],
    "truncated": lambda content: content[:-3],
    "empty": lambda content: b"",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work_folder(tmp_path_factory.mktemp("work"))


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return a_command(folder, capsys)


@pytest.fixture
def store(folder: Path, tmp_path: Path, command: Command) -> Path:
    """Three shards of four prompts each."""
    whole = folder / "store"
    if not whole.exists():
        prompts = ["--prompts", str(folder / "many.txt"), "--limit", "12", "--shard-size", "4"]
        command("collect", *prompts, "--out", str(whole), "--samples", "2", "--max-new-tokens", "6")
    return Path(shutil.copytree(whole, tmp_path / "store"))


def spoil(store: Path, damage: str, ending: str = "parquet", number: int = 1) -> None:
    path = store / f"shard-{number:05d}.{ending}"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))


def learnt(out: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What run.json says, and the weights."""
    record = json.loads((out / "run.json").read_text())
    (weights,) = out.glob("*.safetensors")
    return record["results"], load_file(weights)


def stop_at(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """Interrupts a training behind this step."""
    step = module.Trainer.one_step

    def stopped(self: module.Trainer) -> Any:
        if self.step == last:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(module.Trainer, "one_step", stopped)


@pytest.mark.parametrize("ending", ["parquet", "json"])
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.every(5)
def test_a_damaged_shard_stops_or_is_left_out(
    folder: Path, tmp_path: Path, command: Command, store: Path, damage: str, ending: str
) -> None:
    less = Path(shutil.copytree(store, tmp_path / "less"))
    for path in less.glob("shard-00001.*"):
        path.unlink()
    spoil(store, damage, ending)
    short = ["--duration", "3steps", "--hold-out", "0.4"]
    words = distill_words(folder, tmp_path / "out", "--store", str(store), *short)
    for stop in ([], ["--on-bad-shard", "stop"]):
        said = command("distill", *words, *stop, code=3)
        assert "shard-00001" in said and "(--on-bad-shard skip leaves it out)" in said
        assert not (tmp_path / "out").exists()
    command("distill", *words, "--on-bad-shard", "skip")
    results, weights = learnt(tmp_path / "out")
    assert results["bad_shards"] == 1
    command("distill", *distill_words(folder, tmp_path / "other", "--store", str(less), *short))
    expected, same = learnt(tmp_path / "other")
    assert expected["bad_shards"] == 0
    for name in ("data", "trajectories", "prompts", "store_bytes", "store_bytes_per_token"):
        assert results[name] == expected[name]
    assert all(torch.equal(weights[name], same[name]) for name in same)


def test_each_is_logged_with_its_reason(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="draftsmith")
    spoil(store, "flipped bit", number=0)
    (store / "shard-00002.parquet").unlink()
    there = TrajectoryStore.open(store)
    found = read_shards(there, ByteCache(), 0, "skip")
    assert ([one.number for one in found.good], found.bad) == ([1], (0, 2))
    assert len(found.documents) == len(there.read(1)) > 0
    first, second = caplog.messages
    assert first.startswith(f"left out a shard: shard 0 of {store} is damaged: shard-00000.parquet")
    assert "remove shard-00000.* and collect again" in first
    assert "left out a shard: cannot read" in second and "No such file" in second
    assert "remove shard-00002.* and collect again" in second


def test_where_no_shard_is_left_nothing_is_learnt(
    folder: Path, tmp_path: Path, command: Command, store: Path
) -> None:
    for number in range(3):
        spoil(store, "truncated", number=number)
    out = ["--store", str(store), "--on-bad-shard", "skip"]
    said = command("distill", *distill_words(folder, tmp_path / "out", *out), code=2)
    assert "no trajectory in" in said and "(3 damaged shards were left out)" in said
    assert not (tmp_path / "out").exists()


def test_a_run_is_continued_with_the_same_shards_and_no_others(
    folder: Path, tmp_path: Path, command: Command, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store / "shard-00001.parquet"
    good = path.read_bytes()
    spoil(store, "flipped bit")
    own = ["--store", str(store), "--on-bad-shard", "skip"]
    command("distill", *distill_words(folder, tmp_path / "whole", *own))
    words = distill_words(folder, tmp_path / "cut", *own)
    with monkeypatch.context() as patched:
        stop_at(patched, 7)
        command("distill", *words, code=130)
    path.write_bytes(good)
    assert "was made with data" in command("distill", *words, code=2)
    spoil(store, "flipped bit")
    spoil(store, "flipped bit", number=2)
    assert "was made with data" in command("distill", *words, code=2)
    shutil.copy(folder / "store" / "shard-00002.parquet", store)
    command("distill", *words)
    (_, whole), (_, cut) = learnt(tmp_path / "whole"), learnt(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_shard_that_is_damaged_meanwhile_is_no_other_run_once_it_is_back(
    folder: Path, tmp_path: Path, command: Command, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How to treat damage is no part of what a run agrees on: the shards that are used are."""
    words = distill_words(folder, tmp_path / "cut", "--store", str(store))
    with monkeypatch.context() as patched:
        stop_at(patched, 7)
        command("distill", *words, code=130)
    spoil(store, "truncated")
    skip = ["--on-bad-shard", "skip"]
    assert "was made with data" in command("distill", *words, *skip, code=2)
    shutil.copy(folder / "store" / "shard-00001.parquet", store)
    command("distill", *words, *skip)


def test_online_there_are_no_shards(tmp_path: Path, command: Command) -> None:
    own = ["--drafter", "d", "--online", "--prompts", "p", "--on-bad-shard", "skip"]
    said = command("distill", *own, "--out", str(tmp_path / "out"), code=2)
    assert "--on-bad-shard does nothing without --store" in said


@pytest.fixture
def pieces(folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards of many row groups and many checksums: most are read late in a training."""
    monkeypatch.setattr(shards, "GROUP_BYTES", 2000)
    monkeypatch.setattr(readers, "PIECE", 64)
    whole = folder / "pieces"
    if not whole.exists():
        prompts = ["--prompts", str(folder / "many.txt"), "--limit", "48", "--shard-size", "16"]
        command("collect", *prompts, "--out", str(whole), "--samples", "2", "--max-new-tokens", "6")
    return Path(shutil.copytree(whole, tmp_path / "pieces"))


def flip_rows(path: Path) -> None:
    """Another bit in every piece of the rows; the footer stays."""
    content = bytearray(path.read_bytes())
    footer = int.from_bytes(content[-8:-4], "little") + 8
    for at in range(readers.PIECE, len(content) - footer - readers.PIECE, readers.PIECE):
        content[at] ^= 4
    path.write_bytes(bytes(content))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


def damage_at(monkeypatch: pytest.MonkeyPatch, step: int, damage: Callable[[], None]) -> None:
    """Do this once, in front of a step."""
    one_step = module.Trainer.one_step

    def damaging(self: module.Trainer) -> Any:
        if self.step == step:
            damage()
        return one_step(self)

    monkeypatch.setattr(module.Trainer, "one_step", damaging)


def steps_kept(out: Path) -> int:
    newest = checkpoints.latest(out / "work" / "checkpoints")
    assert newest is not None
    return checkpoints.load(newest).step


def assembling() -> list[threading.Thread]:
    """Threads that assemble batches, once nothing refers to a source any more."""
    gc.collect()
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


@pytest.mark.parametrize("damage", [flip_rows, truncate])
@pytest.mark.every(2)
def test_damage_met_in_training_keeps_the_steps_that_are_done(
    folder: Path,
    tmp_path: Path,
    command: Command,
    pieces: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
) -> None:
    """The run ends as one that nothing disturbed, once the shard is back."""
    own = ["--store", str(pieces), "--save-every", "100"]
    command("distill", *distill_words(folder, tmp_path / "whole", *own))
    words = distill_words(folder, tmp_path / "cut", *own)
    path = pieces / "shard-00001.parquet"
    good = path.read_bytes()
    with monkeypatch.context() as patched:
        damage_at(patched, 5, lambda: damage(path))
        said = command("distill", *words, code=3)
    assert "shard-00001.parquet" in said and "remove shard-00001.* and collect again" in said
    assert 5 <= steps_kept(tmp_path / "cut") < 12
    assert not assembling()
    path.write_bytes(good)
    command("distill", *words)
    assert not assembling()
    (_, whole), (_, cut) = learnt(tmp_path / "whole"), learnt(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_an_interrupted_training_leaves_no_thread(
    folder: Path, tmp_path: Path, command: Command, pieces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a signal, whose step is finished, and at once."""
    words = distill_words(folder, tmp_path / "out", "--store", str(pieces))
    with monkeypatch.context() as patched:
        damage_at(patched, 3, lambda: signal.raise_signal(signal.SIGINT))
        command("distill", *words, code=130)
    assert steps_kept(tmp_path / "out") == 4
    assert not assembling()
    with monkeypatch.context() as patched:
        stop_at(patched, 6)
        command("distill", *words, code=130)
    assert not assembling()


@pytest.mark.parametrize("damage", ["not finite", "truncated"])
@pytest.mark.every(2)
def test_hidden_states_that_cannot_be_learnt_from_are_met_in_training(
    folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Values that their checksums confirm are not finite; a file that is mapped is cut short."""
    store = tmp_path / "store"
    words = ["--prompts", str(folder / "many.txt"), "--limit", "48", "--features", "medusa"]
    command("collect", *words, "--shard-size", "16", "--max-new-tokens", "6", "--out", str(store))
    own = ["--drafter", "medusa", "--store", str(store), *network_words(12)]
    path = store / "shard-00001.features.safetensors"
    read: list[int] = []
    real = readers.FeatureFile.read

    def noted(self: readers.FeatureFile, row: int, places: int) -> torch.Tensor:
        if self.file.path == path:
            read.append(row)
        return real(self, row, places)

    with monkeypatch.context() as patched:
        patched.setattr(readers.FeatureFile, "read", noted)
        command("distill", *own, "--out", str(tmp_path / "whole"))
    good = path.read_bytes()
    with monkeypatch.context() as patched:
        if damage == "truncated":
            damage_at(patched, 4, lambda: os.truncate(path, 100))
        else:
            states = {name: value.clone() for name, value in load_file(path).items()}
            latest = list(dict.fromkeys(read))[-1]
            states[str(latest)][0, 0] = float("nan")
            rewrite(TrajectoryStore.open(store), states, 1)
        said = command("distill", *own, "--out", str(tmp_path / "cut"), code=3)
    assert "shard 1 of" in said and "remove shard-00001.* and collect again" in said
    assert 1 <= steps_kept(tmp_path / "cut") < 12
    assert not assembling()
    if damage == "truncated":  # values that are not finite came with checksums of other data
        path.write_bytes(good)
        command("distill", *own, "--out", str(tmp_path / "cut"))
        (_, whole), (_, cut) = learnt(tmp_path / "whole"), learnt(tmp_path / "cut")
        assert all(torch.equal(whole[name], cut[name]) for name in whole)
