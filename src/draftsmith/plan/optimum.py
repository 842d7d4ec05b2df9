"""The best draft for a target: its length, its size, and how sure the size is.

alpha         acceptance rate, i.i.d., in (0, 1)
gamma         drafted tokens per step; lengths below 0 are never used, so no speed-up is reported
              that does not exist (the paper's formula has one near N = M)
draft_cost    of one draft pass, and
target_cost   of one target pass, in one unit: parameters (the paper's memory-bound model, which
              charges gamma + 1 positions of the target as one pass) or measured seconds

Numbers or arrays that broadcast go in, float64 arrays come out. A value outside its domain is an
InputError that names it. Equations are those of "Speculative Decoding Scaling Laws".

The best length. The closed forms (4) and (13) hold W_-1(-alpha^(M/N - 1) / e), whose argument
underflows from M/N of about a thousand on and loses its digits near N = M. With l = -ln alpha,
L = (M/N - 1) l and u = -W_-1(-exp(-1 - L)) = 1 + v they become

    gamma = ln u / l - 1            2 M T = l / ((N/M) (1 - alpha) u)            v - ln(1 + v) = L

and v is found from L itself.

The best size, N* = argmax over N of the throughput of eq. 9, follows from a target, a budget for
drafts and the laws between them. Parameters and tokens are plain counts:

    alpha(N) = A exp(L(N, D(N))) + B exp(L(M, D')) + C          cost(N) = max(N / M, floor)

The paper has D the same for all N, and no floor. The floor is ours: a pass of a small model costs
more than its share of parameters, and where that was measured no size is taken to cost less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from draftsmith.config import LARGEST
from draftsmith.core.speedup import Floats, check_domain, predicted_speedup, tokens_per_step
from draftsmith.errors import InputError

NAMES = ("A", "B", "C")
"""Coefficients of the acceptance law."""
Z95 = 1.96
FLOPS_PER_WEIGHT = 6.0
"""FLOPs of training per token and weight: two forward, four backward (Kaplan et al. 2020, arXiv
2001.08361)."""

# v in powers of sqrt(2 L), from v - ln(1 + v) = L
_SERIES = (1.0, 1 / 3, 1 / 36, -1 / 270, 1 / 4320, 1 / 17010, -139 / 5443200)
_SERIES_SUFFICES = 1e-3
_NEWTON_STEPS = 8
_POINTS = 2001
"""Points of the grid in ln N that finds the highest peak before it is solved for."""
_STEP = 1e-4
"""Relative change of a coefficient in a derivative."""
_MOST_FACTOR = 1e6
"""An interval of N* that is wider than this factor is meaningless."""
_AT_FLOOR = 1e-9
"""Distance in ln N."""


@dataclass(frozen=True, slots=True)
class AcceptanceLaw:
    """alpha = A x + B y + C with x, y the perplexities of draft and target (eq. 5).

    The defaults are the coefficients as Table 3 prints them: those that Tables 5, 8 and 9 of the
    paper were computed with.
    """

    A: float = -0.0067
    B: float = 0.012971
    C: float = 0.642084
    cov: tuple[tuple[float, ...], ...] | None = field(default=None, kw_only=True)
    """Covariance of A, B, C as they were fitted, 3 x 3; None: not known."""
    residual: float | None = field(default=None, kw_only=True)
    """Standard deviation of a pair's rate around the law; None: not known."""

    def alpha(self, draft_ppl: ArrayLike, target_ppl: ArrayLike) -> Floats:
        """Evaluate the law; outside of (0, 1) the value is no acceptance rate."""
        # a tiny model has an infinite perplexity; with A = 0 that makes nan, which is as unusable
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(
                self.A * np.asarray(draft_ppl) + self.B * np.asarray(target_ppl) + self.C
            )


