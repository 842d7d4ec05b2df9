"""Records of a measurement and the metrics that are computed from them.

A line of records.jsonl is one prompt, drafter, temperature and repeat; lines are all that metrics
need. Seconds are wall-clock. The step that carries the prompt is kept apart (`prefill_*`):
speed-ups compare the decoding behind it. Prompts that were decoded together form a group; seconds
are the whole group's, on each of its lines.

tokens per step (tau)     generated tokens / target forwards, the prompt's forward included
  decoding alone          the same behind the prompt's forward, in which drafters over hidden states
                          cannot draft
loop share, outside loops see `loops`; steps outside are those behind the prompt's forward
acceptance rate           accepted tokens / depth offered on the best path
node acceptance rate      accepted nodes / nodes proposed (equal for chains)
acceptance by position    accepted at depth d / offered at depth d behind accepted ones
speed-up                  decoding seconds per token of plain decoding / of the drafter: per prompt
                          the median over repeats, prompts weighted by their tokens
its interval              95 % bootstrap over prompts, both sides of a prompt drawn together
predicted speed-up        see `costs`: from a cost table that is measured apart from the run
engine efficiency         (draft + target forward seconds) / all seconds of the decoding phase

A metric that has no meaning for a drafter is None.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draftsmith.bench.loops import StepCounts
from draftsmith.config import from_dict
from draftsmith.core.generation import Piece
from draftsmith.data.text import read_lines
from draftsmith.errors import InputError
from draftsmith.intervals import BOOTSTRAP_DRAWS, Interval, bootstrap_ratio
from draftsmith.provenance import parse_json, recorded

BASELINE = "none"
"""Our own autoregressive loop: what a speed-up is measured against."""
TRANSFORMERS = "transformers"
"""The second column: `generate` of transformers, without any draft."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSeconds:
    """Where the seconds of the decoding phase went (the group's)."""

    draft: float
    """The drafter: proposing, and taking in what was settled."""
    target: float
    """The target's forwards, their masks and cache writes included."""
    verify: float
    """Laws, draws, accepting."""
    other: float
    """The rest of the loop: stopping, committing, bookkeeping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSeconds:
    """What the decoding phase should have cost by the cost table, which is measured apart."""

    baseline: float
    """Its tokens, one by one: tokens * t_target(1)."""
    draft: float
    """Sum over its steps of t_draft(tokens fed)."""
    target: float
    """Sum over its steps of t_target(tokens fed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDivergence:
    """Where a text first differs from plain decoding's, and how near the target's choice was."""

    at: int
    """Number of generated tokens before it."""
    gap: float
    """Largest minus second largest logit of the target there, one by one, in its own dtype."""
    bound: float
    """A gap below this is a near-tie that rounding may flip (see `run.near_tie_bound`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The target against itself: the same text scored again in chunks, at temperature 0."""

    tokens: int
    """Tokens compared: up to each first flip."""
    flips: int
    """Scorings (one per chunk size) with a token that plain decoding did not choose."""
    largest_gap: float | None
    """The largest gap among the flips, as in `FirstDivergence`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One prompt decoded once."""

    prompt: str
    """The prompt's id in its suite."""
    run: str | None = None
    """Id of the run that measured it, as in its run.json; None: an earlier version did."""
    turn: int = 0
    tag: str | None = None
    language: str | None = None
    drafter: str
    temperature: float
    repeat: int
    seed: int
    place: int
    """When in its round this arm ran (rounds rotate the order)."""
    group: int
    prompt_tokens: int
    tokens: int
    """Generated tokens, those of the prompt's step included."""
    decode_tokens: int
    """Generated tokens behind the prompt's step."""
    steps: int | None = None
    """Target forwards, the prompt's included. None here and below: transformers does not say."""
    decode_steps: int | None = None
    loop_tokens: int | None = None
    """Generated tokens in repetition loops (`loops`); None: an older record, which does not say."""
    outside_loops: StepCounts | None = None
    seconds_outside_loops: float | None = None
    """What the steps counted there took. None: texts were decoded together and share their steps,
    or an older record."""
    accepted: int | None = None
    offered: int | None = None
    """Sum over steps of the depth offered on the best path."""
    proposed: int | None = None
    """Nodes in all trees."""
    by_position: tuple[tuple[int, int], ...] = ()
    """Per depth: (times offered behind accepted ones, times accepted)."""
    by_origin: dict[str, int] | None = None
    """Accepted tokens per origin of the draft."""
    by_source: dict[str, int] | None = None
    """Accepted tokens per source, of a drafter that joins several; None: it is one source, or an
    older record, which does not say."""
    finish_reason: str
    seconds: float
    """Wall-clock time from the prompt to the last token."""
    prefill_seconds: float
    """The prompt's step, cache allocation included."""
    decode_seconds: float
    phases: PhaseSeconds | None = None
    costs: CostSeconds | None = None
    digest: str
    """Digest of the generated token ids: equal digests, equal texts."""
    identical: bool | None = None
    """Same tokens as plain decoding; None above temperature 0 and under a lossy rule."""
    divergence: FirstDivergence | None = None
    floor: Floor | None = None
    """On lines of plain decoding only."""
    prompt_tail: str | None = None
    """The last characters of the prompt, to read the text with; first repeat only."""
    pieces: tuple[Piece, ...] | None = None
    """The text with origins; first repeat only."""
    lossy_rule: str | None = None
    """What it was verified by, if the output law is then not the target's."""


def short_name(name: str) -> str:
    """Return a drafter's kind, and of its source the last part."""
    kind, colon, source = name.partition(":")
    if colon:
        return f"{kind}:{Path(source).name}"
    return Path(name).name or name


def digest(tokens: Sequence[int]) -> str:
    """Return eight bytes of SHA-256 over the token ids, in hexadecimal."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


def read(path: Path) -> tuple[RunRecord, ...]:
    """Read the records of a file.

    Raises:
        InputError: no such file, or a line that is no record, contradicts itself or stands twice;
            it is named. Or records of several runs, or beside them what another run wrote about
            its own.
    """
    lines: dict[str, str] = {}
    for where, line in read_lines(path):
        first = lines.setdefault(line, where)
        if first != where:  # times are never equal to the last digit
            raise InputError(f"{where} repeats {first}: leave one of them out, or measure again")
    found = tuple(_read_line(where, line) for line, where in lines.items())
    runs = Counter(record.run for record in found)
    told = [f"{count} records of run {run or 'unknown'}" for run, count in runs.items()]
    for name, key in (("run.json", "id"), ("summary.json", "run")):
        run = recorded(path.with_name(name), key)
        if isinstance(run, str) and run not in runs:
            told.append(f"{name} of run {run}")
    if found and len(told) > 1:
        raise InputError(
            f"{path} mixes what several runs measured ({', '.join(told)}): their times must not be "
            "compared; give each a folder of its own, or measure again"
        )
    return found


def _read_line(where: str, line: str) -> RunRecord:
    record = from_dict(RunRecord, parse_json(line, where), where=where)
    fault = next(_faults(record), None)
    if fault is not None:
        raise InputError(f"{where}: {fault}; it was changed or damaged, so measure again")
    return record


_NEVER_BELOW_ZERO = (
    *("turn", "temperature", "repeat", "seed", "place", "group", "prompt_tokens", "tokens"),
    *("decode_tokens", "steps", "decode_steps", "loop_tokens", "accepted", "offered", "proposed"),
    *("seconds", "prefill_seconds", "decode_seconds", "seconds_outside_loops"),
)
_NEVER_ABOVE = (
    *(("decode_tokens", "tokens"), ("loop_tokens", "tokens"), ("accepted", "tokens")),
    *(("accepted", "offered"), ("offered", "proposed")),
)
_SHARES_OF_ACCEPTED = ("by_origin", "by_source")
_PARTS = ("phases", "costs", "divergence", "floor", "outside_loops")
_ROUNDING = 1e-6
"""Seconds that add up may differ by this share of them, ..."""
_CLOCK = 0.01
"""... and parts that were measured apart by this one."""


def _faults(record: RunRecord) -> Iterator[str]:
    """Yield what cannot be true of one text, the field first."""
    given = {name: getattr(record, name) for name in _NEVER_BELOW_ZERO}
    for part in filter(lambda name: getattr(record, name) is not None, _PARTS):
        given |= {f"{part}.{k}": v for k, v in asdict(getattr(record, part)).items()}
    for part in _SHARES_OF_ACCEPTED:
        given |= {f"{part}.{k}": v for k, v in (getattr(record, part) or {}).items()}
    for name, value in given.items():
        if value is not None and not 0 <= value < math.inf:
            yield f"{name} must be 0 or more, got {value}"
    for name, most in _NEVER_ABOVE:
        value, limit = getattr(record, name), getattr(record, most)
        if value is not None and limit is not None and value > limit:
            yield f"{name} is {value}, above {most} ({limit})"
    yield from _faults_of_counts(record)
    seconds = record.prefill_seconds + record.decode_seconds
    if abs(seconds - record.seconds) > _ROUNDING * record.seconds:
        yield (
            f"seconds is {record.seconds}, but prefill_seconds and decode_seconds make {seconds}"
        )
    if record.phases is not None:
        busy = sum(asdict(record.phases).values())
        if abs(busy - record.decode_seconds) > _CLOCK * record.decode_seconds:
            yield f"phases add up to {busy}, but decode_seconds is {record.decode_seconds}"
    outside, decoded = record.outside_loops, record.decode_tokens
    if outside is not None and not outside.accepted <= outside.tokens <= decoded:
        yield f"outside_loops.tokens is {outside.tokens}, not between its accepted and {decoded}"
    slow = record.seconds_outside_loops
    if slow is not None and outside is None:
        yield f"seconds_outside_loops is {slow}, but outside_loops is not there"
    if slow is not None and slow > (1 + _CLOCK) * record.decode_seconds:
        yield f"seconds_outside_loops is {slow}, above decode_seconds ({record.decode_seconds})"
    if record.divergence is not None and record.divergence.at > record.tokens:
        yield f"divergence.at is {record.divergence.at}, above tokens ({record.tokens})"
    if record.identical is not None and record.identical != (record.divergence is None):
        yield f"identical is {record.identical}, which divergence contradicts"


def _faults_of_counts(record: RunRecord) -> Iterator[str]:
    """A step emits what it accepts and one token of the target, which the last one may lack."""
    steps, accepted = record.steps, record.accepted
    if steps is None or accepted is None:
        return
    if not accepted + steps - 1 <= record.tokens <= accepted + steps:
        yield f"tokens is {record.tokens}, but {steps} steps accepted {accepted}"
    if record.decode_steps is not None and record.decode_steps != steps - 1:
        yield f"decode_steps is {record.decode_steps}, but steps {steps}, one for the prompt"
    for part in _SHARES_OF_ACCEPTED:
        shares = getattr(record, part)
        if shares is not None and sum(shares.values()) != accepted:
            yield f"{part} adds up to {sum(shares.values())}, but accepted is {accepted}"
    if record.by_position and sum(took for _, took in record.by_position) != accepted:
        yield f"by_position adds up to other accepted tokens than accepted ({accepted})"
    most = steps
    for depth, (tried, took) in enumerate(record.by_position):
        if not 0 <= took <= tried <= most:
            yield f"by_position has {took} of {tried} accepted at depth {depth}, of {most} steps"
        most = took


# --------------------------------------------------------------------------- metrics


class Pace(NamedTuple):
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
    """The prompt's own step included."""
    decode_tokens_per_step: float | None
    """Behind the prompt's own step."""
    loop_share: float | None
    """Share of the generated tokens in repetition loops; None: some record does not say."""
    decode_tokens_per_step_outside_loops: float | None
    acceptance_rate_outside_loops: float | None
    acceptance_rate: float | None
    acceptance_rate_per_prompt: float | None
    """Mean over prompts of each prompt's rate."""
    node_acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...] | None
    accepted_by_source: dict[str, int] | None
    """Accepted tokens per source, of a drafter that joins several; None: some record does not
    say."""
    speedup: float | None
    speedup_ci95: Interval | None
    """None with fewer than two groups of prompts."""
    speedup_median_prompt: float | None
    speedup_outside_loops: float | None
    """Over the steps whose first emitted token lies outside of loops, of plain decoding and of the
    drafter; None: texts were decoded together, or all their tokens lie in loops."""
    speedup_outside_loops_ci95: Interval | None
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
    runs: dict[tuple[str, float], list[RunRecord]] = defaultdict(list)
    for record in records:
        runs[record.drafter, record.temperature].append(record)
    names = sorted(
        dict.fromkeys(name for name, _ in runs), key=lambda n: (n != BASELINE, n == TRANSFORMERS)
    )
    temperatures = dict.fromkeys(record.temperature for record in records)
    return tuple(
        _metrics(
            mine,
            paired_paces(runs.get((BASELINE, temperature), ()), mine),
            _paces_outside_loops(runs.get((BASELINE, temperature), ()), mine),
            paired_paces(runs.get((TRANSFORMERS, temperature), ()), mine)
            if name != TRANSFORMERS
            else (),
        )
        for name in names
        for temperature in temperatures
        if (mine := runs.get((name, temperature)))
    )


