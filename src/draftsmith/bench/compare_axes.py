"""The common parts of a comparison's figures: colours, controlled groups, bars, lines, radars.

Where a figure shows the effect of one factor, lines and groups join settings that differ in that
factor alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from draftsmith.bench.charts import GREY, ink, legend_below
from draftsmith.bench.compare_figures import (
    FACTORS,
    UNDISTILLED,
    Entry,
    Options,
    Pooled,
    Scope,
    describe,
    objective_name,
)

# Okabe and Ito's, then three of Tol's: a study has up to nine objectives
_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#D55E00",
    "#56B4E9",
    "#882255",
    "#999933",
    "#332288",
)
_MARKERS = "osD^vP<>X"
MAX_LINES = 8
"""More lines than this cannot be told apart; see `controlled`."""
LABELS = {
    "tau": "tokens per step",
    "tau_predicted": "tokens per step (predicted)",
    "alpha": "expected acceptance",
    "alpha_decoded": "acceptance",
}


Level = str | int | float
"""A value of a factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Settings that differ in one factor alone."""

    name: str
    entries: dict[Level, Entry]
    """By the factor's value."""


def blank(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def distilled(scope: Scope) -> list[Entry]:
    """Ranked settings with an objective, the undistilled draft aside."""
    return [
        entry
        for entry in scope.entries
        if entry.rank is not None and entry.setting.objective not in (None, UNDISTILLED)
    ]


def objectives(scope: Scope) -> list[str]:
    """In a fixed order, so that colours do not depend on the ranking."""
    return sorted({e.setting.objective or "" for e in distilled(scope)})


def colour_of(scope: Scope, entry: Entry) -> str:
    names = objectives(scope)
    objective = entry.setting.objective
    return _COLOURS[names.index(objective) % len(_COLOURS)] if objective in names else GREY


def marker_of(scope: Scope, entry: Entry) -> str:
    names = objectives(scope)
    objective = entry.setting.objective
    return _MARKERS[names.index(objective) % len(_MARKERS)] if objective in names else "*"


def ranking_figure(scope: Scope, entry: Entry) -> Pooled:
    """The figure that ranks."""
    pooled: Pooled | None = getattr(entry, scope.ranked_by)
    assert pooled is not None, "only ranked settings are drawn"
    return pooled


def best_of(scope: Scope, entries: Sequence[Entry]) -> Entry:
    return max(entries, key=lambda entry: ranking_figure(scope, entry).mean)


def legend(figure: Figure, axis: Any) -> None:
    """Below the axes, in as many columns as its names leave room for."""
    longest = max((len(name) for name in axis.get_legend_handles_labels()[1]), default=0)
    legend_below(figure, [axis], columns=max(1, min(5, 95 // (longest + 8))))


def _floor(scope: Scope) -> float:
    """Where bars begin: plain decoding gives one token per step."""
    return 1.0 if scope.ranked_by.startswith("tau") else 0.0


def base_line(axis: Any, scope: Scope) -> None:
    """A dashed line at the undistilled draft."""
    if scope.base is not None and scope.base.rank is not None:
        axis.axhline(
            ranking_figure(scope, scope.base).mean,
            color=ink(),
            linewidth=0.9,
            linestyle=(0, (4, 3)),
            label=objective_name(UNDISTILLED),
        )


def controlled(scope: Scope, factor: str, ignoring: Sequence[str] = ()) -> list[Line]:
    """Settings that differ in `factor` alone: all lines, those to draw before others first.

    `ignoring`: factors and options that may differ too; then the best setting of each value is
    taken. Lines of one value show nothing and are left out; so is what stands for itself because
    its setting does not tell it from others.
    """
    fixed = [name for name in FACTORS if name != factor and name not in ignoring]
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in distilled(scope):
        if getattr(entry.setting, factor) is not None and entry.setting.label is None:
            own = _without(entry.setting.options, ignoring)
            key = (own, *(getattr(entry.setting, name) for name in fixed))
            groups.setdefault(key, []).append(entry)
    lines = [
        group for group in groups.values() if len({getattr(e.setting, factor) for e in group}) > 1
    ]
    lines = _by_turns(scope, lines, factor)
    alike = [
        replace(group[0].setting, options=_without(group[0].setting.options, ignoring))
        for group in lines
    ]
    out = []
    for name, group in zip(describe(alike, fixed), lines, strict=True):
        by_value: dict[Level, list[Entry]] = {}
        for entry in group:
            by_value.setdefault(getattr(entry.setting, factor), []).append(entry)
        best = {value: best_of(scope, some) for value, some in by_value.items()}
        out.append(Line(name=name, entries=best))
    return out


def _without(options: Options, names: Sequence[str]) -> Options:
    return tuple((name, value) for name, value in options if name not in names)


def _by_turns(scope: Scope, lines: Sequence[list[Entry]], factor: str) -> list[list[Entry]]:
    """The line of each objective that has most values, then the second of each, and so on; in each
    turn the best first. So no objective is crowded out by another's side lines."""

    def best(line: list[Entry]) -> float:
        return ranking_figure(scope, best_of(scope, line)).mean

    def values(line: list[Entry]) -> int:
        return len({getattr(entry.setting, factor) for entry in line})

    turns: Counter[str | None] = Counter()
    placed = []
    for line in sorted(lines, key=lambda line: (-values(line), -best(line))):
        objective = line[0].setting.objective
        placed.append((turns[objective], -best(line), line))
        turns[objective] += 1
    return [line for _, _, line in sorted(placed, key=lambda one: one[:2])]


def _shown(axis: Any, lines: Sequence[Line]) -> Sequence[Line]:
    """As many as can be told apart; the legend says how many more there are."""
    if len(lines) > MAX_LINES:
        more = len(lines) - MAX_LINES
        axis.plot([], [], linestyle="none", label=f"not drawn: {more} more")
    return lines[:MAX_LINES]


def grouped_bars(scope: Scope, lines: Sequence[Line], values: Sequence[Level]) -> Figure:
    """A group per value, a bar per line; intervals where there are several seeds."""
    figure = blank(7.6, 3.6)
    axis: Any = figure.subplots()
    lines = _shown(axis, lines)
    values = [value for value in values if any(value in line.entries for line in lines)]
    wide = 0.8 / len(lines)
    narrow = 6.8 / len(values) * wide < 0.36  # inches per bar: its number would touch the next
    low = _floor(scope)
    used: dict[str, int] = {}
    for number, line in enumerate(lines):
        entries = line.entries
        first = next(iter(entries.values()))
        colour = colour_of(scope, first)
        # several lines of one objective: the same colour, ever lighter
        shade = 1.0 / (1 + 0.6 * used.get(colour, 0))
        used[colour] = used.get(colour, 0) + 1
        for place, value in enumerate(values):
            if value not in entries:
                continue
            pooled = ranking_figure(scope, entries[value])
            x = place + (number - (len(lines) - 1) / 2) * wide
            axis.bar(
                x,
                pooled.mean - low,
                0.9 * wide,
                bottom=low,
                color=colour,
                alpha=shade,
                label=line.name if entries[value] is first else None,
            )
            if pooled.half is not None:
                axis.errorbar(x, pooled.mean, yerr=pooled.half, color=ink(), capsize=2, lw=1)
            axis.annotate(
                f"{pooled.mean:.2f}",
                (x, pooled.mean + (pooled.half or 0.0)),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                rotation=90 if narrow else 0,
            )
    base_line(axis, scope)
    axis.set_xticks(range(len(values)), [str(value) for value in values])
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel(LABELS[scope.ranked_by])
    low_y, high_y = axis.get_ylim()
    axis.set_ylim(low, high_y + (0.15 if narrow else 0.08) * (high_y - low_y))
    legend(figure, axis)
    return figure


def curves(scope: Scope, lines: Sequence[Line], label: str, *, doubling: bool) -> Figure:
    """A line with intervals per group; a numeric factor to the right."""
    figure = blank(7.6, 3.8)
    axis: Any = figure.subplots()
    lines = _shown(axis, lines)
    styles: dict[str, int] = {}
    ticks = sorted({float(value) for line in lines for value in line.entries})
    for number, line in enumerate(lines):
        entries = line.entries
        values = sorted(entries, key=float)
        # side by side, or whiskers would hide each other
        aside = number - (len(lines) - 1) / 2
        shift = 0.012 * (ticks[-1] - ticks[0]) * aside
        places = [float(v) * 2 ** (0.045 * aside) if doubling else float(v) + shift for v in values]
        means = [ranking_figure(scope, entries[value]).mean for value in values]
        halves = [ranking_figure(scope, entries[value]).half for value in values]
        first = entries[values[0]]
        colour = colour_of(scope, first)
        dashes = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))[styles.get(colour, 0) % 4]
        styles[colour] = styles.get(colour, 0) + 1
        axis.errorbar(
            places,
            means,
            yerr=[math.nan if half is None else half for half in halves],
            marker=marker_of(scope, first),
            markersize=5,
            color=colour,
            linestyle=dashes,
            capsize=3,
            label=line.name,
        )
    base_line(axis, scope)
    if doubling:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlabel(label)
    axis.set_ylabel(LABELS[scope.ranked_by])
    axis.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    legend(figure, axis)
    return figure


def radar(
    names: Sequence[str],
    series: Sequence[tuple[str, str, Sequence[float | None]]],
    *,
    around: float,
) -> Figure:
    """Polygons over rays; (name, colour, value per ray). The centre is not zero: rings say."""
    figure = blank(7.6, 5.2)
    axis: Any = figure.subplots(subplot_kw={"projection": "polar"})
    axis.set_theta_offset(math.pi / 2)
    axis.set_theta_direction(-1)
    angles = [2 * math.pi * i / len(names) for i in range(len(names))]
    known = [value for _, _, values in series for value in values if value is not None]
    span = max(max(known) - min(known), 0.02 * max(known))
    for name, colour, values in series:
        dashed = colour == GREY
        axis.plot(
            [*angles, angles[0]],
            [math.nan if v is None else v for v in (*values, values[0])],
            color=colour,
            label=name,
            marker="" if dashed else "o",
            markersize=4,
            linestyle=(0, (4, 3)) if dashed else "-",
        )
    axis.set_ylim(min(known) - around * span, max(known) + 0.05 * span)
    axis.set_xticks(angles, names)
    axis.tick_params(axis="x", pad=4)
    for text, angle in zip(axis.get_xticklabels(), angles, strict=True):
        across = math.sin(angle)  # names begin outside of the rim
        text.set_ha("center" if abs(across) < 0.05 else "left" if across > 0 else "right")
    axis.set_rlabel_position(180.0 / len(names))  # between two rays
    axis.tick_params(axis="y", labelsize=8)
    axis.grid(color=GREY, alpha=0.35, linewidth=0.6)
    axis.spines["polar"].set_color(GREY)
    legend(figure, axis)
    return figure
