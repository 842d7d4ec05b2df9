"""The loss law fitted to one's own training runs, as Hoffmann et al. and Besiroglu et al. do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import least_squares, nnls

from draftsmith.errors import InputError
from draftsmith.plan.fit import Named, NamedRange
from draftsmith.plan.loss import LossLaw
from draftsmith.plan.observations import TrainedModel
from draftsmith.speedup import Floats

NAMES = ("E", "A", "nu", "B", "delta")
_HUBER = 1e-3
"""Residuals of ln L above this count linearly."""
_EXPONENTS = np.linspace(0.1, 1.0, 10)
_STARTS = 8
_LEAST_TERM = 1e-9
"""For starts: the search is over logarithms, where 0 cannot be."""
_BOUNDS = ((-50.0, -50.0, 0.0, -50.0, 0.0), (50.0, 100.0, 3.0, 100.0, 3.0))
"""Of theta, far from anything that a training shows."""
_FEWEST_SIZES = 3
_GONE = 1e-4
"""Of the loss: a term below this share in every run is not seen."""
_AT_BOUND = 1e-3
"""Of an exponent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossFit:
    """The five constants, how sure they are, and how well they describe the runs."""

    law: LossLaw
    se: Named
    """By bootstrap over runs, like the intervals."""
    ci95: NamedRange
    rmse_log: float
    """Root mean square of ln(predicted / measured loss)."""
    r2_log: float
    n: int
    warnings: tuple[str, ...]


def fit_loss(models: Sequence[TrainedModel], *, bootstrap: int = 200, seed: int = 0) -> LossFit:
    """Minimise the Huber loss (1e-3) of ln L_predicted - ln L_measured over E, A, nu, B, delta.

    Hoffmann et al. 2022, appendix D.3, with the log-sum-exp form. The search starts at the best of
    a grid of (nu, delta), for each of which the rest is a non-negative linear problem.

    Raises:
        InputError: fewer than six runs, or fewer than three different sizes or amounts of data.
    """
    _check(models)
    data = np.log([[one.params, one.tokens, one.loss] for one in models])
    best = min((_search(data, start) for start in _starts(data)), key=lambda found: found[1])[0]
    rng = np.random.default_rng(seed)
    repeats = np.array(
        [
            _constants(_search(data[rng.integers(len(data), size=len(data))], best)[0])
            for _ in range(bootstrap)
        ]
    )
    values = _constants(best)
    missed = _residuals(best, data)
    low, high = np.quantile(repeats, [0.025, 0.975], axis=0)
    return LossFit(
        law=LossLaw.of(tuple(float(value) for value in values)),
        se=dict(zip(NAMES, np.std(repeats, axis=0, ddof=1).tolist(), strict=True)),
        ci95=dict(zip(NAMES, zip(low.tolist(), high.tolist(), strict=True), strict=True)),
        rmse_log=float(np.sqrt(np.mean(missed**2))),
        r2_log=float(1 - np.sum(missed**2) / np.sum((data[:, 2] - data[:, 2].mean()) ** 2)),
        n=len(models),
        warnings=tuple(_doubts(data, best)),
    )


# --------------------------------------------------------------------------- inside

# The search is over theta = (ln E, ln A, nu, ln B, delta); data rows are (ln N, ln D, ln L).


def _check(models: Sequence[TrainedModel]) -> None:
    if len(models) <= len(NAMES):
        raise InputError(
            f"the loss law has five constants: it takes six runs or more, got {len(models)}"
        )
    for column in ("params", "tokens"):
        found = len({getattr(one, column) for one in models})
        if found < _FEWEST_SIZES:
            raise InputError(
                f"column {column!r} has {found} different value{'s' if found > 1 else ''}: its "
                f"part of the loss takes {_FEWEST_SIZES} or more"
            )
    if len({one.loss for one in models}) == 1:
        raise InputError("all losses are equal: there is nothing to fit")


