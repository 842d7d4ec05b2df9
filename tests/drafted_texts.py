"""Texts of a ragged batch with a drafter, to be compared with those of plain decoding."""

from __future__ import annotations

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.none import NoDrafter
from draftsmith.targets.hf import HFTarget

PROMPTS = ([1, 2, 3, 4, 5], [9, 8], [7] * 12)


def drafted_texts(
    target: HFTarget, drafter: Drafter, temperature: float, shape: TreeShape
) -> tuple[list[list[int]], int]:
    """(texts, accepted drafts)."""
    drafter.bind(target)
    out: list[list[int]] = [[] for _ in PROMPTS]
    accepted = 0
    options = DecodeOptions(
        sampler=Sampler(temperature=temperature),
        max_new_tokens=24,
        rule="match",
        seed=5,
        shape=None if isinstance(drafter, NoDrafter) else shape,
    )
    for step in decode(target, drafter, PROMPTS, options):
        accepted += sum(step.accepted)
        for b, emitted in enumerate(step.emitted):
            out[b] += emitted
    return out, accepted
