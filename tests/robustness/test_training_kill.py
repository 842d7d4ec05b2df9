"""kill -9 at random moments of training that never stops saving: nothing that was kept is lost."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.process_group import ROOT
from tests.small_trainer import CONFIG, choosing, make_trainer, same, weights

from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.evaluation import find_best
from draftsmith.distill.trainer import Trainer

# Imports once, and forks for every trial.
SERVER = """
import os, sys
from pathlib import Path
import torch
from tests.robustness.test_training_kill import never_resting
torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        print(os.getpid(), flush=True)
        never_resting(Path(sys.argv[1])).train()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
"""


def never_resting(folder: Path) -> Trainer:
    """Every step has four parts, and is measured, saved and sometimes the best; an epoch ends in
    the middle of a step."""
    config = replace(
        CONFIG, steps=600, gradient_accumulation=4, eval_every=1, save_every=1, learning_rate=0.02
    )
    return make_trainer(folder, config=config, evaluations=[choosing()])


def kill_while_training(folder: Path, seed: int) -> int:
    """Train through kills to the end, in other processes; how many kills it took."""
    rng = random.Random(seed)
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert server.stdin is not None and server.stdout is not None
    step, value, kills = 0, float("inf"), 0
    try:
        while True:
            server.stdin.write("go\n")
            server.stdin.flush()
            child = int(server.stdout.readline())
            # A fraction of a second: some kills come before the first step, most within a save.
            ended, _, _ = select.select([server.stdout], [], [], rng.uniform(0.05, 0.6))
            if not ended:
                os.kill(child, signal.SIGKILL)
            code = int(server.stdout.readline())
            newest = checkpoints.latest(folder / "checkpoints")
            if newest is not None:
                saved = checkpoints.load(newest)
                assert saved.step >= step, "a checkpoint that was visible is gone"
                best = find_best(folder / "checkpoints" / "best", choosing())
                assert best is not None, "measured before it was saved, so something was the best"
                assert checkpoints.load(best.path).step == best.step
                assert best.value <= value, "a better one that was visible is gone"
                step, value = saved.step, best.value
            if code == 0:
                return kills
            assert code == -signal.SIGKILL, f"training ended with {code}"
            kills += 1
    finally:
        server.stdin.close()
        server.wait(timeout=60)
        server.stdout.close()


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_training_through_kills_ends_as_if_there_were_none(tmp_path: Path, seed: int) -> None:
    whole = never_resting(tmp_path / "whole")
    report = whole.train()
    assert kill_while_training(tmp_path / "cut", seed) >= 5
    again = never_resting(tmp_path / "cut")
    assert again.train() == report
    assert same(weights(whole), weights(again))
    best = [never_resting(tmp_path / name) for name in ("one", "two")]
    assert whole.copy_best_into(best[0].drafter) == again.copy_best_into(best[1].drafter)
    assert same(weights(best[0]), weights(best[1]))
