"""The figures of `validation.py`."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Never

import numpy as np
from matplotlib.figure import Figure

from draftsmith.plan import plots
from draftsmith.plan.tables import LatencyPoint
from draftsmith.plots import Plot


def save_pictures(record: dict[str, Any], folder: Path) -> None:
    made: tuple[Plot[[], Never], ...] = (
        Plot(
            name="speedup_by_size",
            title="Speed-up by draft size",
            caption="Predicted by parameters and by measured costs, with acceptance by the law of "
            "the other four drafts; measured with 95 % bootstrap intervals over prompts.",
            figure=partial(speedups, record),
        ),
        Plot(
            name="latency",
            title="Latency by distance from N*",
            caption="N* of the memory-bound model; whiskers are 95 % intervals over prompts.",
            figure=partial(plots.latencies, points(record)),
        ),
    )
    for plot in made:
        plot.draw().save(folder)


def speedups(record: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    drafts = record["drafts"]
    sizes = [one["params"] for one in drafts]
    for kind, label in (("by_parameters", "by N / M"), ("by_costs", "by measured costs")):
        axis.plot(sizes, [one[kind]["speedup"] for one in drafts], marker=".", label=label)
        measured = [one["measured"][str(one[kind]["length"])] for one in drafts]
        values = np.array([one["speedup"] for one in measured])
        ends = np.array([one["speedup_ci95"] or [one["speedup"]] * 2 for one in measured]).T
        reach = np.maximum(np.abs(ends - values), 0.0)
        colour = axis.lines[-1].get_color()
        label = f"measured, at the length {label}"
        axis.errorbar(
            sizes, values, yerr=reach, linestyle="none", marker="o", capsize=3, color=colour,
            label=label,
        )  # fmt: skip
    axis.axhline(1.0, linewidth=0.9, linestyle="--", color="C7")
    axis.set_xscale("log")
    axis.set_xlabel("draft parameters N")
    axis.set_ylabel("speed-up")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def points(record: dict[str, Any]) -> list[LatencyPoint]:
    """At the draft lengths that measured costs like best."""
    optimum = record["optimum"].get("parameters", {}).get("params", math.nan)
    M = record["target"]["params"]
    return [
        LatencyPoint(
            draft=one["name"],
            family="mini-code",
            params=one["params"],
            distance=abs(one["params"] - optimum) / M,
            seconds={
                kind: tuple(values)
                for kind, values in one["measured"][str(one["by_costs"]["length"])][
                    "latency"
                ].items()
            },
        )
        for one in record["drafts"]
    ]
