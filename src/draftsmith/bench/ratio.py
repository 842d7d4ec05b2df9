"""Sums over documents or prompts, divided: a mean per token, and its 95 % margin.

What a document adds to both sums belongs together, and tokens of one document are not independent:
documents are what is drawn (`plan.clusters`). First order, for the ratio of two sums:

    R = sum s / sum m        what a document adds to its error: (s - R m) / sum m
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.plan.clusters import error, quantile


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """A quotient of sums."""

    value: float
    moe: float | None
    """Half the 95 % interval; None: of one part alone nothing can be said."""


def ratio(parts: Sequence[tuple[float, float]]) -> Ratio:
    """Of (amount, number of tokens) of each document; the numbers must not all be 0."""
    total = math.fsum(number for _, number in parts)
    value = math.fsum(amount for amount, _ in parts) / total
    known = [part for part in parts if part[1]]
    count = len(known)
    if count < 2 or not math.isfinite(value):
        return Ratio(value=value, moe=None)
    added = np.array([(amount - value * number) / total for amount, number in known])
    return Ratio(value=value, moe=quantile(count) * error(added))
