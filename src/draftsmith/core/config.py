"""What --draft-tree means.

4,2,2,1       children per node at each depth
10x6:59       10 beams, 6 deep, of all that they say the 59 most probable (EAGLE-2)
tree.json     any nodes: a JSON list of paths, [[0], [1], [0, 0], ...], each node by the ranks of
              its ancestors and its own (EAGLE-1, Medusa)

How far verification leans towards a draft: the values that a bias may have, and their risks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.errors import InputError

_DYNAMIC = re.compile(r"(\d+)x(\d+):(\d+)")
FORMS = "4,2,2,1 (children at each depth), 10x6:59 (beams x depth : nodes) or a JSON file of paths"


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeText:
    """A tree as it was asked for; fields as in `types.TreeShape`, which needs torch."""

    widths: tuple[int, ...] = ()
    paths: tuple[tuple[int, ...], ...] = ()
    keep: int | None = None


def parse_tree(text: str) -> TreeText:
    """Read --draft-tree.

    Raises:
        InputError: naming what is wrong and what the forms are.
    """
    if text.endswith(".json"):
        return TreeText(paths=_read_paths(Path(text)))
    dynamic = _DYNAMIC.fullmatch(text.strip())
    try:
        if dynamic:
            beams, depth, keep = map(int, dynamic.groups())
            out = TreeText(widths=(beams,) * depth, keep=keep)
        else:
            out = TreeText(widths=tuple(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"--draft-tree must be {FORMS}; got {text!r}") from None
    if not out.widths or min(*out.widths, 1 if out.keep is None else out.keep) < 1:
        raise InputError(f"--draft-tree: every number must be at least 1, got {text!r}")
    return out


def _read_paths(path: Path) -> tuple[tuple[int, ...], ...]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--draft-tree {path} cannot be read: {error}") from error
    good = isinstance(found, list) and all(
        isinstance(one, list) and one and all(type(rank) is int and rank >= 0 for rank in one)
        for one in found
    )
    if not good or not found:
        raise InputError(
            f"--draft-tree {path} must hold a list of paths, such as [[0], [1], [0, 0]]"
        )
    paths = tuple(sorted({tuple(one) for one in found}, key=lambda one: (len(one), one)))
    try:
        check_paths(paths)
    except ValueError as error:
        raise InputError(f"--draft-tree {path}: {error}") from None
    return paths


def check_paths(paths: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError unless every node's parent and elder siblings come before it."""
    known: set[tuple[int, ...]] = {()}
    length = 1
    for path in paths:
        *above, rank = path or (-1,)
        complete = tuple(above) in known and (rank == 0 or (*above, rank - 1) in known)
        if rank < 0 or len(path) < length or path in known or not complete:
            raise ValueError(f"the node {path} comes without its ancestors or elder siblings")
        known.add(path)
        length = len(path)


def check_bias(value: float, name: str = "bias") -> None:
    """Raise `InputError` unless this can be a bias; NaN cannot."""
    if not 0 <= value <= 1:
        meant = "0: exact, from 0.5 on every draft stays"
        raise InputError(f"{name} must lie between 0 and 1, got {value} ({meant})")


def bias_warning(*biases: float | None) -> str | None:
    """What to know before such a bias is used; None: nothing."""
    if any(bias is not None and bias >= 0.5 for bias in biases):
        return "from a bias of 0.5 on text is only appended: early mistakes stay, quality collapses"
    return None
