"""Pooling runs: seeds into settings, settings into a ranking."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from math import isnan

import pandas as pd

from draftsmith.bench.compare.model import (
    FACTORS,
    MEASURES,
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

_SCOPE = ["target", "decoding_temperature"]
_PART = ["language", "tag"]


def compare(runs: Sequence[RunMetrics], *, base: str | None = None) -> Comparison:
    """Pool seeds and rank settings.

    Args:
        base: label of the undistilled draft; None: the runs whose objective is `none`.

    Raises:
        InputError: nothing to compare, a run that is there twice, or an unknown base.
    """
    if not runs:
        raise InputError("There are no runs to compare: give folders of bench or distill.")
    labels = {run.label for run in runs}
    if base is not None and base not in labels:
        raise InputError(f"No run is called {base!r}{nearest(base, labels)}.")
    runs = [_named(replace(r, objective=UNDISTILLED) if r.label == base else r) for r in runs]
    table = _table(runs)
    double = table[table.duplicated(["label", "seed", *_SCOPE, *_PART])]
    if len(double):
        raise InputError(
            f"The run {double.iloc[0].label!r} is there twice with the same seed, target and "
            "temperature: give every run once."
        )
    runs = only_varying(runs)
    notes: list[str] = []
    scopes = [_scope(own, notes) for own in _groups(_table(runs), _SCOPE)]
    return Comparison(runs=tuple(runs), scopes=tuple(scopes), notes=tuple(dict.fromkeys(notes)))


def pool(values: Sequence[float] | pd.Series) -> Pooled:
    """Return the mean and half of its 95 % interval, by Student's t: there are few seeds."""
    from scipy.stats import t

    known = pd.Series(values, dtype=float)
    count = len(known)
    half = float(t.ppf(0.975, count - 1) * known.sem()) if count > 1 else None
    return Pooled(mean=float(known.mean()), half=half, count=count)


def _table(runs: Sequence[RunMetrics]) -> pd.DataFrame:
    """Make a row per run. Columns hold objects, so that None stays None."""
    columns = [field.name for field in fields(RunMetrics)]
    return pd.DataFrame([[getattr(run, c) for c in columns] for run in runs], None, columns, object)


def _groups(table: pd.DataFrame, columns: list[str]) -> Iterator[pd.DataFrame]:
    """Yield groups in order of first appearance; None is a value like any other."""
    return (own for _, own in table.groupby(columns, sort=False, dropna=False))


def _named(run: RunMetrics) -> RunMetrics:
    """Call languages by their English names, so that codes and names meet."""
    known = None if run.language is None else find(run.language)
    return run if known is None else replace(run, language=known.name)


def _scope(table: pd.DataFrame, notes: list[str]) -> Scope:
    groups = list(_by_setting(table, notes))
    wholes = [_wholes(runs) for _, runs in groups]
    known = [m for m in RANKING if any(own[m].notna().any() for own in wholes)]
    ranked_by = known[0] if known else RANKING[0]
    means = [own[ranked_by].astype(float).mean() for own in wholes]
    order = sorted(
        range(len(groups)), key=lambda i: math.inf if means[i] != means[i] else -means[i]
    )
    names = describe([groups[i][0] for i in order])
    entries = [
        RankedSetting(
            setting=groups[i][0],
            name=name,
            rank=None if isnan(means[i]) else place,
            seeds=len(wholes[i]),
            metrics={m: pool(own) for m in MEASURES if len(own := wholes[i][m].dropna())},
            quality_metric=next(iter(wholes[i].quality_metric.dropna()), None),
            storage_tokens=max(wholes[i].storage_tokens.dropna(), default=None),
            storage_bytes=max(wholes[i].storage_bytes.dropna(), default=None),
            by_language=_by_part(groups[i][1], "language", ranked_by),
            by_tag=_by_part(groups[i][1], "tag", ranked_by),
        )
        for place, (i, name) in enumerate(zip(order, names, strict=True), start=1)
    ]
    first = table.iloc[0]
    return Scope(
        target=first.target,
        decoding_temperature=first.decoding_temperature,
        ranked_by=ranked_by,
        entries=tuple(entries),
    )


def _by_setting(table: pd.DataFrame, notes: list[str]) -> Iterator[tuple[RunSetting, pd.DataFrame]]:
    """Yield the runs of each setting. Two runs of one seed are no two samples of one setting:
    something that is not recorded here differs, so each stands for itself, by its label."""
    for runs in _groups(table, [*FACTORS, "options"]):
        first = runs.iloc[0]
        setting = RunSetting(**{name: first[name] for name in (*FACTORS, "options")})
        seeds = runs.drop_duplicates(["label", "seed"])
        clash = seeds.seed.duplicated().any()
        if clash and setting.objective is not None:
            notes.append(
                f"{', '.join(sorted(set(seeds.label)))}: same setting and seed, so they are not "
                "pooled, and figures that show one factor leave them out."
            )
        if clash or setting.objective is None:
            for own in _groups(runs, ["label"]):
                yield replace(setting, label=own.iloc[0].label), own
        else:
            yield setting, runs


def _wholes(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per seed: the run over all prompts, or the mean over its languages (tags)."""
    rows = []
    for own in _groups(runs, ["label", "seed"]):
        whole = own[own[_PART].isna().all(axis=1)]
        parts = own[own.language.notna()] if own.language.notna().any() else own
        row = (whole if len(whole) else parts).iloc[0].copy()
        if not len(whole):
            # a mean over some of the languages would be compared with one over all
            row[list(MEASURES)] = parts[list(MEASURES)].astype(float).mean(skipna=False)
        rows.append(row)
    return pd.DataFrame(rows)


def _by_part(runs: pd.DataFrame, part: str, measure: str) -> dict[str, Pooled]:
    """Pool the metric that ranks per language or tag."""
    known = runs[runs[measure].notna()]
    return {str(name): pool(own[measure]) for name, own in known.groupby(part, sort=False)}
