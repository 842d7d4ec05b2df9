"""What is measured while training goes on, and the best weights: chosen, kept, resumed."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_trainer import (
    CONFIG,
    Bigram,
    StopAfter,
    choosing,
    held_out,
    make_trainer,
    same,
    weights,
)
from torch import Tensor

from draftsmith.core.types import TrajectoryBatch
from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.batches import EvaluationBlocks
from draftsmith.distill.callbacks import Callback, StepReport
from draftsmith.distill.config import TrainerConfig
from draftsmith.distill.evaluation import (
    WHILE_TRAINING,
    Evaluation,
    find_best,
    is_better,
    sums_of,
)
from draftsmith.distill.objectives.distillation import CrossEntropy, LossTerms
from draftsmith.distill.trainer import Trainer, TrainReport
from draftsmith.errors import BackendError

EVERY = replace(CONFIG, eval_every=1, save_every=4, keep=1, learning_rate=0.5)


class Recorder(Callback):
    """Values and weights of each evaluation."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}
        self.weights: dict[int, dict[str, Tensor]] = {}

    def on_evaluate(self, run: Any, values: dict[str, float]) -> None:
        self.values[run.step] = values
        self.weights[run.step] = weights(run)


@dataclass(frozen=True)
class Hits:
    """How many of the predictions would be right: larger is better."""

    def loss(self, prediction: Any, batch: TrajectoryBatch, head: Any) -> LossTerms:
        counted_BT = prediction.mask_BT & batch.mask_ahead(prediction.ahead)
        best_BT = head(prediction.hidden_BTH).argmax(-1)
        hits_BT = (best_BT == batch.tokens_ahead(prediction.ahead)) & counted_BT
        return LossTerms(total=hits_BT.sum().float(), weight=counted_BT.sum().float())


@dataclass(frozen=True)
class Constant:
    """Every position has this value; None: nothing is counted."""

    value: float | None

    def loss(self, prediction: Any, batch: TrajectoryBatch, head: Any) -> LossTerms:
        count = 0.0 if self.value is None else float(batch.tokens_BT.numel())
        return LossTerms(
            total=torch.tensor(count * (self.value or 0.0)), weight=torch.tensor(count)
        )


# --------------------------------------------------------------------------- figures


def nats_of(drafter: Bigram, blocks: EvaluationBlocks) -> float:
    """Sum of -log q over the stream, token by token."""
    with torch.no_grad():
        log_q = torch.log_softmax((drafter.embedding * drafter.norm) @ drafter.out.T, -1)
    pairs = itertools.pairwise(blocks.stream.tolist())
    return -sum(float(log_q[here, following]) for here, following in pairs)


@pytest.mark.parametrize("batch_blocks", [1, 2, 4, 100])
def test_a_figure_is_the_mean_over_all_held_out_tokens(tmp_path: Path, batch_blocks: int) -> None:
    blocks = held_out(batch_blocks)
    evaluation = Evaluation(batches=blocks, objective=CrossEntropy())
    trainer = make_trainer(tmp_path, evaluation=evaluation)
    report: TrainReport = trainer.train()
    assert isinstance(trainer.drafter, Bigram)
    count = len(blocks.stream) - 1
    expected = nats_of(trainer.drafter, blocks) / count
    assert report.evaluation["tokens"] == count
    assert report.evaluation["loss"] == pytest.approx(expected, rel=1e-5)
    assert report.best is None


def test_unrolled_steps_are_measured_as_they_are_learnt(tmp_path: Path) -> None:
    blocks = held_out()
    drafter = Bigram(dropout=0, num_steps=3)
    trainer = make_trainer(
        tmp_path,
        drafter=drafter,
        evaluation=Evaluation(batches=blocks, objective=CrossEntropy()),
    )
    total, count = 0.0, 0
    for index in range(blocks.num_batches):
        batch = blocks.batch(index)
        hidden = drafter.embedding[batch.tokens_BT] * drafter.norm
        for ahead in (1, 2, 3):
            log_q = torch.log_softmax(drafter.head()(hidden), -1)
            nats = -log_q.gather(-1, batch.tokens_ahead(ahead)[..., None])[..., 0]
            total += float((nats.detach() * batch.mask_ahead(ahead)).sum())
            count += int(batch.mask_ahead(ahead).sum())
    values = trainer.evaluate()
    assert values["tokens"] == count
    assert values["loss"] == pytest.approx(total / count, rel=1e-5)


