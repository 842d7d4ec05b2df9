"""kill -9 at random moments of saving: the newest visible checkpoint always loads."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import torch
from tests.forks import Forks

from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.checkpoint import Checkpoint


def save_without_pause(name: str) -> None:
    """In a process of its own: one checkpoint after the other."""
    folder = Path(name)
    newest = checkpoints.latest(folder)
    step = checkpoints.load(newest).step if newest else 0
    while True:
        step += 1
        value = torch.full((300, 300), float(step))
        moments = {"state": {0: value.clone()}}
        made = Checkpoint(step=step, weights={"w": value}, optimizer=moments, state={"value": step})
        checkpoints.save(folder, made, keep=2)


def kill_while_saving(forks: Forks, folder: Path, times: int, seed: int) -> int:
    """Number of checkpoints made in all, after `times` kills."""
    rng = random.Random(seed)
    last = 0
    for _ in range(times):
        with forks.start(save_without_pause, folder) as child:
            assert not child.ended(rng.uniform(0.001, 0.12)), child.errors()
            assert child.kill() == -signal.SIGKILL
        newest = checkpoints.latest(folder)
        if newest is None:
            continue
        saved = checkpoints.load(newest)
        assert saved.step >= last, "a checkpoint that was visible is gone"
        assert saved.state == {"value": saved.step}
        assert (saved.weights["w"] == saved.step).all()
        assert (saved.optimizer["state"][0] == saved.step).all()
        last = saved.step
        for path in checkpoints.complete(folder):
            checkpoints.verify(path)
    return last


@pytest.mark.full
def test_latest_always_loads_after_150_kills_while_saving(tmp_path: Path, forks: Forks) -> None:
    assert kill_while_saving(forks, tmp_path, times=150, seed=1) > 0
