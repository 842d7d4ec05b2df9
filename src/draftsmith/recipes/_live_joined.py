"""Replays of several languages and targets in one table, as the paper's second (SSBD, arXiv
2509.21740)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.config import from_dict
from draftsmith.errors import InputError
from draftsmith.live.replay import Row
from draftsmith.recipes._live_pictures import named, pair_of, table


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What one `live replay` left in its folder, without and with drafts."""

    language: str
    target: str
    signature: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class JoinedResult:
    """What `--json` prints for a folder."""

    replays: tuple[Replay, ...]

    def json_payload(self) -> dict[str, Any]:
        return asdict(self)

    def markdown(self) -> str:
        rows = [
            (f"{one.language}, {one.target}: {named(row)}", row)
            for one in self.replays
            for row in one.rows
        ]
        title = "Re-translation with and without drafts, by language and target"
        return f"{table(title, rows)}\nNE counts: {self.replays[0].signature}\n"


def join(folder: Path) -> JoinedResult:
    """The replays in the folders of this folder.

    Raises:
        InputError: there are none, one cannot be read, or their erasures do not compare.
    """
    replays = tuple(_read(path) for path in sorted(folder.glob("*/table.json")))
    if not replays:
        raise InputError(f"{folder} holds no folder of `live replay` (with a table.json)")
    if len({one.signature for one in replays}) > 1:
        names = ", ".join(sorted({one.signature for one in replays}))
        raise InputError(f"{folder}: replays that count NE alike can be joined, got {names}")
    return JoinedResult(replays=replays)


def _read(path: Path) -> Replay:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        rows = [from_dict(Row, row, where=str(path)) for row in values["rows"]]
        told = {name: str(values[name]) for name in ("language", "target", "signature")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no table of `live replay`: {error!r}; make it again") from None
    return Replay(**told, rows=tuple(pair_of(rows)))
