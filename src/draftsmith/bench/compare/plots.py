"""The plots of a comparison, all of one scope (target and decoding temperature).

Each function returns a figure, or the reason why there is none. Where a plot shows the
effect of one factor, lines and groups join settings that differ in that factor alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from draftsmith.bench.compare.model import (
    FACTORS,
    UNDISTILLED,
    Options,
    Pooled,
    RankedSetting,
    RunSetting,
    Scope,
    describe,
    objective_name,
)
from draftsmith.data.languages import GROUPS, find
from draftsmith.plots import (
    COLOURS,
    GREY,
    MARK,
    Bar,
    Plot,
    PlotImage,
    bar_rows,
    blank,
    ink,
    legend_below,
    legend_entry,
    light_grid,
    panel,
    plot,
    reference,
)

# after Okabe and Ito's six some of Tol's: a study has up to nine objectives
_COLOURS = (*COLOURS[:6], "#882255", "#999933", "#332288")
_MARKERS = "osD^vP<>X"
MAX_LINES = 8
"""Most lines in a plot; more are hard to distinguish. See `controlled`."""
MAX_POLYGONS = 5
"""Settings in the plot of languages."""
LABELS = {
    "tau": "tokens per step",
    "tau_with_prefill": "tokens per step, the prompt's included",
    "tau_predicted": "tokens per step (predicted)",
    "alpha": "expected acceptance",
    "alpha_decoded": "acceptance",
}
_STORED = ("store",)
"""The option that names what was collected: other forcing, widths and cuts have other stores."""
Level = str | int | float
"""A value of a factor."""
Drawn = Figure | str
"""A figure, or why there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Settings that differ in one factor alone."""

    name: str
    entries: dict[Level, RankedSetting]
    """By the factor's value."""


def distilled(scope: Scope) -> list[RankedSetting]:
    """Return the ranked settings with an objective, without the undistilled draft."""
    return [
        entry
        for entry in scope.entries
        if entry.rank is not None and entry.setting.objective not in (None, UNDISTILLED)
    ]


def objectives(scope: Scope) -> list[str]:
    """Return the objectives in a fixed order, so that colours do not depend on the ranking."""
    return sorted({e.setting.objective or "" for e in distilled(scope)})


def style_of(scope: Scope, entry: RankedSetting) -> tuple[str, str]:
    """Return the colour and the marker of an objective."""
    names, objective = objectives(scope), entry.setting.objective
    if objective not in names:
        return GREY, "*"
    place = names.index(objective)
    return _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]


def colour_of(scope: Scope, entry: RankedSetting) -> str:
    return style_of(scope, entry)[0]


def best_by_objective(entries: Sequence[RankedSetting]) -> list[RankedSetting]:
    """Return the first of each objective among settings that are ranked already."""
    return list({entry.setting.objective: entry for entry in reversed(entries)}.values())[::-1]


