"""Amounts with their unit: `Duration` of a training run, sizes of files, counts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
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


_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([kKmMgGtT]?)([iI]?)[bB]?")
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str, flag: str) -> int:
    """`500MB`, `20G`, `1.5GiB` in bytes. Raises InputError naming the flag for anything else."""
    match = _SIZE.fullmatch(text.strip())
    size = 0.0
    if match is not None:
        number, factor, binary = match.groups()
        size = float(number) * (1024 if binary else 1000) ** _POWER[factor.lower()]
    if size < 1:
        raise InputError(f"{flag} must be a size such as 500MB or 20GB, got {text!r}")
    return int(size)


_COUNT = re.compile(
    r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?)\s*([kmbt]?)", re.IGNORECASE
)
_THOUSANDS = {"": 0, "k": 1, "m": 2, "b": 3, "t": 4}


def parse_count(text: str, name: str) -> float:
    """How many parameters or tokens: `1.8e11`, `180000000000.0` or `180B` (K, M, B, T).

    Raises InputError naming `name` for anything else and for less than 1.
    """
    match = _COUNT.fullmatch(text.strip())
    count = 0.0
    if match is not None:
        number, unit = match.groups()
        # decimal: 2.4T is 2.4e12 to the last bit
        count = float(Decimal(number).scaleb(3 * _THOUSANDS[unit.lower()]))
    if not 1 <= count < math.inf:
        raise InputError(
            f"{name} must be a count of 1 or more such as 1.8e11, 180000000000 or 180B "
            f"(K, M, B or T), got {text!r}"
        )
    return count