def _metrics(
    mine: Sequence[RunRecord],
    paces: Sequence[Pace],
    paces_outside: Sequence[Pace],
    rival_paces: Sequence[Pace],
) -> DrafterMetrics:
    """Compute the metrics of the records of one drafter at one temperature."""
    steps, offered, proposed, accepted = (
        sum(getattr(record, name) or 0 for record in mine)
        for name in ("steps", "offered", "proposed", "accepted")
    )
    rates = _rates_by_prompt(mine)
    positions = tuple(took / tried for tried, took in offers_by_position(mine) if tried)
    costs = [record.costs for record in mine if record.costs is not None]
    spent = sum(one.draft + one.target for one in costs)
    phases = _total_phases(mine)
    busy = sum(phases.values())
    decoded = sum(record.decode_tokens for record in mine)
    own_paces = _paces(mine)
    weight = sum(tokens for tokens, _ in own_paces.values())
    lossy_rule = next((r.lossy_rule for r in mine if r.lossy_rule is not None), None)
    greedy = mine[0].temperature == 0 and lossy_rule is None
    found = [r.divergence for r in mine if r.repeat == 0 and r.divergence is not None]
    identical = [record.identical for record in mine if record.identical is not None]
    diverged, compared = _divergences(mine)
    tokens = sum(record.tokens for record in mine)
    decode_steps = sum(record.decode_steps or 0 for record in mine)
    looped = [r.loop_tokens for r in mine if r.loop_tokens is not None]
    outside = [r.outside_loops for r in mine if r.outside_loops is not None]
    outside = outside if len(outside) == len(mine) else []
    return DrafterMetrics(
        name=mine[0].drafter,
        temperature=mine[0].temperature,
        prompts=len({(r.prompt, r.turn) for r in mine}),
        tokens=tokens,
        tokens_per_step=tokens / steps if steps else None,
        decode_tokens_per_step=decoded / decode_steps if decode_steps else None,
        loop_share=sum(looped) / tokens if tokens and len(looped) == len(mine) else None,
        decode_tokens_per_step_outside_loops=_ratio(outside, "tokens", "steps"),
        acceptance_rate_outside_loops=_ratio(outside, "accepted", "offered"),
        acceptance_rate=accepted / offered if offered else None,
        acceptance_rate_per_prompt=statistics.fmean(rates) if rates else None,
        node_acceptance_rate=accepted / proposed if proposed else None,
        acceptance_by_position=positions or None,
        accepted_by_source=_accepted_by_source(mine),
        speedup=weighted_speedup(paces),
        speedup_ci95=bootstrap_interval(paces),
        speedup_median_prompt=statistics.median(p.baseline / p.candidate for p in paces)
        if paces
        else None,
        speedup_outside_loops=weighted_speedup(paces_outside),
        speedup_outside_loops_ci95=bootstrap_interval(paces_outside),
        speedup_vs_transformers=weighted_speedup(rival_paces),
        speedup_vs_transformers_ci95=bootstrap_interval(rival_paces),
        predicted_speedup=sum(one.baseline for one in costs) / spent if spent > 0 else None,
        engine_efficiency=(phases["draft"] + phases["target"]) / busy if busy > 0 else None,
        seconds_per_token=sum(tokens * pace for tokens, pace in own_paces.values()) / weight
        if weight
        else None,
        phases_per_token=PhaseSeconds(**{name: part / decoded for name, part in phases.items()})
        if phases and decoded
        else None,
        identical_to_autoregressive=all(identical) if greedy and identical else None,
        divergences=len(found) if greedy else None,
        divergence_rate=diverged / compared if greedy and compared else None,
        largest_gap_at_divergence=max((one.gap for one in found), default=None),
        divergences_over_bound=sum(one.gap > one.bound for one in found) if greedy else None,
        lossy_rule=lossy_rule,
    )


