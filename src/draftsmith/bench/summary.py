"""A finished measurement as summary.json, a table for the terminal, plain sentences and a page.

The page is one file: it makes no request to anywhere and is readable in light and dark.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from draftsmith.bench.costs import CostTable
from draftsmith.bench.plots import draw_plots
from draftsmith.bench.records import (
    BASELINE,
    TRANSFORMERS,
    DrafterMetrics,
    Floor,
    RunRecord,
    drafter_metrics,
    exceeds_floor,
    paired_paces,
    short_name,
    total_floor,
    weighted_speedup,
)
from draftsmith.core.verify import lossy_sentence
from draftsmith.intervals import Interval
from draftsmith.plots import PlotImage
from draftsmith.provenance import jsonable, write_json_atomic, write_text_atomic

HALF = ("bfloat16", "float16")
MAX_SAMPLES = 3
"""Prompts whose texts are shown."""


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
    engine: str | None = None
    """What ran the target's forwards, as `HFTarget.engine`."""
    exact: bool = False
    """Its logits are equal bit for bit in forwards of every width."""
    quantised: bool = False
    """It computes with weights of 4 or 8 bits, which transformers does not."""
    run: str | None = None
    """Id of the run, as in its records."""
    asked: int | None = None
    """Prompts that were asked for; None: all of the suite."""
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
        short = {entry.name: short_name(entry.name) for entry in self.metrics}
        if len(set(short.values())) < len(short):
            short = {name: name for name in short}
        lossy = {entry.name for entry in self.metrics if entry.lossy_rule is not None}
        return {name: f"{own} (lossy)" if name in lossy else own for name, own in short.items()}

    def row_labels(self) -> dict[str, str]:
        """Return the names in tables and plots, where both baselines are spelt out."""
        special = {BASELINE: "plain decoding", TRANSFORMERS: "transformers"}
        return {name: special.get(name, label) for name, label in self.labels().items()}


# --------------------------------------------------------------------------- summary.json


def summary(report: BenchReport) -> dict[str, Any]:
    """Return the content of summary.json: plain JSON, metrics without meaning are null."""
    floor = report.floor
    content = {
        "target": report.target,
        "drafters": [_entry(report, entry) for entry in report.drafters],
        "transformers": [
            {name: getattr(entry, name) for name in _RIVAL}
            for entry in report.metrics
            if entry.name == TRANSFORMERS
        ],
        "dtype": report.dtype,
        "engine": report.engine,
        "losslessness": {
            "lossy_rules": _lossy_rules(report),
            "sentences": losslessness_sentences(report),
            "numerical_floor_rate": None if floor is None else floor.flips / max(floor.tokens, 1),
            "numerical_floor_tokens": None if floor is None else floor.tokens,
            "numerical_floor_largest_gap": None if floor is None else floor.largest_gap,
        },
        "prompts": report.num_prompts,
        "prompts_asked": report.asked,
        "repeats": report.repeats,
        "max_new_tokens": report.max_new_tokens,
        "costs": report.costs,
        "run": report.run,
        "command": report.command,
        "versions": report.versions,
        "machine": report.machine,
    }
    out: dict[str, Any] = jsonable(content)
    return out


_RIVAL = (
    *("temperature", "speedup", "speedup_ci95", "seconds_per_token"),
    *("identical_to_autoregressive", "largest_gap_at_divergence", "divergence_rate"),
)
"""What summary.json says of transformers."""


def _entry(report: BenchReport, entry: DrafterMetrics) -> dict[str, Any]:
    plain = dataclasses.asdict(entry)
    if report.floor is not None and entry.temperature == 0:
        mine = report.of(entry.name, 0.0)
        plain["exceeds_numerical_floor"] = exceeds_floor(mine, report.floor)
    plain["expected"] = report.expected.get((entry.name, entry.temperature))
    return plain


# --------------------------------------------------------------------------- terminal


COLUMNS = {
    "speed-up": "speed\nup",
    "95 % interval": "95 %\ninterval",
    "predicted": "pre-\ndict.",
    "vs transformers": "vs\ntrf.",
    "tokens per step": "tok/\nstep",
    "accepted": "ac-\ncept",
    "in loops": "in\nloop",
    "tokens per step outside loops": "",
    "accepted outside loops": "",
    "speed-up outside loops": "",
    "efficiency": "ef-\nfic",
    "same tokens": "same\ntok.",
}
"""Columns of the page, and what they are called in the terminal (empty: for the page alone)."""


def terminal_table(report: BenchReport) -> Table:
    """Lay out the main metrics for 80 columns, a line per drafter and temperature."""
    how = report.engine if report.exact else report.dtype
    title = f"{report.target} ({how}), {report.num_prompts} prompts x {report.repeats}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.padding = (0, 1, 0, 0)
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=20)
    shown = {name: short for name, short in COLUMNS.items() if short}
    for short in shown.values():
        table.add_column(short, justify="right", no_wrap=True)
    for temperature, own in itertools.groupby(rows(report), lambda row: row["temperature"]):
        table.add_row(f"temperature {temperature}", style="italic")
        for row in own:
            cells = row["cells"] | {"same tokens": row["same"]}
            style = "" if row["plain"] else "bold"
            table.add_row(row["drafter"], *(cells[name] for name in shown), style=style)
        table.add_section()
    return table


