"""`draftsmith report`: many finished runs side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from draftsmith.bench.compare.page import compare_folders, sentences, terminal_table
from draftsmith.commands._verbs import ReportOptions


@dataclass(frozen=True, kw_only=True)
class ReportResult:
    """What was written."""

    comparison: dict[str, Any]

    def json_payload(self) -> dict[str, Any]:
        return self.comparison


def run(options: ReportOptions) -> ReportResult:
    """Write the comparison and print its table."""
    comparison = compare_folders(options.runs, options.out, base=options.base)
    console = Console(highlight=False)
    console.print(terminal_table(comparison))
    for sentence in sentences(comparison):
        console.print(sentence, soft_wrap=True, markup=False)
    console.print(f"report: {options.out / 'comparison.html'}", soft_wrap=True, markup=False)
    content = (options.out / "comparison.json").read_text(encoding="utf-8")
    return ReportResult(comparison=json.loads(content))