def _ratio(counts: Sequence[StepCounts], above: str, below: str) -> float | None:
    whole = sum(getattr(one, below) for one in counts)
    return sum(getattr(one, above) for one in counts) / whole if whole else None


Spent = tuple[int, float]
"""(tokens, seconds of one group in one repeat)."""


def _decoding(lines: Sequence[RunRecord]) -> Spent:
    """The whole decoding phase. Every line of a group carries the group's seconds, so they count
    once, its tokens all together."""
    return sum(line.decode_tokens for line in lines), lines[0].decode_seconds


def _outside_loops(lines: Sequence[RunRecord]) -> Spent:
    """The steps outside of loops, of a text that was decoded alone."""
    counts, seconds = lines[0].outside_loops, lines[0].seconds_outside_loops
    assert counts is not None and seconds is not None
    return counts.tokens, seconds


def paired_paces(
    baseline: Sequence[RunRecord],
    candidate: Sequence[RunRecord],
    *,
    spent: Callable[[Sequence[RunRecord]], Spent] = _decoding,
) -> tuple[Pace, ...]:
    """Return both seconds per token of each group of prompts that both sides have."""
    left, right = _paces(baseline, spent), _paces(candidate, spent)
    return tuple(Pace(*left[group], right[group][1]) for group in left if group in right)


