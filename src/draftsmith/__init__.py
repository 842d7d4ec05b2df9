"""Lossless speculative decoding for language models that you already have.

    import draftsmith

    target = draftsmith.load_target("Qwen/Qwen3-0.6B")
    drafter = draftsmith.load_drafter("prompt_lookup")
    drafter.bind(target)

Importing this package loads nothing heavy: each name below is imported when it is first used. The
parts have names of their own: `draftsmith.core.decode.decode`, `draftsmith.core.verify.verify`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.core.cache import KVCache
    from draftsmith.core.decode import DecodeOptions, Session
    from draftsmith.core.generation import generate
    from draftsmith.core.law import Law
    from draftsmith.core.sampling import Sampler
    from draftsmith.core.types import DecodeStep, DraftTree, Proposal, TreeShape, Verdict
    from draftsmith.data.prompts import Prompt
    from draftsmith.data.suites import load_suite
    from draftsmith.distill.trainer import Trainer
    from draftsmith.drafters.base import Drafter
    from draftsmith.drafters.registry import load_drafter
    from draftsmith.errors import DraftsmithError
    from draftsmith.targets.hf import load_target
    from draftsmith.targets.toy import TabularTarget, tiny_target

# Where each public name lives. A test keeps this, `__all__` and the block above in step.
_HOMES = {
    "DecodeOptions": "draftsmith.core.decode",
    "DecodeStep": "draftsmith.core.types",
    "DraftTree": "draftsmith.core.types",
    "Drafter": "draftsmith.drafters.base",
    "DraftsmithError": "draftsmith.errors",
    "KVCache": "draftsmith.core.cache",
    "Law": "draftsmith.core.law",
    "Prompt": "draftsmith.data.prompts",
    "Proposal": "draftsmith.core.types",
    "Sampler": "draftsmith.core.sampling",
    "Session": "draftsmith.core.decode",
    "TabularTarget": "draftsmith.targets.toy",
    "Trainer": "draftsmith.distill.trainer",
    "TreeShape": "draftsmith.core.types",
    "Verdict": "draftsmith.core.types",
    "generate": "draftsmith.core.generation",
    "load_drafter": "draftsmith.drafters.registry",
    "load_suite": "draftsmith.data.suites",
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
