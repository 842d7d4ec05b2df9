"""From records to metrics: the definitions, once.

tokens per step (tau)     generated tokens / target forwards, the prompt's forward included
acceptance rate           accepted tokens / depth offered on the best path
node acceptance rate      accepted nodes / nodes proposed (equal for chains)
acceptance by position    accepted at depth d / offered at depth d behind accepted ones
speed-up                  decoding seconds per token of plain decoding / of the drafter: per prompt
                          the median over repeats, prompts weighted by their tokens
its interval              95 % bootstrap over prompts, both sides of a prompt drawn together
predicted speed-up        see `costs`: from a cost table that is measured apart from the run
engine efficiency         (draft + target forward seconds) / all seconds of the decoding phase

A metric that has no meaning for a drafter is None.

Sums over documents or prompts, divided: a mean per token, and its 95 % margin.

What a document adds to both sums belongs together, and tokens of one document are not independent:
documents are what is drawn (`plan.acceptance`). First order, for the ratio of two sums:

    R = sum s / sum m        what a document adds to its error: (s - R m) / sum m
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from draftsmith.bench.records import BASELINE, TRANSFORMERS, Floor, PhaseSeconds, RunRecord
from draftsmith.plan.acceptance import error, quantile

X = TypeVar("X")
BOOTSTRAP_DRAWS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A 95 % interval."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Seconds per token of a baseline and a candidate on one group of prompts."""

    weight: float
    """Generated tokens of the baseline there."""
    baseline: float
    candidate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterMetrics:
    """All metrics of one drafter at one temperature."""

    name: str
    temperature: float
    prompts: int
    tokens: int
    tokens_per_step: float | None
    acceptance_rate: float | None
    acceptance_rate_per_prompt: float | None
    """Mean over prompts of each prompt's rate."""
    node_acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...] | None
    speedup: float | None
    speedup_ci95: Interval | None
    """None with fewer than two groups of prompts."""
    speedup_median_prompt: float | None
    speedup_vs_transformers: float | None
    speedup_vs_transformers_ci95: Interval | None
    predicted_speedup: float | None
    engine_efficiency: float | None
    seconds_per_token: float | None
    """Decoding phase; the only absolute time, and of this machine on that day."""
    phases_per_token: PhaseSeconds | None
    identical_to_autoregressive: bool | None
    divergences: int | None
    """Prompts whose text differs, of all at temperature 0."""
    divergence_rate: float | None
    """Divergences / tokens up to each divergence."""
    largest_gap_at_divergence: float | None
    divergences_over_bound: int | None
    """Divergences at a gap that rounding does not explain: must be 0."""
    lossy_rule: str | None = None
    """What its drafts were verified by, if the output law is then not the target's."""


def drafter_metrics(records: Sequence[RunRecord]) -> tuple[DrafterMetrics, ...]:
    """Compute the metrics of every drafter and temperature, in order of first appearance."""
    temperatures = _ordered(record.temperature for record in records)
    names = sorted(
        _ordered(record.drafter for record in records),
        key=lambda name: (name != BASELINE, name == TRANSFORMERS),
    )
    out = []
    for name in names:
        for temperature in temperatures:
            same = [r for r in records if r.temperature == temperature]
            mine = [r for r in same if r.drafter == name]
            if mine:
                out.append(_figures(name, temperature, mine, same))
    return tuple(out)


def _figures(
    name: str, temperature: float, mine: Sequence[RunRecord], same: Sequence[RunRecord]
) -> DrafterMetrics:
    paces = paired_paces([r for r in same if r.drafter == BASELINE], mine)
    rivals = [r for r in same if r.drafter == TRANSFORMERS]
    rival_paces = paired_paces(rivals, mine) if name != TRANSFORMERS else ()
    steps = _total(r.steps for r in mine)
    offered = _total(r.offered for r in mine)
    proposed = _total(r.proposed for r in mine)
    accepted = _total(r.accepted for r in mine) or 0
    rates = per_prompt_rates(mine)
    positions = acceptance_by_position(mine)
    lossy_rule = next((r.lossy_rule for r in mine if r.lossy_rule is not None), None)
    greedy = temperature == 0 and lossy_rule is None
    differing = [r for r in mine if r.repeat == 0 and r.divergence is not None]
    tokens = sum(r.tokens for r in mine)
    return DrafterMetrics(
        name=name,
        temperature=temperature,
        prompts=len({(r.prompt, r.turn) for r in mine}),
        tokens=tokens,
        tokens_per_step=tokens / steps if steps else None,
        acceptance_rate=accepted / offered if offered else None,
        acceptance_rate_per_prompt=statistics.fmean(rates) if rates else None,
        node_acceptance_rate=accepted / proposed if proposed else None,
        acceptance_by_position=positions or None,
        speedup=weighted_speedup(paces),
        speedup_ci95=bootstrap_interval(paces),
        speedup_median_prompt=_median([p.baseline / p.candidate for p in paces]),
        speedup_vs_transformers=weighted_speedup(rival_paces),
        speedup_vs_transformers_ci95=bootstrap_interval(rival_paces),
        predicted_speedup=predicted_speedup(mine),
        engine_efficiency=engine_efficiency(mine),
        seconds_per_token=seconds_per_token(mine),
        phases_per_token=phases_per_token(mine),
        identical_to_autoregressive=_all_identical(mine) if greedy else None,
        divergences=len(differing) if greedy else None,
        divergence_rate=divergence_rate(mine) if greedy else None,
        largest_gap_at_divergence=max(
            (r.divergence.gap for r in differing if r.divergence is not None), default=None
        ),
        divergences_over_bound=sum(
            r.divergence is not None and r.divergence.gap > r.divergence.bound for r in differing
        )
        if greedy
        else None,
        lossy_rule=lossy_rule,
    )


