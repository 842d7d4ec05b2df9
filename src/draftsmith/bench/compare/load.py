"""Reading finished runs: folders that `bench` or `distill` wrote.

    bench     see `compare_benches`: what decoding gave, per drafter, and what was expected
    distill   run.json: the setting, and what was expected, under `results`:

        drafter, objective, forcing, beams, teacher_temperature, top_k (null: whole laws), seed,
        target, alpha, alpha_before, gamma, tau_predicted, speedup_predicted, decoding_temperature,
        quality, quality_metric, answer_tokens, store_bytes (of the trajectories),
        by_language {name: {alpha, tau_predicted, ..}}

All are optional, others may stand there too; a value of another type is an error. Its `options`
belong to the setting as well (`compare_options`). Where a bench measured the drafter of a distil
run, both become one: the setting comes from the one, the measurement from the other.

Reading the files of finished runs for a comparison; what is wrong in them is named.

What `draftsmith bench` leaves, for a comparison: counts from records.jsonl (or, without it,
summary.json), and from summary.json what was expected of draft models (`recipes._expected`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.bench.compare.model import UNDISTILLED, RunMetrics, options_of
from draftsmith.bench.metrics import DrafterMetrics, drafter_metrics
from draftsmith.bench.records import BASELINE, TRANSFORMERS, RunRecord, read
from draftsmith.config import field_types, from_dict
from draftsmith.core.speedup import tokens_per_step
from draftsmith.core.verify import lossy_sentence
from draftsmith.errors import InputError

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} is not JSON ({error.msg} at line {error.lineno}): it was cut short or edited."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no JSON object.")
    return values


def optional_text(values: Mapping[str, Any], key: str, path: Path) -> str | None:
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise InputError(f"option {key} in {path}: expected str or none, got {value!r}")
    return value


def fields_of(cls: type[T], values: object, where: str) -> T:
    """A dataclass from those keys that it has; the rest is for other readers."""
    if not isinstance(values, Mapping):
        raise InputError(f"expected an object in {where}, got {values!r}")
    kinds = field_types(cls)
    return from_dict(cls, {k: v for k, v in values.items() if k in kinds}, where=where)


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


def bench_records(folder: Path) -> list[RunMetrics]:
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


def bench_summary(folder: Path) -> list[RunMetrics]:
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


def _with_expected(run: RunMetrics, expected: Mapping[str, Any] | None, path: Path) -> RunMetrics:
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


def _of_records(records: Sequence[RunRecord], target: str | None) -> list[RunMetrics]:
    found = (
        entry for entry in drafter_metrics(records) if entry.name not in (BASELINE, TRANSFORMERS)
    )
    return [_figures(entry, target) for entry in found]


def _figures(entry: DrafterMetrics | _Summarised, target: str | None) -> RunMetrics:
    return RunMetrics(
        label=entry.name,
        target=target,
        decoding_temperature=entry.temperature,
        tau=entry.tokens_per_step,
        alpha_decoded=entry.acceptance_rate,
        speedup=entry.speedup,
        speedup_predicted=entry.predicted_speedup,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """What a distil run may say about one language or tag."""

    alpha: float | None = None
    tau: float | None = None
    tau_predicted: float | None = None
    speedup: float | None = None
    speedup_predicted: float | None = None
    quality: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Results:
    """What is looked at of a distil run's `results`."""

    drafter: str | None = None
    objective: str | None = None
    forcing: str | None = None
    beams: int | None = None
    teacher_temperature: float | None = None
    seed: int | None = None
    decoding_temperature: float | None = None
    target: str | None = None
    alpha: float | None = None
    tau: float | None = None
    tau_predicted: float | None = None
    speedup: float | None = None
    speedup_predicted: float | None = None
    quality: float | None = None
    quality_metric: str | None = None
    answer_tokens: int | None = None
    store_bytes: int | None = None
    alpha_before: float | None = None
    gamma: int | None = None
    """Of `tau_predicted`, where the closed formula made it of `alpha`."""
    by_language: dict[str, Any] = field(default_factory=dict)
    by_tag: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TopK:
    top_k: int | None
    """None: whole laws. (Absent: unknown, and then there is no `_TopK`.)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """A distil run: its figures over all, then by language and tag."""

    runs: tuple[RunMetrics, ...]
    alpha_before: float | None
    gamma: int | None


def read_runs(paths: Sequence[Path]) -> tuple[RunMetrics, ...]:
    """The figures of finished runs, in the order given.

    Raises:
        InputError: a folder that holds no run, or a file that cannot be used; it is named.
    """
    measured: list[RunMetrics] = []
    trained: dict[Path, _Trained] = {}
    for path in paths:
        if (path / "records.jsonl").is_file():
            measured += bench_records(path)
        elif (path / "summary.json").is_file():
            measured += bench_summary(path)
        elif (path / "run.json").is_file():
            trained[path] = _distilled(path)
        else:
            what = "holds no run" if path.is_dir() else "is no folder"
            raise InputError(
                f"{path} {what}: give folders that `draftsmith bench` or a distil run wrote "
                "(records.jsonl, summary.json or run.json in them)."
            )
    out = _joined(measured, trained)
    return tuple(out if measured else [*out, *_undistilled(list(trained.values()))])


# --------------------------------------------------------------------------- distill


def _distilled(folder: Path) -> _Trained:
    path = folder / "run.json"
    values = read_json(path)
    given = values.get("results")
    if not isinstance(given, Mapping):
        raise InputError(f"{path} has no results: the run did not end, or wrote none.")
    results = fields_of(_Results, given, str(path))
    if results.objective is None and results.alpha is None and results.tau is None:
        verb = values.get("verb")
        raise InputError(
            f"{path} holds no figures to compare (objective, alpha or tau): "
            f"it was written by `draftsmith {verb}`."
        )
    truncation = None
    if "top_k" in given:
        top_k = fields_of(_TopK, given, str(path)).top_k
        truncation = "full" if top_k is None else f"top-{top_k}"
    seed = results.seed
    if seed is None and type(values.get("seed")) is int:
        seed = values["seed"]
    whole = RunMetrics(
        label=str(folder),
        drafter=results.drafter,
        objective=results.objective,
        forcing=results.forcing,
        beams=results.beams,
        teacher_temperature=results.teacher_temperature,
        truncation=truncation,
        options=options_of(values.get("options"), given, str(path)),
        decoding_temperature=results.decoding_temperature,
        target=results.target,
        seed=seed,
        alpha=results.alpha,
        tau=results.tau,
        tau_predicted=results.tau_predicted,
        speedup=results.speedup,
        speedup_predicted=results.speedup_predicted,
        quality=results.quality,
        quality_metric=results.quality_metric,
        storage_tokens=results.answer_tokens,
        storage_bytes=results.store_bytes,
    )
    out = [whole]
    for language, share in results.by_language.items():
        part = _part(whole, share, f"{path}, by_language, {language}")
        out.append(dataclasses.replace(part, language=language))
    for tag, share in results.by_tag.items():
        part = _part(whole, share, f"{path}, by_tag, {tag}")
        out.append(dataclasses.replace(part, tag=tag))
    return _Trained(runs=tuple(out), alpha_before=results.alpha_before, gamma=results.gamma)


def _undistilled(trained: Sequence[_Trained]) -> list[RunMetrics]:
    """The draft model that all runs began with, where all measured the same before they did."""
    trained = [one for one in trained if one.runs[0].drafter is None]  # networks begin with noise
    wholes = [one.runs[0] for one in trained]
    if any(whole.objective == UNDISTILLED for whole in wholes):
        return []
    found: dict[tuple[str | None, float | None], list[_Trained]] = {}
    for one, whole in zip(trained, wholes, strict=True):
        found.setdefault((whole.target, whole.decoding_temperature), []).append(one)
    out = []
    for (target, temperature), some in found.items():
        befores = {None if one.alpha_before is None else round(one.alpha_before, 6) for one in some}
        gammas = {one.gamma for one in some if one.gamma is not None}  # older runs do not say
        (alpha, *others) = befores
        if not others and alpha is not None:
            tau = float(tokens_per_step(alpha, gammas.pop())) if len(gammas) == 1 else None
            out.append(
                RunMetrics(
                    label="before distillation",
                    objective=UNDISTILLED,
                    target=target,
                    decoding_temperature=temperature,
                    alpha=alpha,
                    tau_predicted=tau,
                )
            )
    return out


def _part(whole: RunMetrics, share: object, where: str) -> RunMetrics:
    own = fields_of(_Share, share, where)
    return dataclasses.replace(
        whole,
        alpha=own.alpha,
        tau=own.tau,
        tau_predicted=own.tau_predicted,
        speedup=own.speedup,
        speedup_predicted=own.speedup_predicted,
        quality=own.quality,
    )


# --------------------------------------------------------------------------- joining


def _joined(measured: Sequence[RunMetrics], trained: Mapping[Path, _Trained]) -> list[RunMetrics]:
    """Measurements of trained drafters take over their settings; all get short labels."""
    folders = _short([str(path.resolve()) for path in trained])
    sources = _short([run.label.partition(":")[2] or run.label for run in measured])
    labels = {path: folders[str(path.resolve())] for path in trained}
    out, used = [], set()
    for run in measured:
        source = run.label.partition(":")[2] or run.label
        path = _made(source, trained)
        if path is None:
            kind, colon, _ = run.label.partition(":")
            short = f"{kind}:{sources[source]}" if colon else sources[source]
            out.append(dataclasses.replace(run, label=short))
        else:
            used.add(path)
            out.append(dataclasses.replace(_join(run, trained[path].runs), label=labels[path]))
    for path, one in trained.items():
        if path not in used:
            out += [dataclasses.replace(run, label=labels[path]) for run in one.runs]
    return out


def _join(run: RunMetrics, trained: Sequence[RunMetrics]) -> RunMetrics:
    whole = trained[0]
    same = [t for t in trained if (t.language, t.tag) == (run.language, run.tag)]
    part = same[0] if same else None
    # what was expected at another temperature is not what was measured here; and a bench's own
    # figures, of its own prompts, go before those of held-out texts, both together
    fits = part is not None and part.decoding_temperature in (None, run.decoding_temperature)
    expected = part if part is not None and fits and run.alpha is None else run
    return dataclasses.replace(
        run,
        drafter=whole.drafter,
        objective=whole.objective,
        forcing=whole.forcing,
        beams=whole.beams,
        teacher_temperature=whole.teacher_temperature,
        truncation=whole.truncation,
        options=whole.options,
        seed=whole.seed,
        storage_tokens=whole.storage_tokens,
        storage_bytes=whole.storage_bytes,
        quality=None if part is None else part.quality,
        quality_metric=whole.quality_metric,
        alpha=expected.alpha,
        tau_predicted=expected.tau_predicted,
    )


def _made(source: str, trained: Mapping[Path, object]) -> Path | None:
    """The one folder among these that a drafter's name means.

    A record names it relative to where the bench ran, or, outside of that, cut to `.../name`.
    """
    parts = tuple(part for part in Path(source).parts if part not in ("...", "..", "~", "/"))
    ends = [path for path in trained if parts and path.resolve().parts[-len(parts) :] == parts]
    return ends[0] if len(ends) == 1 else None


def _short(names: Sequence[str]) -> dict[str, str]:
    """Per path, as many of its last parts as tell it from the others."""
    paths = {name: Path(name).parts for name in names}
    deepest = max((len(parts) for parts in paths.values()), default=1)
    out: dict[str, str] = {}
    for name, parts in paths.items():
        for count in range(1, deepest + 1):
            ends = [other[-count:] for other in paths.values()]
            if ends.count(parts[-count:]) == 1:
                break
        out[name] = "/".join(parts[-count:])
    return out
