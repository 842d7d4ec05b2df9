"""Amounts with their unit: `Duration` of a training run."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from draftsmith.errors import InputError

_FORM = re.compile(r"([0-9]*\.?[0-9]+)\s*([kKmMgG]?)\s*(steps?|epochs?|tokens?)")
_FACTOR = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


@dataclass(frozen=True, kw_only=True, slots=True)
class Duration:
    """How long to train."""

    amount: float
    unit: Literal["step", "epoch", "token"]

    @classmethod
    def parse(cls, text: str) -> Duration:
        """`2000steps`, `3epochs`, `5Mtokens`. Raises InputError for anything else."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise InputError(f"a duration is like 2000steps, 3epochs or 5Mtokens, got {text!r}")
        number, factor, unit = match.groups()
        amount = float(number) * _FACTOR[factor.lower()]
        if amount <= 0:
            raise InputError(f"a duration must be more than 0, got {text!r}")
        kinds: dict[str, Literal["step", "epoch", "token"]]
        kinds = {"step": "step", "epoch": "epoch", "token": "token"}
        return cls(amount=amount, unit=kinds[unit.removesuffix("s")])

    def steps(self, *, tokens_per_step: int, steps_per_epoch: float) -> int:
        """Optimiser steps, rounded up, at least one."""
        per_unit = {"step": 1.0, "epoch": steps_per_epoch, "token": 1 / tokens_per_step}
        return max(1, math.ceil(self.amount * per_unit[self.unit] - 1e-9))
