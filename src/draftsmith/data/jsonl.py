"""JSONL, one record per line: reading it (also as it is being written) and writing it.

Errors name the line. A caller that follows a stream passes `on_bad`: an invalid line then goes
there, and the next one is read.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.config import from_dict
from draftsmith.data.prompts import check_whole
from draftsmith.data.text import parse_json, read_lines
from draftsmith.errors import InputError
from draftsmith.provenance import write_text_atomic

T = TypeVar("T")
OnBad = Callable[[InputError], None]
"""Called with the error of an invalid line; without it, the error is raised."""
IN_MEMORY = {"in_memory": True}
"""Metadata of a record's field that files do not hold."""


def in_memory(kind: Any) -> set[str]:
    """The names of the fields of this dataclass that files do not hold."""
    return {field.name for field in fields(kind) if IN_MEMORY.items() <= field.metadata.items()}


def read_records(path: Path, kind: type[T]) -> Iterator[T]:
    """Read the records of a JSONL file; empty lines are skipped.

    Raises:
        InputError: the file cannot be read, or a line (named by its number) is invalid.
    """
    for where, line in read_lines(path):
        if line.strip():
            yield as_record(kind, _object(where, line), where)


def as_record(kind: type[T], values: dict[str, Any], where: str) -> T:
    """Build a record from these values; errors name the line.

    Fields with the metadata `IN_MEMORY` are no keys of a file.
    """
    try:
        for name in in_memory(kind) & values.keys():
            raise InputError(f"{name!r} is no key of a file: it is known while decoding only")
        return from_dict(kind, values, where=where)
    except InputError as error:
        if where in str(error):
            raise
        raise InputError(f"{where}: {error}") from None


@contextlib.contextmanager
def skipping(on_bad: OnBad | None) -> Iterator[None]:
    """Pass an InputError raised inside to `on_bad`, if given, so that the next line is read."""
    try:
        yield
    except InputError as error:
        if on_bad is None:
            raise
        on_bad(error)


def numbered(lines: Iterable[str], on_bad: OnBad | None = None) -> Iterator[tuple[str, str]]:
    """Yield (where, line) for every line of a stream that is text.

    Raises:
        InputError: a line is not UTF-8 (read with `surrogateescape`), or has a NUL character.
    """
    for number, line in enumerate(lines, 1):
        where, good = f"line {number}", False
        with skipping(on_bad):
            if not line.isascii() and any("\ud800" <= char <= "\udfff" for char in line):
                raise InputError(
                    f"{where} is not UTF-8: convert the text, or its recogniser's output"
                )
            if "\0" in line:
                raise InputError(f"{where} holds a NUL character: is it UTF-16, or no text?")
            good = True
        if good:
            yield where, line


def json_objects(
    lines: Iterable[str], on_bad: OnBad | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, object) for every line of a stream that is not empty.

    Raises:
        InputError: a line is no JSON object, or has an unpaired surrogate.
    """
    for where, line in numbered(lines, on_bad):
        values = None
        with skipping(on_bad):
            values = _object(where, line) if line.strip() else None
        if values is not None:
            yield where, values


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


def _object(where: str, line: str) -> dict[str, Any]:
    values = parse_json(line, where, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    if not isinstance(values, dict):
        raise InputError(f"{where}: expected a JSON object, got {line.strip()[:80]}")
    check_whole(json.dumps(values, ensure_ascii=False), where)
    return values
