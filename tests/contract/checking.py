"""Comparing what `decode()` emits with what the target says, for any drafter and any options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from draftsmith.core.decode import DecodeOptions
from draftsmith.targets.toy import TabularTarget

from .cases import Case
from .enumeration import EnumeratingNoise, Explored, explore, follow_decode
from .oracle import joint_law, story, total_variation
from .toys import PREDICTIONS, PROMPTS, sparse

ROUNDING = 1e-10
"""Laws are computed in float64; a true bias on these targets is far above 1e-3."""


def models(case: Case) -> tuple[TabularTarget, TabularTarget]:
    """Target and draft model, as rich as the drafter's branching allows."""
    keep = support(case)
    return sparse(keep, 0), sparse(keep, 1)


def support(case: Case) -> int:
    """How many of the 8 tokens may follow a context."""
    if not case.draws:
        return 5
    return 3 if case.shape.is_chain else 2


def check(
    case: Case,
    target: TabularTarget,
    draft_model: TabularTarget,
    options: DecodeOptions,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    batch: int = 1024,
    noise: type[EnumeratingNoise] = EnumeratingNoise,
    strict: bool = True,
) -> Explored:
    """Enumerate, and compare the law behind each prompt with the target's own."""
    options = dataclasses.replace(options, shape=options.shape or case.shape)
    follow = follow_decode(
        target,
        case.build(draft_model),
        prompts,
        options,
        PREDICTIONS[: len(prompts)] if case.uses_predictions else (),
    )
    found = explore(
        prompts, options.max_new_tokens, follow, batch=batch, noise=noise, strict=strict
    )
    for prompt, law in zip(prompts, found.laws, strict=True):
        expected = joint_law(target, options.sampler, prompt, options.max_new_tokens)
        assert total_variation(expected, law) < ROUNDING, (
            f"{case} with rule {options.rule} and {options.sampler} does not emit the target's law "
            f"behind {list(prompt)}:\n{story(expected, law)}"
        )
    return found
