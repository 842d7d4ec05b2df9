"""Strict configuration for frozen dataclasses: from dictionaries, from `key=value`, and back.

Nothing is guessed and nothing is dropped: an unknown key, a missing one or a value of another type
is an `InputError` that names the key and, for unknown ones, the nearest that exists.

    options = from_dict(Shape, {"width": 4})
    options = override(options, ["width=8", "inner.rate=0.5"])
    as_dict(options)                # from_dict(Shape, as_dict(options)) == options
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from draftsmith.errors import InputError, nearest

T = TypeVar("T")

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULLS = ("none", "null")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    f"{letter}i": 1024**power for power, letter in enumerate("kmgt", start=1)
}


def field_types(cls: type) -> dict[str, Any]:
    """Resolved type of every field that the constructor of dataclass `cls` takes, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def bare(kind: Any) -> Any:
    """`kind` without `Annotated[...]` around it."""
    while get_origin(kind) is typing.Annotated:
        kind = get_args(kind)[0]
    return kind


def from_dict(cls: type[T], values: object, *, where: str = "") -> T:
    """Build dataclass `cls` from a mapping; `where` names the origin (a file, say) in errors."""
    place = f" in {where}" if where else ""
    if not isinstance(values, Mapping):
        raise InputError(f"expected options of {_name(cls)}{place}, got {_show(values)}")
    kinds = field_types(cls)
    for key in values:
        if key not in kinds:
            raise InputError(f"unknown option {str(key)!r}{place}{nearest(str(key), kinds)}")
    built = {
        key: _convert(kinds[key], value, f"{key}{place}", from_text=False)
        for key, value in values.items()
    }
    return _construct(cls, built, place)


def from_assignments(cls: type[T], assignments: Iterable[str], *, where: str = "") -> T:
    """Build dataclass `cls` from `key=value` texts; fields without a default must be given."""
    given: dict[str, Any] = {}
    for key, text in map(_split, assignments):
        name, *rest = key.split(".", 1)
        kind = bare(_known(cls, name))
        if rest:
            inner = given.get(name, ())
            given[name] = (*inner, f"{rest[0]}={text}") if isinstance(inner, tuple) else inner
        else:
            given[name] = _convert(kind, text, name, from_text=True)
    for name, value in list(given.items()):
        kind = bare(_known(cls, name))
        if dataclasses.is_dataclass(kind) and isinstance(value, tuple):
            given[name] = from_assignments(typing.cast(type, kind), value)
    return _construct(cls, given, f" in {where}" if where else "")


def override(options: T, assignments: Iterable[str]) -> T:
    """A copy of dataclass `options` with each `dotted.key=value` applied, left to right."""
    for key, text in map(_split, assignments):
        options = _override_one(options, key.split("."), text, key)
    return options


def as_dict(options: object) -> Any:
    """Plain JSON types: dataclasses to dicts, tuples to lists, paths and enums to their text."""
    if dataclasses.is_dataclass(options) and not isinstance(options, type):
        return {name: as_dict(getattr(options, name)) for name in field_types(type(options))}
    if isinstance(options, Mapping):
        return {str(key): as_dict(value) for key, value in options.items()}
    if isinstance(options, (list, tuple, set, frozenset)):
        return [as_dict(value) for value in options]
    if isinstance(options, enum.Enum):
        return options.value
    return str(options) if isinstance(options, Path) else options


def parse_list(text: str, kind: Callable[[str], T], *, name: str) -> tuple[T, ...]:
    """A comma-separated option: `parse_list("0,0.8", float, name="--temperature")`."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise InputError(f"{name}: expected values separated by commas, got {text!r}")
    try:
        return tuple(kind(item) for item in items)
    except (ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        what = getattr(kind, "__name__", "value")
        raise InputError(f"{name}: expected {what}s separated by commas, got {text!r}") from None


def parse_size(text: str, *, name: str = "size") -> int:
    """A whole number with an optional unit: 4096, 64k (thousand), 2Mi or 2MiB (1024 squared)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)([kmgt]?i?)b?", text.strip().lower())
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise InputError(f"{name}: expected a size like 4096, 64k or 2MiB, got {text!r}")
    value = float(match[1]) * unit
    exact: int = int(match[1]) * unit if match[1].isdigit() else round(value)
    if not math.isfinite(value) or abs(value - exact) > 1e-6 * max(value, 1.0):
        raise InputError(f"{name}: {text!r} is not a whole number")
    return exact


# --------------------------------------------------------------------------- inside


def _split(assignment: str) -> tuple[str, str]:
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise InputError(f"expected key=value, got {assignment!r}")
    return key.strip().replace("-", "_"), text


def _known(cls: type, name: str) -> Any:
    kinds = field_types(cls)
    if name not in kinds:
        raise InputError(f"unknown option {name!r} of {_name(cls)}{nearest(name, kinds)}")
    return kinds[name]


