"""Reading finished runs: folders that `bench` or `distill` wrote. Errors name the file.

    bench     counts from records.jsonl (or, without it, summary.json), and from summary.json the
              expected acceptance of draft models (`bench.expected`)
    distill   run.json: the setting, and the expected acceptance, under `results`:

        drafter, objective, forcing, beams, teacher_temperature, top_k (null: all logprobs), seed,
        target, alpha, alpha_before, gamma, tau_predicted, speedup_predicted, decoding_temperature,
        quality, quality_metric, answer_tokens, store_bytes (of the trajectories),
        by_language {name: {alpha, tau_predicted, ..}}

All keys are optional, and others may stand there too; a value of another type is an error. The
run's `options` belong to the setting as well. Where a bench measured the drafter of a distil run,
both become one: the setting comes from the one, the measurement from the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.bench.compare.model import (
    FACTORS,
    UNDISTILLED,
    RunMetrics,
    options_of,
)
from draftsmith.bench.records import BASELINE, TRANSFORMERS, DrafterMetrics, drafter_metrics, read
from draftsmith.config import field_types, from_dict
from draftsmith.core.speedup import tokens_per_step
from draftsmith.core.verify import lossy_sentence
from draftsmith.errors import InputError

T = TypeVar("T")

_EXPECTED = ("alpha", "tau_predicted")
_SHARE = (*_EXPECTED, "tau", "speedup", "speedup_predicted", "quality")
_OF_TRAINING = ("drafter", "objective", "forcing", "beams", "teacher_temperature", "seed")
_RESULTS = (*_SHARE, *_OF_TRAINING, "decoding_temperature", "target", "quality_metric")
"""The keys of a run.json that are read as they are."""


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


def fields_of(cls: type[T], values: object, where: str, names: Iterable[str] | None = None) -> T:
    """Build a dataclass from those keys that it has (and that are in `names`)."""
    if not isinstance(values, Mapping):
        raise InputError(f"expected an object in {where}, got {values!r}")
    known = set(field_types(cls)) if names is None else {*names, "label"}
    return from_dict(cls, {k: v for k, v in values.items() if k in known}, where=where)


def _share(whole: RunMetrics, values: object, where: str, names: Iterable[str]) -> dict[str, Any]:
    """Read the metrics of a part of the prompts."""
    if isinstance(values, Mapping):
        values = {**values, "label": whole.label}
    own = fields_of(RunMetrics, values, where, names)
    return {name: getattr(own, name) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """The metrics of parts of the prompts."""

    by_language: dict[str, Any] = field(default_factory=dict)
    by_tag: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Summarised:
    """A drafter in summary.json."""

    name: str
    temperature: float
    tokens_per_step: float | None = None
    acceptance_rate: float | None = None
    speedup: float | None = None
    predicted_speedup: float | None = None
    lossy_rule: str | None = None
    expected: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Training:
    """Results of a distil run that have other names, or belong to no single setting."""

    answer_tokens: int | None = None
    store_bytes: int | None = None
    alpha_before: float | None = None
    gamma: int | None = None
    """Draft length of `tau_predicted`, where the closed formula made it of `alpha`."""
    top_k: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """A distil run: its metrics over all prompts, then by language and tag."""

    runs: tuple[RunMetrics, ...]
    training: _Training


def read_runs(paths: Sequence[Path]) -> tuple[RunMetrics, ...]:
    """Return the metrics of finished runs, in the order given.

    Raises:
        InputError: a folder that holds no run, or a file that cannot be used; it is named.
    """
    measured: list[RunMetrics] = []
    trained: dict[Path, _Trained] = {}
    for path in paths:
        if (path / "records.jsonl").is_file() or (path / "summary.json").is_file():
            measured += _benched(path)
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


# --------------------------------------------------------------------------- bench


def _benched(folder: Path) -> Iterator[RunMetrics]:
    """Yield metrics over all prompts, then (where there are records) by language and tag."""
    path = folder / "summary.json"
    target, entries = _summary(path) if path.is_file() else (None, [])
    expected = {(one.name, one.temperature): one.expected for one in entries}
    parts: list[tuple[dict[str, Any], Sequence[DrafterMetrics | _Summarised]]] = [({}, entries)]
    rules = [entry.lossy_rule for entry in entries]
    if (folder / "records.jsonl").is_file():
        records = read(folder / "records.jsonl")
        rules = [record.lossy_rule for record in records]
        parts = [({}, drafter_metrics(records))]
        for kind in ("language", "tag"):
            for name in dict.fromkeys(getattr(record, kind) for record in records):
                if name is not None:
                    own = [record for record in records if getattr(record, kind) == name]
                    parts.append(({kind: name}, drafter_metrics(own)))
    for rule in rules:
        if rule is not None:  # tokens of another law are no rival to those of the target's
            raise InputError(
                f"{folder} cannot be ranked with other runs: {lossy_sentence(rule)}; leave it out."
            )
    for part, metrics in parts:
        for entry in metrics:
            if entry.name in (BASELINE, TRANSFORMERS):
                continue
            run = RunMetrics(
                label=entry.name,
                target=target,
                decoding_temperature=entry.temperature,
                tau=entry.tokens_per_step,
                alpha_decoded=entry.acceptance_rate,
                speedup=entry.speedup,
                speedup_predicted=entry.predicted_speedup,
                **part,
            )
            found = expected.get((entry.name, entry.temperature))
            yield run if found is None else _with_expected(run, found, str(path))


def _summary(path: Path) -> tuple[str | None, list[_Summarised]]:
    values = read_json(path)
    drafters, target = values.get("drafters"), values.get("target")
    if not isinstance(drafters, list):
        raise InputError(f"{path} has no list of drafters: `draftsmith bench` did not write it.")
    if target is not None and not isinstance(target, str):
        raise InputError(f"option target in {path}: expected str or none, got {target!r}")
    return target, [fields_of(_Summarised, one, str(path)) for one in drafters]


def _with_expected(run: RunMetrics, expected: Mapping[str, Any], where: str) -> RunMetrics:
    whole, parts = _share(run, expected, where, _EXPECTED), fields_of(_Parts, expected, where)
    if not run.is_part:
        return replace(run, **whole)
    known = parts.by_language if run.language is not None else parts.by_tag
    part = known.get(run.language or run.tag or "")
    return run if part is None else replace(run, **_share(run, part, where, _EXPECTED))


# --------------------------------------------------------------------------- distill


def _distilled(folder: Path) -> _Trained:
    path = folder / "run.json"
    values = read_json(path)
    given = values.get("results")
    if not isinstance(given, Mapping):
        raise InputError(f"{path} has no results: the run did not end, or wrote none.")
    whole = fields_of(RunMetrics, {**given, "label": str(folder)}, str(path), _RESULTS)
    training, parts = (fields_of(cls, given, str(path)) for cls in (_Training, _Parts))
    assert isinstance(training, _Training) and isinstance(parts, _Parts)
    if whole.objective is None and whole.alpha is None and whole.tau is None:
        raise InputError(
            f"{path} holds no figures to compare (objective, alpha or tau): "
            f"it was written by `draftsmith {values.get('verb')}`."
        )
    seed, top_k = values.get("seed"), training.top_k
    whole = replace(
        whole,
        # without the key nothing is known; null stands for all logprobs
        truncation=None if "top_k" not in given else "full" if top_k is None else f"top-{top_k}",
        options=options_of(values.get("options"), given, str(path)),
        seed=seed if whole.seed is None and type(seed) is int else whole.seed,
        storage_tokens=training.answer_tokens,
        storage_bytes=training.store_bytes,
    )
    out = [whole]
    for kind, shares in (("language", parts.by_language), ("tag", parts.by_tag)):
        for name, share in shares.items():
            own = _share(whole, share, f"{path}, by_{kind}, {name}", _SHARE)
            out.append(replace(whole, **{**own, kind: name}))
    return _Trained(runs=tuple(out), training=training)


def _undistilled(trained: Sequence[_Trained]) -> Iterator[RunMetrics]:
    """Yield the draft model that all runs began with, where all measured the same at first."""
    trained = [one for one in trained if one.runs[0].drafter is None]  # networks begin with noise
    if any(one.runs[0].objective == UNDISTILLED for one in trained):
        return
    found: dict[tuple[str | None, float | None], list[_Training]] = {}
    for one in trained:
        whole = one.runs[0]
        found.setdefault((whole.target, whole.decoding_temperature), []).append(one.training)
    for (target, temperature), some in found.items():
        befores = {None if one.alpha_before is None else round(one.alpha_before, 6) for one in some}
        gammas = {one.gamma for one in some if one.gamma is not None}  # older runs have none
        (alpha, *others) = befores
        if not others and alpha is not None:
            tau = float(tokens_per_step(alpha, gammas.pop())) if len(gammas) == 1 else None
            yield RunMetrics(
                label="before distillation",
                objective=UNDISTILLED,
                target=target,
                decoding_temperature=temperature,
                alpha=alpha,
                tau_predicted=tau,
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
            out.append(replace(run, label=short))
        else:
            used.add(path)
            out.append(replace(_join(run, trained[path].runs), label=labels[path]))
    for path, one in trained.items():
        if path not in used:
            out += [replace(run, label=labels[path]) for run in one.runs]
    return out


def _join(run: RunMetrics, trained: Sequence[RunMetrics]) -> RunMetrics:
    whole = trained[0]
    part = next((t for t in trained if (t.language, t.tag) == (run.language, run.tag)), None)
    # what was expected at another temperature is not what was measured here; and a bench's own
    # metrics, of its own prompts, go before those of held-out texts, both together
    fits = part is not None and part.decoding_temperature in (None, run.decoding_temperature)
    expected = part if part is not None and fits and run.alpha is None else run
    settings = (*FACTORS, "options", "seed", "storage_tokens", "storage_bytes", "quality_metric")
    return replace(
        run,
        **{name: getattr(whole, name) for name in settings},
        **{name: getattr(expected, name) for name in _EXPECTED},
        quality=None if part is None else part.quality,
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
