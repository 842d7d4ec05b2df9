"""What a study leaves behind: figures as small JSON, the ranked table, pictures, differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from exam import Marks
from numpy.typing import NDArray
from study import Examined, Run

from draftsmith.bench.compare import write_comparison
from draftsmith.bench.compare_figures import RunFigures
from draftsmith.provenance import machine_summary, versions, write_json_atomic

RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How much larger the mean tau of one setting is than another's, over the same prompts."""

    better: str
    worse: str
    ratio: float
    low: float
    high: float
    """95 % interval of the ratio: seeds and prompts drawn anew."""
    seeds: tuple[int, int]

    @property
    def clear(self) -> bool:
        return self.low > 1.0


def difference(
    better: str, first: Sequence[Marks], worse: str, second: Sequence[Marks], *, seed: int = 0
) -> Difference:
    """Of two settings, each with the marks of its seeds."""
    rng = np.random.Generator(np.random.PCG64(seed))
    one, other = _counts(first), _counts(second)
    prompts = one.shape[-1]
    ratios = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        chosen = rng.integers(prompts, size=prompts)  # the same prompts for both: they are paired
        ratios[number] = _mean(one[rng.integers(len(one), size=len(one))], chosen) / _mean(
            other[rng.integers(len(other), size=len(other))], chosen
        )
    everyone = np.arange(prompts)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Difference(
        better=better,
        worse=worse,
        ratio=_mean(one, everyone) / _mean(other, everyone),
        low=float(low),
        high=float(high),
        seeds=(len(first), len(second)),
    )


def _counts(marks: Sequence[Marks]) -> NDArray[np.int64]:
    """[seeds, 2 (tokens, steps), chains and temperatures, prompts]."""
    return np.array(
        [[[c.tokens for c in one.chains], [c.steps for c in one.chains]] for one in marks], np.int64
    )


def _mean(counts: NDArray[np.int64], prompts: NDArray[np.int64]) -> float:
    """Mean over seeds, chains and temperatures of tokens per step."""
    sums = counts[..., prompts].sum(-1)
    return float((sums[:, 0] / sums[:, 1]).mean())


def as_row(examined: Examined) -> dict[str, Any]:
    """A run as JSON, without its prompts."""
    run, marks = examined.run, examined.marks
    return {
        "name": run.name,
        **_setting(run),
        "mean_tau": round(marks.mean_tau, 4),
        "tau": {one.name: round(one.tau, 4) for one in marks.decoded},
        "alpha": {heat: round(value, 4) for heat, value in marks.alpha.items()},
        "chrf": None if marks.chrf is None else round(marks.chrf, 2),
        "bleu": None if marks.bleu is None else round(marks.bleu, 2),
    }


def table(examined: Sequence[Examined]) -> list[dict[str, Any]]:
    """All runs, best first."""
    return [as_row(one) for one in sorted(examined, key=lambda one: -one.marks.mean_tau)]


def _setting(run: Run) -> dict[str, Any]:
    if run.options is None:
        return {"objective": "none"}
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
        "duration": run.options.training.duration,
        "learning_rate": run.options.training.learning_rate,
        "seed": run.options.seed,
        "label": run.label,
    }


def write_study(
    out: Path,
    name: str,
    comparison: Sequence[RunFigures],
    facts: Mapping[str, Any],
) -> None:
    """OUT/NAME.json with everything, OUT/NAME/ with the ranked comparison and its pictures."""
    record = {**facts, "versions": versions(), "machine": machine_summary()}
    write_json_atomic(out / f"{name}.json", record)
    if comparison:
        write_comparison(comparison, out / name)


def plain(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    return [asdict(one) | {"clear": one.clear} for one in differences]
