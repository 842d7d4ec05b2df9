"""What is measured while training goes on, and the weights of the best measurement.

    checkpoints/step-00000200/      the newest ones: what an interrupted run continues from
    checkpoints/best/step-00000150/ the weights of the best evaluation so far, with its value

A better one is written beside the kept one, made visible in one rename, and only then the other is
removed: at every moment there is one. After a kill between the two there are both; the value says
which counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.checkpoint import Checkpoint
from draftsmith.distill.objective import Objective
from draftsmith.errors import InputError
from draftsmith.types import TrajectoryBatch

Forward = Callable[[TrajectoryBatch, Any, Objective], dict[str, Any]]


class EvaluationSource(Protocol):
    """Held-out batches."""

    @property
    def num_batches(self) -> int: ...
    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        """Part `part` of `parts` of the batch number `step`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A figure: the mean of `objective` over all that it counts in `batches`."""

    batches: EvaluationSource
    objective: Objective
    name: str = "loss"
    """What the figure is called in reports."""
    better: Literal["smaller", "larger"] = "smaller"
    chooses: bool = False
    """The weights with the best value of this figure are kept. It then always sees all batches."""
    weight_name: str | None = None
    """Reports also say how much was counted, under this name; None: they do not."""
    while_training: int | None = 16
    """How many batches are looked at before the end of training; None: all."""

    num_sums: ClassVar[int] = 1
    """How many totals and weights the objective gives per step of the drafter; subclasses report
    several figures from them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Under which it reports (figures of each step: those of the first)."""
        return (self.name,) if self.weight_name is None else (self.name, self.weight_name)

    @property
    def sign(self) -> int:
        """Times a value: the smallest is the best."""
        return 1 if self.better == "smaller" else -1

    @property
    def figure(self) -> str:
        """By what it chooses."""
        return f"{self.better} {self.name}"

    def num_batches(self, final: bool) -> int:
        """How many batches this evaluation takes."""
        whole = self.batches.num_batches
        if final or self.chooses or self.while_training is None:
            return whole
        return min(whole, self.while_training)

    def report(self, totals_SF: Tensor, weights_SF: Tensor) -> dict[str, float]:
        """What sums over all batches come to (S steps of the drafter, F sums of each); no figure
        when nothing was counted."""
        total, weight = float(totals_SF.sum()), float(weights_SF.sum())
        values = {self.name: total / weight} if weight > 0 else {}
        return values if self.weight_name is None else {**values, self.weight_name: weight}


def chooser(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The evaluation that chooses; InputError on two of them, or on one name for two figures."""
    names = [name for evaluation in evaluations for name in evaluation.names]
    if len(set(names)) < len(names):
        raise InputError(f"evaluations need different names, these are {', '.join(names)}")
    marked = [evaluation for evaluation in evaluations if evaluation.chooses]
    if len(marked) > 1:
        both = " and ".join(evaluation.name for evaluation in marked)
        raise InputError(f"one evaluation chooses the best weights, not {both}")
    return marked[0] if marked else None


def sums_of(
    evaluation: Evaluation,
    forward: Forward,
    num_batches: int,
    num_steps: int,
    turns: tuple[int, int],
) -> Tensor:
    """[N, S, 2, F]: totals and weights of each step in this process's batches, 0 in the rows of the
    others' (N batches, S steps, F sums).

    `turns`: number of this process, and of how many. They take turns, and all call the model as
    often (sharded weights need all of them). Summed over processes and then over rows, the result
    is the same for any number of processes:

        5 batches, 2 processes     0: batches 0 2 4     1: batches 1 3 (4 again, not counted)
    """
    first, every = turns
    sums_NS2F = torch.zeros(num_batches, num_steps, 2, evaluation.num_sums, dtype=torch.float64)
    for start in range(0, num_batches, every):
        index = min(start + first, num_batches - 1)
        batch = evaluation.batches.batch(index)
        carry: Any = None
        for step in range(num_steps):
            out = forward(batch, carry, evaluation.objective)
            carry = out["carry"]
            sums = torch.stack([out["total"], out["weight"]]).double().cpu()
            if start + first < num_batches:
                sums_NS2F[index, step] = sums.view(2, evaluation.num_sums)
    return sums_NS2F


# --------------------------------------------------------------------------- the best weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best evaluation so far."""

    step: int
    value: float
    values: dict[str, float]
    """All figures of that evaluation."""
    path: Path
    """A checkpoint of weights alone."""


def keep_best(folder: Path, evaluation: Evaluation, weights: Checkpoint) -> None:
    """Write the new best to `folder` and remove what was there; BackendError (disk, rights).

    `weights.state` holds its `value`, all its `values`, and the `identity` of the run.
    """
    state = {**weights.state, "figure": evaluation.figure}
    checkpoints.save(folder, replace(weights, state=state), keep=1)


def find_best(folder: Path, evaluation: Evaluation) -> Best | None:
    """The best one in `folder`, of equal ones the earlier; BackendError names a damaged file."""
    found = []
    for path in checkpoints.complete(folder):
        state = checkpoints.read_state(path)
        value = state["value"]
        values = state.get("values", {evaluation.name: value})  # older runs kept the one figure
        found.append(Best(step=state["step"], value=value, values=values, path=path))
    return min(found, key=lambda best: (evaluation.sign * best.value, best.step), default=None)


def discard_others(folder: Path, evaluation: Evaluation, identity: dict[str, Any] | None) -> None:
    """Remove what another run, or a choice by another figure, has left in `folder`.

    `identity`: of the run that goes on; None: a run begins, and everything is of another one.
    """
    for path in checkpoints.complete(folder):
        state = None if identity is None else checkpoints.read_state(path)
        if state is None or (state["identity"], state["figure"]) != (identity, evaluation.figure):
            checkpoints.remove(path)


def is_better(best: Best | None, evaluation: Evaluation, *, step: int, value: float | None) -> bool:
    """Whether this value replaces the best: equal ones do not, nor a repetition of its own step."""
    if value is None or not math.isfinite(value):
        return False
    if best is None:
        return True
    return step != best.step and evaluation.sign * value < evaluation.sign * best.value
