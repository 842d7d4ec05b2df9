"""kill -9 at random moments of saving: the newest visible checkpoint always loads."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.distill import checkpoint as checkpoints

# One process saves without pause and tells each checkpoint that it is about to write. It forks per
# trial, so that torch is imported once.
WRITER = """
import os, sys
from pathlib import Path
import torch
from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.checkpoint import Checkpoint
torch.set_num_threads(1)
folder = Path(sys.argv[1])
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        newest = checkpoints.latest(folder)
        step = checkpoints.load(newest).step if newest else 0
        print(os.getpid(), flush=True)
        while True:
            step += 1
            value = torch.full((300, 300), float(step))
            checkpoints.save(folder, Checkpoint(step=step, weights={"w": value},
                optimizer={"state": {0: value.clone()}}, state={"value": step}), keep=2)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def kill_while_saving(folder: Path, times: int, seed: int) -> int:
    """Number of checkpoints made in all, after `times` kills."""
    rng = random.Random(seed)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert writer.stdin is not None and writer.stdout is not None
    last = 0
    try:
        for _ in range(times):
            writer.stdin.write("go\n")
            writer.stdin.flush()
            child = int(writer.stdout.readline())
            select.select([], [], [], rng.uniform(0.001, 0.12))
            os.kill(child, signal.SIGKILL)
            assert writer.stdout.readline().strip() == "gone"
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
    finally:
        writer.stdin.close()
        writer.wait(timeout=60)
        writer.stdout.close()
    return last


def test_latest_always_loads_after_a_kill_while_saving(tmp_path: Path) -> None:
    assert kill_while_saving(tmp_path, times=20, seed=0) > 0


@pytest.mark.full
def test_latest_always_loads_after_150_kills_while_saving(tmp_path: Path) -> None:
    assert kill_while_saving(tmp_path, times=150, seed=1) > 0
