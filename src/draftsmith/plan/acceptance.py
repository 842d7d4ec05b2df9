"""The acceptance rate of a pair from counts: how many drafted tokens were accepted, how often.

Two estimates from one histogram. The paper's ("Speculative Decoding Scaling Laws", appendix B) fits
the tokens per step at several draft lengths; the binomial one counts every judged token as one
trial. A test shows whether all places have one rate.

Where counts name their prompts, prompts are the sampling units of intervals and test; elsewhere
every judged token counts as an independent draw. Tokens of one text are not independent, least of
all where the same prompts are decoded at several draft lengths (at temperature 0 that is the very
same text each time). What a prompt adds to the error of an estimate is one number u, those of
different prompts are independent, and over n prompts

    variance of the estimate = n / (n - 1) * sum of u^2

Shape letters: P prompts (one where they have no names), G draft lengths, L accepted lengths,
D depths, C cells (places whose counts are compared), F flips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import stdtrit
from scipy.stats import chi2_contingency

from draftsmith.core.speedup import Floats, tokens_per_step
from draftsmith.plan.observations import LengthCount
from draftsmith.plan.optimum import Z95

_FLIPS = 1999
"""Sign flips of the test: no p-value is below 1 / 2000."""
_NUMBERS = 1 << 22
"""Signs in memory at once."""
_ROUNDING = 1e-9


def error(added_P: Floats) -> float:
    """Return the standard error, from what each of two prompts or more adds to the error."""
    count = len(added_P)
    return math.sqrt(count / (count - 1) * float(added_P @ added_P))


def quantile(count: int) -> float:
    """Return the half-width of a 95 % interval over so many prompts in standard errors
    (Student)."""
    return float(stdtrit(count - 1, 0.975))


def flip_p_value(missed_PC: Floats, weight_C: Floats) -> float:
    """Test the hypothesis that the columns of `missed_PC` have mean 0. The p-value is how often
    sum of (column sum)^2 / weight is as large when each prompt's row gets a random sign.

    Rows may have any correlation between cells, which signs leave as it is; the p-value is right
    for few prompts, too, where rows are as likely as their opposites. Signs are keyed: equal counts
    give equal p-values.
    """
    rng = np.random.default_rng(0)
    found = float((missed_PC.sum(0) ** 2 / weight_C).sum())
    as_large, left = 1, _FLIPS
    while left:
        block = min(left, max(1, _NUMBERS // len(missed_PC)))
        signs_FP = 2.0 * rng.integers(0, 2, (block, len(missed_PC))) - 1.0
        flipped_F = ((signs_FP @ missed_PC) ** 2 / weight_C).sum(1)
        as_large += int(np.sum(flipped_F >= found * (1 - _ROUNDING)))
        left -= block
    return as_large / (_FLIPS + 1)


_EXPECTED = 5.0
"""Least expected number of acceptances and of rejections in a cell of the test."""
SUSPICIOUS = 0.01
"""Below this p-value acceptance is called not i.i.d."""
_ONE_OUTCOME = {0.0: "no drafted token was accepted", 1.0: "every drafted token was accepted"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RateEstimate:
    """An acceptance rate and how sure it is."""

    alpha: float
    se: float | None
    ci95: tuple[float, float] | None
    """None: not known from a single draft length or prompt, nor where a fit has no room to miss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceEstimate:
    """Both estimates of the acceptance rate, and the test."""

    least_squares: RateEstimate
    """The paper's. The printed interval covers 78 to 90 % where it says 95, that by prompts 95."""
    mle: RateEstimate
    """Accepted / tried, with Wilson's interval."""
    iid_p_value: float | None
    """p-value of the hypothesis that every judged token is accepted with one probability, whatever
    its depth and the draft's length. None: too few counts to tell."""
    tokens_per_step: dict[int, float]
    """Measured, by draft length, the target's own token included."""
    by_depth: tuple[float | None, ...]
    """The rate at depth 1, 2, ..., given that all before were accepted; None: never tried."""
    warnings: tuple[str, ...]


