"""Measured cost tables: seconds of a target forward by its width, and of drafting a step.

Measured apart from any run, and interleaved: every round times each width once and one step of
each drafter. A width is the number of tokens that one forward is fed: 1 is plain decoding, 1 + n a
root and n drafted tokens. A machine does not keep its pace for minutes (its clock, its neighbours):
a benchmark takes rounds all along and predicts from the latest ones.

    predicted speed-up = tokens * t_target(1) / sum over steps of (t_draft(width) + t_target(width))

which is tau * t_target(1) / (t_draft + t_target(n)) when all steps have one width n.

A controller of the draft length reads costs of whole steps by the number of drafted tokens. They
are timed for drafts of 0, 1, 2, 4, 8, ... tokens; lengths between them are interpolated. Seconds
depend on shapes, not on the values of weights, so any text will do: see `Workload`. These costs are
kept from run to run: see `CostFile`.
"""

from __future__ import annotations

import datetime
import itertools
import json
import logging
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.bench.arms import WidthMeter, make_recorder, now
from draftsmith.bench.records import CostSeconds
from draftsmith.config import as_dict, from_dict
from draftsmith.core.cache import lay_out
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import no_garbage_collection
from draftsmith.core.types import Signals, TreeShape
from draftsmith.drafters.config import DraftingConfig
from draftsmith.errors import DraftsmithError, InputError
from draftsmith.plan.length_policy import CostAware, Learning, StepCosts
from draftsmith.provenance import (
    cache_folder,
    digest,
    jsonable,
    load_of_others,
    machine_summary,
    portable_text,
    versions,
    write_json_atomic,
)
from draftsmith.targets.base import Target, feed_beginning
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.threads import structure

_log = logging.getLogger(__name__)

MAX_WIDTHS = 10
"""More different widths than this are thinned out; the rest is interpolated."""
_PATIENCE = 200
"""Steps that are looked at for a whole one; of texts with little room many are cut short."""
SETTLED_AFTER = 0.012
"""Seconds of work of one kind behind which it is timed; what lasts longer is done once before."""
SETTLING = 6
"""No more of a kind come first, however short they are."""
RECOVERED_AFTER = 0.1
"""Seconds of the narrowest forwards, behind wide ones, before one of them is timed."""
RECOVERING = 40
"""No more of them come first."""
ROUNDS = 9
"""Rounds in which the costs of chains are measured."""
_PROBED = 64
"""Tokens by which each text is continued while those steps are timed."""
_SMALLEST = 256
REFRESH = "DRAFTSMITH_REFRESH_COSTS"
"""Set to anything but 0 it has costs measured again."""


Case = tuple[Sequence[int], Sequence[int]]
"""A prompt, and a prediction for drafters that read one; token ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """A point of a cost curve."""

    width: int
    seconds: float
    """Median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What one step took beside the target's forward."""

    width: int
    """Tokens of that forward."""
    seconds: float
    """The drafter's."""
    other: float = 0.0
    """Verifying, and what the loop does between its parts."""


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

    def target_seconds(self, width: float) -> float:
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
        counts = sorted(Counter(widths).items())
        return CostSeconds(
            baseline=tokens * self.target_seconds(1),
            draft=sum(n * self.draft_seconds(drafter, temperature, w) for w, n in counts),
            target=sum(n * self.target_seconds(w) for w, n in counts),
        )


def interpolate(costs: Sequence[Cost], width: float) -> float:
    """Return the seconds at this width: linear between measured points, the nearest one outside.

    Raises:
        ValueError: no point at all.
    """
    points = [cost.width for cost in costs], [cost.seconds for cost in costs]
    return float(np.interp(width, *points))


def thin_out(widths: Sequence[int], most: int = MAX_WIDTHS) -> tuple[int, ...]:
    """Keep at most `most` of the widths, sorted, with both ends, spread evenly over the ranks."""
    ordered = sorted(set(widths))
    if len(ordered) <= most:
        return tuple(ordered)
    places = np.linspace(0, len(ordered) - 1, most).round().astype(int)
    return tuple(ordered[i] for i in places)


