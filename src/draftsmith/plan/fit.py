"""The laws of a plan, fitted to measurements: acceptance by perplexities, loss by size and data.

Acceptance is fitted to measured pairs (`affine_law`: one law; `per_target`: a curve per target);
equations and tables are those of "Speculative Decoding Scaling Laws". `plan law` writes an
`AffineFit`, and `read_law` is what `plan optimum --law` reads of it. The loss is fitted to one's
own training runs (`fit_loss`), as Hoffmann et al. and Besiroglu et al. do it. Fits are those of
statsmodels and scipy; this module documents which, and what their errors mean.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from pydantic import FiniteFloat
from scipy.optimize import OptimizeWarning, curve_fit, least_squares, nnls
from scipy.stats import t as student

from draftsmith.core.speedup import Floats
from draftsmith.errors import InputError
from draftsmith.plan.observations import (
    Observation,
    TrainedModel,
    columns,
    odd_rows,
    part_of,
)
from draftsmith.plan.optimum import NAMES, AcceptanceLaw, LossLaw
from draftsmith.provenance import read_json

Named = dict[str, float]
NamedRange = dict[str, tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Standard errors of named coefficients, and their 95 % intervals."""

    se: Named
    ci95: NamedRange


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedEffects:
    """alpha = A x + one constant per target: B and C are within the constants."""

    A: float
    errors: Errors
    """Errors of A."""
    r2: float
    mse: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PairPrediction:
    """The law at one pair of perplexities."""

    draft_ppl: float
    target_ppl: float
    alpha: float
    ci95: tuple[float, float]
    """Confidence interval of the law."""
    pi95: tuple[float, float]
    """Prediction interval of the rate of a pair that has not been measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AffineFit(Errors):
    """alpha = A x + B y + C by ordinary least squares (eq. 5, Table 3), with classic errors."""

    A: float
    B: float
    C: float
    errors: dict[str, Errors]
    """classic, once more; hc3: of unequal variance; cluster_target and cluster_draft: the rows of a
    target (a draft) are not independent, which they are not. What the rows do not give is left out,
    with a warning."""
    moe: Named
    """Half the width of the classic interval."""
    r2: float
    mse: float
    """Sum of squared residuals / n."""
    n: int
    cov: tuple[tuple[float, ...], ...]
    """Classic, in the order A, B, C."""
    fixed_effects: FixedEffects | None
    predictions: tuple[PairPrediction, ...]
    warnings: tuple[str, ...]


_Row = tuple[FiniteFloat, FiniteFloat, FiniteFloat]


@dataclass(frozen=True, kw_only=True, slots=True)
class LawFile:
    """What is read of a scaling-law file."""

    A: FiniteFloat
    B: FiniteFloat
    C: FiniteFloat
    cov: tuple[_Row, _Row, _Row] | None = None
    mse: FiniteFloat | None = None
    n: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FormFit:
    """A curve with two parameters (Table 4)."""

    params: tuple[float, float]
    moe: tuple[float, float]
    """95 %, t(n - 2)."""
    ci95: tuple[tuple[float, float], tuple[float, float]]
    mse: float
    """Sum of squared residuals / n."""
    r2: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LossFit(Errors):
    """The five constants, how sure they are (by bootstrap over runs), and how well they describe
    the runs."""

    law: LossLaw
    rmse_log: float
    """Root mean square of ln(predicted / measured loss)."""
    r2_log: float
    n: int
    warnings: tuple[str, ...]


FORMS: dict[str, Callable[[Floats, float, float], Floats]] = {
    "linear": lambda x, p1, p2: p1 * x + p2,
    "logarithmic": lambda x, p1, p2: np.asarray(p1 * np.log(x) + p2),
    "power": lambda x, p1, p2: np.asarray(p1 * x**p2),
}
"""alpha against the draft's perplexity x: p1 x + p2, p1 ln x + p2, p1 x^p2."""
_FEWEST_FOR_A_FORM = 3
_SAME = 1e-9
"""Perplexities that differ by less, relative, are one."""
_FEW_CLUSTERS = 10
"""Below this errors by cluster come out too small."""
_DECIDES = 1 - 1e-9
"""Leverage of a row that the fit must go through."""


