"""The best draft length and what it gives, in a form that neither overflows nor cancels.

alpha         acceptance rate, i.i.d., in (0, 1)
gamma         drafted tokens per step
draft_cost    of one draft pass, and
target_cost   of one target pass, in one unit: parameters (the paper's memory-bound model, which
              charges gamma + 1 positions of the target as one pass) or measured seconds

Numbers or arrays that broadcast go in, float64 arrays come out. A value outside its domain is an
InputError that names it. Equations are those of "Speculative Decoding Scaling Laws".

The closed forms (4) and (13) hold W_-1(-alpha^(M/N - 1) / e), whose argument underflows from M/N of
about a thousand on and loses its digits near N = M. With l = -ln alpha, L = (M/N - 1) l and
u = -W_-1(-exp(-1 - L)) = 1 + v they become

    gamma = ln u / l - 1            2 M T = l / ((N/M) (1 - alpha) u)            v - ln(1 + v) = L

and v is found from L itself.

The best draft size follows from a target, a budget for drafts and the laws between them.
Parameters and tokens are plain counts:

    alpha(N) = A exp(L(N, D(N))) + B exp(L(M, D')) + C          cost(N) = max(N / M, floor)

The paper has D the same for all N, and no floor. The floor is ours: a pass of a small model costs
more than its share of parameters, and where that was measured no size is taken to cost less.

`TokenBudget` says how many tokens D a draft of N parameters is trained on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from draftsmith.core.speedup import Floats, check_domain, predicted_speedup, tokens_per_step
from draftsmith.errors import InputError

# v in powers of sqrt(2 L), from v - ln(1 + v) = L
_SERIES = (1.0, 1 / 3, 1 / 36, -1 / 270, 1 / 4320, 1 / 17010, -139 / 5443200)
_SERIES_SUFFICES = 1e-3
_NEWTON_STEPS = 8


def speedup(
    alpha: ArrayLike, gamma: ArrayLike, draft_cost: ArrayLike, target_cost: ArrayLike = 1.0
) -> Floats:
    """Return the speed-up over plain decoding with drafts of this length: eq. 1, or 2 M times eq.
    3."""
    draft, target = positive(draft_cost, "draft_cost"), positive(target_cost, "target_cost")
    return predicted_speedup(tokens_per_step(alpha, gamma), gamma, draft / target)


def stationary_length(
    alpha: ArrayLike, draft_cost: ArrayLike, target_cost: ArrayLike = 1.0
) -> Floats:
    """Return the gamma (-1 or more) at which the derivative of eq. 3 vanishes: eq. 13.

    Raises:
        InputError: the draft costs more than the target: there is no such point.
    """
    missed = -np.log(_rate(alpha))
    return np.asarray(np.log1p(_root(missed, draft_cost, target_cost)) / missed - 1.0)


def optimal_length(
    alpha: ArrayLike,
    draft_cost: ArrayLike,
    target_cost: ArrayLike = 1.0,
    *,
    integer: bool = False,
) -> Floats:
    """Return the gamma >= 0 with the largest speed-up, real or whole; 0: do not draft.

    A real length above 0 gains iff draft_cost / target_cost < -alpha ln(alpha) / (1 - alpha), a
    whole one iff it is < alpha.
    """
    alpha, draft = _rate(alpha), positive(draft_cost, "draft_cost")
    target = positive(target_cost, "target_cost")
    gains = draft / target < -alpha * np.log(alpha) / (1.0 - alpha)
    real = stationary_length(alpha, np.where(gains, draft, target), target)
    gamma = np.where(gains, np.maximum(real, 0.0), 0.0)
    if not integer:
        return gamma
    low = np.floor(gamma)
    more = speedup(alpha, low + 1.0, draft, target) > speedup(alpha, low, draft, target)
    return np.where(more, low + 1.0, low)


def optimal_speedup(
    alpha: ArrayLike,
    draft_cost: ArrayLike,
    target_cost: ArrayLike = 1.0,
    *,
    integer: bool = False,
) -> Floats:
    """Return the speed-up with drafts of `optimal_length`: 1 where drafting does not pay."""
    gamma = optimal_length(alpha, draft_cost, target_cost, integer=integer)
    found = speedup(alpha, gamma, draft_cost, target_cost)
    return np.where(gamma > 0, np.maximum(found, 1.0), 1.0)  # not 1 - 2e-16


def branch_root(excess: ArrayLike) -> Floats:
    """Solve v - ln(1 + v) = excess for v >= 0, so that W_-1(-exp(-1 - excess)) = -(1 + v)."""
    L = np.asarray(excess, np.float64)
    root = np.sqrt(2.0 * np.minimum(L, 1.5))  # the series is used below 1.5 only
    series = root * np.polynomial.polynomial.polyval(root, _SERIES)
    log = np.log1p(L)
    v = np.where(L < 1.5, series, L + log + log / np.maximum(L, 1.0))
    refined = L > _SERIES_SUFFICES
    for _ in range(_NEWTON_STEPS):
        safe = np.where(refined, v, 1.0)
        v = np.where(refined, safe - (safe - np.log1p(safe) - L) * (1.0 + safe) / safe, v)
    return np.asarray(v)


def positive(value: ArrayLike, name: str) -> Floats:
    """Return an array. Raises InputError unless all of it is above 0 and finite."""
    array = np.asarray(value, np.float64)
    check_domain((array > 0) & np.isfinite(array), array, name, "above 0 and finite")
    return array


def _rate(alpha: ArrayLike) -> Floats:
    array = np.asarray(alpha, np.float64)
    check_domain((array > 0) & (array < 1), array, "alpha", "above 0 and below 1")
    return array


def _root(missed: Floats, draft_cost: ArrayLike, target_cost: ArrayLike) -> Floats:
    draft, target = positive(draft_cost, "draft_cost"), positive(target_cost, "target_cost")
    check_domain(draft <= target, draft / target, "draft_cost / target_cost", "at most 1")
    # the difference first: M/N - 1 would lose its digits near N = M
    return branch_root((target - draft) / draft * missed)


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
        """Build the law from A, B, C in this order."""
        A, B, C = values
        return cls(A=A, B=B, C=C)

    def alpha(self, draft_ppl: ArrayLike, target_ppl: ArrayLike) -> Floats:
        """Evaluate the law; outside of (0, 1) the value is no acceptance rate."""
        # a tiny model has an infinite perplexity; with A = 0 that makes nan, which is as unusable
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(
                self.A * np.asarray(draft_ppl) + self.B * np.asarray(target_ppl) + self.C
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossLaw:
    """Hoffmann et al. 2022 (arXiv 2203.15556), eq. 2; the constants are those of Besiroglu et al.
    2024 (arXiv 2404.10102). Losses are in nats per token.

    The scaling-laws paper prints eq. 7 and 8 with the powers in the denominator *and* negative;
    this is the form that its results were computed with.
    """

    E: float = 1.8172
    """The irreducible loss."""
    A: float = 482.01
    nu: float = 0.3478
    B: float = 2085.43
    delta: float = 0.3658

    @classmethod
    def of(cls, values: tuple[float, ...]) -> LossLaw:
        """Build the law from E, A, nu, B, delta in this order."""
        E, A, nu, B, delta = values
        return cls(E=E, A=A, nu=nu, B=B, delta=delta)

    def __post_init__(self) -> None:
        values = {"E": self.E, "A": self.A, "nu": self.nu, "B": self.B, "delta": self.delta}
        for name, value in values.items():
            if not (np.isfinite(value) and value >= 0):
                raise InputError(f"{name} of the loss law must be 0 or more, got {value}")

    def loss(self, params: ArrayLike, tokens: ArrayLike) -> Floats:
        """Return nats per token of a model with so many parameters, trained on so many tokens."""
        N, D = np.asarray(params, np.float64), np.asarray(tokens, np.float64)
        return np.asarray(self.E + self.A * N**-self.nu + self.B * D**-self.delta)

    def perplexity(self, params: ArrayLike, tokens: ArrayLike) -> Floats:
        """Return exp of the loss (eq. 7 and 8); inf where that overflows."""
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(self.loss(params, tokens)))

    def slope(self, params: ArrayLike) -> Floats:
        """Return dL / d ln N at the same data: what a model gains from being larger."""
        return np.asarray(-self.nu * self.A * np.asarray(params, np.float64) ** -self.nu)

    def data_slope(self, tokens: ArrayLike) -> Floats:
        """Return dL / d ln D: what a model gains from more data."""
        return np.asarray(-self.delta * self.B * np.asarray(tokens, np.float64) ** -self.delta)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizingProblem:
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
        """The target's perplexity y, eq. 8."""
        return float(self.loss.perplexity(self.target_params, self.target_tokens))

    def draft_ppl(self, draft_params: ArrayLike) -> Floats:
        """Return the draft's perplexity x, eq. 7."""
        return self.loss.perplexity(draft_params, self.budget.tokens(draft_params))

    def alpha(self, draft_params: ArrayLike) -> Floats:
        """Return the acceptance rate at this draft size (eq. 5 of 7 and 8); not always in (0,
        1)."""
        return self.law.alpha(self.draft_ppl(draft_params), self.target_ppl)

    def cost(self, draft_params: ArrayLike) -> Floats:
        """Return the cost of a draft pass in parameters; that of a target pass is M."""
        params = positive(draft_params, "draft_params")
        return np.maximum(params, self.cost_floor * self.target_params)

    def length(self, draft_params: ArrayLike, *, integer: bool = False) -> Floats:
        """Return the best draft length, in tokens; 0 where the law gives no acceptance rate."""
        alpha, usable = self._usable(draft_params)
        length = optimal_length(alpha, self.cost(draft_params), self.target_params, integer=integer)
        return np.where(usable, length, 0.0)

    def speedup(self, draft_params: ArrayLike, *, integer: bool = False) -> Floats:
        """Return 2 M times eq. 9 without lengths below 0: 1 where drafting does not pay (eq. 9 is
        then 1 / (2 M), plain decoding)."""
        alpha, usable = self._usable(draft_params)
        cost = self.cost(draft_params)
        found = optimal_speedup(alpha, cost, self.target_params, integer=integer)
        return np.where(usable, found, 1.0)

    def speedup_at(self, draft_params: ArrayLike, gamma: ArrayLike) -> Floats:
        """Return 2 M times eq. 3, for drafts of this length."""
        alpha, usable = self._usable(draft_params)
        found = speedup(alpha, gamma, self.cost(draft_params), self.target_params)
        return np.where(usable, found, 1.0)

    def slope(self, draft_params: float, gamma: float) -> float:
        """Return d ln(throughput) / d ln N at this draft length; at the best one this is the whole
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


FLOPS_PER_WEIGHT = 6.0
"""FLOPs of training per token and weight: two forward, four backward (Kaplan et al. 2020, arXiv
2001.08361)."""


class Budget(Protocol):
    """D as a function of N."""

    @property
    def elasticity(self) -> float:
        """d ln D / d ln N, the same for all N."""
        ...

    @property
    def text(self) -> str:
        """The amount and the name that it was given as."""
        ...

    def tokens(self, params: ArrayLike) -> Floats:
        """Return D for drafts of these sizes."""
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
