"""Measured cost tables: seconds of a target forward by its width, and of drafting a step.

Measured apart from any run, and interleaved: every round times each width once and one step of
each drafter. A width is the number of tokens that one forward is fed: 1 is plain decoding, 1 + n a
root and n drafted tokens. A machine does not keep its pace for minutes (its clock, its neighbours):
a benchmark takes rounds all along and predicts from the latest ones.

    predicted speed-up = tokens * t_target(1) / sum over steps of (t_draft(width) + t_target(width))

which is tau * t_target(1) / (t_draft + t_target(n)) when all steps have one width n.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from draftsmith.bench.arms import WidthMeter, make_recorder, now
from draftsmith.bench.records import CostSeconds
from draftsmith.core.cache import lay_out
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import no_garbage_collection
from draftsmith.core.types import Signals
from draftsmith.errors import InputError
from draftsmith.targets.base import Target, feed_beginning

MAX_WIDTHS = 10
"""More different widths than this are thinned out; the rest is interpolated."""
_PATIENCE = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """A point of a cost curve."""

    width: int
    seconds: float
    """Median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCost:
    """The cost of a drafter per step, by the width of the step that verifies the draft."""

    drafter: str
    temperature: float
    costs: tuple[Cost, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTable:
    """Costs at a representative context length, medians over rounds."""

    context: int
    """Tokens in the cache."""
    rounds: int
    target: tuple[Cost, ...]
    draft: tuple[DraftCost, ...]

    def target_seconds(self, width: int) -> float:
        return interpolate(self.target, width)

    def draft_seconds(self, drafter: str, temperature: float, width: int) -> float:
        for entry in self.draft:
            if (entry.drafter, entry.temperature) == (drafter, temperature):
                return interpolate(entry.costs, width)
        raise KeyError((drafter, temperature))

    def predict(
        self, drafter: str, temperature: float, tokens: int, widths: Sequence[int]
    ) -> CostSeconds:
        """Predict the cost of steps of these widths, which gave this many tokens."""
        counts = [(width, widths.count(width)) for width in sorted(set(widths))]
        draft = sum(n * self.draft_seconds(drafter, temperature, w) for w, n in counts)
        return CostSeconds(
            baseline=tokens * self.target_seconds(1),
            draft=draft,
            target=sum(n * self.target_seconds(w) for w, n in counts),
        )


def interpolate(costs: Sequence[Cost], width: int) -> float:
    """Return the seconds at this width: linear between measured points, the nearest one outside.

    Raises:
        ValueError: no point at all.
    """
    if not costs:
        raise ValueError("an empty cost curve has no values")
    place = bisect_left([cost.width for cost in costs], width)
    if place == len(costs):
        return costs[-1].seconds
    right = costs[place]
    if right.width == width or place == 0:
        return right.seconds
    left = costs[place - 1]
    share = (width - left.width) / (right.width - left.width)
    return left.seconds + share * (right.seconds - left.seconds)


def thin_out(widths: Sequence[int], most: int = MAX_WIDTHS) -> tuple[int, ...]:
    """Keep at most `most` of the widths, sorted, with both ends, spread evenly over the ranks."""
    ordered = sorted(set(widths))
    if len(ordered) <= most:
        return tuple(ordered)
    places = np.linspace(0, len(ordered) - 1, most).round().astype(int)
    return tuple(ordered[i] for i in places)


class ForwardProbe:
    """Times forwards of any width behind a fixed context; the cache is as before after each."""

    def __init__(
        self, target: Target, context: Sequence[int], max_width: int, *, rows: int = 1
    ) -> None:
        """`rows`: so many alike are fed together."""
        self._target = target
        self._cache = target.new_cache(rows, len(context) + max_width)
        *known, root = context
        self._roots = [[root]] * rows
        if known:
            left = feed_beginning(target, self._cache, [known] * rows)
            self._feed(left, 0, keep=1)
            self._cache.commit(np.array([len(row) for row in left]))

    def seconds(self, width: int) -> float:
        """Time one forward of `width` tokens per row, its mask and cache writes included."""
        start = now(self._target.device)
        self._feed(self._roots, width - 1, keep=width)
        end = now(self._target.device)
        self._cache.rollback()
        return end - start

    def _feed(self, pending: Sequence[Sequence[int]], nodes: int, *, keep: int) -> None:
        chain = np.tile(np.arange(-1, nodes - 1), (len(pending), 1))
        tokens, block = lay_out(self._cache, pending, np.zeros_like(chain), chain)
        self._target.forward(torch.from_numpy(tokens), block, keep, Signals())


class StepProbe:
    """Decodes without end with one drafter, a step at a time, and measures what drafting cost."""

    def __init__(
        self,
        target: Target,
        arm: Arm,
        prompts: Sequence[Sequence[int]],
        options: DecodeOptions,
        predictions: Sequence[Sequence[int]] = (),
        *,
        rows: int = 1,
    ) -> None:
        """
        Args:
            predictions: one per prompt, for drafters that read them.
            rows: how many times each prompt is decoded side by side.
        """
        self._meter = WidthMeter(target)
        self._rows = rows
        self._recorder = make_recorder(target.device)
        self._steps = self._endless(
            arm, prompts, predictions or [()] * len(prompts), arm.adapt(options)
        )

    def _endless(
        self,
        arm: Arm,
        prompts: Sequence[Sequence[int]],
        predictions: Sequence[Sequence[int]],
        options: DecodeOptions,
    ) -> Iterator[bool]:
        """Yield for each step behind the prompts, without end, whether nothing cut its draft
        short."""
        cases, depth = list(zip(prompts, predictions, strict=True)), arm.used_shape.depth
        limit = self._meter.max_length or 1 << 40
        for number, (prompt, prediction) in enumerate(itertools.cycle(cases)):
            left_B = [min(options.max_new_tokens, limit - len(prompt))] * self._rows
            served = False
            steps = decode(
                self._meter,
                arm.drafter,
                [prompt] * self._rows,
                replace(options, seed=options.seed + number, ignore_end=True),
                predictions=[prediction] * self._rows,
                recorder=self._recorder,
            )
            for step in steps:
                whole = min(left_B) > depth and not step.prefill
                yield whole
                served |= whole
                left_B = [n - len(new) for n, new in zip(left_B, step.emitted, strict=True)]
                if served and min(left_B) <= depth:
                    break  # drafts would be cut to the room that is left, or rows be done

    def step(self) -> Cost:
        """Take one whole step behind a prompt; return its width and the drafter's seconds.

        It follows a step of its own kind, as in a run: what others left in the processor's caches
        is gone by then. Where texts are so short that no step is whole, any step has to do.
        """
        self._step()
        return self._step()

    def _step(self) -> Cost:
        for attempt in itertools.count():
            before = self._recorder.seconds.get("draft", 0.0)
            if next(self._steps) or attempt >= _PATIENCE:
                break
        spent = self._recorder.seconds.get("draft", 0.0) - before
        return Cost(width=self._meter.widths[-1], seconds=spent)


class CostMeter:
    """Measures, interleaved, what the arms' forwards and drafts cost at these prompts' lengths.

    Arms of one name are one drafter with drafts of several shapes, and share a curve.
    """

    def __init__(
        self,
        target: Target,
        arms: Sequence[Arm],
        samplers: Sequence[Sampler],
        prompts: Sequence[Sequence[int]],
        options: DecodeOptions,
        widths: Sequence[int],
        *,
        predictions: Sequence[Sequence[int]] = (),
        rows: int = 1,
    ) -> None:
        """
        Args:
            widths: that occurred in earlier runs; the widths of the arms' full drafts are added.
            options: of the run; the sampler is replaced by each of `samplers`.
            predictions: one per prompt, for drafters that read them.
            rows: decoded side by side; seconds are then of the whole batch.

        Raises:
            InputError: the drafts are longer than the context.
        """
        full = [1 + arm.used_shape.num_nodes for arm in arms]
        limit = target.max_length or 1 << 40
        middle = sorted(prompts, key=len)[len(prompts) // 2]
        self._widths = [w for w in thin_out([1, *widths, *full]) if w < limit]
        self._context = min(
            len(middle) + options.max_new_tokens // 2, limit - max(self._widths, default=limit)
        )
        if self._context < 1:
            raise InputError(f"The context of {limit} tokens leaves no room to measure costs in.")
        context = list(itertools.islice(itertools.cycle(middle), self._context))
        longest = max(options.max_new_tokens, 64)
        cases = list(zip(prompts, predictions or [()] * len(prompts), strict=True))
        cases = [case for case in cases if len(case[0]) + 4 < limit] or [(middle, ())]
        fitting, expected = zip(*cases, strict=True)
        self._keys = [(arm.name, sampler.temperature) for arm in arms for sampler in samplers]
        self._steps = [
            StepProbe(
                target,
                arm,
                fitting,
                replace(options, sampler=sampler, max_new_tokens=longest),
                expected,
                rows=rows,
            )
            if arm.drafter.longest != 0
            else None
            for arm in arms
            for sampler in samplers
        ]
        self._forward = ForwardProbe(target, context, max(self._widths), rows=rows)
        self._rounds: list[_Round] = []
        self._round()  # the first of a kind pays for allocation and code paths

    def measure(self, rounds: int) -> None:
        """Take so many further rounds."""
        with no_garbage_collection():
            self._rounds.extend(self._round() for _ in range(rounds))

    def table(self, latest: int | None = None) -> CostTable:
        """Return medians over the latest rounds; None: over all.

        Raises:
            ValueError: nothing was measured yet.
        """
        return self._table(self._rounds if latest is None else self._rounds[-latest:])

    def redrawn(self, rng: np.random.Generator) -> CostTable:
        """Return a table of resampled rounds (with replacement), which shows how uncertain it
        is."""
        count = len(self._rounds)
        return self._table([self._rounds[i] for i in rng.integers(count, size=count)])

    def _table(self, rounds: Sequence[_Round]) -> CostTable:
        if not rounds:
            raise ValueError("no round was measured")
        return CostTable(
            context=self._context,
            rounds=len(rounds),
            target=_curve(cost for taken in rounds for cost in taken.target),
            draft=tuple(
                DraftCost(
                    drafter=name,
                    temperature=temperature,
                    costs=_draft_curve(
                        [
                            cost
                            for taken in rounds
                            for key, cost in zip(self._keys, taken.draft, strict=True)
                            if key == (name, temperature) and cost is not None
                        ],
                        len(rounds),
                    ),
                )
                for name, temperature in dict.fromkeys(self._keys)
            ),
        )

    def steps(self) -> tuple[tuple[Cost, ...], ...]:
        """Return the drafter's cost of each arm's steps, by round, arms in their order (and for
        each the samplers in theirs); empty for arms that never draft."""
        columns = zip(*(taken.draft for taken in self._rounds), strict=True)
        return tuple(tuple(cost for cost in column if cost is not None) for column in columns)

    def _round(self) -> _Round:
        return _Round(
            target=tuple(self._forward_cost(width) for width in self._widths),
            draft=tuple(None if probe is None else probe.step() for probe in self._steps),
        )

    def _forward_cost(self, width: int) -> Cost:
        """Time a forward behind one of its own width, as in a run: see `StepProbe.step`."""
        self._forward.seconds(width)
        return Cost(width=width, seconds=self._forward.seconds(width))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """One forward of each width, one step of each arm and temperature."""

    target: tuple[Cost, ...]
    draft: tuple[Cost | None, ...]


def _curve(costs: Iterable[Cost]) -> tuple[Cost, ...]:
    seconds: dict[int, list[float]] = {}
    for cost in costs:
        seconds.setdefault(cost.width, []).append(cost.seconds)
    return tuple(
        Cost(width=width, seconds=statistics.median(values))
        for width, values in sorted(seconds.items())
    )


def _draft_curve(costs: Sequence[Cost], rounds: int) -> tuple[Cost, ...]:
    """Probes take whole drafts, runs end in shorter ones: down to none, which costs nothing, unless
    looking in vain was measured.

    A lookup may find less than it was asked for, any length now and then. One sample is no median:
    widths that fewer than half of the rounds met are pooled with the next wider ones, those at the
    end with the last.
    """
    groups: list[list[Cost]] = []
    drafted = sorted((cost for cost in costs if cost.width > 1), key=lambda cost: cost.width)
    for _, alike in itertools.groupby(drafted, key=lambda cost: cost.width):
        if groups and 2 * len(groups[-1]) < rounds:
            groups[-1].extend(alike)
        else:
            groups.append(list(alike))
    if len(groups) > 1 and 2 * len(groups[-1]) < rounds:
        rare = groups.pop()
        groups[-1].extend(rare)
    vain = [cost.seconds for cost in costs if cost.width == 1]
    return (
        Cost(width=1, seconds=statistics.median(vain) if vain else 0.0),
        *(
            Cost(
                width=statistics.median_high(cost.width for cost in group),
                seconds=statistics.median(cost.seconds for cost in group),
            )
            for group in groups
        ),
    )
