"""`draftsmith live score`: metrics from the records of a live translation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.markdown import Markdown

from draftsmith.commands._options import VerbOptions
from draftsmith.commands._tables import show_values
from draftsmith.config import Leading, as_dict, from_dict, require, require_another
from draftsmith.data.jsonl import read_records, write_objects
from draftsmith.errors import InputError
from draftsmith.live.records import Hypothesis, UpdateRecord
from draftsmith.provenance import read_json


@dataclass(frozen=True, kw_only=True)
class LiveScoreOptions(VerbOptions):
    """Score what a live translation did: flicker, drafts, speed, latency, quality."""

    records: Annotated[Path, Leading]
    """What `live translate --out` or `live replay` wrote; or a folder with several replays, whose
    tables are joined: a line per language and target."""
    language: str = "German"
    """Language of the translations: chooses BLEU's words, and what latency counts."""
    source_language: str = "English"
    """The same of the sources."""
    stream: Path | None = None
    """The stream that these come from: where it has times, latencies are in seconds, too."""
    comet: bool = False
    """Score with wmt22-comet-da, too: its package and checkpoint must be on the machine."""
    texts: Path | None = None
    """Write source.txt, translation.txt and reference.txt to this folder, for other tools."""
    out: Path | None = None
    """Write a SimulEval-style log of stable delays to this file."""

    def validate(self) -> None:
        super().validate()
        require_another(self.out, records=self.records, stream=self.stream)


def run(options: LiveScoreOptions) -> dict[str, Any]:
    """Score records; the tables in a folder of replays are joined instead."""
    from draftsmith.live.latency import latency, moments, simuleval_lines
    from draftsmith.live.metrics import (
        comet,
        flores_pieces,
        quality,
        report,
        translations,
        units_of,
        write_texts,
    )

    if options.records.is_dir():
        for name in ("stream", "comet", "texts", "out"):
            sentence = f"--{name} needs the records of one setting, not a folder"
            require(not getattr(options, name), sentence)
        replays, table = join(options.records)
        Console(highlight=False).print(Markdown(table))
        joined: dict[str, Any] = as_dict({"replays": replays})
        return joined
    records = list(read_records(options.records, UpdateRecord))
    if not records:
        raise InputError(f"{options.records} holds no records")
    units, source_units = units_of(options.language), units_of(options.source_language)
    clock = None
    if options.stream is not None:
        clock = moments(records, read_records(options.stream, Hypothesis))
    scored = translations(records)
    if not scored and (options.comet or options.texts):
        raise InputError("--comet and --texts need references: no segment has one")
    parts: dict[str, Any] = {
        "steadiness": report(records, flores_pieces()),
        "latency": latency(records, source=source_units, target=units, clock=clock),
        "quality": quality(records, target_language=options.language),
        "comet": comet(scored) if options.comet else None,
    }
    result = {title: None if part is None else asdict(part) for title, part in parts.items()}
    _show(result)
    if options.texts is not None:
        options.texts.mkdir(parents=True, exist_ok=True)
        write_texts(scored, options.texts)
    if options.out is not None:
        lines = simuleval_lines(records, source=source_units, target=units, clock=clock)
        write_objects(options.out, lines)
    return result


def join(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Join the replays in the subfolders of a folder; return them, and their table.

    Raises:
        InputError: there are none, one cannot be read, or they count erasure differently.
    """
    from draftsmith.live.plots import named, table

    replays = [_read(path) for path in sorted(folder.glob("*/table.json"))]
    require(bool(replays), f"{folder} holds no folder of `live replay` (with a table.json)")
    signatures = {one["signature"] for one in replays}
    names = ", ".join(sorted(signatures))
    alike = len(signatures) == 1
    require(alike, f"{folder}: replays that count NE alike can be joined, got {names}")
    lines = [
        (f"{one['language']}, {one['target']}: {named(row)}", row)
        for one in replays
        for row in one["rows"]
    ]
    title = "Re-translation with and without drafts, by language and target"
    return replays, f"{table(title, lines)}\nNE counts: {names}\n"


def _read(path: Path) -> dict[str, Any]:
    """Read the rows of one replay without and with drafts, and what they are about."""
    from draftsmith.live.plots import pair_of
    from draftsmith.live.replay import ReplayRow

    try:
        values = read_json(path, "table")
        facts = {name: str(values[name]) for name in ("language", "target", "signature")}
        return {**facts, "rows": pair_of([from_dict(ReplayRow, row) for row in values["rows"]])}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no table of `live replay`: {error!r}; make it again") from None


def _show(result: Mapping[str, Mapping[str, Any] | None]) -> None:
    for title, values in result.items():
        known = {name: value for name, value in (values or {}).items() if value is not None}
        if known:
            show_values(title, {name.replace("_", " "): _text(one) for name, one in known.items()})


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "  ".join(f"{name} {_text(one)}" for name, one in value.items())
    return str(value)
