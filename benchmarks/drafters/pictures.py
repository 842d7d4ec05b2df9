"""The pictures of the study of drafters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Never

from alignment_plots import COLOURS
from evaluation import shape_name
from matplotlib.figure import Figure

from drafters.rows import TEMPERATURES
from drafters.runs import CHAIN, DRAWN
from drafters.tables import Row, methods
from draftsmith.plots import GREY, Plot, legend_below

PANELS = {
    "survival": "drafts 1 .. d are all right",
    "accuracy": "best token is the target's",
    "misaligned": "decoding feeds another token",
}


def save_pictures(record: Mapping[str, Any], folder: Path) -> None:
    """Draw the parts that the record has: tokens per step, metrics by depth, ablations."""
    plots: list[Plot[[], Never]] = []
    if "methods" in record:
        plots.append(
            Plot(
                name="tau",
                title="Tokens per step",
                caption="Bars: each drafter in its own tree, with 95 % intervals.",
                figure=partial(_tau, methods(record)),
            )
        )
        rows = [row for row in methods(record) if row.get("store", "").startswith("greedy")]
        caption = "On held-out greedy texts of the target; drafters that learnt from such texts."
        figure = partial(_depth, rows)
        plots.append(Plot(name="depth", title="By depth", caption=caption, figure=figure))
    if "ablations" in record:
        plots.append(
            Plot(
                name="ablations",
                title="What each choice brings",
                caption="All shapes and temperatures, 95 % intervals; ticks: seeds.",
                figure=partial(_ablations, record["ablations"]["rows"]),
            )
        )
    for plot in plots:
        plot.draw().save(folder)


def _panels(rows: int) -> tuple[Figure, list[Any]]:
    """One per temperature, with a place for each row, the first at the top."""
    figure = Figure(figsize=(8.6, 0.9 + 0.3 * rows), layout="constrained")
    axes = list(figure.subplots(1, len(TEMPERATURES), sharey=True, sharex=True, squeeze=False)[0])
    for axis, temperature in zip(axes, TEMPERATURES, strict=True):
        axis.set_title(f"T = {temperature:g}")
        axis.set_xlabel("tokens per step")
    axes[0].invert_yaxis()
    return figure, axes


def _tau(rows: Sequence[Row]) -> Figure:
    figure, axes = _panels(len(rows))
    colours = [COLOURS[0] if "held_out" in row else GREY for row in rows]
    for axis, temperature in zip(axes, TEMPERATURES, strict=True):
        _bars(axis, rows, temperature, colours)
        for n, (name, shape) in enumerate((("chain", CHAIN), ("drawn", DRAWN)), 1):
            taus = [row["tau"][name][f"{temperature:g}"][0] for row in rows]
            axis.plot(taus, range(len(rows)), "od"[n - 1], color=_colour(n), ms=4)
            axis.lines[-1].set_label(shape_name(shape))
    legend_below(figure, axes)
    return figure


def _bars(axis: Any, rows: Sequence[Row], temperature: float, colours: Sequence[str]) -> None:
    means, lows, highs = zip(*(row["tau"]["own"][f"{temperature:g}"] for row in rows), strict=True)
    errors = [
        [mean - low for mean, low in zip(means, lows, strict=True)],
        [high - mean for mean, high in zip(means, highs, strict=True)],
    ]
    axis.barh(range(len(rows)), means, xerr=errors, color=colours, error_kw={"ecolor": GREY})
    axis.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axis.set_xlim(left=1.0)


def _depth(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    # EAGLE-1 and EAGLE-2 are one network in two trees
    once = {tuple(row["held_out"]["survival"]): row for row in rows}.values()
    for axis, (name, meaning) in zip(axes, PANELS.items(), strict=True):
        for n, row in enumerate(once):
            values = row["held_out"].get(name, [])
            last = len(row["held_out"]["survival"])
            depths = range(last - len(values) + 1, last + 1)
            style = "-" if n < len(COLOURS) else "--"
            axis.plot(depths, values, style, marker="o", color=_colour(n), label=row["label"], ms=3)
        axis.set_title(name)
        axis.set_xlabel(f"depth d\n{meaning}")
        axis.set_ylim(bottom=0.0)
    axes[0].legend(fontsize=7)
    return figure


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _ablations(rows: Sequence[Row]) -> Figure:
    """Ratios to the whole drafter: over the same prompts, so they tell more than bars side by
    side. Behind each its seeds, which say what chance does."""
    figure = Figure(figsize=(7.2, 0.9 + 0.3 * len(rows)), layout="constrained")
    axis = figure.subplots()
    wholes = {row["label"]: fmean(row["by_seed"]) for row in rows if row["against"] is None}
    for place, row in enumerate(rows):
        seeds = [tau / wholes[row["base"]] for tau in row["by_seed"]]
        axis.plot(seeds, [place] * len(seeds), "|", color=GREY, ms=9)
        if row["against"] is not None:
            ratio, low, high = (row["against"][key] for key in ("ratio", "low", "high"))
            colour = _colour(list(wholes).index(row["base"]))
            axis.errorbar(ratio, place, xerr=[[ratio - low], [high - ratio]], fmt="o", color=colour)
    axis.axvline(1.0, color=GREY, linestyle="--", zorder=0)
    axis.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axis.set_xlabel("tokens per step, of the whole drafter's")
    axis.invert_yaxis()
    return figure