def _paces_outside_loops(
    baseline: Sequence[RunRecord], candidate: Sequence[RunRecord]
) -> tuple[Pace, ...]:
    """Return those of `paired_paces` outside of loops; none where some record does not say."""
    known = (one.seconds_outside_loops is not None for one in (*baseline, *candidate))
    return paired_paces(baseline, candidate, spent=_outside_loops) if all(known) else ()


def _paces(
    records: Sequence[RunRecord], spent: Callable[[Sequence[RunRecord]], Spent] = _decoding
) -> dict[int, tuple[float, float]]:
    """Return by group its tokens (mean over repeats) and seconds per token (median)."""
    tokens, paces = defaultdict(list), defaultdict(list)
    for (group, _), lines in _by_group_and_repeat(records).items():
        count, seconds = spent(lines)
        tokens[group].append(count)
        if count and seconds > 0:
            paces[group].append(seconds / count)
    return {g: (statistics.fmean(tokens[g]), statistics.median(own)) for g, own in paces.items()}


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
    weight, baseline, candidate = np.array(paces).T
    return bootstrap_ratio(weight * baseline, weight * candidate, draws=draws, seed=seed)


def _total_phases(records: Sequence[RunRecord]) -> dict[str, float]:
    """Sum the seconds of all groups and repeats; empty when an engine does not report them."""
    parts = [lines[0].phases for lines in _by_group_and_repeat(records).values()]
    known = [part for part in parts if part is not None]
    names = ("draft", "target", "verify", "other") if known else ()
    return {name: sum(getattr(part, name) for part in known) for name in names}


