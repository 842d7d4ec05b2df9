"""What a step costs by how many tokens it drafts: what a controller of the draft's length reads.

Drafts of 0, 1, 2, 4, 8, ... tokens are timed, interleaved, by the meter of `costs`; lengths between
them are interpolated. Seconds depend on shapes, not on what weights say, so that any text will do:

    text    p0 p1 ... pn p0 p1 ... pn p0 ...      a prompt, repeated up to three quarters of the
            `---- three quarters of 256 ---'      `bucket` that the usual context falls into

Behind it drafters that look things up find something, and tables of one bucket are alike.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftsmith.bench.arms import Arm
from draftsmith.bench.costs import Cost, CostMeter, CostTable, interpolate
from draftsmith.decode import DecodeOptions
from draftsmith.drafters._base import Drafter
from draftsmith.errors import InputError
from draftsmith.plan.control import StepCosts
from draftsmith.sampler import Sampler
from draftsmith.targets._base import Target
from draftsmith.types import TreeShape

LONGEST = 16
"""The deepest drafts that a controller may choose."""
ROUNDS = 9
_PROBED = 64
"""Tokens that each text is continued by while steps are timed."""
_SMALLEST = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is decoded, as far as it decides what a step costs."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    predictions: Sequence[Sequence[int]] = ()
    """One per prompt, for drafters that read them; may be empty."""
    rows: int = 1
    """Decoded side by side."""

    @property
    def bucket(self) -> int:
        """256, 512, 1024, ...: the first that holds a prompt of middle length and half its text."""
        usual = len(self._middle) + self.max_new_tokens // 2
        return int(_SMALLEST * 2 ** max(0, (-(-usual // _SMALLEST) - 1).bit_length()))

    def text(self, limit: int) -> tuple[int, ...]:
        """The context to time steps behind, no longer than `limit`."""
        wanted = min(3 * self.bucket // 4, limit)
        return tuple(itertools.islice(itertools.cycle(self._middle), wanted))

    @property
    def expected(self) -> Sequence[int]:
        """The longest prediction."""
        return max(self.predictions, key=len, default=())

    @property
    def _middle(self) -> Sequence[int]:
        return sorted(self.prompts, key=len)[len(self.prompts) // 2]


def doubling(longest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... and `longest`."""
    return tuple(sorted({longest, *(1 << n for n in range(longest.bit_length()))}))


def chain_arms(arm: Arm, lengths: Sequence[int]) -> tuple[Arm, ...]:
    """The arm with chains of these lengths, whatever its policy."""
    return tuple(replace(arm, shape=TreeShape.chain(n), policy=None) for n in lengths)


def probed_arms(arm: Arm) -> tuple[Arm, ...]:
    """What to time where this arm runs: itself, or some chains where a policy chooses among all."""
    depth = arm.used_shape.depth
    few = sorted({1, max(1, depth // 4), depth})
    return (arm,) if arm.policy is None else chain_arms(arm, few)


def open_meter(
    target: Target, arms: Sequence[Arm], sampler: Sampler, workload: Workload
) -> CostMeter:
    """A meter for these arms, none of which has a policy.

    Raises:
        InputError: the target's context leaves no room to draft in.
    """
    widths = [1 + arm.drafter.max_nodes(arm.used_shape) for arm in arms]
    room = (target.max_length or 1 << 40) - 2 * max(widths)
    if room < 1:
        raise InputError(
            f"The context of {target.name} has {target.max_length} positions: too few to measure "
            f"drafts of {max(arm.used_shape.depth for arm in arms)} tokens in."
        )
    return CostMeter(
        target,
        arms,
        [sampler],
        [workload.text(room)],
        DecodeOptions(max_new_tokens=_PROBED),
        widths,
        predictions=[workload.expected],
        rows=workload.rows,
    )


def measure(target: Target, arm: Arm, sampler: Sampler, workload: Workload) -> StepCosts:
    """Costs of chains up to the arm's depth.

    Raises:
        InputError: see `open_meter`.
    """
    lengths = (0, *doubling(arm.used_shape.depth))
    meter = open_meter(target, chain_arms(arm, lengths), sampler, workload)
    meter.measure(ROUNDS)
    return step_costs(meter.table(), arm.drafter, lengths, meter.steps())


def step_costs(
    table: CostTable, drafter: Drafter, lengths: Sequence[int], steps: Sequence[Sequence[Cost]]
) -> StepCosts:
    """From what steps with drafts of these lengths cost (`CostMeter.steps`), by length."""
    target, draft = [], []
    for length, found in zip(lengths, steps, strict=True):
        # a drafter may find nothing to draft, or have asked the target more than it drafted
        whole = [cost for cost in found if cost.width > length] or found
        width = max(1 + length, statistics.median_high(cost.width for cost in whole))
        seconds = statistics.median(cost.seconds for cost in whole)
        target.append(Cost(width=length, seconds=table.target_seconds(width)))
        draft.append(Cost(width=length, seconds=seconds))
    # a drafter that asks the target about more than its draft does so also in vain
    probes = drafter.max_nodes(TreeShape())
    return StepCosts(
        target_D=tuple(interpolate(target, n) for n in range(lengths[-1] + 1)),
        draft_D=tuple(interpolate(draft, n) for n in range(lengths[-1] + 1)),
        in_vain=table.target_seconds(1 + probes) + interpolate(draft, 1),
    )
