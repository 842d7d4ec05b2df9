"""Policies for the length of a draft. They look at a row's past only, so they never change the law."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.types import RowStats


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantLength:
    """The same depth at every step."""

    max_length: int

    def length(self, stats: RowStats) -> int:
        return self.max_length


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveLength:
    """Two more after a draft that was accepted whole, else one less (transformers' heuristic)."""

    max_length: int
    start: int = 5

    def length(self, stats: RowStats) -> int:
        if stats.last_offered == 0:
            return min(self.start, self.max_length)
        whole = stats.last_accepted == stats.last_offered
        step = 2 if whole else -1
        return min(max(stats.last_offered + step, 1), self.max_length)
