"""Finding a drafter by its kind: the file's name in this folder, or an entry point outside.

    prompt_lookup                   drafters/prompt_lookup.py
    independent:PATH_OR_HUB_ID      the part behind the colon is the drafter's `source`
    suffix+hass:PATH                a cascade: the first that has a draft, or one tree of all
    runs/my-draft                   a folder: of a transformers model, independent:runs/my-draft;
                                    of a drafter that `distill` wrote, its own kind

A drafter module names its class in `DRAFTER`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from draftsmith.config import from_dict, override, require, require_short, short
from draftsmith.drafters.base import STRUCTURE, Drafter, options_marked
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.config import (
    built_in_kinds,
    cascade_parts,
    drafter_manifest,
    drafter_parts,
    kinds,
)
from draftsmith.errors import InputError, nearest
from draftsmith.plugins import DRAFTERS, load_plugin, wrong_plugin


def drafter_class(kind: str) -> type[Drafter]:
    """The class of a kind.

    Raises:
        InputError: unknown kind; the nearest known one is named.
        BackendError: a package offers the kind, and its class cannot be imported.
    """
    found: type[Drafter] | None = load_plugin(DRAFTERS, kind, built_in_kinds())
    if found is not None:
        if not (isinstance(found, type) and issubclass(found, Drafter)):
            raise wrong_plugin(DRAFTERS, kind, "a subclass of draftsmith.drafters.base.Drafter")
        return found
    if kind not in kinds():
        raise InputError(f"Unknown drafter {kind!r}{nearest(kind, kinds())}.")
    built_in: type[Drafter] = importlib.import_module(f"draftsmith.drafters.{kind}").DRAFTER
    return built_in


def load_drafter(spec: str, assignments: Sequence[str] = ()) -> Drafter:
    """Build a drafter from `KIND`, `KIND:SOURCE` or the folder of a draft model.

    Args:
        spec: see the module's table.
        assignments: `field=value` texts that set fields of the drafter's `Config`.

    Raises:
        InputError: unknown kind or option, a source that the kind does not take, or a folder
            without a model.
    """
    parts = cascade_parts(spec)
    if len(parts) > 1:
        return _cascade(parts, assignments)
    drafter = make_drafter(spec, assignments)
    kind, source = drafter_parts(spec)
    if takes_source(type(drafter)) and not source:
        raise InputError(f"Drafter {kind!r} needs a model: write {kind}:PATH_OR_HUB_ID.")
    return drafter


def _cascade(parts: Sequence[str], assignments: Sequence[str]) -> Drafter:
    """The drafters of a name that joins several; assignments say KIND.KEY=VALUE."""
    named = [drafter_parts(part)[0] for part in parts]
    for text in assignments:
        require(
            text.partition(".")[0] in named,
            f"--drafter-option {text!r}: say which drafter of the cascade it is for, as "
            f"KIND.KEY=VALUE with KIND one of {', '.join(named)}",
        )
    return Cascade(
        [
            load_drafter(
                part, [text[len(kind) + 1 :] for text in assignments if text.startswith(f"{kind}.")]
            )
            for part, kind in zip(parts, named, strict=True)
        ],
        named,
    )


def make_drafter(spec: str, assignments: Sequence[str] = ()) -> Drafter:
    """As `load_drafter`, but a kind without a source is an untrained drafter."""
    given: dict[str, object] = {}
    listed = isinstance(assignments, Sequence) and all(isinstance(one, str) for one in assignments)
    require(listed, f"assignments must be texts FIELD=VALUE, got {short(assignments)}")
    kind, source = drafter_parts(spec)
    spec = os.fspath(spec)
    if kind not in kinds() and kind != spec and source == spec:  # a folder said its kind
        raise InputError(
            f"The folder {spec} holds a drafter of the kind {kind!r}, which is not installed here"
            f"{nearest(kind, kinds())}."
        )
    if len(cascade_parts(spec)) > 1:
        raise InputError(f"--drafter {spec!r}: each part of a cascade learns by itself; name one.")
    if kind not in kinds():
        _refuse_parts(spec)
    if kind not in kinds() and (os.sep in spec or os.path.isdir(spec)):
        what = "has no config.json" if os.path.isdir(spec) else "does not exist"
        raise InputError(
            f"The drafter folder {spec!r} {what}: give a folder with a transformers model, such as "
            "draftsmith pretrain writes (or independent:HUB_ID for a model of the hub)."
        )
    cls = drafter_class(kind)
    if source is not None:
        if not takes_source(cls):
            raise InputError(f"Drafter {kind!r} takes nothing behind a colon, got {source!r}.")
        require_short(f"--drafter {kind}: the model", source)
        # what a shell makes of KIND:$FOLDER where the variable is not set
        require(bool(source), f"Drafter {spec!r} names no folder behind the colon: write one.")
        if (Path(source) / "drafter.json").is_file():
            manifest = drafter_manifest(Path(source))
            if manifest["kind"] != kind:
                raise InputError(
                    f"The folder {source} holds a drafter of the kind {manifest['kind']}, not "
                    f"{kind}: give the folder alone, or {manifest['kind']}:{source}."
                )
            given |= manifest["options"]
        given["source"] = source
        for key in options_marked(cls.Config, STRUCTURE) & set(option_keys(assignments)):
            raise InputError(
                f"--drafter-option {key}: the weights in {source} have settled it; leave it out, "
                f"or begin from nothing with --drafter {kind}."
            )
    return cls(override(from_dict(cls.Config, given), assignments))


def _refuse_parts(spec: str) -> None:
    """Raise `InputError` for a cascade with a part that is no KIND or KIND:SOURCE. Where no part is
    a kind or a folder, a name with a '+' may be a path that does not exist."""
    joined = spec.split("+")
    odd = [one for one in joined if one.partition(":")[0] not in kinds()]
    found = {one: drafter_parts(one) for one in odd if one}
    folders = [one for one, (_, source) in found.items() if source == one]
    is_path = os.sep in spec and not folders and len(odd) == len(joined)
    if len(joined) < 2 or not odd or is_path:
        return
    if folders:
        kind, _ = found[folders[0]]
        raise InputError(
            f"--drafter {spec!r}: its part {folders[0]!r} is a folder, which a cascade takes as "
            f"KIND:FOLDER: write {kind}:{folders[0]}, and name each source once."
        )
    raise InputError(
        f"--drafter {spec!r}: its part {odd[0]!r} is no drafter (one with weights is written "
        f"KIND:FOLDER){nearest(odd[0], kinds())}."
    )


def option_keys(assignments: Sequence[str]) -> list[str]:
    """The fields that KEY=VALUE texts set."""
    return [text.partition("=")[0].strip().replace("-", "_") for text in assignments]


def takes_source(cls: type[Drafter]) -> bool:
    """Whether something of this kind can be loaded from behind a colon."""
    return any(field.name == "source" for field in fields(cls.Config))
