"""The plots of a benchmark report and of `draftsmith tune`; None where there is nothing to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftsmith.bench.metrics import DrafterMetrics
from draftsmith.bench.records import BASELINE, TRANSFORMERS
from draftsmith.bench.summary import BenchReport, row_label, short_name
from draftsmith.plan.tune import Candidate, Tuning
from draftsmith.plots import (
    COLOURS,
    GREY,
    Plot,
    PlotImage,
    blank,
    ink,
    legend_below,
    name_rows,
    plot,
    reference,
    write_beside,
)

_PHASES = (("target", "#0072B2"), ("draft", "#E69F00"), ("verify", "#009E73"), ("other", "#8c8c8c"))
FEW = 10
"""Positions that were offered less often than this are left out of a curve."""


def _colours(report: BenchReport) -> dict[str, str]:
    """Choose a colour per drafter, the same in all plots."""
    names = [name for name in report.labels() if name not in (BASELINE, TRANSFORMERS)]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    return {**colours, BASELINE: GREY, TRANSFORMERS: GREY}


def _panels(
    report: BenchReport, rows: int, *, height: float | None = None
) -> tuple[Figure, list[Any]]:
    """Make one panel per temperature, side by side."""
    count = len(report.temperatures)
    tall = height if height is not None else 0.9 + 0.42 * rows
    figure = blank(7.6, tall)
    axes = figure.subplots(1, count, sharey=True, sharex=True, squeeze=False)[0]
    for axis, temperature in zip(axes, report.temperatures, strict=True):
        axis.set_title(f"temperature {temperature:g}")
    return figure, list(axes)


def _bars(
    report: BenchReport,
    value: Callable[[DrafterMetrics], float | None],
    label: str,
    *,
    form: str,
    intervals: bool,
    skip: Sequence[str] = (),
) -> Figure | None:
    """Draw horizontal bars per drafter, a panel per temperature, a line at 1."""
    labels, colours = report.labels(), _colours(report)
    names = [
        name
        for name in labels
        if name not in skip and any(e.name == name and value(e) is not None for e in report.metrics)
    ]
    if not names:
        return None
    figure, axes = _panels(report, len(names))
    place = {name: len(names) - 1 - i for i, name in enumerate(names)}
    right = 1.0
    for axis, temperature in zip(axes, report.temperatures, strict=True):
        for entry in report.metrics:
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
            # beyond the line, where it is readable
            write_beside(axis, form.format(length), max(high, 1.0), y, size=9, gap=5)
            right = max(right, high)
        axis.axvline(1.0, **reference())
        name_rows(axis, [row_label(name, labels) for name in names])
        axis.set_xlabel(label)
    axes[0].set_xlim(0, right * 1.22)
    return figure


@plot(
    name="speedup",
    title="Speed-up",
    caption="Decoding seconds per token of plain decoding over those of the drafter; "
    "whiskers are 95 % bootstrap intervals over prompts. The dashed line is plain "
    "decoding.",
)
def speedup(report: BenchReport) -> Figure | None:
    return _bars(
        report,
        lambda entry: entry.speedup,
        "speed-up over plain decoding",
        form="{:.2f}x",
        intervals=True,
        skip=(BASELINE,),
    )


@plot(
    name="tokens_per_step",
    title="Tokens per step",
    caption="Generated tokens per forward of the target. Plain decoding has 1.",
)
def tokens_per_step(report: BenchReport) -> Figure | None:
    return _bars(
        report,
        lambda entry: entry.tokens_per_step,
        "tokens per step",
        form="{:.2f}",
        intervals=False,
    )


@plot(
    name="acceptance_by_position",
    title="Acceptance by position",
    caption="How often a drafted token is accepted, given that all before it were "
    f"(places offered at least {FEW} times).",
)
def positions(report: BenchReport) -> Figure | None:
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


def _kept_positions(report: BenchReport, entry: DrafterMetrics) -> list[float]:
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


@plot(
    name="time_breakdown",
    title="Where the time goes",
    caption="Decoding time per token: target forwards, drafting, verifying, and the "
    "rest of the loop. Transformers does not say how it spends its time.",
)
def breakdown(report: BenchReport) -> Figure | None:
    labels = report.labels()
    names = list(labels)
    figure, axes = _panels(report, len(names) + 1)
    place = {name: len(names) - 1 - i for i, name in enumerate(names)}
    for axis, temperature in zip(axes, report.temperatures, strict=True):
        for entry in report.metrics:
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
        name_rows(axis, [row_label(name, labels) for name in names])
        axis.set_xlabel("milliseconds per token")
    legend_below(figure, axes)
    return figure


@plot(
    name="predicted_measured",
    title="Predicted and measured",
    caption="The speed-up that the separately measured cost table predicts from the steps "
    "taken, beside the one measured; the band is 10 % wide on either side.",
)
def predicted(report: BenchReport) -> Figure | None:
    labels, colours = report.labels(), _colours(report)
    points = [
        entry
        for entry in report.drafters
        if entry.name != BASELINE and entry.predicted_speedup and entry.speedup
    ]
    if not points:
        return None
    figure = blank(4.6, 4.6)
    axis = figure.subplots()
    highs = [e.speedup_ci95.high if e.speedup_ci95 else e.speedup or 0.0 for e in points]
    top = 1.08 * max(1.0, *highs, *(e.predicted_speedup or 0.0 for e in points))
    axis.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color=GREY, alpha=0.18, lw=0)
    axis.plot([0, top], [0, top], **reference())
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
    # colour stands for the drafter, shape for the temperature: one entry for each of them
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


@plot(
    name="divergence_gaps",
    title="Near-ties",
    caption="Where greedy output differed from plain decoding: how far the target held its "
    "first choice above the second. Left of the bound, rounding explains the difference.",
)
def gaps(report: BenchReport) -> Figure | None:
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
    figure = blank(7.6, 2.6)
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
    axis.axvline(bound, **reference())
    axis.annotate("bound", (bound, 0.95), xycoords=("data", "axes fraction"), ha="right", va="top")
    axis.set_xlabel("target's top-2 logit gap at the first divergence")
    axis.set_ylabel("texts")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    legend_below(figure, [axis])
    return figure


@plot(
    name="by_length",
    title="Tokens per second by draft length",
    caption="Of forwards and drafts alone, predicted from measured costs and real "
    "decoding; squares are trees, at their depth, the dotted line is a length chosen "
    "step by step (auto), the dashed one plain decoding, the star the fastest of all.",
)
def by_length(tuning: Tuning) -> Figure:
    figure = blank(6.4, 3.8)
    axis = figure.subplots()
    for place, name in enumerate(_drafters(tuning)):
        own = [one for one in tuning.candidates if one.measurement.drafter == name]
        colour = f"C{place % 10}"
        chains = sorted(
            (one for one in own if one.measurement.length),
            key=lambda one: one.measurement.length or 0,
        )
        lengths = [one.measurement.length for one in chains]
        _with_whiskers(axis, lengths, chains, tuning, "o-", colour, short_name(name))
        trees = [one for one in own if one.measurement.depth and not one.measurement.length]
        _with_whiskers(axis, [one.measurement.depth for one in trees], trees, tuning, "s", colour)
        for one in own:
            if not one.measurement.depth:
                axis.axhline(one.tokens_per_second, color=colour, linewidth=1, linestyle=":")
    plain = tuning.plain_tokens_per_second
    axis.axhline(plain, **reference())
    left, right = axis.get_xlim()
    depth, best = tuning.winner.measurement.depth, tuning.winner.tokens_per_second
    axis.plot(depth or right, best, "*", color=ink(), markersize=13, clip_on=False, zorder=5)
    axis.set_xlim(left, right)
    axis.set_xlabel("drafted tokens")
    axis.set_ylabel("predicted tokens per second")
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    legend_below(figure, [axis])
    return figure


@plot(
    name="by_batch",
    title="Speed-up by batch size",
    caption="The best draft of each drafter, over plain decoding of as many rows.",
)
def by_batch(tuning: Tuning) -> Figure | None:
    if len(tuning.by_batch) < 2:
        return None
    figure = blank(6.4, 3.4)
    axis = figure.subplots()
    for name in _drafters(tuning):
        own = [one for one in tuning.batches if one.measurement.drafter == name]
        rows = [one.rows for one in own]
        axis.plot(rows, [one.speedup for one in own], "o-", label=short_name(name))
    axis.axhline(1.0, **reference())
    axis.set_xscale("log", base=2)
    sizes = list(tuning.by_batch)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("rows decoded together")
    axis.set_ylabel("predicted speed-up")
    axis.set_ylim(bottom=0)
    legend_below(figure, [axis])
    return figure


def _with_whiskers(
    axis: Any,
    places: Sequence[int | None],
    candidates: Sequence[Candidate],
    tuning: Tuning,
    form: str,
    colour: str,
    label: str | None = None,
) -> None:
    pace = tuning.plain_tokens_per_second
    values = [one.tokens_per_second for one in candidates]
    below = [max(0.0, (one.speedup - one.low) * pace) for one in candidates]
    above = [max(0.0, (one.high - one.speedup) * pace) for one in candidates]
    axis.errorbar(
        places,
        values,
        yerr=[below, above],
        fmt=form,
        color=colour,
        label=label,
        markersize=4.5,
        linewidth=1.2,
        elinewidth=0.8,
        capsize=2,
    )


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