def _starts(data: Floats) -> list[Floats]:
    least_N, least_D, _ = data.min(axis=0)
    # over the smallest run: powers of the largest counts are below all numbers
    log_N, log_D, L = data[:, 0] - least_N, data[:, 1] - least_D, np.exp(data[:, 2])
    found = []
    for nu, delta in product(_EXPONENTS, _EXPONENTS):
        powers = [np.ones(len(L)), np.exp(-nu * log_N), np.exp(-delta * log_D)]
        columns = np.column_stack(powers) / L[:, None]
        scale = np.linalg.norm(columns, axis=0)
        terms, missed = nnls(columns / scale, np.ones(len(L)))
        E, A, B = np.log(np.maximum(terms, _LEAST_TERM) / scale)
        start = np.array([E, A + nu * least_N, nu, B + delta * least_D, delta])
        found.append((missed, np.clip(start, *_BOUNDS)))
    found.sort(key=lambda one: one[0])
    return [start for _, start in found[:_STARTS]]


def _search(data: Floats, start: Floats) -> tuple[Floats, float]:
    """The nearest minimum and its height."""
    found = least_squares(
        _residuals,
        start,
        jac=_jacobian,
        loss="huber",
        f_scale=_HUBER,
        x_scale="jac",
        args=(data,),
        bounds=_BOUNDS,
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-14,
        max_nfev=200,
    )
    return found.x, float(found.cost)


def _terms(theta: Floats, data: Floats) -> Floats:
    """Logarithms of the three terms of the loss, [runs, 3]."""
    E, A, nu, B, delta = theta
    log_N, log_D = data[:, 0], data[:, 1]
    return np.column_stack([np.full(len(data), E), A - nu * log_N, B - delta * log_D])


def _residuals(theta: Floats, data: Floats) -> Floats:
    return np.asarray(np.logaddexp.reduce(_terms(theta, data), axis=1) - data[:, 2])


def _jacobian(theta: Floats, data: Floats) -> Floats:
    terms = _terms(theta, data)
    share = np.exp(terms - np.logaddexp.reduce(terms, axis=1)[:, None])
    E, A, B = share.T
    return np.column_stack([E, A, -A * data[:, 0], B, -B * data[:, 1]])


def _constants(theta: Floats) -> Floats:
    E, A, nu, B, delta = theta
    return np.array([np.exp(E), np.exp(A), nu, np.exp(B), delta])


def _doubts(data: Floats, theta: Floats) -> list[str]:
    said = []
    log_losses = data[:, 2]
    missed = np.sum(_residuals(theta, data) ** 2)
    if missed >= np.sum((log_losses - log_losses.mean()) ** 2):
        said.append(
            "the law describes these runs no better than their mean does (R2 of 0 or less): losses "
            "do not fall with params and tokens; do not plan with it"
        )
    terms = _terms(theta, data)
    shares = np.exp(terms - np.logaddexp.reduce(terms, axis=1)[:, None]).max(axis=0)
    for column, constant, exponent, share, power in (
        ("params", "A", "nu", shares[1], theta[2]),
        ("tokens", "B", "delta", shares[2], theta[4]),
    ):
        highest = _BOUNDS[1][NAMES.index(exponent)]
        if share < _GONE:
            said.append(
                f"{constant} comes out as 0: the runs do not show that losses fall with {column}, "
                f"and {exponent} means nothing"
            )
        elif not _AT_BOUND < power < highest - _AT_BOUND:
            said.append(
                f"{exponent} lies at an end of what is searched (0 to {highest:g}): the runs do "
                f"not show how losses fall with {column}"
            )
    if abs(np.corrcoef(data[:, 0], data[:, 1])[0, 1]) > 0.99:
        said.append(
            "params and tokens grow together in these runs: their parts of the loss are hardly "
            "told apart; train some sizes longer and some shorter"
        )
    if np.exp(theta[0]) < 1e-3:
        said.append("E comes out as 0: the runs do not show where the loss would level off")
    return said