def _override_one(options: T, path: Sequence[str], text: str, key: str) -> T:
    name, *rest = path
    kind = _known(type(options), name)
    if rest:
        inner = getattr(options, name)
        if not dataclasses.is_dataclass(inner):
            raise InputError(f"option {key!r}: {name!r} has no options of its own")
        value: Any = _override_one(inner, rest, text, key)
    else:
        value = _convert(kind, text, key, from_text=True)
    built = {field: getattr(options, field) for field in field_types(type(options))}
    return _construct(type(options), built | {name: value}, "")


def _construct(cls: type[T], values: dict[str, Any], place: str) -> T:
    fields = [f for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    nothing = dataclasses.MISSING
    needed = [f.name for f in fields if f.default is nothing and f.default_factory is nothing]
    for name in needed:
        if name not in values:
            raise InputError(f"option {name!r} of {_name(cls)} is missing{place}")
    try:
        return cls(**values)
    except InputError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"options of {_name(cls)}{place} cannot be used: {error}") from None


def _convert(kind: Any, value: Any, name: str, *, from_text: bool) -> Any:
    """`value` as exactly the type `kind`; text is parsed only when it came from `key=value`."""
    kind = bare(kind)
    origin, args = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, name, from_text=from_text)
    if origin is Literal:
        for choice in args:
            if (value == choice and type(value) is type(choice)) or (
                from_text and value == str(choice)
            ):
                return choice
        choices = ", ".join(str(choice) for choice in args)
        raise InputError(f"option {name}: expected one of {choices}, got {_show(value)}")
    if origin in (tuple, list, collections.abc.Sequence):
        return _convert_sequence(kind, origin, args, value, name, from_text=from_text)
    if origin in (dict, collections.abc.Mapping) and isinstance(value, Mapping):
        return {
            _convert(args[0], key, name, from_text=isinstance(key, str)): _convert(
                args[1], item, _inside(name, key), from_text=from_text
            )
            for key, item in value.items()
        }
    if isinstance(kind, type):
        if dataclasses.is_dataclass(kind):
            return value if isinstance(value, kind) else from_dict(kind, value, where=name)
        converted = _scalar(kind, value, from_text)
        if converted is not None:
            return converted[0]
    raise InputError(f"option {name}: expected {_name(kind)}, got {_show(value)}")


def _scalar(kind: type, value: Any, from_text: bool) -> tuple[Any] | None:
    """The converted value in a one-tuple, or None when it is not of that type."""
    if kind is type(None):
        null = value is None or (from_text and str(value).lower() in _NULLS)
        return (None,) if null else None
    if from_text and kind in (bool, int, float) and isinstance(value, str):
        try:
            return (_WORDS[value.lower()],) if kind is bool else (kind(value),)
        except (KeyError, ValueError):
            return None
    if issubclass(kind, enum.Enum):
        found = [member for member in kind if value in (member, member.value)]
        return (found[0],) if found else None
    if kind is float and type(value) in (int, float):
        try:
            return (float(value),)
        except OverflowError:
            return None
    if issubclass(kind, Path):
        usable = isinstance(value, (str, Path)) and "\0" not in str(value)
        return (kind(value),) if usable else None
    # bool is an int to Python, not to a user.
    return (value,) if isinstance(value, kind) and (kind is not int or type(value) is int) else None


def _convert_union(args: tuple[Any, ...], value: Any, name: str, *, from_text: bool) -> Any:
    # Text goes to the numbers before it goes to `str`, which takes anything.
    for kind in sorted(args, key=lambda kind: bare(kind) is str):
        try:
            return _convert(kind, value, name, from_text=from_text)
        except InputError:
            continue
    wanted = " or ".join(_name(kind) for kind in args)
    raise InputError(f"option {name}: expected {wanted}, got {_show(value)}")


def _convert_sequence(
    kind: Any, origin: Any, args: tuple[Any, ...], value: Any, name: str, *, from_text: bool
) -> Any:
    if from_text and isinstance(value, str):
        value = [item.strip() for item in value.split(",")] if value.strip() else []
    if not isinstance(value, (list, tuple)):
        raise InputError(f"option {name}: expected {_name(kind)}, got {_show(value)}")
    if origin is tuple and args and args[-1] is not Ellipsis:
        if len(value) != len(args):
            raise InputError(f"option {name}: expected {len(args)} values, got {len(value)}")
        kinds = list(args)
    else:
        kinds = [args[0]] * len(value)
    items = [
        _convert(item_kind, item, f"{name}[{index}]", from_text=from_text)
        for index, (item_kind, item) in enumerate(zip(kinds, value, strict=True))
    ]
    return items if origin is list else tuple(items)


def _inside(name: str, key: object) -> str:
    """An entry of a table; a key may hold anything, a message is one line."""
    text = str(key)
    return f"{name}.{text}" if text.isprintable() else f"{name}.{text!r}"


def _name(kind: Any) -> str:
    kind = bare(kind)
    if kind is type(None):
        return "none"
    if isinstance(kind, type) and get_origin(kind) is None:
        return kind.__qualname__ if dataclasses.is_dataclass(kind) else kind.__name__
    return str(kind).replace("typing.", "")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