# --------------------------------------------------------------------------- speed


def paired_paces(baseline: Sequence[RunRecord], candidate: Sequence[RunRecord]) -> tuple[Pace, ...]:
    """Return both seconds per token of each group of prompts that both sides have."""
    left, right = group_paces(baseline), group_paces(candidate)
    weights = group_tokens(baseline)
    return tuple(
        Pace(weight=weights[group], baseline=left[group], candidate=right[group])
        for group in left
        if group in right
    )


def group_paces(records: Sequence[RunRecord]) -> dict[int, float]:
    """Return by group the median over repeats of decoding seconds per generated token.

    Every line of a group carries the group's seconds, so they count once, its tokens all together.
    """
    out: dict[int, list[float]] = {}
    for (group, _), lines in _by_group_and_repeat(records).items():
        tokens = sum(line.decode_tokens for line in lines)
        if tokens and lines[0].decode_seconds > 0:
            out.setdefault(group, []).append(lines[0].decode_seconds / tokens)
    return {group: statistics.median(values) for group, values in out.items()}


def group_tokens(records: Sequence[RunRecord]) -> dict[int, float]:
    """Return by group the mean over repeats of tokens generated in the decoding phase."""
    out: dict[int, list[int]] = {}
    for (group, _), lines in _by_group_and_repeat(records).items():
        out.setdefault(group, []).append(sum(line.decode_tokens for line in lines))
    return {group: statistics.fmean(values) for group, values in out.items()}


def weighted_speedup(paces: Sequence[Pace]) -> float | None:
    """Divide the time for the baseline's tokens at its own pace by that at the candidate's."""
    slow = sum(pace.weight * pace.baseline for pace in paces)
    fast = sum(pace.weight * pace.candidate for pace in paces)
    return slow / fast if fast > 0 else None


def bootstrap_interval(
    paces: Sequence[Pace], *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> Interval | None:
    """Return the 95 % percentile interval of `weighted_speedup` over resampled groups (2 or
    more)."""
    if len(paces) < 2:
        return None
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(paces), size=(draws, len(paces)))
    slow = np.array([pace.weight * pace.baseline for pace in paces])[picks].sum(1)
    fast = np.array([pace.weight * pace.candidate for pace in paces])[picks].sum(1)
    low, high = np.quantile(slow / fast, [0.025, 0.975])
    return Interval(low=float(low), high=float(high))


def predicted_speedup(records: Sequence[RunRecord]) -> float | None:
    """Divide the cost table's seconds for plain decoding by those for these steps."""
    known = [record.costs for record in records if record.costs is not None]
    spent = sum(costs.draft + costs.target for costs in known)
    return sum(costs.baseline for costs in known) / spent if spent > 0 else None


def engine_efficiency(records: Sequence[RunRecord]) -> float | None:
    """Return (draft + target seconds) / all seconds of the decoding phase."""
    phases = _phases(records)
    if phases is None or phases.total <= 0:
        return None
    return (phases.draft + phases.target) / phases.total


def seconds_per_token(records: Sequence[RunRecord]) -> float | None:
    """Return decoding seconds per token, groups weighted by tokens, median over repeats."""
    paces, weights = group_paces(records), group_tokens(records)
    total = sum(weights[group] for group in paces)
    return sum(weights[g] * pace for g, pace in paces.items()) / total if total else None


