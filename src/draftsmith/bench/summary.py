"""The results of a measurement: summary.json, a table for the terminal, and plain sentences."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from draftsmith.bench.costs import CostTable
from draftsmith.bench.metrics import (
    DrafterMetrics,
    Interval,
    drafter_metrics,
    exceeds_floor,
    total_floor,
)
from draftsmith.bench.records import BASELINE, TRANSFORMERS, Floor, RunRecord
from draftsmith.core.verify import lossy_sentence
from draftsmith.provenance import jsonable

HALF = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A further part of the page."""

    title: str
    sentences: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """A finished measurement and what produced it."""

    target: str
    dtype: str
    records: tuple[RunRecord, ...]
    command: str
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    max_new_tokens: int
    costs: CostTable | None = None
    sections: tuple[Section, ...] = ()
    """Further parts of the page."""
    expected: Mapping[tuple[str, float], Mapping[str, Any]] = field(default_factory=dict)
    """By drafter and temperature: expected acceptance, computed and not counted (`expected`)."""

    @cached_property
    def metrics(self) -> tuple[DrafterMetrics, ...]:
        return drafter_metrics(self.records)

    @cached_property
    def floor(self) -> Floor | None:
        return total_floor(self.records)

    @property
    def drafters(self) -> tuple[DrafterMetrics, ...]:
        return tuple(entry for entry in self.metrics if entry.name != TRANSFORMERS)

    @property
    def rivals(self) -> tuple[DrafterMetrics, ...]:
        return tuple(entry for entry in self.metrics if entry.name == TRANSFORMERS)

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(entry.temperature for entry in self.metrics))

    @property
    def repeats(self) -> int:
        return len({record.repeat for record in self.records})

    @property
    def num_prompts(self) -> int:
        return len({(record.prompt, record.turn) for record in self.records})

    def of(self, name: str, temperature: float) -> tuple[RunRecord, ...]:
        return tuple(r for r in self.records if r.drafter == name and r.temperature == temperature)

    def labels(self) -> dict[str, str]:
        """Return names short enough for a plot: the kind, and the last part of a source; and with
        them, wherever they stand, that a rule was lossy."""
        names = list(dict.fromkeys(entry.name for entry in self.metrics))
        short = {name: short_name(name) for name in names}
        if len(set(short.values())) < len(short):
            short = {name: name for name in names}
        lossy = {entry.name for entry in self.metrics if entry.lossy_rule is not None}
        return {name: f"{short[name]} (lossy)" if name in lossy else short[name] for name in names}


def short_name(name: str) -> str:
    """Return a drafter's kind, and of its source the last part."""
    kind, colon, source = name.partition(":")
    if colon:
        return f"{kind}:{Path(source).name}"
    return Path(name).name or name


# --------------------------------------------------------------------------- summary.json


def summary(report: BenchReport) -> dict[str, Any]:
    """Return the content of summary.json: plain JSON, metrics without meaning are null."""
    content = {
        "target": report.target,
        "drafters": [_entry(report, entry) for entry in report.drafters],
        "transformers": [_rival(entry) for entry in report.rivals],
        "dtype": report.dtype,
        "losslessness": _losslessness(report),
        "prompts": report.num_prompts,
        "repeats": report.repeats,
        "max_new_tokens": report.max_new_tokens,
        "costs": None if report.costs is None else report.costs,
        "command": report.command,
        "versions": report.versions,
        "machine": report.machine,
    }
    out: dict[str, Any] = jsonable(content)
    return out


def _entry(report: BenchReport, entry: DrafterMetrics) -> dict[str, Any]:
    plain = dataclasses.asdict(entry)
    for name in ("speedup_ci95", "speedup_vs_transformers_ci95"):
        plain[name] = _pair(getattr(entry, name))
    if report.floor is not None and entry.temperature == 0:
        mine = report.of(entry.name, 0.0)
        plain["exceeds_numerical_floor"] = exceeds_floor(mine, report.floor)
    plain["expected"] = report.expected.get((entry.name, entry.temperature))
    return plain


