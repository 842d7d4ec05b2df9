"""95 % intervals over resampled prompts, segments or whatever else is independent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

BOOTSTRAP_DRAWS = 2000


class Interval(NamedTuple):
    """A 95 % interval."""

    low: float
    high: float


def bootstrap(
    count: int,
    statistic: Callable[[NDArray[np.int64]], ArrayLike],
    *,
    draws: int = BOOTSTRAP_DRAWS,
    seed: int = 0,
) -> Interval | None:
    """Return the 95 % percentile interval of a statistic of `count` samples; None for fewer than 2.

    Args:
        statistic: takes the samples that were picked, [draws, count], and returns [draws] values.
    """
    if count < 2:
        return None
    picks = np.random.default_rng(seed).integers(count, size=(draws, count))
    return Interval(*map(float, np.quantile(np.asarray(statistic(picks)), [0.025, 0.975])))


def bootstrap_ratio(
    numerators: ArrayLike,
    denominators: ArrayLike,
    *,
    draws: int = BOOTSTRAP_DRAWS,
    seed: int = 0,
) -> Interval | None:
    """Return the interval of sum(numerators) / sum(denominators) over resampled pairs."""
    above: NDArray[Any] = np.asarray(numerators)
    below: NDArray[Any] = np.asarray(denominators)
    return bootstrap(
        len(above),
        lambda picks: above[picks].sum(1) / below[picks].sum(1),
        draws=draws,
        seed=seed,
    )
