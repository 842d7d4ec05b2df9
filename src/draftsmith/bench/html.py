"""The HTML report: one file, no request to anywhere, readable in light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.bench.metrics import paired_paces, weighted_speedup
from draftsmith.bench.plots import draw_plots
from draftsmith.bench.records import BASELINE, TRANSFORMERS, RunRecord
from draftsmith.bench.summary import (
    BenchReport,
    interval_text,
    losslessness_sentences,
    number,
    percent,
    row_label,
    sameness,
    speed_sentences,
    summary,
    times,
)
from draftsmith.core.generation import Piece
from draftsmith.plots import PlotImage
from draftsmith.provenance import write_json_atomic, write_text_atomic

MAX_SAMPLES = 3
"""Prompts whose texts are shown."""

DEFINITIONS = (
    (
        "speed-up",
        "Seconds per token of plain decoding divided by those of the drafter. Decoding phase only: "
        "the step that carries the prompt is left out on both sides. Per prompt the median over "
        "repeats; prompts weighted by their tokens; 95 % bootstrap interval over prompts.",
    ),
    ("plain decoding", "The same loop, one token per step. The speed-up is measured against it."),
    (
        "vs transformers",
        "The same ratio with transformers' own generate on the same weights as baseline.",
    ),
    (
        "predicted",
        "Tokens per step x t(1 token) / (t(draft) + t(n tokens)), with times from a table that is "
        "measured apart from the run.",
    ),
    (
        "tokens per step",
        "Generated tokens per forward of the target, its own correction or bonus token included.",
    ),
    (
        "accepted",
        "Accepted tokens / depth offered on the best path of the draft. Only tokens that were "
        "generated count.",
    ),
    (
        "efficiency",
        "Seconds of the drafter and of target forwards / all seconds of the decoding phase.",
    ),
    (
        "same tokens",
        "At temperature 0: whether the tokens are those of plain decoding; otherwise how many "
        "texts differ, and the largest top-2 logit gap of the target where they do.",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultRow:
    """A line of the table of results, as text."""

    temperature: str
    drafter: str
    plain: bool
    cells: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleText:
    """One text with its origins."""

    drafter: str
    pieces: tuple[Piece, ...]
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One prompt with the text of every drafter."""

    prompt: str
    tail: str
    texts: tuple[SampleText, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TagTable:
    """Speed-ups by tag (or language) of the prompts."""

    tags: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """Temperature, drafter, then one speed-up per tag."""


COLUMNS = (
    "speed-up",
    "95 % interval",
    "predicted",
    "vs transformers",
    "tokens per step",
    "accepted",
    "efficiency",
    "same tokens",
)


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
        columns=COLUMNS,
        rows=rows(report),
        speed=speed_sentences(report),
        losslessness=losslessness_sentences(report),
        plots=drawn,
        samples=samples(report),
        tags=tag_table(report),
        definitions=DEFINITIONS,
        no_divergence=not any(image.name == "divergence_gaps" for image in drawn),
    )


def rows(report: BenchReport) -> tuple[ResultRow, ...]:
    """Build the table of results, by temperature."""
    labels = report.labels()
    out = []
    for temperature in report.temperatures:
        for entry in report.metrics:
            if entry.temperature != temperature:
                continue
            baseline = entry.name == BASELINE
            plain = entry.name in (BASELINE, TRANSFORMERS)
            out.append(
                ResultRow(
                    temperature=f"{temperature:g}",
                    drafter=row_label(entry.name, labels),
                    plain=plain,
                    cells=(
                        times(entry.speedup),
                        "" if baseline else interval_text(entry.speedup_ci95),
                        "" if plain else times(entry.predicted_speedup),
                        times(entry.speedup_vs_transformers),
                        number(entry.tokens_per_step),
                        percent(entry.acceptance_rate),
                        percent(entry.engine_efficiency),
                        "" if baseline else sameness(entry),
                    ),
                )
            )
    return tuple(out)


def samples(report: BenchReport) -> tuple[Sample, ...]:
    """Select the first prompts with their texts at the lowest temperature."""
    if not report.temperatures:
        return ()
    temperature = min(report.temperatures)
    shown = [r for r in report.records if r.temperature == temperature and r.pieces is not None]
    keys = list(dict.fromkeys((r.prompt, r.turn) for r in shown))[:MAX_SAMPLES]
    labels = report.labels()
    out = []
    for prompt, turn in keys:
        mine = [r for r in shown if (r.prompt, r.turn) == (prompt, turn)]
        mine.sort(key=lambda r: list(labels).index(r.drafter))
        texts = tuple(
            SampleText(
                drafter=row_label(r.drafter, labels),
                pieces=r.pieces or (),
                note=_sample_note(r),
            )
            for r in mine
            if r.drafter not in (BASELINE, TRANSFORMERS)
        )
        if texts:
            out.append(Sample(prompt=prompt, tail=mine[0].prompt_tail or "", texts=texts))
    return tuple(out)


def _sample_note(record: RunRecord) -> str:
    if not record.steps:
        return ""
    note = f"{record.tokens} tokens in {record.steps} steps"
    if record.divergence is not None:
        note += f"; differs from plain decoding after {record.divergence.at} tokens"
    return note


def tag_table(report: BenchReport) -> TagTable | None:
    """Tabulate speed-ups by tag, or by language without tags; None with fewer than two."""
    for field in ("tag", "language"):
        tags = tuple(
            dict.fromkeys(v for r in report.records if (v := getattr(r, field)) is not None)
        )
        if len(tags) < 2:
            continue
        labels, lines = report.labels(), []
        for entry in report.metrics:
            if entry.name == BASELINE:
                continue
            cells = []
            for tag in tags:
                plain, mine = (
                    [r for r in report.of(name, entry.temperature) if getattr(r, field) == tag]
                    for name in (BASELINE, entry.name)
                )
                cells.append(times(weighted_speedup(paired_paces(plain, mine))))
            lines.append((f"{entry.temperature:g}", row_label(entry.name, labels), *cells))
        return TagTable(tags=tags, rows=tuple(lines))
    return None


def write_report(report: BenchReport, folder: Path) -> None:
    """Write summary.json, figures/ and report.html, each file atomically."""
    write_json_atomic(folder / "summary.json", summary(report))
    drawn = draw_plots(report)
    for image in drawn:
        image.save(folder / "figures")
    write_text_atomic(folder / "report.html", render(report, drawn))
