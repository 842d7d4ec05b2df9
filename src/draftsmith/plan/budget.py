"""What pre-training one draft may take: how many tokens D a draft of N parameters is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from draftsmith.plan.optimum import positive
from draftsmith.speedup import Floats, check_domain

FLOPS_PER_WEIGHT = 6.0
"""Of training, per token: two forward, four backward (Kaplan et al. 2020, arXiv 2001.08361)."""


class Budget(Protocol):
    """D as a function of N."""

    @property
    def elasticity(self) -> float:
        """d ln D / d ln N, the same for all N."""
        ...

    @property
    def text(self) -> str:
        """What it amounts to, and what it was given as."""
        ...

    def tokens(self, params: ArrayLike) -> Floats:
        """D, for drafts of these sizes."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBudget:
    """The same number of tokens for every size."""

    amount: float
    name: str = "draft_tokens"
    """What errors call it."""

    def __post_init__(self) -> None:
        _check(self.amount, self.name)

    @property
    def elasticity(self) -> float:
        return 0.0

    @property
    def text(self) -> str:
        return f"{self.name} = {self.amount:.6g}"

    def tokens(self, params: ArrayLike) -> Floats:
        return np.full(np.shape(params), self.amount)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopBudget:
    """The same number of operations for every size: D = C / (6 N)."""

    amount: float
    name: str = "draft_flops"
    """What errors call it."""

    def __post_init__(self) -> None:
        _check(self.amount, self.name)

    @property
    def elasticity(self) -> float:
        return -1.0

    @property
    def text(self) -> str:
        return f"{self.name} = {self.amount:.6g}"

    def tokens(self, params: ArrayLike) -> Floats:
        return self.amount / (FLOPS_PER_WEIGHT * positive(params, "draft_params"))


def _check(amount: float, name: str) -> None:
    value = positive(amount, name)
    check_domain(value >= 1, value, name, "a count of 1 or more")