def legend(figure: Figure, axis: Any) -> None:
    """Draw the legend below, in as many columns as its names leave room for."""
    longest = max((len(name) for name in axis.get_legend_handles_labels()[1]), default=0)
    legend_below(figure, [axis], columns=max(1, min(5, 95 // (longest + 8))))


def base_line(axis: Any, scope: Scope) -> None:
    """Draw a dashed line at the undistilled draft."""
    mean = None if scope.base is None else scope.base.value(scope.ranked_by)
    if mean is not None:
        axis.axhline(mean, **reference(label=objective_name(UNDISTILLED)))


def controlled(scope: Scope, factor: str, ignoring: Sequence[str] = ()) -> list[Line]:
    """Find settings that differ in `factor` alone: all lines, the most telling first.

    Lines of one value show nothing and are left out, as are settings that stand for themselves
    because nothing recorded distinguishes them from others.

    Args:
        ignoring: factors and options that may differ too; the best setting of each value is taken.
    """
    fixed = [name for name in FACTORS if name != factor and name not in ignoring]
    groups: dict[tuple[object, ...], dict[Level, RankedSetting]] = {}
    for entry in distilled(scope):  # the best of a value comes first
        value = getattr(entry.setting, factor)
        if value is not None and entry.setting.label is None:
            own = _without(entry.setting.options, ignoring)
            key = (own, *(getattr(entry.setting, name) for name in fixed))
            groups.setdefault(key, {}).setdefault(value, entry)
    lines = _by_turns(scope, [line for line in groups.values() if len(line) > 1])
    firsts = [next(iter(line.values())).setting for line in lines]
    alike = [replace(one, options=_without(one.options, ignoring)) for one in firsts]
    return [
        Line(name=name, entries=line)
        for name, line in zip(describe(alike, fixed), lines, strict=True)
    ]


def _without(options: Options, names: Sequence[str]) -> Options:
    return tuple((name, value) for name, value in options if name not in names)


def _by_turns(
    scope: Scope, lines: Sequence[dict[Level, RankedSetting]]
) -> list[dict[Level, RankedSetting]]:
    """Order lines: the fullest of each objective, then the second of each, and so on; in each turn
    the best first. So no objective is crowded out by another's side lines."""
    firsts = [next(iter(line.values())).setting.objective for line in lines]
    best = [max(e.metrics[scope.ranked_by].mean for e in line.values()) for line in lines]
    table = pd.DataFrame({"objective": firsts, "best": best, "full": [len(line) for line in lines]})
    table["turn"] = (
        table.sort_values(["full", "best"], ascending=False)
        .groupby("objective", dropna=False)
        .cumcount()
    )
    return [lines[n] for n in table.sort_values(["turn", "best"], ascending=[True, False]).index]


def _shown(axis: Any, lines: Sequence[Line]) -> Sequence[Line]:
    """Return the lines to draw; the legend counts the others."""
    if len(lines) > MAX_LINES:
        more = len(lines) - MAX_LINES
        legend_entry(axis, f"not drawn: {more} more", marker="")
    return lines[:MAX_LINES]


def grouped_bars(scope: Scope, lines: Sequence[Line], values: Sequence[Level]) -> Figure:
    """Draw a group per value, a bar per line; intervals where there are several seeds."""
    figure, axis = panel(7.6, 3.6)
    lines = _shown(axis, lines)
    values = [value for value in values if any(value in line.entries for line in lines)]
    wide = 0.8 / len(lines)
    narrow = 6.8 / len(values) * wide < 0.36  # inches per bar: its number would touch the next
    low = 1.0 if scope.ranked_by.startswith("tau") else 0.0  # plain decoding has 1 token per step
    used: Counter[str] = Counter()
    for number, line in enumerate(lines):
        colour = colour_of(scope, next(iter(line.entries.values())))
        places = [place for place, value in enumerate(values) if value in line.entries]
        pooled = [line.entries[values[place]].metrics[scope.ranked_by] for place in places]
        x = [place + (number - (len(lines) - 1) / 2) * wide for place in places]
        # several lines of one objective: the same colour, ever lighter
        style = {"color": colour, "alpha": 1.0 / (1 + 0.6 * used[colour]), "label": line.name}
        axis.bar(x, [one.mean - low for one in pooled], 0.9 * wide, bottom=low, **style)
        used[colour] += 1
        _whiskers(axis, x, pooled, color=ink(), capsize=2, linewidth=1, linestyle="none")
        for place, one in zip(x, pooled, strict=True):
            axis.annotate(
                f"{one.mean:.2f}",
                (place, one.mean + (one.half or 0.0)),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                rotation=90 if narrow else 0,
            )
    base_line(axis, scope)
    axis.set_xticks(range(len(values)), [str(value) for value in values])
    axis.tick_params(axis="x", length=0)
    low_y, high_y = axis.get_ylim()
    top = high_y + (0.15 if narrow else 0.08) * (high_y - low_y)
    axis.set(ylabel=LABELS[scope.ranked_by], ylim=(low, top))
    legend(figure, axis)
    return figure


def _whiskers(axis: Any, x: Sequence[float], pooled: Sequence[Pooled], **style: Any) -> None:
    """Draw means and their intervals, where there are several seeds."""
    half = [math.nan if one.half is None else one.half for one in pooled]
    axis.errorbar(x, [one.mean for one in pooled], yerr=half, **style)


def curves(scope: Scope, lines: Sequence[Line], label: str, *, doubling: bool) -> Figure:
    """Draw a line with intervals per group; a numeric factor to the right."""
    figure, axis = panel(7.6, 3.8)
    lines = _shown(axis, lines)
    styles: Counter[str] = Counter()
    ticks = sorted({float(value) for line in lines for value in line.entries})
    for number, line in enumerate(lines):
        values = sorted(line.entries, key=float)
        # side by side, or whiskers would hide each other
        aside = number - (len(lines) - 1) / 2
        shift = 0.012 * (ticks[-1] - ticks[0]) * aside
        colour, marker = style_of(scope, line.entries[values[0]])
        _whiskers(
            axis,
            [float(v) * 2 ** (0.045 * aside) if doubling else float(v) + shift for v in values],
            [line.entries[value].metrics[scope.ranked_by] for value in values],
            marker=marker,
            markersize=5,
            color=colour,
            linestyle=("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))[styles[colour] % 4],
            capsize=3,
            label=line.name,
        )
        styles[colour] += 1
    base_line(axis, scope)
    if doubling:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set(xlabel=label, ylabel=LABELS[scope.ranked_by])
    light_grid(axis)
    legend(figure, axis)
    return figure


def radar(
    names: Sequence[str],
    series: Sequence[tuple[str, str, Sequence[float | None]]],
    *,
    around: float,
) -> Figure:
    """Draw polygons over rays; (name, colour, value per ray). The centre is not zero."""
    figure, axis = panel(7.6, 5.2, projection="polar")
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


def setting_bars(
    scope: Scope, rows: Sequence[tuple[RankedSetting, Pooled, float | None]]
) -> tuple[Figure, Any]:
    """Draw a bar per setting, the first on top, with its interval over seeds, and a mark at the
    other value where there is one."""
    bars = [
        Bar(
            name=entry.name,
            value=pooled.mean,
            text=f"{pooled.mean:.3g}",
            colour=colour_of(scope, entry),
            half=pooled.half,
            mark=marked,
        )
        for entry, pooled, marked in rows
    ]
    figure, axis = panel(7.6, 0.9 + 0.36 * len(bars))
    bar_rows(axis, bars)
    axis.margins(x=0.12)
    return figure, axis


# --------------------------------------------------------------------------- the plots


@plot(name="objectives", title="Objectives")
def radar_objectives(scope: Scope) -> Drawn:
    """The best setting of each objective, with one trajectory per prompt and with several. The
    centre is not zero: read the rings."""
    names = objectives(scope)
    if len(names) < 3:
        return f"it takes three objectives, there are {len(names)}"
    series: list[tuple[str, str, Sequence[float | None]]] = []
    for label, colour, several in (
        ("one trajectory per prompt", "#0072B2", False),
        ("several trajectories per prompt", "#E69F00", True),
    ):
        some = [e for e in distilled(scope) if e.setting.has_several == several]
        best = {
            e.setting.objective: e.metrics[scope.ranked_by].mean for e in best_by_objective(some)
        }
        if best:
            series.append((label, colour, [best.get(name) for name in names]))
    mean = None if scope.base is None else scope.base.value(scope.ranked_by)
    if mean is not None:
        series.append((objective_name(UNDISTILLED), GREY, [mean] * len(names)))
    return radar([objective_name(name) for name in names], series, around=0.4)


@plot(name="forcing", title="Forcing strategies")
def forcing(scope: Scope) -> Drawn:
    """Where the tokens of the trajectories came from; all else equal, the best beam width of each.
    Bars begin at plain decoding; whiskers are 95 % intervals over seeds."""
    lines = controlled(scope, "forcing", ignoring=("beams", *_STORED))
    if not lines:
        return "no two settings differ in forcing alone"
    found = {value for line in lines for value in line.entries}
    known = [value for value in ("gold", "greedy", "sample", "beam") if value in found]
    return grouped_bars(scope, lines, [*known, *sorted(map(str, found - set(known)))])


@plot(
    name="beams",
    title="Beam width",
    caption="Lines join settings that differ in the width alone; whiskers are 95 % "
    f"intervals over seeds. At most {MAX_LINES} lines, every objective's fullest first.",
)
def beams(scope: Scope) -> Drawn:
    lines = controlled(scope, "beams", ignoring=_STORED)
    if not lines:
        return "no two settings differ in beam width alone"
    return curves(scope, lines, "beam width", doubling=True)


@plot(name="alpha_tau", title="Acceptance and tokens per step")
def bubbles(scope: Scope) -> Drawn:
    """One bubble per setting, its area by beam width."""
    pairs = ((x, y) for y in ("tau", "tau_predicted") for x in ("alpha", "alpha_decoded"))
    points: list[RankedSetting] = []
    for x, y in pairs:
        points = [e for e in scope.entries if x in e.metrics and y in e.metrics]
        if points:
            break
    else:
        return "no setting has both acceptance and tokens per step"
    figure, axis = panel(7.6, 4.4)
    area = 30.0  # per beam
    names = (objective_name(entry.setting.objective) or "other" for entry in points)
    named: dict[str, dict[str, Any]] = {name: {} for name in names}  # in order of rank
    for entry in sorted(points, key=lambda entry: -(entry.setting.beams or 1)):  # small on top
        objective = entry.setting.objective
        marker = "*" if objective == UNDISTILLED else "o"
        style: dict[str, Any] = {"marker": marker, "color": colour_of(scope, entry)}
        named[objective_name(objective) or "other"] = style
        style |= {"alpha": 0.6, "linewidths": 0.8, "edgecolors": ink()}
        axis.scatter(entry.value(x), entry.value(y), s=area * (entry.setting.beams or 1), **style)
    for name, style in named.items():
        legend_entry(axis, name, marker=style["marker"], color=style["color"])
    for beams in sorted({e.setting.beams for e in points if e.setting.beams}):
        label = f"{beams} trajector{'ies' if beams != 1 else 'y'} per prompt"
        legend_entry(axis, label, color=GREY, alpha=0.6, markersize=math.sqrt(area * beams))
    axis.margins(0.12)
    axis.set(xlabel=LABELS[x], ylabel=LABELS[y])
    light_grid(axis, "both")
    legend(figure, axis)
    return figure


@plot(name="speedup", title="Speed-up")
def speedups(scope: Scope) -> Drawn:
    """The fastest setting of each objective and network, and all other drafters that were timed;
    whiskers are 95 % intervals over seeds. The line is plain decoding."""
    # by the clock; where nothing was timed, by the closed formula
    timed = any("speedup" in entry.metrics for entry in scope.entries)
    measure = "speedup" if timed else "speedup_predicted"
    drawn = [entry for entry in scope.entries if measure in entry.metrics]
    if not drawn:
        return "no run was timed, and nothing says what a draft costs"
    best: dict[tuple[str | None, ...], RankedSetting] = {}
    for entry in sorted(drawn, key=lambda entry: -entry.metrics[measure].mean):
        kind = (entry.setting.drafter, entry.setting.objective)
        best.setdefault(kind if any(kind) else (entry.name,), entry)
    rows = [
        (entry, entry.metrics[measure], entry.value("speedup_predicted") if timed else None)
        for entry in best.values()
    ]
    figure, axis = setting_bars(scope, rows)
    if any(predicted is not None for *_, predicted in rows):
        legend_entry(axis, "predicted from acceptance", **MARK)
        legend(figure, axis)
    axis.axvline(1, **reference(linestyle="-"))
    how = "by the clock" if timed else "predicted from tokens per step and costs"
    axis.set_xlabel(f"speed-up over plain decoding, {how}")
    return figure


@plot(name="temperature", title="Temperature of the teacher")
def temperature(scope: Scope) -> Drawn:
    """Lines join settings that differ in this temperature alone."""
    lines = controlled(scope, "teacher_temperature")
    if not lines:
        return "no two settings differ in the teacher's temperature alone"
    return curves(scope, lines, "temperature of the teacher's laws", doubling=False)


@plot(name="truncation", title="Truncated and whole laws")
def truncation(scope: Scope) -> Drawn:
    """Settings that differ in how many of the teacher's tokens were kept, side by side."""
    lines = controlled(scope, "truncation", ignoring=("laws", *_STORED))
    if not lines:
        return "no two settings differ in the truncation of the teacher's laws alone"
    values = {str(value) for line in lines for value in line.entries}
    # top-5, top-50, .., full
    ordered = sorted(values, key=lambda value: (value == "full", len(value), value))
    return grouped_bars(scope, lines, ordered)


@plot(name="storage", title="Storage")
def storage(scope: Scope) -> Drawn:
    """What the trajectories took on disk."""
    stores: dict[RunSetting, RankedSetting] = {}
    for entry in sorted(scope.entries, key=lambda entry: entry.storage_bytes or 0):
        # several objectives learn from one store: a bar per store
        kept = tuple(option for option in entry.setting.options if option[0] in _STORED)
        bare = replace(entry.setting, objective=None, teacher_temperature=None, options=kept)
        stores[bare] = entry
    ordered = sorted(stores.items(), key=lambda store: -(store[1].storage_bytes or 0))
    held = {bare: entry for bare, entry in ordered if entry.storage_bytes}
    if not held:
        return "no run says how much its trajectories took"
    bars: list[Bar] = []
    unit, power = _unit(max(entry.storage_bytes or 0 for entry in held.values()))
    for name, entry in zip(describe(list(held)), held.values(), strict=True):
        size, tokens = entry.storage_bytes or 0, entry.storage_tokens
        own, part = _unit(size)
        per_token = f", {size / tokens:,.0f} bytes per token" if tokens else ""
        text = f"{size / part:.3g} {own}{per_token}"
        bars.append(Bar(name=name, value=size / power, text=text))
    figure, axis = panel(7.6, 0.9 + 0.36 * len(bars))
    bar_rows(axis, bars)
    axis.set_xlabel(unit)
    axis.margins(x=0.42)
    return figure


def _unit(size: int) -> tuple[str, float]:
    names = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log(max(size, 1), 1024)), len(names) - 1)
    return names[power], float(1024**power)


@plot(name="quality", title="Quality of the draft model's own texts")
def quality(scope: Scope) -> Drawn:
    """The best-ranked setting of each objective. The target's texts do not change: decoding is
    lossless."""
    rated = [e for e in scope.entries if "quality" in e.metrics]
    if not rated:
        return "no run says how good the draft model's own texts are"
    names = {e.quality_metric or "quality" for e in rated}
    if len(names) > 1:
        return f"qualities of several metrics ({', '.join(sorted(names))}) share no axis"
    best = best_by_objective([e for e in rated if e.setting.objective is not None])
    shown = best or rated[:MAX_LINES]
    figure, axis = setting_bars(scope, [(e, e.metrics["quality"], None) for e in shown])
    axis.set_xlabel(names.pop())
    return figure


@plot(name="languages", title="Languages")
def radar_languages(scope: Scope) -> Drawn:
    """The best setting of each objective, per language. The centre is not zero: read the rings."""
    shown = best_by_objective([e for e in distilled(scope) if len(e.by_language) >= 3])
    shown = shown[:MAX_POLYGONS]
    if not shown:
        return "no setting has figures for three languages"
    names = list(dict.fromkeys(name for entry in shown for name in entry.by_language))
    drawn = [(entry, colour_of(scope, entry)) for entry in shown]
    if scope.base is not None and scope.base.by_language:
        drawn.append((scope.base, GREY))
    series = []
    for entry, colour in drawn:
        means = {name: one.mean for name, one in entry.by_language.items()}
        series.append((entry.name, colour, [means.get(name) for name in names]))
    return radar(names, series, around=0.15)


@plot(name="gain_by_language", title="Gain by language")
def gains(scope: Scope) -> Drawn:
    """Bars: the setting that ranks first over all. Marks: the best setting of that language, chosen
    after the fact, so a little flattered."""
    found, top = scope.gains(), scope.top
    if not found or top is None:
        return _no_gains(scope)
    figure, axis = panel(7.6, 1.1 + 0.3 * len(found))
    bars = [
        Bar(
            name=gain.name,
            value=None if gain.top_gain is None else 100 * gain.top_gain,
            text=f"{gain.best}: {gain.base:.2f} to {gain.best_value:.2f}",
            colour=colour_of(scope, top),
            mark=100 * gain.best_gain,
        )
        for gain in found
    ]
    bar_rows(axis, bars)
    legend_entry(axis, top.name, marker="s", color=colour_of(scope, top))
    legend_entry(axis, "best setting of the language", **MARK)
    axis.axvline(0, **reference(linestyle="-"))
    axis.set_xlabel(f"gain in {LABELS[scope.ranked_by]} over the undistilled draft, percent")
    axis.margins(x=0.35, y=0.02)
    legend(figure, axis)
    return figure


def _no_gains(scope: Scope) -> str:
    if scope.base is None:
        return "no run is the undistilled draft (objective `none`), or several are"
    return "no language has figures of both the undistilled draft and a distilled one"


@plot(name="gain_by_group", title="Gain by script, morphology, region and family")
def gain_groups(scope: Scope) -> Drawn:
    """Percent over the undistilled draft: mean over the languages of the group (their number in
    brackets), with the setting that ranks first over all."""
    found = scope.gains()
    known = [
        (language, 100 * gain.top_gain)
        for gain in found
        if gain.top_gain is not None and (language := find(gain.name)) is not None
    ]
    if not known:
        return "no language is known by name" if found else _no_gains(scope)
    figure = blank(7.6, 5.2)
    axes: Any = figure.subplots(2, 2).flatten()
    for axis, group in zip(axes, GROUPS, strict=True):
        table = pd.DataFrame([(getattr(one, group), gain) for one, gain in known])
        means = table.groupby(0)[1].agg(["mean", "count"]).sort_values("mean", ascending=False)
        bars = [
            Bar(name=str(name), value=mean, text=f"{mean:+.0f} % ({count})")
            for name, mean, count in means.itertuples()
        ]
        bar_rows(axis, bars)
        axis.tick_params(axis="both", labelsize=9)
        axis.axvline(0, **reference(linestyle="-"))
        axis.margins(x=0.3)
        axis.set_title(group)
    return figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A plot that was left out."""

    title: str
    reason: str


PLOTS: tuple[Plot[[Scope], str], ...] = (
    radar_objectives,
    forcing,
    beams,
    bubbles,
    speedups,
    temperature,
    truncation,
    storage,
    quality,
    radar_languages,
    gains,
    gain_groups,
)


def draw_plots(scope: Scope) -> tuple[tuple[PlotImage, ...], tuple[Missing, ...]]:
    """Draw all plots for which there is something to show, and give reasons for the others."""
    drawn, missing = [], []
    for one in PLOTS:
        found = one.draw(scope)
        if isinstance(found, str):
            missing.append(Missing(title=one.title, reason=found))
        else:
            drawn.append(found)
    return tuple(drawn), tuple(missing)
