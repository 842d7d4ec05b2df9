"""Many finished runs side by side: what a run, a setting and a ranking are.

    run          one set of metrics: a trained and measured drafter (or its share in one language)
    setting      what was varied on purpose: runs that differ in the seed alone share one
    scope        target and decoding temperature: only settings of one scope are ranked together

The study that this follows is DistillBeam's (its tables 2 and 3). What a study varies on purpose
(`FACTORS`) has fields of its own. All other options that change the result of a distil run
stand in a flat list of (name, value), so that two runs with other tails, other steps or another
rate are never taken for two seeds of one setting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd

from draftsmith.data.languages import find
from draftsmith.errors import InputError, nearest
from draftsmith.provenance import digest

Option = str | int | float | bool | None
Options = tuple[tuple[str, Option], ...]
"""Names and values of a run's options, factors aside."""
UNDISTILLED = "none"
"""The objective of a draft model that was not distilled: what gains are counted from."""
FACTORS = ("drafter", "objective", "forcing", "beams", "teacher_temperature", "truncation")
"""What a study varies, one at a time."""
MEASURES = (
    "tau",
    "tau_predicted",
    "alpha",
    "alpha_decoded",
    "speedup",
    "speedup_predicted",
    "quality",
)
RANKING = ("tau", "tau_predicted", "alpha", "alpha_decoded")
"""Settings are ranked by the first of these that any of their scope has."""
_OBJECTIVES = {
    "kl": "forward KL",
    "rkl": "reverse KL",
    "jsd": "JSD",
    "hellinger": "Hellinger",
    "tvd": "TVD",
    "tvdpp": "TVD++",
    "lk": "LK",
    "sft": "SFT",
    UNDISTILLED: "no distillation",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMetrics:
    """The metrics of one run. None: not known, or without meaning."""

    label: str
    drafter: str | None = None
    """Kind and options of a network over the target's states; None: a draft model."""
    objective: str | None = None
    """As `distill` names it; `none`: the draft model before distillation."""
    forcing: str | None = None
    """Where the tokens of its trajectories came from."""
    beams: int | None = None
    teacher_temperature: float | None = None
    truncation: str | None = None
    """How much of the teacher's logprobs was kept: `full`, or `top-50`."""
    options: Options = ()
    """All other options that change the result, the seed aside."""
    decoding_temperature: float | None = None
    target: str | None = None
    seed: int | None = None
    alpha: float | None = None
    """Expected acceptance at `decoding_temperature`, token-weighted (`distill.acceptance`)."""
    alpha_decoded: float | None = None
    """Accepted / offered, counted while decoding."""
    tau: float | None = None
    """Tokens per step, counted while decoding."""
    tau_predicted: float | None = None
    """From `alpha`, by the closed formula; or from chains on held-out texts
    (`distill.evaluation`)."""
    speedup: float | None = None
    """Over plain decoding, by the clock."""
    speedup_predicted: float | None = None
    quality: float | None = None
    """How good the draft model's own texts are; the target's do not change."""
    quality_metric: str | None = None
    storage_tokens: int | None = None
    """Tokens in the trajectories of its training."""
    storage_bytes: int | None = None
    language: str | None = None
    """The metrics cover prompts in this language only."""
    tag: str | None = None
    """The metrics cover prompts of this kind only."""

    def __post_init__(self) -> None:
        for name in ("alpha", "alpha_decoded"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise InputError(f"{self.label}: {name} must be between 0 and 1, got {value}")
        for name in ("tau", "tau_predicted", "speedup", "speedup_predicted"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{self.label}: {name} must be positive, got {value}")

    @property
    def is_part(self) -> bool:
        """Whether it covers some of the prompts only."""
        return self.language is not None or self.tag is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSetting:
    """What runs of several seeds have in common; fields as in `RunMetrics`."""

    drafter: str | None
    objective: str | None
    forcing: str | None
    beams: int | None
    teacher_temperature: float | None
    truncation: str | None
    options: Options
    """Those in which runs of the comparison differ."""
    label: str | None = None
    """Where the others do not tell runs apart, or say nothing."""

    @property
    def has_several(self) -> bool:
        """Whether it learnt from several trajectories of a prompt; how many beams each one has is
        not known where the search chose (`--beams auto`)."""
        return (self.beams or 1) > 1 or (self.forcing == "beam" and self.beams is None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooled:
    """A mean over seeds."""

    mean: float
    half: float | None
    """Half of the 95 % interval (Student's t); None with one seed."""
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedSetting:
    """A setting with its pooled metrics."""

    setting: RunSetting
    name: str
    """Short, and unique within the scope."""
    rank: int | None
    """1 is best; None without the metric that ranks."""
    seeds: int
    metrics: Mapping[str, Pooled]
    """Those of `MEASURES` that are known."""
    quality_metric: str | None
    storage_tokens: int | None
    """Largest of its runs, as the next."""
    storage_bytes: int | None
    by_language: Mapping[str, Pooled]
    """The metric that ranks, per language."""
    by_tag: Mapping[str, Pooled]

    def value(self, measure: str) -> float | None:
        """Return the mean of one of `MEASURES`."""
        return self.metrics[measure].mean if measure in self.metrics else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """One language (or tag): the best setting there, against the undistilled draft."""

    name: str
    base: float
    best: RankedSetting
    best_value: float
    top_value: float | None
    """The value of the setting that ranks first over all; None when it is not known here."""

    @property
    def best_gain(self) -> float:
        return self.best_value / self.base - 1.0

    @property
    def top_gain(self) -> float | None:
        return None if self.top_value is None else self.top_value / self.base - 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Settings that can be ranked together."""

    target: str | None
    decoding_temperature: float | None
    ranked_by: str
    """One of `RANKING`."""
    entries: tuple[RankedSetting, ...]
    """Best first, those without rank last."""

    @property
    def base(self) -> RankedSetting | None:
        """The undistilled draft; None when there is none, or several."""
        found = [e for e in self.entries if e.setting.objective == UNDISTILLED]
        return found[0] if len(found) == 1 else None

    @property
    def top(self) -> RankedSetting | None:
        """What ranks first, the undistilled draft aside."""
        ranked = [e for e in self.entries if e is not self.base and e.rank is not None]
        return ranked[0] if ranked else None

    @property
    def title(self) -> str:
        parts = [] if self.target is None else [self.target]
        if self.decoding_temperature is not None:
            parts.append(f"decoding temperature {self.decoding_temperature:g}")
        return ", ".join(parts)

    def language_gains(self) -> tuple[Gain, ...]:
        """Return a gain per language, the largest best gain first."""
        return self._gains(lambda entry: entry.by_language)

    def tag_gains(self) -> tuple[Gain, ...]:
        """Return a gain per tag."""
        return self._gains(lambda entry: entry.by_tag)

    def _gains(self, part: Callable[[RankedSetting], Mapping[str, Pooled]]) -> tuple[Gain, ...]:
        base, top = self.base, self.top
        if base is None or top is None:
            return ()
        out = []
        for name, before in part(base).items():
            rivals = [e for e in self.entries if e is not base and name in part(e)]
            if not rivals:
                continue
            best = max(rivals, key=lambda entry: part(entry)[name].mean)
            first = part(top).get(name)
            out.append(
                Gain(
                    name=name,
                    base=before.mean,
                    best=best,
                    best_value=part(best)[name].mean,
                    top_value=None if first is None else first.mean,
                )
            )
        return tuple(sorted(out, key=lambda gain: -gain.best_gain))


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Runs with their rankings."""

    runs: tuple[RunMetrics, ...]
    scopes: tuple[Scope, ...]
    notes: tuple[str, ...]
    """How runs were put together, where it is not obvious."""

    @property
    def main(self) -> Scope:
        """The scope with most settings: what is drawn."""
        return max(self.scopes, key=lambda scope: len(scope.entries))


# --------------------------------------------------------------------------- names


def objective_name(objective: str | None) -> str:
    """Return the name of an objective in tables and plots."""
    return "" if objective is None else _OBJECTIVES.get(objective, objective)


def describe(settings: Sequence[RunSetting], factors: Sequence[str] = FACTORS) -> list[str]:
    """Give each setting a short name: its objective, and those of `factors` that differ.

    The usual temperature and truncation are not named. Options tell settings apart that would
    share a name.
    """
    usual = {name: _usual(settings, name) for name in ("teacher_temperature", "truncation")}
    varying = [name for name in factors if len({getattr(s, name) for s in settings}) > 1]
    parts = []
    for setting in settings:
        named = [n for n in varying if n not in usual or getattr(setting, n) != usual[n]]
        parts.append(_parts(setting, named))
    rivals: dict[tuple[str, ...], list[Options]] = {}
    for setting, own in zip(settings, parts, strict=True):
        rivals.setdefault(own, []).append(setting.options)
    telling = {own: _telling(some) for own, some in rivals.items()}
    names = []
    for setting, own in zip(settings, parts, strict=True):
        name = ", ".join((*own, *(say_option(n, setting.options) for n in telling[own])))
        label = setting.label
        names.append(name or label or "all" if not (name and label) else f"{name} ({label})")
    return names


def say_option(name: str, options: Options) -> str:
    """Put an option and its value in words: `tail floor`."""
    value = dict(options).get(name, "unknown")
    short = name.rpartition(".")[2].replace("_", " ")
    if isinstance(value, bool):
        value = "on" if value else "off"
    elif isinstance(value, float):
        value = f"{value:g}"
    return f"{short} {'none' if value is None else value}"


def _telling(some: Sequence[Options]) -> list[str]:
    """The first options that together tell these apart: others often follow from them, as the
    warm-up does from the duration."""
    known = [dict(options) for options in some]
    out: list[str] = []
    parts = [0] * len(some)
    for name in dict.fromkeys(name for own in known for name in own):
        keys = [(part, name in own, own.get(name)) for part, own in zip(parts, known, strict=True)]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        if len(numbers) > len(set(parts)):
            out.append(name)
            parts = [numbers[key] for key in keys]
    return out


def _usual(settings: Sequence[RunSetting], factor: str) -> object:
    """Return the most frequent value; None when it is unknown for some, which needs a name."""
    known = [getattr(s, factor) for s in settings if s.objective not in (None, UNDISTILLED)]
    if not known or None in known:
        return None
    return max(dict.fromkeys(known), key=known.count)


def _parts(setting: RunSetting, named: Sequence[str]) -> tuple[str, ...]:
    parts = [] if setting.objective is None else [objective_name(setting.objective)]
    if "drafter" in named and setting.drafter is not None:
        parts.insert(0, setting.drafter)
    forcing, beams, temperature = setting.forcing, setting.beams, setting.teacher_temperature
    # without a beam search the width is 1 and means nothing
    by_beams = forcing in (None, "beam") or (beams or 1) > 1
    counted = "beams" in named and beams is not None and by_beams
    noun = {"beam": "beam", "sample": "draw"}.get(forcing or "beam")
    if "forcing" in named and forcing is not None and not (counted and noun):
        parts.append(forcing)
    if counted:
        parts.append(f"{beams} {noun or 'beam'}{'s' if beams != 1 else ''}")
    if "teacher_temperature" in named and temperature is not None:
        parts.append(f"T={temperature:g}")
    if "truncation" in named and setting.truncation is not None:
        parts.append(setting.truncation)
    return tuple(parts)


_ELSEWHERE = frozenset(
    # the seed; the scope; factors, of which results say more than options
    (
        "seed",
        "target",
        "beams",
        "objective.objective",
        "objective.teacher_temperature",
        "drafter_option",
    )
)
_WITHOUT_EFFECT = frozenset(
    # where results go, what is logged or refused, and how the work is divided; the digest
    # of the stores shows which shards were left out
    (
        "out",
        "json",
        "debug",
        "report_to",
        "save_every",
        "bad_prompts.on_bad_prompt",
        "fitting.on_bad_shard",
        "training.parallel",
        "training.gradient_checkpointing",
    )
)
_FALLBACK = {"tail": "objective.tail", "steps": "steps"}
"""Results that stand in for options where a file has none."""


def options_of(given: object, results: Mapping[str, Any], where: str) -> Options:
    """Flatten a distil run's `options`, completed from its `results`; `where` names their file.

    Raises:
        InputError: the options are no object.
    """
    if given is None:
        return tuple((name, results[key]) for key, name in _FALLBACK.items() if key in results)
    if not isinstance(given, Mapping):
        raise InputError(f"expected an object in {where}, options, got {given!r}")
    flat = flattened(given)
    if given.get("store") and results.get("data"):
        # the same store may be named from several folders, and a name be used for another store
        names = "+".join(Path(str(folder)).name for folder in given["store"])
        flat["store"] = f"{names} ({digest(results['data'])[:6]})"
    left_out = _ELSEWHERE | _WITHOUT_EFFECT
    return tuple((name, value) for name, value in flat.items() if name not in left_out)


def only_varying(runs: Sequence[RunMetrics]) -> list[RunMetrics]:
    """Keep those options alone in which distilled runs differ, all in one order.

    An option that some runs do not record differs from any value: it is unknown.
    """
    known = {id(run): dict(run.options) for run in runs if run.objective not in (None, UNDISTILLED)}
    names = dict.fromkeys(name for own in known.values() for name in own)
    varying = [
        name
        for name in names
        if any(name not in own for own in known.values())
        or len({own[name] for own in known.values()}) > 1
    ]
    out = []
    for run in runs:
        own = known.get(id(run), {})
        kept = tuple((name, own[name]) for name in varying if name in own)
        out.append(dataclasses.replace(run, options=kept))
    return out


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Option]:
    """Groups by dotted names; lists as one text."""
    out: dict[str, Option] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            out |= flattened(value, f"{name}.")
        elif isinstance(value, list):
            out[name] = ", ".join(map(str, value)) or None
        else:
            out[name] = value
    return out


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
