"""Costs of a step by the number of drafted tokens: what a controller of the draft length reads.

The meter of `costs` times drafts of 0, 1, 2, 4, 8, ... tokens, interleaved; lengths between them
are interpolated. Seconds depend on shapes, not on the values of weights, so any text will do:

    text    p0 p1 ... pn p0 p1 ... pn p0 ...      a prompt, repeated up to three quarters of the
            `---- three quarters of 256 ---'      `bucket` that the usual context falls into

Behind it lookup drafters find something, and tables of one bucket are alike.

Costs are kept from run to run: a JSON file per machine, software, models and way to draw.

    ~/.cache/draftsmith/costs/5c0a...json        (below XDG_CACHE_HOME where that is set)

A file names what its seconds belong to and counts for just that. A file that cannot be read, or
belongs to something else, is ignored; a folder that cannot be written keeps nothing. Both are
logged, neither stops a run.
"""

from __future__ import annotations

import datetime
import itertools
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from draftsmith.bench.costs import Cost, CostMeter, CostTable, interpolate
from draftsmith.config import as_dict, from_dict
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.config import DraftingConfig
from draftsmith.errors import DraftsmithError, InputError
from draftsmith.plan.length_policy import CostAware, Learning, StepCosts
from draftsmith.provenance import (
    digest,
    jsonable,
    load_of_others,
    machine_summary,
    portable_text,
    versions,
    write_json_atomic,
)
from draftsmith.targets.base import Target
from draftsmith.targets.hf import HFTarget

_log = logging.getLogger(__name__)

