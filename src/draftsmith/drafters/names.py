"""What a --drafter is called: a kind, a kind with a source, or a folder."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError
from draftsmith.plugins import DRAFTERS, plugin_names


def kinds() -> list[str]:
    """Return every drafter kind: files here that define `DRAFTER`, and installed entry points."""
    return sorted({*built_in_kinds(), *plugin_names(DRAFTERS)})


@functools.cache
def built_in_kinds() -> tuple[str, ...]:
    """Files beside this one that name a drafter class; reading them as text imports no torch."""
    files = Path(__file__).parent.glob("*.py")
    return tuple(f.stem for f in files if "\nDRAFTER = " in f.read_text(encoding="utf-8"))


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
