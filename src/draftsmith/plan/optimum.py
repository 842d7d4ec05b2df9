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
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from draftsmith.speedup import Floats, check_domain, predicted_speedup, tokens_per_step

# v in powers of sqrt(2 L), from v - ln(1 + v) = L
_SERIES = (1.0, 1 / 3, 1 / 36, -1 / 270, 1 / 4320, 1 / 17010, -139 / 5443200)
_SERIES_SUFFICES = 1e-3
_NEWTON_STEPS = 8


def speedup(
    alpha: ArrayLike, gamma: ArrayLike, draft_cost: ArrayLike, target_cost: ArrayLike = 1.0
) -> Floats:
    """Over plain decoding with drafts of this length: eq. 1, or 2 M times eq. 3."""
    draft, target = positive(draft_cost, "draft_cost"), positive(target_cost, "target_cost")
    return predicted_speedup(tokens_per_step(alpha, gamma), gamma, draft / target)


def throughput(
    alpha: ArrayLike, gamma: ArrayLike, draft_params: ArrayLike, target_params: ArrayLike
) -> Floats:
    """(1 - alpha^(gamma+1)) / (2 (M + gamma N) (1 - alpha)), eq. 3; plain decoding has 1 / (2 M).

    The paper says "tokens per FLOP"; it is tokens per unit of memory-bound time.
    """
    params = positive(target_params, "target_params")
    return np.asarray(speedup(alpha, gamma, draft_params, params) / (2.0 * params))


def stationary_length(
    alpha: ArrayLike, draft_cost: ArrayLike, target_cost: ArrayLike = 1.0
) -> Floats:
    """gamma at which the derivative of eq. 3 vanishes: eq. 13. It can be negative, down to -1.

    Raises:
        InputError: the draft costs more than the target: there is no such point.
    """
    missed = -np.log(_rate(alpha))
    return np.asarray(np.log1p(_root(missed, draft_cost, target_cost)) / missed - 1.0)


def stationary_speedup(
    alpha: ArrayLike, draft_cost: ArrayLike, target_cost: ArrayLike = 1.0
) -> Floats:
    """Eq. 4 times 2 M. Where `stationary_length` is negative this speed-up does not exist.

    Raises:
        InputError: the draft costs more than the target.
    """
    alpha = _rate(alpha)
    missed = -np.log(alpha)
    ratio = positive(draft_cost, "draft_cost") / positive(target_cost, "target_cost")
    u = 1.0 + _root(missed, draft_cost, target_cost)
    return np.asarray(missed / (ratio * (1.0 - alpha) * u))


def optimal_length(
    alpha: ArrayLike,
    draft_cost: ArrayLike,
    target_cost: ArrayLike = 1.0,
    *,
    integer: bool = False,
) -> Floats:
    """gamma >= 0 with the largest speed-up, real or whole; 0: do not draft.

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
    """Over plain decoding, with drafts of `optimal_length`: 1 where drafting does not pay."""
    gamma = optimal_length(alpha, draft_cost, target_cost, integer=integer)
    found = speedup(alpha, gamma, draft_cost, target_cost)
    return np.where(gamma > 0, np.maximum(found, 1.0), 1.0)  # not 1 - 2e-16


def branch_root(excess: ArrayLike) -> Floats:
    """v >= 0 with v - ln(1 + v) = excess, so that W_-1(-exp(-1 - excess)) = -(1 + v)."""
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
    """As an array. Raises InputError unless all of it is above 0 and finite."""
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
