"""What the `plan` verbs share: the laws they go by, and how they print.

Reading what `bench` measured of draft models: acceptance, tokens per step, speed-up.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from draftsmith.bench import records as bench_records
from draftsmith.bench.metrics import Interval, figures
from draftsmith.bench.records import BASELINE, RunRecord
from draftsmith.commands._plan_verbs import LawsOptions
from draftsmith.core.speedup import acceptance_from_counts
from draftsmith.errors import InputError
from draftsmith.plan import paper
from draftsmith.plan.fit import affine_law
from draftsmith.plan.ladder import Estimate, Measured
from draftsmith.plan.law_file import read_law, residual_of
from draftsmith.plan.loss import LossLaw
from draftsmith.plan.observations import Row, read_rows
from draftsmith.plan.optimum import AcceptanceLaw
from draftsmith.provenance import write_text_atomic

MEASURED_TARGETS = (1e10, 1.2e11)
"""Parameters of the targets that the default coefficients come from, rounded outwards."""
Cells = Sequence[str | float | None]
_WIDTH = 160


def laws_of(options: LawsOptions) -> tuple[AcceptanceLaw, LossLaw]:
    """The acceptance law and the loss law that were asked for."""
    given, constants = options.acceptance_numbers(), options.loss_numbers()
    acceptance = AcceptanceLaw() if given is None else AcceptanceLaw.of(given)
    if options.law is not None:
        acceptance = read_law(options.law)
    return acceptance, LossLaw() if constants is None else LossLaw.of(constants)


def with_spread(law: AcceptanceLaw, options: LawsOptions) -> AcceptanceLaw:
    """The paper's coefficients with the errors of its fit, unless others were given; as they are
    where the fit cannot be repeated."""
    given = options.law is not None or options.coefficients is not None
    if given or importlib.util.find_spec("statsmodels") is None:
        return law
    fit = affine_law(paper.pairs())
    return replace(law, cov=fit.cov, residual=residual_of(fit.mse, fit.n))


def extrapolated(law: AcceptanceLaw, target_params: float) -> list[str]:
    """A warning where the default coefficients are used far from where they were measured."""
    low, high = MEASURED_TARGETS
    measured = AcceptanceLaw()
    same = (law.A, law.B, law.C) == (measured.A, measured.B, measured.C)
    if not same or low <= target_params <= high:
        return []
    return [
        "the default coefficients come from targets of 13 to 110 billion parameters: for "
        f"{target_params:.3g} they are extrapolated; fit your own with `plan law`"
    ]


def show(title: str, columns: Sequence[str], rows: Iterable[Cells]) -> None:
    """Print a table, numbers on the right."""
    table = Table(title=title, title_justify="left")
    filled = [[said(cell) for cell in row] for row in rows]
    for place, column in enumerate(columns):
        numeric = all(_is_number(row[place]) for row in filled)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in filled:
        table.add_row(*row)
    console().print(table)


def show_values(title: str, values: dict[str, str | float | None]) -> None:
    """Print names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in values.items():
        if value is not None:
            table.add_row(name, said(value))
    console().print(table)


def say(sentences: Iterable[str], kind: str = "warning") -> None:
    """Print a line per sentence."""
    for sentence in sentences:
        console().print(f"{kind}: {sentence}", soft_wrap=True)


def say_written(folder: Path | None) -> None:
    """Where the files are, if there are any."""
    if folder is not None:
        say([str(folder)], "wrote")


def said(value: str | float | None) -> str:
    """A cell as text: numbers to six digits, parameters of models to nine."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:.9g}" if abs(value) >= 1e8 else f"{value:.6g}"


def interval(ends: Sequence[float] | None) -> str | None:
    """[low, high] as text."""
    return None if ends is None else f"[{ends[0]:.6g}, {ends[1]:.6g}]"


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Cells]) -> None:
    """Write numbers in full."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    write_text_atomic(path, buffer.getvalue())


def console() -> Console:
    """As wide as the terminal, or as wide as our widest table where there is none."""
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(highlight=False, markup=False, width=width)


def _is_number(text: str) -> bool:
    try:
        float(text or "0")
    except ValueError:
        return False
    return True


_TOKENS = re.compile(r"tokens_per_step_([1-9][0-9]*)")
_FILES = ("observations.csv", "records.jsonl", "summary.json")


