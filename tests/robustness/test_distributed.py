"""Two processes on CPUs, weights whole on each (DDP) or a part on each (FSDP2): steps, guards.

What runs in a group is a function of this module with a folder and one JSON argument. The reference
is always one process, which shards nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forks import Forks, rank
from tests.small_trainer import build, check_close, named, same, whole
from torch import Tensor
from torch.distributed.tensor import DTensor

from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill import distributed
from draftsmith.distill.callbacks import Callback, StepReport
from draftsmith.distill.config import RunConfig
from draftsmith.distill.objectives.distillation import CrossEntropy, LossTerms
from draftsmith.errors import BackendError

LAYOUTS = ["data", "sharded"]

# --------------------------------------------------------------------------- one step


def one_step(folder: Path, argument: dict[str, Any]) -> dict[str, Any]:
    trainer = build(folder, argument)
    before = {name: value.numel() for name, value in named(trainer).items()}
    report = trainer.one_step()
    parameters = named(trainer)
    return {
        "held": {
            name: value.to_local().numel() if isinstance(value, DTensor) else value.numel()
            for name, value in parameters.items()
        },
        "all": before,
        "moments": sum(
            state["exp_avg"].to_local().numel() if isinstance(state["exp_avg"], DTensor) else 0
            for state in trainer.optimizer.state.values()
        ),
        "gradients": {n: whole(p.grad) for n, p in parameters.items() if p.grad is not None},
        "weights": {name: whole(value) for name, value in parameters.items()},
        "norm": report.grad_norm,
        "loss": report.loss,
        "tokens": report.tokens,
    }


# (accumulation, clip_norm, clip_value)
STEPS = [(1, 1e9, math.inf), (2, 1e9, math.inf), (2, 0.05, math.inf), (1, math.inf, 0.003)]


@pytest.mark.parametrize(
    ("parallel", "drafter", "accumulation", "clip_norm", "clip_value"),
    [  # half of all, half of these `full`: together each pair of layout, drafter and step occurs
        pytest.param(parallel, drafter, *step, marks=() if (p + d + s) % 4 else pytest.mark.full)
        for p, parallel in enumerate(LAYOUTS)
        for d, drafter in enumerate(["llama", "sum", "griffin", "medusa"])
        for s, step in enumerate(STEPS)
        if (p + d + s) % 2 == 0
    ],
)
@pytest.mark.every(3)
def test_a_step_of_two_processes_is_the_step_of_one(
    forks: Forks,
    tmp_path: Path,
    parallel: str,
    drafter: str,
    accumulation: int,
    clip_norm: float,
    clip_value: float,
) -> None:
    clips = {"clip_norm": clip_norm, "clip_value": clip_value}
    argument = {"drafter": drafter, "gradient_accumulation": accumulation, **clips}
    alone = one_step(tmp_path / "one", argument)
    both = forks.group(
        one_step, tmp_path / "two", size=2, argument=argument | {"parallel": parallel}
    )
    for member in both:
        assert member["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert member["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert member["tokens"] == alone["tokens"] == 32
        # float32, sums in another order; the norm of the whole is 0.05 at least
        check_close(member["gradients"], alone["gradients"], rtol=1e-4, atol=1e-7)
        check_close(member["weights"], alone["weights"], rtol=1e-4, atol=1e-5)
    clipped = torch.stack([g.norm() for g in alone["gradients"].values()]).norm()
    assert (alone["norm"] > 0.05) and float(clipped) <= clip_norm * 1.001
    largest = max(float(g.abs().max()) for g in alone["gradients"].values())
    assert clip_value == math.inf or largest == pytest.approx(clip_value)
    assert same(both[0]["weights"], both[1]["weights"])


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_parts_of_unequal_size_count_by_what_is_in_them(
    forks: Forks, tmp_path: Path, parallel: str
) -> None:
    argument = {"drafter": "bigram", "rows": 3, "clip_norm": 1e9}
    alone = one_step(tmp_path / "one", argument)
    both = forks.group(
        one_step, tmp_path / "two", size=2, argument=argument | {"parallel": parallel}
    )
    for member in both:
        check_close(member["gradients"], alone["gradients"], rtol=1e-4, atol=1e-7)
        assert member["loss"] == pytest.approx(alone["loss"], rel=1e-6)


@pytest.mark.parametrize("drafter", ["llama", "bigram"])
def test_each_process_holds_half_of_every_sharded_parameter(
    forks: Forks, tmp_path: Path, drafter: str
) -> None:
    argument = {"drafter": drafter, "parallel": "sharded"}
    both = forks.group(one_step, tmp_path, size=2, argument=argument)
    alone = one_step(tmp_path / "one", {"drafter": drafter})
    for name, count in alone["all"].items():
        held = [member["held"][name] for member in both]
        rows = len(alone["weights"][name])
        assert sum(held) == count, f"{name} is held {held} of {count}"
        # an odd number of rows is divided as evenly as it goes
        assert abs(held[0] - held[1]) <= count // rows, f"{name} is held {held} of {count}"
    trained = sum(gradient.numel() for gradient in alone["gradients"].values())
    assert sum(member["moments"] for member in both) == trained


def test_half_precision_is_the_same_arithmetic_in_both_layouts(
    forks: Forks, tmp_path: Path
) -> None:
    argument = {"drafter": "llama", "precision": "bfloat16", "clip_norm": 1e9}
    data, sharded = (
        forks.group(one_step, tmp_path / kind, size=2, argument=argument | {"parallel": kind})
        for kind in LAYOUTS
    )
    wide = one_step(tmp_path / "wide", {"drafter": "llama"})
    for left, right in zip(data, sharded, strict=True):
        assert left["loss"] == right["loss"] != wide["loss"]
        check_close(left["gradients"], right["gradients"], rtol=1e-4, atol=1e-6)
        assert {value.dtype for value in right["weights"].values()} == {torch.float32}


def chosen_precision(folder: Path, argument: dict[str, Any]) -> str:
    """What a member computes in, whose processor is faster in the arithmetic of the argument."""
    own = argument["faster"][rank()]
    pytest.MonkeyPatch().setattr(distributed, "faster_precision", lambda: own)
    return distributed.precision(RunConfig(out=folder / str(rank())))


@pytest.mark.parametrize("faster", [["bfloat16", "float32"], ["float32", "bfloat16"]])
def test_processes_compute_in_one_arithmetic(
    forks: Forks, tmp_path: Path, faster: list[str]
) -> None:
    both = forks.group(chosen_precision, tmp_path, size=2, argument={"faster": faster})
    assert both == [faster[0]] * 2


def test_one_process_shards_nothing(tmp_path: Path) -> None:
    trainer = build(tmp_path, {"drafter": "llama", "parallel": "sharded"})
    assert not any(isinstance(value, DTensor) for value in named(trainer).values())


def test_recomputed_layers_give_the_same_gradients(forks: Forks, tmp_path: Path) -> None:
    argument = {"drafter": "llama", "parallel": "sharded", "gradient_accumulation": 2}
    plain = forks.group(one_step, tmp_path / "plain", size=2, argument=argument)
    argument |= {"gradient_checkpointing": True}
    again = forks.group(one_step, tmp_path / "again", size=2, argument=argument)
    assert same(plain[0]["gradients"], again[0]["gradients"])
    assert same(plain[0]["weights"], again[0]["weights"])


# --------------------------------------------------------------------------- guards


class PoisonedMember:
    """The loss of one process is not finite at some steps."""

    def __init__(self, bad: list[int]) -> None:
        self.bad, self.calls = bad, 0

    def loss(self, prediction: Any, batch: Any, head: Any) -> LossTerms:
        terms = CrossEntropy().loss(prediction, batch, head)
        self.calls += 1
        if rank() == 1 and self.calls in self.bad:
            return LossTerms(total=terms.total * float("nan"), weight=terms.weight)
        return terms


def poisoned(folder: Path, argument: dict[str, Any]) -> dict[str, Any]:
    argument = dict(argument)
    objective = PoisonedMember(argument.pop("bad"))
    moved: list[bool] = []
    state: dict[str, Tensor] = {}

    class Watch(Callback):
        def on_step(self, run: Any, report: StepReport) -> None:
            now = {name: whole(value) for name, value in named(run).items()}
            moved.append(not state or not same(state, now))
            state.update(now)

    trainer = build(folder, argument, objective=objective, callbacks=[Watch()])
    message = ""
    try:
        trainer.train()
    except BackendError as error:
        message = str(error)
    weights = {name: whole(value) for name, value in named(trainer).items()}
    return {
        "skipped": trainer.progress.skipped,
        "moved": moved,
        "error": message,
        "weights": weights,
    }


@pytest.mark.parametrize("parallel", LAYOUTS)
@pytest.mark.every(2)
def test_a_bad_loss_in_one_process_is_skipped_by_all(
    forks: Forks, tmp_path: Path, parallel: str
) -> None:
    argument = {"drafter": "llama", "parallel": parallel, "bad": [3, 4]}
    both = forks.group(poisoned, tmp_path / "some", size=2, argument=argument)
    for member in both:
        assert member["skipped"] == 2 and not member["error"]
        assert member["moved"] == [step not in (3, 4) for step in range(1, 13)]
        assert all(torch.isfinite(value).all() for value in member["weights"].values())
    assert same(both[0]["weights"], both[1]["weights"])
    argument |= {"bad": [2, 3, 4], "max_skipped": 2}
    for member in forks.group(poisoned, tmp_path / "many", size=2, argument=argument):
        assert "3 steps in a row" in member["error"]


def full_disk(folder: Path, argument: dict[str, Any]) -> dict[str, Any]:
    def refuse(*args: Any, **options: Any) -> Path:
        raise BackendError("could not write the checkpoint: the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "save", refuse)
        with pytest.raises(BackendError) as caught:
            build(folder, argument).train()
    return {"error": str(caught.value)}


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_a_failed_save_ends_all_processes_with_its_reason(
    forks: Forks, tmp_path: Path, parallel: str
) -> None:
    argument = {"drafter": "bigram", "parallel": parallel}
    for member in forks.group(full_disk, tmp_path, size=2, argument=argument):
        assert "the disk is full" in member["error"]
