"""Rules of thumb for the draft size, fitted to computed optima (Tables 7, 8 and 9), and what is
wrong with them: N* is a power of M, not a line, so the constants depend on the sizes pooled.

Intervals are as in the paper: HC3 errors times 1.96. The optima are no sample: the intervals say
how far the rule is from the curve, not how sure it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from draftsmith.core.speedup import Floats
from draftsmith.errors import InputError
from draftsmith.plan.fit import Errors, Named, ols
from draftsmith.plan.optimum import (
    Z95,
    AcceptanceLaw,
    LossLaw,
    SizingProblem,
    TokenBudget,
    best_place,
    solve,
)

GridName = Literal["paper", "printed", "exact"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The sizes that are pooled: M, D and D' in all combinations."""

    draft_points_ratio: int | None
    """Draft sizes tried for the rule of N* / M (eq. 10), from 1e8 to 1e10 in equal ratios; None:
    the optimum is solved for."""
    draft_points_size: int | None
    """The same for the rule of N* (eq. 11)."""
    most_tokens: float
    """Upper end of D and D'."""
    target_params: tuple[float, float] = (13e9, 110e9)
    targets: int = 8
    least_tokens: float = 1e12
    token_counts: int = 6
    draft_params: tuple[float, float] = (1e8, 1e10)


GRIDS: dict[GridName, Grid] = {
    "paper": Grid(draft_points_ratio=800, draft_points_size=1000, most_tokens=1e14),
    "printed": Grid(draft_points_ratio=10000, draft_points_size=10000, most_tokens=1e13),
    "exact": Grid(draft_points_ratio=None, draft_points_size=None, most_tokens=1e14),
}
"""paper: what reproduces the printed digits; printed: the ranges of Table 7, which do not; exact:
the first with solved optima."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optima:
    """The best draft size for every combination."""

    target_params: Floats
    draft_tokens: Floats
    target_tokens: Floats
    draft_params: Floats
    """N*."""
    at_end: NDArray[np.bool_]
    """The best size is the first or last one tried: N* lies there or beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledFit(Errors):
    """A regression over the optima."""

    estimates: Named
    moe: Named
    r2: float
    r2_adj: float
    n: int

    def payload(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values.pop("estimates"), **values}


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerFit:
    """N* = factor M^exponent, fitted in logarithms."""

    factor: float
    exponent: float
    moe: float
    """95 % margin of the exponent."""
    ci95: tuple[float, float]
    r2_log: float
    r2: float
    """R2 of N* itself, to compare with the line of Table 9."""
    n: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Both rules of the paper, and the power law."""

    table8: PooledFit
    """N* / M = mu + M0 / M + gamma ln D + gamma' ln D' (eq. 10)."""
    table9: PooledFit
    """N* = mu M + M0 (eq. 11)."""
    power_law: PowerFit
    optima: Optima
    """Those behind Table 9 and the power law."""
    warnings: tuple[str, ...] = ()


def sweep(
    grid: GridName = "paper", *, law: AcceptanceLaw | None = None, loss: LossLaw | None = None
) -> Sweep:
    """Find the optima and fit the rules to them.

    Raises:
        InputError: for one of the targets no draft pays, or the laws give no best size.
    """
    shape = GRIDS[grid]
    law, loss = law or AcceptanceLaw(), loss or LossLaw()
    optima = find_optima(shape, shape.draft_points_size, law=law, loss=loss)
    coarse = optima
    if shape.draft_points_ratio != shape.draft_points_size:
        coarse = find_optima(shape, shape.draft_points_ratio, law=law, loss=loss)
    return Sweep(
        table8=ratio_rule(coarse),
        table9=size_rule(optima),
        power_law=power_law(optima),
        optima=optima,
        warnings=tuple(dict.fromkeys(_doubts(shape, optima, coarse))),
    )


def find_optima(grid: Grid, points: int | None, *, law: AcceptanceLaw, loss: LossLaw) -> Optima:
    """Find N* for every M, D, D': the best of so many draft sizes, or (None) solved for."""
    targets = np.geomspace(*grid.target_params, grid.targets)
    tokens = np.geomspace(grid.least_tokens, grid.most_tokens, grid.token_counts)
    M, D, Dt = (axis.ravel() for axis in np.meshgrid(targets, tokens, tokens, indexing="ij"))
    low, high = np.log10(grid.draft_params).tolist()
    sizes = None if points is None else np.logspace(low, high, points)
    best, at_end = [], []
    for target_params, draft_tokens, target_tokens in zip(M, D, Dt, strict=True):
        setting = SizingProblem(
            target_params=target_params,
            target_tokens=target_tokens,
            budget=TokenBudget(amount=draft_tokens),
            law=law,
            loss=loss,
        )
        if sizes is None:
            size, interior = solve(setting)
        else:
            place = best_place(setting, sizes, setting.speedup(sizes))
            if place is None:
                rates = setting.alpha(sizes)
                found = np.any((rates > 0) & (rates < 1))
                what = "pays" if found else "has an acceptance rate between 0 and 1"
                raise InputError(
                    f"no draft of {sizes[0]:g} to {sizes[-1]:g} parameters {what} for a target of "
                    f"{target_params:.3g} with these laws ({draft_tokens:.3g} draft tokens, "
                    f"{target_tokens:.3g} target tokens)"
                )
            size, interior = float(sizes[place]), 0 < place < len(sizes) - 1
        best.append(size)
        at_end.append(not interior)
    return Optima(
        target_params=M,
        draft_tokens=D,
        target_tokens=Dt,
        draft_params=np.array(best),
        at_end=np.array(at_end),
    )


