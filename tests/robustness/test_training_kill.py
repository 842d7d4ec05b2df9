"""kill -9 at random moments of training that never stops saving: nothing that was kept is lost."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests.forks import Forks
from tests.small_trainer import CONFIG, choosing, make_trainer, same, weights

from draftsmith import cli, provenance
from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.callbacks import MetricsFile
from draftsmith.distill.evaluation import find_best
from draftsmith.distill.trainer import Trainer, TrainReport


def never_resting(folder: Path) -> Trainer:
    """Every step has four parts, and is measured, saved and sometimes the best; an epoch ends in
    the middle of a step."""
    config = replace(
        CONFIG, steps=300, gradient_accumulation=4, eval_every=1, save_every=1, learning_rate=0.02
    )
    metrics = [MetricsFile(folder / "metrics.jsonl")]
    return make_trainer(folder, config=config, evaluation=choosing(), callbacks=metrics)


def train(folder: str) -> None:
    """In a process of its own."""
    never_resting(Path(folder)).train()
    os._exit(0)


def kill_while_training(forks: Forks, folder: Path, seed: int) -> int:
    """Train through kills to the end, in other processes; how many kills it took."""
    rng = random.Random(seed)
    step, value, kills = 0, float("inf"), 0
    while True:
        with forks.start(train, folder) as child:
            # A fraction of a second: some kills come before the first step, most within a save.
            code = child.wait() if child.ended(rng.uniform(0.02, 0.3)) else child.kill()
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


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, TrainReport]:
    trainer = never_resting(tmp_path_factory.mktemp("whole"))
    return trainer, trainer.train()


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_training_through_kills_ends_as_if_there_were_none(
    tmp_path: Path, forks: Forks, uncut: tuple[Trainer, TrainReport], seed: int
) -> None:
    whole, report = uncut
    assert kill_while_training(forks, tmp_path / "cut", seed) >= 5
    again = never_resting(tmp_path / "cut")
    assert again.train() == report
    metrics = [trainer.folder.with_name("metrics.jsonl").read_text() for trainer in (whole, again)]
    assert metrics[0] == metrics[1]
    assert same(weights(whole), weights(again))
    best = [never_resting(tmp_path / name) for name in ("one", "two")]
    assert whole.copy_best_into(best[0].drafter) == again.copy_best_into(best[1].drafter)
    assert same(weights(best[0]), weights(best[1]))


def dies_before_it_is_signed(words: list[str]) -> None:
    """In a process of its own: the model is written, but run.json is not."""
    provenance.Run.write = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    cli.main(words)


def test_a_run_killed_at_its_very_end_goes_on_without_a_trace(tmp_path: Path, forks: Forks) -> None:
    text, held_out, out = (tmp_path / name for name in ("text.txt", "held-out.txt", "out"))
    text.write_text("\n".join(f"line {i} is {i * i % 97}" for i in range(400)))
    held_out.write_text("line 5 is 25")
    words = f"pretrain --text {text} --eval-text {held_out} --size tiny --layers 1 --vocab-size 300"
    words += " --block-length 32 --batch-tokens 64 --duration 6steps --dtype float32 --out"
    with forks.start(dies_before_it_is_signed, [*words.split(), str(out)]) as child:
        assert child.wait() == -signal.SIGKILL, child.errors()
    assert [path for path in out.glob(".*") if path.is_dir()], "it died too early or too late"
    with forks.command(*words.split(), out) as child:
        assert child.wait() == 0, child.errors()
    names = {path.name for path in out.iterdir()}
    assert {"run.json", "model.safetensors"} < names and "work" not in names
    assert not [name for name in names if name.startswith(".")]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 6]  # the last: its evaluation
