"""The plots of a benchmark report and of `draftsmith tune`; None where there is nothing to show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftsmith.bench.records import (
    BASELINE,
    TRANSFORMERS,
    DrafterMetrics,
    offers_by_position,
    short_name,
)
from draftsmith.intervals import Interval
from draftsmith.plots import (
    COLOURS,
    GREY,
    Bar,
    Plot,
    PlotImage,
    bar_rows,
    blank,
    ink,
    legend_below,
    legend_entry,
    light_grid,
    name_rows,
    panel,
    plot,
    reference,
)

if TYPE_CHECKING:
    from draftsmith.bench.summary import BenchReport
    from draftsmith.bench.tuner import Tuning

_PHASES = (("target", "#0072B2"), ("draft", "#E69F00"), ("verify", "#009E73"), ("other", "#8c8c8c"))
FEW = 10
"""Positions that were offered less often than this are left out of a curve."""


def _colours(report: BenchReport) -> dict[str, str]:
    """Choose a colour per drafter, the same in all plots."""
    names = [name for name in report.labels() if name not in (BASELINE, TRANSFORMERS)]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    return {**colours, BASELINE: GREY, TRANSFORMERS: GREY}


def _panels(
    report: BenchReport, height: float
) -> tuple[Figure, list[tuple[Any, list[DrafterMetrics]]]]:
    """Make one panel per temperature, side by side; return each with its metrics."""
    figure = blank(7.6, height)
    count = len(report.temperatures)
    axes = figure.subplots(1, count, sharey=True, sharex=True, squeeze=False)[0]
    out = []
    for axis, temperature in zip(axes, report.temperatures, strict=True):
        axis.set_title(f"temperature {temperature:g}")
        out.append((axis, [one for one in report.metrics if one.temperature == temperature]))
    return figure, out


def _reach(value: float, spread: Interval | None) -> tuple[float, float]:
    """Return how far an interval reaches below and above the value."""
    return (0.0, 0.0) if spread is None else (value - spread.low, spread.high - value)


def _bars(
    report: BenchReport, measure: str, label: str, *, form: str, skip: Sequence[str] = ()
) -> Figure | None:
    """Draw horizontal bars per drafter, a panel per temperature, a line at 1."""
    labels, colours = report.row_labels(), _colours(report)
    names = [
        name
        for name in labels
        if name not in skip
        and any(e.name == name and getattr(e, measure) is not None for e in report.metrics)
    ]
    if not names:
        return None
    figure, panels = _panels(report, 0.9 + 0.42 * len(names))
    for axis, entries in panels:
        bars = {name: Bar(name=labels[name], value=None, text="") for name in names}
        for entry in entries:
            value = getattr(entry, measure)
            if entry.name in bars and value is not None:
                bars[entry.name] = Bar(
                    name=labels[entry.name],
                    value=value,
                    text=form.format(value),
                    colour=colours[entry.name],
                    alpha=0.55 if entry.name == TRANSFORMERS else 1.0,
                    half=_reach(value, getattr(entry, f"{measure}_ci95", None)),
                )
        axis.axvline(1.0, **reference())
        bar_rows(axis, list(bars.values()), beyond=1.0)  # beyond the line, where it is readable
        axis.set_xlabel(label)
    axis.set_xlim(0, axis.get_xlim()[1] * 1.16)
    return figure


@plot(name="speedup", title="Speed-up")
def speedup(report: BenchReport) -> Figure | None:
    """Decoding seconds per token of plain decoding over those of the drafter; whiskers are 95 %
    bootstrap intervals over prompts. The dashed line is plain decoding."""
    return _bars(
        report, "speedup", "speed-up over plain decoding", form="{:.2f}x", skip=(BASELINE,)
    )


@plot(name="tokens_per_step", title="Tokens per step")
def tokens_per_step(report: BenchReport) -> Figure | None:
    """Generated tokens per forward of the target, behind the one that carries the prompt. Plain
    decoding has 1."""
    return _bars(report, "decode_tokens_per_step", "tokens per step", form="{:.2f}")


@plot(
    name="acceptance_by_position",
    title="Acceptance by position",
    caption="How often a drafted token is accepted, given that all before it were "
    f"(places offered at least {FEW} times).",
)
def positions(report: BenchReport) -> Figure | None:
    labels, colours = report.labels(), _colours(report)
    figure, panels = _panels(report, 3.0)
    for axis, entries in panels:
        for entry in entries:
            offers = offers_by_position(report.of(entry.name, entry.temperature))
            rates = [took / tried for tried, took in takewhile(lambda one: one[0] >= FEW, offers)]
            if rates:
                style = {"marker": "o", "markersize": 4, "color": colours[entry.name]}
                axis.plot(range(1, len(rates) + 1), rates, label=labels[entry.name], **style)
        axis.set(ylim=(0, 1.03), xlabel="place in the draft")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        light_grid(axis)
    if not any(axis.lines for axis, _ in panels):
        return None
    panels[0][0].set_ylabel("accepted, given all before")
    legend_below(figure)
    return figure


@plot(name="time_breakdown", title="Where the time goes")
def breakdown(report: BenchReport) -> Figure | None:
    """Decoding time per token: target forwards, drafting, verifying, and the rest of the loop.
    Transformers does not say how it spends its time."""
    labels = report.row_labels()
    figure, panels = _panels(report, 0.9 + 0.42 * (len(labels) + 1))
    for axis, entries in panels:
        for entry in entries:
            y, left = len(labels) - 1 - list(labels).index(entry.name), 0.0
            if entry.phases_per_token is None:
                whole = 1e3 * (entry.seconds_per_token or 0.0)
                axis.barh(y, whole, color=GREY, height=0.62, alpha=0.55)
                continue
            for phase, colour in _PHASES:
                part = 1e3 * getattr(entry.phases_per_token, phase)
                axis.barh(y, part, left=left, color=colour, height=0.62, label=phase)
                left += part
        name_rows(axis, list(labels.values()))
        axis.set_xlabel("milliseconds per token")
    legend_below(figure)
    return figure


@plot(name="predicted_measured", title="Predicted and measured")
def predicted(report: BenchReport) -> Figure | None:
    """The speed-up that the separately measured cost table predicts from the steps taken, beside
    the one measured; the band is 10 % wide on either side."""
    labels, colours = report.labels(), _colours(report)
    points = [
        entry
        for entry in report.drafters
        if entry.name != BASELINE and entry.predicted_speedup and entry.speedup
    ]
    if not points:
        return None
    figure, axis = panel(4.6, 4.6)
    shapes = dict(zip(report.temperatures, "os^Dv<>*", strict=False))
    for entry in points:
        measured = entry.speedup or 0.0
        axis.errorbar(
            entry.predicted_speedup or 0.0,
            measured,
            yerr=np.reshape(_reach(measured, entry.speedup_ci95), (2, 1)),
            marker=shapes.get(entry.temperature, "o"),
            color=colours[entry.name],
            linestyle="none",
            capsize=3,
        )
    top = 1.04 * max(1.0, axis.get_xlim()[1], axis.get_ylim()[1])
    axis.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color=GREY, alpha=0.18, lw=0)
    axis.plot([0, top], [0, top], **reference())
    # colour stands for the drafter, shape for the temperature: one entry for each of them
    for name in dict.fromkeys(entry.name for entry in points):
        legend_entry(axis, labels[name], marker="s", color=colours[name])
    for temperature, shape in shapes.items():
        legend_entry(axis, f"temperature {temperature:g}", marker=shape, color=GREY)
    axis.set(xlim=(0, top), ylim=(0, top))
    axis.set(xlabel="predicted speed-up", ylabel="measured speed-up")
    legend_below(figure, [axis], columns=2)
    return figure


@plot(name="divergence_gaps", title="Near-ties")
def gaps(report: BenchReport) -> Figure | None:
    """Where greedy output differed from plain decoding: how far the target held its first choice
    above the second. Left of the bound, rounding explains the difference."""
    labels, colours = report.row_labels(), _colours(report)
    found = {}
    for name in labels:
        own = [r.divergence for r in report.of(name, 0.0) if r.repeat == 0]
        found[name] = [one for one in own if one is not None]
    found = {name: some for name, some in found.items() if some}
    if not found:
        return None
    figure, axis = panel(7.6, 2.6)
    gaps = [[one.gap for one in some] for some in found.values()]
    bound = min(one.bound for some in found.values() for one in some)
    top = max(bound, *map(max, gaps)) * 1.05
    style = {"color": [colours[name] for name in found], "label": [labels[name] for name in found]}
    axis.hist(gaps, bins=20, range=(0, top), stacked=True, **style)
    axis.axvline(bound, **reference())
    axis.annotate("bound", (bound, 0.95), xycoords=("data", "axes fraction"), ha="right", va="top")
    axis.set(xlabel="target's top-2 logit gap at the first divergence", ylabel="texts")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(figure, [axis])
    return figure


@plot(name="by_length", title="Tokens per second by draft length")
def by_length(tuning: Tuning) -> Figure:
    """Tokens per second of forwards and drafts alone, predicted from measured costs and real
    decoding; squares are trees, at their depth, the dotted line is a length chosen step by step
    (auto), the dashed one plain decoding, the star the fastest of all."""
    figure, axis = panel(6.4, 3.8)
    pace = tuning.plain_tokens_per_second
    ways = {one.measurement.way: one.measurement for one in tuning.candidates}
    for place, (way, first) in enumerate(ways.items()):
        own = [one for one in tuning.candidates if one.measurement.way == way]
        style: dict[str, Any] = {"color": f"C{place % 10}"}
        label = f"{short_name(first.drafter)}{first.words}"
        for one in own:
            if not one.measurement.depth:
                axis.axhline(one.tokens_per_second, linewidth=1, linestyle=":", **style)
        fixed = [one for one in own if one.measurement.depth]
        fixed.sort(key=lambda one: one.measurement.depth or 0)
        style |= {"markersize": 4.5, "linewidth": 1.2, "elinewidth": 0.8, "capsize": 2}
        for form, is_chain in (("o-", True), ("s", False)):
            some = [one for one in fixed if bool(one.measurement.length) == is_chain]
            below = [max(0.0, (one.speedup - one.low) * pace) for one in some]
            above = [max(0.0, (one.high - one.speedup) * pace) for one in some]
            depths = [one.measurement.depth for one in some]
            paces = [one.tokens_per_second for one in some]
            named = label if is_chain else None
            axis.errorbar(depths, paces, yerr=[below, above], fmt=form, label=named, **style)
    axis.axhline(pace, **reference())
    left, right = axis.get_xlim()
    depth, best = tuning.winner.measurement.depth, tuning.winner.tokens_per_second
    axis.plot(depth or right, best, "*", color=ink(), markersize=13, clip_on=False, zorder=5)
    axis.set(xlim=(left, right), xlabel="drafted tokens", ylabel="predicted tokens per second")
    axis.set_ylim(bottom=0)
    light_grid(axis)
    legend_below(figure, [axis])
    return figure


@plot(name="by_batch", title="Speed-up by batch size")
def by_batch(tuning: Tuning) -> Figure | None:
    """The best draft of each drafter, over plain decoding of as many rows."""
    if len(tuning.by_batch) < 2:
        return None
    figure, axis = panel(6.4, 3.4)
    for name in _drafters(tuning):
        own = [one for one in tuning.batches if one.measurement.drafter == name]
        rows = [one.rows for one in own]
        axis.plot(rows, [one.speedup for one in own], "o-", label=short_name(name))
    axis.axhline(1.0, **reference())
    axis.set_xscale("log", base=2)
    sizes = list(tuning.by_batch)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set(xlabel="rows decoded together", ylabel="predicted speed-up")
    axis.set_ylim(bottom=0)
    legend_below(figure, [axis])
    return figure


def _drafters(tuning: Tuning) -> list[str]:
    return list(dict.fromkeys(one.measurement.drafter for one in tuning.candidates))


PLOTS: tuple[Plot[[BenchReport], None], ...] = (
    speedup,
    tokens_per_step,
    positions,
    breakdown,
    predicted,
    gaps,
)


def draw_plots(report: BenchReport) -> tuple[PlotImage, ...]:
    """Draw all plots for which the records hold something to show."""
    drawn = (one.draw(report) for one in PLOTS)
    return tuple(image for image in drawn if image is not None)


def save_tuning_plots(tuning: Tuning, folder: Path) -> None:
    """Write each plot of a tuning as SVG and PNG."""
    for one in (by_length, by_batch):
        image = one.draw(tuning)
        if image is not None:
            image.save(folder)
