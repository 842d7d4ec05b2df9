"""Which drafts pay on a machine: shapes that were really decoded, priced by a measured cost table.

    speed-up       tokens * t(plain) / sum over steps of t(step)
    its interval   prompts and rounds of the cost table drawn anew, 95 %

Shapes are decoded, not extrapolated from acceptance by depth: behind a rejection, where the steps
of long drafts begin, texts are harder than in the middle of an easy passage.

In a batch a step lasts as long as its widest row wants. Of B rows, taken as independent of each
other, the widest is at most w with probability F(w) ** B, where F is the share of the steps of one
row that are no wider:

    widths of a row   1 1 9 9   (nothing to draft in half of its steps)    mean of one row     5
    widest of two     1 9 9 9                                              mean of two rows    7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

from draftsmith.plan.length_policy import StepCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStepCosts:
    """Seconds of a step of the whole batch."""

    plain: float
    by_width: Mapping[int, float]
    """The drafter's and the target's, by the tokens that a row feeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A drafter with drafts of one shape, decoded for real. Lists go over prompts."""

    drafter: str
    curve: str
    """Name of its costs in the table."""
    shape: str
    """In words."""
    flags: tuple[str, ...]
    """What asks for it on a command line, the drafter apart."""
    length: int | None
    """Length of a chain that is always that long; None: a tree, or a length that changes."""
    depth: int | None
    """Depth of the chain or tree; None: it changes."""
    tokens_P: tuple[int, ...]
    """Emitted behind the prompt's step; 0: the text ended with it."""
    widths_P: tuple[Mapping[int, int], ...]
    """Tokens fed in a step -> number of such steps."""
    by_depth: tuple[tuple[int, int], ...]
    """(times offered behind accepted tokens, times accepted), by depth."""

    @property
    def prompts(self) -> tuple[int, ...]:
        """The indices of prompts that gave a step to measure."""
        return tuple(place for place, widths in enumerate(self.widths_P) if widths)

    @property
    def tokens_per_step(self) -> float:
        return sum(self.tokens_P) / sum(sum(widths.values()) for widths in self.widths_P)

    @property
    def label(self) -> str:
        """The name in tables."""
        return "auto" if self.depth is None else self.shape

    @property
    def widths(self) -> tuple[int, ...]:
        """All widths that occurred, ascending."""
        return tuple(sorted({width for widths in self.widths_P for width in widths}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A measurement with its estimated speed-up."""

    measurement: Measurement
    speedup: float
    low: float
    high: float
    tokens_per_second: float
    """Per row, by the cost table: of forwards and drafts alone. Choosing among logits, which plain
    decoding does too, comes on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthRate:
    """Acceptance at one depth, given that all before it was accepted, with its 95 % interval."""

    tried: int
    kept: int
    rate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchEstimate:
    """The best draft of a drafter in batches of so many rows."""

    rows: int
    measurement: Measurement
    speedup: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """The result of tuning."""

    candidates: tuple[Candidate, ...]
    """The fastest first."""
    costs: dict[str, StepCosts]
    """Step costs by drafter, for one row."""
    batches: tuple[BatchEstimate, ...]
    plain_tokens_per_second: float
    """Pace of plain decoding, by the cost table."""

    @property
    def winner(self) -> Candidate:
        return self.candidates[0]

    @property
    def by_batch(self) -> dict[int, float]:
        """The best speed-up of each batch size."""
        found: dict[int, float] = {}
        for one in self.batches:
            found[one.rows] = max(one.speedup, found.get(one.rows, 0.0))
        return found


def speedup(
    measurement: Measurement,
    costs: BatchStepCosts,
    *,
    rows: int = 1,
    picks: Sequence[int] | None = None,
) -> float:
    """Return the speed-up over plain decoding of as many rows; `picks`: prompts (with repeats).

    Raises:
        ValueError: these prompts gave no step.
    """
    chosen = range(len(measurement.tokens_P)) if picks is None else picks
    tokens = sum(measurement.tokens_P[p] for p in chosen)
    steps_W = np.array(
        [
            sum(measurement.widths_P[p].get(width, 0) for p in chosen)
            for width in measurement.widths
        ],
        dtype=np.float64,
    )
    steps = steps_W.sum()
    if not steps:
        raise ValueError("there is no step to measure speed by")
    seconds_W = np.array([costs.by_width[width] for width in measurement.widths])
    widest_W = np.diff((np.cumsum(steps_W) / steps) ** rows, prepend=0.0)
    return float(tokens * costs.plain / (steps * (widest_W @ seconds_W)))


def estimate_candidate(
    measurement: Measurement, costs: BatchStepCosts, draws: Sequence[BatchStepCosts], seed: int = 0
) -> Candidate:
    """Estimate the speed-up of a measurement; `draws`: costs from resampled rounds of the table."""
    rng = np.random.default_rng(seed)
    prompts = measurement.prompts
    found = [
        speedup(measurement, draw, picks=rng.choice(prompts, size=len(prompts)).tolist())
        for draw in draws
    ]
    value = speedup(measurement, costs)
    low, high = np.quantile(found, [0.025, 0.975]) if found else (value, value)
    return Candidate(
        measurement=measurement,
        speedup=value,
        low=float(low),
        high=float(high),
        tokens_per_second=value / costs.plain,
    )


def advice(winner: Candidate) -> str:
    """Recommend in a sentence what to do."""
    measurement = winner.measurement
    what = f"{measurement.shape} with {measurement.drafter}"
    promise = f"{winner.speedup:.2f}x ({winner.low:.2f} to {winner.high:.2f})"
    if winner.speedup <= 1.0:
        return f"do not speculate: the best would be {promise}, {what}"
    what = f"draft {what}: {promise}"
    if winner.low <= 1.0:
        return f"it is not certain that drafting pays; at best {what}"
    return what


def evidence(winner: Candidate, tried: int) -> str:
    """Qualify the estimate in a sentence; empty: nothing is claimed. `tried`: drafts that were
    compared."""
    prompts = len(winner.measurement.prompts)
    if prompts == 1:
        return (
            "one prompt was measured: the interval is that of the measured costs alone, and says "
            "nothing of other prompts"
        )
    if winner.speedup <= 1.0:
        return ""
    return (
        f"it is the best of {tried} drafts on the very {prompts} prompts that it was chosen by: "
        "others may gain a little less"
    )


def batch_advice(speedups: Mapping[int, float]) -> str:
    """Name the batch sizes at which drafting pays; `speedups`: the best of each batch size. Empty
    where single rows are all that was asked for: `advice` covers it."""
    sizes = sorted(speedups)
    if sizes == [1]:
        return ""
    paying = [size for size in sizes if speedups[size] > 1.0]
    if not paying:
        return f"drafting pays at no batch size tried ({', '.join(map(str, sizes))})"
    losing = [size for size in sizes if size not in paying]
    if not losing:
        return f"drafting pays up to {sizes[-1]} rows, the most tried"
    if losing[0] > paying[-1]:
        return f"from {losing[0]} rows on drafting no longer pays"
    here, there = (", ".join(map(str, some)) for some in (paying, losing))
    return f"drafting pays at batch size {here}, but not at {there}"


def rates(by_depth: Sequence[tuple[int, int]]) -> tuple[DepthRate, ...]:
    """Return acceptance by depth, with Wilson intervals; depths that were never tried are left
    out."""
    out = []
    for tried, kept in by_depth:
        if tried:
            spread = binomtest(kept, tried).proportion_ci(method="wilson")
            out.append(
                DepthRate(
                    tried=tried,
                    kept=kept,
                    rate=kept / tried,
                    low=float(spread.low),
                    high=float(spread.high),
                )
            )
    return tuple(out)
