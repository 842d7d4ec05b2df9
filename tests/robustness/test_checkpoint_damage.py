"""Damaged, malicious and half-written checkpoints; a disk that is full."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.checkpoint import Checkpoint
from draftsmith.errors import BackendError

FILES = ("weights.safetensors", "optimizer.pt", "state.json")


def make(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    weights = {f"layer{index}": torch.randn(7, 5, generator=generator) for index in range(3)}
    parameter = torch.nn.Parameter(weights["layer0"].clone())
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return Checkpoint(
        step=step, weights=weights, optimizer=optimizer.state_dict(), state={"identity": {"a": 1}}
    )


def same(left: Checkpoint, right: Checkpoint) -> bool:
    return (
        left.step == right.step
        and left.state == right.state
        and all(torch.equal(left.weights[name], right.weights[name]) for name in left.weights)
        and torch.equal(
            left.optimizer["state"][0]["exp_avg"], right.optimizer["state"][0]["exp_avg"]
        )
    )


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, make(7), keep=2)
    assert same(checkpoints.load(path), make(7))
    assert sorted(file.name for file in path.iterdir()) == sorted([*FILES, "manifest.json"])


def test_the_last_ones_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path / "none") is None
    for step in (5, 10, 100):
        checkpoints.save(tmp_path, make(step), keep=2)
    assert [path.name for path in checkpoints.complete(tmp_path)] == [
        "step-00000010",
        "step-00000100",
    ]
    newest = checkpoints.latest(tmp_path)
    assert newest is not None and checkpoints.load(newest).step == 100


def test_the_same_step_may_be_saved_again(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, make(5), keep=2)
    path = checkpoints.save(tmp_path, make(5), keep=2)
    assert same(checkpoints.load(path), make(5))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_what_a_killed_save_left_is_invisible_and_swept(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, make(5), keep=2)
    half = tmp_path / ".tmp-00000006-1"
    half.mkdir()
    (half / "weights.safetensors").write_bytes(b"half")
    unfinished = tmp_path / "step-00000009"
    unfinished.mkdir()  # no manifest: not a checkpoint
    newest = checkpoints.latest(tmp_path)
    assert newest is not None and newest.name == "step-00000005"
    checkpoints.save(tmp_path, make(7), keep=2)
    assert not half.exists()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing", "grown"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = checkpoints.save(tmp_path, make(5), keep=2)
    file = path / name
    content = file.read_bytes()
    middle = len(content) // 2
    if damage == "missing":
        file.unlink()
    else:
        changed = {
            "truncated": content[:-3],
            "flipped": content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :],
            "empty": b"",
            "grown": content + b"\0",
        }
        file.write_bytes(changed[damage])
    with pytest.raises(BackendError, match=name):
        checkpoints.load(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"format": 99}', b'{"format": 1, "sha257": {}}', b"\xff\xfe"],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, content: bytes) -> None:
    path = checkpoints.save(tmp_path, make(5), keep=2)
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(BackendError, match=r"manifest\.json"):
        checkpoints.load(path)


def resign(path: Path) -> None:
    """Make the manifest fit again, as an attacker or a buggy tool would."""
    digests = {name: checkpoints.sha256(path / name) for name in FILES}
    manifest = {"format": checkpoints.FORMAT, "sha256": digests}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, make(5), keep=2)
    victim = tmp_path / "victim"

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(victim),)

    torch.save({"state": Evil()}, path / "optimizer.pt")
    resign(path)
    with pytest.raises(BackendError, match=r"optimizer\.pt"):
        checkpoints.load(path)
    assert not victim.exists()


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, make(5), keep=2)
    bad = make(5).weights
    bad["layer1"][2, 3] = float("nan")
    safetensors.torch.save_file(bad, path / "weights.safetensors")
    resign(path)
    with pytest.raises(BackendError, match="non-finite values in layer1"):
        checkpoints.load(path)


def count_writes(monkeypatch: pytest.MonkeyPatch, fail_at: int) -> list[str]:
    """Make the fail_at-th of everything that needs the disk fail as a full disk does."""
    log: list[str] = []

    def wrap(module: Any, name: str) -> None:
        real = getattr(module, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            log.append(name)
            if len(log) - 1 == fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **options)

        monkeypatch.setattr(module, name, wrapped)

    wrap(checkpoints, "save_file")
    wrap(checkpoints.torch, "save")
    wrap(checkpoints.Path, "write_text")
    wrap(checkpoints.Path, "mkdir")
    wrap(checkpoints.os, "fsync")
    wrap(checkpoints.os, "replace")
    return log


def test_a_full_disk_at_any_write_leaves_the_old_checkpoint_intact(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        log = count_writes(patch, fail_at=-1)
        checkpoints.save(tmp_path / "count", make(5), keep=1)
    assert len(log) >= 10
    for fail_at in range(len(log)):
        folder = tmp_path / str(fail_at)
        checkpoints.save(folder, make(5), keep=1)
        with pytest.MonkeyPatch.context() as patch:
            count_writes(patch, fail_at)
            with pytest.raises(BackendError, match="No space left on device") as caught:
                checkpoints.save(folder, make(6), keep=1)
        assert caught.value.exit_code == 3
        assert str(folder) in str(caught.value)
        newest = checkpoints.latest(folder)
        assert newest is not None
        # The very last call (syncing the parent) comes after the rename: then the new one is whole.
        assert same(checkpoints.load(newest), make(5)) or same(checkpoints.load(newest), make(6))
        assert not list(folder.glob(".*")), log[fail_at]
        checkpoints.save(folder, make(7), keep=1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_really_full_device_is_reported(tmp_path: Path) -> None:
    # /dev/full fails every write with ENOSPC: stands in for a full disk without filling one.
    folder = tmp_path / "c"
    checkpoints.save(folder, make(5), keep=1)
    real = checkpoints.torch.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints.torch, "save", lambda value, path: real(value, "/dev/full"))
        with pytest.raises(BackendError, match="write the checkpoint"):
            checkpoints.save(folder, make(6), keep=1)
    newest = checkpoints.latest(folder)
    assert newest is not None and same(checkpoints.load(newest), make(5))


def test_rotation_never_fails_a_save(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, make(5), keep=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
        path = checkpoints.save(tmp_path, make(6), keep=1)
    assert checkpoints.load(path).step == 6
