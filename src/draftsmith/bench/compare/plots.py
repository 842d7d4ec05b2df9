"""The drawings of a comparison: one function per figure, or the reason why there is none.

Ink is whatever text colour the caller has set (see `compare_plots`).

The common parts of a comparison's figures: colours, controlled groups, bars, lines, radars.

Where a figure shows the effect of one factor, lines and groups join settings that differ in that
factor alone.

The figures of a comparison, as pictures. One whose data are missing is left out, with a reason.

All are of one scope (target and decoding temperature).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from draftsmith.bench.compare.model import (
    FACTORS,
    UNDISTILLED,
    Options,
    Pooled,
    RankedSetting,
    Scope,
    describe,
    objective_name,
)
from draftsmith.bench.plots import GREY, ink, legend_below
from draftsmith.data.languages import GROUPS, find
from draftsmith.plots import Plot, PlotImage, draw

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
    entries: dict[Level, RankedSetting]
    """By the factor's value."""


def blank(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def distilled(scope: Scope) -> list[RankedSetting]:
    """Ranked settings with an objective, the undistilled draft aside."""
    return [
        entry
        for entry in scope.entries
        if entry.rank is not None and entry.setting.objective not in (None, UNDISTILLED)
    ]


def objectives(scope: Scope) -> list[str]:
    """In a fixed order, so that colours do not depend on the ranking."""
    return sorted({e.setting.objective or "" for e in distilled(scope)})


def colour_of(scope: Scope, entry: RankedSetting) -> str:
    names = objectives(scope)
    objective = entry.setting.objective
    return _COLOURS[names.index(objective) % len(_COLOURS)] if objective in names else GREY


def marker_of(scope: Scope, entry: RankedSetting) -> str:
    names = objectives(scope)
    objective = entry.setting.objective
    return _MARKERS[names.index(objective) % len(_MARKERS)] if objective in names else "*"


def ranking_figure(scope: Scope, entry: RankedSetting) -> Pooled:
    """The figure that ranks."""
    pooled: Pooled | None = getattr(entry, scope.ranked_by)
    assert pooled is not None, "only ranked settings are drawn"
    return pooled


def best_of(scope: Scope, entries: Sequence[RankedSetting]) -> RankedSetting:
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
    groups: dict[tuple[object, ...], list[RankedSetting]] = {}
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
        by_value: dict[Level, list[RankedSetting]] = {}
        for entry in group:
            by_value.setdefault(getattr(entry.setting, factor), []).append(entry)
        best = {value: best_of(scope, some) for value, some in by_value.items()}
        out.append(Line(name=name, entries=best))
    return out


def _without(options: Options, names: Sequence[str]) -> Options:
    return tuple((name, value) for name, value in options if name not in names)


def _by_turns(
    scope: Scope, lines: Sequence[list[RankedSetting]], factor: str
) -> list[list[RankedSetting]]:
    """The line of each objective that has most values, then the second of each, and so on; in each
    turn the best first. So no objective is crowded out by another's side lines."""

    def best(line: list[RankedSetting]) -> float:
        return ranking_figure(scope, best_of(scope, line)).mean

    def values(line: list[RankedSetting]) -> int:
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


_MAX_RAYS = 5
"""Settings in the chart of languages."""
_STORED = ("store",)
"""The option that names what was collected: other forcing, widths and cuts have other stores."""
Drawn = Figure | str
"""A figure, or why there is none."""


def radar_objectives(scope: Scope) -> Drawn:
    names = objectives(scope)
    if len(names) < 3:
        return f"it takes three objectives, there are {len(names)}"
    kinds = (
        ("one trajectory per prompt", "#0072B2", False),
        ("several trajectories per prompt", "#E69F00", True),
    )
    series: list[tuple[str, str, Sequence[float | None]]] = []
    for label, colour, several in kinds:
        values: list[float | None] = []
        for name in names:
            own = [
                entry
                for entry in distilled(scope)
                if entry.setting.objective == name and entry.setting.has_several == several
            ]
            values.append(ranking_figure(scope, best_of(scope, own)).mean if own else None)
        if any(value is not None for value in values):
            series.append((label, colour, values))
    if scope.base is not None and scope.base.rank is not None:
        mean = ranking_figure(scope, scope.base).mean
        series.append((objective_name(UNDISTILLED), GREY, [mean] * len(names)))
    return radar([objective_name(name) for name in names], series, around=0.4)


def radar_languages(scope: Scope) -> Drawn:
    first = [e for e in distilled(scope) if len(e.by_language) >= 3]
    if not first:
        return "no setting has figures for three languages"
    best: dict[str, RankedSetting] = {}
    for entry in first:  # ranked already
        best.setdefault(entry.setting.objective or "", entry)
    shown = list(best.values())[:_MAX_RAYS]
    names = list(dict.fromkeys(name for entry in shown for name in entry.by_language))
    series: list[tuple[str, str, Sequence[float | None]]] = [
        (entry.name, colour_of(scope, entry), _by_name(entry, names)) for entry in shown
    ]
    if scope.base is not None and scope.base.by_language:
        series.append((scope.base.name, GREY, _by_name(scope.base, names)))
    return radar(names, series, around=0.15)


def _by_name(entry: RankedSetting, names: Sequence[str]) -> list[float | None]:
    return [entry.by_language[name].mean if name in entry.by_language else None for name in names]


def forcing(scope: Scope) -> Drawn:
    lines = controlled(scope, "forcing", ignoring=("beams", *_STORED))
    if not lines:
        return "no two settings differ in forcing alone"
    found = {value for line in lines for value in line.entries}
    known = [value for value in ("gold", "greedy", "sample", "beam") if value in found]
    return grouped_bars(scope, lines, [*known, *sorted(map(str, found - set(known)))])


def beams(scope: Scope) -> Drawn:
    lines = controlled(scope, "beams", ignoring=_STORED)
    if not lines:
        return "no two settings differ in beam width alone"
    return curves(scope, lines, "beam width", doubling=True)


def temperature(scope: Scope) -> Drawn:
    lines = controlled(scope, "teacher_temperature")
    if not lines:
        return "no two settings differ in the teacher's temperature alone"
    return curves(scope, lines, "temperature of the teacher's laws", doubling=False)


def truncation(scope: Scope) -> Drawn:
    lines = controlled(scope, "truncation", ignoring=("laws", *_STORED))
    if not lines:
        return "no two settings differ in the truncation of the teacher's laws alone"
    values = {str(value) for line in lines for value in line.entries}
    # top-5, top-50, .., full
    ordered = sorted(values, key=lambda value: (value == "full", len(value), value))
    return grouped_bars(scope, lines, ordered)


def bubbles(scope: Scope) -> Drawn:
    axes = next(
        (
            (x, y)
            for y in ("tau", "tau_predicted")
            for x in ("alpha", "alpha_decoded")
            if any(e.value(x) is not None and e.value(y) is not None for e in scope.entries)
        ),
        None,
    )
    if axes is None:
        return "no setting has both acceptance and tokens per step"
    points = [e for e in scope.entries if all(e.value(name) is not None for name in axes)]
    figure = blank(7.6, 4.4)
    axis: Any = figure.subplots()

    def area(beams: int) -> float:
        return 30.0 * beams

    for entry in sorted(points, key=lambda entry: -(entry.setting.beams or 1)):  # small on top
        axis.scatter(
            entry.value(axes[0]),
            entry.value(axes[1]),
            s=area(entry.setting.beams or 1),
            color=colour_of(scope, entry),
            marker=marker_of(scope, entry) if entry.setting.objective == UNDISTILLED else "o",
            alpha=0.6,
            linewidths=0.8,
            edgecolors=ink(),
        )
    for entry in {e.setting.objective: e for e in points}.values():
        name = objective_name(entry.setting.objective) or "other"
        marker = "*" if entry.setting.objective == UNDISTILLED else "o"
        colour = colour_of(scope, entry)
        axis.plot([], [], marker=marker, linestyle="none", color=colour, label=name)
    for beams in sorted({e.setting.beams for e in points if e.setting.beams}):
        size = math.sqrt(area(beams))
        label = f"{beams} trajector{'ies' if beams != 1 else 'y'} per prompt"
        axis.plot([], [], marker="o", linestyle="none", color=GREY, alpha=0.6, ms=size, label=label)
    axis.margins(0.12)
    axis.set_xlabel(LABELS[axes[0]])
    axis.set_ylabel(LABELS[axes[1]])
    axis.grid(color=GREY, alpha=0.25, linewidth=0.6)
    legend(figure, axis)
    return figure


def storage(scope: Scope) -> Drawn:
    stores: dict[str, RankedSetting] = {}
    held = [e for e in scope.entries if e.storage_bytes]
    # several objectives learn from one store: a bar per store
    bare = [
        replace(
            e.setting,
            objective=None,
            teacher_temperature=None,
            options=tuple(option for option in e.setting.options if option[0] in _STORED),
        )
        for e in held
    ]
    for entry, name in zip(held, describe(bare), strict=True):
        if name not in stores or (entry.storage_bytes or 0) > (stores[name].storage_bytes or 0):
            stores[name] = entry
    if not stores:
        return "no run says how much its trajectories took"
    ordered = sorted(stores.items(), key=lambda item: -(item[1].storage_bytes or 0))
    figure = blank(7.6, 0.9 + 0.36 * len(ordered))
    axis: Any = figure.subplots()
    unit, power = _unit(max(entry.storage_bytes or 0 for entry in stores.values()))
    for place, (_, entry) in enumerate(reversed(ordered)):
        size = entry.storage_bytes or 0
        axis.barh(place, size / power, color="#0072B2", height=0.62)
        own, part = _unit(size)
        text = f"{size / part:.3g} {own}"
        if entry.storage_tokens:
            text += f", {size / entry.storage_tokens:,.0f} bytes per token"
        _beside(axis, text, size / power, place)
    axis.set_yticks(range(len(ordered)), [name for name, _ in reversed(ordered)])
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel(unit)
    axis.margins(x=0.42)
    return figure


def _beside(axis: Any, text: str, x: float, y: float) -> None:
    """A text to the right of a bar's end."""
    axis.annotate(
        text, (x, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5
    )


def _unit(size: int) -> tuple[str, float]:
    names = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log(max(size, 1), 1024)), len(names) - 1)
    return names[power], float(1024**power)


