"""`draftsmith plan check`: what a ladder predicted, beside what was measured later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from draftsmith.commands._options import VerbOptions, holds_out
from draftsmith.commands._tables import finish, say, show
from draftsmith.config import Leading, require
from draftsmith.errors import InputError
from draftsmith.provenance import recorded, start_run

if TYPE_CHECKING:
    from draftsmith.plan.ladder import Benched, Measured

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


@holds_out
def run(options: PlanCheckOptions) -> dict[str, Any]:
    """Read, compare, print, draw."""
    from draftsmith.plan.ladder import PREDICTED_KIND, compare, read_predictions

    record = start_run("plan check", options, out=options.out)
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
    judged = [row.inside for row in rows if row.kind == PREDICTED_KIND and row.inside is not None]
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
    inside = sum(judged)
    if judged:
        figures = f"{inside} of {len(judged)} figures of pre-trained drafts"
        say([figures], "inside the interval")
    return finish(
        record,
        options.out,
        {"comparisons": rows, "inside": inside, "judged": len(judged), "warnings": warnings},
        name="check.json",
        draw=lambda plots: [plots.predicted_measured.draw(predictions, rows)],
    )


# --------------------------------------------------------------------------- what a bench measured


def read_measured(folders: Sequence[Path]) -> list[Measured]:
    """Read all figures, those of whole drafts (observations.csv) first.

    Raises:
        InputError: a folder that no bench wrote, or a file of one that cannot be read.
    """
    from draftsmith.plan.ladder import read_rates

    for folder in folders:
        if not any((folder / name).is_file() for name in _FILES):
            raise InputError(
                f"--records {folder} holds none of {', '.join(_FILES)}: give folders that `bench` "
                "wrote"
            )
    tables = [folder / _FILES[0] for folder in folders]
    observed = [one for path in tables if path.is_file() for one in read_rates(path)]
    return observed + [one for folder in folders for one in _benched(folder)]


def _benched(folder: Path) -> Iterator[Measured]:
    """Yield the figures of the records, or of the summary where they are not there."""
    from draftsmith.bench.records import BASELINE
    from draftsmith.plan.ladder import Estimate, Measured

    path = next((folder / name for name in _FILES[1:] if (folder / name).is_file()), None)
    if path is None:
        return
    gamma = _draft_length(folder)
    for entry in _from_records(path) if path.suffix == ".jsonl" else _from_summary(path):
        if entry.name == BASELINE or entry.lossy_rule is not None:
            continue
        found = {
            ("alpha", None): (entry.alpha, ()),
            ("tau", gamma): (entry.tokens_per_step, ()),
            ("speedup", gamma): (entry.speedup, entry.speedup_ci95 or ()),
        }
        yield Measured(
            draft=entry.name,
            temperature=entry.temperature,
            values={
                quantity: Estimate(value, *ends)
                for quantity, (value, ends) in found.items()
                if value is not None
            },
            source=str(path),
        )


def _from_records(path: Path) -> Iterator[Benched]:
    """Yield the metrics of each drafter, with its acceptance at all depths together."""
    from draftsmith.bench import records
    from draftsmith.plan.ladder import Benched

    lines = records.read(path)
    for one in records.drafter_metrics(lines):
        mine = [r for r in lines if (r.drafter, r.temperature) == (one.name, one.temperature)]
        depths = records.offers_by_position(mine)
        tried, accepted = (sum(depth[place] for depth in depths) for place in (0, 1))
        yield Benched(
            name=one.name,
            temperature=one.temperature,
            alpha=accepted / tried if tried else None,
            tokens_per_step=one.tokens_per_step,
            speedup=one.speedup,
            speedup_ci95=one.speedup_ci95,
            lossy_rule=one.lossy_rule,
        )


def _from_summary(path: Path) -> Iterator[Benched]:
    from draftsmith.plan.ladder import Benched
    from draftsmith.plan.observations import part_of

    entries = recorded(path, "drafters")
    if not isinstance(entries, list):
        raise InputError(f"{path} is no summary of a bench")
    for number, entry in enumerate(entries, start=1):
        yield part_of(Benched, entry, f"{path}, drafter {number}")


def _draft_length(folder: Path) -> int | None:
    """Return the draft length by run.json; None: the drafters' own, a changing one, or not
    recorded."""
    length = recorded(folder / "run.json", "options", "drafting", "draft_length")
    return length if type(length) is int else None
