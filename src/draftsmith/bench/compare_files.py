"""Reading the files of finished runs for a comparison; what is wrong in them is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.config import field_types, from_dict
from draftsmith.errors import InputError

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} is not JSON ({error.msg} at line {error.lineno}): it was cut short or edited."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no JSON object.")
    return values


def optional_text(values: Mapping[str, Any], key: str, path: Path) -> str | None:
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise InputError(f"option {key} in {path}: expected str or none, got {value!r}")
    return value


def fields_of(cls: type[T], values: object, where: str) -> T:
    """A dataclass from those keys that it has; the rest is for other readers."""
    if not isinstance(values, Mapping):
        raise InputError(f"expected an object in {where}, got {values!r}")
    kinds = field_types(cls)
    return from_dict(cls, {k: v for k, v in values.items() if k in kinds}, where=where)
