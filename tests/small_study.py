"""A made-up study for the comparison of runs: every factor varied, two seeds, four languages."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

from draftsmith.bench.compare.model import Comparison, RunMetrics, Scope, compare

OBJECTIVES = ("kl", "rkl", "jsd", "tvd")
GREEDY_LANGUAGES = ("French", "Korean", "Tamil", "Hindi")


def a_run(label: str, **options: Any) -> RunMetrics:
    usual: dict[str, Any] = {
        "objective": "kl",
        "forcing": "beam",
        "beams": 4,
        "teacher_temperature": 1.0,
        "truncation": "top-50",
        "seed": 0,
        "tau": 3.0,
    }
    return RunMetrics(label=label, **{**usual, **options})


def only_scope(runs: list[RunMetrics], **options: Any) -> Scope:
    (scope,) = compare(runs, **options).scopes
    return scope


@functools.cache
def the_comparison() -> Comparison:
    """`compare(a_study())`, once."""
    return compare(a_study())


def a_study() -> list[RunMetrics]:
    """Every factor varied on its own, two seeds, parts by language, an undistilled draft."""
    runs = []
    for seed in (0, 1):
        for i, objective in enumerate(OBJECTIVES):
            plan = [("beam", b, 1.0, "top-50", "bucket", 0.1 * math.log2(b)) for b in (1, 2, 8)]
            # cut laws have other tails at other temperatures: beside the usual setting, not in it
            plan += [("beam", 1, t, "top-50", "renormalise", -0.2) for t in (0.7, 1.0, 2.0)]
            plan += [(f, 1, 1.0, "top-50", "bucket", -0.1) for f in ("gold", "greedy", "sample")]
            plan += [("sample", 1, 1.0, "top-50", "floor", -0.15)]
            plan += [("beam", 1, 1.0, "full", "renormalise", 0.01)]
            for forcing, beams, temperature, truncation, tail, gain in plan:
                tau = 3.0 + 0.05 * i + gain + 0.01 * seed
                whole = RunMetrics(
                    label=f"{objective}-{forcing}-{beams}-{temperature}-{truncation}-{tail}-{seed}",
                    objective=objective,
                    forcing=forcing,
                    beams=beams,
                    teacher_temperature=temperature,
                    truncation=truncation,
                    options=(
                        ("store", f"{forcing}-{beams}"),
                        ("laws", "teacher" if truncation == "full" else "store"),
                        ("objective.tail", tail),
                        ("training.duration", "240steps"),
                    ),
                    seed=seed,
                    tau=tau,
                    alpha=tau / 6,
                    tau_predicted=tau - 0.2,
                    speedup=tau / 2,
                    speedup_predicted=tau / 2 + 0.1,
                    quality=40.0 + i,
                    quality_metric="chrF",
                    storage_tokens=1000 * beams,
                    storage_bytes=300_000 * beams if truncation != "full" else 256_000_000,
                )
                runs.append(whole)
                runs += [
                    replace(whole, language=name, tau=tau * (1 + 0.1 * n))
                    for n, name in enumerate(GREEDY_LANGUAGES)
                ]
    base = RunMetrics(label="base", objective="none", tau=2.5, alpha=0.4, quality=35.0)
    base = replace(base, quality_metric="chrF")
    runs.append(base)
    runs += [
        replace(base, language=name, tau=2.5 * (1 + 0.05 * n))
        for n, name in enumerate(GREEDY_LANGUAGES)
    ]
    return runs
