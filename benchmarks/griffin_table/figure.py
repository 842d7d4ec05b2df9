"""Draw the table of the GRIFFIN paper: tokens per step of every method, and speeds where they are.

    python benchmarks/griffin_table/table.py --drafters runs/drafters --out runs/griffin
    python benchmarks/griffin_table/figure.py runs/griffin/results.json --out runs/griffin

Writes OUT/methods.png and methods.svg.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from draftsmith.core.config import LOSSY_RULES
from draftsmith.plots import (
    COLOURS,
    GREY,
    MARK,
    blank,
    ink,
    legend_below,
    light_grid,
    name_rows,
    plot,
    reference,
)

Row = Mapping[str, Any]


def first_to_last(rows: Sequence[Row]) -> list[str]:
    """Methods that keep the text, by their tokens per step at the lowest temperature."""
    lowest = min(row["temperature"] for row in rows)
    kept = [
        row
        for row in rows
        if row["temperature"] == lowest and row["rule"] not in LOSSY_RULES
    ]
    return [row["method"] for row in sorted(kept, key=lambda row: -row["mean"])]


def tokens_per_step(row: Row) -> dict[str, tuple[float, list[float] | None]]:
    """By suite: the value, and its interval."""
    return {suite: (one["tau"], one["ci95"]) for suite, one in row["suites"].items()}


def speeds(row: Row) -> dict[str, tuple[float, list[float] | None]]:
    """By suite: the value, and its interval; empty where the method was not timed."""
    return {suite: (one["speedup"], one["ci95"]) for suite, one in row["speed"].items()}


@plot(name="methods", title="Methods of GRIFFIN's paper, and ours")
def methods(rows: Sequence[Row]) -> Figure:
    """By method and temperature, tokens per step in the trees of the papers, and, where they were
    timed, speeds over plain decoding in drafts that `tune` chose: each suite with its 95 % interval
    over prompts, and the mean of the suites. Methods that change the text are left out."""
    names, heats = first_to_last(rows), sorted({row["temperature"] for row in rows})
    kinds = [("tokens per step", tokens_per_step)]
    if any(row["speed"] for row in rows):
        kinds.append(("speed over plain decoding", speeds))
    figure = blank(4.6 * len(heats), (0.4 * len(names) + 0.7) * len(kinds))
    panels = figure.subplots(len(kinds), len(heats), sharey=True, sharex="row", squeeze=False)
    for (label, values), line in zip(kinds, panels, strict=True):
        for heat, axis in zip(heats, line, strict=True):
            found = {row["method"]: values(row) for row in rows if row["temperature"] == heat}
            for place, name in enumerate(reversed(names)):
                _draw_row(axis, place, found.get(name, {}))
            name_rows(axis, names)
            axis.axvline(1.0, **reference())
            light_grid(axis, "x")
            axis.set_title(f"T = {heat:g}")
            axis.set_xlabel(label)
    legend_below(figure)
    return figure


def _draw_row(axis: Any, place: int, found: Mapping[str, tuple[float, list[float] | None]]) -> None:
    axis.axhline(place, color=GREY, alpha=0.15, linewidth=0.6)
    for number, (suite, (value, ends)) in enumerate(found.items()):
        height = place + 0.22 * (1 - number)  # three suites, one above the other
        low, high = ends or (value, value)
        style = {"color": COLOURS[number], "markersize": 4, "linewidth": 1.2, "fmt": "o"}
        sides = [[max(0.0, value - low)], [max(0.0, high - value)]]
        axis.errorbar(value, height, xerr=sides, label=suite, **style)
    if found:
        middle = mean(value for value, _ in found.values())
        axis.plot(middle, place, linestyle="none", color=ink(), label="mean", **MARK)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="results.json of table.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the drawing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = json.loads(options.results.read_text(encoding="utf-8"))["rows"]
    methods.draw(rows).save(options.out)


if __name__ == "__main__":
    main()
