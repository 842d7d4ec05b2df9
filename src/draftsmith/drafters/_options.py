"""What an option of a drafter is for, said beside it in the drafter's `Config`:

    noise: float = field(default=0.2, metadata=TRAINING)

An option without this is read when the drafter drafts.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

TRAINING = {"when": "training"}
"""Metadata of a field that decoding does not read."""


def training_options(config: Any) -> frozenset[str]:
    """Names of the options of a `Config` (class or instance) that only training reads."""
    return frozenset(
        field.name for field in fields(config) if field.metadata.get("when") == "training"
    )