def _pair(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _rival(entry: DrafterMetrics) -> dict[str, Any]:
    return {
        "temperature": entry.temperature,
        "speedup": entry.speedup,
        "speedup_ci95": _pair(entry.speedup_ci95),
        "seconds_per_token": entry.seconds_per_token,
        "identical_to_autoregressive": entry.identical_to_autoregressive,
        "largest_gap_at_divergence": entry.largest_gap_at_divergence,
        "divergence_rate": entry.divergence_rate,
    }


def _losslessness(report: BenchReport) -> dict[str, Any]:
    floor = report.floor
    return {
        "lossy_rules": _lossy_rules(report),
        "sentences": losslessness_sentences(report),
        "numerical_floor_rate": None if floor is None else floor.flips / max(floor.tokens, 1),
        "numerical_floor_tokens": None if floor is None else floor.tokens,
        "numerical_floor_largest_gap": None if floor is None else floor.largest_gap,
    }


# --------------------------------------------------------------------------- terminal


def terminal_table(report: BenchReport) -> Table:
    """Lay out the main metrics for 80 columns, a line per drafter and temperature."""
    title = f"{report.target} ({report.dtype}), {report.num_prompts} prompts x {report.repeats}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=20)
    for name in ("speed-\nup", "95 %\ninterval", "pre-\ndict.", "vs\ntrf."):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("tok/\nstep", "ac-\ncept", "eff-\nic.", "same\ntok."):
        table.add_column(name, justify="right", no_wrap=True)
    labels = report.labels()
    for temperature in report.temperatures:
        table.add_row(f"temperature {temperature:g}", style="italic")
        for entry in report.metrics:
            if entry.temperature != temperature:
                continue
            plain = entry.name in (BASELINE, TRANSFORMERS)
            same = entry.identical_to_autoregressive
            table.add_row(
                row_label(entry.name, labels),
                times(entry.speedup),
                "" if entry.name == BASELINE else interval_text(entry.speedup_ci95),
                "" if plain else times(entry.predicted_speedup),
                times(entry.speedup_vs_transformers),
                number(entry.tokens_per_step),
                percent(entry.acceptance_rate),
                percent(entry.engine_efficiency),
                "lossy"
                if entry.lossy_rule is not None
                else ""
                if entry.name == BASELINE or same is None
                else "yes"
                if same
                else "no",
                style="" if plain else "bold",
            )
        table.add_section()
    return table


def row_label(name: str, labels: Mapping[str, str]) -> str:
    """Return the name of a drafter in tables and plots."""
    special = {BASELINE: "plain decoding", TRANSFORMERS: "transformers"}
    return special.get(name, labels[name])


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"


def interval_text(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.low:.2f}-{interval.high:.2f}"


def sameness(entry: DrafterMetrics) -> str:
    """Describe in a word or two whether the tokens were those of plain decoding."""
    if entry.lossy_rule is not None:
        return "lossy rule: not compared"
    if entry.identical_to_autoregressive is None:
        return ""
    if entry.identical_to_autoregressive:
        return "yes"
    gap = entry.largest_gap_at_divergence
    return f"{entry.divergences} differ" + ("" if gap is None else f", gap {gap:.2g}")


# --------------------------------------------------------------------------- sentences


def speed_sentences(report: BenchReport) -> list[str]:
    """Write one sentence per drafter about its speed-ups."""
    labels = report.labels()
    out = []
    for name in dict.fromkeys(entry.name for entry in report.drafters):
        if name == BASELINE:
            continue
        parts = []
        for entry in report.drafters:
            if entry.name != name or entry.speedup is None:
                continue
            spread = interval_text(entry.speedup_ci95)
            inside = f" ({spread})" if spread else ""
            parts.append(f"{entry.speedup:.2f}x{inside} at temperature {entry.temperature:g}")
        if parts:
            out.append(f"{labels[name]}: {', '.join(parts)}")
    return out


def losslessness_sentences(report: BenchReport) -> list[str]:
    """Write what the measurement shows about equality with plain decoding."""
    lossy = _lossy_rules(report)
    exact = [e for e in report.drafters if e.lossy_rule is None and e.name != BASELINE]
    greedy = [entry for entry in exact if entry.temperature == 0]
    out = [
        f"Drafts were not verified exactly: {lossy_sentence(rule)}. "
        "Their texts were not compared with plain decoding's."
        for rule in lossy
    ]
    if greedy:
        differing = [entry for entry in greedy if not entry.identical_to_autoregressive]
        same = [entry for entry in greedy if entry.identical_to_autoregressive]
        if same:
            out.append(_same_sentence(report, same, everyone=not differing))
        out += [_differ_sentence(report, entry) for entry in differing]
        floor = report.floor
        if floor is not None and (differing or floor.flips):
            out.append(
                "The target scored again in other chunks differs from its own plain decoding "
                f"{floor.flips} times in {floor.tokens} tokens: that is the numerical floor."
            )
        for entry in differing:
            if floor is not None and exceeds_floor(report.of(entry.name, 0.0), floor):
                out.append(
                    f"{report.labels()[entry.name]} differs more often than this floor explains: "
                    "please report it."
                )
    if report.dtype in HALF and not lossy:
        out.append(
            f"In {report.dtype} no engine can promise equal tokens: forwards of different widths "
            "round differently, and near-ties may flip."
        )
    if not lossy and any(temperature > 0 for temperature in report.temperatures):
        out.append(
            "Above temperature 0 texts are draws: equal is their law, which the test-suite checks, "
            "not their tokens."
        )
    return out


def _lossy_rules(report: BenchReport) -> list[str]:
    rules = [entry.lossy_rule for entry in report.drafters]
    return list(dict.fromkeys(rule for rule in rules if rule is not None))


def _same_sentence(report: BenchReport, same: Sequence[DrafterMetrics], *, everyone: bool) -> str:
    labels = report.labels()
    tokens = sum(r.tokens for r in report.of(same[0].name, 0.0) if r.repeat == 0)
    who = ", ".join(labels[entry.name] for entry in same)
    if everyone and len(same) > 1:
        who = "every drafter"
    return (
        f"At temperature 0 the output of {who} was identical to plain decoding ({tokens} tokens)."
    )


def _differ_sentence(report: BenchReport, entry: DrafterMetrics) -> str:
    label, gap = report.labels()[entry.name], entry.largest_gap_at_divergence
    first = [r for r in report.of(entry.name, 0.0) if r.repeat == 0 and r.divergence]
    bounds = [r.divergence.bound for r in first if r.divergence is not None]
    sentence = (
        f"At temperature 0 {label} differs from plain decoding in {entry.divergences} of "
        f"{entry.prompts} texts; the target's top-2 logit gap there was at most "
        f"{0.0 if gap is None else gap:.3g}"
    )
    if entry.divergences_over_bound:
        return (
            f"{sentence}: {entry.divergences_over_bound} of them are over the bound that rounding "
            "explains, please report it."
        )
    return f"{sentence}, within what rounding explains (bound {min(bounds, default=0.0):.3g})."