def test_nothing_counted_is_no_figure_and_no_choice(tmp_path: Path) -> None:
    evaluation = choosing(objective=Constant(None))
    trainer = make_trainer(tmp_path, config=EVERY, evaluation=evaluation)
    assert trainer.train().evaluation == {"tokens": 0.0}
    with pytest.raises(BackendError, match="no evaluation chose any"):
        trainer.copy_best_into(Bigram())


def test_a_figure_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    evaluation = choosing(objective=Constant(float("inf")), better="larger")
    assert make_trainer(tmp_path, evaluation=evaluation).train().best is None


def test_while_training_a_few_batches_will_do_but_not_to_choose_by() -> None:
    blocks = EvaluationBlocks([np.ones(40, np.int32)], end_id=0, length=3, batch_blocks=1)
    evaluation = Evaluation(batches=blocks, objective=CrossEntropy())
    assert blocks.num_batches > WHILE_TRAINING
    assert evaluation.num_batches(final=False) == WHILE_TRAINING
    assert evaluation.num_batches(final=True) == blocks.num_batches
    assert replace(evaluation, chooses=True).num_batches(final=False) == blocks.num_batches


@pytest.mark.parametrize("every", [1, 2, 3, 4, 9])
def test_processes_in_turn_measure_each_batch_once_and_call_as_often(every: int) -> None:
    # 5 batches, 2 processes     0: batches 0 2 4     1: batches 1 3 (4 again, not counted)
    class Numbered:
        num_batches = 5

        def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
            tokens = torch.full((1, 2), step)
            return TrajectoryBatch(tokens_BT=tokens, loss_mask_BT=tokens >= 0)

    calls = [0] * every
    total = torch.zeros(5, 1, 2, 1, dtype=torch.float64)
    for process in range(every):

        def forward(
            batch: TrajectoryBatch, carry: Any, objective: Any, process: int = process
        ) -> dict[str, Any]:
            calls[process] += 1
            value = batch.tokens_BT[0, 0].float()
            return {"total": 10 + value, "weight": torch.ones(()), "carry": None}

        evaluation = Evaluation(batches=Numbered(), objective=CrossEntropy())
        total += sums_of(evaluation, forward, 5, 1, (process, every))
    assert total.flatten(1).tolist() == [[10.0 + index, 1.0] for index in range(5)]
    assert set(calls) == {-(-5 // every)}


# --------------------------------------------------------------------------- the best


def best_step(trainer: Trainer) -> int:
    best = trainer.train().best
    assert best is not None
    return best.step


def best_of(folder: Path) -> tuple[int, float, dict[str, Tensor]]:
    found = find_best(folder / "checkpoints" / "best", choosing())
    assert found is not None
    saved = checkpoints.load(found.path)
    assert saved.step == found.step and saved.state["value"] == found.value
    return found.step, found.value, saved.weights


@pytest.mark.parametrize("better", ["smaller", "larger"])
@pytest.mark.parametrize("objective", [CrossEntropy(), Hits()])
def test_the_weights_with_the_best_value_are_kept(
    tmp_path: Path, better: Any, objective: Any
) -> None:
    recorder = Recorder()
    evaluation = choosing(objective=objective, name="figure", better=better)
    trainer = make_trainer(tmp_path, config=EVERY, evaluation=evaluation, callbacks=[recorder])
    report = trainer.train()
    values = {step: value["figure"] for step, value in recorder.values.items()}
    assert list(values) == list(range(1, 13)) and len(set(values.values())) > 2
    choose = min if better == "smaller" else max
    expected = choose(values, key=lambda step: values[step])  # of equal ones the first
    assert report.best is not None
    assert (report.best.step, report.best.value) == (expected, values[expected])
    path = report.best.path
    assert path == tmp_path / "checkpoints" / "best" / f"step-{expected:08d}"
    assert same(checkpoints.load(path).weights, recorder.weights[expected])
    # beside the newest checkpoint, which is none of its business
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["best", "step-00000012"]
    assert len(list((tmp_path / "checkpoints" / "best").iterdir())) == 1


def test_the_best_is_somewhere_in_the_middle_of_these_runs(tmp_path: Path) -> None:
    report = make_trainer(tmp_path, config=EVERY, evaluation=choosing()).train()
    assert report.best is not None and 1 < report.best.step < 11


def test_of_equal_values_the_earlier_stays(tmp_path: Path) -> None:
    recorder = Recorder()
    evaluation = choosing(objective=Constant(0.5))
    trainer = make_trainer(tmp_path, config=EVERY, evaluation=evaluation, callbacks=[recorder])
    assert best_step(trainer) == 1
    assert same(best_of(tmp_path)[2], recorder.weights[1])


def test_the_best_weights_are_copied_with_what_was_measured_of_them(tmp_path: Path) -> None:
    counted = choosing()
    trainer = make_trainer(tmp_path, config=EVERY, evaluation=counted)
    report = trainer.train()
    assert report.best is not None
    last = weights(trainer)
    best = make_trainer(tmp_path / "best", evaluation=counted)
    assert trainer.copy_best_into(best.drafter) == report.best.step
    assert best.evaluate() == report.best.values != trainer.evaluate() == report.evaluation
    assert report.best.values["loss"] == report.best.value
    assert same(last, weights(trainer)) and not same(last, weights(best))
    # also in a process that did not train, and a finished run is not trained again
    later = make_trainer(tmp_path, config=EVERY, evaluation=counted)
    assert later.train() == report
    assert later.copy_best_into(trainer.drafter) == report.best.step
    assert same(weights(trainer), weights(best))


@pytest.mark.parametrize("cut", range(1, 12))
@pytest.mark.every(3)
def test_a_resumed_run_has_the_same_best(tmp_path: Path, cut: int) -> None:
    whole = make_trainer(tmp_path / "whole", config=EVERY, evaluation=choosing())
    report = whole.train()
    first = make_trainer(
        tmp_path / "cut", config=EVERY, evaluation=choosing(), callbacks=[StopAfter(cut)]
    )
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = make_trainer(tmp_path / "cut", config=EVERY, evaluation=choosing())
    assert second.train() == report
    step, value, kept = best_of(tmp_path / "whole")
    again = best_of(tmp_path / "cut")
    assert again[:2] == (step, value) and same(again[2], kept)


class Killed(BaseException):
    pass


class KillAt(Callback):
    """Ends training at once, after a step, its evaluation (the best is kept) or its checkpoint."""

    def __init__(self, step: int, place: str) -> None:
        self.step, self.place = step, place

    def on_step(self, run: Any, report: StepReport) -> None:
        self._kill(run, "step")

    def on_evaluate(self, run: Any, values: dict[str, float]) -> None:
        self._kill(run, "evaluation")

    def on_save(self, run: Any, path: Path) -> None:
        self._kill(run, "checkpoint")

    def _kill(self, run: Any, place: str) -> None:
        if (run.step, place) == (self.step, self.place):
            raise Killed


@pytest.fixture(scope="module", params=[0.5, 0.2])  # best in steps 3 and 8
def uncut(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainerConfig, Path, TrainReport]:
    """A run to the end, its folder, and what it reports."""
    config = replace(EVERY, learning_rate=request.param)
    folder = tmp_path_factory.mktemp("whole")
    return config, folder, make_trainer(folder, config=config, evaluation=choosing()).train()


@pytest.mark.parametrize(
    ("cut", "place"),
    [(cut, "step") for cut in (1, 4, 6, 9, 12)]
    + [(cut, "evaluation") for cut in (1, 3, 7, 8, 12)]
    + [(cut, "checkpoint") for cut in (4, 8, 12)],
)
@pytest.mark.every(5)
def test_a_killed_run_has_the_same_best(
    tmp_path: Path, uncut: tuple[TrainerConfig, Path, TrainReport], cut: int, place: str
) -> None:
    # save_every 4: steps since the last checkpoint are done, measured and chosen from again
    config, whole, report = uncut
    killed = make_trainer(
        tmp_path / "cut", config=config, evaluation=choosing(), callbacks=[KillAt(cut, place)]
    )
    with pytest.raises(Killed):
        killed.train()
    assert make_trainer(tmp_path / "cut", config=config, evaluation=choosing()).train() == report
    assert same(best_of(tmp_path / "cut")[2], best_of(whole)[2])


def keep(folder: Path, step: int, value: float, evaluation: Evaluation) -> None:
    state = {"value": value, "identity": {"data": "x", "seed": 5}, "figure": evaluation.figure}
    new = checkpoints.Checkpoint(
        step=step, weights={"w": torch.full((2,), value)}, optimizer={}, state=state
    )
    checkpoints.save(folder, new, keep=1)


@pytest.mark.parametrize("better", ["smaller", "larger"])
def test_of_two_that_a_kill_left_the_better_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, better: Any
) -> None:
    evaluation = choosing(better=better)
    first, second = (2.0, 1.0) if better == "smaller" else (1.0, 2.0)
    monkeypatch.setattr(checkpoints, "remove", lambda path: None)  # killed before it
    for order in ([(3, first), (7, second)], [(3, second), (7, first)]):
        shutil.rmtree(tmp_path / "best", ignore_errors=True)
        for step, value in order:
            keep(tmp_path / "best", step, value, evaluation)
        found = find_best(tmp_path / "best", evaluation)
        assert found is not None and found.value == second
    keep(tmp_path / "best", 9, second, evaluation)
    found = find_best(tmp_path / "best", evaluation)
    assert found is not None and found.step == 3, "of equal ones the earlier"


def test_the_new_best_stays_also_when_it_is_of_an_earlier_step(tmp_path: Path) -> None:
    keep(tmp_path, 8, 2.0, choosing())
    keep(tmp_path, 6, 1.0, choosing())
    assert [path.name for path in checkpoints.complete(tmp_path)] == ["step-00000006"]


def test_a_step_measured_again_does_not_replace_itself(tmp_path: Path) -> None:
    keep(tmp_path, 8, 2.0, choosing())
    found = find_best(tmp_path, choosing())
    assert not is_better(found, choosing(), step=8, value=1.9)
    assert is_better(found, choosing(), step=9, value=1.9)
    assert not is_better(found, choosing(), step=9, value=2.0)
    assert not is_better(found, choosing(better="larger"), step=9, value=1.9)
    assert not is_better(None, choosing(), step=9, value=None)


def test_what_another_run_left_is_not_the_best_of_this_one(tmp_path: Path) -> None:
    best = tmp_path / "checkpoints" / "best"
    keep(best, 99, -1e9, choosing())  # nothing could beat it
    found = best_step(make_trainer(tmp_path, config=EVERY, evaluation=choosing()))
    assert found != 99
    # a run that goes on: its own best stays, that of another figure or with another identity goes
    again = make_trainer(tmp_path, config=EVERY, evaluation=choosing())
    assert best_step(again) == found
    other = choosing(name="hits", objective=Hits(), better="larger")
    assert best_step(make_trainer(tmp_path, config=EVERY, evaluation=other)) == 12
    assert [path.name for path in checkpoints.complete(best)] == ["step-00000012"]


def test_a_damaged_best_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, config=EVERY, evaluation=choosing())
    report = trainer.train()
    assert report.best is not None
    (report.best.path / "weights.safetensors").write_bytes(b"half")
    with pytest.raises(BackendError, match=r"best/.*weights\.safetensors is damaged"):
        trainer.copy_best_into(Bigram())