def quality(scope: Scope) -> Drawn:
    rated = [e for e in scope.entries if e.quality is not None]
    if not rated:
        return "no run says how good the draft model's own texts are"
    metrics = {e.quality_metric or "quality" for e in rated}
    if len(metrics) > 1:
        return f"qualities of several metrics ({', '.join(sorted(metrics))}) share no axis"
    best: dict[str | None, RankedSetting] = {}
    for entry in rated:
        if entry.setting.objective is not None:
            best.setdefault(entry.setting.objective, entry)
    shown = list(best.values()) or rated[:MAX_LINES]
    figure, axis = _bars(scope, [(entry, entry.quality, None) for entry in shown])
    axis.set_xlabel(next(iter(metrics)))
    return figure


def speedups(scope: Scope) -> Drawn:
    """By the clock; where nothing was timed, as the closed formula foretells it."""
    timed = [e for e in scope.entries if e.speedup is not None]
    drawn = timed or [e for e in scope.entries if e.speedup_predicted is not None]
    if not drawn:
        return "no run was timed, and nothing says what a draft costs"
    measure = "speedup" if timed else "speedup_predicted"
    best: dict[tuple[str | None, ...], RankedSetting] = {}
    for entry in sorted(drawn, key=lambda entry: -(entry.value(measure) or 0.0)):
        kind = (entry.setting.drafter, entry.setting.objective)
        best.setdefault(kind if any(kind) else (entry.name,), entry)
    shown = [
        (
            one,
            one.speedup if timed else one.speedup_predicted,
            one.value("speedup_predicted") if timed else None,
        )
        for one in best.values()
    ]
    figure, axis = _bars(scope, shown)
    if any(predicted is not None for *_, predicted in shown):
        axis.plot([], [], **_mark(), label="predicted from acceptance")
        legend(figure, axis)
    axis.axvline(1, color=ink(), linewidth=0.9)
    how = "by the clock" if timed else "predicted from tokens per step and costs"
    axis.set_xlabel(f"speed-up over plain decoding, {how}")
    return figure


