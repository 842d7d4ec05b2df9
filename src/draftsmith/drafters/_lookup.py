"""Finding a drafter by its kind: the file's name in this folder, or an entry point outside.

    prompt_lookup                   drafters/prompt_lookup.py
    independent:PATH_OR_HUB_ID      the part behind the colon is the drafter's `source`
    runs/my-drafter                 a folder with a drafter.json that says which kind it is

A drafter module names its class in `DRAFTER`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path

import draftsmith.drafters
from draftsmith.config import from_dict, override
from draftsmith.drafters._base import Drafter
from draftsmith.errors import InputError, nearest

ENTRY_POINTS = "draftsmith.drafters"


def kinds() -> list[str]:
    """All drafters that can be named: files here, and installed entry points."""
    here = [
        module.name
        for module in pkgutil.iter_modules(draftsmith.drafters.__path__)
        if not module.name.startswith("_")
    ]
    return sorted({*here, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def drafter_class(kind: str) -> type[Drafter]:
    """The class of a kind.

    Raises:
        InputError: unknown kind; the nearest known one is named.
    """
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == kind:
            found: type[Drafter] = point.load()
            return found
    if kind not in kinds():
        raise InputError(f"Unknown drafter {kind!r}{nearest(kind, kinds())}.")
    built_in: type[Drafter] = importlib.import_module(f"draftsmith.drafters.{kind}").DRAFTER
    return built_in


def load_drafter(spec: str, assignments: Sequence[str] = ()) -> Drafter:
    """Build a drafter from `KIND`, `KIND:SOURCE` or a drafter folder.

    Args:
        spec: see the module's table.
        assignments: `field=value` texts that set fields of the drafter's `Config`.

    Raises:
        InputError: unknown kind or option, or a source that the kind does not take.
    """
    given: dict[str, object] = {}
    kind, colon, source = spec.partition(":")
    folder = Path(spec)
    if (folder / "drafter.json").is_file():
        saved = json.loads((folder / "drafter.json").read_text())
        kind, given = saved["kind"], dict(saved["config"])
        colon, source = ":", str(folder)
    cls = drafter_class(kind)
    takes_source = any(field.name == "source" for field in fields(cls.Config))
    if colon and not takes_source:
        raise InputError(f"Drafter {kind!r} takes nothing behind a colon, got {source!r}.")
    if takes_source:
        if not source:
            raise InputError(f"Drafter {kind!r} needs a model: write {kind}:PATH_OR_HUB_ID.")
        given["source"] = source
    return cls(override(from_dict(cls.Config, given), assignments))
