"""Drafters by name and configuration, bound to a target, with the shape of their drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from draftsmith.core.generation import Arm
from draftsmith.core.types import LengthPolicy, TreeShape
from draftsmith.data.prompts import Prompt
from draftsmith.drafters.base import Drafter, training_options
from draftsmith.drafters.config import DraftingConfig, drafter_parts
from draftsmith.drafters.registry import load_drafter, option_keys
from draftsmith.errors import InputError
from draftsmith.provenance import portable_text
from draftsmith.targets.base import BindableTarget, Target

_OWN_SHAPE: dict[str, Any] = {"draft_length": None, "draft_tree": None}


def open_drafters(
    names: Sequence[str], options: DraftingConfig, target: BindableTarget
) -> tuple[Arm, ...]:
    """Load and bind the drafters.

    Raises:
        InputError: an option that no drafter here can follow (one that some can is for those), an
            option of a drafter that only training reads, or a draft longer than the context.
    """
    alone = len(names) == 1
    shaping = options.draft_length is not None or options.draft_tree is not None
    unshaped: dict[str, str] = {}
    undrawn: dict[str, str] = {}
    out: list[Arm] = []
    for name in names:
        assignments = options.assignments(name, alone=alone)
        drafter = _load(name, assignments, options.draft_proposal)
        drafter.bind(target)
        label = portable_text(name)  # records name no folder outside the current one
        clash = any(arm.name == label for arm in out)
        reason = _unusable(name, drafter, options, alone=alone) if shaping else None
        if reason is not None:
            unshaped[name] = reason
        fitting = options if reason is None else dataclasses.replace(options, **_OWN_SHAPE)
        arm = _shaped(name if clash else label, drafter, fitting, target)
        reason = _undrawn(name, arm)
        if reason is not None and "proposal" in option_keys(assignments):
            raise InputError(f"{reason}.")
        if reason is not None and options.draft_proposal is not None:
            undrawn[name] = reason
        out.append(arm)
    for refused in (unshaped, undrawn):
        if len(refused) == len(names):
            others = [reason for name, reason in refused.items() if name != "none"]
            raise InputError("; ".join(others or refused.values()) + ".")
    return tuple(out)


def _load(name: str, assignments: Sequence[str], proposal: str | None) -> Drafter:
    drafter = load_drafter(name, assignments)
    for key in option_keys(assignments):
        if key in training_options(drafter.config):
            raise InputError(
                f"--drafter-option {key}: {name} reads it when it is trained, not when it drafts; "
                "leave it out."
            )
    if proposal is None or proposal_of(drafter) is None:
        return drafter
    return load_drafter(name, [*assignments, f"proposal={proposal}"])


def proposal_of(drafter: Drafter) -> str | None:
    """How it chooses children; None: it knows one way only."""
    return getattr(drafter.config, "proposal", None)


def _undrawn(name: str, arm: Arm) -> str | None:
    """Why a proposal that is asked for would do nothing; None: it works."""
    proposal = proposal_of(arm.drafter)
    if proposal is None:
        return f"--draft-proposal is for draft models, and {name} is none: leave it out"
    if proposal == "greedy" or not arm.used_shape.is_dynamic:
        return None
    return (
        f"the tree of {name} grows from its most probable tokens, where the proposal {proposal} "
        "does nothing: leave it out, or give --draft-length or a --draft-tree of fixed shape, "
        "such as 4,2,1"
    )


def _unusable(name: str, drafter: Drafter, options: DraftingConfig, *, alone: bool) -> str | None:
    """Why --draft-length or --draft-tree would do nothing, or less than it says; None: it works."""
    shape = options.tree() or TreeShape()
    longest = drafter.longest
    flag = "--draft-length" if options.draft_tree is None else "--draft-tree"
    if longest == 0:
        return f"{name} drafts nothing: leave out {flag}, or choose another --drafter"
    if not (shape.is_chain or drafter.takes_trees):
        return f"{name} drafts chains, no trees: use --draft-length in place of --draft-tree"
    if longest is None or shape.depth <= longest:
        return None
    # is there an option of its own that allows as much?
    missing = shape.depth - longest
    for field in dataclasses.fields(drafter.config):
        value = getattr(drafter.config, field.name)
        if type(value) is int:
            grown = dataclasses.replace(drafter.config, **{field.name: value + missing})
            if type(drafter)(grown).longest == shape.depth:
                owner = "" if alone else f"{drafter_parts(name)[0]}."
                hint = f"use --drafter-option {owner}{field.name}={value + missing}"
                return f"{name} drafts at most {longest} tokens: {hint}"
    return f"{name} drafts at most {longest} tokens: {flag} must not be longer"


def _shaped(name: str, drafter: Drafter, options: DraftingConfig, target: Target) -> Arm:
    shape = options.tree()
    policy: LengthPolicy | None = None
    if options.draft_length == "auto":  # the policy comes when costs are known: `_auto_length`
        from draftsmith.plan.length_policy import LONGEST_AUTO

        shape = TreeShape.chain(min(LONGEST_AUTO, drafter.longest or LONGEST_AUTO))
    elif options.draft_length == "adaptive":
        from draftsmith.plan.length_policy import AdaptiveLength

        policy = AdaptiveLength()
        if drafter.longest is not None and drafter.longest < policy.longest:
            first = min(policy.first, drafter.longest)
            policy = AdaptiveLength(first=first, longest=drafter.longest)
        shape = TreeShape.chain(policy.max_length)
    arm = Arm(name=name, drafter=drafter, shape=shape, policy=policy)
    nodes = arm.used_shape.num_nodes
    if target.max_length is not None and nodes >= target.max_length:
        raise InputError(
            f"A draft of {nodes} tokens does not fit into the context of {target.name}, which has "
            f"{target.max_length} positions: give a smaller --draft-length or --draft-tree."
        )
    return arm


def check_predictions(prompts: Sequence[Prompt], arms: Sequence[Arm]) -> None:
    """Raise `InputError` for a drafter that reads predictions where there are none."""
    for arm in arms:
        if arm.drafter.reads_predictions and not any(prompt.reference for prompt in prompts):
            raise InputError(
                f"--drafter {arm.name} drafts from the field `reference` of a prompt file, and no "
                "prompt here has one."
            )
