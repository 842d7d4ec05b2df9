"""What `draftsmith bench` leaves, for a comparison: counts from records.jsonl (or, without it,
summary.json), and from summary.json what was expected of draft models (`recipes._expected`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.bench.compare_figures import RunFigures
from draftsmith.bench.compare_files import fields_of, optional_text, read_json
from draftsmith.bench.records import BASELINE, TRANSFORMERS, RunRecord, read
from draftsmith.bench.statistics import DrafterFigures, figures
from draftsmith.errors import InputError
from draftsmith.verify import lossy_sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class _Expected:
    """What is looked at of a draft model's expected acceptance."""

    alpha: float | None = None
    tau_predicted: float | None = None
    by_language: dict[str, Any] = field(default_factory=dict)
    by_tag: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Summarised:
    """What is looked at of a drafter in summary.json."""

    name: str
    temperature: float
    tokens_per_step: float | None = None
    acceptance_rate: float | None = None
    speedup: float | None = None
    predicted_speedup: float | None = None
    lossy_rule: str | None = None
    expected: dict[str, Any] | None = None


def bench_records(folder: Path) -> list[RunFigures]:
    """Figures of records.jsonl: over all prompts, then by language and tag."""
    records = read(folder / "records.jsonl")
    _require_lossless(folder, [record.lossy_rule for record in records])
    path = folder / "summary.json"
    target, entries = _summary(path) if path.is_file() else (None, [])
    out = _of_records(records, target)
    for language in dict.fromkeys(r.language for r in records if r.language is not None):
        own = [record for record in records if record.language == language]
        out += [dataclasses.replace(run, language=language) for run in _of_records(own, target)]
    for tag in dict.fromkeys(r.tag for r in records if r.tag is not None):
        own = [record for record in records if record.tag == tag]
        out += [dataclasses.replace(run, tag=tag) for run in _of_records(own, target)]
    expected = {(one.name, one.temperature): one.expected for one in entries}
    return [
        _with_expected(run, expected.get((run.label, run.decoding_temperature or 0.0)), path)
        for run in out
    ]


def bench_summary(folder: Path) -> list[RunFigures]:
    """The same without records.jsonl: over all prompts alone."""
    path = folder / "summary.json"
    target, entries = _summary(path)
    _require_lossless(folder, [entry.lossy_rule for entry in entries])
    return [
        _with_expected(_figures(entry, target), entry.expected, path)
        for entry in entries
        if entry.name not in (BASELINE, TRANSFORMERS)
    ]


def _summary(path: Path) -> tuple[str | None, list[_Summarised]]:
    values = read_json(path)
    drafters = values.get("drafters")
    if not isinstance(drafters, list):
        raise InputError(f"{path} has no list of drafters: `draftsmith bench` did not write it.")
    return optional_text(values, "target", path), [
        fields_of(_Summarised, one, str(path)) for one in drafters
    ]


def _with_expected(run: RunFigures, expected: Mapping[str, Any] | None, path: Path) -> RunFigures:
    if expected is None:
        return run
    whole = fields_of(_Expected, expected, str(path))
    parts = whole.by_language if run.language is not None else whole.by_tag
    part = parts.get(run.language or run.tag or "") if run.is_part else expected
    if part is None:
        return run
    own = fields_of(_Expected, part, str(path))
    return dataclasses.replace(run, alpha=own.alpha, tau_predicted=own.tau_predicted)


def _require_lossless(folder: Path, rules: Iterable[str | None]) -> None:
    """Tokens that another law gave are no rival to those of the target's."""
    for rule in rules:
        if rule is not None:
            raise InputError(
                f"{folder} cannot be ranked with other runs: {lossy_sentence(rule)}; leave it out."
            )


def _of_records(records: Sequence[RunRecord], target: str | None) -> list[RunFigures]:
    found = (entry for entry in figures(records) if entry.name not in (BASELINE, TRANSFORMERS))
    return [_figures(entry, target) for entry in found]


def _figures(entry: DrafterFigures | _Summarised, target: str | None) -> RunFigures:
    return RunFigures(
        label=entry.name,
        target=target,
        decoding_temperature=entry.temperature,
        tau=entry.tokens_per_step,
        alpha_decoded=entry.acceptance_rate,
        speedup=entry.speedup,
        speedup_predicted=entry.predicted_speedup,
    )
