"""Errors of figures whose parts are not independent: documents or prompts are what is drawn.

Tokens of one text belong together, and more so where the same prompts are decoded at several draft
lengths (at temperature 0 that is the very same text each time). What a prompt adds to the error of
a figure is one number u, those of different prompts are independent, and over n prompts

    variance of the figure = n / (n - 1) * sum of u^2

Shape letters: P prompts, C cells (places whose counts are compared), F flips.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import stdtrit

from draftsmith.speedup import Floats

_FLIPS = 1999
"""Of the test: no p-value is below 1 / 2000."""
_NUMBERS = 1 << 22
"""Signs that stand in memory at once."""
_ROUNDING = 1e-9


def error(added_P: Floats) -> float:
    """Standard error, from what each of two prompts or more adds to the error."""
    count = len(added_P)
    return math.sqrt(count / (count - 1) * float(added_P @ added_P))


def quantile(count: int) -> float:
    """How many standard errors a 95 % interval over so many prompts reaches: Student's t."""
    return float(stdtrit(count - 1, 0.975))


def flip_p_value(missed_PC: Floats, weight_C: Floats) -> float:
    """Of the hypothesis that the columns of `missed_PC` have mean 0: how often
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
