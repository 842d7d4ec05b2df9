"""`draftsmith plan check`: what a ladder predicted, beside what was measured later."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from draftsmith.commands._options import VerbOptions
from draftsmith.commands._tables import say, say_written, show
from draftsmith.config import Leading, require
from draftsmith.errors import InputError
from draftsmith.provenance import jsonable, start_run, write_json_atomic

if TYPE_CHECKING:
    from draftsmith.plan.ladder import RungComparison


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
    from draftsmith.commands.plan._measured import read_measured
    from draftsmith.plan.ladder import PREDICTED_KIND, compare, read_predictions

    record = start_run("plan check", options)
    predictions = read_predictions(options.predictions)
    found = read_measured(options.records)
    rows, said = compare(predictions, found)
    if not rows and not said:
        wanted = sorted(name for one in predictions for name in one.drafts.values())
        raise InputError(
            f"none of the drafts of {options.predictions} was measured in these folders: it is "
            f"about {', '.join(wanted)}; they hold "
            f"{', '.join(sorted({one.draft for one in found})) or 'none'}"
        )
    judged = [row for row in rows if row.kind == PREDICTED_KIND and row.inside is not None]
    payload: dict[str, Any] = jsonable(
        {
            "comparisons": [asdict(row) for row in rows],
            "inside": sum(row.inside is True for row in judged),
            "judged": len(judged),
            "warnings": said,
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
        [_cells(row) for row in rows],
    )
    say(said)
    if judged:
        inside = f"{payload['inside']} of {len(judged)} figures of pre-trained drafts"
        say([inside], "inside the interval")
    say_written(options.out)
    return payload


def _cells(row: RungComparison) -> tuple[str | float | None, ...]:
    inside = {True: "yes", False: "no", None: None}[row.inside]
    return (
        row.quantity,
        row.size,
        row.kind,
        row.temperature,
        row.predicted.text(),
        row.measured.text(),
        inside,
    )
