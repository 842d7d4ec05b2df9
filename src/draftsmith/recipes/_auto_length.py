"""`--draft-length auto`: the controller's costs, measured or from an earlier run, and said."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from draftsmith.bench.arms import Arm
from draftsmith.bench.cost_cache import REFRESH, Kept, cost_file
from draftsmith.bench.step_costs import Workload, measure
from draftsmith.drafting_options import DraftingOptions
from draftsmith.plan.control import CostAware, Learning, StepCosts
from draftsmith.provenance import portable_text
from draftsmith.recipes._busy import load_of_others
from draftsmith.sampler import Sampler
from draftsmith.targets._base import Target


def with_controllers(
    arms: Sequence[Arm],
    drafting: DraftingOptions,
    target: Target,
    sampler: Sampler,
    workload: Workload,
) -> tuple[Arm, ...]:
    """The arms; those that --draft-length auto is for choose by what steps cost here.

    Raises:
        InputError: the target's context is too short to measure in.
    """
    if drafting.draft_length != "auto":
        return tuple(arms)
    others = load_of_others()
    # arms that cannot follow the option have the drafter's own shape
    out = []
    for arm in arms:
        if arm.shape is not None:
            costs = costs_of(arm, target, sampler, workload, others)
            arm = replace(arm, policy=Learning(CostAware(costs=costs)))
        out.append(arm)
    return tuple(out)


def costs_in(arms: Sequence[Arm]) -> dict[str, StepCosts]:
    """What steps cost, by the arms' controllers."""
    return {
        portable_text(arm.name): arm.policy.policy.costs
        for arm in arms
        if isinstance(arm.policy, Learning)
    }


def costs_of(
    arm: Arm, target: Target, sampler: Sampler, workload: Workload, others: str | None
) -> StepCosts:
    """What steps with this drafter cost, up to the arm's depth; `others`: who disturbs."""
    notes = Console(stderr=True, highlight=False, markup=False, style="dim")
    file = cost_file(target, arm, sampler, workload)
    place = portable_text(str(file.path))
    kept = file.load()
    if isinstance(kept, Kept):
        notes.print(
            f"{arm.name}: {_said(kept.costs)}; measured on {kept.measured}, from {place} "
            f"({REFRESH}=1 measures again)",
            soft_wrap=True,
        )
        return kept.costs
    if kept is not None:
        notes.print(f"{kept}: measuring again", soft_wrap=True)
    if others is not None:
        notes.print(
            f"{others}: costs measured now will be off, and they are kept; close them and measure "
            f"again with {REFRESH}=1",
            soft_wrap=True,
        )
    began = time.monotonic()
    costs = measure(target, arm, sampler, workload)
    spent = time.monotonic() - began
    trouble = file.store(costs)
    notes.print(
        f"{arm.name}: {_said(costs)}; measured in {spent:.1f} s, {trouble or f'kept in {place}'}",
        soft_wrap=True,
    )
    return costs


def _said(costs: StepCosts) -> str:
    few = sorted({1, min(4, costs.longest), costs.longest})
    ratios = ", ".join(f"{costs.seconds(n) / costs.seconds(0):.2f}" for n in few)
    return f"with {', '.join(map(str, few))} drafted tokens a step lasts {ratios} times a plain one"
