"""The closed formulas of speculative decoding: how many tokens a step gives, and their worth.

alpha    probability that a drafted token is accepted, given that its predecessors were; i.i.d.
gamma    drafted tokens per step (a chain)
tau      tokens per step, the target's own correction or bonus token included: 1 .. gamma + 1
c        cost of one draft forward / cost of one target forward

Numbers or arrays that broadcast go in, float64 arrays come out (of no dimension for numbers).
A value outside its domain is an InputError (a ValueError) that names it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftsmith.errors import InputError

Floats = NDArray[np.float64]


def tokens_per_step(alpha: ArrayLike, gamma: ArrayLike) -> Floats:
    """tau = (1 - alpha^(gamma+1)) / (1 - alpha): gamma + 1 at alpha = 1, and 1 at alpha = 0.

    Leviathan et al. 2023 (arXiv 2211.17192), eq. 1; DistillBeam, eq. 11; the first factor of the
    throughput of the scaling laws, eq. 3. gamma need not be whole.
    """
    alpha, gamma = _share(alpha, "alpha"), _not_negative(gamma, "gamma")
    with np.errstate(divide="ignore", invalid="ignore"):
        # expm1 of a logarithm: near alpha = 1 both differences would lose all their digits
        missed = -np.expm1((gamma + 1.0) * np.log(alpha))
        return np.where(alpha == 1.0, gamma + 1.0, missed / (1.0 - alpha))


def predicted_speedup(tau: ArrayLike, gamma: ArrayLike, cost_ratio: ArrayLike) -> Floats:
    """tau / (c gamma + 1), over plain decoding.

    Leviathan et al. 2023, theorem 3.8; DistillBeam, eq. 12. Assumes that gamma + 1 tokens cost the
    target as much as one. tau may be measured or from `tokens_per_step`.
    """
    tau, gamma = np.asarray(tau, np.float64), _not_negative(gamma, "gamma")
    cost_ratio = _not_negative(cost_ratio, "cost_ratio")
    # 1e-9: a mean of measurements may pass its bound by rounding
    check_domain(
        (tau >= 1 - 1e-9) & (tau <= gamma + 1 + 1e-9), tau, "tau", "between 1 and gamma + 1"
    )
    return np.asarray(tau / (cost_ratio * gamma + 1.0))


def memory_bound_speedup(
    tau: ArrayLike, gamma: ArrayLike, draft_parameters: ArrayLike, target_parameters: ArrayLike
) -> Floats:
    """MBSU = tau / (c gamma + 1) with c = draft parameters / target parameters.

    Direct Alignment (arXiv 2403.00858). The paper prints c tau / (c tau + 1), which is below 1 for
    every c and tau; this is what its numbers can mean.
    """
    draft = _not_negative(draft_parameters, "draft_parameters")
    target = np.asarray(target_parameters, np.float64)
    check_domain((target > 0) & np.isfinite(target), target, "target_parameters", "positive")
    return predicted_speedup(tau, gamma, draft / target)


def rejections_saved(alpha: ArrayLike, before: ArrayLike) -> Floats:
    """(alpha - before) / (1 - before): the share of refused drafts that a better drafter saves.

    Gains in tau grow with the acceptance that a drafter has already; this does not: for chains
    without end tau is 1 / (1 - alpha), and grows by 1 / (1 - saved) wherever it began. Negative for
    a worse drafter; nan where nothing was refused before.
    """
    alpha, before = _share(alpha, "alpha"), _share(before, "before")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(before == 1.0, np.nan, (alpha - before) / (1.0 - before))


# --------------------------------------------------------------------------- domains


def _share(value: ArrayLike, name: str) -> Floats:
    array = np.asarray(value, np.float64)
    check_domain((array >= 0) & (array <= 1), array, name, "between 0 and 1")
    return array


def _not_negative(value: ArrayLike, name: str) -> Floats:
    array = np.asarray(value, np.float64)
    check_domain((array >= 0) & np.isfinite(array), array, name, "0 or more and finite")
    return array


def check_domain(ok: NDArray[np.bool_], value: NDArray[np.float64], name: str, want: str) -> None:
    """`ok` is False for nan: every domain is stated as what must hold."""
    if not np.all(ok):
        wrong = np.broadcast_to(value, np.shape(ok))[~np.asarray(ok)]
        raise InputError(f"{name} must be {want}, got {float(wrong.flat[0]):g}")
