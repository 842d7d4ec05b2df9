"""Training pairs for live translation: beginnings of sentences with beginnings of translations.

    pair      the exam was hard today  ->  die Prüfung war heute schwer
    prefix    the exam                 ->  die Prüfung
    prefix    the exam was hard        ->  die Prüfung war heute

A model that sees only whole sentences completes a beginning with words that nobody said; one that
also sees beginnings learns to stop (Niehues et al. 2018, Arivazhagan et al. 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftsmith.errors import InputError
from draftsmith.live.streams import spans


def prefix_pairs(
    pairs: Sequence[tuple[str, str]],
    share: float,
    seed: int,
    *,
    source_unit: str = "word",
    target_unit: str = "word",
) -> list[tuple[str, str]]:
    """Every (source, target) pair, each followed by prefixes of it.

    The target is cut in the proportion of the source, rounded down, but never to nothing. A source
    of one unit has no prefix, and gets none.

    Args:
        pairs: Whole sentences; what one gets depends on its place, not on the others.
        share: Of the result that prefixes should make on average; 0.5: one for every pair.
        seed: Of where the cuts are.
        source_unit: "word", or "char" for languages without spaces.
        target_unit: The same for the translations.

    Raises:
        InputError: an empty side, or an option that cannot be used.
    """
    if not 0 <= share < 1:
        raise InputError(f"share is 0 or more and below 1, got {share}")
    if seed < 0:
        raise InputError(f"seed is 0 or more, got {seed}")
    wanted = share / (1 - share)
    out = []
    for number, (source, target) in enumerate(pairs):
        source_ends = [end for _, end in spans(source, source_unit)]
        target_ends = [end for _, end in spans(target, target_unit)]
        if not source_ends or not target_ends:
            side = "target" if source_ends else "source"
            raise InputError(f"the {side} of pair {number + 1} is empty")
        out.append((source, target))
        rng = np.random.Generator(np.random.PCG64([seed, number]))
        count = int(wanted + rng.random())
        for _ in range(count if len(source_ends) > 1 else 0):
            kept = int(rng.integers(1, len(source_ends)))
            said = max(1, len(target_ends) * kept // len(source_ends))
            out.append((source[: source_ends[kept - 1]], target[: target_ends[said - 1]]))
    return out
