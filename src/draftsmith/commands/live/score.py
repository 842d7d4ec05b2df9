"""`draftsmith live score`: metrics from the records of a live translation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from draftsmith.commands._live_verbs import LiveScoreOptions
from draftsmith.commands.live._shared import JoinedResult, join, units_of
from draftsmith.config import require
from draftsmith.errors import InputError
from draftsmith.live.latency import Latency, latency, moments, simuleval_lines
from draftsmith.live.metrics import (
    LiveReport,
    Quality,
    Score,
    comet,
    flores_pieces,
    quality,
    report,
    translations,
    write_texts,
)
from draftsmith.live.records import Hypothesis, UpdateRecord, read_lines
from draftsmith.provenance import write_text_atomic


@dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """The JSON object: all metrics."""

    steadiness: LiveReport
    latency: Latency
    quality: Quality | None
    """None: the records have no references."""
    comet: Score | None
    """None without --comet."""

    def json_payload(self) -> dict[str, Any]:
        return asdict(self)


def run(options: LiveScoreOptions) -> ScoreResult | JoinedResult:
    """Score records; the tables in a folder of replays are joined instead."""
    if options.records.is_dir():
        for name in ("stream", "comet", "texts", "out"):
            sentence = f"--{name} needs the records of one setting, not a folder"
            require(not getattr(options, name), sentence)
        joined = join(options.records)
        Console(highlight=False).print(Markdown(joined.markdown()))
        return joined
    records = list(read_lines(options.records, UpdateRecord))
    if not records:
        raise InputError(f"{options.records} holds no records")
    units, source_units = units_of(options.language), units_of(options.source_language)
    clock = None
    if options.stream is not None:
        clock = moments(records, read_lines(options.stream, Hypothesis))
    scored = translations(records)
    if not scored and (options.comet or options.texts):
        raise InputError("--comet and --texts need references: no segment has one")
    result = ScoreResult(
        steadiness=report(records, flores_pieces()),
        latency=latency(records, source=source_units, target=units, clock=clock),
        quality=quality(records, target_language=options.language) if scored else None,
        comet=comet(scored) if options.comet else None,
    )
    _show(result)
    if options.texts is not None:
        options.texts.mkdir(parents=True, exist_ok=True)
        write_texts(scored, options.texts)
    if options.out is not None:
        lines = simuleval_lines(records, source=source_units, target=units, clock=clock)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(options.out, text)
    return result


def _show(result: ScoreResult) -> None:
    console = Console(highlight=False, markup=False)
    for title, values in asdict(result).items():
        if values is None:
            continue
        table = Table(title=title, show_header=False)
        for name, value in values.items():
            if value is not None:
                table.add_row(name.replace("_", " "), _text(value))
        console.print(table)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "  ".join(f"{name} {_text(one)}" for name, one in value.items())
    return str(value)
