"""Figures of the records in benchmarks/results; readme.py draws them for the pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from draftsmith.core.config import LOSSY_RULES
from draftsmith.plots import (
    COLOURS,
    GREY,
    MARK,
    Bar,
    bar_rows,
    blank,
    ink,
    legend_below,
    light_grid,
    name_rows,
    panel,
    plot,
    reference,
)

Row = Mapping[str, Any]


def best_and_plain(rows: Sequence[Row]) -> list[Row]:
    """The fastest mode of each engine, and its fastest without drafts; the fastest first."""
    order = sorted(rows, key=lambda row: -row["tokens_per_second"])
    best = {row["engine"]: row for row in reversed(order)}
    plain = {row["engine"]: row for row in reversed(order) if row["mode"] == "plain"}
    return [row for row in order if row in (best[row["engine"]], plain.get(row["engine"]))]


@plot(name="engines", title="Engines on one machine")
def engines(rows: Sequence[Row]) -> Figure:
    """Tokens per second of each engine's fastest mode, and of its fastest without drafts (pale),
    with 95 % intervals over prompts."""
    shown = best_and_plain(rows)
    figure, axis = panel(8.0, 0.36 * len(shown) + 0.7)
    bar_rows(
        axis,
        [
            Bar(
                name=", ".join(filter(None, (row["engine"], row["weights"], drafter_of(row)))),
                value=row["tokens_per_second"],
                text=f"{row['tokens_per_second']:.0f}",
                colour=COLOURS[0] if row["engine"] == "draftsmith" else GREY,
                alpha=0.5 if row["mode"] == "plain" else 1.0,
                half=(
                    row["tokens_per_second"] - row["ci95"][0],
                    row["ci95"][1] - row["tokens_per_second"],
                ),
            )
            for row in shown
        ],
    )
    axis.set_xlabel("tokens per second, SmolLM2-135M-Instruct, one text at a time")
    light_grid(axis, "x")
    return figure


def drafter_of(row: Row) -> str:
    """The drafter of an engine's mode; nothing where it decodes without."""
    return "" if row["drafter"] == "none" else row["drafter"]


def first_to_last(rows: Sequence[Row]) -> list[str]:
    """Methods that keep the text, by their tokens per step at the lowest temperature."""
    lowest = min(row["temperature"] for row in rows)
    kept = [row for row in rows if row["temperature"] == lowest and row["rule"] not in LOSSY_RULES]
    return [row["method"] for row in sorted(kept, key=lambda row: -row["mean"])]


@plot(name="methods", title="Methods of GRIFFIN's paper, and ours")
def methods(rows: Sequence[Row]) -> Figure:
    """By method and temperature, tokens per step in the trees of the papers: each suite with its
    95 % interval over prompts, and the mean of the suites. Methods that change the text are left
    out."""
    names, heats = first_to_last(rows), sorted({row["temperature"] for row in rows})
    figure = blank(4.6 * len(heats), 0.4 * len(names) + 0.7)
    panels = figure.subplots(1, len(heats), sharey=True, sharex=True, squeeze=False)[0]
    for heat, axis in zip(heats, panels, strict=True):
        found = {row["method"]: row["suites"] for row in rows if row["temperature"] == heat}
        for place, name in enumerate(reversed(names)):
            if name in found:
                _draw_suites(axis, place, found[name])
        name_rows(axis, names)
        axis.axvline(1.0, **reference())
        light_grid(axis, "x")
        axis.set(title=f"T = {heat:g}", xlabel="tokens per step")
    legend_below(figure)
    return figure


def _draw_suites(axis: Any, place: int, suites: Mapping[str, Row]) -> None:
    axis.axhline(place, color=GREY, alpha=0.15, linewidth=0.6)
    for number, (suite, one) in enumerate(suites.items()):
        height = place + 0.22 * (1 - number)  # three suites, one above the other
        low, high = one["ci95"]
        style = {"color": COLOURS[number], "markersize": 4, "linewidth": 1.2, "fmt": "o"}
        sides = [[one["tau"] - low], [high - one["tau"]]]
        axis.errorbar(one["tau"], height, xerr=sides, label=suite, **style)
    middle = mean(one["tau"] for one in suites.values())
    axis.plot(middle, place, linestyle="none", color=ink(), label="mean", **MARK)
