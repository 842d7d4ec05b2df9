"""The comparison of many runs, written out: a page, figures, a table as CSV and JSON.

runs = read_runs([Path("runs/a"), Path("runs/b")])
comparison = write_comparison(runs, Path("comparison"))
print(terminal_table(comparison))
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from draftsmith.bench.compare.load import read_runs
from draftsmith.bench.compare.model import (
    FACTORS,
    MEASURES,
    Comparison,
    Gain,
    Pooled,
    RankedSetting,
    RunMetrics,
    Scope,
    say_option,
)
from draftsmith.bench.compare.plots import LABELS, Missing, pictures
from draftsmith.bench.compare.pool import compare
from draftsmith.config import as_dict
from draftsmith.plots import PlotImage
from draftsmith.provenance import jsonable, write_json_atomic, write_text_atomic

_HEADINGS = {
    "tau": "tokens per step",
    "tau_predicted": "predicted",
    "alpha": "acceptance",
    "alpha_decoded": "accepted",
    "speedup": "speed-up",
    "speedup_predicted": "predicted speed-up",
    "quality": "quality",
}
_SHORT = {
    "tau": "tok/\nstep",
    "tau_predicted": "pre-\ndict.",
    "alpha": "accep-\ntance",
    "alpha_decoded": "acc.\ndecoded",
    "speedup": "speed-\nup",
    "speedup_predicted": "pre-\ndict.",
    "quality": "qual-\nity",
}
_DIGITS = {"alpha": 3, "alpha_decoded": 3}

DEFINITIONS = (
    (
        "tokens per step (tau)",
        "Generated tokens per forward of the target, its own correction or bonus token included, "
        "counted while decoding. Settings are ranked by it; where no run of a table was decoded, "
        "by the predicted one.",
    ),
    (
        "predicted",
        "(1 - a^(g+1)) / (1 - a) for the acceptance a and drafts of g tokens: what tau would be if "
        "every drafted token were accepted with the same probability.",
    ),
    (
        "acceptance (alpha)",
        "Mean over tokens of sum min(p, q), the probability that a drafted token is accepted; "
        "computed on given texts, not sampled.",
    ),
    ("accepted", "Accepted tokens / tokens offered, counted while decoding."),
    ("speed-up", "Seconds per token of plain decoding / those with the drafter."),
    ("predicted speed-up", "From tau and costs that are measured apart, see the single reports."),
    (
        "\N{PLUS-MINUS SIGN}",
        "Half of the 95 % interval of the mean over seeds (Student's t). Nothing stands there for "
        "one seed. It is about training noise: prompts are the same for all.",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingRow:
    """A line of a ranking, as text."""

    rank: str
    name: str
    cells: tuple[str, ...]
    base: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingTable:
    """The ranking of one scope, as text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[RankingRow, ...]


def compare_folders(paths: Sequence[Path], out: Path, *, base: str | None = None) -> Comparison:
    """Read finished runs and write their comparison: all of `draftsmith report`.

    Args:
        base: label of the undistilled draft; None: the runs whose objective is `none`.

    Raises:
        InputError: see `read_runs` and `compare`.
    """
    return write_comparison(read_runs(paths), out, base=base)


def write_comparison(
    runs: Sequence[RunMetrics], out: Path, *, base: str | None = None
) -> Comparison:
    """Write comparison.html, .csv, .json and figures/, each file whole or not at all."""
    comparison = compare(runs, base=base)
    drawn, missing = pictures(comparison.main)
    write_json_atomic(out / "comparison.json", summary(comparison, missing))
    write_text_atomic(out / "comparison.csv", csv_table(comparison))
    for picture in drawn:
        picture.save(out / "figures")
    write_text_atomic(out / "comparison.html", render(comparison, drawn, missing))
    return comparison


# --------------------------------------------------------------------------- machine-readable


def summary(comparison: Comparison, missing: Sequence[Missing]) -> dict[str, Any]:
    """The content of comparison.json: plain JSON, figures without meaning are null."""
    content = {
        "scopes": [
            {
                "target": scope.target,
                "decoding_temperature": scope.decoding_temperature,
                "ranked_by": scope.ranked_by,
                "settings": [as_dict(entry) for entry in scope.entries],
                "languages": [_gain(gain) for gain in scope.language_gains()],
                "tags": [_gain(gain) for gain in scope.tag_gains()],
            }
            for scope in comparison.scopes
        ],
        "runs": [as_dict(run) for run in comparison.runs],
        "figures_left_out": [as_dict(one) for one in missing],
        "notes": comparison.notes,
    }
    out: dict[str, Any] = jsonable(content)
    return out


def _gain(gain: Gain) -> dict[str, Any]:
    return {
        "name": gain.name,
        "base": gain.base,
        "best": gain.best.name,
        "best_value": gain.best_value,
        "best_gain": gain.best_gain,
        "top_value": gain.top_value,
        "top_gain": gain.top_gain,
    }


