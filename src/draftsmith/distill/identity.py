"""Whether two stores, or two targets, are one and the same; and where they differ."""

from __future__ import annotations

import re
from typing import Any


def differences(there: Any, here: Any, name: str = "") -> list[str]:
    """`name is 'a' there and 'b' here`, for every value of two JSON contents that differs."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*there, *(key for key in here if key not in there)]
        inner = [(key, there.get(key), here.get(key)) for key in keys]
        prefix = f"{name}." if name else ""
        return [text for key, a, b in inner for text in differences(a, b, f"{prefix}{key}")]
    return [] if there == here else [f"{name} is {short(there)} there and {short(here)} here"]


def weights_by(
    name: str, revision: str | None, other_name: str, other_revision: str | None
) -> tuple[str, str | None, str | None]:
    """By what the weights of two targets are compared, and what each of them has; None: unknown.

    A digest of weights tells most, then a commit. Where there is neither, names are all there is;
    but a folder may be a copy of a hub model under any name: of such a pair nothing is known.
    """
    kinds = {_kind(revision), _kind(other_revision)}
    if kinds == {"digest"}:
        return "digest of its weights", revision, other_revision
    if "digest" in kinds:
        return "digest of its weights", None, None
    if kinds == {"commit"}:
        return "commit", revision, other_revision
    return "name", name, other_name


def short(value: object) -> str:
    """`repr`, cut where it would fill a line; a commit is whole: it is typed again."""
    text = repr(value)
    return text if len(text) <= 42 else f"{text[:37]}..."


def _kind(revision: str | None) -> str | None:
    """Names of revisions on a hub may move: they tell nothing, as no revision does."""
    if revision is None or not re.fullmatch("[0-9a-f]+", revision):
        return None
    return {64: "digest", 40: "commit"}.get(len(revision))
