"""What a study leaves behind: figures as small JSON, the ranked table, pictures, differences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from evaluation import Decoded, Scores, shape_name
from numpy.typing import NDArray
from study import Evaluated, Run

from draftsmith.bench.compare.model import UNDISTILLED, RunMetrics
from draftsmith.bench.compare.page import write_comparison
from draftsmith.core.speedup import predicted_speedup, rejections_saved, tokens_per_step
from draftsmith.core.types import TreeShape
from draftsmith.provenance import machine_summary, versions, write_json_atomic

RESAMPLES = 10_000
OPTIONS = (
    "tail",
    "reading",
    "aggregate",
    "beam_weights",
    "text",
    "limit",
    "duration",
    "learning_rate",
)
"""Columns that define the setting of a row, beside the factors of a comparison."""
Pick = Callable[[Scores], Sequence[Decoded]]
"""Which of an exam's decodings are looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How much larger the mean tau of one setting is than another's, over the same prompts."""

    better: str
    worse: str
    ratio: float
    low: float
    high: float
    """95 % interval of the ratio: seeds and prompts drawn anew. Of one seed it holds no noise of
    training, and is too narrow by that."""
    seeds: tuple[int, int]
    prompts: int
    rejections_saved: dict[str, float]
    """See `saved`."""

    @property
    def clear(self) -> bool:
        return self.low > 1.0


def difference(
    better: str,
    first: Sequence[Scores],
    worse: str,
    second: Sequence[Scores],
    *,
    of: Pick = attrgetter("chains"),
    seed: int = 0,
) -> Difference:
    """Compare two settings, each with the scores of its seeds."""
    rng = np.random.Generator(np.random.PCG64(seed))
    one, other = _counts(first, of), _counts(second, of)
    drawn_RP = _prompts(one.shape[-1], rng)  # the same prompts for both: they are paired
    low, high = np.quantile(
        _again(one, drawn_RP, rng) / _again(other, drawn_RP, rng), [0.025, 0.975]
    )
    return Difference(
        better=better,
        worse=worse,
        ratio=_mean(one) / _mean(other),
        low=float(low),
        high=float(high),
        seeds=(len(first), len(second)),
        prompts=one.shape[-1],
        rejections_saved=saved(first, second, of=of),
    )


def saved(
    first: Sequence[Scores], second: Sequence[Scores], *, of: Pick = attrgetter("chains")
) -> dict[str, float]:
    """The share of the second setting's refused drafts that the first one saves: by temperature
    where expected acceptance is known, else by way of decoding, where that counted it."""
    after, before = _acceptance(first, of), _acceptance(second, of)
    return {
        name: round(float(rejections_saved(after[name], alpha)), 4)
        for name, alpha in before.items()
        if name in after and alpha < 1
    }


def _acceptance(marks: Sequence[Scores], of: Pick) -> dict[str, float]:
    """Means over seeds, of what all of them have."""
    each = [
        one.alpha or {way.name: way.accepted_share for way in of(one) if sum(way.offered)}
        for one in marks
    ]
    known = [name for name in each[0] if all(name in one for one in each)]
    return {name: fmean(one[name] for one in each) for name in known}


def interval(
    marks: Sequence[Scores], *, of: Pick = attrgetter("chains"), seed: int = 0
) -> tuple[float, float, float]:
    """Mean tau of a setting, given the marks of its seeds, and its 95 % interval: seeds and prompts
    drawn anew."""
    rng = np.random.Generator(np.random.PCG64(seed))
    counts = _counts(marks, of)
    low, high = np.quantile(_again(counts, _prompts(counts.shape[-1], rng), rng), [0.025, 0.975])
    return _mean(counts), float(low), float(high)


def _counts(marks: Sequence[Scores], of: Pick) -> NDArray[np.int64]:
    """[seeds S, 2 (tokens, steps), ways W (shapes and temperatures), prompts P]."""
    return np.array(
        [[[way.tokens for way in of(one)], [way.steps for way in of(one)]] for one in marks],
        np.int64,
    )


def _prompts(count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """[R, P]: how often each prompt was drawn."""
    return rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)


def _again(
    counts_S2WP: NDArray[np.int64], drawn_RP: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.float64]:
    """[R]: mean tau over these prompts and over seeds that are drawn anew."""
    sums_S2WR = counts_S2WP @ drawn_RP.T
    taus_SR = (sums_S2WR[:, 0] / sums_S2WR[:, 1]).mean(1)
    seeds_SR = rng.integers(len(taus_SR), size=taus_SR.shape)
    return np.take_along_axis(taus_SR, seeds_SR, axis=0).mean(0)


def _mean(counts_S2WP: NDArray[np.int64]) -> float:
    """Mean over seeds and ways of tokens per step."""
    sums_S2W = counts_S2WP.sum(-1)
    return float((sums_S2W[:, 0] / sums_S2W[:, 1]).mean())


def as_row(examined: Evaluated) -> dict[str, Any]:
    """A run as JSON, without its prompts."""
    run, marks = examined.run, examined.marks
    decoded = {one.name: known for one in marks.decoded if (known := one.around_loops)}
    return {
        "name": run.name,
        **_setting(run),
        "mean_tau": round(marks.mean_tau, 4),
        "tau": {one.name: round(one.tau, 4) for one in marks.decoded},
        "alpha": {temperature: round(value, 4) for temperature, value in marks.alpha.items()},
        **({"decoded": decoded} if decoded else {}),
        "chrf": None if marks.chrf is None else round(marks.chrf, 2),
        "bleu": None if marks.bleu is None else round(marks.bleu, 2),
    }


def table(examined: Sequence[Evaluated]) -> list[dict[str, Any]]:
    """All runs, best first."""
    return ranked([as_row(one) for one in examined])


def ranked(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Best first."""
    return sorted(rows, key=lambda row: -float(row["mean_tau"]))