def rows(report: BenchReport) -> list[dict[str, Any]]:
    """Build the table of results as text, by temperature: its `cells` by the names of `COLUMNS`;
    `same`: the last cell in one word."""
    labels, out = report.row_labels(), []
    for temperature in report.temperatures:
        for entry in report.metrics:
            if entry.temperature != temperature:
                continue
            baseline, plain = entry.name == BASELINE, entry.name in (BASELINE, TRANSFORMERS)
            identical = None if baseline else entry.identical_to_autoregressive
            word = {None: "", True: "yes", False: "no"}[identical]
            cells = (
                times(entry.speedup),
                "" if baseline else interval_text(entry.speedup_ci95),
                "" if plain else times(entry.predicted_speedup),
                times(entry.speedup_vs_transformers),
                number(entry.decode_tokens_per_step),
                percent(entry.acceptance_rate),
                percent(entry.loop_share),
                number(entry.decode_tokens_per_step_outside_loops),
                percent(entry.acceptance_rate_outside_loops),
                times(entry.speedup_outside_loops),
                percent(entry.engine_efficiency),
                "" if baseline else sameness(entry),
            )
            out.append(
                {
                    "temperature": f"{temperature:g}",
                    "drafter": labels[entry.name],
                    "plain": plain,
                    "cells": dict(zip(COLUMNS, cells, strict=True)),
                    "same": word if entry.lossy_rule is None else "lossy",
                }
            )
    return out


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
    if entry.identical_to_autoregressive is not False:
        return "yes" if entry.identical_to_autoregressive else ""
    gap = entry.largest_gap_at_divergence
    return f"{entry.divergences} differ" + ("" if gap is None else f", gap {gap:.2g}")


# --------------------------------------------------------------------------- sentences


def speed_sentences(report: BenchReport) -> list[str]:
    """Write one sentence per drafter about its speed-ups; those of greedy texts say how much of
    these lies in loops."""
    parts: dict[str, list[str]] = {}
    for entry in report.drafters:
        if entry.name != BASELINE and entry.speedup is not None:
            spread = interval_text(entry.speedup_ci95)
            inside = f" ({spread})" if spread else ""
            one = f"{entry.speedup:.2f}x{inside} at temperature {entry.temperature:g}"
            if entry.temperature == 0 and entry.loop_share is not None:
                one += f", {percent(entry.loop_share)} of its tokens in loops"
            parts.setdefault(entry.name, []).append(one)
    labels = report.labels()
    said = [f"{labels[name]}: {'; '.join(some)}" for name, some in parts.items()]
    if report.quantised and any(entry.name == TRANSFORMERS for entry in report.metrics):
        said.append(
            "Transformers computes with the weights unquantised: its speed is that of another "
            "format, and its texts may differ."
        )
    return said


def source_sentences(report: BenchReport) -> list[str]:
    """Write one sentence per drafter that joins several about whose drafts were accepted."""
    labels, out = report.labels(), []
    for entry in report.drafters:
        if entry.accepted_by_source:
            whole = sum(entry.accepted_by_source.values())
            own = [
                f"{name} {count}" + (f" ({percent(count / whole)})" if whole else "")
                for name, count in entry.accepted_by_source.items()
            ]
            out.append(
                f"{labels[entry.name]} at temperature {entry.temperature:g}, accepted tokens by "
                f"source: {', '.join(own)}"
            )
    return out


def prompt_sentences(report: BenchReport) -> list[str]:
    """Say so when fewer prompts were measured than were asked for."""
    return short_of_prompts(len({record.prompt for record in report.records}), report.asked)


def short_of_prompts(found: int, asked: int | None) -> list[str]:
    """A sentence where a suite has fewer prompts than `asked` (None: all that it has)."""
    if asked is None or found >= asked:
        return []
    return [f"The suite has {found} prompts, not the {asked} that --limit asks for."]


