"""Lossless speculative decoding for language models that you already have.

    import draftsmith

    target = draftsmith.load_target("Qwen/Qwen3-0.6B")
    drafter = draftsmith.load_drafter("prompt_lookup")
    drafter.bind(target)

Importing this package loads nothing heavy: each name below is imported when it is first used. The
parts have names of their own: `draftsmith.decode.decode`, `draftsmith.verify.verify`. (A function
called like its module cannot be offered here: importing the module would shadow it.)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.bench.prompt import Prompt as Prompt
    from draftsmith.bench.suites import load_suite as load_suite
    from draftsmith.cache import KVCache as KVCache
    from draftsmith.decode import DecodeOptions as DecodeOptions
    from draftsmith.decode import Session as Session
    from draftsmith.distill.trainer import Trainer as Trainer
    from draftsmith.drafters._base import Drafter as Drafter
    from draftsmith.drafters._lookup import load_drafter as load_drafter
    from draftsmith.errors import DraftsmithError as DraftsmithError
    from draftsmith.generation import generate as generate
    from draftsmith.law import Law as Law
    from draftsmith.sampler import Sampler as Sampler
    from draftsmith.targets.hf import load_target as load_target
    from draftsmith.targets.toy import TabularTarget as TabularTarget
    from draftsmith.targets.toy import tiny_target as tiny_target
    from draftsmith.types import DecodeStep as DecodeStep
    from draftsmith.types import DraftTree as DraftTree
    from draftsmith.types import Proposal as Proposal
    from draftsmith.types import TreeShape as TreeShape
    from draftsmith.types import Verdict as Verdict

# Where each public name lives. A test keeps this, `__all__` and the block above in step.
_HOMES = {
    "DecodeOptions": "draftsmith.decode",
    "DecodeStep": "draftsmith.types",
    "DraftTree": "draftsmith.types",
    "Drafter": "draftsmith.drafters._base",
    "DraftsmithError": "draftsmith.errors",
    "KVCache": "draftsmith.cache",
    "Law": "draftsmith.law",
    "Prompt": "draftsmith.bench.prompt",
    "Proposal": "draftsmith.types",
    "Sampler": "draftsmith.sampler",
    "Session": "draftsmith.decode",
    "TabularTarget": "draftsmith.targets.toy",
    "Trainer": "draftsmith.distill.trainer",
    "TreeShape": "draftsmith.types",
    "Verdict": "draftsmith.types",
    "generate": "draftsmith.generation",
    "load_drafter": "draftsmith.drafters._lookup",
    "load_suite": "draftsmith.bench.suites",
    "load_target": "draftsmith.targets.hf",
    "tiny_target": "draftsmith.targets.toy",
}

__all__ = [
    "DecodeOptions",
    "DecodeStep",
    "DraftTree",
    "Drafter",
    "DraftsmithError",
    "KVCache",
    "Law",
    "Prompt",
    "Proposal",
    "Sampler",
    "Session",
    "TabularTarget",
    "Trainer",
    "TreeShape",
    "Verdict",
    "generate",
    "load_drafter",
    "load_suite",
    "load_target",
    "tiny_target",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("draftsmith")
    if name not in _HOMES:
        raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