@dataclass(frozen=True, slots=True)
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

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
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
class TokenBudget:
    """How many tokens D a draft of N parameters is trained on: the same number for every size."""

    amount: float
    name: str = "draft_tokens"
    """What errors call it."""

    elasticity: ClassVar[float] = 0.0
    """d ln D / d ln N, the same for all N."""

    def __post_init__(self) -> None:
        value = positive(self.amount, self.name)
        good = (value >= 1) & (value <= LARGEST)
        check_domain(good, value, self.name, f"a count from 1 to {LARGEST:g}")

    @property
    def text(self) -> str:
        """The amount and the name that it was given as."""
        return f"{self.name} = {self.amount:.6g}"

    def tokens(self, params: ArrayLike) -> Floats:
        """Return D for drafts of these sizes."""
        return np.full(np.shape(params), self.amount)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopBudget(TokenBudget):
    """The same number of operations for every size: D = C / (6 N)."""

    name: str = "draft_flops"

    elasticity: ClassVar[float] = -1.0

    def tokens(self, params: ArrayLike) -> Floats:
        return self.amount / (FLOPS_PER_WEIGHT * positive(params, "draft_params"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SizingProblem:
    """A target, what the draft is trained on, and the laws that link them to acceptance."""

    target_params: float
    """M."""
    target_tokens: float
    """D'."""
    budget: TokenBudget
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
        return self._of(partial(optimal_length, integer=integer), draft_params, otherwise=0.0)

    def speedup(self, draft_params: ArrayLike, *, integer: bool = False) -> Floats:
        """Return 2 M times eq. 9 without lengths below 0: 1 where drafting does not pay (eq. 9 is
        then 1 / (2 M), plain decoding)."""
        return self._of(partial(optimal_speedup, integer=integer), draft_params)

    def speedup_at(self, draft_params: ArrayLike, gamma: ArrayLike) -> Floats:
        """Return 2 M times eq. 3, for drafts of this length."""
        return self._of(lambda alpha, *costs: speedup(alpha, gamma, *costs), draft_params)

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

    def _of(
        self, law: Callable[..., Floats], draft_params: ArrayLike, otherwise: float = 1.0
    ) -> Floats:
        """Return a function of alpha and both costs; `otherwise` where there is no rate."""
        alpha = self.alpha(positive(draft_params, "draft_params"))
        usable = (alpha > 0) & (alpha < 1)
        found = law(np.where(usable, alpha, 0.5), self.cost(draft_params), self.target_params)
        return np.where(usable, found, otherwise)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A draft of some size, and what to expect of it."""

    params: float
    """N."""
    ratio: float
    """N / M."""
    alpha: float
    gamma: float
    """Its best draft length, in tokens; 0: it does not pay."""
    throughput: float
    """Tokens per unit of memory-bound time, in which a pass over n parameters takes 2 n; the paper
    calls it a FLOP."""
    speedup: float
    """Over plain decoding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing:
    """The draft size to train, and how sure it is."""

    best: Draft | None
    """At N*. None: no draft pays."""
    se: float | None = None
    """Standard error of N*, first order."""
    ci95: tuple[float, float] | None = None
    """Interval of N*, from the covariance of A, B, C alone; symmetric in ln N*. None: not known."""
    sensitivity: dict[str, float] | None = None
    """d ln N* / d ln A, B and C."""
    warnings: tuple[str, ...] = ()


# --------------------------------------------------------------------------- the best length


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
    draft, target = positive(draft_cost, "draft_cost"), positive(target_cost, "target_cost")
    check_domain(draft <= target, draft / target, "draft_cost / target_cost", "at most 1")
    # the difference first: M/N - 1 would lose its digits near N = M
    root = branch_root((target - draft) / draft * missed)
    return np.asarray(np.log1p(root) / missed - 1.0)


def optimal_length(
    alpha: ArrayLike, draft_cost: ArrayLike, target_cost: ArrayLike = 1.0, *, integer: bool = False
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
    alpha: ArrayLike, draft_cost: ArrayLike, target_cost: ArrayLike = 1.0, *, integer: bool = False
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


# --------------------------------------------------------------------------- the best size


def best_draft(setting: SizingProblem, *, integer: bool = False) -> Sizing:
    """Find N* with draft lengths at their best, real or whole, for every size.

    The error of N* is that of the coefficients (A, B, C): the loss law is taken as exact.

    Raises:
        InputError: the law gives an acceptance rate for no draft size, or the speed-up grows up to
            a size where the rate reaches 1.
    """
    notes = []
    if np.any(setting.alpha(np.exp(_grid(setting))) >= 1):
        notes.append(
            "the law gives an acceptance of 1 or more for some draft sizes: they are left out"
        )
    found = _solve(setting, integer=integer)
    if found is None:
        notes.append("no draft size makes decoding faster: decode without a draft")
        return Sizing(best=None, warnings=tuple(notes))
    log_size, interior = found
    best = draft_of(setting, float(np.exp(log_size)), integer=integer)
    law, floor = setting.law, setting.cost_floor * setting.target_params
    sensitivity = spread = None
    if floor > 0 and abs(log_size - math.log(floor)) < _AT_FLOOR:
        # a corner of the speed-up: below it, smaller is no cheaper
        notes.append(
            "N* is the largest draft that costs no more than the measured cost of "
            f"{setting.cost_floor:g}: it hangs on that alone, and has no interval"
        )
    elif not interior or (gradient := _gradient(setting)) is None:
        notes.append("N* lies at the edge of the sizes that the law covers: it is no true optimum")
    else:
        changes = gradient * [law.A, law.B, law.C]
        sensitivity = dict(zip(NAMES, changes.tolist(), strict=True))
        if law.cov is not None:
            spread = float(np.sqrt(gradient @ np.asarray(law.cov) @ gradient))
    se = ci95 = None
    if spread is not None and Z95 * spread < np.log(_MOST_FACTOR):
        factor = float(np.exp(Z95 * spread))
        se, ci95 = best.params * spread, (best.params / factor, best.params * factor)
        if factor > 2:
            notes.append(f"N* is known to a factor of {factor:.1f} only")
    elif spread is not None:
        notes.append("the covariance of A, B and C is so large that it says nothing about N*")
    return Sizing(best=best, se=se, ci95=ci95, sensitivity=sensitivity, warnings=tuple(notes))


def draft_of(
    setting: SizingProblem,
    draft_params: float,
    *,
    cost_ratio: float | None = None,
    integer: bool = False,
) -> Draft:
    """Evaluate a draft of this size. `cost_ratio`: measured seconds of one draft pass over those
    of one target pass; None takes the setting's.

    Raises:
        InputError: the draft is not smaller than the target, or the law gives no rate for it.
    """
    M = setting.target_params
    if draft_params >= M:
        raise InputError(
            f"a draft of {draft_params:g} parameters is not smaller than its target of {M:g}"
        )
    alpha = float(setting.alpha(draft_params))
    if not 0 < alpha < 1:
        raise InputError(
            f"the law gives an acceptance of {alpha:.3g} for a draft of {draft_params:g} "
            "parameters: it does not hold there"
        )
    costs = (float(setting.cost(draft_params)), M) if cost_ratio is None else (cost_ratio, 1.0)
    faster = float(optimal_speedup(alpha, *costs, integer=integer))
    gamma = float(optimal_length(alpha, *costs, integer=integer))
    return Draft(
        params=draft_params,
        ratio=draft_params / M,
        alpha=alpha,
        gamma=round(gamma) if integer else gamma,
        throughput=faster / (2.0 * M),
        speedup=faster,
    )


def optimal_params(setting: SizingProblem) -> float:
    """Return N* alone. Raises InputError as `solve`."""
    return solve(setting)[0]


def solve(setting: SizingProblem) -> tuple[float, bool]:
    """Return N* alone, and whether the derivative vanishes there.

    Raises:
        InputError: no draft pays, or as `best_draft`.
    """
    found = _solve(setting, integer=False)
    if found is None:
        raise InputError(
            f"no draft pays for a target of {setting.target_params:g} parameters with these laws"
        )
    log_size, interior = found
    return float(np.exp(log_size)), interior


def best_place(setting: SizingProblem, sizes: Floats, speedups: Floats) -> int | None:
    """Return the index of the largest speed-up; None: none is above 1.

    Raises:
        InputError: the size beside it has an acceptance of 1 or more. The speed-up then grows until
            the law breaks down, and the largest is a matter of how close the sizes tried come.
    """
    best = int(np.argmax(speedups))
    if not speedups[best] > 1.0:
        return None
    near = sizes[max(best - 1, 0) : best + 2]
    broken = near[setting.alpha(near) >= 1]
    if len(broken):
        law = setting.law
        raise InputError(
            f"there is no best draft size: the law gives an acceptance of 1 or more for "
            f"{broken[0]:.3g} parameters, and the speed-up grows all the way there; check the "
            f"coefficients {law.A:g}, {law.B:g}, {law.C:g}"
        )
    return best


def no_rate(setting: SizingProblem, sizes: Floats) -> str:
    """Explain why none of these sizes has a rate: the budget, missing units, or coefficients."""
    law, M, budget = setting.law, setting.target_params, setting.budget
    least = float(np.min(setting.draft_ppl(sizes)))
    unlimited = law.alpha(setting.loss.perplexity(sizes, np.inf), setting.target_ppl)
    if np.any((unlimited > 0) & (unlimited < 1)):
        return (
            f"with a budget of {budget.text} no draft is ever accepted by these laws: it gets a "
            f"perplexity of {least:.3g} or more, where more text would do; give a larger budget, "
            "and check its unit (180B)"
        )
    return (
        "the acceptance law gives a rate between 0 and 1 for no draft size: the perplexity of the "
        f"target (M = {M:g} parameters, D' = {setting.target_tokens:g} tokens) is "
        f"{setting.target_ppl:.3g}, that of drafts ({budget.text}) {least:.3g} or more; check the "
        f"sizes and their units (180B), and the coefficients {law.A:g}, {law.B:g}, {law.C:g}"
    )


# --------------------------------------------------------------------------- inside


def positive(value: ArrayLike, name: str) -> Floats:
    """Return an array. Raises InputError unless all of it is above 0 and finite."""
    array = np.asarray(value, np.float64)
    check_domain((array > 0) & np.isfinite(array), array, name, "above 0 and finite")
    return array


def _rate(alpha: ArrayLike) -> Floats:
    array = np.asarray(alpha, np.float64)
    check_domain((array > 0) & (array < 1), array, "alpha", "above 0 and below 1")
    return array


def _grid(setting: SizingProblem) -> Floats:
    return np.linspace(0.0, np.log(setting.target_params), _POINTS)


def _solve(setting: SizingProblem, *, integer: bool) -> tuple[float, bool] | None:
    """Find ln N at the highest peak, and whether the derivative vanishes there; None where every
    size gives a speed-up of 1."""
    grid = _grid(setting)
    sizes = np.exp(grid)
    alpha = setting.alpha(sizes)
    if not np.any((alpha > 0) & (alpha < 1)):
        raise InputError(no_rate(setting, sizes))
    best = best_place(setting, sizes, setting.speedup(sizes, integer=integer))
    whole = None
    if integer and best is not None:
        # with a whole length the speed-up is smooth in N; the grid's is the best length, or as good
        # as the best to one part in a hundred thousand
        whole = float(setting.length(sizes[best], integer=True))
        best = best_place(setting, sizes, setting.speedup_at(sizes, whole))
    if best is None:
        return None

    def slope(log_size: float) -> float:
        size = float(np.exp(log_size))
        return setting.slope(size, float(setting.length(size)) if whole is None else whole)

    left, right = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    if slope(left) > 0 > slope(right):
        return float(brentq(slope, left, right, xtol=1e-14, rtol=1e-15)), True
    return float(grid[best]), False


def _gradient(setting: SizingProblem) -> Floats | None:
    """Return d ln N* / d (A, B, C), by central differences of the solved optimum (real lengths)."""
    slopes = []
    for name in NAMES:
        value = getattr(setting.law, name)
        step = _STEP * abs(value) or 1e-6
        ends = []
        for signed in (step, -step):
            law = replace(setting.law, **{name: value + signed})
            try:
                peak = _solve(replace(setting, law=law), integer=False)
            except InputError:
                return None
            if peak is None or not peak[1]:
                return None
            ends.append(peak[0])
        slopes.append((ends[0] - ends[1]) / (2.0 * step))
    return np.array(slopes)
