"""Length policies: how deep to draft next, from the past of a row.

They look at the past only, never at the coming noise, so they do not change the law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftsmith.types import RowStats


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveLength:
    """Two tokens more after a draft that was accepted whole, one less after any other.

    The rule of transformers' `num_assistant_tokens_schedule="heuristic"`.
    """

    first: int = 5
    """Length of a row's first draft, and of the next after a step that had nothing to draft."""
    shortest: int = 1
    longest: int = 15

    @property
    def max_length(self) -> int:
        return self.longest

    def length(self, stats: RowStats) -> int:
        if not stats.last_offered:
            return self.first
        grown = stats.last_offered + (2 if stats.last_accepted == stats.last_offered else -1)
        return min(max(grown, self.shortest), self.longest)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Seconds of a step by the number of tokens drafted in it; index 0: none, plain decoding."""

    target_D: tuple[float, ...]
    """The target's forward over the root and the draft."""
    draft_D: tuple[float, ...]
    """The drafter's work."""
    in_vain: float
    """Seconds of a step that was to draft and found nothing to."""

    def __post_init__(self) -> None:
        if len(self.target_D) != len(self.draft_D) or len(self.target_D) < 2:
            raise ValueError(
                "costs are given for drafts of 0, 1, ... tokens, of target and drafter alike: got "
                f"{len(self.target_D)} and {len(self.draft_D)} values"
            )
        for name, seconds in (
            ("target_D", self.target_D),
            ("draft_D", self.draft_D),
            ("in_vain", (self.in_vain,)),
        ):
            if not all(math.isfinite(value) and value >= 0 for value in seconds):
                raise ValueError(f"{name} must be finite and not negative, got {seconds}")
        if min(*self.target_D, self.in_vain) <= 0:
            raise ValueError(f"target_D and in_vain must be positive, got {self}")

    @property
    def longest(self) -> int:
        return len(self.target_D) - 1

    def seconds(self, length: int) -> float:
        return self.target_D[length] + self.draft_D[length]


_PRIOR, _RISE = 0.6, 3.0
_FIRST, _DEEPER, _FOUND = 1.5, 3.0, 2.0
_GROWTH, _ROOM, _KNOWN = 2, 4, 0.3
# Chosen, with the memory in `rows`, by benchmarks/planner/constants.py: least loss against the best
# fixed length of each case, over acceptance met in real texts and over synthetic processes (equal
# rates, easy and hard passages, rates by depth, changes, drafts that are useless or seldom found),
# at the costs of CPUs and GPUs. The prior must be hopeful and its weight small: a row that never
# tries, or gives up for good after bad luck, loses all, a try of a useless drafter less than a
# step. Acceptance measured beforehand is no better prior: rows differ more than drafters do.


@dataclass(frozen=True, kw_only=True, slots=True)
class CostAware:
    """As deep as promises most tokens per second, by measured costs and what the row accepted
    lately; not at all where that is best.

        rate      r_d = (kept_d + w expected_d) / (tried_d + w)        w: 1.5 at depth 1, else 3
        expected  0.6 at depth 1, and at d + 1 as if behind 2 + d trials at r_d one more succeeded
        found     h = (found + 2) / (asked + 2)                        steps with a draft at all
        pace      (1 + h (r_1 + r_1 r_2 + ... + r_1 ... r_n)) / ((1 - h) t(in vain) + h t(n))

    Each depth is drawn towards what the one before it suggests, since deep places are seen seldom;
    upwards, since a draft that got that far is one of the easy ones. A draft grows to at most twice
    the depth that is known, and four.
    """

    costs: StepCosts

    @property
    def max_length(self) -> int:
        return self.costs.longest

    def length(self, stats: RowStats) -> int:
        costs = self.costs
        found = (stats.found + _FOUND) / (stats.asked + _FOUND)
        idle = (1.0 - found) * costs.in_vain
        known = sum(tried > _KNOWN for tried in stats.tried_D)
        chosen, best = 0, 1.0 / costs.seconds(0)
        survival, tokens = 1.0, 0.0
        for depth, rate in enumerate(self.rates(stats)[: _GROWTH * known + _ROOM], start=1):
            survival *= rate
            tokens += survival
            pace = (1.0 + found * tokens) / (idle + found * costs.seconds(depth))
            if pace > best:
                chosen, best = depth, pace
        return chosen

    def rates(self, stats: RowStats) -> list[float]:
        """Acceptance by depth, given that all before it is accepted."""
        out: list[float] = []
        seen = len(stats.tried_D)
        expected, weight = _PRIOR, _FIRST
        for d in range(self.costs.longest):
            tried, kept = (stats.tried_D[d], stats.kept_D[d]) if d < seen else (0.0, 0.0)
            rate = (kept + weight * expected) / (tried + weight)
            out.append(rate)
            expected = (rate * (_RISE + d) + 1.0) / (_RISE + d + 1.0)
            weight = _DEEPER
        return out
