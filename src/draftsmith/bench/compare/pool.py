"""Pooling runs: seeds into settings, settings into a ranking."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from draftsmith.bench.compare.model import (
    RANKING,
    UNDISTILLED,
    Comparison,
    Pooled,
    RankedSetting,
    RunMetrics,
    RunSetting,
    Scope,
    describe,
    only_varying,
)
from draftsmith.data.languages import find
from draftsmith.errors import InputError, nearest

X = TypeVar("X")
K = TypeVar("K", bound=Hashable)


def compare(runs: Sequence[RunMetrics], *, base: str | None = None) -> Comparison:
    """Pool seeds and rank settings.

    Args:
        base: label of the undistilled draft; None: the runs whose objective is `none`.

    Raises:
        InputError: nothing to compare, a run that is there twice, or an unknown base.
    """
    if not runs:
        raise InputError("There are no runs to compare: give folders of bench or distill.")
    runs = [_named(run) for run in runs]
    if base is not None:
        labels = {run.label for run in runs}
        if base not in labels:
            raise InputError(f"No run is called {base!r}{nearest(base, labels)}.")
        runs = [
            dataclasses.replace(r, objective=UNDISTILLED) if r.label == base else r for r in runs
        ]
    _refuse_doubles(runs)
    runs = only_varying(runs)
    scopes, notes = [], []
    for (target, temperature), own in _grouped(
        runs, lambda run: (run.target, run.decoding_temperature)
    ).items():
        groups, said = _by_setting(own)
        notes += said
        scopes.append(_scope(target, temperature, groups))
    return Comparison(runs=tuple(runs), scopes=tuple(scopes), notes=tuple(dict.fromkeys(notes)))


def pool(values: Sequence[float]) -> Pooled:
    """Mean and half of its 95 % interval, by Student's t: there are few seeds."""
    from scipy.stats import t

    mean = statistics.fmean(values)
    if len(values) < 2:
        return Pooled(mean=mean, half=None, count=len(values))
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(t.ppf(0.975, len(values) - 1)) * error
    return Pooled(mean=mean, half=half, count=len(values))


# --------------------------------------------------------------------------- inside


def _named(run: RunMetrics) -> RunMetrics:
    """Languages by their English names, so that codes and names meet."""
    known = None if run.language is None else find(run.language)
    return run if known is None else dataclasses.replace(run, language=known.name)


def _refuse_doubles(runs: Sequence[RunMetrics]) -> None:
    seen = set()
    for run in runs:
        key = (
            run.label,
            run.seed,
            run.target,
            run.decoding_temperature,
            run.language,
            run.tag,
        )
        if key in seen:
            raise InputError(
                f"The run {run.label!r} is there twice with the same seed, target and temperature: "
                "give every run once."
            )
        seen.add(key)


def _setting(run: RunMetrics, *, label: bool) -> RunSetting:
    return RunSetting(
        drafter=run.drafter,
        objective=run.objective,
        forcing=run.forcing,
        beams=run.beams,
        teacher_temperature=run.teacher_temperature,
        truncation=run.truncation,
        options=run.options,
        label=run.label if label else None,
    )


def _by_setting(
    runs: Sequence[RunMetrics],
) -> tuple[dict[RunSetting, list[RunMetrics]], list[str]]:
    """Runs of each setting. Two runs of one seed are no two samples of one setting: something that
    is not recorded here differs, so each stands for itself, by its label."""
    out: dict[RunSetting, list[RunMetrics]] = {}
    notes = []
    for setting, own in _grouped(runs, lambda run: _setting(run, label=False)).items():
        identities = {(run.label, run.seed) for run in own}
        clash = len({seed for _, seed in identities}) < len(identities)
        if clash and setting.objective is not None:
            labels = ", ".join(sorted({label for label, _ in identities}))
            notes.append(
                f"{labels}: same setting and seed, so they are not pooled, and figures that show "
                "one factor leave them out."
            )
        for run in own:
            key = _setting(run, label=clash or setting.objective is None)
            out.setdefault(key, []).append(run)
    return out, notes


