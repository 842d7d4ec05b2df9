"""The file that `plan law --json` prints and `plan optimum --law` reads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.config import as_dict
from draftsmith.errors import InputError
from draftsmith.plan.fit import AffineFit, FormFit
from draftsmith.plan.sizing import NAMES, AcceptanceLaw


def law_payload(
    fit: AffineFit, curves: dict[str, dict[str, FormFit | None]], warnings: tuple[str, ...]
) -> dict[str, Any]:
    """As plain JSON types; a figure that has no meaning is null."""
    payload: dict[str, Any] = as_dict(fit)
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
    """A, B, C and, where it is there, their covariance.

    Raises:
        InputError: the file or one of these keys cannot be used; both are named.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read the law {path}: {reason}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no law: expected what `plan law --json` prints")
    found = {}
    for name in NAMES:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _finite(value):
            raise InputError(f"{path}: {name!r} must be a finite number, got {value!r}")
        found[name] = float(value)
    cov = values.get("cov")
    return AcceptanceLaw(**found, cov=None if cov is None else _covariance(cov, path))


def _covariance(values: object, path: Path) -> tuple[tuple[float, ...], ...]:
    try:
        cov = np.array(values, np.float64)
    except (TypeError, ValueError):
        cov = np.empty(0)
    shaped = cov.shape == (3, 3) and bool(np.all(np.isfinite(cov)))
    # rounding may leave an eigenvalue of nought slightly below it
    if not shaped or not np.allclose(cov, cov.T) or np.linalg.eigvalsh(cov)[0] < -1e-9 * cov.max():
        raise InputError(
            f"{path}: 'cov' must be the 3 x 3 covariance of A, B and C: symmetric, finite, with no "
            "negative variance"
        )
    return tuple(tuple(float(value) for value in row) for row in cov)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
