"""Scores that outlive a machine: a line for every exam that was sat, beside the record of a study.

    RESULTS/STUDY/marks.jsonl    {"run", "said", "of", "exam", "marks"}

Collections and weights are large and stay where the study works. What it says follows from marks
alone, so it goes on wherever these are: nothing is trained twice, and parts that were run on
different machines meet in one table. A line counts for a run of that name only where the run's
options (`said`, as far as they are unusual) and what all runs share (`of`) are the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evaluation import Evaluation, Scores
from study import Run, deciding

from draftsmith.commands.distill import DistillOptions
from draftsmith.provenance import append_jsonl, digest, jsonable

_USUAL = deciding(DistillOptions(target="", drafter="", out=Path()))


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The marks of a study."""

    path: Path
    of: str
    """Digest of what all runs have in common: models, training texts."""
    _lines: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines()):
            self._lines[line["run"], line["exam"]] = line  # the last word on a run
        others = sum(line["of"] != self.of for line in self._lines.values())
        if others:
            print(
                f"{others} of {len(self._lines)} exams in {self.path.name} are of other models or "
                "texts than the study's: they are left out",
                file=sys.stderr,
            )

    def find(self, run: Run, exam: Evaluation) -> Scores | None:
        line = self._lines.get((run.name, _sitting(run, exam)))
        if line is None or (line["of"], line["said"]) != (self.of, _said(run)):
            return None
        return Scores.from_json(line["marks"])

    def add(self, run: Run, exam: Evaluation, marks: Scores) -> None:
        line = {
            "run": run.name,
            "said": _said(run),
            "of": self.of,
            "exam": _sitting(run, exam),
            "marks": jsonable(asdict(marks)),
        }
        append_jsonl(self.path, line)
        self._lines[run.name, line["exam"]] = line


def _sitting(run: Run, exam: Evaluation) -> str:
    """The exam, and the tree of its own that a run brings to it."""
    return exam.key if run.tree is None else digest([exam.key, asdict(run.tree)])


def _said(run: Run) -> Mapping[str, Any]:
    """The options in which a run is unusual, and what it learnt from."""
    if run.options is None:
        return {}
    own = {name: value for name, value in deciding(run.options).items() if value != _USUAL[name]}
    return {**own, "stores": [folder.name for folder in run.options.store]}
