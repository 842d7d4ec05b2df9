"""JSON files of a store with a checksum of their own content: a flipped bit is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.errors import BackendError
from draftsmith.provenance import digest, jsonable, write_json_atomic

FORMAT = 1


def write_sealed(path: Path, value: object) -> None:
    """JSON with a checksum of its own content."""
    content = jsonable(value)
    write_json_atomic(path, {"format": FORMAT, "sha256": digest(content), **content})


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """What `write_sealed` was given. Raises BackendError: damaged, or of another format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BackendError(f"cannot read {path}: {error}; {remedy}") from None
    content = content if isinstance(content, dict) else {}
    number, checksum = content.pop("format", None), content.pop("sha256", None)
    if number != FORMAT:
        raise BackendError(
            f"{path} is of format {number!r} and this draftsmith reads {FORMAT}: it is damaged, or "
            f"of another version; {remedy}"
        )
    if checksum != digest(content):
        raise BackendError(f"{path} is damaged: its content has not the sha256 it names; {remedy}")
    return content
