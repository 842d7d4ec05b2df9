"""JSONL, one record per line: reading it (also as it is being written) and writing it.

Errors name the line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.config import from_dict
from draftsmith.data.text import read_lines
from draftsmith.errors import InputError
from draftsmith.provenance import parse_json, write_text_atomic

T = TypeVar("T")
IN_MEMORY = {"in_memory": True}
"""Metadata of a record's field that files do not hold."""


def in_memory(kind: Any) -> set[str]:
    """The names of the fields of this dataclass that files do not hold."""
    return {field.name for field in fields(kind) if IN_MEMORY.items() <= field.metadata.items()}


def read_records(path: Path, kind: type[T]) -> Iterator[T]:
    """Read the records of a JSONL file; empty lines are skipped.

    Raises:
        InputError: the file cannot be read, or a line (named by its number) is invalid. Fields with
            the metadata `IN_MEMORY` are no keys of a file.
    """
    for where, line in read_lines(path):
        if not line.strip():
            continue
        values = parse_object(line, where)
        for name in in_memory(kind) & values.keys():
            raise InputError(f"{where}: {name!r} is known while decoding only, no key of a file")
        try:
            yield from_dict(kind, values, where=where)
        except InputError as error:
            raise error if where in str(error) else InputError(f"{where}: {error}") from None


def write_objects(path: Path, objects: Iterable[Mapping[str, Any]]) -> None:
    """Write one object per line, atomically."""
    lines = [json.dumps(values, ensure_ascii=False) + "\n" for values in objects]
    write_text_atomic(path, "".join(lines))


def _whole(digits: str) -> int:
    if len(digits) > 20:  # Python itself reads thousands, and then fails to write them
        raise ValueError(f"expected a number below 2^53, got {len(digits)} digits")
    return int(digits)


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"expected a finite number, got {text[:20]}")
    return float(text)


def parse_object(line: str, where: str) -> dict[str, Any]:
    """Parse a line that is one JSON object, of finite numbers and whole characters."""
    values = parse_json(line, where, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    if not isinstance(values, dict):
        raise InputError(f"{where}: expected a JSON object, got {line.strip()[:80]}")
    return values
