"""Draft sizes to train for a budget, and what to expect of each.

A budget says how many tokens a draft of N parameters is trained on: a number of tokens (or hours at
a rate) for every size alike, a number of operations C for each its own, D = C / (6 N).

    alpha(N) = A exp(L(N, D(N))) + B exp(L(M, D')) + C          cost(N) = max(N / M, floor)

N* is where the speed-up at the best draft length is highest. Equations are those of "Speculative
Decoding Scaling Laws"; the floor is ours: a pass of a small model costs more than its share of
parameters, and where that was measured no size is taken to cost less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar

from draftsmith.errors import InputError
from draftsmith.plan.loss import LossLaw
from draftsmith.plan.optimum import optimal_length, optimal_speedup, positive, speedup
from draftsmith.plan.sizing import NAMES, Z95, AcceptanceLaw
from draftsmith.speedup import Floats, tokens_per_step

FLOPS_PER_WEIGHT = 6.0
"""Of training, per token: two forward, four backward (Kaplan et al. 2020, arXiv 2001.08361)."""
_POINTS = 2001
_SMALLEST = 1e3
"""Parameters of the smallest draft that is looked at."""
_STEP = 1e-4
"""Relative change of a coefficient in a derivative."""


class Budget(Protocol):
    """What pre-training one draft may take."""

    def tokens(self, params: ArrayLike) -> Floats:
        """D, for drafts of these sizes."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBudget:
    """The same number of tokens for every size."""

    amount: float

    def tokens(self, params: ArrayLike) -> Floats:
        return np.full(np.shape(params), self.amount)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopBudget:
    """The same number of operations for every size."""

    amount: float

    def tokens(self, params: ArrayLike) -> Floats:
        return self.amount / (FLOPS_PER_WEIGHT * positive(params, "draft_params"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What a ladder stands on."""

    target_params: float
    target_tokens: float
    budget: Budget
    law: AcceptanceLaw = field(default_factory=AcceptanceLaw)
    loss: LossLaw = field(default_factory=LossLaw)
    cost_floor: float = 0.0
    """Seconds of one draft pass over those of one target pass, for the smallest drafts."""

    def draft_ppl(self, params: ArrayLike) -> Floats:
        return self.loss.perplexity(params, self.budget.tokens(params))

    @property
    def target_ppl(self) -> float:
        return float(self.loss.perplexity(self.target_params, self.target_tokens))

    def alpha(self, params: ArrayLike) -> Floats:
        """As the law has it; not always in (0, 1)."""
        return self.law.alpha(self.draft_ppl(params), self.target_ppl)

    def cost_ratio(self, params: ArrayLike) -> Floats:
        share = positive(params, "draft_params") / self.target_params
        return np.maximum(share, self.cost_floor)

    def speedup(self, params: ArrayLike) -> Floats:
        """At the best draft length; 1 where drafting does not pay, or the law gives no rate."""
        alpha = self.alpha(params)
        usable = (alpha > 0) & (alpha < 1)
        found = optimal_speedup(np.where(usable, alpha, 0.5), self.cost_ratio(params))
        return np.where(usable, found, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A prediction with its 95 % interval; no ends: not known."""

    value: float
    low: float | None = None
    high: float | None = None

    def holds(self, measured: float) -> bool | None:
        """Whether this lies in the interval; None: there is none."""
        if self.low is None or self.high is None:
            return None
        return self.low <= measured <= self.high

    @property
    def reach(self) -> tuple[float, float]:
        """How far the ends are below and above; 0 where they are not known."""
        if self.low is None or self.high is None:
            return 0.0, 0.0
        return max(self.value - self.low, 0.0), max(self.high - self.value, 0.0)

    def text(self) -> str:
        """For tables."""
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """A draft of one size."""

    size: str
    """What it is called."""
    params: float
    tokens: float
    draft_ppl: float
    alpha: Estimate
    gamma: int
    """Its best whole draft length, at least 1."""
    tau: Estimate
    """Tokens per step at this length."""
    speedup: Estimate
    """Below 1: the draft slows decoding down."""
    cost_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """The sizes to train."""

    best_params: float | None
    """N*. None: no draft pays."""
    ci95: tuple[float, float] | None
    """Of N*, from the covariance of A, B, C; symmetric in ln N*. None: not known."""
    rungs: tuple[Rung, ...]
    """From small to large; the recommended one and its neighbours."""
    recommended: int | None
    """Which of them; None: no draft pays."""
    warnings: tuple[str, ...]


def ladder(ground: Ground, sizes: dict[str, float], *, rungs: int = 3) -> Ladder:
    """Of these sizes (parameters by name) the one with the highest speed-up, and its neighbours.

    Raises:
        InputError: no size is smaller than the target and has an acceptance rate by the law.
    """
    said = []
    small = {name: N for name, N in sizes.items() if ground.target_params > N}
    usable = {name: N for name, N in small.items() if 0 < float(ground.alpha(N)) < 1}
    if not usable:
        listed = ", ".join(f"{name} ({N:.3g})" for name, N in sizes.items())
        raise InputError(
            f"no size that `pretrain` knows can draft for a target of {ground.target_params:.4g} "
            f"parameters by this law: {listed} are too large, or get an acceptance rate outside of "
            "0 to 1; fit laws of your own with `plan law` and `plan fit`"
        )
    lost = [name for name in small if name not in usable]
    if lost:
        said.append(f"the law gives no acceptance rate for {', '.join(lost)}: left out")
    known = [rung(ground, name, usable[name]) for name in sorted(usable, key=usable.__getitem__)]
    best = best_params(ground)
    if best is None:
        said.append("no draft size makes decoding faster under these laws: train none")
    elif not known[0].params <= best <= known[-1].params:
        where = "below the smallest" if best < known[0].params else "above the largest"
        said.append(
            f"N* of {best:.4g} parameters is {where} size that `pretrain` has a name for: its "
            "--layers, --heads, --hidden and --intermediate give others"
        )
    fastest = max(range(len(known)), key=lambda place: known[place].speedup.value)
    first = max(0, min(fastest - rungs // 2, len(known) - rungs))
    return Ladder(
        best_params=best,
        ci95=None if best is None else _interval(ground, best),
        rungs=tuple(known[first : first + rungs]),
        recommended=None if best is None else fastest - first,
        warnings=tuple(said),
    )


def rung(ground: Ground, size: str, params: float) -> Rung:
    """What to expect of a draft of this size, whose rate by the law must lie in (0, 1).

    The interval of alpha is for a pair that has not been measured: the errors of A, B and C, and
    how far pairs lie from the law. Those of tau and speed-up follow from it at the draft length.
    """
    alpha = float(ground.alpha(params))
    ratio = float(ground.cost_ratio(params))
    gamma = max(1, round(float(optimal_length(alpha, ratio, integer=True))))
    spread = spread_of(ground, params)
    ends = None if spread is None else (alpha - Z95 * spread, alpha + Z95 * spread)
    rates = [alpha] if ends is None else [alpha, max(ends[0], 0.0), min(ends[1], 1.0)]
    return Rung(
        size=size,
        params=params,
        tokens=float(ground.budget.tokens(params)),
        draft_ppl=float(ground.draft_ppl(params)),
        alpha=Estimate(**_named(rates)),
        gamma=gamma,
        tau=Estimate(**_named([float(tokens_per_step(rate, gamma)) for rate in rates])),
        speedup=Estimate(**_named([float(speedup(rate, gamma, ratio)) for rate in rates])),
        cost_ratio=ratio,
    )


def spread_of(ground: Ground, params: float) -> float | None:
    """Standard error of the rate of a new pair; None: the law does not tell its errors."""
    law = ground.law
    if law.cov is None or law.residual is None:
        return None
    place = np.array([float(ground.draft_ppl(params)), ground.target_ppl, 1.0])
    return float(np.sqrt(place @ np.asarray(law.cov) @ place + law.residual**2))


def best_params(ground: Ground) -> float | None:
    """N*, with draft lengths at their best; None where no draft pays."""
    grid = np.linspace(np.log(_SMALLEST), np.log(ground.target_params), _POINTS)
    found = ground.speedup(np.exp(grid))
    best = int(np.argmax(found))
    if not found[best] > 1.0:
        return None
    ends = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    refined = minimize_scalar(
        lambda log_size: -float(ground.speedup(np.exp(log_size))),
        bounds=ends,
        method="bounded",
        options={"xatol": 1e-12},
    )
    return float(np.exp(refined.x))


def _interval(ground: Ground, best: float) -> tuple[float, float] | None:
    """First order in A, B and C."""
    law = ground.law
    if law.cov is None:
        return None
    slopes = []
    for name in NAMES:
        value = getattr(law, name)
        step = _STEP * abs(value) or 1e-6
        moved = [
            best_params(replace(ground, law=replace(law, **{name: value + signed})))
            for signed in (step, -step)
        ]
        if None in moved:
            return None
        up, down = np.log(np.array(moved, np.float64))
        slopes.append((up - down) / (2 * step))
    gradient = np.array(slopes)
    factor = float(np.exp(Z95 * np.sqrt(gradient @ np.asarray(law.cov) @ gradient)))
    return best / factor, best * factor


def _named(values: Sequence[float]) -> dict[str, float]:
    return dict(zip(("value", "low", "high"), values, strict=False))