def _bars(
    scope: Scope, shown: Sequence[tuple[RankedSetting, Pooled | None, float | None]]
) -> tuple[Figure, Any]:
    """A bar for each, the first on top, with its interval over seeds; and a mark at the other value
    where there is one."""
    figure = blank(7.6, 0.9 + 0.36 * len(shown))
    axis: Any = figure.subplots()
    for place, (entry, pooled, marked) in enumerate(reversed(shown)):
        assert pooled is not None
        axis.barh(place, pooled.mean, color=colour_of(scope, entry), height=0.62)
        half = pooled.half or 0.0
        if half:
            axis.errorbar(pooled.mean, place, xerr=half, color=ink(), capsize=3, linewidth=1.2)
        if marked is not None:
            axis.plot(marked, place, **_mark())
        _beside(axis, f"{pooled.mean:.3g}", max(pooled.mean + half, marked or 0.0), place)
    axis.set_yticks(range(len(shown)), [entry.name for entry, *_ in reversed(shown)])
    axis.tick_params(axis="y", length=0)
    axis.margins(x=0.12)
    return figure, axis


def _mark() -> dict[str, Any]:
    """Of a value beside that of a bar."""
    return {
        "marker": "|",
        "markersize": 13,
        "markeredgewidth": 2,
        "color": ink(),
        "linestyle": "none",
    }


