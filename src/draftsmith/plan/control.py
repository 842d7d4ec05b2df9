"""Length policies: how deep to draft next, from the past of a row and of rows before it.

They look at the past only, never at the coming noise, so they do not change the law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftsmith.types import LengthPolicy, RowStats


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveLength(LengthPolicy):
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
_FIRST, _DEEPER, _FOUND, _OTHERS = 1.5, 3.0, 8.0, 12.0
_GROWTH, _ROOM, _KNOWN = 2, 4, 0.3
_FADE = 0.9
# Chosen, with the memory in `rows`, by benchmarks/planner/constants.py: least loss against the best
# fixed length of each case, over acceptance met in real texts and over synthetic processes (equal
# rates, easy and hard passages, rates by depth, changes, drafts that are useless or seldom found),
# at the costs of CPUs and GPUs. The first rows must be hopeful: who never tries, or gives up for
# good after bad luck, loses all, a try of a useless drafter less than a step. Finding nothing is
# forgiven for long: some drafters find only what they were asked to seek.


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """What earlier rows met, from first to last step; with every row the older ones fade."""

    asked: float = 0.0
    """Steps that were to draft."""
    found: float = 0.0
    """Those that had something to draft."""
    hit: float = 0.0
    """Those of which a token was accepted."""

    def after(self, row: RowStats) -> Experience:
        return Experience(
            asked=_FADE * self.asked + row.all_asked,
            found=_FADE * self.found + row.all_found,
            hit=_FADE * self.hit + row.all_hit,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CostAware(LengthPolicy):
    """As deep as promises most tokens per second, by measured costs and what the row accepted
    lately; not at all where that is best.

        rate      r_d = (kept_d + w e_d) / (tried_d + w)               w: 3; at depth 1 from 1.5,
                                                                       where no row was before
        expected  e_1 = (hit + 12 * 0.6) / (found + 12), from the rows before
                  e_d+1: as if behind 2 + d trials at r_d one more succeeded
        found     h = (found_now + 8 H) / (asked_now + 8)              steps with a draft at all
                  H = (found + 8) / (asked + 8), from the rows before
        pace      (1 + h (r_1 + r_1 r_2 + ... + r_1 ... r_n)) / ((1 - h) t(in vain) + h t(n))

    Each depth is drawn towards what the one before it suggests, since deep places are seen seldom;
    upwards, since a draft that got that far is one of the easy ones. (Other rows say nothing of
    deep places: there rows differ most.) Whether to draft is decided by the best depth of all; the
    draft then grows to at most twice the depth that is known, and four.
    """

    costs: StepCosts
    past: Experience = Experience()

    @property
    def max_length(self) -> int:
        return self.costs.longest

    def length(self, stats: RowStats) -> int:
        costs, past = self.costs, self.past
        usual = (past.found + _FOUND) / (past.asked + _FOUND)
        found = (stats.found + _FOUND * usual) / (stats.asked + _FOUND)
        idle = (1.0 - found) * costs.in_vain
        known = sum(tried > _KNOWN for tried in stats.tried_D)
        chosen, best = 0, 1.0 / costs.seconds(0)
        survival, tokens = 1.0, 0.0
        for depth, rate in enumerate(self.rates(stats), start=1):
            survival *= rate
            tokens += survival
            pace = (1.0 + found * tokens) / (idle + found * costs.seconds(depth))
            if pace > best:
                chosen, best = depth, pace
        return min(chosen, _GROWTH * known + _ROOM)

    def rates(self, stats: RowStats) -> list[float]:
        """Acceptance by depth, given that all before it is accepted."""
        out: list[float] = []
        seen, known = len(stats.tried_D), self.past.found + _OTHERS
        expected = (self.past.hit + _OTHERS * _PRIOR) / known
        weight = _FIRST * (1.0 + self.past.found / known)
        for d in range(self.costs.longest):
            tried, kept = (stats.tried_D[d], stats.kept_D[d]) if d < seen else (0.0, 0.0)
            out.append((kept + weight * expected) / (tried + weight))
            expected = (out[-1] * (_RISE + d) + 1.0) / (_RISE + d + 1.0)
            weight = _DEEPER
        return out


class Learning(LengthPolicy):
    """A controller that begins every text with what the texts before it met.

    It goes by what has been emitted, so the law stays; but a drawn text depends on the texts before
    it, and on how many were decoded side by side. Not for several threads at once.
    """

    def __init__(self, policy: CostAware) -> None:
        self.policy = policy

    @property
    def max_length(self) -> int:
        return self.policy.max_length

    def length(self, stats: RowStats) -> int:
        return self.policy.length(stats)

    def learn(self, rows: Sequence[RowStats]) -> None:
        for row in rows:
            self.policy = replace(self.policy, past=self.policy.past.after(row))
