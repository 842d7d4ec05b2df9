"""Repetition loops in generated texts, and what drafters do outside of them.

Small models that decode greedily repeat themselves, and a text that repeats itself is easy to
draft. A token lies in a loop when it belongs to a stretch that repeats with a period of at most
`LONGEST_PERIOD` tokens, `REPEATS` times or more:

    tokens     a b c d c d c d e        period 2: `c d` stands three times
    in loops   . . x x x x x x .

Only generated tokens are looked at, and the whole text at once: a loop begins with its first round,
although nobody could have known. A step counts as outside when the first token that it emits lies
outside: what was drafted then was drafted behind text that did not repeat itself yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftsmith.core.types import DecodeStep

LONGEST_PERIOD = 32
REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """Counts over some of the steps behind the prompt's own, of one text."""

    steps: int
    tokens: int
    """Emitted, the target's own token of each step included."""
    accepted: int
    offered: int
    """Sum of the depth offered on the best path."""


def in_loops(
    tokens: Sequence[int], *, longest_period: int = LONGEST_PERIOD, repeats: int = REPEATS
) -> NDArray[np.bool_]:
    """Mark the tokens that lie in a loop.

    With period n, `tokens[i] == tokens[i + n]` holds along the whole stretch but for its last n:

    tokens      a b c d c d c d e
    same, n = 2     x x x x              a run of (repeats - 1) n or more; with n more, the stretch
    """
    ids = np.asarray(tokens, dtype=np.int64)
    looped = np.zeros(len(ids), dtype=bool)
    for period in range(1, min(longest_period, len(ids) // repeats) + 1):
        same = np.zeros(len(ids) - period + 2, dtype=bool)  # False at both ends closes all runs
        same[1:-1] = ids[period:] == ids[:-period]
        first, behind = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2).T
        long = behind - first >= (repeats - 1) * period
        edges = np.zeros(len(ids) + 1, dtype=np.int64)
        np.add.at(edges, first[long], 1)
        np.add.at(edges, behind[long] + period, -1)
        looped |= edges[:-1].cumsum() > 0
    return looped


def count_outside(steps: Sequence[DecodeStep], row: int, looped: NDArray[np.bool_]) -> StepCounts:
    """Count the steps of a row that begin outside of loops.

    Args:
        steps: all of a text's, the prompt's own first; that one is not counted.
        looped: what `in_loops` says of the row's tokens.
    """
    found = [steps[at] for at in steps_outside(steps, row, looped)]
    return StepCounts(
        steps=len(found),
        tokens=sum(len(step.emitted[row]) for step in found),
        accepted=sum(step.accepted[row] for step in found),
        offered=sum(step.offered_depth[row] for step in found),
    )


def steps_outside(
    steps: Sequence[DecodeStep], row: int, looped: NDArray[np.bool_]
) -> tuple[int, ...]:
    """Return the indices of the steps that `count_outside` counts."""
    place = len(steps[0].emitted[row]) if steps else 0
    found = []
    for at, step in enumerate(steps[1:], start=1):
        emitted = len(step.emitted[row])
        if emitted and not looped[place]:
            found.append(at)
        place += emitted
    return tuple(found)