LOSS_NAMES = ("E", "A", "nu", "B", "delta")
_HUBER = 1e-3
"""Residuals of ln L above this count linearly."""
_EXPONENTS = np.linspace(0.1, 1.0, 10)
_STARTS = 8
_LEAST_TERM = 1e-9
"""Least start of a constant: the search is over logarithms, which exclude 0."""
_BOUNDS = ((-50.0, -50.0, 0.0, -50.0, 0.0), (50.0, 100.0, 3.0, 100.0, 3.0))
"""Bound of theta, far from anything that a training shows."""
_FEWEST_SIZES = 3
_GONE = 1e-4
"""Share of the loss below which a term in every run is invisible."""
_AT_BOUND = 1e-3
"""Distance at which an exponent counts as lying on its bound."""
_ROUNDING = 1e-9
"""In correlations of a scaling-law file."""
_MOST_VARIANCE = 1e12
"""The largest of a coefficient: rates lie between 0 and 1."""
_MOST_ROWS = 2**53


def ols(values: ArrayLike, columns: ArrayLike) -> Any:
    """Return the least-squares model of statsmodels.

    Raises:
        InputError: statsmodels is not installed.
    """
    try:
        from statsmodels.regression.linear_model import OLS
    except ImportError as error:
        how = 'pip install "draftsmith[plan]"'
        raise InputError(f"statsmodels cannot be imported ({error}): {how}") from None
    return OLS(np.asarray(values, np.float64), np.asarray(columns, np.float64))


def affine_law(
    observations: Sequence[Observation],
    *,
    fixed_effects: bool = False,
    at: Sequence[tuple[float, float]] = (),
) -> AffineFit:
    """Fit eq. 5; `at` are (draft, target) perplexities to predict for.

    Raises:
        InputError: fewer than four rows, or perplexities that do not tell A, B and C apart.
    """
    if len(observations) <= len(NAMES):
        raise InputError(
            f"the law has three coefficients: it takes four rows or more, got {len(observations)}"
        )
    draft_ppl, target_ppl, alpha = columns(observations, "draft_ppl", "target_ppl", "alpha")
    design = _design(draft_ppl, target_ppl)
    _check_rank(design)
    model = ols(alpha, design)
    fit = model.fit()
    A, B, C = fit.params.tolist()
    errors, notes = _all_errors(model, fit, observations)
    classic = errors["classic"]
    predictions = _predictions(fit, at)
    if np.ptp(alpha) == 0:
        notes.append(f"all rows have the same acceptance rate ({alpha[0]:g}): R2 has no meaning")
    return AffineFit(
        A=A,
        B=B,
        C=C,
        se=classic.se,
        ci95=classic.ci95,
        errors=errors,
        moe={name: (high - low) / 2 for name, (low, high) in classic.ci95.items()},
        r2=_explained(fit, alpha),
        mse=float(fit.ssr / fit.nobs),
        n=len(observations),
        cov=tuple(map(tuple, fit.cov_params().tolist())),
        fixed_effects=_fixed_effects(observations, alpha, draft_ppl) if fixed_effects else None,
        predictions=predictions,
        warnings=(*odd_rows(observations), *notes, *_far_off(predictions, design)),
    )


def per_target(
    observations: Sequence[Observation],
) -> tuple[dict[str, dict[str, FormFit | None]], tuple[str, ...]]:
    """Fit the three curves of every target against the draft's perplexity, with warnings.

    As in Table 4: `scipy.optimize.curve_fit` from its default start (1, 1), the power law in alpha
    itself. A target with too few drafts is left out, a curve that cannot be fitted is None.
    """
    found: dict[str, dict[str, FormFit | None]] = {}
    notes = []
    for target in dict.fromkeys(one.target for one in observations):
        own = [one for one in observations if one.target == target]
        x, alpha = columns(own, "draft_ppl", "alpha")
        distinct = len(np.unique(x))
        if distinct < _FEWEST_FOR_A_FORM:
            notes.append(
                f"{target} has {distinct} different draft perplexities: curves of its own take "
                f"{_FEWEST_FOR_A_FORM} or more"
            )
            continue
        found[target] = {form: fit_form(form, x, alpha) for form in FORMS}
        bad = [form for form, fit in found[target].items() if fit is None]
        notes += [f"{target}: the {form} curve could not be fitted" for form in bad]
    return found, tuple(notes)


