"""The drawings of a comparison: one function per figure, or the reason why there is none.

Ink is whatever text colour the caller has set (see `compare_plots`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from draftsmith.bench.charts import GREY, ink
from draftsmith.bench.compare_axes import (
    LABELS,
    MAX_LINES,
    best_of,
    blank,
    colour_of,
    controlled,
    curves,
    distilled,
    grouped_bars,
    legend,
    marker_of,
    objectives,
    radar,
    ranking_figure,
)
from draftsmith.bench.compare_figures import (
    UNDISTILLED,
    Entry,
    Pooled,
    Scope,
    describe,
    objective_name,
)
from draftsmith.bench.languages import GROUPS, find

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
    best: dict[str, Entry] = {}
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


def _by_name(entry: Entry, names: Sequence[str]) -> list[float | None]:
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
    stores: dict[str, Entry] = {}
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
    best: dict[str | None, Entry] = {}
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
    best: dict[tuple[str | None, ...], Entry] = {}
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
    scope: Scope, shown: Sequence[tuple[Entry, Pooled | None, float | None]]
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