def estimate(counts: Sequence[LengthCount]) -> AcceptanceEstimate:
    """Compute both estimates and the test. At least one count must be above 0."""
    trials = _trials(counts)
    tried_PGD, accepted_PGD = trials.tried_PGD, trials.accepted_PGD
    known = any(one.prompt is not None for one in counts)
    alone = known and len(tried_PGD) == 1
    # + 1: a step also gives the token of the target's own
    tokens_G = 1 + accepted_PGD.sum((0, 2)) / trials.steps_PG.sum(0)
    tried_D, accepted_D = tried_PGD.sum((0, 1)), accepted_PGD.sum((0, 1))
    fitted = least_squares(trials.lengths_G, tokens_G)
    if known:
        fitted = _by_prompts(fitted, trials)
        likely = share_of_prompts(accepted_PGD.sum((1, 2)), tried_PGD.sum((1, 2)))
    else:
        likely = _share(float(tried_D.sum()), float(accepted_D.sum()))
    p_value = None if alone else iid_p_value(trials)
    notes = []
    if alone:
        notes.append("all counts are of one prompt: there are no intervals, and nothing is tested")
    elif len(tokens_G) == 1 and not known:
        notes.append("there is one draft length only: least squares has no interval")
    if likely.alpha in _ONE_OUTCOME:
        notes.append(
            f"{_ONE_OUTCOME[likely.alpha]}: there is nothing to test, and least squares has no "
            "interval; take that of the maximum likelihood"
        )
    elif len(tried_D) == 1:
        notes.append(
            "all drafts have one token: whether acceptance depends on depth cannot be tested"
        )
    elif p_value is None:
        notes.append("there are too few counts to test whether acceptance is i.i.d.")
    elif p_value < SUSPICIOUS:
        narrow = "" if known else ", and the intervals are too narrow"
        notes.append(
            f"acceptance is not i.i.d. (p = {p_value:.2g}): it depends on depth or draft length, "
            f"no alpha is the mean acceptance{narrow}; go by the measured tokens per step"
        )
    return AcceptanceEstimate(
        least_squares=fitted,
        mle=likely,
        iid_p_value=p_value,
        tokens_per_step=dict(zip(trials.lengths_G.tolist(), tokens_G.tolist(), strict=True)),
        by_depth=tuple(
            accepted / tried if tried else None
            for tried, accepted in zip(tried_D.tolist(), accepted_D.tolist(), strict=True)
        ),
        warnings=tuple(notes),
    )


def share_of_prompts(accepted_P: Floats, tried_P: Floats) -> RateEstimate:
    """Return accepted / tried with prompts as sampling units, each with trials of its own.

    The interval is Wilson's for as many independent trials as would be as noisy, with Student's t.
    Where all outcomes are equal the prompts themselves are the trials. One prompt has no interval.
    """
    total, prompts = float(tried_P.sum()), len(tried_P)
    alpha = float(accepted_P.sum() / total)
    if prompts < 2:
        return RateEstimate(alpha=alpha, se=None, ci95=None)
    if alpha in _ONE_OUTCOME:
        return RateEstimate(alpha=alpha, se=None, ci95=wilson(alpha * prompts, prompts))
    se = error((accepted_P - alpha * tried_P) / total)
    trials = alpha * (1 - alpha) / se**2 if se > 0 else total
    ends = wilson(alpha * trials, trials, quantile(prompts))
    return RateEstimate(alpha=alpha, se=se, ci95=ends)


def least_squares(gamma: NDArray[np.int64], tokens: Floats) -> RateEstimate:
    """Minimise the sum of (tau(alpha, gamma) - tokens)^2 over draft lengths (appendix B).

    `tokens` are measured tokens per step, 1 .. gamma + 1. The interval is the printed one: alpha
    +- 1.96 s / sqrt(J'J) with s^2 = SSR / (lengths - 1), cut off at 0 and 1.
    """

    def stationary(alpha: float) -> float:
        return float((tokens_per_step(alpha, gamma) - tokens) @ _slopes(alpha, gamma))

    # at 0 no residual is above 0, at 1 none is below
    alpha = float(brentq(stationary, 0.0, 1.0, xtol=1e-15, rtol=1e-15))
    if len(gamma) < 2 or not 0 < alpha < 1:  # at the ends it cannot miss, so SSR means nothing
        return RateEstimate(alpha=alpha, se=None, ci95=None)
    missed, slope = tokens_per_step(alpha, gamma) - tokens, _slopes(alpha, gamma)
    return _rate(alpha, float(np.sqrt(missed @ missed / (len(gamma) - 1) / (slope @ slope))), Z95)


