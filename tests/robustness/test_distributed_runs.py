"""Two processes on CPUs, weights whole on each (DDP) or a part on each (FSDP2): whole runs.

What runs in a group is a function of this module with a folder and one JSON argument. The reference
is always one process, which shards nothing.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.forks import Forks, rank
from tests.small_trainer import DRAFTERS, build, check_close, choosing, named, same, whole
from torch.distributed.tensor import DTensor

from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.callbacks import Callback, StepReport

LAYOUTS = ["data", "sharded"]
LONG = pytest.param("llama", marks=pytest.mark.full)


class SignalTo(Callback):
    """One member gets the signal, as when a scheduler reaches one machine first."""

    def __init__(self, member: int, step: int, number: int) -> None:
        self.member, self.step, self.number = member, step, number

    def on_step(self, run: Any, report: StepReport) -> None:
        if report.step == self.step and rank() == self.member:
            os.kill(os.getpid(), self.number)


def a_run(folder: Path, argument: dict[str, Any]) -> dict[str, Any]:
    """Train to the end or to the signal in `argument["cut"]`."""
    argument = dict(argument)
    cut = argument.pop("cut", None)
    trainer = build(
        folder,
        {"eval_every": 2, **argument},
        evaluation=choosing(),
        callbacks=[SignalTo(*cut)] if cut else [],
    )
    ended: int | str | None = "interrupted"
    report = None
    try:
        report = trainer.train()
        ended = None
    except SystemExit as stop:
        ended = stop.code
    except KeyboardInterrupt:
        pass
    result: dict[str, Any] = {
        "ended": ended,
        "step": trainer.step,
        "weights": {name: whole(value) for name, value in named(trainer).items()},
    }
    if report is not None:
        copy, best = (DRAFTERS[argument["drafter"]]() for _ in range(2))
        trainer.copy_into(copy)
        result |= {
            "copy": {name: value.detach() for name, value in copy.named_parameters()},
            "evaluation": report.evaluation,
            "best": report.best and [report.best.step, report.best.value, report.best.values],
            "losses": [list(entry) for entry in report.losses],
            "copied": trainer.copy_best_into(best),
            "best_weights": {name: value.detach() for name, value in best.named_parameters()},
            "again": trainer.evaluate(),
        }
        result["gathered"] = [n for n, v in named(trainer).items() if not isinstance(v, DTensor)]
    return result


@pytest.mark.parametrize("drafter", ["llama", "bigram"])
@pytest.mark.parametrize("parallel", LAYOUTS)
@pytest.mark.every(3)
def test_a_run_of_two_processes_is_the_run_of_one(
    forks: Forks, tmp_path: Path, parallel: str, drafter: str
) -> None:
    alone = a_run(tmp_path / "one", {"drafter": drafter})
    argument = {"drafter": drafter, "parallel": parallel}
    both = forks.group(a_run, tmp_path / "two", size=2, argument=argument)
    for member in both:
        assert member["ended"] is None
        check_close(member["weights"], alone["weights"], rtol=1e-3, atol=1e-4)
        assert same(member["weights"], member["copy"])
        assert member["evaluation"]["loss"] == pytest.approx(alone["evaluation"]["loss"], rel=1e-4)
        # the best: chosen alike, kept whole, and what was measured is kept with it
        assert member["best"][0] == alone["best"][0] == member["copied"]
        assert member["best"][2]["loss"] == member["best"][1]
        assert member["again"] == member["evaluation"], "copying has changed what is trained"
        assert parallel == "data" or not member["gathered"], "evaluating leaves weights whole"
        check_close(member["best_weights"], alone["best_weights"], rtol=1e-3, atol=1e-4)
    newest = checkpoints.latest(tmp_path / "two" / "checkpoints")
    assert newest is not None
    assert same(checkpoints.load(newest).weights, both[0]["weights"])


@pytest.fixture(scope="module")
def uncut(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """What each of some processes returns that train to the end, each setting once."""

    @functools.cache
    def train(size: int, **argument: Any) -> list[Any]:
        return forks.group(a_run, tmp_path_factory.mktemp("uncut"), size=size, argument=argument)

    return train


@pytest.mark.parametrize("drafter", [LONG, "noisy"])
@pytest.mark.parametrize("parallel", LAYOUTS)
@pytest.mark.parametrize(("member", "number"), [(0, signal.SIGTERM), (1, signal.SIGINT)])
@pytest.mark.every(3)
def test_a_signal_to_one_process_stops_all_and_the_run_resumes_exactly(
    forks: Forks,
    uncut: Callable[..., list[Any]],
    tmp_path: Path,
    parallel: str,
    member: int,
    number: int,
    drafter: str,
) -> None:
    argument: dict[str, Any] = {
        "drafter": drafter,
        "parallel": parallel,
        "gradient_accumulation": 2,
    }
    whole_run = uncut(2, **argument)
    cut = argument | {"cut": [member, 5, int(number)]}
    stopped = forks.group(a_run, tmp_path / "cut", size=2, argument=cut)
    expected = 143 if number == signal.SIGTERM else "interrupted"
    # all hear of it in the step after
    assert [one["ended"] for one in stopped] == [expected] * 2
    assert [one["step"] for one in stopped] == [6, 6]
    resumed = forks.group(a_run, tmp_path / "cut", size=2, argument=argument)
    for before, after in zip(whole_run, resumed, strict=True):
        assert same(before["weights"], after["weights"])
        assert same(before["best_weights"], after["best_weights"])
        assert before["best"] == after["best"]
        assert before["losses"] == after["losses"]


@pytest.mark.parametrize("drafter", [LONG, "bigram"])
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.every(2)
def test_a_run_goes_on_with_another_number_of_processes(
    forks: Forks, uncut: Callable[..., list[Any]], tmp_path: Path, first: int, drafter: str
) -> None:
    argument: dict[str, Any] = {"drafter": drafter, "parallel": "sharded"}
    alone = uncut(1, **argument)[0]
    cut = argument | {"cut": [0, 5, int(signal.SIGTERM)]}
    stopped = forks.group(a_run, tmp_path / "cut", size=first, argument=cut)[0]
    assert stopped["ended"] == 143
    newest = checkpoints.latest(tmp_path / "cut" / "checkpoints")
    assert newest is not None
    saved = checkpoints.load(newest)
    assert same(saved.weights, stopped["weights"])
    reference = build(tmp_path, {"drafter": drafter})
    reference.one_step()
    layout = reference.optimizer.state_dict()
    assert saved.optimizer["state"].keys() == layout["state"].keys()
    assert [group["params"] for group in saved.optimizer["param_groups"]] == [
        group["params"] for group in layout["param_groups"]
    ]
    for number, state in layout["state"].items():
        assert saved.optimizer["state"][number]["exp_avg"].shape == state["exp_avg"].shape
    resumed = forks.group(a_run, tmp_path / "cut", size=3 - first, argument=argument)
    for member in resumed:
        check_close(member["weights"], alone["weights"], rtol=1e-3, atol=1e-4)
        assert member["best"][0] == alone["best"][0]
