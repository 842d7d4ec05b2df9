"""Finished runs side by side: how they are read, pooled over seeds, ranked and named.

    run          one set of metrics: a trained and measured drafter (or its share in one language)
    setting      what was varied on purpose: runs that differ in the seed alone share one
    scope        target and decoding temperature: only settings of one scope are ranked together

The study that this follows is DistillBeam's (its tables 2 and 3). What a study varies on purpose
(`FACTORS`) has fields of its own. All other options that change the result of a distil run
stand in a flat list of (name, value), so that two runs with other tails, other steps or another
rate are never taken for two seeds of one setting.

Runs are folders that `bench` or `distill` wrote:

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

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from draftsmith.bench.records import BASELINE, TRANSFORMERS, drafter_metrics, read
from draftsmith.config import as_dict, from_dict
from draftsmith.core.speedup import rejections_saved, tokens_per_step
from draftsmith.core.verify import lossy_sentence
from draftsmith.data.languages import find
from draftsmith.errors import InputError, nearest
from draftsmith.plan.observations import part_of
from draftsmith.provenance import digest, read_json

Option = str | int | float | bool | None
Options = tuple[tuple[str, Option], ...]
"""Names and values of a run's options, factors aside."""
UNDISTILLED = "none"
"""The objective of a draft model that was not distilled: what gains are counted from."""
FACTORS = ("drafter", "objective", "forcing", "beams", "teacher_temperature", "truncation")
"""What a study varies, one at a time."""
MEASURES = (
    *("tau", "tau_with_prefill", "tau_predicted", "alpha", "alpha_decoded"),
    *("loop_share", "tau_outside_loops", "alpha_outside_loops"),
    *("speedup", "speedup_predicted", "quality"),
)
RANKING = ("tau", "tau_with_prefill", "tau_predicted", "alpha", "alpha_decoded")
"""Settings are ranked by the first of these that any of their scope has."""
_SHARES = ("alpha", "alpha_decoded", "loop_share", "alpha_outside_loops")
"""Measures between 0 and 1."""
ACCEPTANCES = ("alpha", "alpha_decoded")
"""What refused drafts are counted by: the first of these that the undistilled draft has."""
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
class RunSetting:
    """What runs of several seeds have in common. None: not known, or without meaning."""

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
    """All other options that change the result, the seed aside; of a setting, those in which runs
    of the comparison differ."""
    label: str | None = None
    """The name of a setting whose other fields are empty or equal; None: they describe it."""

    @property
    def has_several(self) -> bool:
        """Whether the training data holds several trajectories of a prompt; how many beams each
        one has is not known where the search chose (`--beams auto`)."""
        return (self.beams or 1) > 1 or (self.forcing == "beam" and self.beams is None)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMetrics(RunSetting):
    """The setting and the metrics of one run."""

    label: str
    decoding_temperature: float | None = None
    target: str | None = None
    seed: int | None = None
    alpha: float | None = None
    """Expected acceptance at `decoding_temperature`, token-weighted (`distill.acceptance`)."""
    alpha_decoded: float | None = None
    """Accepted / offered, counted while decoding."""
    tau: float | None = None
    """Tokens per step, counted while decoding, behind the prompt's own step."""
    tau_with_prefill: float | None = None
    """The same with the prompt's own step."""
    tau_predicted: float | None = None
    """From `alpha`, by the closed formula; or from chains on held-out texts
    (`distill.evaluation`)."""
    loop_share: float | None = None
    """Share of the generated tokens in repetition loops (`bench.loops`)."""
    tau_outside_loops: float | None = None
    """`tau` over the steps that begin outside of loops."""
    alpha_outside_loops: float | None = None
    """`alpha_decoded` over the same steps."""
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
        for name in MEASURES[:-1]:
            value, share = getattr(self, name), name in _SHARES
            if value is None or (0 <= value <= 1 if share else 0 < value < math.inf):
                continue
            said = "between 0 and 1" if share else "positive"
            raise InputError(f"{self.label}: {name} must be {said}, got {value}")


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
    best: str
    """The name of the best setting."""
    best_value: float
    best_gain: float
    top_value: float | None
    """The value of the setting that ranks first over all; None when it is not known here."""
    top_gain: float | None


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

    def rejections_saved(self, entry: RankedSetting) -> float | None:
        """Return the share of the undistilled draft's refused drafts that a setting saves; None
        where the acceptance of either is not known."""
        if self.base is None or entry is self.base:
            return None
        measure = next((name for name in ACCEPTANCES if name in self.base.metrics), "")
        alpha, before = entry.value(measure), self.base.value(measure)
        if alpha is None or before is None or before == 1:
            return None
        return float(rejections_saved(alpha, before))

    @property
    def title(self) -> str:
        parts = [] if self.target is None else [self.target]
        if self.decoding_temperature is not None:
            parts.append(f"decoding temperature {self.decoding_temperature:g}")
        return ", ".join(parts)

    def gains(self, part: str = "by_language") -> tuple[Gain, ...]:
        """Return a gain per language (`by_tag`: tag), the largest best gain first."""
        if self.base is None or self.top is None:
            return ()
        # by their place: settings may have one name
        parts: list[Mapping[str, Pooled]] = [getattr(entry, part) for entry in self.entries]
        base, first = (self.entries.index(one) for one in (self.base, self.top))
        out = []
        for name, pooled in parts[base].items():
            before = pooled.mean
            values = {n: own[name].mean for n, own in enumerate(parts) if n != base and name in own}
            if values:
                best, top = max(values, key=values.__getitem__), values.get(first)
                out.append(
                    Gain(
                        name=name,
                        base=before,
                        best=self.entries[best].name,
                        best_value=values[best],
                        best_gain=values[best] / before - 1.0,
                        top_value=top,
                        top_gain=None if top is None else top / before - 1.0,
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


# --------------------------------------------------------------------------- reading


_EXPECTED = ("alpha", "tau_predicted")
_SHARE = (*_EXPECTED, "tau", "speedup", "speedup_predicted", "quality")
_OF_TRAINING = ("drafter", "objective", "forcing", "beams", "teacher_temperature", "seed")
_RESULTS = (*_SHARE, *_OF_TRAINING, "decoding_temperature", "target", "quality_metric")
"""The keys of a run.json that are read as they are."""


def _read_object(path: Path) -> dict[str, Any]:
    return _mapping(read_json(path, "results"), f"{path} holds no JSON object.")


def _mapping(values: object, otherwise: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise InputError(otherwise)
    return values


def _with(
    run: RunMetrics, values: object, where: str, names: Iterable[str], **part: Any
) -> RunMetrics:
    """Return the run with these metrics taken from `values`; `part`: of which prompts they are."""
    given = _mapping(values, f"expected an object in {where}, got {values!r}")
    own = {name: given.get(name) for name in names}
    read = from_dict(RunMetrics, {**own, "label": run.label}, where=where)
    return replace(run, **{name: getattr(read, name) for name in own}, **part)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Summarised:
    """A drafter in summary.json."""

    name: str
    temperature: float
    tokens_per_step: float | None = None
    decode_tokens_per_step: float | None = None
    acceptance_rate: float | None = None
    loop_share: float | None = None
    decode_tokens_per_step_outside_loops: float | None = None
    acceptance_rate_outside_loops: float | None = None
    speedup: float | None = None
    predicted_speedup: float | None = None
    lossy_rule: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Results:
    """Results of a distil run that have other names or belong to no single setting, and the
    metrics of parts of the prompts."""

    answer_tokens: int | None = None
    store_bytes: int | None = None
    alpha_before: float | None = None
    gamma: int | None = None
    """Draft length of `tau_predicted`, where the closed formula made it of `alpha`."""
    top_k: int | None = None
    by_language: dict[str, Any] = field(default_factory=dict)
    by_tag: dict[str, Any] = field(default_factory=dict)


_Trained = tuple[list[RunMetrics], _Results]
"""A distil run: its metrics over all prompts, then by language and tag; its other results."""


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


def _benched(folder: Path) -> Iterator[RunMetrics]:
    """Yield metrics over all prompts, then (where there are records) by language and tag."""
    path = folder / "summary.json"
    values = _read_object(path) if path.is_file() else {"drafters": []}
    entries = values.get("drafters")
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise InputError(f"{path} has no list of drafters: `draftsmith bench` did not write it.")
    wrong = f"expected an object in {path}, expected acceptance"

    def measured(entry: Mapping[str, Any], **part: str) -> RunMetrics:
        own = part_of(_Summarised, entry, str(path))
        given = {"label": own.name, "target": values.get("target"), "speedup": own.speedup, **part}
        given |= {
            "decoding_temperature": own.temperature,
            "tau": own.decode_tokens_per_step,
            "tau_with_prefill": own.tokens_per_step,
            "alpha_decoded": own.acceptance_rate,
            "loop_share": own.loop_share,
            "tau_outside_loops": own.decode_tokens_per_step_outside_loops,
            "alpha_outside_loops": own.acceptance_rate_outside_loops,
            "speedup_predicted": own.predicted_speedup,
        }
        return from_dict(RunMetrics, given, where=str(path))

    expected = {}
    for run, entry in [(measured(entry), entry) for entry in entries]:
        expected[run.label, run.decoding_temperature] = entry.get("expected")
    parts: list[tuple[dict[str, str], list[dict[str, Any]]]] = [({}, entries)]
    if (folder / "records.jsonl").is_file():
        records = read(folder / "records.jsonl")
        parts = [({}, as_dict(drafter_metrics(records)))]
        for kind in ("language", "tag"):
            for name in dict.fromkeys(getattr(record, kind) for record in records):
                if name is not None:
                    own = [record for record in records if getattr(record, kind) == name]
                    parts.append(({kind: name}, as_dict(drafter_metrics(own))))
    for part, metrics in parts:
        for entry in metrics:
            if entry.get("name") in (BASELINE, TRANSFORMERS):
                continue
            if entry.get("lossy_rule") is not None:  # tokens of another law are no rival
                raise InputError(
                    f"{folder} cannot be ranked with other runs: "
                    f"{lossy_sentence(entry['lossy_rule'])}; leave it out."
                )
            run = measured(entry, **part)
            found = expected.get((run.label, run.decoding_temperature))
            for kind, name in part.items():
                found = _mapping(found or {}, wrong).get(f"by_{kind}")
                found = _mapping(found or {}, wrong).get(name)
            yield run if found is None else _with(run, found, str(path), _EXPECTED)


def _distilled(folder: Path) -> _Trained:
    path = folder / "run.json"
    values = _read_object(path)
    given = _mapping(
        values.get("results"), f"{path} has no results: the run did not end, or wrote none."
    )
    training = part_of(_Results, given, str(path))
    whole = _with(RunMetrics(label=str(folder)), given, str(path), _RESULTS)
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
    for kind, shares in (("language", training.by_language), ("tag", training.by_tag)):
        for name, share in shares.items():
            where = f"{path}, by_{kind}, {name}"
            out.append(_with(whole, share, where, _SHARE, **{kind: name}))
    return out, training


def _undistilled(trained: Sequence[_Trained]) -> Iterator[RunMetrics]:
    """Yield the draft model that all runs began with, where all measured the same at first."""
    # networks begin with noise
    wholes = [(runs[0], results) for runs, results in trained if runs[0].drafter is None]
    if any(whole.objective == UNDISTILLED for whole, _ in wholes):
        return
    found: dict[tuple[str | None, float | None], list[_Results]] = {}
    for whole, results in wholes:
        found.setdefault((whole.target, whole.decoding_temperature), []).append(results)
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


def _joined(measured: Sequence[RunMetrics], trained: Mapping[Path, _Trained]) -> list[RunMetrics]:
    """Measurements of trained drafters take over their settings; all get short labels."""
    labels = _short([str(path.resolve()) for path in trained])
    sources = _short([_source(run) for run in measured])
    out, used = [], set()
    for run in measured:
        path = _made(_source(run), trained)
        if path is None:
            label = run.label.removesuffix(_source(run)) + sources[_source(run)]
            out.append(replace(run, label=label))
        else:
            used.add(path)
            label = labels[str(path.resolve())]
            out.append(replace(_join(run, trained[path][0]), label=label))
    for path, (runs, _) in trained.items():
        if path not in used:
            out += [replace(run, label=labels[str(path.resolve())]) for run in runs]
    return out


def _source(run: RunMetrics) -> str:
    """Return a drafter's name without its kind."""
    return run.label.partition(":")[2] or run.label


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
    """Find the one folder among these that a drafter's name means.

    A record names it relative to where the bench ran, or, outside of that, cut to `.../name`.
    """
    parts = tuple(part for part in Path(source).parts if part not in ("...", "..", "~", "/"))
    ends = [path for path in trained if parts and path.resolve().parts[-len(parts) :] == parts]
    return ends[0] if len(ends) == 1 else None


def _short(names: Sequence[str]) -> dict[str, str]:
    """Return, per path, as many of its last parts as tell it from the others."""
    paths = {name: Path(name).parts for name in names}
    out: dict[str, str] = {}
    for name, parts in paths.items():
        ends = (tuple(other[-n:] for other in paths.values()) for n in range(1, len(parts) + 1))
        counts = (n for n, some in enumerate(ends, 1) if some.count(parts[-n:]) == 1)
        out[name] = "/".join(parts[-next(counts, len(parts)) :])
    return out


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
        both = f"{name} ({setting.label})" if name and setting.label else ""
        names.append(both or name or setting.label or "all")
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
    """Return the first options that together tell these apart: others often follow from them, as
    the warm-up does from the duration."""
    known = [dict(options) for options in some]
    out: list[str] = []
    parts: list[tuple[object, ...]] = [()] * len(some)
    for name in dict.fromkeys(name for own in known for name in own):
        finer = [(*part, own.get(name, _ABSENT)) for part, own in zip(parts, known, strict=True)]
        if len(set(finer)) > len(set(parts)):
            out.append(name)
            parts = finer
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


_ABSENT = object()
"""The value of an option that a run does not record: it differs from any value."""
_LEFT_OUT = frozenset(
    # the seed; the scope; factors, of which results say more than options
    "seed target beams objective.objective objective.teacher_temperature drafter_option "
    # where results go, what is logged or refused, and how the work is divided; the digest of the
    # stores shows which shards were left out
    "out json debug report_to save_every bad_prompts.on_bad_prompt fitting.on_bad_shard "
    "training.parallel training.gradient_checkpointing".split()
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
    return tuple((name, value) for name, value in flat.items() if name not in _LEFT_OUT)


def only_varying(runs: Sequence[RunMetrics]) -> list[RunMetrics]:
    """Keep those options alone in which distilled runs differ, all in one order."""
    known = [dict(run.options) for run in runs if run.objective not in (None, UNDISTILLED)]
    names = dict.fromkeys(name for own in known for name in own)
    varying = [name for name in names if len({own.get(name, _ABSENT) for own in known}) > 1]
    out = []
    for run in runs:
        own = {} if run.objective in (None, UNDISTILLED) else dict(run.options)
        kept = tuple((name, own[name]) for name in varying if name in own)
        out.append(replace(run, options=kept))
    return out


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Option]:
    """Join the names of nested groups by dots, and lists into one text."""
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
            rank=None if math.isnan(means[i]) else place,
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