def test_a_full_disk_while_keeping_the_best_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer: Trainer = make_trainer(tmp_path, config=EVERY, evaluation=choosing())
    real = checkpoints.save_file

    def full(tensors: Any, path: Path) -> None:
        if path.parent.parent.name == "best" and trainer.step == 2:
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(BackendError, match=r"checkpoint.*best/step-00000002"):
        trainer.train()
    assert best_of(tmp_path)[0] == 1


@dataclass
class BadAt:
    """Held-out batches that cannot be read the n-th time that the first of them is asked for."""

    source: Any
    call: int
    num_batches: int
    calls: int = 0

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        self.calls += step == 0
        if self.calls == self.call:
            raise BackendError("a held-out shard is damaged")
        batch: TrajectoryBatch = self.source.batch(step, part, parts)
        return batch


@pytest.mark.parametrize("cut", [3, 8])
@pytest.mark.parametrize("learning_rate", [0.5, 0.2])  # best in steps 3 and 8
def test_damage_met_by_an_evaluation_keeps_the_steps_that_are_done(
    tmp_path: Path, cut: int, learning_rate: float
) -> None:
    """That evaluation is made up for, so the same weights are the best."""
    config = replace(EVERY, learning_rate=learning_rate, save_every=100)
    report = make_trainer(tmp_path / "whole", config=config, evaluation=choosing()).train()
    good = choosing()
    bad = replace(good, batches=BadAt(good.batches, cut, good.batches.num_batches))
    with pytest.raises(BackendError, match="a held-out shard is damaged"):
        make_trainer(tmp_path / "cut", config=config, evaluation=bad).train()
    newest = checkpoints.latest(tmp_path / "cut" / "checkpoints")
    assert newest is not None and checkpoints.load(newest).step == cut
    assert make_trainer(tmp_path / "cut", config=config, evaluation=good).train() == report
    assert same(best_of(tmp_path / "cut")[2], best_of(tmp_path / "whole")[2])
