"""What an option of a drafter is for, said beside it in the drafter's `Config`:

    noise: float = field(default=0.2, metadata=TRAINING)     training alone reads it
    heads: int = field(default=4, metadata=STRUCTURE)        and only where it begins from nothing

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


def training_options(config: Any) -> frozenset[str]:
    """Names of the options of a `Config` (class or instance) that only training reads."""
    return frozenset(
        field.name for field in fields(config) if field.metadata.get("when") == "training"
    )


def structure_options(config: Any) -> frozenset[str]:
    """Names of those that a trained drafter's folder has settled."""
    return frozenset(field.name for field in fields(config) if field.metadata.get("fixed"))


def at_least(least: int, **values: float) -> None:
    """InputError for an option below `least`, or not finite."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= least):
            raise InputError(f"drafter option {name} must be at least {least}, got {value}")