def gains(scope: Scope) -> Drawn:
    gains = scope.language_gains()
    if not gains:
        return _no_gains(scope)
    figure = blank(7.6, 1.1 + 0.3 * len(gains))
    axis: Any = figure.subplots()
    top = scope.top
    assert top is not None
    mark = _mark()
    for place, gain in enumerate(reversed(gains)):
        if gain.top_gain is not None:
            axis.barh(place, 100 * gain.top_gain, color=colour_of(scope, top), height=0.62)
        axis.plot(100 * gain.best_gain, place, **mark)
        text = f"{gain.best.name}: {gain.base:.2f} to {gain.best_value:.2f}"
        _beside(axis, text, 100 * max(gain.best_gain, gain.top_gain or 0.0, 0.0), place)
    axis.plot([], [], marker="s", linestyle="none", color=colour_of(scope, top), label=top.name)
    axis.plot([], [], **mark, label="best setting of the language")
    axis.axvline(0, color=ink(), linewidth=0.9)
    axis.set_yticks(range(len(gains)), [gain.name for gain in reversed(gains)])
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel(f"gain in {LABELS[scope.ranked_by]} over the undistilled draft, percent")
    axis.margins(x=0.35, y=0.02)
    legend(figure, axis)
    return figure


def _no_gains(scope: Scope) -> str:
    if scope.base is None:
        return "no run is the undistilled draft (objective `none`), or several are"
    return "no language has figures of both the undistilled draft and a distilled one"


