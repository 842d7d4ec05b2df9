"""The draft size worth training: N* = argmax over N of the throughput of eq. 9, and how sure it is.

Equations are those of "Speculative Decoding Scaling Laws". Parameters and tokens are plain counts.
Draft lengths below 0 are never used, so no speed-up is reported that does not exist (the paper's
formula has one near N = M).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.optimize import brentq

from draftsmith.core.speedup import Floats
from draftsmith.errors import InputError
from draftsmith.plan.optimum import NAMES, SizingProblem, optimal_length, optimal_speedup

Z95 = 1.96
_POINTS = 2001
"""Points of the grid in ln N that finds the highest peak before it is solved for."""
_STEP = 1e-4
"""Relative change of a coefficient in a derivative."""
_MOST_FACTOR = 1e6
"""An interval of N* that is wider than this factor is meaningless."""
_AT_FLOOR = 1e-9
"""Distance in ln N."""


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
    best = draft_of(setting, float(np.exp(found.log_size)), integer=integer)
    if _at_floor(setting, found):
        notes.append(
            "N* is the largest draft that costs no more than the measured cost of "
            f"{setting.cost_floor:g}: it hangs on that alone, and has no interval"
        )
        return Sizing(best=best, warnings=tuple(notes))
    gradient = _gradient(setting) if found.interior else None
    if gradient is None:
        notes.append("N* lies at the edge of the sizes that the law covers: it is no true optimum")
        return Sizing(best=best, warnings=tuple(notes))
    law = setting.law
    values = np.array([law.A, law.B, law.C])
    sensitivity = dict(zip(NAMES, (gradient * values).tolist(), strict=True))
    if law.cov is None:
        return Sizing(best=best, sensitivity=sensitivity, warnings=tuple(notes))
    spread = float(np.sqrt(gradient @ np.asarray(law.cov) @ gradient))
    if not Z95 * spread < np.log(_MOST_FACTOR):
        notes.append("the covariance of A, B and C is so large that it says nothing about N*")
        return Sizing(best=best, sensitivity=sensitivity, warnings=tuple(notes))
    factor = float(np.exp(Z95 * spread))
    if factor > 2:
        notes.append(f"N* is known to a factor of {factor:.1f} only")
    return Sizing(
        best=best,
        se=best.params * spread,
        ci95=(best.params / factor, best.params * factor),
        sensitivity=sensitivity,
        warnings=tuple(notes),
    )


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
    return Draft(
        params=draft_params,
        ratio=draft_params / M,
        alpha=alpha,
        gamma=float(optimal_length(alpha, *costs, integer=integer)),
        throughput=faster / (2.0 * M),
        speedup=faster,
    )


def optimal_params(setting: SizingProblem) -> float:
    """Return N* alone.

    Raises:
        InputError: as `solve`.
    """
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
    return float(np.exp(found.log_size)), found.interior


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


# --------------------------------------------------------------------------- solving


@dataclass(frozen=True, kw_only=True, slots=True)
class _Peak:
    log_size: float
    interior: bool
    """The derivative vanishes there."""


def _grid(setting: SizingProblem) -> Floats:
    return np.linspace(0.0, np.log(setting.target_params), _POINTS)


def _solve(setting: SizingProblem, *, integer: bool) -> _Peak | None:
    """Find the highest peak; None where every size gives a speed-up of 1."""
    grid = _grid(setting)
    sizes = np.exp(grid)
    alpha = setting.alpha(sizes)
    if not np.any((alpha > 0) & (alpha < 1)):
        raise InputError(no_rate(setting, sizes))
    best = best_place(setting, sizes, setting.speedup(sizes, integer=integer))
    if best is None:
        return None
    if not integer:
        return _peak(grid, best, partial(_slope, setting, None))
    # with a whole length the speed-up is smooth in N; the grid's is the best length, or as good as
    # the best to one part in a hundred thousand
    whole = float(setting.length(sizes[best], integer=True))
    best = best_place(setting, sizes, setting.speedup_at(sizes, whole))
    return None if best is None else _peak(grid, best, partial(_slope, setting, whole))


def _peak(grid: Floats, best: int, slope: Callable[[float], float]) -> _Peak:
    """Solve for the highest peak between the neighbours of the grid's best point."""
    left, right = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    place, interior = float(grid[best]), slope(left) > 0 > slope(right)
    if interior:
        place = float(brentq(slope, left, right, xtol=1e-14, rtol=1e-15))
    return _Peak(log_size=place, interior=interior)


def _at_floor(setting: SizingProblem, peak: _Peak) -> bool:
    """Check for the corner of the speed-up: below it, smaller is no cheaper."""
    floor = setting.cost_floor * setting.target_params
    return floor > 0 and abs(peak.log_size - math.log(floor)) < _AT_FLOOR


def _slope(setting: SizingProblem, gamma: float | None, log_size: float) -> float:
    """Return d ln(throughput) / d ln N at ln N, with this draft length or (None) the best one."""
    size = float(np.exp(log_size))
    return setting.slope(size, float(setting.length(size)) if gamma is None else gamma)


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
            if peak is None or not peak.interior:
                return None
            ends.append(peak.log_size)
        slopes.append((ends[0] - ends[1]) / (2.0 * step))
    return np.array(slopes)
