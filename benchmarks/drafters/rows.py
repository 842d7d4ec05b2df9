"""One drafter of the study as JSON: what it is worth by decoding and by its held-out figures, and
what it cost."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from evaluation import Decoded, Scores, shape_name
from study import COST, Evaluated, Run
from writing import interval

from drafters.runs import CHAIN, COMMON, DRAWN, Lab
from draftsmith.core.types import TreeShape
from draftsmith.drafters.registry import load_drafter
from draftsmith.targets.hf import HFTarget, load_target

TEMPERATURES = (0.0, 1.0)
HELD_OUT = ("accuracy", "survival", "acceptance", "misaligned", "survival_t1")
_DEPTH = re.compile(r"^(?P<figure>\w+)_(?P<depth>\d+)$")


def as_row(lab: Lab, label: str, seeds: Sequence[Evaluated]) -> dict[str, Any]:
    """A setting, given its seeds."""
    first = seeds[0].run
    return {
        **worth(label, seeds),
        "parameters": _parameters(lab, first),
        **_learnt(first),
        **_cost(lab, [one.run for one in seeds]),
    }


def worth(label: str, seeds: Sequence[Evaluated]) -> dict[str, Any]:
    """What it is worth by decoding. `tau`: mean and 95 % interval, for shapes that all share and
    for the drafter's own, at each temperature; `by_seed`: the mean over all of these."""
    marks = [one.marks for one in seeds]
    tree = seeds[0].run.tree
    own = CHAIN if tree is None else tree
    return {
        "label": label,
        "seeds": len(seeds),
        "prompts": len(marks[0].decoded[0].tokens),
        "shape": shape_name(own),
        "tau": {
            name: {
                f"{temperature:g}": _tau(marks, shape, temperature) for temperature in TEMPERATURES
            }
            for name, shape in (("chain", CHAIN), ("drawn", DRAWN), ("own", own))
        },
        "decoded": {
            name: {
                f"{temperature:g}": found
                for temperature in TEMPERATURES
                if (found := _around_loops(marks, shape, temperature))
            }
            for name, shape in (("chain", CHAIN), ("drawn", DRAWN), ("own", own))
        },
        "by_seed": [round(statistics.fmean(way.tau for way in one.decoded), 4) for one in marks],
    }


def _around_loops(
    marks: Sequence[Scores], shape: TreeShape, temperature: float
) -> dict[str, float]:
    """Acceptance, share of loops, and what lies outside of these; of all seeds together."""
    ways = [one.find(shape, temperature) for one in marks]
    return replace(
        ways[0],
        tokens=sum((way.tokens for way in ways), ()),
        steps=sum((way.steps for way in ways), ()),
        accepted=sum((way.accepted for way in ways), ()),
        offered=sum((way.offered for way in ways), ()),
        loop_tokens=sum((way.loop_tokens for way in ways), ()),
        outside=sum((way.outside for way in ways), ()),
    ).around_loops


def _tau(marks: Sequence[Scores], shape: TreeShape, temperature: float) -> list[float]:
    def pick(one: Scores) -> list[Decoded]:
        return [one.find(shape, temperature)]

    return [round(value, 4) for value in interval(marks, of=pick)]


def _parameters(lab: Lab, run: Run) -> int:
    """Its own: neither embedding nor head of the target."""
    drafter = load_drafter(run.drafter)
    drafter.bind(_target(lab.models.target))
    return sum(weights.numel() for weights in drafter.parameters())


@cache
def _target(folder: str) -> HFTarget:
    return load_target(folder)


def _learnt(run: Run) -> dict[str, Any]:
    """What it was trained for."""
    if run.options is None:
        return {}
    weight = run.options.imitation.token_weight
    return {
        "kind": run.options.drafter,
        "options": [
            one for one in run.options.drafter_option if one.partition("=")[0] not in COMMON
        ],
        "store": run.options.store[0].name,
        "objective": run.options.objective.objective,
        "token_weight": "as published" if weight is None else weight,
    }


def _cost(lab: Lab, runs: Sequence[Run]) -> dict[str, Any]:
    """Per seed, what training took, held-out measurements included; and what these said."""
    trained = [_results(run) for run in runs if run.options is not None]
    if not trained:
        return {}
    costs = [_read(lab.work / "runs" / run.name / COST)["cpu_seconds"] for run in runs]
    return {
        "tokens": trained[0]["tokens"],
        "cpu_seconds": round(statistics.mean(costs), 1),
        "held_out": _by_depth([one["held_out"] for one in trained]),
    }


def _by_depth(seeds: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Means over seeds of each held-out figure, from the first depth that has it."""
    out: dict[str, list[float]] = {}
    for name in seeds[0]:
        found = _DEPTH.match(name)
        if found and found["figure"] in HELD_OUT:
            mean = statistics.mean(one[name] for one in seeds)
            out.setdefault(found["figure"], []).append(round(mean, 4))
    return out


def _results(run: Run) -> dict[str, Any]:
    results: dict[str, Any] = _read(Path(run.drafter) / "run.json")["results"]
    return results


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