def _scope(
    target: str | None, temperature: float | None, groups: Mapping[RunSetting, Sequence[RunMetrics]]
) -> Scope:
    wholes = {setting: _wholes(runs) for setting, runs in groups.items()}
    present = {m for own in wholes.values() for m in RANKING if any(_values(own, m))}
    ranked_by = next((measure for measure in RANKING if measure in present), RANKING[0])
    order = sorted(
        groups,
        key=lambda setting: -statistics.fmean(_values(wholes[setting], ranked_by) or [-math.inf]),
    )
    names = describe(order)
    entries = []
    for place, (setting, name) in enumerate(zip(order, names, strict=True), start=1):
        ranked = bool(_values(wholes[setting], ranked_by))
        entries.append(
            _entry(
                setting,
                name,
                place if ranked else None,
                wholes[setting],
                [run for run in groups[setting] if run.is_part],
                ranked_by,
            )
        )
    return Scope(
        target=target,
        decoding_temperature=temperature,
        ranked_by=ranked_by,
        entries=tuple(entries),
    )


def _wholes(runs: Sequence[RunMetrics]) -> list[RunMetrics]:
    """One per seed: the run over all prompts, or the plain mean over its languages (tags)."""
    out = []
    for own in _grouped(runs, lambda run: (run.label, run.seed)).values():
        whole = [run for run in own if not run.is_part]
        parts = [run for run in own if run.language is not None] or own
        out.append(whole[0] if whole else _mean_of_parts(parts))
    return out


def _mean_of_parts(parts: Sequence[RunMetrics]) -> RunMetrics:
    def mean(measure: str) -> float | None:
        values = _values(parts, measure)
        # a mean over some of the languages would be compared with one over all
        return statistics.fmean(values) if len(values) == len(parts) else None

    return dataclasses.replace(
        parts[0],
        language=None,
        tag=None,
        tau=mean("tau"),
        tau_predicted=mean("tau_predicted"),
        alpha=mean("alpha"),
        alpha_decoded=mean("alpha_decoded"),
        speedup=mean("speedup"),
        speedup_predicted=mean("speedup_predicted"),
        quality=mean("quality"),
    )


def _entry(
    setting: RunSetting,
    name: str,
    rank: int | None,
    wholes: Sequence[RunMetrics],
    parts: Sequence[RunMetrics],
    ranked_by: str,
) -> RankedSetting:
    def pooled(measure: str) -> Pooled | None:
        values = _values(wholes, measure)
        return pool(values) if values else None

    return RankedSetting(
        setting=setting,
        name=name,
        rank=rank,
        seeds=len(wholes),
        tau=pooled("tau"),
        tau_predicted=pooled("tau_predicted"),
        alpha=pooled("alpha"),
        alpha_decoded=pooled("alpha_decoded"),
        speedup=pooled("speedup"),
        speedup_predicted=pooled("speedup_predicted"),
        quality=pooled("quality"),
        quality_metric=next((r.quality_metric for r in wholes if r.quality_metric), None),
        storage_tokens=_largest(r.storage_tokens for r in wholes),
        storage_bytes=_largest(r.storage_bytes for r in wholes),
        by_language=_pooled_parts(_grouped(parts, lambda run: run.language), ranked_by),
        by_tag=_pooled_parts(_grouped(parts, lambda run: run.tag), ranked_by),
    )


def _pooled_parts(
    groups: Mapping[str | None, Sequence[RunMetrics]], measure: str
) -> dict[str, Pooled]:
    return {
        name: pool(values)
        for name, own in groups.items()
        if name is not None and (values := _values(own, measure))
    }


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _values(runs: Sequence[RunMetrics], measure: str) -> list[float]:
    return [value for run in runs if (value := getattr(run, measure)) is not None]


def _grouped(items: Iterable[X], key: Callable[[X], K]) -> dict[K, list[X]]:
    """In order of first appearance."""
    out: dict[K, list[X]] = {}
    for item in items:
        out.setdefault(key(item), []).append(item)
    return out
