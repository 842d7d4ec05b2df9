"""Many trajectories of one prompt: how they are weighed, and DistillBeam's two readings.

per_beam   (Algorithm 2) every beam keeps its own laws; q = p is the optimum.
mixture    (Eq. 7) at answer position t all beams imitate the mean of their laws, although their
           prefixes differ: no law of the teacher's is the optimum then.

A beam that has ended is not part of a mixture any more.

    t            0    1    2    3
    beam 0       a    b    #
    beam 1       a    c    d    #          position 2: mean of two laws; position 3: beam 1's own
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from draftsmith.distill.packing import Weighted
from draftsmith.distill.stored_laws import LawFile
from draftsmith.distill.trajectory import TopK, Trajectory
from draftsmith.errors import InputError

Aggregate = Literal["per_beam", "mixture"]
Weights = Literal["uniform", "score"]
SharesOf = Callable[[Sequence[Trajectory]], Sequence[float]]
"""What each of some trajectories of one prompt counts beside the others; their sum is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Multi:
    """How the trajectories of a prompt are put together."""

    aggregate: Aggregate = "per_beam"
    weights: Weights = "uniform"
    """uniform: 1/N each; score: softmax(score / score_temperature) over the prompt's beams."""
    score_temperature: float = 1.0
    most: int | None = None
    """Use only the best so many of each prompt: beams as their search ranks them, other texts by
    their log-probability."""

    def apply(self, documents: Iterable[Weighted], laws: LawFile | None = None) -> list[Weighted]:
        """All with new weights: a prompt counts as much as another, whatever its number of beams,
        and the mean weight of a counted token is 1.

        `laws`: where those of mixtures are kept; None: in memory.
        """
        out = self.share(documents, laws)
        tokens = sum(len(item.trajectory.tokens) for item in out)
        total = sum(item.weight * len(item.trajectory.tokens) for item in out)
        return scaled(out, tokens / total if total else 1.0)

    def share(self, documents: Iterable[Weighted], laws: LawFile | None = None) -> list[Weighted]:
        """All with weights whose sum over a prompt is 1: they depend on no other prompt."""
        groups: dict[str, list[Weighted]] = {}
        for document in documents:
            groups.setdefault(document.trajectory.prompt_id, []).append(document)
        out: list[Weighted] = []
        for group in groups.values():
            ordered = sorted(_best(group, self.most), key=_place)
            shares = self.shares_of([document.trajectory for document in ordered])
            if self.aggregate == "mixture":
                ordered = mixed(ordered, self.shares_of, laws)
            out += [
                replace(document, weight=share)
                for document, share in zip(ordered, shares, strict=True)
            ]
        return out

    def shares_of(self, group: Sequence[Trajectory]) -> list[float]:
        """What each of these counts beside the others; their sum is 1."""
        if self.weights == "uniform":
            return [1.0 / len(group)] * len(group)
        best = max(trajectory.score for trajectory in group)
        raw = [math.exp((t.score - best) / self.score_temperature) for t in group]
        return [value / sum(raw) for value in raw]


def scaled(documents: Iterable[Weighted], factor: float) -> list[Weighted]:
    """All weights times the factor."""
    return [replace(document, weight=document.weight * factor) for document in documents]


def mixed(
    group: Sequence[Weighted], shares_of: SharesOf, kept: LawFile | None = None
) -> list[Weighted]:
    """The same texts, each position with the mean law of all that have a token there.

    `shares_of` is asked at each position about those that have a token there: beside a beam that
    has ended their shares may be too small for a float, and have no sum to be divided by.
    `kept`: where the means go; None: to the trajectories.
    Raises InputError when a text has no laws.
    """
    laws = [top for document in group if (top := document.top()) is not None]
    if len(laws) < len(group):
        raise InputError("--aggregate mixture needs a store with laws; collect with --top-k")
    longest = max(len(law) for law in laws)
    means = []
    for t in range(longest):
        live = [place for place, law in enumerate(laws) if t < len(law)]
        shares = shares_of([group[place].trajectory for place in live])
        means.append(_mean([laws[place] for place in live], shares, t))
    out = []
    for document, law in zip(group, laws, strict=True):
        top, bare = _together(means[: len(law)], law.vocab_size), document.without_laws()
        if kept is None:
            out.append(replace(bare, trajectory=replace(bare.trajectory, top=top)))
        else:
            out.append(replace(bare, laws=kept.encode(top)))
    return out


def _best(group: Sequence[Weighted], most: int | None) -> Sequence[Weighted]:
    """The best texts of a prompt: beams in the order of their search, which may have a length
    penalty; of samples, and beside these, those with the highest log-probability."""
    if most is None or most >= len(group):
        return group
    searched = all(document.trajectory.forcing == "beam" for document in group)

    def rank(document: Weighted) -> tuple[float, float, int, float]:
        index = document.trajectory.index if searched else 0
        return index, -document.trajectory.score, *_place(document)

    return sorted(group, key=rank)[:most]


def _place(document: Weighted) -> tuple[int, float]:
    """Where a text stands among those of its prompt, whatever its number."""
    return document.trajectory.index, document.trajectory.temperature or 0.0


def _mean(laws: Sequence[TopK], shares: Sequence[float], t: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids ascending, log of the mean) at answer position t, which all of them have."""
    ids = np.concatenate([law.ids_NK[t] for law in laws])
    mass = np.concatenate(
        [np.exp(law.log_p_NK[t]) * share for law, share in zip(laws, shares, strict=True)]
    )
    kept = mass > 0
    union, place = np.unique(ids[kept], return_inverse=True)
    sums = np.bincount(place, weights=mass[kept], minlength=len(union))
    return union, np.log(sums)


def _together(rows: Sequence[tuple[np.ndarray, np.ndarray]], vocab_size: int | None) -> TopK:
    """Rows of different widths; what a narrow one lacks is filled with probability 0."""
    width = max(len(ids) for ids, _ in rows)
    ids_NK = np.zeros((len(rows), width), np.int32)
    log_p_NK = np.full((len(rows), width), -np.inf, np.float32)
    for row, (ids, log_p) in enumerate(rows):
        ids_NK[row, : len(ids)] = ids
        log_p_NK[row, : len(ids)] = log_p
    return TopK(ids_NK=ids_NK, log_p_NK=log_p_NK, vocab_size=vocab_size)