def phases_per_token(records: Sequence[RunRecord]) -> PhaseSeconds | None:
    """Return the mean seconds per token of each part of the decoding phase."""
    phases = _phases(records)
    tokens = sum(record.decode_tokens for record in records)
    if phases is None or not tokens:
        return None
    return PhaseSeconds(
        draft=phases.draft / tokens,
        target=phases.target / tokens,
        verify=phases.verify / tokens,
        other=phases.other / tokens,
    )


def _phases(records: Sequence[RunRecord]) -> PhaseSeconds | None:
    """Sum the seconds of all groups and repeats; None when an engine does not report them."""
    parts = [lines[0].phases for lines in _by_group_and_repeat(records).values()]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return PhaseSeconds(
        draft=sum(part.draft for part in known),
        target=sum(part.target for part in known),
        verify=sum(part.verify for part in known),
        other=sum(part.other for part in known),
    )


# --------------------------------------------------------------------------- acceptance


def acceptance_by_position(records: Iterable[RunRecord]) -> tuple[float, ...]:
    """Return the conditional acceptance rate per depth, over all records."""
    tried: list[int] = []
    took: list[int] = []
    for record in records:
        for depth, (offers, accepts) in enumerate(record.by_position):
            if depth == len(tried):
                tried.append(0)
                took.append(0)
            tried[depth] += offers
            took[depth] += accepts
    return tuple(b / a for a, b in zip(tried, took, strict=True) if a)


def per_prompt_rates(records: Sequence[RunRecord]) -> tuple[float, ...]:
    """Return the acceptance rate of each prompt for which something was offered."""
    sums: dict[tuple[str, int], tuple[int, int]] = {}
    for record in records:
        key = (record.prompt, record.turn)
        accepted, offered = sums.get(key, (0, 0))
        sums[key] = (accepted + (record.accepted or 0), offered + (record.offered or 0))
    return tuple(accepted / offered for accepted, offered in sums.values() if offered)


# --------------------------------------------------------------------------- equality


def divergence_rate(records: Sequence[RunRecord]) -> float | None:
    """Return divergences per token that could diverge: those up to each text's first difference."""
    first = [record for record in records if record.repeat == 0 and record.identical is not None]
    compared = sum(r.divergence.at + 1 if r.divergence else r.tokens for r in first)
    return sum(r.divergence is not None for r in first) / compared if compared else None


def total_floor(records: Sequence[RunRecord]) -> Floor | None:
    """Sum up the target against itself, over all prompts; None when it was not measured."""
    floors = [record.floor for record in records if record.floor is not None]
    if not floors:
        return None
    return Floor(
        tokens=sum(floor.tokens for floor in floors),
        flips=sum(floor.flips for floor in floors),
        largest_gap=max((f.largest_gap for f in floors if f.largest_gap is not None), default=None),
    )


def exceeds_floor(records: Sequence[RunRecord], floor: Floor) -> bool:
    """Check whether these records diverge more often than the target from itself (p < 0.01).

    One-sided exact test that both rates are equal: counts are small, so a plain comparison of
    rates would accuse at random.
    """
    from scipy.stats import fisher_exact

    first = [record for record in records if record.repeat == 0 and record.identical is not None]
    diverged = sum(record.divergence is not None for record in first)
    compared = sum(r.divergence.at + 1 if r.divergence else r.tokens for r in first)
    table = [[diverged, compared - diverged], [floor.flips, floor.tokens - floor.flips]]
    return bool(diverged) and float(fisher_exact(table, alternative="greater").pvalue) < 0.01


# --------------------------------------------------------------------------- inside


def _all_identical(records: Sequence[RunRecord]) -> bool | None:
    known = [record.identical for record in records if record.identical is not None]
    return all(known) if known else None


def _by_group_and_repeat(
    records: Sequence[RunRecord],
) -> dict[tuple[int, int], list[RunRecord]]:
    out: dict[tuple[int, int], list[RunRecord]] = {}
    for record in records:
        out.setdefault((record.group, record.repeat), []).append(record)
    return out


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _ordered(values: Iterable[X]) -> list[X]:
    return list(dict.fromkeys(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """A quotient of sums."""

    value: float
    moe: float | None
    """Half the 95 % interval; None: of one part alone nothing can be said."""


def ratio(parts: Sequence[tuple[float, float]]) -> Ratio:
    """Divide the sums of (amount, number of tokens) over documents; the numbers must not all be
    0."""
    total = math.fsum(number for _, number in parts)
    value = math.fsum(amount for amount, _ in parts) / total
    known = [part for part in parts if part[1]]
    count = len(known)
    if count < 2 or not math.isfinite(value):
        return Ratio(value=value, moe=None)
    added = np.array([(amount - value * number) / total for amount, number in known])
    return Ratio(value=value, moe=quantile(count) * error(added))