def ratio_rule(optima: Optima) -> PooledFit:
    """Fit eq. 10 (Table 8), with natural logarithms."""
    M = optima.target_params
    tokens = {"gamma": optima.draft_tokens, "gamma_prime": optima.target_tokens}
    logs = {name: np.log(count) for name, count in tokens.items()}
    return _pooled(optima.draft_params / M, {"mu": np.ones(len(M)), "M0": 1 / M, **logs})


def size_rule(optima: Optima) -> PooledFit:
    """Fit eq. 11 (Table 9)."""
    M = optima.target_params
    return _pooled(optima.draft_params, {"mu": M, "M0": np.ones(len(M))})


def power_law(optima: Optima) -> PowerFit:
    """Regress ln N* on ln M."""
    N, M = optima.draft_params, optima.target_params
    fit = _pooled(np.log(N), {"exponent": np.log(M), "level": np.ones(len(M))})
    exponent, level = fit.estimates["exponent"], fit.estimates["level"]
    missed = np.sum((N - np.exp(level + exponent * np.log(M))) ** 2)
    return PowerFit(
        factor=float(np.exp(level)),
        exponent=exponent,
        moe=fit.moe["exponent"],
        ci95=fit.ci95["exponent"],
        r2_log=fit.r2,
        r2=float(1 - missed / np.sum((N - N.mean()) ** 2)) if np.ptp(N) else math.nan,
        n=fit.n,
    )


def _pooled(values: Floats, columns: dict[str, Floats]) -> PooledFit:
    """Regress on these columns with HC3 errors."""
    design = np.column_stack(list(columns.values()))
    scale = np.abs(design).max(axis=0)  # 1 / M in plain units beside 1 would cost digits
    fit = ols(values, design / scale).fit(cov_type="HC3")
    estimates = dict(zip(columns, (fit.params / scale).tolist(), strict=True))
    se = dict(zip(columns, (fit.bse / scale).tolist(), strict=True))
    moe = {name: Z95 * error for name, error in se.items()}
    return PooledFit(
        estimates=estimates,
        se=se,
        moe=moe,
        ci95={name: (value - moe[name], value + moe[name]) for name, value in estimates.items()},
        r2=float(fit.rsquared) if np.ptp(values) else math.nan,
        r2_adj=float(fit.rsquared_adj) if np.ptp(values) else math.nan,
        n=len(values),
    )


def _doubts(grid: Grid, *found: Optima) -> Iterator[str]:
    low, high = grid.draft_params
    for optima in found:
        count, n = int(optima.at_end.sum()), len(optima.at_end)
        if count and grid.draft_points_size is None:
            yield f"{count} of {n} optima lie at the edge of the sizes that the law covers"
        elif count:
            yield (
                f"{count} of {n} optima lie at an end of the draft sizes tried ({low:g} to "
                f"{high:g}): the rules are fitted to these ends; `--grid exact` solves for N*"
            )