def losslessness_sentences(report: BenchReport) -> list[str]:
    """Write what the measurement shows about equality with plain decoding."""
    lossy, labels, floor = _lossy_rules(report), report.labels(), report.floor
    greedy = [
        e
        for e in report.drafters
        if e.lossy_rule is None and e.name != BASELINE and e.temperature == 0
    ]
    differing = [entry for entry in greedy if not entry.identical_to_autoregressive]
    same = [entry for entry in greedy if entry.identical_to_autoregressive]
    out = [
        f"Drafts were not verified exactly: {lossy_sentence(rule)}. "
        "Their texts were not compared with plain decoding's."
        for rule in lossy
    ]
    if same:
        everyone = len(same) > 1 and not differing
        who = "every drafter" if everyone else ", ".join(labels[entry.name] for entry in same)
        tokens = sum(r.tokens for r in report.of(same[0].name, 0.0) if r.repeat == 0)
        out.append(
            f"At temperature 0 the output of {who} was identical to plain decoding "
            f"({tokens} tokens)."
        )
    out += [_differ_sentence(report, entry) for entry in differing]
    if greedy and floor is not None and (differing or floor.flips):
        out.append(
            "The target scored again in other chunks differs from its own plain decoding "
            f"{floor.flips} times in {floor.tokens} tokens: that is the numerical floor."
        )
    for entry in differing:
        if floor is not None and exceeds_floor(report.of(entry.name, 0.0), floor):
            out.append(
                f"{labels[entry.name]} differs more often than this floor explains: "
                "please report it."
            )
    if report.exact and not lossy:
        out.append(
            f"The engine ({report.engine}) computes equal logits, bit for bit, in steps of "
            "every width, batch and tree: drafts cannot change a token by rounding."
        )
    elif report.dtype in HALF and not lossy:
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


def _differ_sentence(report: BenchReport, entry: DrafterMetrics) -> str:
    first = [r for r in report.of(entry.name, 0.0) if r.repeat == 0]
    bounds = [r.divergence.bound for r in first if r.divergence is not None]
    sentence = (
        f"At temperature 0 {report.labels()[entry.name]} differs from plain decoding in "
        f"{entry.divergences} of {entry.prompts} texts; the target's top-2 logit gap there was "
        f"at most {entry.largest_gap_at_divergence or 0.0:.3g}"
    )
    if entry.divergences_over_bound:
        return (
            f"{sentence}: {entry.divergences_over_bound} of them are over the bound that rounding "
            "explains, please report it."
        )
    return f"{sentence}, within what rounding explains (bound {min(bounds, default=0.0):.3g})."


# --------------------------------------------------------------------------- page


def render_page(template: str, **content: Any) -> str:
    """Fill in a template of this package; texts are escaped, an undefined name is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("draftsmith.bench", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(content)


def render(report: BenchReport, drawn: Sequence[PlotImage]) -> str:
    """Render the page: one file that needs no other."""
    return render_page(
        "report.html.j2",
        report=report,
        rows=rows(report),
        columns=list(COLUMNS),
        speed=[*prompt_sentences(report), *speed_sentences(report), *source_sentences(report)],
        losslessness=losslessness_sentences(report),
        plots=drawn,
        samples=samples(report),
        tags=tag_table(report),
        no_divergence=not any(image.name == "divergence_gaps" for image in drawn),
    )


def samples(report: BenchReport) -> list[dict[str, Any]]:
    """Select the first prompts, with every drafter's text at the lowest temperature."""
    shown = [r for r in report.records if r.pieces is not None]
    shown = [r for r in shown if r.temperature == min(report.temperatures)]
    labels, out = report.row_labels(), []
    for key in list(dict.fromkeys((r.prompt, r.turn) for r in shown))[:MAX_SAMPLES]:
        mine = [r for r in shown if (r.prompt, r.turn) == key]
        texts = [
            {"drafter": labels[name], "pieces": r.pieces, "note": _sample_note(r)}
            for name in labels
            for r in mine
            if r.drafter == name and name not in (BASELINE, TRANSFORMERS)
        ]
        if texts:
            out.append({"prompt": key[0], "tail": mine[0].prompt_tail or "", "texts": texts})
    return out


def _sample_note(record: RunRecord) -> str:
    if not record.steps:
        return ""
    note = f"{record.tokens} tokens in {record.steps} steps"
    if record.divergence is not None:
        note += f"; differs from plain decoding after {record.divergence.at} tokens"
    return note


def tag_table(report: BenchReport) -> dict[str, Any] | None:
    """Tabulate speed-ups by tag, or by language without tags; None with fewer than two."""

    def some(records: Iterable[RunRecord], tag: str) -> list[RunRecord]:
        return [record for record in records if getattr(record, kind) == tag]

    for kind in ("tag", "language"):
        found = dict.fromkeys(getattr(record, kind) for record in report.records)
        tags = [tag for tag in found if tag is not None]
        if len(tags) < 2:
            continue
        labels, lines = report.row_labels(), []
        for entry in report.metrics:
            if entry.name == BASELINE:
                continue
            plain = report.of(BASELINE, entry.temperature)
            mine = report.of(entry.name, entry.temperature)
            paces = [paired_paces(some(plain, tag), some(mine, tag)) for tag in tags]
            cells = [times(weighted_speedup(one)) for one in paces]
            lines.append((f"{entry.temperature:g}", labels[entry.name], *cells))
        return {"tags": tags, "rows": lines}
    return None


def write_report(report: BenchReport, folder: Path) -> None:
    """Write summary.json, figures/ and report.html, each file atomically."""
    write_json_atomic(folder / "summary.json", summary(report))
    drawn = draw_plots(report)
    for image in drawn:
        image.save(folder / "figures")
    write_text_atomic(folder / "report.html", render(report, drawn))
