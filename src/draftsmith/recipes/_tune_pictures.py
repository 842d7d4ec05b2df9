"""The figures of `draftsmith tune`, as files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from draftsmith.bench.charts import GREY, ink, legend_below
from draftsmith.bench.pictures import Plot, draw
from draftsmith.bench.report import short_name
from draftsmith.plan.tune import Candidate, Tuning

_DASHED = (0, (4, 3))


def save_pictures(tuning: Tuning, folder: Path) -> None:
    """Write each figure as SVG and PNG."""
    for plot, chart in (
        (
            Plot(
                name="by_length",
                title="Tokens per second by draft length",
                caption="Of forwards and drafts alone, predicted from measured costs and real "
                "decoding; squares are trees, at their depth, the dotted line is a length chosen "
                "step by step (auto), the dashed one plain decoding, the star the fastest of all.",
            ),
            by_length,
        ),
        (
            Plot(
                name="by_batch",
                title="Speed-up by batch size",
                caption="The best draft of each drafter, over plain decoding of as many rows.",
            ),
            by_batch,
        ),
    ):
        picture = draw(plot, partial(chart, tuning))
        if picture is not None:
            picture.save(folder)


def by_length(tuning: Tuning) -> Figure:
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axis = figure.subplots()
    for place, name in enumerate(_drafters(tuning)):
        own = [one for one in tuning.candidates if one.trial.drafter == name]
        colour = f"C{place % 10}"
        chains = sorted(
            (one for one in own if one.trial.length), key=lambda one: one.trial.length or 0
        )
        lengths = [one.trial.length for one in chains]
        _with_whiskers(axis, lengths, chains, tuning, "o-", colour, short_name(name))
        trees = [one for one in own if one.trial.depth and not one.trial.length]
        _with_whiskers(axis, [one.trial.depth for one in trees], trees, tuning, "s", colour)
        for one in own:
            if not one.trial.depth:
                axis.axhline(one.tokens_per_second, color=colour, linewidth=1, linestyle=":")
    plain = tuning.plain_tokens_per_second
    axis.axhline(plain, color=ink(), linewidth=0.9, linestyle=_DASHED)
    left, right = axis.get_xlim()
    depth, best = tuning.winner.trial.depth, tuning.winner.tokens_per_second
    axis.plot(depth or right, best, "*", color=ink(), markersize=13, clip_on=False, zorder=5)
    axis.set_xlim(left, right)
    axis.set_xlabel("drafted tokens")
    axis.set_ylabel("predicted tokens per second")
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    legend_below(figure, [axis])
    return figure


def by_batch(tuning: Tuning) -> Figure | None:
    if len(tuning.by_batch) < 2:
        return None
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axis = figure.subplots()
    for name in _drafters(tuning):
        own = [one for one in tuning.batches if one.trial.drafter == name]
        rows = [one.rows for one in own]
        axis.plot(rows, [one.speedup for one in own], "o-", label=short_name(name))
    axis.axhline(1.0, color=ink(), linewidth=0.9, linestyle=_DASHED)
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
    return list(dict.fromkeys(one.trial.drafter for one in tuning.candidates))
