"""The drawings of a report: one function per figure, None where there is nothing to show.

Ink is whatever text colour the caller has set (see `plots`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftsmith.bench.records import BASELINE, TRANSFORMERS
from draftsmith.bench.report import Report, row_label
from draftsmith.bench.statistics import DrafterFigures

GREY = "#8c8c8c"
# Okabe and Ito: told apart by colour-blind readers, and of middle lightness on both themes
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
_PHASES = (("target", "#0072B2"), ("draft", "#E69F00"), ("verify", "#009E73"), ("other", "#8c8c8c"))
FEW = 10
"""Positions that were offered less often than this are left out of a curve."""


def ink() -> str:
    """The ink of the drawing that is being made."""
    return str(matplotlib.rcParams["text.color"])


def _colours(report: Report) -> dict[str, str]:
    """A colour per drafter, the same in all figures."""
    names = [name for name in report.labels() if name not in (BASELINE, TRANSFORMERS)]
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    return {**colours, BASELINE: GREY, TRANSFORMERS: GREY}


def _panels(report: Report, rows: int, *, height: float | None = None) -> tuple[Figure, list[Any]]:
    """One panel per temperature, side by side."""
    count = len(report.temperatures)
    tall = height if height is not None else 0.9 + 0.42 * rows
    figure = Figure(figsize=(7.6, tall), layout="constrained")
    axes = figure.subplots(1, count, sharey=True, sharex=True, squeeze=False)[0]
    for axis, temperature in zip(axes, report.temperatures, strict=True):
        axis.set_title(f"temperature {temperature:g}")
    return figure, list(axes)


def _bars(
    report: Report,
    value: Callable[[DrafterFigures], float | None],
    label: str,
    *,
    form: str,
    intervals: bool,
    skip: Sequence[str] = (),
) -> Figure | None:
    """Horizontal bars per drafter, a panel per temperature, a line at 1."""
    labels, colours = report.labels(), _colours(report)
    names = [
        name
        for name in labels
        if name not in skip and any(e.name == name and value(e) is not None for e in report.figures)
    ]
    if not names:
        return None
    figure, axes = _panels(report, len(names))
    place = {name: len(names) - 1 - i for i, name in enumerate(names)}
    right = 1.0
    for axis, temperature in zip(axes, report.temperatures, strict=True):
        for entry in report.figures:
            length = value(entry)
            if entry.temperature != temperature or entry.name not in place or length is None:
                continue
            spread = entry.speedup_ci95 if intervals else None
            high = length if spread is None else spread.high
            error = None if spread is None else [[length - spread.low], [spread.high - length]]
            faded = 0.55 if entry.name == TRANSFORMERS else 1.0
            y = place[entry.name]
            axis.barh(y, length, color=colours[entry.name], height=0.62, alpha=faded)
            if error is not None:
                axis.errorbar(length, y, xerr=error, color=ink(), capsize=3, linewidth=1.2)
            axis.annotate(
                form.format(length),
                (max(high, 1.0), y),  # beyond the line, where it is readable
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
            right = max(right, high)
        axis.axvline(1.0, color=ink(), linewidth=0.9, linestyle=(0, (4, 3)))
        axis.set_yticks(list(place.values()), [row_label(n, labels) for n in place])
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel(label)
    axes[0].set_xlim(0, right * 1.22)
    return figure


def speedup(report: Report) -> Figure | None:
    return _bars(
        report,
        lambda entry: entry.speedup,
        "speed-up over plain decoding",
        form="{:.2f}x",
        intervals=True,
        skip=(BASELINE,),
    )


def tokens_per_step(report: Report) -> Figure | None:
    return _bars(
        report,
        lambda entry: entry.tokens_per_step,
        "tokens per step",
        form="{:.2f}",
        intervals=False,
    )


def positions(report: Report) -> Figure | None:
    labels, colours = report.labels(), _colours(report)
    curves = {
        (entry.name, entry.temperature): _kept_positions(report, entry)
        for entry in report.drafters
        if entry.acceptance_by_position
    }
    if not any(curves.values()):
        return None
    figure, axes = _panels(report, 0, height=3.0)
    for axis, temperature in zip(axes, report.temperatures, strict=True):
        for (name, mine), rates in curves.items():
            if mine == temperature and rates:
                axis.plot(
                    range(1, len(rates) + 1),
                    rates,
                    marker="o",
                    markersize=4,
                    color=colours[name],
                    label=labels[name],
                )
        axis.set_ylim(0, 1.03)
        axis.set_xlabel("place in the draft")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    axes[0].set_ylabel("accepted, given all before")
    legend_below(figure, axes)
    return figure


def _kept_positions(report: Report, entry: DrafterFigures) -> list[float]:
    offers: list[int] = []
    for record in report.of(entry.name, entry.temperature):
        for depth, (tried, _) in enumerate(record.by_position):
            if depth == len(offers):
                offers.append(0)
            offers[depth] += tried
    rates = entry.acceptance_by_position or ()
    kept = []
    for rate, count in zip(rates, offers, strict=False):
        if count < FEW:
            break
        kept.append(rate)
    return kept


def breakdown(report: Report) -> Figure | None:
    labels = report.labels()
    names = list(labels)
    figure, axes = _panels(report, len(names) + 1)
    place = {name: len(names) - 1 - i for i, name in enumerate(names)}
    for axis, temperature in zip(axes, report.temperatures, strict=True):
        for entry in report.figures:
            if entry.temperature != temperature:
                continue
            y, left = place[entry.name], 0.0
            if entry.phases_per_token is None:
                whole = 1e3 * (entry.seconds_per_token or 0.0)
                axis.barh(y, whole, color=GREY, height=0.62, alpha=0.55)
                continue
            for phase, colour in _PHASES:
                part = 1e3 * getattr(entry.phases_per_token, phase)
                first = entry.name == BASELINE
                axis.barh(
                    y, part, left=left, color=colour, height=0.62, label=phase if first else None
                )
                left += part
        axis.set_yticks(list(place.values()), [row_label(n, labels) for n in place])
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel("milliseconds per token")
    legend_below(figure, axes)
    return figure


def predicted(report: Report) -> Figure | None:
    labels, colours = report.labels(), _colours(report)
    points = [
        entry
        for entry in report.drafters
        if entry.name != BASELINE and entry.predicted_speedup and entry.speedup
    ]
    if not points:
        return None
    figure = Figure(figsize=(4.6, 4.6), layout="constrained")
    axis = figure.subplots()
    highs = [e.speedup_ci95.high if e.speedup_ci95 else e.speedup or 0.0 for e in points]
    top = 1.08 * max(1.0, *highs, *(e.predicted_speedup or 0.0 for e in points))
    axis.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color=GREY, alpha=0.18, lw=0)
    axis.plot([0, top], [0, top], color=ink(), linewidth=0.9, linestyle=(0, (4, 3)))
    shapes = dict(zip(report.temperatures, "os^Dv<>*", strict=False))
    for entry in points:
        speedup, spread = entry.speedup or 0.0, entry.speedup_ci95
        axis.errorbar(
            entry.predicted_speedup or 0.0,
            speedup,
            yerr=None if spread is None else [[speedup - spread.low], [spread.high - speedup]],
            marker=shapes.get(entry.temperature, "o"),
            color=colours[entry.name],
            linestyle="none",
            capsize=3,
        )
    # colour says which drafter, shape which temperature: one entry for each of them
    for name in dict.fromkeys(entry.name for entry in points):
        axis.plot([], [], marker="s", linestyle="none", color=colours[name], label=labels[name])
    for temperature, shape in shapes.items():
        label = f"temperature {temperature:g}"
        axis.plot([], [], marker=shape, linestyle="none", color=GREY, label=label)
    axis.set_xlim(0, top)
    axis.set_ylim(0, top)
    axis.set_xlabel("predicted speed-up")
    axis.set_ylabel("measured speed-up")
    legend_below(figure, [axis], columns=2)
    return figure


def gaps(report: Report) -> Figure | None:
    labels, colours = report.labels(), _colours(report)
    found = {
        name: [
            r.divergence for r in report.of(name, 0.0) if r.repeat == 0 and r.divergence is not None
        ]
        for name in labels
    }
    found = {name: gaps for name, gaps in found.items() if gaps}
    if not found:
        return None
    figure = Figure(figsize=(7.6, 2.6), layout="constrained")
    axis = figure.subplots()
    gaps = [[one.gap for one in many] for many in found.values()]
    bound = min(one.bound for many in found.values() for one in many)
    top = max(bound, max(max(some) for some in gaps)) * 1.05
    axis.hist(
        gaps,
        bins=20,
        range=(0, top),
        stacked=True,
        color=[colours[name] for name in found],
        label=[row_label(name, labels) for name in found],
    )
    axis.axvline(bound, color=ink(), linewidth=0.9, linestyle=(0, (4, 3)))
    axis.annotate("bound", (bound, 0.95), xycoords=("data", "axes fraction"), ha="right", va="top")
    axis.set_xlabel("target's top-2 logit gap at the first divergence")
    axis.set_ylabel("texts")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(figure, [axis])
    return figure


def legend_below(figure: Figure, axes: Sequence[Any], columns: int = 4) -> None:
    """One legend below all panels."""
    found: dict[str, Any] = {}
    for axis in axes:
        handles, names = axis.get_legend_handles_labels()
        found |= dict(zip(names, handles, strict=True))
    if found:
        figure.legend(
            found.values(),
            found.keys(),
            loc="outside lower center",
            ncols=min(len(found), columns),
        )
