"""Exact enumeration of what `decode()` emits: every branch of every draw, end to end.

A draw of keyed noise looks at one uniform number u per key. `EnumeratingNoise` does not pick u: it
knows only the range in which u lies, and every draw splits that range along the drawn law's CDF:

    u of key (position, purpose, lane)          0 ------------------------- 1
    a draw with weights .5 .3 .2                |     0     |   1   |  2   |
    branch 1 was taken: u lies in               .           [.5 .. .8)

A path is thus a box in the space of all u: it takes the first branch that its box allows, narrows
the box to it, and leaves a box for each of the other branches. The boxes of all paths fill the
cube, so the law of the output is the sum of their volumes. A key that is used again continues from
its range: noise that two parties *share* is enumerated exactly as the shared noise that it is, and
a decoder that shares noise where it must not comes out with a wrong law.

Shape letters: B rows, R drawing rows, K columns of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.law import Noise, Purpose, Rows
from draftsmith.drafters.base import Drafter
from draftsmith.targets.base import Target

Key = tuple[int, int, int]
"""(position, purpose, lane): with the row, what noise is keyed by."""
Span = tuple[float, float]
Box = dict[Key, Span]
"""The range of each u that was looked at; all others may lie anywhere in [0, 1)."""

_NEGLIGIBLE = 1e-15
"""A narrower share of a range is rounding between two equal boundaries, not a branch."""


class NoiseReused(AssertionError):
    """One number answered two draws of one step: drafts and verdicts would not be independent."""


@lru_cache(maxsize=1 << 14)
def split(cdf_K: tuple[float, ...], low: float, high: float) -> tuple[tuple[int, Span], ...]:
    """The branches that the range [low, high) of u allows at a draw with this CDF, each with its
    part of the range. Many rows meet the same few laws."""
    least = _NEGLIGIBLE * (high - low)
    branches, start = [], 0.0
    for column, end in enumerate(cdf_K):
        left, right = max(start, low), min(end, high)
        if right - left > least:
            branches.append((column, (left, right)))
        start = end
    return tuple(branches)


@dataclass(slots=True)
class Path:
    """One branch of everything random, being followed."""

    group: int
    """Number of its prompt."""
    box: Box
    num_positions: int
    """Length of prompt and continuation: no draft of the last token can ever be used."""
    used: set[tuple[int, Key]] = field(default_factory=set)
    tokens: list[int] = field(default_factory=list)
    unexplored: list[Box] = field(default_factory=list)

    def choose(self, cdf_K: Sequence[float], key: Key) -> int:
        """The branch that this path takes at a draw with this CDF (its last value is 1)."""
        branches = split(tuple(cdf_K), *self.box.get(key, (0.0, 1.0)))
        column, span = branches[0]
        if len(branches) > 1:
            if key[0] >= self.num_positions - 1 and key[1] == Purpose.DRAFT:
                return column  # drafted only because a neighbour has room: thrown away unseen
            self.unexplored += [{**self.box, key: other} for _, other in branches[1:]]
        self.box[key] = span
        return column

    @property
    def volume(self) -> float:
        return math.prod(high - low for low, high in self.box.values())


class EnumeratingNoise:
    """Takes the place of `Noise` in `decode()`: same calls, scripted answers.

    Args:
        paths: one per row of the batch.
        roots: number of known tokens per row.
        strict: refuse a key that is used twice in one step.
    """

    def __init__(self, paths: Sequence[Path], roots: Sequence[int], *, strict: bool = True) -> None:
        self.paths, self.strict = list(paths), strict
        self.roots_B = np.asarray(roots, dtype=np.int64)
        self._roots = self.roots_B.tolist()

    def key(self, position: int, purpose: int, lane: int) -> Key:
        return position, purpose, lane

    def uniform(self, rows: Rows, depth: int, purpose: Purpose, lane: int | Rows = 0) -> np.ndarray:
        """A drafter's private choices are not enumerated: the law must be exact for any of them."""
        assert purpose is Purpose.DRAFTER_STATE, (
            f"a draw for {purpose.name} went past Noise.categorical and Noise.accept, "
            "where the contract suite enumerates"
        )
        return Noise(0, [0] * len(self.paths), self.roots_B).uniform(rows, depth, purpose, lane)

    def categorical(
        self, weights_RK: Tensor, rows: Rows, depth: int, purpose: Purpose, lane: int | Rows = 0
    ) -> Tensor:
        if purpose is Purpose.DRAFTER_STATE:
            real = Noise(0, [0] * len(self.paths), self.roots_B)
            return real.categorical(weights_RK, rows, depth, purpose, lane)
        cdf_RK = weights_RK.double().cumsum(-1).numpy()
        return torch.tensor(self._follow(cdf_RK / cdf_RK[:, -1:], rows, depth, purpose, lane))

    def accept(self, prob_R: Tensor, rows: Rows, depth: int, lane: int | Rows = 0) -> np.ndarray:
        yes_R = prob_R.double().clamp(max=1.0).nan_to_num(0.0).numpy()  # u < NaN is False
        cdf_RK = np.stack([yes_R, np.ones_like(yes_R)], 1)
        return np.array(self._follow(cdf_RK, rows, depth, Purpose.ACCEPT, lane)) == 0

    def _follow(
        self, cdf_RK: np.ndarray, rows: Rows, depth: int, purpose: Purpose, lane: int | Rows
    ) -> list[int]:
        lanes = np.broadcast_to(np.asarray(lane), (len(rows),)).tolist()
        out, code = [], int(purpose)
        for cdf_K, row, its_lane in zip(
            cdf_RK.tolist(), np.asarray(rows).tolist(), lanes, strict=True
        ):
            path, root = self.paths[row], self._roots[row]
            key = self.key(root + depth, code, its_lane)
            if self.strict:
                if (root, key) in path.used:
                    raise NoiseReused(
                        f"the noise for position {root + depth}, {purpose.name}, lane {its_lane} "
                        f"was drawn twice in the step behind root {root}"
                    )
                path.used.add((root, key))
            out.append(path.choose(cdf_K, key))
        return out

    def take(self, rows: Sequence[int]) -> EnumeratingNoise:
        return self._with([self.paths[row] for row in rows], self.roots_B[np.asarray(rows)])

    def at(self, roots: Sequence[int]) -> EnumeratingNoise:
        return self._with(self.paths, roots)

    def _with(self, paths: Sequence[Path], roots: Sequence[int] | np.ndarray) -> EnumeratingNoise:
        return type(self)(paths, list(roots), strict=self.strict)