ROUNDS = 9
_PROBED = 64
"""Tokens by which each text is continued while steps are timed."""
_SMALLEST = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The inputs of decoding that decide the cost of a step."""

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


def chain_arms(arm: Arm, lengths: Sequence[int]) -> tuple[Arm, ...]:
    """Return the arm with chains of these lengths, whatever its policy."""
    return tuple(replace(arm, shape=TreeShape.chain(n), policy=None) for n in lengths)


def probed_arms(arm: Arm) -> tuple[Arm, ...]:
    """Return the arms to time for this arm: itself, or some chains where a policy chooses."""
    depth = arm.used_shape.depth
    few = sorted({1, max(1, depth // 4), depth})
    return (arm,) if arm.policy is None else chain_arms(arm, few)


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
        [workload.text(room)],
        DecodeOptions(max_new_tokens=_PROBED),
        widths,
        predictions=[workload.expected],
        rows=workload.rows,
    )


def measure(target: Target, arm: Arm, sampler: Sampler, workload: Workload) -> StepCosts:
    """Measure the costs of chains up to the arm's depth.

    Raises:
        InputError: see `open_meter`.
    """
    lengths = (0, *doubling(arm.used_shape.depth))
    meter = open_meter(target, chain_arms(arm, lengths), sampler, workload)
    meter.measure(ROUNDS)
    return step_costs(meter.table(), arm.drafter, lengths, meter.steps())


def step_costs(
    table: CostTable, drafter: Drafter, lengths: Sequence[int], steps: Sequence[Sequence[Cost]]
) -> StepCosts:
    """Interpolate costs by length from `steps` with drafts of these lengths (`CostMeter.steps`)."""
    target, draft = [], []
    for length, found in zip(lengths, steps, strict=True):
        # a drafter may find nothing to draft, or have asked the target more than it drafted
        whole = [cost for cost in found if cost.width > length] or found
        width = max(1 + length, statistics.median_high(cost.width for cost in whole))
        seconds = statistics.median(cost.seconds for cost in whole)
        target.append(Cost(width=length, seconds=table.target_seconds(width)))
        draft.append(Cost(width=length, seconds=seconds))
    # a drafter that asks the target about more than its draft does so also in vain
    probes = drafter.max_nodes(TreeShape())
    return StepCosts(
        target_D=tuple(interpolate(target, n) for n in range(lengths[-1] + 1)),
        draft_D=tuple(interpolate(draft, n) for n in range(lengths[-1] + 1)),
        in_vain=table.target_seconds(1 + probes) + interpolate(draft, 1),
    )


REFRESH = "DRAFTSMITH_REFRESH_COSTS"
"""Set to anything but 0 it has costs measured again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Costs from an earlier run."""

    costs: StepCosts
    measured: str
    """The day."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostFile:
    """The file that keeps the costs of one combination."""

    path: Path
    key: dict[str, Any]
    """All that they depend on."""

    def load(self) -> Kept | str | None:
        """Read the kept costs; None: there are none; or return why the file cannot be used."""
        if os.environ.get(REFRESH, "") not in ("", "0"):
            return None
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["key"] != self.key:
                return f"{portable_text(str(self.path))} holds costs of something else"
            costs = from_dict(StepCosts, content["costs"])
            return Kept(costs=costs, measured=str(content["measured"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return f"{portable_text(str(self.path))} cannot be read"

    def store(self, costs: StepCosts) -> str | None:
        """Write the costs; return why that failed, or None."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        content = {"key": self.key, "measured": today, "costs": as_dict(costs)}
        try:
            write_json_atomic(self.path, content)
        except (DraftsmithError, OSError) as error:
            return f"costs are not kept: {error}"
        return None


def cost_file(target: Target, arm: Arm, sampler: Sampler, workload: Workload) -> CostFile:
    """Return the file for chains up to the arm's depth."""
    key = jsonable(
        {
            "machine": {k: v for k, v in machine_summary().items() if k != "memory_gib"},
            "versions": versions(),
            "target": _model_facts(target),
            "drafter": {
                "kind": type(arm.drafter).__name__,
                "options": as_dict(arm.drafter.config),
                "weights": _structure(arm.drafter),
                "longest": arm.used_shape.depth,
            },
            # what a drawn token costs depends on how laws are cut, hardly on the temperature
            "sampler": as_dict(
                replace(sampler, temperature=float(sampler.temperature > 0), logit_bias=())
            ),
            "rows": workload.rows,
            "context": workload.bucket,
        }
    )
    return CostFile(path=_folder() / f"{digest(key)[:24]}.json", key=key)


def _folder() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    # the specification has relative ones ignored
    if os.path.isabs(given):
        return Path(given) / "draftsmith" / "costs"
    try:
        return Path.home() / ".cache" / "draftsmith" / "costs"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "draftsmith" / "costs"


def _model_facts(target: Target) -> dict[str, Any]:
    """Return the properties that decide how long the target's forwards take."""
    return {
        "name": target.name,
        "vocab_size": target.vocab_size,
        "dtype": str(target.dtype),
        "device": str(target.device),
        "weights": _structure(target.model) if isinstance(target, HFTarget) else None,
        "attention": target.attn_implementation if isinstance(target, HFTarget) else None,
    }


def _structure(model: nn.Module) -> str:
    """Return a digest of names, shapes and formats of the parameters; values cost nothing."""
    return digest([[n, list(p.shape), str(p.dtype)] for n, p in model.named_parameters()])


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
    """Return the step costs up to the arm's depth; `others`: a phrase about other programs."""
    file = cost_file(target, arm, sampler, workload)
    place = portable_text(str(file.path))
    kept = file.load()
    if isinstance(kept, Kept):
        summary, day = _summary(kept.costs), kept.measured
        again = f"({REFRESH}=1 measures again)"
        _log.info("%s: %s; measured on %s, from %s %s", arm.name, summary, day, place, again)
        return kept.costs
    if kept is not None:
        _log.info("%s: measuring again", kept)
    if others is not None:
        _log.info(
            "%s: costs measured now will be off, and they are kept; close them and measure again "
            "with %s=1",
            others,
            REFRESH,
        )
    began = time.monotonic()
    costs = measure(target, arm, sampler, workload)
    spent = time.monotonic() - began
    kept_where = file.store(costs) or f"kept in {place}"
    _log.info("%s: %s; measured in %.1f s, %s", arm.name, _summary(costs), spent, kept_where)
    return costs


def _summary(costs: StepCosts) -> str:
    few = sorted({1, min(4, costs.longest), costs.longest})
    ratios = ", ".join(f"{costs.seconds(n) / costs.seconds(0):.2f}" for n in few)
    return f"with {', '.join(map(str, few))} drafted tokens a step lasts {ratios} times a plain one"
