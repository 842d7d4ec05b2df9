"""What `draftsmith tune` tries: drafters with drafts of many shapes, decoded and priced."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftsmith.bench.arms import Arm, time_decode
from draftsmith.bench.costs import CostMeter, CostTable
from draftsmith.bench.step_costs import chain_arms, doubling
from draftsmith.decode import DecodeOptions
from draftsmith.drafters._base import Drafter
from draftsmith.drafting_options import DraftingOptions
from draftsmith.generation import DraftCounts
from draftsmith.plan.control import CostAware, Learning, StepCosts
from draftsmith.plan.tune import Prices, Trial
from draftsmith.recipes._drafting import open_drafters, proposal_of
from draftsmith.targets._base import Target
from draftsmith.targets.hf import HFTarget
from draftsmith.types import TreeShape

TREES = ("2,1", "2,1,1,1", "3,2,1", "4,2,1,1", "4,2,2,1")
"""4, 8, 15, 28 and 44 nodes."""
DRAWS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A drafter with drafts of one shape."""

    arm: Arm
    drafter: str
    """As the user spelt it; the arm's name is that of its cost curve."""
    shape: str
    flags: tuple[str, ...]
    length: int | None = None
    """Of a chain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """A drafter, and the trees that it can draft."""

    name: str
    chain: Arm
    """As long as it may be."""
    flags: tuple[str, ...]
    """What else asks for its chains on a command line."""
    trees: tuple[Entry, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return doubling(self.chain.used_shape.depth)

    @property
    def timed(self) -> tuple[Arm, ...]:
        """Chains of no token and of these lengths."""
        return chain_arms(self.chain, (0, *self.lengths))

    def entries(self, lengths: Iterable[int]) -> tuple[Entry, ...]:
        """Chains of these lengths."""
        return tuple(
            Entry(
                arm=arm,
                drafter=self.name,
                shape=_tokens(arm.used_shape.depth),
                flags=("--draft-length", str(arm.used_shape.depth), *self.flags),
                length=arm.used_shape.depth,
            )
            for arm in chain_arms(self.chain, tuple(lengths))
        )

    def controlled(self, costs: StepCosts) -> Entry:
        """With the length chosen step by step."""
        return Entry(
            arm=replace(self.chain, policy=Learning(CostAware(costs=costs))),
            drafter=self.name,
            shape="as many tokens as pay",
            flags=("--draft-length", "auto", *self.flags),
        )


def open_entrants(
    names: Sequence[str],
    options: DraftingOptions,
    target: HFTarget,
    longest: int,
) -> tuple[Entrant, ...]:
    """Load the drafters.

    Raises:
        InputError: see `open_drafters`.
    """
    arms = open_drafters(names, replace(options, draft_length="auto"), target)
    entrants = []
    for name, arm in zip(names, arms, strict=True):
        depth = min(longest, arm.drafter.longest or longest)
        own = replace(
            options,
            drafter_option=options.assignments(name, alone=len(names) == 1),
            draft_proposal=options.draft_proposal if proposal_of(arm.drafter) else None,
        )
        entrants.append(
            Entrant(
                name=name,
                chain=replace(arm, shape=TreeShape.chain(depth)),
                flags=_proposal_flags(own.draft_proposal),
                trees=_trees(name, arm, own) if arm.drafter.takes_trees else (),
            )
        )
    return tuple(entrants)


def _trees(name: str, chain: Arm, options: DraftingOptions) -> tuple[Entry, ...]:
    """Drawn in the way that is best verified, unless the user chose one."""
    arm, proposal = chain, options.draft_proposal
    if proposal is None and proposal_of(chain.drafter):
        proposal = "without_replacement"
        arm = replace(chain, drafter=_proposing(chain.drafter, proposal))
    chosen = _proposal_flags(proposal)
    out = []
    for text in TREES:
        shape = TreeShape(widths=tuple(int(width) for width in text.split(",")))
        if shape.depth <= (arm.drafter.longest or shape.depth):
            out.append(_tree(arm, name, f"a tree {text}", shape, ("--draft-tree", text, *chosen)))
    usual = arm.drafter.default_shape
    if not usual.is_chain:
        what = f"its own tree of {usual.num_nodes} nodes"
        out.append(_tree(arm, name, what, usual, () if usual.is_dynamic else chosen))
    return tuple(out)


def _proposing(drafter: Drafter, proposal: str) -> Drafter:
    """The same drafter, its weights shared, that chooses children in this way."""
    twin = copy.copy(drafter)
    twin.config = replace(drafter.config, proposal=proposal)
    return twin


def _proposal_flags(proposal: str | None) -> tuple[str, ...]:
    return () if proposal is None else ("--draft-proposal", proposal)


def _tree(arm: Arm, name: str, what: str, shape: TreeShape, flags: tuple[str, ...]) -> Entry:
    # a curve of its own: what drafting costs is no matter of the width alone
    mine = replace(arm, name=f"{arm.name}, {what}", shape=shape)
    return Entry(arm=mine, drafter=name, shape=what, flags=flags)


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def between(length: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Untried lengths halfway to the tried neighbours."""
    near = [other for other in (_below(length, lengths), _above(length, lengths)) if other]
    middles = {(length + other) // 2 for other in near}
    return tuple(sorted(middles - set(lengths)))


def _below(length: int, lengths: Sequence[int]) -> int | None:
    return max((other for other in lengths if other < length), default=None)


def _above(length: int, lengths: Sequence[int]) -> int | None:
    return min((other for other in lengths if other > length), default=None)


def decode_entry(
    target: Target,
    entry: Entry,
    prompts: Sequence[Sequence[int]],
    predictions: Sequence[Sequence[int]],
    options: DecodeOptions,
) -> Trial:
    """Decode every prompt once."""
    tokens: list[int] = []
    widths: list[Counter[int]] = []
    counts = DraftCounts()
    for number, (prompt, prediction) in enumerate(zip(prompts, predictions, strict=True)):
        run = time_decode(target, entry.arm, [prompt], options, [number], [prediction])
        assert run.counts is not None
        tokens.append(run.decode_tokens[0])
        widths.append(Counter(run.widths))
        counts = counts + run.counts[0]
    return Trial(
        drafter=entry.drafter,
        curve=entry.arm.name,
        shape=entry.shape,
        flags=entry.flags,
        length=entry.length,
        depth=entry.arm.used_shape.depth if entry.arm.policy is None else None,
        tokens_P=tuple(tokens),
        widths_P=tuple(widths),
        by_depth=tuple(counts.by_position),
    )


def prices(table: CostTable, trial: Trial, temperature: float) -> Prices:
    """What this trial's steps cost by the table."""
    return Prices(
        plain=table.target_seconds(1),
        by_width={
            width: table.target_seconds(width)
            + table.draft_seconds(trial.curve, temperature, width)
            for width in trial.widths
        },
    )


def redrawn(meter: CostMeter, seed: int) -> tuple[CostTable, ...]:
    """Tables from rounds drawn anew."""
    rng = np.random.default_rng(seed)
    return tuple(meter.redrawn(rng) for _ in range(DRAWS))
