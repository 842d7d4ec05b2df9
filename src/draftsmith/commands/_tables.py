"""What the `plan` verbs share: the laws they go by, and how they print."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from draftsmith.commands._options import LawsOptions
from draftsmith.provenance import Run, jsonable, write_json_atomic, write_text_atomic

if TYPE_CHECKING:
    from draftsmith.plan.optimum import AcceptanceLaw, LossLaw
    from draftsmith.plots import PlotImage

MEASURED_TARGETS = (1e10, 1.2e11)
"""Parameters of the targets that the default coefficients come from, rounded outwards."""


Cells = Sequence[str | float | None]


_WIDTH = 200


def laws_of(options: LawsOptions) -> tuple[AcceptanceLaw, LossLaw]:
    """Return the acceptance law and the loss law that were asked for."""
    from draftsmith.plan.fit import read_law
    from draftsmith.plan.optimum import AcceptanceLaw, LossLaw

    given, constants = options.acceptance_numbers() or (), options.loss_numbers() or ()
    acceptance = AcceptanceLaw(*given) if options.law is None else read_law(options.law)
    return acceptance, LossLaw(*constants)


def with_spread(law: AcceptanceLaw, options: LawsOptions) -> AcceptanceLaw:
    """Give the paper's coefficients the errors of its fit, unless others were given; leave them as
    they are where the fit cannot be repeated."""
    from draftsmith.plan import tables
    from draftsmith.plan.fit import affine_law, residual_of

    given = options.law is not None or options.coefficients is not None
    if given or importlib.util.find_spec("statsmodels") is None:
        return law
    fit = affine_law(tables.pairs())
    return replace(law, cov=fit.cov, residual=residual_of(fit.mse, fit.n))


def extrapolated(law: AcceptanceLaw, target_params: float) -> list[str]:
    """Warn where the default coefficients are used far from where they were measured."""
    from draftsmith.plan.optimum import AcceptanceLaw

    low, high = MEASURED_TARGETS
    measured = replace(law, cov=None, residual=None) == AcceptanceLaw()
    if not measured or low <= target_params <= high:
        return []
    return [
        "the default coefficients come from targets of 13 to 110 billion parameters: for "
        f"{target_params:.3g} they are extrapolated; fit your own with `plan law`"
    ]


def show(title: str, columns: Sequence[str], rows: Iterable[Cells]) -> None:
    """Print a table, numbers on the right."""
    table = Table(title=title, title_justify="left")
    filled = [[cell_text(cell) for cell in row] for row in rows]
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
            table.add_row(name, cell_text(value))
    console().print(table)


def say(sentences: Iterable[str], kind: str = "warning") -> None:
    """Print a line per sentence."""
    for sentence in sentences:
        console().print(f"{kind}: {sentence}", soft_wrap=True)


def say_written(folder: Path | None) -> None:
    """Print where the files are, if there are any."""
    if folder is not None:
        say([str(folder)], "wrote")


def finish(
    run: Run,
    folder: Path | None,
    found: object,
    *,
    name: str | None = None,
    draw: Callable[[Any], Iterable[PlotImage | None]] | None = None,
) -> dict[str, Any]:
    """Return what a verb found as plain JSON; write it and what `draw` makes of the module of plots
    to the folder, if there is one. `name`: of a file of its own; None: it is part of run.json."""
    payload: dict[str, Any] = jsonable(found)
    if folder is not None:
        if draw is not None:
            from draftsmith.plan import plots

            plots.save(draw(plots), folder)
        if name is not None:
            write_json_atomic(folder / name, payload)
        run.write(folder, results=payload if name is None else None)
    say_written(folder)
    return payload


def cell_text(value: str | float | None) -> str:
    """Return a cell as text: numbers to six digits, parameters of models to nine; what has no
    value is left empty."""
    if isinstance(value, str):
        return value
    if value is None or math.isnan(value):
        return ""
    return f"{value:.9g}" if abs(value) >= 1e8 else f"{value:.6g}"


def interval(ends: Sequence[float] | None) -> str | None:
    """Return [low, high] as text."""
    return None if ends is None else f"[{ends[0]:.6g}, {ends[1]:.6g}]"


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Write a CSV file with its numbers in full."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    write_text_atomic(path, buffer.getvalue())


def console() -> Console:
    """Open a console as wide as the terminal, or as our widest table where there is none."""
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(highlight=False, markup=False, width=width)


def _is_number(text: str) -> bool:
    try:
        float(text or "0")
    except ValueError:
        return False
    return True
