"""What a --drafter is called: a kind, a kind with a source, or a folder."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError

ENTRY_POINTS = "draftsmith.drafters"


def kinds() -> list[str]:
    """All drafters that can be named: files of `drafters`, and installed entry points."""
    here = [file.stem for file in (Path(__file__).parent / "drafters").glob("[a-z]*.py")]
    return sorted({*here, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def drafter_parts(name: str) -> tuple[str, str | None]:
    """(kind, source) of KIND, KIND:SOURCE or the folder of a draft model or drafter; source None:
    none. A kind is a kind, even beside a folder of its name: that one is `./KIND`."""
    if name in kinds():
        return name, None
    if (Path(name) / "drafter.json").is_file():
        return drafter_manifest(Path(name))["kind"], name
    if (Path(name) / "config.json").is_file():
        return "independent", name
    kind, colon, source = name.partition(":")
    return kind, source if colon else None


def drafter_manifest(folder: Path) -> dict[str, Any]:
    """What `distill` wrote about a drafter: its `kind`, `options` and `target`.

    Raises:
        InputError: it cannot be read.
    """
    path = folder / "drafter.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {
            "kind": str(known["kind"]),
            "options": dict(known["options"]),
            "target": dict(known.get("target", {})),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