def gain_groups(scope: Scope) -> Drawn:
    known = [
        (language, 100 * gain.top_gain)
        for gain in scope.language_gains()
        if gain.top_gain is not None and (language := find(gain.name)) is not None
    ]
    if not known:
        return _no_gains(scope) if not scope.language_gains() else "no language is known by name"
    figure = blank(7.6, 5.2)
    axes: Any = figure.subplots(2, 2).flatten()
    for axis, group in zip(axes, GROUPS, strict=True):
        members: dict[str, list[float]] = {}
        for language, gain in known:
            members.setdefault(getattr(language, group), []).append(gain)
        means = sorted((sum(some) / len(some), len(some), name) for name, some in members.items())
        for place, (mean, count, _) in enumerate(means):
            axis.barh(place, mean, color="#0072B2", height=0.62)
            _beside(axis, f"{mean:+.0f} % ({count})", max(mean, 0.0), place)
        axis.set_yticks(range(len(means)), [name for _, _, name in means])
        axis.tick_params(axis="y", length=0)
        axis.tick_params(axis="both", labelsize=9)
        axis.axvline(0, color=ink(), linewidth=0.9)
        axis.margins(x=0.3)
        axis.set_title(group)
    return figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A figure that was left out."""

    title: str
    reason: str


def pictures(scope: Scope) -> tuple[tuple[PlotImage, ...], tuple[Missing, ...]]:
    """All figures for which there is something to show, and the others with reasons."""
    drawn, missing = [], []
    for plot, chart in _PLOTS:
        found = draw(plot, partial(chart, scope))
        if isinstance(found, str):
            missing.append(Missing(title=plot.title, reason=found))
        else:
            drawn.append(found)
    return tuple(drawn), tuple(missing)


_PLOTS: tuple[tuple[Plot, Callable[[Scope], Drawn]], ...] = (
    (
        Plot(
            name="objectives",
            title="Objectives",
            caption="The best setting of each objective, with one trajectory per prompt and with "
            "several. The centre is not zero: read the rings.",
        ),
        radar_objectives,
    ),
    (
        Plot(
            name="forcing",
            title="Forcing strategies",
            caption="Where the tokens of the trajectories came from; all else equal, the best beam "
            "width of each. Bars begin at plain decoding; whiskers are 95 % intervals over seeds.",
        ),
        forcing,
    ),
    (
        Plot(
            name="beams",
            title="Beam width",
            caption="Lines join settings that differ in the width alone; whiskers are 95 % "
            f"intervals over seeds. At most {MAX_LINES} lines, every objective's fullest first.",
        ),
        beams,
    ),
    (
        Plot(
            name="alpha_tau",
            title="Acceptance and tokens per step",
            caption="One bubble per setting, its area by beam width.",
        ),
        bubbles,
    ),
    (
        Plot(
            name="speedup",
            title="Speed-up",
            caption="The fastest setting of each objective and network, and all other drafters "
            "that were timed; whiskers are 95 % intervals over seeds. The line is plain decoding.",
        ),
        speedups,
    ),
    (
        Plot(
            name="temperature",
            title="Temperature of the teacher",
            caption="Lines join settings that differ in this temperature alone.",
        ),
        temperature,
    ),
    (
        Plot(
            name="truncation",
            title="Truncated and whole laws",
            caption="Settings that differ in how many of the teacher's tokens were kept, side "
            "by side.",
        ),
        truncation,
    ),
    (
        Plot(
            name="storage",
            title="Storage",
            caption="What the trajectories took on disk.",
        ),
        storage,
    ),
    (
        Plot(
            name="quality",
            title="Quality of the draft model's own texts",
            caption="The best-ranked setting of each objective. The target's texts do not change: "
            "decoding is lossless.",
        ),
        quality,
    ),
    (
        Plot(
            name="languages",
            title="Languages",
            caption="The best setting of each objective, per language. The centre is not zero: "
            "read the rings.",
        ),
        radar_languages,
    ),
    (
        Plot(
            name="gain_by_language",
            title="Gain by language",
            caption="Bars: the setting that ranks first over all. Marks: the best setting of that "
            "language, chosen after the fact, so a little flattered.",
        ),
        gains,
    ),
    (
        Plot(
            name="gain_by_group",
            title="Gain by script, morphology, region and family",
            caption="Percent over the undistilled draft: mean over the languages of the group "
            "(their number in brackets), with the setting that ranks first over all.",
        ),
        gain_groups,
    ),
)
