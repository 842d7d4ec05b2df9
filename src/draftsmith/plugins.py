"""What installed packages add to draftsmith, found through their entry points.

    [project.entry-points."draftsmith.drafters"]
    bigram = "my_package.bigram:DRAFTER"

The groups, each with what its entry points name:

    draftsmith.drafters             a subclass of `drafters.base.Drafter`
    draftsmith.objectives           a `distill.objectives.divergence.Divergence`
    draftsmith.verification_rules   a class of `core.verify.Rule` that needs no arguments
    draftsmith.prompt_suites        a function without arguments that returns prompts or a path
    draftsmith.targets              a function `load(source, *, dtype, device)` of a target
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from draftsmith.errors import BackendError, InputError

DRAFTERS = "draftsmith.drafters"
OBJECTIVES = "draftsmith.objectives"
RULES = "draftsmith.verification_rules"
SUITES = "draftsmith.prompt_suites"
TARGETS = "draftsmith.targets"


def offered(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of this group. The metadata of installed packages are read again after a
    folder of packages changed."""
    return entry_points_of(group, tuple(map(_changed, sys.path)))


@lru_cache(maxsize=16)
def entry_points_of(group: str, folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """The entry points of this group; `folders`: where packages are, as `_changed` gives them."""
    return tuple(entry_points(group=group))


def _changed(folder: str) -> tuple[str, int]:
    """The folder and the time of its last change; 0: it does not exist."""
    try:
        return folder, os.stat(folder or os.curdir).st_mtime_ns
    except OSError:
        return folder, 0


def plugin_names(group: str) -> tuple[str, ...]:
    """The names that installed packages offer in this group, sorted; nothing is imported."""
    return tuple(sorted({point.name for point in offered(group)}))


def load_plugin(group: str, name: str, built_in: Iterable[str]) -> Any:
    """What an entry point names; None where no package offers the name.

    Args:
        built_in: the names that draftsmith itself has in this group.

    Raises:
        InputError: two packages offer the name, or it is the name of something built in.
        BackendError: importing it failed; the message names the package.
    """
    points = [point for point in offered(group) if point.name == name]
    if not points:
        return None
    owners = " and ".join(_owner(point) for point in points)
    if name in built_in:
        raise InputError(f"{owners} offers {name!r} in {group}, which is built in: uninstall it.")
    if len(points) > 1:
        raise InputError(f"{owners} both offer {name!r} in {group}: uninstall one of them.")
    try:
        return points[0].load()
    except (Exception, SystemExit) as error:
        raise BackendError(
            f"{owners} offers {name!r} in {group}, but {points[0].value} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error


def wrong_plugin(group: str, name: str, wanted: str) -> BackendError:
    """The error of an entry point that names something of another kind than its group needs."""
    points = [point for point in offered(group) if point.name == name]
    owners = " and ".join(_owner(point) for point in points)
    return BackendError(f"{owners} offers {name!r} in {group}, but it is not {wanted}.")


def _owner(point: EntryPoint) -> str:
    return "A package" if point.dist is None else f"The package {point.dist.name}"
