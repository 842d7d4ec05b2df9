"""Targets as verbs load them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftsmith.errors import InputError
from draftsmith.targets.config import ModelConfig

if TYPE_CHECKING:
    from draftsmith.targets.base import BindableTarget
    from draftsmith.targets.hf import HFTarget


def open_target(model: ModelConfig) -> BindableTarget:
    """Load the target, without the progress bars of transformers."""
    from draftsmith.targets.hf import quieten
    from draftsmith.targets.registry import open_target as open_named

    quieten()
    return open_named(model)


def open_model(model: ModelConfig) -> HFTarget:
    """As `open_target`, for verbs that read the modules of a transformers model.

    Raises:
        InputError: the target is of another kind.
    """
    from draftsmith.targets.hf import HFTarget

    target = open_target(model)
    if not isinstance(target, HFTarget):
        raise InputError(f"--target {model.target}: this needs a transformers model.")
    return target
