"""`draftsmith plan table`: the tables of the scaling-laws paper, recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from draftsmith.commands._options import VerbOptions, holds_out
from draftsmith.commands._tables import say, say_written, show, write_csv
from draftsmith.config import Leading
from draftsmith.provenance import jsonable, start_run

TableName = Literal["1", "2", "3", "4", "5", "6", "7", "8", "9", "all"]


@dataclass(frozen=True, kw_only=True)
class PlanTableOptions(VerbOptions):
    """Recompute a table of the scaling-laws paper and set it beside what was printed."""

    number: Annotated[TableName, Leading]
    """Which table; or all."""
    out: Path | None = None
    """Write CSV files and figures to this folder."""


@holds_out
def run(options: PlanTableOptions) -> dict[str, Any]:
    """Recompute, print, draw."""
    from draftsmith.plan.tables import TABLES, paper_table

    record = start_run("plan table", options, out=options.out)
    numbers = list(TABLES) if options.number == "all" else [int(options.number)]
    tables = [paper_table(number) for number in numbers]
    for table in tables:
        columns, rows = list(table.rows[0]), [list(row.values()) for row in table.rows]
        if options.out is not None:
            from draftsmith.plan import plots

            stem = f"table_{table.number}"
            write_csv(options.out / f"{stem}.csv", columns, rows)
            plots.save(plots.of_table(table.number), options.out / stem)
        show(f"Table {table.number}. {table.title}", columns, rows)
        say(table.notes, "note")
    if options.out is not None:
        record.write(options.out)
    say_written(options.out)
    return {"tables": jsonable(tables)}