@dataclass(slots=True)
class Explored:
    """All that an enumeration found."""

    laws: list[dict[tuple[int, ...], float]]
    """Per prompt: the probability of each continuation."""
    num_paths: int = 0
    accepted: int = 0
    """Drafted tokens that were emitted, over all paths."""
    offered: int = 0
    """Depth of candidates that was verified, over all paths."""


def explore(
    prompts: Sequence[Sequence[int]],
    num_new: int,
    follow: Callable[[list[Path], Explored], None],
    *,
    batch: int = 1024,
    noise: type[EnumeratingNoise] = EnumeratingNoise,
    strict: bool = True,
    max_paths: int = 200_000,
) -> Explored:
    """Every branch of what `follow` does with `decode()`, for up to `num_new` tokens per prompt.

    Rows of one batch follow branches of different prompts (a ragged batch) and end at different
    steps. `follow` gives all rows one request id, so that nothing but their boxes tells them apart.
    """
    found = Explored(laws=[{} for _ in prompts])
    queue: list[tuple[int, Box]] = [(group, {}) for group in range(len(prompts))]
    while queue:
        chosen, queue = queue[-batch:], queue[:-batch]
        paths = [Path(group, box, len(prompts[group]) + num_new) for group, box in chosen]

        def boxed(seed: int, ids: Sequence[int], roots: Sequence[int]) -> EnumeratingNoise:
            return noise(paths, roots, strict=strict)  # noqa: B023  (used inside this round only)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("draftsmith.core.decode.Noise", boxed)
            follow(paths, found)
        for path in paths:
            law, tokens = found.laws[path.group], tuple(path.tokens)
            law[tokens] = law.get(tokens, 0.0) + path.volume
            queue.extend((path.group, box) for box in path.unexplored)
        found.num_paths += len(paths)
        assert found.num_paths < max_paths, f"over {max_paths} branches: choose a smaller case"
    return found


def follow_decode(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    predictions: Sequence[Sequence[int]] = (),
) -> Callable[[list[Path], Explored], None]:
    """For `explore`: one call of `decode()`."""
    drafter.bind(target)

    def follow(paths: list[Path], found: Explored) -> None:
        for step in decode(
            target,
            drafter,
            [prompts[path.group] for path in paths],
            options,
            request_ids=[0] * len(paths),
            predictions=[predictions[path.group] for path in paths] if predictions else (),
        ):
            found.accepted += sum(step.accepted)
            found.offered += sum(step.offered_depth)
            for path, emitted in zip(paths, step.emitted, strict=True):
                path.tokens.extend(emitted)

    return follow
