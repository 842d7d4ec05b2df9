"""The options that make a setting: whatever a distil run was told that changes its result.

What a study varies on purpose (`FACTORS`) has fields of its own. Everything else stands in a flat
list of (name, value), so that two runs with other tails, other steps or another rate are never
taken for two seeds of one setting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.bench.compare_figures import UNDISTILLED, Option, Options, RunFigures
from draftsmith.errors import InputError
from draftsmith.provenance import digest

_ELSEWHERE = frozenset(
    # the seed; the scope; factors, of which results say more than options
    (
        "seed",
        "target",
        "beams",
        "objective.objective",
        "objective.teacher_temperature",
        "drafter_option",
    )
)
_WITHOUT_EFFECT = frozenset(
    # where results go, what is said or refused on the way, and how the work is divided; the digest
    # of the stores says which shards were left out
    (
        "out",
        "json",
        "debug",
        "report_to",
        "save_every",
        "bad_prompts.on_bad_prompt",
        "fitting.on_bad_shard",
        "training.parallel",
        "training.gradient_checkpointing",
    )
)
_FALLBACK = {"tail": "objective.tail", "steps": "steps"}
"""Results that stand in for options where a file has none."""


def options_of(given: object, results: Mapping[str, Any], where: str) -> Options:
    """Of a distil run's `options` and `results`; `where` names their file.

    Raises:
        InputError: the options are no object.
    """
    if given is None:
        return tuple((name, results[key]) for key, name in _FALLBACK.items() if key in results)
    if not isinstance(given, Mapping):
        raise InputError(f"expected an object in {where}, options, got {given!r}")
    flat = flattened(given)
    if given.get("store") and results.get("data"):
        # the same store may be named from several folders, and a name be used for another store
        names = "+".join(Path(str(folder)).name for folder in given["store"])
        flat["store"] = f"{names} ({digest(results['data'])[:6]})"
    left_out = _ELSEWHERE | _WITHOUT_EFFECT
    return tuple((name, value) for name, value in flat.items() if name not in left_out)


def only_varying(runs: Sequence[RunFigures]) -> list[RunFigures]:
    """Runs with those options alone in which distilled ones differ, all in one order.

    An option that some runs do not record differs from any value: nobody knows what it was.
    """
    known = {id(run): dict(run.options) for run in runs if _is_distilled(run)}
    names = dict.fromkeys(name for own in known.values() for name in own)
    varying = [
        name
        for name in names
        if any(name not in own for own in known.values())
        or len({own[name] for own in known.values()}) > 1
    ]
    return [
        dataclasses.replace(run, options=_chosen(known.get(id(run), {}), varying)) for run in runs
    ]


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Option]:
    """Groups by dotted names; lists as one text."""
    out: dict[str, Option] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            out |= flattened(value, f"{name}.")
        elif isinstance(value, list):
            out[name] = ", ".join(map(str, value)) or None
        else:
            out[name] = value
    return out


# --------------------------------------------------------------------------- inside


def _is_distilled(run: RunFigures) -> bool:
    return run.objective not in (None, UNDISTILLED)


def _chosen(own: Mapping[str, Option], names: Iterable[str]) -> Options:
    return tuple((name, own[name]) for name in names if name in own)
