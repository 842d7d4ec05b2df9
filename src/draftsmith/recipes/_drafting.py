"""From options of the command line to what decodes: target, drafters, sampler, tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftsmith.bench.arms import Arm
from draftsmith.bench.suites import Prompt
from draftsmith.drafters._base import Drafter
from draftsmith.drafters._lookup import load_drafter
from draftsmith.errors import InputError
from draftsmith.law import Sampler
from draftsmith.option_groups import DraftingOptions, ModelOptions, SamplingOptions
from draftsmith.plan.control import AdaptiveLength
from draftsmith.provenance import portable_text
from draftsmith.targets._base import Target
from draftsmith.types import LengthPolicy, TreeShape

if TYPE_CHECKING:
    from draftsmith.targets.hf import HFTarget


def open_target(model: ModelOptions) -> HFTarget:
    """Load the target; transformers' progress bars stay silent."""
    from transformers.utils import logging

    from draftsmith.targets.hf import load_target

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return load_target(
        model.target,
        dtype=model.dtype,
        device=model.device,
        attn_implementation=model.attn_implementation,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )


def open_drafters(
    names: Sequence[str], options: DraftingOptions, target: Target
) -> tuple[Arm, ...]:
    """Load and bind the drafters.

    Raises:
        InputError: an option that no drafter here has, or a draft longer than the context.
    """
    alone = len(names) == 1
    taken = False
    out: list[Arm] = []
    for name in names:
        assignments = list(options.assignments(name, alone=alone))
        drafter = load_drafter(name, assignments)
        chooses = any(field.name == "proposal" for field in dataclasses.fields(drafter.config))
        if chooses and options.draft_proposal is not None:
            taken = True
            drafter = load_drafter(name, [*assignments, f"proposal={options.draft_proposal}"])
        drafter.bind(target)
        label = portable_text(name)  # records name no folder outside the current one
        clash = any(arm.name == label for arm in out)
        out.append(_shaped(name if clash else label, drafter, options, target))
    if options.draft_proposal is not None and not taken:
        raise InputError(
            f"--draft-proposal is for draft models, and {', '.join(names)} is none: leave it out."
        )
    return tuple(out)


def _shaped(name: str, drafter: Drafter, options: DraftingOptions, target: Target) -> Arm:
    widths = options.widths()
    shape = None if widths is None else TreeShape(widths=widths)
    policy: LengthPolicy | None = None
    if options.draft_length == "adaptive" and drafter.default_shape.depth:
        policy = AdaptiveLength()
        shape = TreeShape.chain(policy.max_length)
    arm = Arm(name=name, drafter=drafter, shape=shape, policy=policy)
    nodes = arm.used_shape.num_nodes
    if target.max_length is not None and nodes >= target.max_length:
        raise InputError(
            f"A draft of {nodes} tokens does not fit into the context of {target.name}, which has "
            f"{target.max_length} positions: give a smaller --draft-length or --draft-tree."
        )
    return arm


def make_sampler(temperature: float, sampling: SamplingOptions) -> Sampler:
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


def encode(
    prompt: Prompt, target: Target, answers: Sequence[str] = (), *, where: str = "prompt"
) -> tuple[int, ...]:
    """The prompt as the target's tokens.

    Raises:
        InputError: it comes to no token at all, fills the context, or another tokenizer made it.
    """
    label = f"{where} {prompt.id}"
    if target.tokenizer is None:
        raise InputError(f"{label}: {target.name} has no tokenizer to read text with.")
    ids = prompt.token_ids(target.tokenizer, answers)
    if not ids:
        raise InputError(f"{label} is empty: it comes to no token at all.")
    if target.max_length is not None and len(ids) >= target.max_length:
        raise InputError(
            f"{label} has {len(ids)} tokens, but {target.name} has a context of "
            f"{target.max_length}: shorten it so that at least one token fits behind it."
        )
    if max(ids) >= target.vocab_size:
        raise InputError(
            f"{label} holds token {max(ids)}, outside the vocabulary of {target.vocab_size} of "
            f"{target.name}: tokenizer and model do not belong together."
        )
    return ids