def fit_form(form: str, x: Floats, alpha: Floats) -> FormFit | None:
    """Fit one of `FORMS` to three points or more; None where the search does not converge."""
    curve = FORMS[form]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("error", OptimizeWarning)
        try:
            params, cov = curve_fit(curve, x, alpha)
        except (RuntimeError, OptimizeWarning):
            return None
    variance = np.diag(cov)
    if not (np.all(np.isfinite(params)) and np.all(np.isfinite(cov)) and np.all(variance >= 0)):
        return None
    margins = student.ppf(0.975, len(x) - 2) * np.sqrt(variance)
    mse, total = float(np.mean((alpha - curve(x, *params)) ** 2)), float(np.var(alpha))
    (p1, p2), (m1, m2) = params.tolist(), margins.tolist()
    return FormFit(
        params=(p1, p2),
        moe=(m1, m2),
        ci95=((p1 - m1, p1 + m1), (p2 - m2, p2 + m2)),
        mse=mse,
        r2=1 - mse / total if np.ptp(alpha) and total else float("nan"),
    )


def read_law(path: Path) -> AcceptanceLaw:
    """Read A, B, C and, where it is there, their covariance from a scaling-law file.

    Raises:
        InputError: the file or one of these keys cannot be used; both are named.
    """
    values = read_json(path, "law")
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no law: expected what `plan law --json` prints")
    law = part_of(LawFile, values, str(path))
    if law.cov is not None and not _is_covariance(np.array(law.cov)):
        raise InputError(
            f"{path}: 'cov' must be the covariance of A, B and C: symmetric, with no negative "
            f"variance and none above {_MOST_VARIANCE:g}"
        )
    residual = None
    if law.mse is not None and law.n is not None:
        if not (0 <= law.mse <= 1 and len(NAMES) < law.n <= _MOST_ROWS):
            said = f"'mse' and 'n' must be those of a fit, got {law.mse!r} and {law.n!r}"
            raise InputError(f"{path}: {said}")
        residual = residual_of(law.mse, law.n)
    return AcceptanceLaw(A=law.A, B=law.B, C=law.C, cov=law.cov, residual=residual)


def residual_of(mse: float, n: int) -> float:
    """Return the standard deviation around the law, from the mean squared residual of n rows."""
    return math.sqrt(mse * n / (n - len(NAMES)))


def fit_loss(models: Sequence[TrainedModel], *, bootstrap: int = 200, seed: int = 0) -> LossFit:
    """Minimise the Huber loss (1e-3) of ln L_predicted - ln L_measured over E, A, nu, B, delta.

    Hoffmann et al. 2022, appendix D.3, with the log-sum-exp form. The search starts at the best of
    a grid of (nu, delta), for each of which the rest is a non-negative linear problem.

    Raises:
        InputError: fewer than six runs, or fewer than three different sizes or amounts of data.
    """
    data = np.log(columns(models, "params", "tokens", "loss").T)
    _check(data)
    best = min((_search(data, start) for start in _starts(data)), key=lambda found: found[1])[0]
    rng = np.random.default_rng(seed)
    picks = (rng.integers(len(data), size=len(data)) for _ in range(bootstrap))
    repeats = np.array([_constants(_search(data[pick], best)[0]) for pick in picks])
    values = _constants(best)
    missed = _residuals(best, data)
    low, high = np.quantile(repeats, [0.025, 0.975], axis=0)
    return LossFit(
        law=LossLaw(*values.tolist()),
        se=dict(zip(LOSS_NAMES, np.std(repeats, axis=0, ddof=1).tolist(), strict=True)),
        ci95=dict(zip(LOSS_NAMES, zip(low.tolist(), high.tolist(), strict=True), strict=True)),
        rmse_log=float(np.sqrt(np.mean(missed**2))),
        r2_log=float(1 - np.sum(missed**2) / np.sum((data[:, 2] - data[:, 2].mean()) ** 2)),
        n=len(models),
        warnings=tuple(_doubts(data, best)),
    )


