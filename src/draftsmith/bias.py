"""How far verification leans towards a draft: the values that a bias may have, and their risks."""

from __future__ import annotations

from draftsmith.errors import InputError


def check_bias(value: float, name: str = "bias") -> None:
    """Raise `InputError` unless this can be a bias; NaN cannot."""
    if not 0 <= value <= 1:
        meant = "0: exact, from 0.5 on every draft stays"
        raise InputError(f"{name} must lie between 0 and 1, got {value} ({meant})")


def bias_warning(*biases: float | None) -> str | None:
    """What to know before such a bias is used; None: nothing."""
    if any(bias is not None and bias >= 0.5 for bias in biases):
        return "from a bias of 0.5 on text is only appended: early mistakes stay, quality collapses"
    return None
