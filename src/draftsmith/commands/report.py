"""`draftsmith report`: many finished runs side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from draftsmith.commands._options import VerbOptions, holds_out
from draftsmith.config import Leading, require
from draftsmith.provenance import read_json


@dataclass(frozen=True, kw_only=True)
class ReportOptions(VerbOptions):
    """Compare finished runs of `distill` and `bench`: ranked table, figures, one page."""

    runs: Annotated[tuple[Path, ...], Leading]
    """Folders of runs; seeds of one setting are pooled."""
    base: str | None = None
    """Label of the undistilled draft; left out: runs whose objective is none."""
    out: Path = Path("runs/report")
    """Folder for comparison.html, .csv, .json and figures."""

    def validate(self) -> None:
        super().validate()
        require(bool(self.runs), "--runs must name at least one folder")


@holds_out
def run(options: ReportOptions) -> dict[str, Any]:
    """Write the comparison and print its table."""
    from draftsmith.bench.compare.model import read_runs
    from draftsmith.bench.compare.page import sentences, terminal_table, write_comparison

    comparison = write_comparison(read_runs(options.runs), options.out, base=options.base)
    console = Console(highlight=False)
    console.print(terminal_table(comparison))
    for sentence in sentences(comparison):
        console.print(sentence, soft_wrap=True, markup=False)
    console.print(f"report: {options.out / 'comparison.html'}", soft_wrap=True, markup=False)
    payload: dict[str, Any] = read_json(options.out / "comparison.json", "comparison")
    return payload