def csv_table(comparison: Comparison) -> str:
    """A line per setting; empty cells where nothing is known."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    stores = ("storage_tokens", "storage_bytes")
    measures = [name for m in MEASURES for name in (m, f"{m}_ci95_half")]
    scope_columns = ("target", "decoding_temperature", "rank", "name")
    writer.writerow(
        [*scope_columns, *FACTORS, "options", "seeds", *measures, "quality_metric", *stores]
    )
    for scope in comparison.scopes:
        for entry in scope.entries:
            cells: list[object] = [scope.target, scope.decoding_temperature, entry.rank, entry.name]
            cells += [getattr(entry.setting, factor) for factor in FACTORS]
            options = entry.setting.options
            cells.append(", ".join(say_option(name, options) for name, _ in options))
            cells.append(entry.seeds)
            for measure in MEASURES:
                pooled: Pooled | None = getattr(entry, measure)
                cells += (None, None) if pooled is None else (pooled.mean, pooled.half)
            cells += [entry.quality_metric, *(getattr(entry, name) for name in stores)]
            writer.writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue()


# --------------------------------------------------------------------------- terminal


def terminal_table(comparison: Comparison) -> Table:
    """The rankings, a section per scope."""
    shown = _shown([entry for scope in comparison.scopes for entry in scope.entries])
    table = Table(box=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("setting", overflow="fold")
    for measure in shown:
        table.add_column(_SHORT[measure], justify="right", no_wrap=True)
    table.add_column("seeds", justify="right", no_wrap=True)
    for scope in comparison.scopes:
        if scope.title:
            table.add_row("", scope.title, style="italic")
        for row in _rows(scope, shown):
            table.add_row(row.rank, row.name, *row.cells, style="" if row.base else "bold")
        table.add_section()
    return table


def tables(comparison: Comparison) -> tuple[RankingTable, ...]:
    """The rankings, as text."""
    out = []
    for scope in comparison.scopes:
        shown = _shown(scope.entries)
        columns = (*(_heading(measure, scope) for measure in shown), "seeds")
        out.append(
            RankingTable(title=scope.title, columns=columns, rows=tuple(_rows(scope, shown)))
        )
    return tuple(out)


def _heading(measure: str, scope: Scope) -> str:
    metrics = {entry.quality_metric for entry in scope.entries if entry.quality is not None}
    if measure == "quality" and len(metrics) == 1:
        return metrics.pop() or _HEADINGS[measure]
    return _HEADINGS[measure]


def _shown(entries: Sequence[RankedSetting]) -> list[str]:
    """The measures that any of them has."""
    return [m for m in MEASURES if any(entry.value(m) is not None for entry in entries)]


def _rows(scope: Scope, shown: Sequence[str]) -> list[RankingRow]:
    return [
        RankingRow(
            rank="" if entry.rank is None else str(entry.rank),
            name=entry.name,
            cells=(*(_cell(entry, measure) for measure in shown), str(entry.seeds)),
            base=entry is scope.base,
        )
        for entry in scope.entries
    ]


def _cell(entry: RankedSetting, measure: str) -> str:
    pooled: Pooled | None = getattr(entry, measure)
    if pooled is None:
        return ""
    digits = _DIGITS.get(measure, 2)
    spread = "" if pooled.half is None else f" \N{PLUS-MINUS SIGN}{pooled.half:.{digits}f}"
    return f"{pooled.mean:.{digits}f}{spread}"


# --------------------------------------------------------------------------- page


def sentences(comparison: Comparison) -> list[str]:
    """What comes out of it, one sentence per scope, then what to know about the pooling."""
    out = []
    for scope in comparison.scopes:
        top, base = scope.top, scope.base
        if top is None:
            continue
        value = top.value(scope.ranked_by) or 0.0
        where = f" ({scope.title})" if scope.title else ""
        said = f"{top.name} ranks first of {len(scope.entries)}{where}: {_figure(scope, value)}"
        before = None if base is None else base.value(scope.ranked_by)
        if before is not None:
            gain = 100 * (value / before - 1)
            said += f", {gain:+.1f} % against the undistilled draft's {before:.2f}"
        out.append(f"{said}.")
        rivals = [e for e in scope.entries if e.rank is not None and e not in (top, base)]
        if rivals and _close(scope, top, rivals[0]):
            out.append(
                f"Its lead over {rivals[0].name} lies within the intervals over seeds: "
                "do not read much into it."
            )
    return [*out, *comparison.notes]


def _figure(scope: Scope, value: float) -> str:
    return f"{value:.{_DIGITS.get(scope.ranked_by, 2)}f} {LABELS[scope.ranked_by]}"


def _close(scope: Scope, top: RankedSetting, second: RankedSetting) -> bool:
    """Whether the intervals of both overlap."""
    first, other = getattr(top, scope.ranked_by), getattr(second, scope.ranked_by)
    if first.half is None or other.half is None:
        return False
    return bool(first.mean - first.half < other.mean + other.half)


def render(comparison: Comparison, drawn: Sequence[PlotImage], missing: Sequence[Missing]) -> str:
    """The page: one file that asks for nothing else."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("draftsmith.bench", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    main = comparison.main
    page: str = environment.get_template("compare.html.j2").render(
        num_runs=len({(run.label, run.seed) for run in comparison.runs}),
        num_settings=sum(len(scope.entries) for scope in comparison.scopes),
        sentences=sentences(comparison),
        tables=tables(comparison),
        drawn_of=main.title if len(comparison.scopes) > 1 else "",
        pictures=drawn,
        missing=missing,
        gains=[("language", main.language_gains()), ("kind of prompt", main.tag_gains())],
        definitions=DEFINITIONS,
    )
    return page