# --------------------------------------------------------------------------- inside: acceptance


def _design(draft_ppl: Floats, target_ppl: Floats) -> Floats:
    return np.column_stack([draft_ppl, target_ppl, np.ones(len(draft_ppl))])


def _check_rank(columns: Floats) -> None:
    for place, (kind, name) in enumerate((("draft", "A"), ("target", "B"))):
        if np.ptp(columns[:, place]) <= _SAME * columns[0, place]:
            raise InputError(
                f"all rows have the same {kind} perplexity ({columns[0, place]:g}): {name} cannot "
                f"be told from C; measure with another {kind}"
            )
    scaled = columns / np.linalg.norm(columns, axis=0)
    if np.linalg.matrix_rank(scaled, tol=_SAME) < columns.shape[1]:
        raise InputError(
            "draft and target perplexities vary together: measure one target with several drafts"
        )


def _all_errors(
    model: Any, fit: Any, observations: Sequence[Observation]
) -> tuple[dict[str, Errors], list[str]]:
    """Compute errors of each kind that the rows allow, with warnings about the others."""
    errors, notes = {"classic": _errors(fit)}, []
    leverage = np.sum(np.linalg.qr(model.exog)[0] ** 2, axis=1)
    if leverage.max() < _DECIDES:
        errors["hc3"] = _errors(model.fit(cov_type="HC3", use_t=True))
    else:
        alone = observations[int(np.argmax(leverage))]
        pair = f"{alone.draft} with {alone.target}"
        notes.append(f"{pair} alone decides a coefficient: HC3 errors are left out")
    for role in ("target", "draft"):
        names, groups = np.unique([getattr(one, role) for one in observations], return_inverse=True)
        if len(names) <= len(NAMES):
            notes.append(
                f"errors clustered by {role} are left out: "
                f"they take more than {len(NAMES)} {role}s, got {len(names)}"
            )
            continue
        robust = model.fit(cov_type="cluster", cov_kwds={"groups": groups}, use_t=True)
        errors[f"cluster_{role}"] = _errors(robust)
        if len(names) < _FEW_CLUSTERS:
            notes.append(
                f"errors clustered by {role} rest on {len(names)} {role}s: with fewer than "
                f"{_FEW_CLUSTERS} they come out too small"
            )
    return errors, notes


def _explained(fit: Any, values: Floats) -> float:
    """Return R2; nan where there is nothing to explain."""
    return float(fit.rsquared) if np.ptp(values) and fit.centered_tss else float("nan")


def _errors(fit: Any, names: Sequence[str] = NAMES) -> Errors:
    """Return the errors of the first coefficients, which have these names."""
    intervals = fit.conf_int(0.05)[: len(names)].tolist()
    return Errors(
        se=dict(zip(names, fit.bse.tolist(), strict=False)),
        ci95={name: (low, high) for name, (low, high) in zip(names, intervals, strict=True)},
    )


def _fixed_effects(
    observations: Sequence[Observation], alpha: Floats, draft_ppl: Floats
) -> FixedEffects:
    names, groups = np.unique([one.target for one in observations], return_inverse=True)
    columns = np.column_stack([draft_ppl, groups[:, None] == np.arange(len(names))])
    if len(alpha) <= columns.shape[1] or np.linalg.matrix_rank(columns) < columns.shape[1]:
        raise InputError(
            f"--fixed-effects: {len(alpha)} rows are too few for {len(names)} constants and A"
        )
    fit = ols(alpha, columns).fit()
    return FixedEffects(
        A=float(fit.params[0]),
        errors=_errors(fit, ("A",)),
        r2=_explained(fit, alpha),
        mse=float(fit.ssr / fit.nobs),
    )


