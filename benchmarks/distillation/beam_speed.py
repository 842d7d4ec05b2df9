"""What the best draft of DistillBeam's study gains by the clock, beside what eq. 12 foretells."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clock import by_the_clock
from evaluation import ready
from lab import Lab
from study import Run

from draftsmith.bench.records import BASELINE
from draftsmith.core.generation import Arm
from draftsmith.core.speedup import predicted_speedup
from draftsmith.core.types import TreeShape
from draftsmith.provenance import machine_summary, warn_if_busy, write_json_atomic
from draftsmith.targets.hf import load_target

LENGTHS = (1, 8)
"""Chain lengths: the best one for a draft of this cost, and the paper's."""
PROMPTS = 24
REPEATS = 3


def is_measured(lab: Lab, drafts: Mapping[str, Run]) -> bool:
    """Whether what is known is of these drafts and these models."""
    known = measured(lab)
    return known.get("of") == lab.kept.of and {row["draft"] for row in known["rows"]} == set(drafts)


def measure(lab: Lab, drafts: Mapping[str, Run]) -> None:
    """Time these drafts, which must be here."""
    warn_if_busy()
    target, exam = load_target(lab.models.target), lab.final_exam
    exam = replace(exam, limit=min(PROMPTS, exam.limit))
    arms = [
        Arm(
            name=f"{name}, chain {shape.depth}",
            drafter=ready(run.drafter, target, shape),
            shape=shape,
        )
        for name, run in drafts.items()
        for shape in map(TreeShape.chain, LENGTHS)
    ]
    rows = []
    for temperature in exam.temperatures:
        for one in by_the_clock(target, arms, exam, temperature, repeats=REPEATS):
            if one.name == BASELINE:
                continue
            name, _, length = one.name.rpartition(", chain ")
            tau = one.decode_tokens_per_step
            assert one.speedup_ci95 is not None and tau is not None
            rows.append(
                {
                    "draft": name,
                    "gamma": int(length),
                    "temperature": temperature,
                    "decode_tokens_per_step": tau,
                    "loop_share": one.loop_share,
                    "speedup": one.speedup,
                    "interval": [one.speedup_ci95.low, one.speedup_ci95.high],
                    "predicted": float(predicted_speedup(tau, int(length), lab.cost_ratio())),
                }
            )
    content = {"of": lab.kept.of, "prompts": len(exam.read()), "repeats": REPEATS, "rows": rows}
    write_json_atomic(_path(lab), {**content, "machine": machine_summary()})


def measured(lab: Lab) -> dict[str, Any]:
    """What `measure` found on any day; empty: nothing yet."""
    if not _path(lab).exists():
        return {}
    found: dict[str, Any] = json.loads(_path(lab).read_text(encoding="utf-8"))
    return found


def _path(lab: Lab) -> Path:
    return lab.kept.path.with_name("speed.json")
