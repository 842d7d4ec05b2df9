"""What an option of a drafter is for, said beside it in the drafter's `Config`:

    noise: float = field(default=0.2, metadata=TRAINING)     training alone reads it
    heads: int = field(default=4, metadata=STRUCTURE)        and only where it begins from nothing
    recompute: bool = field(default=True, metadata=COST)     what is learnt does not hang on it

An option without this is read when the drafter drafts.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from draftsmith.errors import InputError

TRAINING = {"when": "training"}
"""Metadata of a field that decoding does not read."""
STRUCTURE = {**TRAINING, "fixed": True}
"""Of a field that weights which are there already have settled."""


COST = {**TRAINING, "free": True}
"""Of a field that changes the time and memory of training alone."""


def training_options(config: Any) -> frozenset[str]:
    """Names of the options of a `Config` (class or instance) that only training reads."""
    return frozenset(
        field.name for field in fields(config) if field.metadata.get("when") == "training"
    )


def structure_options(config: Any) -> frozenset[str]:
    """Names of those that a trained drafter's folder has settled."""
    return frozenset(field.name for field in fields(config) if field.metadata.get("fixed"))


def free_options(config: Any) -> frozenset[str]:
    """Names of those with which as without which the same is learnt."""
    return frozenset(field.name for field in fields(config) if field.metadata.get("free"))


def at_least(least: int, **values: float) -> None:
    """InputError for an option below `least`, or not finite."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= least):
            raise InputError(f"drafter option {name} must be at least {least}, got {value}")
