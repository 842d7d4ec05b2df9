"""What the best draft size follows from: a target, a budget for drafts, and the laws between them.

Equations are those of "Speculative Decoding Scaling Laws". Parameters and tokens are plain counts.

    alpha(N) = A exp(L(N, D(N))) + B exp(L(M, D')) + C          cost(N) = max(N / M, floor)

The paper has D the same for all N, and no floor. The floor is ours: a pass of a small model costs
more than its share of parameters, and where that was measured no size is taken to cost less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from draftsmith.plan.budget import Budget
from draftsmith.plan.loss import LossLaw
from draftsmith.plan.optimum import optimal_length, optimal_speedup, positive, speedup
from draftsmith.speedup import Floats, check_domain

NAMES = ("A", "B", "C")
"""Coefficients of the acceptance law."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceLaw:
    """alpha = A x + B y + C with x, y the perplexities of draft and target (eq. 5).

    The defaults are the coefficients as Table 3 prints them: those that Tables 5, 8 and 9 of the
    paper were computed with.
    """

    A: float = -0.0067
    B: float = 0.012971
    C: float = 0.642084
    cov: tuple[tuple[float, ...], ...] | None = None
    """Covariance of A, B, C as they were fitted, 3 x 3; None: not known."""
    residual: float | None = None
    """Standard deviation of a pair's rate around the law; None: not known."""

    @classmethod
    def of(cls, values: tuple[float, ...]) -> AcceptanceLaw:
        """From A, B, C in this order."""
        A, B, C = values
        return cls(A=A, B=B, C=C)

    def alpha(self, draft_ppl: ArrayLike, target_ppl: ArrayLike) -> Floats:
        """The law as it stands: outside of (0, 1) it is no acceptance rate."""
        # a tiny model has an infinite perplexity; with A = 0 that makes nan, which is as unusable
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(
                self.A * np.asarray(draft_ppl) + self.B * np.asarray(target_ppl) + self.C
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A target, what the draft is trained on, and the laws that link them to acceptance."""

    target_params: float
    """M."""
    target_tokens: float
    """D'."""
    budget: Budget
    """D, by the size of the draft."""
    law: AcceptanceLaw = field(default_factory=AcceptanceLaw)
    loss: LossLaw = field(default_factory=LossLaw)
    cost_floor: float = 0.0
    """Seconds of one draft pass over those of one target pass, for the smallest drafts; 0: not
    measured."""

    def __post_init__(self) -> None:
        for name in ("target_params", "target_tokens"):
            value = positive(getattr(self, name), name)
            check_domain(value >= 1, value, name, "a count of 1 or more")

    @property
    def target_ppl(self) -> float:
        """y, eq. 8."""
        return float(self.loss.perplexity(self.target_params, self.target_tokens))

    def draft_ppl(self, draft_params: ArrayLike) -> Floats:
        """x, eq. 7."""
        return self.loss.perplexity(draft_params, self.budget.tokens(draft_params))

    def alpha(self, draft_params: ArrayLike) -> Floats:
        """Acceptance rate of a draft of this size, eq. 5 of eq. 7 and 8; not always in (0, 1)."""
        return self.law.alpha(self.draft_ppl(draft_params), self.target_ppl)

    def cost(self, draft_params: ArrayLike) -> Floats:
        """Of a draft pass, in parameters: that of a target pass is M."""
        params = positive(draft_params, "draft_params")
        return np.maximum(params, self.cost_floor * self.target_params)

    def length(self, draft_params: ArrayLike, *, integer: bool = False) -> Floats:
        """The best draft length, in tokens; 0 where the law gives no acceptance rate."""
        alpha, usable = self._usable(draft_params)
        length = optimal_length(alpha, self.cost(draft_params), self.target_params, integer=integer)
        return np.where(usable, length, 0.0)

    def speedup(self, draft_params: ArrayLike, *, integer: bool = False) -> Floats:
        """2 M times eq. 9, draft lengths below 0 left out: 1 where drafting does not pay (eq. 9 is
        then 1 / (2 M), plain decoding)."""
        alpha, usable = self._usable(draft_params)
        cost = self.cost(draft_params)
        found = optimal_speedup(alpha, cost, self.target_params, integer=integer)
        return np.where(usable, found, 1.0)

    def speedup_at(self, draft_params: ArrayLike, gamma: ArrayLike) -> Floats:
        """2 M times eq. 3: with drafts of this very length."""
        alpha, usable = self._usable(draft_params)
        found = speedup(alpha, gamma, self.cost(draft_params), self.target_params)
        return np.where(usable, found, 1.0)

    def slope(self, draft_params: float, gamma: float) -> float:
        """d ln(throughput) / d ln N at this draft length; at the best one this is the whole
        derivative, since the throughput is stationary in gamma. nan where there is no rate."""
        N, M = draft_params, self.target_params
        alpha = float(self.alpha(N))
        if not 0 < alpha < 1:
            return math.nan
        loss, data = self.loss, self.loss.data_slope(self.budget.tokens(N))
        per_size = float(loss.slope(N)) + self.budget.elasticity * float(data)
        gained = self.law.A * float(self.draft_ppl(N)) * per_size
        kept = alpha ** (gamma + 1.0)
        per_alpha = 1.0 / (1.0 - alpha) - (gamma + 1.0) * (kept / alpha) / (1.0 - kept)
        dearer = gamma * N / (M + gamma * N) if self.cost_floor * M < N else 0.0
        return float(per_alpha * gained - dearer)

    def _usable(self, draft_params: ArrayLike) -> tuple[Floats, np.ndarray]:
        alpha = self.alpha(positive(draft_params, "draft_params"))
        usable = (alpha > 0) & (alpha < 1)
        return np.where(usable, alpha, 0.5), usable
