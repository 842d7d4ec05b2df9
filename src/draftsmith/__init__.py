"""Lossless speculative decoding for language models that you already have.

    from draftsmith import Generator, SamplingParams

    generator = Generator("Qwen/Qwen3-0.6B", drafter="prompt_lookup")
    for output in generator.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
        print(output.text, output.metrics.acceptance_length)

Below it lies the precise layer: `load_target`, `load_drafter`, `draftsmith.core.decode.decode`.
Importing this package loads nothing heavy: each name below is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.core.cache import KVCache as KVCache
    from draftsmith.core.config import SamplingParams as SamplingParams
    from draftsmith.core.config import TreeShape as TreeShape
    from draftsmith.core.conversation import Conversation as Conversation
    from draftsmith.core.decode import DecodeOptions as DecodeOptions
    from draftsmith.core.decode import Session as Session
    from draftsmith.core.generation import Generator as Generator
    from draftsmith.core.generation import generate as generate
    from draftsmith.core.law import Law as Law
    from draftsmith.core.sampling import Sampler as Sampler
    from draftsmith.core.types import DecodeStep as DecodeStep
    from draftsmith.core.types import DraftTree as DraftTree
    from draftsmith.core.types import Proposal as Proposal
    from draftsmith.core.types import Verdict as Verdict
    from draftsmith.data.prompts import Prompt as Prompt
    from draftsmith.data.suites import load_suite as load_suite
    from draftsmith.distill.trainer import Trainer as Trainer
    from draftsmith.drafters.base import Drafter as Drafter
    from draftsmith.drafters.registry import load_drafter as load_drafter
    from draftsmith.errors import DraftsmithError as DraftsmithError
    from draftsmith.targets.hf import load_target as load_target
    from draftsmith.targets.toy import TabularTarget as TabularTarget
    from draftsmith.targets.toy import tiny_target as tiny_target

# Where each public name lives. A test keeps this, `__all__` and the block above in step.
_HOMES = {
    "Conversation": "draftsmith.core.conversation",
    "DecodeOptions": "draftsmith.core.decode",
    "DecodeStep": "draftsmith.core.types",
    "DraftTree": "draftsmith.core.types",
    "Drafter": "draftsmith.drafters.base",
    "DraftsmithError": "draftsmith.errors",
    "Generator": "draftsmith.core.generation",
    "KVCache": "draftsmith.core.cache",
    "Law": "draftsmith.core.law",
    "Prompt": "draftsmith.data.prompts",
    "Proposal": "draftsmith.core.types",
    "Sampler": "draftsmith.core.sampling",
    "SamplingParams": "draftsmith.core.config",
    "Session": "draftsmith.core.decode",
    "TabularTarget": "draftsmith.targets.toy",
    "Trainer": "draftsmith.distill.trainer",
    "TreeShape": "draftsmith.core.config",
    "Verdict": "draftsmith.core.types",
    "generate": "draftsmith.core.generation",
    "load_drafter": "draftsmith.drafters.registry",
    "load_suite": "draftsmith.data.suites",
    "load_target": "draftsmith.targets.hf",
    "tiny_target": "draftsmith.targets.toy",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("draftsmith")
    if name not in _HOMES:
        raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
