"""The comparison of many runs, written out: a page, plots, a table as CSV and JSON.

runs = read_runs([Path("runs/a"), Path("runs/b")])
comparison = write_comparison(runs, Path("comparison"))
print(terminal_table(comparison))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

from draftsmith.bench.compare.model import (
    FACTORS,
    MEASURES,
    Comparison,
    RankedSetting,
    RunMetrics,
    Scope,
    compare,
    say_option,
)
from draftsmith.bench.compare.plots import LABELS, Missing, draw_plots
from draftsmith.bench.summary import render_page
from draftsmith.config import as_dict
from draftsmith.plots import PlotImage
from draftsmith.provenance import jsonable, write_json_atomic, write_text_atomic

_HEADINGS = {
    "tau": ("tokens per step", "tok/\nstep"),
    "tau_with_prefill": ("with the prompt's step", ""),
    "tau_predicted": ("predicted", "pre-\ndict."),
    "alpha": ("acceptance", "accep-\ntance"),
    "alpha_decoded": ("accepted", "acc.\ndecoded"),
    "loop_share": ("in loops", "in\nloops"),
    "tau_outside_loops": ("tokens per step outside loops", ""),
    "alpha_outside_loops": ("accepted outside loops", ""),
    "speedup": ("speed-up", "speed-\nup"),
    "speedup_predicted": ("predicted speed-up", "pre-\ndict."),
    "quality": ("quality", "qual-\nity"),
}
"""On the page, and in the terminal."""
_DIGITS = {"alpha": 3, "alpha_decoded": 3, "alpha_outside_loops": 3}
_SAVED = ("rejections saved", "rej.\nsaved")
"""Share of the undistilled draft's, see `Scope.rejections_saved`."""


def write_comparison(
    runs: Sequence[RunMetrics], out: Path, *, base: str | None = None
) -> Comparison:
    """Write comparison.html, .csv, .json and figures/, each file atomically.

    Args:
        base: label of the undistilled draft; None: the runs whose objective is `none`.

    Raises:
        InputError: see `compare`.
    """
    comparison = compare(runs, base=base)
    drawn, missing = draw_plots(comparison.main)
    write_json_atomic(out / "comparison.json", summary(comparison, missing))
    write_text_atomic(out / "comparison.csv", csv_table(comparison))
    for image in drawn:
        image.save(out / "figures")
    write_text_atomic(out / "comparison.html", render(comparison, drawn, missing))
    return comparison


# --------------------------------------------------------------------------- machine-readable


def summary(comparison: Comparison, missing: Sequence[Missing]) -> dict[str, Any]:
    """Return the content of comparison.json: plain JSON, metrics without meaning are null."""
    content = {
        "scopes": [
            {
                "target": scope.target,
                "decoding_temperature": scope.decoding_temperature,
                "ranked_by": scope.ranked_by,
                "settings": [_setting(scope, entry) for entry in scope.entries],
                "languages": scope.gains(),
                "tags": scope.gains("by_tag"),
            }
            for scope in comparison.scopes
        ],
        "runs": comparison.runs,
        "figures_left_out": missing,
        "notes": comparison.notes,
    }
    out: dict[str, Any] = jsonable(content)
    return out


def _setting(scope: Scope, entry: RankedSetting) -> dict[str, Any]:
    content = as_dict(entry)
    del content["metrics"]
    content |= {measure: entry.metrics.get(measure) for measure in MEASURES}
    return content | {"rejections_saved": scope.rejections_saved(entry)}