def recorded(path: Path, same: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier run of the study has written, if it had the same amounts."""
    found: dict[str, Any] = {}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    return found if all(found.get(name) == value for name, value in same.items()) else {}


def figures(
    row: Mapping[str, Any],
    shape: TreeShape,
    temperature: float,
    *,
    target: str,
    cost_ratio: float,
) -> RunMetrics:
    """One line of a comparison: a shape of drafts at a temperature of decoding."""
    trained = row["objective"] != UNDISTILLED
    tau = row["tau"][f"{shape_name(shape)}, T = {temperature:g}"]
    alpha = row["alpha"][f"{temperature:g}"]
    return RunMetrics(
        label=row.get("label") or row["name"],
        objective=row["objective"],
        forcing=row.get("forcing"),
        beams=row.get("beams"),
        teacher_temperature=row.get("teacher_temperature"),
        truncation=("full" if row["laws"] == "teacher" else "top-50") if trained else None,
        options=tuple((name, row.get(name)) for name in OPTIONS) if trained else (),
        decoding_temperature=temperature,
        target=target,
        seed=row.get("seed"),
        alpha=alpha,
        tau=tau,
        tau_predicted=float(tokens_per_step(alpha, shape.depth)),
        speedup_predicted=float(predicted_speedup(tau, shape.depth, cost_ratio)),
        quality=row["chrf"],
        quality_metric=None if row["chrf"] is None else "chrF",
    )


def _setting(run: Run) -> dict[str, Any]:
    if run.options is None:
        return {"objective": UNDISTILLED}
    chosen = run.options.objective
    return {
        "objective": chosen.objective,
        "forcing": run.forcing,
        "beams": run.beams,
        "teacher_temperature": chosen.teacher_temperature,
        "tail": chosen.tail,
        "reading": chosen.reading if chosen.objective == "tvdpp" else None,
        "laws": run.options.laws,
        "aggregate": run.options.aggregate,
        "beam_weights": run.options.beam_weights,
        "text": bool(run.options.text),
        "limit": _limit(run),
        "duration": run.options.training.duration,
        "learning_rate": run.options.training.learning_rate,
        "seed": run.options.seed,
        "label": run.label,
    }


def places(work: Path, out: Path, *, quick: bool) -> tuple[Path, Path]:
    """Folders to work in and to write to; a quick run has its own in the first: nothing of it may
    be taken for a part of the whole study."""
    return (work / "quick", work / "quick" / "results") if quick else (work, out)


def _limit(run: Run) -> int | None:
    """Prompts of a collection that has not as many as the study's others (`NAME@PROMPTS`)."""
    assert run.options is not None
    found = {folder.name.partition("@")[2] for folder in run.options.store} - {""}
    return int(found.pop()) if len(found) == 1 else None


def write_study(
    out: Path,
    name: str,
    comparison: Sequence[RunMetrics],
    facts: Mapping[str, Any],
) -> None:
    """OUT/NAME.json with everything, OUT/NAME/ with the ranked comparison and its pictures."""
    record = {**facts, "versions": versions(), "machine": machine_summary()}
    write_json_atomic(out / f"{name}.json", record)
    if comparison:
        write_comparison(comparison, out / name)


def plain(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    return [asdict(one) | {"clear": one.clear} for one in differences]