def read_measured(folders: Sequence[Path]) -> list[Measured]:
    """All figures, those of whole drafts (observations.csv) first.

    Raises:
        InputError: a folder that no bench wrote, or a file of one that cannot be read.
    """
    for folder in folders:
        if not any((folder / name).is_file() for name in _FILES):
            raise InputError(
                f"--records {folder} holds none of {', '.join(_FILES)}: give folders that `bench` "
                "wrote"
            )
    observed = [one for folder in folders for one in _observed(folder / _FILES[0])]
    return observed + [one for folder in folders for one in _benched(folder)]


def _observed(path: Path) -> Iterator[Measured]:
    if not path.is_file():
        return
    for row in read_rows(path, ("target", "draft", "alpha")):
        if row.values.get("protocol", "decoded") != "decoded":
            continue
        alpha, margin = _share(row), _optional(row, "moe")
        draft, temperature = row.text("draft"), _optional(row, "temperature")
        ends = {}
        if margin is not None:
            ends = {"low": max(alpha - margin, 0.0), "high": min(alpha + margin, 1.0)}
        yield Measured(
            draft=draft,
            quantity="alpha",
            temperature=temperature,
            value=Estimate(value=alpha, **ends),
            source=str(path),
        )
        lengths = filter(None, map(_TOKENS.fullmatch, row.values))
        for length in lengths:
            tokens = _optional(row, length[0])
            if tokens is not None:
                yield Measured(
                    draft=draft,
                    quantity="tau",
                    temperature=temperature,
                    value=Estimate(value=tokens),
                    source=str(path),
                    gamma=int(length[1]),
                )


def _benched(folder: Path) -> Iterator[Measured]:
    """From the records; from the summary where they are not there."""
    path, gamma = folder / "records.jsonl", _draft_length(folder)
    entries: list[Mapping[str, Any]] = []
    if path.is_file():
        lines = bench_records.read(path)
        entries = [
            {
                **asdict(one),
                "alpha": _alpha(lines, one.name, one.temperature),
                "speedup_ci95": _ends(one.speedup_ci95),
            }
            for one in figures(lines)
        ]
    elif (folder / "summary.json").is_file():
        path = folder / "summary.json"
        entries = _summary(path)
    for entry in entries:
        if entry["name"] == BASELINE or entry.get("lossy_rule") is not None:
            continue
        values = {
            "alpha": _with_ends(entry.get("alpha"), None),
            "tau": _with_ends(entry.get("tokens_per_step"), None),
            "speedup": _with_ends(entry.get("speedup"), entry.get("speedup_ci95")),
        }
        for quantity, value in values.items():
            if value is not None:
                yield Measured(
                    draft=entry["name"],
                    quantity=quantity,
                    temperature=entry["temperature"],
                    value=value,
                    source=str(path),
                    gamma=None if quantity == "alpha" else gamma,
                )


def _alpha(lines: Sequence[RunRecord], name: str, temperature: float) -> float | None:
    """Accepted / tried, all depths together."""
    mine = [r for r in lines if (r.drafter, r.temperature) == (name, temperature)]
    counts = np.array([pair for record in mine for pair in record.by_position])
    return float(acceptance_from_counts(*counts.T)) if len(counts) else None


def _summary(path: Path) -> list[Mapping[str, Any]]:
    try:
        entries: Any = json.loads(path.read_text(encoding="utf-8"))["drafters"]
        good = all({"name", "temperature"} <= set(entry) for entry in entries)
    except (OSError, ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise InputError(f"{path} is no summary of a bench")
    return list(entries)


def _draft_length(folder: Path) -> int | None:
    """By run.json; None: the drafters' own, one that changes, or not said."""
    try:
        record: Any = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        length = record["options"]["drafting"]["draft_length"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return length if type(length) is int else None


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _with_ends(value: float | None, ends: Sequence[float] | None) -> Estimate | None:
    if value is None:
        return None
    low, high = ends or (None, None)
    return Estimate(value=value, low=low, high=high)


def _share(row: Row) -> float:
    return row.number_where("alpha", lambda rate: 0 <= rate <= 1, "between 0 and 1")


def _optional(row: Row, column: str) -> float | None:
    return row.number_of(column) if row.values.get(column, "").strip() else None
