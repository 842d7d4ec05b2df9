"""The acceptance rate of a pair from counts: how many drafted tokens were accepted, how often.

Two estimates from one histogram. The paper's ("Speculative Decoding Scaling Laws", appendix B) fits
the tokens per step at several draft lengths; the binomial one counts every judged token as one
trial, which it is where acceptance is i.i.d. A test says whether that can be believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.stats import chi2_contingency

from draftsmith.plan.observations import LengthCount
from draftsmith.plan.sizing import Z95
from draftsmith.speedup import (
    Floats,
    acceptance_error,
    acceptance_from_counts,
    tokens_per_step,
)

_EXPECTED = 5.0
"""Least expected number of acceptances and of rejections in a cell of the test."""
SUSPICIOUS = 0.01
"""Below this p-value acceptance is called not i.i.d."""
_ONE_OUTCOME = {0.0: "no drafted token was accepted", 1.0: "every drafted token was accepted"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """An acceptance rate and how sure it is."""

    alpha: float
    se: float | None
    ci95: tuple[float, float] | None
    """None: not known from a single draft length, nor where the fit has no room to miss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceEstimate:
    """What the counts say."""

    least_squares: Rate
    """The paper's; its interval covers 78 to 90 % where it says 95."""
    mle: Rate
    """Binomial, with Wilson's interval."""
    iid_p_value: float | None
    """Of the hypothesis that every judged token is accepted with one probability, whatever its
    depth and the draft's length. None: too few counts to tell."""
    tokens_per_step: dict[int, float]
    """Measured, by draft length, the target's own token included."""
    by_depth: tuple[float | None, ...]
    """Rate at depth 1, 2, ..., given that all before were accepted; None: never tried."""
    warnings: tuple[str, ...]


def estimate(counts: Sequence[LengthCount]) -> AcceptanceEstimate:
    """Both estimates and the test. At least one count must be above 0."""
    tried_lengths = sorted({one.gamma for one in counts if one.count})
    trials = {gamma: _trials(counts, gamma) for gamma in tried_lengths}
    lengths = np.array(list(trials))
    steps = {gamma: tried[0] for gamma, (tried, _) in trials.items()}
    # n + 1 tokens: an iteration also gives the token of the target's own
    tokens = {gamma: 1 + accepted.sum() / steps[gamma] for gamma, (_, accepted) in trials.items()}
    tried_D, accepted_D = (_by_depth(trials, which, int(lengths.max())) for which in (0, 1))
    p_value = iid_p_value(trials)
    said = []
    if len(lengths) == 1:
        said.append("there is one draft length only: least squares has no interval")
    one_outcome = _ONE_OUTCOME.get(float(accepted_D.sum() / tried_D.sum()))
    if one_outcome is not None:
        said.append(
            f"{one_outcome}: there is nothing to test, and least squares has no interval; take "
            "that of the maximum likelihood"
        )
    elif len(tried_D) == 1:
        said.append(
            "all drafts have one token: whether acceptance depends on depth cannot be tested"
        )
    elif p_value is None:
        said.append("there are too few counts to test whether acceptance is i.i.d.")
    elif p_value < SUSPICIOUS:
        said.append(
            f"acceptance is not i.i.d. (p = {p_value:.2g}): it depends on depth or draft length, "
            "no alpha is the mean acceptance, and the intervals are too narrow; go by the measured "
            "tokens per step"
        )
    alpha = float(acceptance_from_counts(tried_D, accepted_D))
    low, high = wilson(accepted_D.sum(), tried_D.sum())
    return AcceptanceEstimate(
        least_squares=least_squares(lengths, np.array(list(tokens.values()))),
        mle=Rate(
            alpha=alpha,
            se=float(acceptance_error(tried_D, accepted_D)),
            ci95=(float(low), float(high)),
        ),
        iid_p_value=p_value,
        tokens_per_step={gamma: float(value) for gamma, value in tokens.items()},
        by_depth=tuple(
            float(a / n) if n else None for n, a in zip(tried_D, accepted_D, strict=True)
        ),
        warnings=tuple(said),
    )