def wilson(accepted: float, tried: float, reach: float = Z95) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson 1927), good near 0 and 1 too. `reach`: of
    95 %, in standard errors."""
    share, n, z2 = accepted / tried, tried, reach**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = reach * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # the ends are exact there; rounding would leave the share itself outside
    low = 0.0 if accepted == 0 else max(centre - half, 0.0)
    return low, 1.0 if accepted == tried else min(centre + half, 1.0)


def iid_p_value(trials: Trials) -> float | None:
    """Test that all cells (draft length, depth) have one rate of acceptance: Pearson's chi-square
    of their counts, by its own law or, over prompts, by flipping signs.

    Cells with few trials are joined with the next depth, what is left at the ends of drafts with
    each other. Acceptance that varies between steps shows here as a rate that rises with depth;
    dependence from one step to the next does not show in counts. None: too few counts.
    """
    tried, accepted = float(trials.tried_PGD.sum()), float(trials.accepted_PGD.sum())
    rarer = min(accepted, tried - accepted) / tried
    if rarer == 0:
        return None
    cells = _cells(trials, _EXPECTED / rarer)
    if len(cells) < 2:
        return None
    tried_PC, accepted_PC = np.stack(cells, -1)
    if len(tried_PC) == 1:
        table = np.concatenate([accepted_PC, tried_PC - accepted_PC])
        return float(chi2_contingency(table, correction=False).pvalue)
    rate, weight_C = accepted / tried, tried_PC.sum(0)
    missed_PC = accepted_PC - rate * tried_PC
    # what the rate, which is of the same counts, takes up of each prompt
    missed_PC = missed_PC - missed_PC.sum(1, keepdims=True) * weight_C / tried
    return flip_p_value(missed_PC, weight_C)


# --------------------------------------------------------------------------- inside


@dataclass(frozen=True, kw_only=True, slots=True)
class Trials:
    """All steps, by draft length; places behind the end of a draft are 0.

    accepted_length   0    1    2        gamma = 2
    depth 1           x    a    a        x: rejected, a: accepted
    depth 2                x    a        depth d is tried where d - 1 or more were accepted
    """

    lengths_G: NDArray[np.int64]
    """From short to long."""
    tried_PGD: Floats
    accepted_PGD: Floats

    @property
    def steps_PG(self) -> Floats:
        """Every step tries the first token."""
        return self.tried_PGD[..., 0]


def _trials(counts: Sequence[LengthCount]) -> Trials:
    """Add up the counts, without empty lengths and prompts."""
    counts = [one for one in counts if one.count]
    names = {name: place for place, name in enumerate(dict.fromkeys(c.prompt for c in counts))}
    lengths_G, place_G = np.unique([one.gamma for one in counts], return_inverse=True)
    steps_PGL = np.zeros((len(names), len(lengths_G), lengths_G[-1] + 1))
    for one, place in zip(counts, place_G, strict=True):
        steps_PGL[names[one.prompt], place, one.accepted] += one.count
    at_least_PGL = np.cumsum(steps_PGL[..., ::-1], axis=-1)[..., ::-1]
    drafted_GD = np.arange(lengths_G[-1]) < lengths_G[:, None]
    return Trials(
        lengths_G=lengths_G,
        tried_PGD=at_least_PGL[..., :-1] * drafted_GD,
        accepted_PGD=at_least_PGL[..., 1:],
    )


def _cells(trials: Trials, least: float) -> list[Floats]:
    """Join places into cells of `least` trials or more: tried and accepted by prompt, [2, P]
    each."""
    places_GD2P = np.stack([trials.tried_PGD, trials.accepted_PGD]).transpose(2, 3, 0, 1)
    empty = np.zeros(places_GD2P.shape[2:])
    cells: list[Floats] = []
    rest = empty
    for places_D2P in places_GD2P:
        open_cell = empty
        for place in places_D2P:
            open_cell = open_cell + place
            if open_cell[0].sum() >= least:
                cells.append(open_cell)
                open_cell = empty
        rest = rest + open_cell
    if rest[0].sum() >= least or not cells:
        return [*cells, rest]
    return [*cells[:-1], cells[-1] + rest]


def _share(tried: float, accepted: float) -> RateEstimate:
    """Return the rate where every judged token is a trial of its own: accepted / (accepted + steps
    that ended in a rejection), which is less noisy than a fit of tau (appendix B)."""
    alpha = accepted / tried
    se = math.sqrt(alpha * (1.0 - alpha) / tried)
    return RateEstimate(alpha=alpha, se=se, ci95=wilson(accepted, tried))


def _by_prompts(fitted: RateEstimate, trials: Trials) -> RateEstimate:
    """Give the least-squares rate its error by prompts, each of which moves the tokens per step
    of every length."""
    steps_PG, accepted_PG = trials.steps_PG, trials.accepted_PGD.sum(-1)
    if len(steps_PG) < 2 or not 0 < fitted.alpha < 1:
        return replace(fitted, se=None, ci95=None)
    slope_G, steps_G = _slopes(fitted.alpha, trials.lengths_G), steps_PG.sum(0)
    moved_PG = accepted_PG - accepted_PG.sum(0) / steps_G * steps_PG
    se = error(moved_PG / steps_G @ (slope_G / (slope_G @ slope_G)))
    return _rate(fitted.alpha, se, quantile(len(steps_PG)))


def _rate(alpha: float, se: float, reach: float) -> RateEstimate:
    """Return a rate with its interval, `reach` standard errors to each side and within [0, 1]."""
    ends = (max(alpha - reach * se, 0.0), min(alpha + reach * se, 1.0))
    return RateEstimate(alpha=alpha, se=se, ci95=ends)


def _slopes(alpha: float, gamma: NDArray[np.int64]) -> Floats:
    """Return d tau / d alpha = sum of j alpha^(j-1) over j = 1 .. gamma."""
    j = np.arange(1, gamma.max() + 1)
    return np.asarray(np.cumsum(j * alpha ** (j - 1.0))[gamma - 1])
