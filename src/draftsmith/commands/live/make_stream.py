"""`draftsmith live make-stream`: sentences as a recogniser would send them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.commands._live_verbs import LiveMakeStreamOptions
from draftsmith.data.text import read_text
from draftsmith.live.records import write_lines
from draftsmith.live.streams import make_stream


@dataclass(frozen=True, kw_only=True)
class StreamResult:
    """The JSON object: what was written."""

    out: str
    segments: int
    updates: int

    def json_payload(self) -> dict[str, Any]:
        return asdict(self)


def run(options: LiveMakeStreamOptions) -> StreamResult:
    """Write the stream."""
    made = make_stream(
        _lines(options.source, options.limit),
        None if options.references is None else _lines(options.references, options.limit),
        lag=options.lag,
        unit=options.unit,
        rewrites=options.rewrites,
        seed=options.seed,
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_lines(options.out, made)
    result = StreamResult(out=str(options.out), segments=made[-1].seg + 1, updates=len(made))
    Console(highlight=False, markup=False, soft_wrap=True).print(
        f"wrote {result.out}: {result.segments} segments, {result.updates} updates"
    )
    return result


def _lines(path: Path, limit: int | None) -> list[str]:
    return read_text(path).rstrip("\n").split("\n")[:limit]