def offers_by_position(records: Iterable[RunRecord]) -> list[tuple[int, int]]:
    """Add up per depth: (times offered behind accepted ones, times accepted)."""
    columns = zip_longest(*(record.by_position for record in records), fillvalue=(0, 0))
    return [(sum(a for a, _ in column), sum(b for _, b in column)) for column in columns]


def _accepted_by_source(records: Sequence[RunRecord]) -> dict[str, int] | None:
    found = [record.by_source for record in records if record.by_source is not None]
    if len(found) < len(records):
        return None
    names = dict.fromkeys(name for one in found for name in one)
    return {name: sum(one.get(name, 0) for one in found) for name in names}


def _rates_by_prompt(records: Sequence[RunRecord]) -> list[float]:
    """Return the acceptance rate of each prompt for which something was offered."""
    accepted: dict[tuple[str, int], int] = defaultdict(int)
    offered: dict[tuple[str, int], int] = defaultdict(int)
    for record in records:
        accepted[record.prompt, record.turn] += record.accepted or 0
        offered[record.prompt, record.turn] += record.offered or 0
    return [accepted[key] / number for key, number in offered.items() if number]


def _divergences(records: Sequence[RunRecord]) -> tuple[int, int]:
    """Count divergences, and tokens that could diverge: those up to each first difference."""
    first = [record for record in records if record.repeat == 0 and record.identical is not None]
    compared = sum(r.divergence.at + 1 if r.divergence else r.tokens for r in first)
    return sum(record.divergence is not None for record in first), compared


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

    diverged, compared = _divergences(records)
    table = [[diverged, compared - diverged], [floor.flips, floor.tokens - floor.flips]]
    return bool(diverged) and float(fisher_exact(table, alternative="greater").pvalue) < 0.01


def _by_group_and_repeat(records: Sequence[RunRecord]) -> dict[tuple[int, int], list[RunRecord]]:
    out: dict[tuple[int, int], list[RunRecord]] = defaultdict(list)
    for record in records:
        out[record.group, record.repeat].append(record)
    return out