def settle(take: Callable[[], object], *, recover: bool = False) -> None:
    """Take some of a kind before one is timed, as in a run: behind something else, or a pause, a
    processor needs some milliseconds to be as fast as it gets (its caches, its clock).

    Args:
        recover: wide work came before, behind which narrow work needs longer. In Q4_1 on a Xeon a
            forward of four rows lasted 6.5 ms there, after a tenth of a second 4.1: plain decoding
            seemed that much slower than it is, and drafts to pay where they do not.
    """
    seconds, most = (RECOVERED_AFTER, RECOVERING) if recover else (SETTLED_AFTER, SETTLING)
    begin = time.perf_counter()
    for _ in range(most):
        take()
        if time.perf_counter() - begin > seconds:
            break


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
        cases: Sequence[Case],
        options: DecodeOptions,
        *,
        rows: int = 1,
    ) -> None:
        """`rows`: how many times each prompt is decoded side by side."""
        self._meter, self._rows, self._device = WidthMeter(target), rows, target.device
        self._recorder = make_recorder(target.device)
        self._steps = self._endless(arm, cases, arm.adapt(options))

    def _endless(self, arm: Arm, cases: Sequence[Case], options: DecodeOptions) -> Iterator[bool]:
        """Yield for each step behind the prompts, without end, whether nothing cut its draft
        short."""
        depth = arm.used_shape.depth
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

    def step(self, *, recover: bool = False) -> StepCost:
        """Take one whole step behind a prompt; return its width, the drafter's seconds, and those
        of neither drafter nor target.

        It follows steps of the same drafter, see `settle`. Where texts are so short that no step is
        whole, any step has to do.
        """
        settle(partial(next, self._steps), recover=recover)
        return self._step()

    def _step(self) -> StepCost:
        for attempt in itertools.count():
            draft, target, begin = *self._spent(), now(self._device)
            if next(self._steps) or attempt >= _PATIENCE:
                break
        whole, spent = now(self._device) - begin, self._spent()
        draft, target = spent[0] - draft, spent[1] - target
        return StepCost(
            width=self._meter.widths[-1], seconds=draft, other=max(whole - draft - target, 0.0)
        )

    def _spent(self) -> tuple[float, float]:
        return (
            self._recorder.seconds.get("draft", 0.0),
            self._recorder.seconds.get("target", 0.0),
        )


