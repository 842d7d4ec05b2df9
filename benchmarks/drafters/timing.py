"""Speed-ups by the clock: all drafters interleaved in one process, as `draftsmith bench` does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from clock import by_the_clock
from evaluation import ready
from study import Run, is_trained

from drafters.rows import TEMPERATURES
from drafters.runs import CHAIN, Lab
from draftsmith.bench.records import BASELINE, DrafterMetrics
from draftsmith.core.generation import Arm
from draftsmith.provenance import warn_if_busy
from draftsmith.targets.hf import load_target


def timed(lab: Lab, runs: Mapping[str, Run]) -> dict[str, Any]:
    """Measure each drafter in its own shape and as a chain, by temperature.

    Returns its speed-up over plain decoding with the 95 % interval over prompts, and the tokens per
    step of the same texts.
    """
    missing = [name for name, run in runs.items() if not is_trained(run)]
    if missing:
        raise SystemExit(f"--timed: train these first (--only ...): {', '.join(missing)}")
    warn_if_busy()
    load = os.getloadavg()[0]
    found: dict[str, dict[str, Any]] = {name: {"own": {}, "chain": {}} for name in runs}
    for temperature in TEMPERATURES:
        for one in _measured(lab, runs, temperature):
            if one.name != BASELINE:
                name, _, shape = one.name.rpartition(":")
                ci = one.speedup_ci95
                found[name][shape][f"{temperature:g}"] = {
                    "speedup": one.speedup,
                    "interval": None if ci is None else [ci.low, ci.high],
                    "decode_tokens_per_step": one.decode_tokens_per_step,
                    "loop_share": one.loop_share,
                    "decode_tokens_per_step_outside_loops": (
                        one.decode_tokens_per_step_outside_loops
                    ),
                }
    return {"load_before": load, "prompts": lab.amounts.timed_prompts, "drafters": found}


def _measured(lab: Lab, runs: Mapping[str, Run], temperature: float) -> tuple[DrafterMetrics, ...]:
    target = load_target(lab.models.target)
    arms = []
    for name, run in runs.items():
        for which, shape in (("own", run.tree or CHAIN), ("chain", CHAIN)):
            drafter = ready(run.drafter, target, shape)
            arms.append(Arm(name=f"{name}:{which}", drafter=drafter, shape=shape))
    exam = replace(lab.final, limit=min(lab.final.limit, lab.amounts.timed_prompts))
    return by_the_clock(target, arms, exam, temperature, repeats=lab.amounts.timed_repeats)