def csv_table(comparison: Comparison) -> str:
    """Write a line per setting; empty cells where nothing is known."""
    rows = []
    for scope in comparison.scopes:
        for entry in scope.entries:
            options = entry.setting.options
            row = {
                "target": scope.target,
                "decoding_temperature": scope.decoding_temperature,
                "rank": entry.rank,
                "name": entry.name,
                **{factor: getattr(entry.setting, factor) for factor in FACTORS},
                "options": ", ".join(say_option(name, options) for name, _ in options),
                "seeds": entry.seeds,
            }
            for measure in MEASURES:
                pooled = entry.metrics.get(measure)
                row[measure] = None if pooled is None else pooled.mean
                row[f"{measure}_ci95_half"] = None if pooled is None else pooled.half
            row["rejections_saved"] = scope.rejections_saved(entry)
            for name in ("quality_metric", "storage_tokens", "storage_bytes"):
                row[name] = getattr(entry, name)
            rows.append(row)
    return str(pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n"))


# --------------------------------------------------------------------------- terminal


def terminal_table(comparison: Comparison) -> Table:
    """Lay out the rankings for a terminal, a section per scope."""
    entries = [entry for scope in comparison.scopes for entry in scope.entries]
    shown = [measure for measure in _shown(entries) if _HEADINGS[measure][1]]
    saved = any(map(_saves, comparison.scopes))
    table = Table(box=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("setting", overflow="fold")
    for measure in shown:
        table.add_column(_HEADINGS[measure][1], justify="right", no_wrap=True)
    if saved:
        table.add_column(_SAVED[1], justify="right", no_wrap=True)
    table.add_column("seeds", justify="right", no_wrap=True)
    for scope in comparison.scopes:
        if scope.title:
            table.add_row("", scope.title, style="italic")
        for entry in scope.entries:
            style = "" if entry is scope.base else "bold"
            table.add_row(*_cells(scope, entry, shown, saved=saved), style=style)
        table.add_section()
    return table


def _ranking(scope: Scope) -> dict[str, Any]:
    """Return the ranking of a scope as text, for the page."""
    shown = _shown(scope.entries)
    names = {measure: _HEADINGS[measure][0] for measure in shown}
    metrics = {entry.quality_metric for entry in scope.entries if "quality" in entry.metrics}
    if len(metrics) == 1:
        names["quality"] = metrics.pop() or names["quality"]
    saved = _saves(scope)
    return {
        "title": scope.title,
        "columns": [*names.values(), *([_SAVED[0]] if saved else []), "seeds"],
        "rows": [
            (entry is scope.base, *_cells(scope, entry, shown, saved=saved))
            for entry in scope.entries
        ],
    }


def _shown(entries: Sequence[RankedSetting]) -> list[str]:
    """Return the measures that any of them has."""
    return [measure for measure in MEASURES if any(measure in e.metrics for e in entries)]


def _saves(scope: Scope) -> bool:
    """Check whether any setting is known to save refused drafts, or to cost some."""
    return any(scope.rejections_saved(entry) is not None for entry in scope.entries)


def _cells(scope: Scope, entry: RankedSetting, shown: Sequence[str], *, saved: bool) -> list[str]:
    """Return the rank, the name, the measures, with `saved` the share of refused drafts that are
    saved, and the number of seeds as text."""
    cells = ["" if entry.rank is None else str(entry.rank), entry.name]
    for measure in shown:
        pooled, digits = entry.metrics.get(measure), _DIGITS.get(measure, 2)
        cell = "" if pooled is None else f"{pooled.mean:.{digits}f}"
        if pooled is not None and pooled.half is not None:
            cell += f" \N{PLUS-MINUS SIGN}{pooled.half:.{digits}f}"
        cells.append(cell)
    if saved:
        share = scope.rejections_saved(entry)
        cells.append("" if share is None else f"{100 * share:.1f} %")
    return [*cells, str(entry.seeds)]


# --------------------------------------------------------------------------- page


def sentences(comparison: Comparison) -> list[str]:
    """Sum up the ranking of each scope, then what to know about the pooling."""
    out = []
    for scope in comparison.scopes:
        top, base, measure = scope.top, scope.base, scope.ranked_by
        if top is None:
            continue
        best = top.metrics[measure]
        where = f" ({scope.title})" if scope.title else ""
        value = f"{best.mean:.{_DIGITS.get(measure, 2)}f} {LABELS[measure]}"
        looped = top.value("loop_share")
        if scope.decoding_temperature == 0 and looped is not None:
            value += f" ({100 * looped:.0f} % of its tokens in repetition loops)"
        sentence = f"{top.name} ranks first of {len(scope.entries)}{where}: {value}"
        before = None if base is None else base.value(measure)
        if before is not None:
            gain = 100 * (best.mean / before - 1)
            sentence += f", {gain:+.1f} % against the undistilled draft's {before:.2f}"
            share = scope.rejections_saved(top)
            if share is not None:
                sentence += f"; it saves {100 * share:.1f} % of the refused drafts"
        out.append(f"{sentence}.")
        rivals = [e for e in scope.entries if e.rank is not None and e not in (top, base)]
        second = rivals[0].metrics[measure] if rivals else None
        if second is None or best.half is None or second.half is None:
            continue
        if best.mean - best.half < second.mean + second.half:
            out.append(
                f"Its lead over {rivals[0].name} lies within the intervals over seeds: "
                "do not read much into it."
            )
    return [*out, *comparison.notes]


def render(comparison: Comparison, drawn: Sequence[PlotImage], missing: Sequence[Missing]) -> str:
    """Render the page: one file that needs no other."""
    main = comparison.main
    return render_page(
        "compare.html.j2",
        num_runs=len({(run.label, run.seed) for run in comparison.runs}),
        num_settings=sum(len(scope.entries) for scope in comparison.scopes),
        sentences=sentences(comparison),
        tables=[_ranking(scope) for scope in comparison.scopes],
        drawn_of=main.title if len(comparison.scopes) > 1 else "",
        plots=drawn,
        missing=missing,
        gains=[("language", main.gains()), ("kind of prompt", main.gains("by_tag"))],
    )
