"""The training loop: its arithmetic, exact resumption, guards, signals, callbacks."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small_trainer import (
    CONFIG,
    Bigram,
    StopAfter,
    choosing,
    make_source,
    make_trainer,
    over_embeddings,
    weights,
)
from torch import nn

from draftsmith.core.types import TrajectoryBatch
from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.batches import EvaluationBlocks, PackedBlocks
from draftsmith.distill.callbacks import Callback, MetricsFile, StepReport
from draftsmith.distill.config import TrainerConfig
from draftsmith.distill.evaluation import Evaluation
from draftsmith.distill.objectives.distillation import CrossEntropy, LossTerms
from draftsmith.distill.trainer import Trainer, keyed_noise
from draftsmith.drafters.griffin import Griffin
from draftsmith.errors import BackendError, InputError

# --------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("cut", [1, 2, 5, 6, 9, 11])
@pytest.mark.every(4)
def test_a_resumed_run_ends_in_bit_equal_weights(
    tmp_path: Path, cut: int, accumulation: int
) -> None:
    config = replace(CONFIG, gradient_accumulation=accumulation)
    whole = make_trainer(tmp_path / "whole", config=config)
    report = whole.train()
    first = make_trainer(tmp_path / "cut", config=config, callbacks=[StopAfter(cut)])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    torch.manual_seed(cut)  # the state of the global generator must not matter
    second = make_trainer(tmp_path / "cut", config=config)
    resumed = second.train()
    assert first.step == cut and second.step == config.steps
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(second)[name]), name
    for mine, other in zip(
        whole.optimizer.state_dict()["state"].values(),
        second.optimizer.state_dict()["state"].values(),
        strict=True,
    ):
        assert all(torch.equal(mine[key], other[key]) for key in mine)
    assert resumed == report


def test_a_run_cut_at_every_step_ends_in_bit_equal_weights(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    for cut in range(1, CONFIG.steps):
        with pytest.raises(KeyboardInterrupt):
            make_trainer(tmp_path / "cut", callbacks=[StopAfter(cut)]).train()
    last = make_trainer(tmp_path / "cut")
    last.train()
    assert all(torch.equal(value, weights(last)[name]) for name, value in weights(whole).items())


def test_sample_order_after_resuming_is_the_uninterrupted_one(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Recorder(PackedBlocks):
        def batch(self, step: int, part: int, parts: int) -> TrajectoryBatch:
            batch = super().batch(step, part, parts)
            seen.append(batch.tokens_BT.flatten().tolist())
            return batch

    def source() -> Recorder:
        plain = make_source()
        return Recorder(plain.documents, end_id=0, length=8, batch_tokens=32, seed=0)

    make_trainer(tmp_path / "whole", source=source()).train()
    expected, seen[:] = list(seen), []
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path / "cut", source=source(), callbacks=[StopAfter(4)]).train()
    make_trainer(tmp_path / "cut", source=source()).train()
    assert seen == expected


def test_a_kill_loses_only_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.train()

    class Killed(BaseException):
        pass

    class Kill(Callback):
        def on_step(self, run: Any, report: StepReport) -> None:
            if report.step == 8:
                raise Killed

    config = replace(CONFIG, save_every=3)
    with pytest.raises(Killed):
        make_trainer(tmp_path / "cut", config=config, callbacks=[Kill()]).train()
    newest = checkpoints.latest(tmp_path / "cut" / "checkpoints")
    assert newest is not None and checkpoints.load(newest).step == 6
    last = make_trainer(tmp_path / "cut", config=config)
    last.train()
    assert all(torch.equal(value, weights(last)[name]) for name, value in weights(whole).items())


def test_a_checkpoint_of_another_run_is_refused_and_says_which_option(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    with pytest.raises(InputError, match=r"data.*'x'.*'y'"):
        make_trainer(tmp_path, identity={"data": "y", "seed": 5}).train()
    with pytest.raises(InputError, match="learning rate is constant"):
        make_trainer(tmp_path, config=replace(CONFIG, steps=20)).train()


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    other = Bigram()
    other.norm = nn.Parameter(torch.ones(4))
    with pytest.raises(BackendError, match=r"shapes.*norm"):
        make_trainer(tmp_path, drafter=other).train()


def test_the_number_of_steps_may_change_in_the_constant_part(tmp_path: Path) -> None:
    stable = replace(CONFIG, schedule="stable", decay_share=0.5)
    whole = make_trainer(tmp_path / "whole", config=replace(stable, steps=16))
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path / "cut", config=stable, callbacks=[StopAfter(5)]).train()
    longer = make_trainer(tmp_path / "cut", config=replace(stable, steps=16))
    longer.train()
    assert all(torch.equal(value, weights(longer)[name]) for name, value in weights(whole).items())


def test_a_run_that_went_on_for_longer_than_it_now_should_is_refused(tmp_path: Path) -> None:
    """Also in the warm-up, where a step does not depend on their number."""
    slow = replace(CONFIG, steps=30, warmup=20)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, config=slow, callbacks=[StopAfter(9)]).train()
    with pytest.raises(InputError, match=r"behind the end of a run of 8 steps.*--duration"):
        make_trainer(tmp_path, config=replace(slow, steps=8)).train()
    assert make_trainer(tmp_path, config=replace(slow, steps=12)).train().steps == 12


# --------------------------------------------------------------------------- arithmetic


def test_accumulation_changes_nothing_but_rounding(tmp_path: Path) -> None:
    runs = []
    for accumulation in (1, 2, 4):
        config = replace(CONFIG, gradient_accumulation=accumulation)
        trainer = make_trainer(
            tmp_path / str(accumulation), config=config, drafter=Bigram(dropout=0)
        )
        trainer.train()
        runs.append(weights(trainer))
    for other in runs[1:]:
        for name, value in runs[0].items():
            torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5)


def test_one_step_is_adamw_on_the_mean_loss(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, drafter=Bigram(dropout=0))
    reference = Bigram(dropout=0)
    batch = make_source().batch(0, 0, 1)
    hidden = reference(batch, None)[0].hidden_BTH[:, :-1]
    loss = nn.functional.cross_entropy(
        reference.head()(hidden).flatten(0, 1), batch.tokens_BT[:, 1:].flatten()
    )
    loss.backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), CONFIG.clip_norm)
    groups = [
        {"params": [reference.embedding, reference.out], "weight_decay": 0.1},
        {"params": [reference.norm], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=0.05 / 3, betas=(0.9, 0.95)).step()
    report = trainer.one_step()
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(weights(trainer)[name], value.detach(), rtol=1e-5, atol=1e-6)


def test_unrolled_steps_add_their_losses(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, drafter=Bigram(dropout=0, num_steps=3))
    batch = make_source().batch(0, 0, 1)
    reference = Bigram(dropout=0)
    hidden = reference.embedding[batch.tokens_BT] * reference.norm
    sums, count = torch.zeros(()), 0
    for ahead in (1, 2, 3):
        logits = reference.head()(hidden[:, :-ahead]).flatten(0, 1)
        wanted = batch.tokens_BT[:, ahead:].flatten()
        sums = sums + nn.functional.cross_entropy(logits, wanted, reduction="sum")
        count += len(wanted)
    (sums / count).backward()
    assert trainer.one_step().loss == pytest.approx(sums.item() / count, rel=1e-6)
    expected = nn.utils.get_total_norm(
        [p.grad for p in reference.parameters() if p.grad is not None]
    )
    fresh = make_trainer(tmp_path, drafter=Bigram(dropout=0, num_steps=3))
    assert fresh.one_step().grad_norm == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("forwards", [1, 3])
def test_gradients_of_forwards_are_their_mean_or_their_sum(tmp_path: Path, forwards: int) -> None:
    config = Griffin.Config(noise=0.0, mask_top=0, num_forwards=forwards, seed=3)
    reports = {}
    for how in ("mean", "sum"):
        drafter = over_embeddings(Griffin(replace(config, gradients=how)))
        drafter.train().requires_grad_(True)
        reports[how] = make_trainer(tmp_path / how, drafter=drafter).one_step()
    mean, summed = reports["mean"], reports["sum"]
    assert mean.grad_norm > 0
    assert summed.grad_norm == pytest.approx(forwards * mean.grad_norm, rel=1e-4)
    assert summed.loss == pytest.approx(forwards * mean.loss, rel=1e-5)


def test_the_rate_warms_up_and_decays() -> None:
    linear = TrainerConfig(steps=10, learning_rate=1.0, min_learning_rate=0.0, warmup=4)
    assert [linear.rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert linear.rate(4) == 1.0 and linear.rate(7) == 0.5 and linear.rate(10) == 0.0
    cosine = replace(linear, schedule="cosine")
    assert cosine.rate(7) == pytest.approx(0.5)
    assert cosine.rate(9) == pytest.approx(0.5 * (1 + math.cos(math.pi * 5 / 6)))
    stable = replace(linear, schedule="stable", decay_share=0.4)
    assert [stable.rate(step) for step in (4, 6, 8, 10)] == [1.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"gradient_accumulation": 0},
        {"learning_rate": float("nan")},
        {"min_learning_rate": 1.0},
        {"clip_norm": 0.0},
        {"decay_share": 0.0},
    ],
)
def test_settings_without_meaning_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        replace(CONFIG, **change)


def test_noise_is_keyed_by_step_and_leaves_the_callers_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()

    def draw(seed: int, step: int, process: int) -> float:
        with keyed_noise(seed, step, process):
            return float(torch.rand(()))

    assert draw(0, 1, 0) == draw(0, 1, 0)
    assert len({draw(0, 1, 0), draw(1, 1, 0), draw(0, 2, 0), draw(0, 1, 1)}) == 4
    assert torch.equal(before, torch.get_rng_state())


# --------------------------------------------------------------------------- guards


class Poisoned:
    """An objective whose loss is not finite at chosen calls."""

    def __init__(self, bad: Callable[[int], bool], value: float = float("nan")) -> None:
        self.bad, self.value, self.calls = bad, value, 0

    def loss(self, prediction: Any, batch: Any, head: Any) -> LossTerms:
        terms = CrossEntropy().loss(prediction, batch, head)
        self.calls += 1
        if self.bad(self.calls):
            return LossTerms(total=terms.total * self.value, weight=terms.weight)
        return terms


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path: Path, value: float) -> None:
    seen: list[StepReport] = []

    class Watch(Callback):
        def on_step(self, run: Any, report: StepReport) -> None:
            seen.append(report)

    trainer = make_trainer(
        tmp_path, objective=Poisoned(lambda call: call == 3, value), callbacks=[Watch()]
    )
    report = trainer.train()
    assert report.skipped == 1 and report.steps == CONFIG.steps
    assert [entry.skipped for entry in seen] == [step == 3 for step in range(1, 13)]
    assert all(torch.isfinite(tensor).all() for tensor in weights(trainer).values())


def test_a_skipped_step_leaves_weights_and_moments_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, objective=Poisoned(lambda call: call == 2))
    trainer.one_step()
    before = weights(trainer)
    trainer.one_step()
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_too_many_bad_steps_in_a_row_stop_the_run(tmp_path: Path) -> None:
    config = replace(CONFIG, max_skipped=3)
    with pytest.raises(BackendError, match=r"diverged: 4 steps in a row .*--learning-rate"):
        make_trainer(tmp_path, config=config, objective=Poisoned(lambda call: True)).train()
    # Now and then is not in a row.
    report = make_trainer(
        tmp_path / "b", config=config, objective=Poisoned(lambda call: call % 2 == 0)
    ).train()
    assert report.skipped == 6


class Silent:
    """An objective by which no place counts at chosen calls."""

    def __init__(self, silent: Callable[[int], bool]) -> None:
        self.silent, self.calls = silent, 0

    def loss(self, prediction: Any, batch: Any, head: Any) -> LossTerms:
        self.calls += 1
        if self.silent(self.calls):
            prediction = replace(prediction, mask_BT=torch.zeros_like(prediction.mask_BT))
        return CrossEntropy().loss(prediction, batch, head)


def test_too_many_steps_in_a_row_that_teach_nothing_stop_the_run(tmp_path: Path) -> None:
    config = replace(CONFIG, max_skipped=3)
    with pytest.raises(BackendError, match=r"4 steps.*step 4\b.*gradient"):
        make_trainer(tmp_path, config=config, objective=Silent(lambda call: True)).train()
    report = make_trainer(
        tmp_path / "b", config=config, objective=Silent(lambda call: call % 4 > 0)
    ).train()
    assert report.skipped == 0 and report.steps == CONFIG.steps


# --------------------------------------------------------------------------- signals, callbacks


def test_sigterm_saves_and_exits_with_143(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[StopAfter(4, signal.SIGTERM)])
    with pytest.raises(SystemExit) as stopped:
        trainer.train()
    assert stopped.value.code == 143
    newest = checkpoints.latest(tmp_path / "checkpoints")
    assert newest is not None and checkpoints.load(newest).step == 4


@pytest.mark.parametrize("looks", range(1, 8))
def test_whenever_the_signal_comes_the_last_step_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """It comes right after the loop has looked for one so many times."""
    count = 0
    heard = Trainer._stop.fget
    assert heard is not None

    def look(trainer: Trainer) -> int | None:
        nonlocal count
        found: int | None = heard(trainer)
        count += 1
        if count == looks:
            signal.raise_signal(signal.SIGTERM)
        return found

    monkeypatch.setattr(Trainer, "_stop", property(look))
    trainer = make_trainer(tmp_path, config=replace(CONFIG, steps=6, save_every=4))
    with pytest.raises(SystemExit) as stopped:
        trainer.train()
    assert stopped.value.code == 143
    newest = checkpoints.latest(tmp_path / "checkpoints")
    assert newest is not None and checkpoints.load(newest).step == trainer.step > 0


def test_signal_handlers_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    make_trainer(tmp_path).train()
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_callbacks_are_called_in_the_documented_order(tmp_path: Path) -> None:
    calls: list[str] = []

    class Log(Callback):
        def on_start(self, run: Any) -> None:
            calls.append("start")

        def on_step(self, run: Any, report: StepReport) -> None:
            calls.append(f"step{report.step}")

        def on_evaluate(self, run: Any, values: dict[str, float]) -> None:
            calls.append(f"evaluate{run.step}")

        def on_save(self, run: Any, path: Path) -> None:
            calls.append(f"save{run.step}")

        def on_end(self, run: Any) -> None:
            calls.append("end")

    held = EvaluationBlocks(make_source().documents, end_id=0, length=8, batch_blocks=4)
    evaluation = Evaluation(batches=held, objective=CrossEntropy())
    config = replace(CONFIG, steps=4, save_every=2, eval_every=2)
    make_trainer(tmp_path, config=config, evaluation=evaluation, callbacks=[Log()]).train()
    expected = "start step1 step2 evaluate2 save2 step3 step4 save4 evaluate4 end"
    assert calls == expected.split()


def test_metrics_of_a_resumed_run_have_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    class Crash(Callback):
        def on_step(self, run: Any, report: StepReport) -> None:
            if report.step == 7:
                with path.open("a") as file:
                    file.write('{"step": 8, "lo')  # a kill in mid-line
                raise RuntimeError("crash")

    config = replace(CONFIG, save_every=5)
    with pytest.raises(RuntimeError, match="crash"):
        make_trainer(tmp_path, config=config, callbacks=[MetricsFile(path), Crash()]).train()
    make_trainer(tmp_path, config=config, callbacks=[MetricsFile(path)]).train()
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == list(range(1, 13))


@pytest.mark.parametrize("step", [4, 8, 12])
def test_metrics_of_a_run_that_dies_behind_an_evaluation_are_those_of_a_whole_one(
    tmp_path: Path, step: int
) -> None:
    """The evaluation was made and its line is there, but no checkpoint tells of it."""

    class Crash(Callback):
        def on_evaluate(self, run: Any, values: dict[str, float]) -> None:
            if run.step == step:
                raise RuntimeError("crash")

    config = replace(CONFIG, save_every=3, eval_every=4)

    def train(folder: Path, *more: Callback) -> str:
        path = folder / "metrics.jsonl"
        metrics = [MetricsFile(path), *more]
        make_trainer(folder, config=config, evaluation=choosing(), callbacks=metrics).train()
        return path.read_text()

    with pytest.raises(RuntimeError, match="crash"):
        train(tmp_path / "cut", Crash())
    assert train(tmp_path / "cut") == train(tmp_path / "whole")
