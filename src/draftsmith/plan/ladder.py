"""Draft sizes to train for a budget, and what to expect of each: N* / 2, N* and 2 N*.

A size that has a name is taken where it is near; else one is built for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.errors import InputError
from draftsmith.plan.optimum import optimal_length, speedup
from draftsmith.plan.setting import Setting
from draftsmith.plan.sizing import Z95, best_draft, no_rate
from draftsmith.speedup import tokens_per_step

NEAR = 1.3
"""A size within this factor of a wanted one stands for it."""
_STEPS = (0.5, 1.0, 2.0)
"""Of the rungs, in N*."""


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
    """From small to large: N* / 2, N* and 2 N*; where no draft pays, all sizes that have names."""
    recommended: int | None
    """The fastest of them; None: no draft pays."""
    warnings: tuple[str, ...]


def ladder(
    setting: Setting, named: Mapping[str, float], build: Callable[[float], tuple[str, float]]
) -> Ladder:
    """The rungs around N*.

    Args:
        named: sizes that have a name, in parameters.
        build: name and parameters of a draft of about so many parameters.

    Raises:
        InputError: there is no best size by these laws (see `best_draft`), or no size that can be
            built is smaller than the target and has an acceptance rate.
    """
    sizing = best_draft(setting)
    said = list(sizing.warnings)
    if sizing.best is None:
        best, sizes = None, dict(named)
    else:
        best = sizing.best.params
        wanted = [step * best for step in _STEPS]
        found = [_near(named, size) or build(size) for size in wanted]
        sizes = dict(found)
        _, middle = found[1]
        if not _is_near(middle, best):
            said.append(
                f"no draft of N* = {best:.4g} parameters can be built: the nearest has {middle:.4g}"
            )
    rungs = _rungs(setting, sizes, said)
    fastest = max(range(len(rungs)), key=lambda place: rungs[place].speedup.value)
    pays = best is not None and rungs[fastest].speedup.value > 1
    if best is not None and not pays:
        said.append("none of the drafts that can be built makes decoding faster: train none")
    return Ladder(
        best_params=best,
        ci95=sizing.ci95,
        rungs=rungs,
        recommended=fastest if pays else None,
        warnings=tuple(said),
    )


def rung(setting: Setting, size: str, params: float) -> Rung:
    """What to expect of a draft of this size, whose rate by the law must lie in (0, 1).

    The interval of alpha is for a pair that has not been measured: the errors of A, B and C, and
    how far pairs lie from the law. Those of tau and speed-up follow from it at the draft length.
    """
    alpha = float(setting.alpha(params))
    ratio = float(setting.cost(params)) / setting.target_params
    gamma = max(1, round(float(optimal_length(alpha, ratio, integer=True))))
    spread = spread_of(setting, params)
    ends = None if spread is None else (alpha - Z95 * spread, alpha + Z95 * spread)
    rates = [alpha] if ends is None else [alpha, max(ends[0], 0.0), min(ends[1], 1.0)]
    return Rung(
        size=size,
        params=params,
        tokens=float(setting.budget.tokens(params)),
        draft_ppl=float(setting.draft_ppl(params)),
        alpha=Estimate(**_named(rates)),
        gamma=gamma,
        tau=Estimate(**_named([float(tokens_per_step(rate, gamma)) for rate in rates])),
        speedup=Estimate(**_named([float(speedup(rate, gamma, ratio)) for rate in rates])),
        cost_ratio=ratio,
    )


def spread_of(setting: Setting, params: float) -> float | None:
    """Standard error of the rate of a new pair; None: the law does not tell its errors."""
    law = setting.law
    if law.cov is None or law.residual is None:
        return None
    place = np.array([float(setting.draft_ppl(params)), setting.target_ppl, 1.0])
    return float(np.sqrt(place @ np.asarray(law.cov) @ place + law.residual**2))


# --------------------------------------------------------------------------- inside


def _near(named: Mapping[str, float], wanted: float) -> tuple[str, float] | None:
    """The nearest size with a name, if it is near."""
    near = {name: params for name, params in named.items() if _is_near(params, wanted)}
    if not near:
        return None
    name = min(near, key=lambda one: abs(math.log(near[one] / wanted)))
    return name, near[name]


def _is_near(params: float, wanted: float) -> bool:
    return abs(math.log(params / wanted)) <= math.log(NEAR)


def _rungs(setting: Setting, sizes: Mapping[str, float], said: list[str]) -> tuple[Rung, ...]:
    """Those that can draft, from small to large; `said` gets a sentence about others."""
    M = setting.target_params
    lost = {name: _unfit(setting, params) for name, params in sizes.items()}
    usable = sorted((name for name in sizes if lost[name] is None), key=sizes.__getitem__)
    if usable:
        said += [
            f"{name} ({sizes[name]:.4g} parameters) is left out: {why}"
            for name, why in lost.items()
            if why is not None
        ]
        return tuple(rung(setting, name, sizes[name]) for name in usable)
    small = np.array([params for params in sizes.values() if params < M])
    if len(small) and not np.any(setting.alpha(small) > 0):
        raise InputError(no_rate(setting, small))
    listed = ", ".join(f"{name} ({params:.3g})" for name, params in sizes.items())
    raise InputError(
        f"no draft that can be built is smaller than a target of {M:.4g} parameters and has an "
        f"acceptance rate between 0 and 1 by this law: tried {listed}; fit laws of your own with "
        "`plan law` and `plan fit`"
    )


def _unfit(setting: Setting, params: float) -> str | None:
    if params >= setting.target_params:
        return "it is not smaller than the target"
    alpha = float(setting.alpha(params))
    if 0 < alpha < 1:
        return None
    return f"the law gives it an acceptance of {alpha:.3g}"


def _named(values: Sequence[float]) -> dict[str, float]:
    return dict(zip(("value", "low", "high"), values, strict=False))
