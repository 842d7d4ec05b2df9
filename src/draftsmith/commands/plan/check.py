"""`draftsmith plan check`: what a ladder predicted, beside what was measured later."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from draftsmith.commands._options import VerbOptions
from draftsmith.commands._tables import say, say_written, show
from draftsmith.config import Leading, require
from draftsmith.errors import InputError
from draftsmith.provenance import jsonable, start_run, write_json_atomic

if TYPE_CHECKING:
    from draftsmith.plan.ladder import Measured
    from draftsmith.plan.observations import CsvRow

_TOKENS = re.compile(r"tokens_per_step_([1-9][0-9]*)")
_FILES = ("observations.csv", "records.jsonl", "summary.json")


@dataclass(frozen=True, kw_only=True)
class PlanCheckOptions(VerbOptions):
    """Set what `plan ladder` predicted beside what was measured later."""

    predictions: Annotated[Path, Leading]
    """The ladder.json."""
    records: tuple[Path, ...]
    """Folders that `bench` wrote, with and without --perplexity."""
    out: Path | None = None
    """Write check.json and a figure to this folder."""

    def validate(self) -> None:
        super().validate()
        require(bool(self.records), "--records must name at least one folder")


def run(options: PlanCheckOptions) -> dict[str, Any]:
    """Read, compare, print, draw."""
    from draftsmith.plan.ladder import PREDICTED_KIND, compare, read_predictions

    record = start_run("plan check", options)
    predictions = read_predictions(options.predictions)
    found = read_measured(options.records)
    rows, warnings = compare(predictions, found)
    if not rows and not warnings:
        wanted = sorted(name for one in predictions for name in one.drafts.values())
        raise InputError(
            f"none of the drafts of {options.predictions} was measured in these folders: it is "
            f"about {', '.join(wanted)}; they hold "
            f"{', '.join(sorted({one.draft for one in found})) or 'none'}"
        )
    judged = [row for row in rows if row.kind == PREDICTED_KIND and row.inside is not None]
    payload: dict[str, Any] = jsonable(
        {
            "comparisons": rows,
            "inside": sum(row.inside is True for row in judged),
            "judged": len(judged),
            "warnings": warnings,
        }
    )
    if options.out is not None:
        from draftsmith.plan.plots import predicted_measured, save

        save([predicted_measured.draw(predictions, rows)], options.out)
        write_json_atomic(options.out / "check.json", payload)
        record.write(options.out)
    show(
        "Predicted (before distillation) and measured",
        ("figure", "size", "draft", "temperature", "predicted", "measured", "inside"),
        [
            (
                *(row.quantity, row.size, row.kind, row.temperature),
                *(row.predicted.text(), row.measured.text()),
                {True: "yes", False: "no", None: None}[row.inside],
            )
            for row in rows
        ],
    )
    say(warnings)
    if judged:
        inside = f"{payload['inside']} of {len(judged)} figures of pre-trained drafts"
        say([inside], "inside the interval")
    say_written(options.out)
    return payload


# --------------------------------------------------------------------------- what a bench measured


def read_measured(folders: Sequence[Path]) -> list[Measured]:
    """Read all figures, those of whole drafts (observations.csv) first.

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
    from draftsmith.plan.ladder import Estimate, Measured
    from draftsmith.plan.observations import read_rows

    for row in read_rows(path, ("target", "draft", "alpha")) if path.is_file() else ():
        if row.values.get("protocol", "decoded") != "decoded":
            continue
        alpha = row.number_where("alpha", lambda rate: 0 <= rate <= 1, "between 0 and 1")
        margin, temperature = _optional(row, "moe"), _optional(row, "temperature")
        rate = Estimate(value=alpha)
        if margin is not None:
            low, high = max(alpha - margin, 0.0), min(alpha + margin, 1.0)
            rate = Estimate(value=alpha, low=low, high=high)
        found: list[tuple[str, Estimate, int | None]] = [("alpha", rate, None)]
        for length in filter(None, map(_TOKENS.fullmatch, row.values)):
            tokens = _optional(row, length[0])
            if tokens is not None:
                found.append(("tau", Estimate(value=tokens), int(length[1])))
        for quantity, value, gamma in found:
            yield Measured(
                draft=row.text("draft"),
                quantity=quantity,
                temperature=temperature,
                value=value,
                source=str(path),
                gamma=gamma,
            )


def _benched(folder: Path) -> Iterator[Measured]:
    """Yield the figures of the records, or of the summary where they are not there."""
    from draftsmith.bench.records import BASELINE
    from draftsmith.plan.ladder import Estimate, Measured

    gamma = _draft_length(folder)
    path = next((folder / name for name in _FILES[1:] if (folder / name).is_file()), None)
    if path is None:
        return
    for entry in _from_records(path) if path.suffix == ".jsonl" else _from_summary(path):
        if entry["name"] == BASELINE or entry.get("lossy_rule") is not None:
            continue
        low, high = entry.get("speedup_ci95") or (None, None)
        for quantity, value, ends in (
            ("alpha", entry.get("alpha"), {}),
            ("tau", entry.get("tokens_per_step"), {}),
            ("speedup", entry.get("speedup"), {"low": low, "high": high}),
        ):
            if value is not None:
                yield Measured(
                    draft=entry["name"],
                    quantity=quantity,
                    temperature=entry["temperature"],
                    value=Estimate(value=value, **ends),
                    source=str(path),
                    gamma=None if quantity == "alpha" else gamma,
                )


def _from_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each drafter, with its acceptance at all depths together."""
    import numpy as np

    from draftsmith.bench import records
    from draftsmith.core.speedup import acceptance_from_counts

    lines = records.read(path)
    for one in records.drafter_metrics(lines):
        mine = [r for r in lines if (r.drafter, r.temperature) == (one.name, one.temperature)]
        counts = np.array([pair for record in mine for pair in record.by_position])
        alpha = float(acceptance_from_counts(*counts.T)) if len(counts) else None
        yield {**asdict(one), "alpha": alpha}


def _from_summary(path: Path) -> list[dict[str, Any]]:
    try:
        entries: Any = json.loads(path.read_text(encoding="utf-8"))["drafters"]
        good = all({"name", "temperature"} <= set(entry) for entry in entries)
    except (OSError, ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise InputError(f"{path} is no summary of a bench")
    return list(entries)


def _draft_length(folder: Path) -> int | None:
    """Return the draft length by run.json; None: the drafters' own, a changing one, or not
    recorded."""
    try:
        record: Any = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        length = record["options"]["drafting"]["draft_length"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return length if type(length) is int else None


def _optional(row: CsvRow, column: str) -> float | None:
    return row.number_of(column) if row.values.get(column, "").strip() else None
