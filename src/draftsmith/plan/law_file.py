"""The scaling-law file that `plan law --json` prints and `plan optimum --law` reads."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.config import as_dict
from draftsmith.core.speedup import Floats
from draftsmith.errors import InputError
from draftsmith.plan.fit import AffineFit, FormFit
from draftsmith.plan.optimum import NAMES, AcceptanceLaw

_ROUNDING = 1e-9
"""In correlations."""


def law_payload(
    fit: AffineFit | None, curves: dict[str, dict[str, FormFit | None]], warnings: tuple[str, ...]
) -> dict[str, Any]:
    """Return plain JSON types; a number without meaning is null, without a law all of its own."""
    payload: dict[str, Any]
    if fit is None:
        payload = dict.fromkeys(field.name for field in fields(AffineFit))
        classic: dict[str, Any] = {"se": None, "ci95": None}
    else:
        payload = as_dict(fit)
        classic = payload["errors"]["classic"]
    return {
        **{name: payload.pop(name) for name in NAMES},
        "se": classic["se"],
        "ci95": classic["ci95"],
        **payload,
        "per_target": as_dict(curves),
        "warnings": list(warnings),
    }


def read_law(path: Path) -> AcceptanceLaw:
    """Read A, B, C and, where it is there, their covariance from a scaling-law file.

    Raises:
        InputError: the file or one of these keys cannot be used; both are named.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read the law {path}: {reason}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no law: expected what `plan law --json` prints")
    found = {}
    for name in NAMES:
        value: Any = values.get(name)
        if not _is_number(value):
            raise InputError(f"{path}: {name!r} must be a finite number, got {value!r}")
        found[name] = float(value)
    cov = values.get("cov")
    return AcceptanceLaw(
        **found,
        cov=None if cov is None else _covariance(cov, path),
        residual=_residual(values.get("mse"), values.get("n"), path),
    )


def _residual(mse: Any, n: Any, path: Path) -> float | None:
    """Compute the residual from the file's own numbers, where it has them."""
    if mse is None or n is None:
        return None
    numbers = _is_number(mse) and isinstance(n, int)
    if not (numbers and mse >= 0 and n > len(NAMES)):
        raise InputError(f"{path}: 'mse' and 'n' must be those of a fit, got {mse!r} and {n!r}")
    return residual_of(mse, n)


def residual_of(mse: float, n: int) -> float:
    """Return the standard deviation around the law, from the mean squared residual of n rows."""
    return math.sqrt(mse * n / (n - len(NAMES)))


def _covariance(values: Any, path: Path) -> tuple[tuple[float, ...], ...]:
    size = len(NAMES)
    lists = [values, *values] if isinstance(values, list) else [values]
    shaped = all(isinstance(one, list) and len(one) == size for one in lists)
    numbers = shaped and all(_is_number(value) for row in lists[1:] for value in row)
    if not numbers or not _is_covariance(np.array(values, np.float64)):
        raise InputError(
            f"{path}: 'cov' must be the 3 x 3 covariance of A, B and C: symmetric, finite, with no "
            "negative variance"
        )
    return tuple(tuple(float(value) for value in row) for row in lists[1:])


def _is_covariance(cov: Floats) -> bool:
    """Check up to rounding, in units of the errors: those of A and C differ by magnitudes."""
    variance = np.diag(cov)
    if np.any(variance < 0):
        return False
    error = np.sqrt(variance)
    scale = np.where(error > 0, error, 1.0)
    correlation = cov / scale / scale[:, None]
    symmetric = np.allclose(correlation, correlation.T, rtol=0.0, atol=_ROUNDING)
    return bool(symmetric and np.linalg.eigvalsh(correlation)[0] >= -_ROUNDING)


def _is_number(value: object) -> bool:
    """Check that a value is finite as float64, and no boolean."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
