"""Length policies: how deep to draft next, from the past of a row."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.types import RowStats


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveLength:
    """Two tokens more after a draft that was accepted whole, one less after any other.

    The rule of transformers' `num_assistant_tokens_schedule="heuristic"`. It looks at the past
    only, never at the coming noise, so it does not change the law.
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