def least_squares(gamma: Floats, tokens: Floats) -> Rate:
    """alpha with the least sum of (tau(alpha, gamma) - tokens)^2 over draft lengths (appendix B).

    `tokens` are measured tokens per step, 1 .. gamma + 1. The interval is the printed one: alpha
    +- 1.96 s / sqrt(J'J) with s^2 = SSR / (lengths - 1), cut off at 0 and 1.
    """

    def parts(alpha: float) -> tuple[Floats, Floats]:
        missed = tokens_per_step(alpha, gamma) - tokens
        return missed, _slopes(alpha, gamma)

    def stationary(alpha: float) -> float:
        missed, slope = parts(alpha)
        return float(missed @ slope)

    # at 0 no residual is above 0, at 1 none is below
    alpha = float(brentq(stationary, 0.0, 1.0, xtol=1e-15, rtol=1e-15))
    missed, slope = parts(alpha)
    if len(gamma) < 2 or not 0 < alpha < 1:  # at the ends it cannot miss, so SSR tells nothing
        return Rate(alpha=alpha, se=None, ci95=None)
    se = float(np.sqrt(missed @ missed / (len(gamma) - 1) / (slope @ slope)))
    ends = (max(alpha - Z95 * se, 0.0), min(alpha + Z95 * se, 1.0))
    return Rate(alpha=alpha, se=se, ci95=ends)


def wilson(accepted: ArrayLike, tried: ArrayLike) -> tuple[Floats, Floats]:
    """95 % score interval of a share (Wilson 1927): good coverage near 0 and 1 as well."""
    n, accepted = np.asarray(tried, np.float64), np.asarray(accepted, np.float64)
    share = accepted / n
    z2 = Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * np.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # the ends are exact there; rounding would leave the share itself outside
    low = np.where(accepted == 0, 0.0, np.maximum(centre - half, 0.0))
    return low, np.where(accepted == n, 1.0, np.minimum(centre + half, 1.0))


def iid_p_value(trials: dict[int, tuple[Floats, Floats]]) -> float | None:
    """Pearson's chi-square test that all cells (draft length, depth) have one rate of acceptance.

    `trials`: tried and accepted by depth, for each draft length. Cells with few trials are joined
    with the next depth, what is left at the ends of drafts with each other. Acceptance that varies
    between steps shows here as a rate that rises with depth; dependence from one step to the next
    does not show in counts.
    """
    tried = sum(float(tried.sum()) for tried, _ in trials.values())
    accepted = sum(float(accepted.sum()) for _, accepted in trials.values())
    rarer = min(accepted, tried - accepted) / tried
    if rarer == 0:
        return None
    cells, rest = [], np.zeros(2)
    for tried_D, accepted_D in trials.values():
        open_cell = np.zeros(2)
        for cell in zip(accepted_D, tried_D - accepted_D, strict=True):
            open_cell = open_cell + cell
            if open_cell.sum() * rarer >= _EXPECTED:
                cells.append(open_cell)
                open_cell = np.zeros(2)
        rest += open_cell
    if rest.sum() * rarer >= _EXPECTED or not cells:
        cells.append(rest)
    else:
        cells[-1] = cells[-1] + rest
    if len(cells) < 2:
        return None
    return float(chi2_contingency(np.array(cells), correction=False).pvalue)


# --------------------------------------------------------------------------- inside


def _trials(counts: Sequence[LengthCount], gamma: int) -> tuple[Floats, Floats]:
    """Tried and accepted at depth 1 .. gamma.

    accepted_length   0    1    2        gamma = 2
    depth 1           x    a    a        x: rejected, a: accepted
    depth 2                x    a        depth d is tried where d - 1 or more were accepted
    """
    steps = np.zeros(gamma + 1)
    for one in counts:
        if one.gamma == gamma:
            steps[one.accepted] += one.count
    at_least = np.cumsum(steps[::-1])[::-1]
    return at_least[:-1], at_least[1:]


def _by_depth(trials: dict[int, tuple[Floats, Floats]], which: int, depth: int) -> Floats:
    total = np.zeros(depth)
    for gamma, both in trials.items():
        total[:gamma] += both[which]
    return total


def _slopes(alpha: float, gamma: Floats) -> Floats:
    """d tau / d alpha = sum of j alpha^(j-1) over j = 1 .. gamma."""
    j = np.arange(1, int(gamma.max()) + 1)
    return np.asarray(np.cumsum(j * alpha ** (j - 1.0))[gamma.astype(int) - 1])
