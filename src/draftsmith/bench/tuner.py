"""Tuning: measure costs, decode with every draft shape, estimate speed-ups.

Candidates are drafters with drafts of many shapes, each decoded and costed.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from draftsmith.bench.arms import proposal_of, time_decode
from draftsmith.bench.config import TuneConfig
from draftsmith.bench.costs import (
    ROUNDS,
    CostMeter,
    CostTable,
    Workload,
    chain_arms,
    cost_file,
    doubling,
    open_meter,
    step_costs,
)
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm, DraftCounts
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import loaded_frozen
from draftsmith.core.types import TreeShape
from draftsmith.drafters.config import DraftingConfig
from draftsmith.errors import InputError
from draftsmith.plan.length_policy import CostAware, Learning, StepCosts
from draftsmith.plan.tune import (
    BatchEstimate,
    BatchStepCosts,
    Measurement,
    Tuning,
    estimate_candidate,
    speedup,
)
from draftsmith.provenance import warn_if_busy
from draftsmith.targets.hf import HFTarget

_log = logging.getLogger(__name__)

TREES = ("2,1", "2,1,1,1", "3,2,1", "4,2,1,1", "4,2,2,1")
"""4, 8, 15, 28 and 44 nodes."""
DRAWS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateShape:
    """A drafter with drafts of one shape."""

    arm: Arm
    drafter: str
    """As the user spelt it; the arm's name is that of its cost curve."""
    shape: str
    flags: tuple[str, ...]
    length: int | None = None
    """Length of a chain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateDrafter:
    """A drafter, and the trees that it can draft."""

    name: str
    chain: Arm
    """As long as it may be."""
    flags: tuple[str, ...]
    """What else asks for its chains on a command line."""
    trees: tuple[CandidateShape, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return doubling(self.chain.used_shape.depth)

    @property
    def timed(self) -> tuple[Arm, ...]:
        """Return the chains of no token and of these lengths."""
        return chain_arms(self.chain, (0, *self.lengths))

    def entries(self, lengths: Sequence[int]) -> tuple[CandidateShape, ...]:
        """Return the candidate shapes for chains of these lengths."""
        return tuple(
            CandidateShape(
                arm=arm,
                drafter=self.name,
                shape="1 token" if length == 1 else f"{length} tokens",
                flags=("--draft-length", str(length), *self.flags),
                length=length,
            )
            for length, arm in zip(lengths, chain_arms(self.chain, lengths), strict=True)
        )

    def controlled(self, costs: StepCosts) -> CandidateShape:
        """Return the candidate shape whose length is chosen step by step."""
        return CandidateShape(
            arm=replace(self.chain, policy=Learning(CostAware(costs=costs))),
            drafter=self.name,
            shape="as many tokens as pay",
            flags=("--draft-length", "auto", *self.flags),
        )


def candidates_of(
    names: Sequence[str], arms: Sequence[Arm], options: DraftingConfig, longest: int
) -> tuple[CandidateDrafter, ...]:
    """Give each drafter chains of at most `longest` tokens, and its trees."""
    candidates = []
    for name, arm in zip(names, arms, strict=True):
        depth = min(longest, arm.drafter.longest or longest)
        proposal = options.draft_proposal if proposal_of(arm.drafter) else None
        candidates.append(
            CandidateDrafter(
                name=name,
                chain=replace(arm, shape=TreeShape.chain(depth)),
                flags=_proposal_flags(proposal),
                trees=_trees(name, arm, proposal) if arm.drafter.takes_trees else (),
            )
        )
    return tuple(candidates)


def _trees(name: str, arm: Arm, proposal: str | None) -> tuple[CandidateShape, ...]:
    """Return trees, drawn in the way that is best verified unless the user chose one."""
    if proposal is None and proposal_of(arm.drafter):
        proposal = "without_replacement"
        twin = copy.copy(arm.drafter)  # its weights are shared
        twin.config = replace(arm.drafter.config, proposal=proposal)
        arm = replace(arm, drafter=twin)
    chosen = _proposal_flags(proposal)
    trees: list[tuple[str, TreeShape, tuple[str, ...]]] = []
    for text in TREES:
        shape = TreeShape(widths=tuple(int(width) for width in text.split(",")))
        if shape.depth <= (arm.drafter.longest or shape.depth):
            trees.append((f"a tree {text}", shape, ("--draft-tree", text, *chosen)))
    usual = arm.drafter.default_shape
    if not usual.is_chain:
        what = f"its own tree of {usual.num_nodes} nodes"
        trees.append((what, usual, () if usual.is_dynamic else chosen))
    return tuple(
        CandidateShape(
            # a curve of its own: what drafting costs is no matter of the width alone
            arm=replace(arm, name=f"{arm.name}, {what}", shape=shape),
            drafter=name,
            shape=what,
            flags=flags,
        )
        for what, shape, flags in trees
    )


def _proposal_flags(proposal: str | None) -> tuple[str, ...]:
    return () if proposal is None else ("--draft-proposal", proposal)


def between(length: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return untried lengths halfway to the tried neighbours."""
    below = [other for other in lengths if 0 < other < length][-1:]
    above = [other for other in lengths if other > length][:1]
    return tuple(sorted({(length + other) // 2 for other in (*below, *above)} - set(lengths)))


class Tuner:
    """Compare drafters, lengths and trees on one target.

    `arms`: a bound drafter for each of `config.drafters()`. `prompts`: token ids; `predictions`:
    what is expected behind each, as token ids, for drafters that read it.
    """

    def __init__(
        self,
        config: TuneConfig,
        target: HFTarget,
        arms: Sequence[Arm],
        sampler: Sampler,
        prompts: Sequence[Sequence[int]],
        predictions: Sequence[Sequence[int]],
    ) -> None:
        self._config, self.target, self._sampler = config, target, sampler
        self._candidates = candidates_of(config.drafters(), arms, config.drafting, config.longest)
        self._prompts, self._predictions = prompts, predictions
        self._decoding = DecodeOptions(
            sampler=sampler,
            max_new_tokens=config.max_new_tokens,
            rule=config.drafting.used_rule,
            allow_lossy=config.drafting.is_lossy(),
            seed=config.sampling.seed,
        )

    @loaded_frozen()
    def tune(self) -> Tuning:
        """Measure costs, decode with every shape, predict."""
        warn_if_busy()
        meter, costs = self._measure(1)
        rng = np.random.default_rng(self._config.sampling.seed)
        table, draws = meter.table(), [meter.redrawn(rng) for _ in range(DRAWS)]
        measurements = [
            measurement
            for candidate in self._candidates
            for measurement in self._try_all(candidate, costs[candidate.name], table)
        ]
        candidates = [
            estimate_candidate(
                measurement,
                self._price(table, measurement),
                [self._price(one, measurement) for one in draws],
            )
            for measurement in measurements
        ]
        return Tuning(
            candidates=tuple(sorted(candidates, key=lambda one: one.speedup, reverse=True)),
            costs=costs,
            batches=self._batches(measurements, table),
            plain_tokens_per_second=1 / table.target_seconds(1),
        )

    def _price(self, table: CostTable, measurement: Measurement) -> BatchStepCosts:
        """Look up the costs of this measurement's steps in the table."""
        drafting = partial(table.draft_seconds, measurement.curve, self._sampler.temperature)
        by_width = {w: table.target_seconds(w) + drafting(w) for w in measurement.widths}
        return BatchStepCosts(plain=table.target_seconds(1), by_width=by_width)

    def _measure(self, rows: int) -> tuple[CostMeter, dict[str, StepCosts]]:
        """Measure costs with so many rows, and those of chains by length, which --draft-length auto
        will find in the cache."""
        _log.info("measuring what steps cost with %d row%s", rows, "s" if rows > 1 else "")
        workload = Workload(
            prompts=self._prompts,
            max_new_tokens=self._config.max_new_tokens,
            predictions=self._predictions,
            rows=rows,
        )
        chains = [arm for candidate in self._candidates for arm in candidate.timed]
        trees = [entry.arm for candidate in self._candidates for entry in candidate.trees]
        meter = open_meter(self.target, [*chains, *trees], self._sampler, workload)
        meter.measure(ROUNDS)
        table, steps, costs, first = meter.table(), meter.steps(), {}, 0
        for candidate in self._candidates:
            own = steps[first : first + len(candidate.timed)]
            first += len(candidate.timed)
            drafter = candidate.chain.drafter
            costs[candidate.name] = step_costs(table, drafter, (0, *candidate.lengths), own)
            file = cost_file(self.target, candidate.chain, self._sampler, workload)
            trouble = file.store(costs[candidate.name])
            if trouble is not None:
                _log.info(trouble)
        return meter, costs

    def _try_all(
        self, candidate: CandidateDrafter, costs: StepCosts, table: CostTable
    ) -> list[Measurement]:
        """Try chains of doubling lengths, then around the best of them; trees; auto.

        Raises:
            InputError: no prompt gave a step to measure.
        """
        chains = self._decode_all(candidate.entries(candidate.lengths))
        if not chains:
            raise InputError(
                f"--suite {self._config.suite}: no prompt gave a step to measure, since each text "
                "ended in the step of its prompt; give prompts with longer texts, or a larger "
                "--max-new-tokens."
            )
        best = max(chains, key=lambda one: speedup(one, self._price(table, one)))
        assert best.length is not None
        nearby = candidate.entries(between(best.length, candidate.lengths))
        others = (*nearby, *candidate.trees, candidate.controlled(costs))
        return [*chains, *self._decode_all(others)]

    def _decode_all(self, entries: Iterable[CandidateShape]) -> list[Measurement]:
        """Decode with all; drop those that finished every text in the step of its prompt."""
        return [measurement for entry in entries if (measurement := self._try(entry)).prompts]

    def _try(self, entry: CandidateShape) -> Measurement:
        """Decode every prompt once."""
        _log.info("decoding with %s, %s", entry.drafter, entry.shape)
        tokens, widths, counts = [], [], DraftCounts()
        texts = zip(self._prompts, self._predictions, strict=True)
        for number, (prompt, expected) in enumerate(texts):
            run = time_decode(
                self.target, entry.arm, [prompt], self._decoding, [number], [expected]
            )
            assert run.counts is not None
            tokens.append(run.decode_tokens[0])
            widths.append(Counter(run.widths))
            counts = counts + run.counts[0]
        return Measurement(
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

    def _batches(
        self, measurements: Sequence[Measurement], table: CostTable
    ) -> tuple[BatchEstimate, ...]:
        """Find the best draft of each drafter at each batch size."""
        found = []
        for rows in self._config.sizes():
            priced, own = table, list(measurements)
            if rows > 1:
                meter, costs = self._measure(rows)
                priced = meter.table()
                # a controller goes by what steps of such a batch cost
                auto = self._decode_all(one.controlled(costs[one.name]) for one in self._candidates)
                own = [one for one in measurements if one.depth is not None] + auto
            for candidate in self._candidates:
                estimates = [
                    BatchEstimate(
                        rows=rows,
                        measurement=one,
                        speedup=speedup(one, self._price(priced, one), rows=rows),
                    )
                    for one in own
                    if one.drafter == candidate.name
                ]
                found.append(max(estimates, key=lambda one: one.speedup))
        return tuple(found)
