"""From options of the command line to what decodes: target, drafters, sampler, tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftsmith.core.config import SamplingConfig
from draftsmith.errors import InputError
from draftsmith.targets.config import ModelConfig

if TYPE_CHECKING:
    from draftsmith.core.sampling import Sampler
    from draftsmith.targets.base import BindableTarget
    from draftsmith.targets.hf import HFTarget


def open_target(model: ModelConfig) -> BindableTarget:
    """Load the target, without the progress bars of transformers."""
    from draftsmith.targets.hf import quieten
    from draftsmith.targets.registry import open_target as open_named

    quieten()
    return open_named(
        model.target,
        dtype=model.dtype,
        device=model.device,
        attn_implementation=model.attn_implementation,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )


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


def make_sampler(temperature: float, sampling: SamplingConfig) -> Sampler:
    from draftsmith.core.sampling import Sampler

    return Sampler(
        temperature=temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(sampling.biases().items()),
    )
