"""Reads what `bench` measured of draft models: acceptance, tokens per step, speed-up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.bench import records as bench_records
from draftsmith.bench.records import BASELINE, Interval, RunRecord, drafter_metrics
from draftsmith.core.speedup import acceptance_from_counts
from draftsmith.errors import InputError
from draftsmith.plan.ladder import Estimate, Measured
from draftsmith.plan.observations import CsvRow, read_rows

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
            for one in drafter_metrics(lines)
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


def _share(row: CsvRow) -> float:
    return row.number_where("alpha", lambda rate: 0 <= rate <= 1, "between 0 and 1")


def _optional(row: CsvRow, column: str) -> float | None:
    return row.number_of(column) if row.values.get(column, "").strip() else None
