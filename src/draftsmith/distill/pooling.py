"""Objectives that normalise over a whole step, however many parts it is divided into.

    step      part 0   part 1   ..      parts of this process, then of all
    count     [2]    + [2]    + ..      a pass without gradient
    learn     loss     loss     ..      with what all parts said

A step that is one part needs no pass of its own: the loss counts what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from draftsmith.distill.objective import Head, LossTerms, Objective
from draftsmith.types import DraftPrediction, TrajectoryBatch


@runtime_checkable
class Pooling(Protocol):
    """An objective whose loss may hang on what all places of a step say together."""

    @property
    def pools(self) -> bool:
        """Whether it does, with its options."""

    def count(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head) -> Tensor:
        """[2] float64, no gradient: what is summed over all parts."""

    def given(self, counts: Tensor) -> Objective:
        """The objective of a step with these sums."""


@dataclass(frozen=True, kw_only=True)
class Counting:
    """A pass that only counts: an objective whose two terms are the two sums."""

    objective: Pooling

    def loss(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head) -> LossTerms:
        total, weight = self.objective.count(prediction, batch, head)
        return LossTerms(total=total, weight=weight)


Forward = Callable[[TrajectoryBatch, Any, Objective], dict[str, Any]]
"""A batch, what the steps before it carry, and an objective: `Learner.forward`."""


def pools(objective: Objective) -> bool:
    """Whether it has to hear of all parts of a step."""
    return isinstance(objective, Pooling) and objective.pools


def pooled(
    objective: Objective,
    batches: Iterable[TrajectoryBatch],
    num_steps: int,
    forward: Forward,
    add: Callable[[Tensor], Tensor],
) -> Sequence[Objective]:
    """The objective of each of the drafter's steps. `batches`: the parts of this process; `add`:
    over all processes, every one of which calls this."""
    assert isinstance(objective, Pooling)
    counts = torch.zeros(num_steps, 2, dtype=torch.float64)
    with torch.no_grad():
        for batch in batches:
            carry = None
            for sums in counts:
                out = forward(batch, carry, Counting(objective=objective))
                carry = out["carry"]
                sums += torch.stack([out["total"], out["weight"]]).cpu()
    return [objective.given(own) for own in add(counts)]