class CostMeter:
    """Measures, interleaved, what the arms' forwards and drafts cost at these prompts' lengths.

    Arms of one name are one drafter with drafts of several shapes, and share a curve.
    """

    def __init__(
        self,
        target: Target,
        arms: Sequence[Arm],
        samplers: Sequence[Sampler],
        cases: Sequence[Case],
        options: DecodeOptions,
        widths: Sequence[int],
        *,
        rows: int = 1,
    ) -> None:
        """
        Args:
            widths: that occurred in earlier runs; the widths of the arms' full drafts are added.
            options: of the run; the sampler is replaced by each of `samplers`.
            rows: decoded side by side; seconds are then of the whole batch.

        Raises:
            InputError: the drafts are longer than the context.
        """
        full = [1 + arm.used_shape.num_nodes for arm in arms]
        limit = target.max_length or 1 << 40
        middle = sorted((prompt for prompt, _ in cases), key=len)[len(cases) // 2]
        self._widths = [w for w in thin_out([1, *widths, *full]) if w < limit]
        self._context = min(
            len(middle) + options.max_new_tokens // 2, limit - max(self._widths, default=limit)
        )
        if self._context < 1:
            raise InputError(f"The context of {limit} tokens leaves no room to measure costs in.")
        context = list(itertools.islice(itertools.cycle(middle), self._context))
        fitting = [case for case in cases if len(case[0]) + 4 < limit] or [(middle, ())]
        self._keys = [(arm.name, sampler.temperature) for arm in arms for sampler in samplers]
        longer = replace(options, max_new_tokens=max(options.max_new_tokens, 64))
        self._steps = [
            StepProbe(target, arm, fitting, replace(longer, sampler=sampler), rows=rows)
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
        forwards, drafts = zip(*rounds, strict=True)
        curves = []
        for key in dict.fromkeys(self._keys):
            columns = [n for n, own in enumerate(self._keys) if own == key]
            own = [taken[n] for taken in drafts for n in columns]
            costs = _draft_curve([cost for cost in own if cost is not None], len(rounds))
            curves.append(DraftCost(drafter=key[0], temperature=key[1], costs=costs))
        return CostTable(
            context=self._context,
            rounds=len(rounds),
            target=tuple(
                Cost(width=width, seconds=statistics.median(seconds))
                for width, *seconds in zip(self._widths, *forwards, strict=True)
            ),
            draft=tuple(curves),
        )

    def steps(self) -> tuple[tuple[StepCost, ...], ...]:
        """Return the drafter's cost of each arm's steps, by round, arms in their order (and for
        each the samplers in theirs); empty for arms that never draft."""
        columns = zip(*(drafts for _, drafts in self._rounds), strict=True)
        return tuple(tuple(cost for cost in column if cost is not None) for column in columns)

    def _round(self) -> _Round:
        """Forwards of every width, the narrowest first, and a step of each arm, whose first drafts
        least where arms are by depth."""
        return (
            [self._forward_seconds(width, recover=not i) for i, width in enumerate(self._widths)],
            [
                None if probe is None else probe.step(recover=not i)
                for i, probe in enumerate(self._steps)
            ],
        )

    def _forward_seconds(self, width: int, *, recover: bool) -> float:
        """Time a forward behind others of its own width, see `settle`."""
        settle(partial(self._forward.seconds, width), recover=recover)
        return self._forward.seconds(width)


_Round = tuple[list[float], list[StepCost | None]]
"""Seconds of a forward of each width; a step of each arm and temperature."""


def _draft_curve(costs: Sequence[StepCost], rounds: int) -> tuple[Cost, ...]:
    """Probes take whole drafts, runs end in shorter ones: down to none, which costs nothing, unless
    looking in vain was measured.

    A lookup may find less than it was asked for, any length now and then. One sample is no median:
    widths that fewer than half of the rounds met are pooled with the next wider ones, those at the
    end with the last.
    """
    groups: list[list[StepCost]] = []
    for width in sorted({cost.width for cost in costs} - {1}):
        alike = [cost for cost in costs if cost.width == width]
        if groups and 2 * len(groups[-1]) < rounds:
            groups[-1] += alike
        else:
            groups.append(alike)
    if len(groups) > 1 and 2 * len(groups[-1]) < rounds:
        rare = groups.pop()
        groups[-1] += rare
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


# --------------------------------------------------------------------------- costs by draft length


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The inputs of decoding that decide the cost of a step.

    text    p0 p1 ... pn p0 p1 ... pn p0 ...      a prompt, repeated up to three quarters of the
            `---- three quarters of 256 ---'      `bucket` that the usual context falls into

    Behind it lookup drafters find something, and tables of one bucket are alike.
    """

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    predictions: Sequence[Sequence[int]] = ()
    """One per prompt, for drafters that read them; may be empty."""
    rows: int = 1
    """Decoded side by side."""

    @property
    def bucket(self) -> int:
        """The first of 256, 512, 1024, ... that holds a median prompt and half its text."""
        usual = len(self._middle) + self.max_new_tokens // 2
        return int(_SMALLEST * 2 ** max(0, (-(-usual // _SMALLEST) - 1).bit_length()))

    def text(self, limit: int) -> tuple[int, ...]:
        """Return the context to time steps behind, no longer than `limit` tokens."""
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
    """Return 1, 2, 4, 8, ... and `longest`."""
    return tuple(sorted({longest, *(1 << n for n in range(longest.bit_length()))}))


def clipped_arms(arm: Arm, depths: Sequence[int]) -> tuple[Arm, ...]:
    """Return the arm with its chain or tree cut to these depths, whatever its policy."""
    return tuple(replace(arm, shape=arm.used_shape.clip(n), policy=None) for n in depths)


def arms_by_depth(arm: Arm) -> tuple[Arm, ...]:
    """Return the arms whose steps are timed to know what each depth of this arm's costs: its chain
    or tree cut to the depths 0, 1, 2, 4, ... and whole."""
    return clipped_arms(arm, (0, *doubling(arm.used_shape.depth)))


def probed_arms(arm: Arm) -> tuple[Arm, ...]:
    """Return the arms to time for this arm: itself, or some depths where a policy chooses."""
    depth = arm.used_shape.depth
    few = sorted({1, max(1, depth // 4), depth})
    return (arm,) if arm.policy is None else clipped_arms(arm, few)


def open_meter(
    target: Target, arms: Sequence[Arm], sampler: Sampler, workload: Workload
) -> CostMeter:
    """Make a meter for these arms, none of which has a policy.

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
        [(workload.text(room), workload.expected)],
        DecodeOptions(max_new_tokens=_PROBED),
        widths,
        rows=workload.rows,
    )


def measure(target: Target, arm: Arm, sampler: Sampler, workload: Workload) -> StepCosts:
    """Measure the costs of the arm's chain or tree by its depth.

    Raises:
        InputError: see `open_meter`.
    """
    _, costs = measure_all(target, [arm], sampler, workload, ROUNDS)
    return costs[arm.name]


def measure_all(
    target: Target,
    arms: Sequence[Arm],
    sampler: Sampler,
    workload: Workload,
    rounds: int,
    whole: Sequence[Arm] = (),
) -> tuple[CostMeter, dict[str, StepCosts]]:
    """Measure the costs of all arms, interleaved; return the meter, and by an arm's name those of
    its chain or tree by depth.

    Args:
        whole: arms that the meter times as they are, besides.

    Raises:
        InputError: see `open_meter`.
    """
    clipped = [arms_by_depth(arm) for arm in arms]
    meter = open_meter(target, [*itertools.chain(*clipped), *whole], sampler, workload)
    meter.measure(rounds)
    table, steps = meter.table(), iter(meter.steps())
    costs = {
        arm.name: step_costs(table, own, list(itertools.islice(steps, len(own))))
        for arm, own in zip(arms, clipped, strict=True)
    }
    return meter, costs


def step_costs(
    table: CostTable, arms: Sequence[Arm], steps: Sequence[Sequence[StepCost]]
) -> StepCosts:
    """Return costs by depth, given the `steps` of these arms (`arms_by_depth`, `CostMeter.steps`).
    Between their depths the target's go by the nodes that a tree has there, the drafter's are
    interpolated."""
    more, draft, other = [], [], []
    for arm, found in zip(arms, steps, strict=True):
        # a drafter may find nothing to draft, or have asked the target more than it drafted
        nodes = arm.used_shape.num_nodes
        whole = [cost for cost in found if cost.width > nodes] or found
        more.append(max(0, statistics.median_high(cost.width for cost in whole) - 1 - nodes))
        draft.append(statistics.median(cost.seconds for cost in whole))
        other.append(statistics.median(cost.other for cost in whole))
    shape, depths = arms[-1].used_shape, [arm.used_shape.depth for arm in arms]
    every = range(shape.depth + 1)
    more_D = np.interp(every, depths, more)
    widths_D = [1 + shape.clip(depth).num_nodes + float(more_D[depth]) for depth in every]
    # a drafter that asks the target about more than its draft does so also in vain
    probes = arms[-1].drafter.max_nodes(TreeShape())
    other_D = tuple(np.interp(every, depths, other).tolist())
    return StepCosts(
        target_D=tuple(table.target_seconds(width) for width in widths_D),
        draft_D=tuple(np.interp(every, depths, draft).tolist()),
        other_D=other_D,
        in_vain=table.target_seconds(1 + probes) + float(np.interp(1, depths, draft)) + other_D[0],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CostFile:
    """The file that keeps the costs of one machine, software, models and way to draw.

    ~/.cache/draftsmith/costs/5c0a...json        (below XDG_CACHE_HOME where that is set)

    A file names what its seconds belong to and counts for just that. A file that cannot be read, or
    belongs to something else, is ignored; a folder that cannot be written keeps nothing. Both are
    logged here, neither stops a run.
    """

    path: Path
    key: dict[str, Any]
    """All that they depend on."""

    def load(self, *, idle: bool = False) -> tuple[StepCosts, str] | None:
        """Read the kept costs and the day of their measurement; None: none can be used.

        Args:
            idle: nothing else runs now. Costs measured beside other programs are then not used.
        """
        if os.environ.get(REFRESH, "") not in ("", "0"):
            return None
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["key"] != self.key:
                _log.info("%s holds costs of something else: measuring again", self.place)
                return None
            if idle and content.get("beside_others", False):
                _log.info("%s was measured beside other programs: measuring again", self.place)
                return None
            return from_dict(StepCosts, content["costs"]), str(content["measured"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            _log.info("%s cannot be read: measuring again", self.place)
            return None

    @property
    def place(self) -> str:
        """The path, as messages name it."""
        return portable_text(str(self.path))

    def store(self, costs: StepCosts, *, beside_others: bool = False) -> bool:
        """Write the costs; False: that failed. `beside_others`: other programs ran meanwhile."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        content = {"key": self.key, "measured": today, "costs": as_dict(costs)}
        if beside_others:
            content["beside_others"] = True
        try:
            write_json_atomic(self.path, content)
        except (DraftsmithError, OSError) as error:
            _log.info("costs are not kept: %s", error)
            return False
        return True


def cost_file(target: Target, arm: Arm, sampler: Sampler, workload: Workload) -> CostFile:
    """Return the file for the arm's chain or tree, by depth."""
    key = jsonable(
        {
            "timed": "recovered, whole steps",  # those timed otherwise are not taken: see `settle`
            "machine": {k: v for k, v in machine_summary().items() if k != "memory_gib"},
            "versions": versions(),
            "target": _model_facts(target),
            "drafter": {
                "parts": [
                    {"kind": type(part).__name__, "options": as_dict(part.config)}
                    for part in arm.drafter.parts
                ],
                "weights": structure(arm.drafter),
                "shape": as_dict(arm.used_shape),
            },
            # what a drawn token costs depends on how laws are cut, hardly on the temperature
            "sampler": as_dict(
                replace(sampler, temperature=float(sampler.temperature > 0), logit_bias=())
            ),
            "rows": workload.rows,
            "context": workload.bucket,
        }
    )
    return CostFile(path=cache_folder("costs") / f"{digest(key)[:24]}.json", key=key)


def _model_facts(target: Target) -> dict[str, Any]:
    """Return the properties that decide how long the target's forwards take."""
    return {
        "name": target.name,
        "vocab_size": target.vocab_size,
        "dtype": str(target.dtype),
        "device": str(target.device),
        "weights": structure(target.model) if isinstance(target, HFTarget) else None,
        "attention": target.attn_implementation if isinstance(target, HFTarget) else None,
        "engine": target.engine if isinstance(target, HFTarget) else None,
    }


def with_controllers(
    arms: Sequence[Arm],
    drafting: DraftingConfig,
    target: Target,
    sampler: Sampler,
    workload: Workload,
) -> tuple[Arm, ...]:
    """Give the arms that --draft-length auto applies to a controller with the costs measured here.

    Raises:
        InputError: the target's context is too short to measure in.
    """
    if drafting.draft_length != "auto":
        return tuple(arms)
    others = load_of_others()
    # arms that cannot follow the option have the drafter's own shape
    out = []
    for arm in arms:
        if arm.shape is not None:
            costs = costs_of(arm, target, sampler, workload, others)
            arm = replace(arm, policy=Learning(CostAware(costs=costs)))
        out.append(arm)
    return tuple(out)


def costs_in(arms: Sequence[Arm]) -> dict[str, StepCosts]:
    """Return the step costs that the arms' controllers use."""
    return {
        portable_text(arm.name): arm.policy.policy.costs
        for arm in arms
        if isinstance(arm.policy, Learning)
    }


def costs_of(
    arm: Arm, target: Target, sampler: Sampler, workload: Workload, others: str | None
) -> StepCosts:
    """Return the step costs by depth of the arm's chain or tree; `others`: a phrase about other
    programs."""
    file = cost_file(target, arm, sampler, workload)
    kept = file.load(idle=others is None)
    if kept is not None:
        costs, day = kept
        again = f"measured on {day}, from {file.place} ({REFRESH}=1 measures again)"
        _log.info("%s: %s; %s", arm.name, _summary(costs), again)
        return costs
    if others is not None:
        _log.info(
            "%s: costs measured now will be off; they are measured again once nothing else runs",
            others,
        )
    began = time.monotonic()
    costs = measure(target, arm, sampler, workload)
    spent = time.monotonic() - began
    is_kept = file.store(costs, beside_others=others is not None)
    kept_where = f", kept in {file.place}" if is_kept else ""
    _log.info("%s: %s; measured in %.1f s%s", arm.name, _summary(costs), spent, kept_where)
    return costs


def _summary(costs: StepCosts) -> str:
    few = sorted({1, min(4, costs.longest), costs.longest})
    ratios = ", ".join(f"{costs.seconds(n) / costs.seconds(0):.2f}" for n in few)
    return f"with drafts {', '.join(map(str, few))} deep a step lasts {ratios} times a plain one"