def _far_off(predictions: Sequence[PairPrediction], columns: Floats) -> Iterator[str]:
    """Return warnings about predictions."""
    (low_x, low_y, _), (high_x, high_y, _) = columns.min(axis=0), columns.max(axis=0)
    for one in predictions:
        pair = f"perplexities {one.draft_ppl:g} (draft) and {one.target_ppl:g} (target)"
        if not 0 < one.alpha < 1:
            yield f"for {pair} the law gives {one.alpha:.3g}, which is no acceptance rate"
        elif not (low_x <= one.draft_ppl <= high_x and low_y <= one.target_ppl <= high_y):
            yield (
                f"{pair} lie outside of those measured ({low_x:g} to {high_x:g} and {low_y:g} to "
                f"{high_y:g}): the prediction is an extrapolation"
            )


def _predictions(fit: Any, at: Sequence[tuple[float, float]]) -> tuple[PairPrediction, ...]:
    if not at:
        return ()
    with np.errstate(over="ignore", invalid="ignore"):  # far off there is no interval
        found = fit.get_prediction(_design(*np.transpose(at))).summary_frame()
    names = ["mean", "mean_ci_lower", "mean_ci_upper", "obs_ci_lower", "obs_ci_upper"]
    return tuple(
        PairPrediction(draft_ppl=x, target_ppl=y, alpha=alpha, ci95=(a, b), pi95=(c, d))
        for (x, y), (alpha, a, b, c, d) in zip(at, found[names].to_numpy().tolist(), strict=True)
    )


def _is_covariance(cov: Floats) -> bool:
    """Check up to rounding, in units of the errors: those of A and C differ by magnitudes."""
    variance = np.diag(cov)
    if np.any((variance < 0) | (variance > _MOST_VARIANCE)):
        return False
    error = np.sqrt(variance)
    scale = np.where(error > 0, error, 1.0)
    correlation = cov / scale / scale[:, None]
    symmetric = np.allclose(correlation, correlation.T, rtol=0.0, atol=_ROUNDING)
    return bool(symmetric and np.linalg.eigvalsh(correlation)[0] >= -_ROUNDING)


# --------------------------------------------------------------------------- inside: loss

# The search is over theta = (ln E, ln A, nu, ln B, delta); data rows are (ln N, ln D, ln L).


def _check(data: Floats) -> None:
    if len(data) <= len(LOSS_NAMES):
        raise InputError(
            f"the loss law has five constants: it takes six runs or more, got {len(data)}"
        )
    *sizes, losses = (len(np.unique(values)) for values in data.T)
    for column, found in zip(("params", "tokens"), sizes, strict=True):
        if found < _FEWEST_SIZES:
            raise InputError(
                f"column {column!r} has {found} different value{'s' if found > 1 else ''}: its "
                f"part of the loss takes {_FEWEST_SIZES} or more"
            )
    if losses == 1:
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
    """Find the nearest minimum and its height."""
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
    """Return the logarithms of the three terms of the loss, [runs, 3]."""
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
    notes = []
    log_losses = data[:, 2]
    missed = np.sum(_residuals(theta, data) ** 2)
    if missed >= np.sum((log_losses - log_losses.mean()) ** 2):
        notes.append(
            "the law describes these runs no better than their mean does: do not plan with it"
        )
    _, A, _, B, _ = _jacobian(theta, data).max(axis=0)  # by ln A and ln B: their largest shares
    for column, constant, exponent, share, power in (
        ("params", "A", "nu", A, theta[2]),
        ("tokens", "B", "delta", B, theta[4]),
    ):
        highest = _BOUNDS[1][LOSS_NAMES.index(exponent)]
        if share < _GONE:
            notes.append(
                f"{constant} comes out as 0: the runs do not show that losses fall with {column}"
            )
        elif not _AT_BOUND < power < highest - _AT_BOUND:
            notes.append(
                f"{exponent} lies at an end of what is searched (0 to {highest:g}): the runs do "
                f"not show how losses fall with {column}"
            )
    if abs(np.corrcoef(data[:, 0], data[:, 1])[0, 1]) > 0.99:
        notes.append(
            "params and tokens grow together in these runs: train some sizes longer, some shorter"
        )
    if np.exp(theta[0]) < 1e-3:
        notes.append("E comes out as 0: the runs do not show where the loss would level off")
    return notes
