"""Strict configuration for frozen dataclasses: from dictionaries, from `key=value`, and back.

Nothing is guessed and nothing is dropped: an unknown key, a missing one or a value of another type
is an `InputError` that names the key and, for unknown ones, the nearest that exists.

    options = from_dict(Shape, {"width": 4})
    options = override(options, ["width=8", "inner.rate=0.5"])
    as_dict(options)                # from_dict(Shape, as_dict(options)) == options

Amounts with their unit (`Duration`, sizes, counts) are read here, and options as command-line
flags: their names, the way back from options to flags, and values that begin with a minus sign.

A field `max_new_tokens` is the flag `--max-new-tokens`; the fields of a nested group are flags of
the verb (no prefix). A true-or-false field that starts as False is a bare flag `--stream`; one that
starts as True is switched off by `--no-...`. This is what tyro does under the settings of `cli`;
here it is stated once more without tyro, so that records can spell a command that reruns them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import functools
import json
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

import tyro

from draftsmith.errors import InputError, nearest

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import SchemaValidator

T = TypeVar("T")

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


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
    """Build dataclass `cls` from JSON values; `where` names the origin (a file, say) in errors."""
    place = f" in {where}" if where else ""
    if not isinstance(values, Mapping):
        raise InputError(f"expected options of {_name(cls)}{place}, got {short(values)}")
    return cast(T, _validated(cls, values, "", place))


def override(options: T, assignments: Iterable[str]) -> T:
    """A copy of dataclass `options` with each `dotted.key=value` applied.

    The copy is checked as a whole: an option may need another that is given behind it.
    """
    values = as_dict(options)
    for key, text in map(_split, assignments):
        _set(options, values, key.split("."), text, key)
    return from_dict(type(options), values)


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
        raise InputError(f"{name}: expected values separated by commas, got {short(text)}")
    try:
        if kind in _NUMBERS:
            return tuple(_NUMBERS[kind].read(item, name) for item in items)
        return tuple(kind(item) for item in items)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        what = getattr(kind, "__name__", "value")
        raise InputError(
            f"{name}: expected {what}s separated by commas, got {short(text)}"
        ) from None


MOST = 10**9
"""The largest count that an option takes, unless it has a limit of its own."""
LARGEST = 1e30
"""The largest number."""


def whole_number(text: str, name: str) -> int:
    """Read an integer of 64 bits. Raises ValueError for what is none, InputError naming the option
    for a larger one."""
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise InputError(f"{name} must be a whole number below 2^63, got {short(text)}")
    return value


def real_number(text: str, name: str) -> float:
    """Read 0 or a number whose square and reciprocal are floats, too. What is not finite is the
    caller's to judge. Raises ValueError for what is none, InputError naming the option for another
    size."""
    value = float(text)
    word = text.strip(" +-").isalpha()  # inf or nan, not 400 digits
    if value and not word and not 1 / LARGEST <= abs(value) <= LARGEST:
        size = f"a number of a size between {1 / LARGEST:g} and {LARGEST:g}"
        raise InputError(f"{name} must be {size}, or 0, got {short(text)}")
    return value


class _Number(NamedTuple):
    name: str
    read: Callable[[str, str], Any]


_NUMBERS: dict[Any, _Number] = {
    int: _Number("a whole number", whole_number),
    float: _Number("a number", real_number),
}
"""How numbers are read from flags, lists and `key=value`."""


def _split(assignment: str) -> tuple[str, str]:
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise InputError(f"expected key=value, got {assignment!r}")
    return key.strip().replace("-", "_"), text


def _set(options: Any, values: dict[str, Any], path: Sequence[str], text: str, key: str) -> None:
    """Set what `path` names in `values`, which are those of the dataclass `options`."""
    name, *rest = path
    kinds = field_types(type(options))
    if name not in kinds:
        raise InputError(f"unknown option {name!r} of {_name(type(options))}{nearest(name, kinds)}")
    inner = getattr(options, name)
    if not rest:
        values[name] = as_dict(_from_text(kinds[name], text, key))
    elif dataclasses.is_dataclass(inner) and values[name] is not None:
        _set(inner, values[name], rest, text, key)
    else:
        raise InputError(f"option {key!r}: {name!r} has no options of its own")


def _from_text(kind: Any, text: str, name: str) -> Any:
    """A text of `key=value` as the type `kind`; commas separate the items of a list."""
    inner = bare(kind)
    origin, args = get_origin(inner), get_args(inner)
    reading: Any = text
    if origin in (Union, types.UnionType):
        # text goes to the numbers before it goes to `str`, which takes anything
        for member in sorted(args, key=lambda member: bare(member) is str):
            with contextlib.suppress(InputError):
                return _from_text(member, text, name)
    elif origin in (tuple, list):
        reading = [item.strip() for item in text.split(",")] if text.strip() else []
        each = origin is list or Ellipsis in args
        kinds = args[:1] * len(reading) if each else args
        if len(kinds) == len(reading):
            items = zip(kinds, reading, strict=True)
            reading = [_from_text(*item, f"{name}[{at}]") for at, item in enumerate(items)]
    elif origin is Literal:
        reading = next((choice for choice in args if str(choice) == text), text)
    elif inner in (bool, type(None)):
        reading = {**_WORDS, "none": None, "null": None}.get(text.lower(), text)
    elif inner in _NUMBERS:
        try:
            reading = _NUMBERS[inner].read(text, f"option {name}")
        except InputError:
            raise
        except ValueError:
            pass  # said below
    return _validated(kind, reading, name, "")


@functools.cache
def _validator(kind: Any) -> SchemaValidator:
    from pydantic import ConfigDict, TypeAdapter
    from pydantic_core import SchemaValidator

    # in a list, because a dataclass takes its configuration from what it is in
    adapter = TypeAdapter(list[kind], config=ConfigDict(strict=True, extra="forbid"))
    return SchemaValidator(cast(Any, _exact(adapter.core_schema)), {"strict": True})


_INEXACT: dict[Any, Callable[[Any, Any], bool]] = {
    "float": lambda _, value: type(value) is int and abs(value) > sys.float_info.max,
    "literal": lambda schema, value: all(
        (type(value), value) != (type(one), one) for one in schema["expected"]
    ),
    "lax-or-strict": lambda _, value: isinstance(value, str) and "\0" in value,  # a path
}
"""What strict pydantic still converts: 10**400 to infinity, true to the literal 1, a NUL in a path;
by the type of the schema."""


def _exact(schema: Any) -> Any:
    """The schema, which also refuses what is `_INEXACT`."""
    from pydantic_core import PydanticCustomError, core_schema

    if isinstance(schema, (list, tuple)):
        return type(schema)(map(_exact, schema))
    if not isinstance(schema, dict):
        return schema
    inner: Any = {key: _exact(value) for key, value in schema.items()}

    def check(value: Any) -> Any:
        if _INEXACT[inner["type"]](inner, value):
            raise PydanticCustomError("inexact", "another type")
        return value

    wrapped = inner.get("type") in _INEXACT
    return core_schema.no_info_before_validator_function(check, inner) if wrapped else inner


def _plain(value: object) -> Any:
    """What JSON can hold of a Python object."""
    plain = as_dict(value)
    if plain is value:
        raise TypeError(f"expected plain values, got {short(value)}")
    return plain


def _validated(kind: Any, value: Any, name: str, place: str) -> Any:
    """`value`, of JSON types, as exactly the type `kind`."""
    from pydantic import ValidationError

    try:
        return _validator(kind).validate_json(json.dumps([value], default=_plain))[0]
    except ValidationError as error:
        raise _wrong(error, kind, as_dict(value), name, place) from None
    except InputError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        what = f"option {name}" if name else f"options of {_name(kind)}"
        raise InputError(f"{what}{place} cannot be used: {error}") from None


def _wrong(error: ValidationError, kind: Any, value: Any, name: str, place: str) -> InputError:
    """What is wrong first, in words: the option's name, what it must be and what it is."""
    # a name that nobody knows explains the one that is missing
    first, *_ = sorted(error.errors(), key=lambda one: one["type"] != "unexpected_keyword_argument")
    if first["type"] == "json_invalid":  # JSON holds half a character as an escape, text does not
        what = f"option {name}" if name else f"options of {_name(kind)}"
        deep = "recursion" in first["msg"]
        wrong = "its brackets are nested too deeply" if deep else "expected whole characters"
        return InputError(f"{what}{place}: {wrong}")
    for key in first["loc"][1:]:
        if get_origin(kind := bare(kind)) in (Union, types.UnionType):
            members = [member for member in get_args(kind) if member is not type(None)]
            if len(members) > 1:
                break
            kind = bare(members[0])
        args = get_args(kind)
        if dataclasses.is_dataclass(kind):
            kinds = field_types(cast(type, kind))
            inside = f" in {name}{place}" if name else place
            if key not in kinds:
                return InputError(f"unknown option {key!r}{inside}{nearest(str(key), kinds)}")
            if key not in value:
                return InputError(f"option {key!r} of {_name(kind)} is missing{inside}")
            kind, name = kinds[str(key)], f"{name}.{key}" if name else str(key)
        elif isinstance(value, (list, tuple)):
            each = Ellipsis in args or get_origin(kind) is list
            if not each and len(value) != len(args):
                break
            kind, name = args[0 if each else int(key)], f"{name}[{key}]"
        elif isinstance(value, Mapping):
            if first["loc"][-2:] == (key, "[key]"):
                kind, value = args[0], key
                break
            text = str(key)  # a key may hold anything, a message is one line
            kind, name = args[1], f"{name}.{text if text.isprintable() else repr(text)}"
        else:
            break
        value = value[key]
    kind = bare(kind)
    args = get_args(kind)
    if first["type"] == "value_error":
        inner = first["ctx"]["error"]
        sentence = f"options of {_name(kind)}{place} cannot be used: {inner}"
        return inner if isinstance(inner, InputError) else InputError(sentence)
    if first["type"].startswith(("greater_than", "less_than")):
        limit = first["msg"].removeprefix("Input should be ")
        return InputError(f"option {name}{place}: expected a number {limit}, got {short(value)}")
    if dataclasses.is_dataclass(kind):
        where = f" in {name}{place}" if name else place
        return InputError(f"expected options of {_name(kind)}{where}, got {short(value)}")
    wanted = _name(kind)
    if get_origin(kind) in (Union, types.UnionType):
        wanted = " or ".join(map(_name, args))
    elif get_origin(kind) is Literal:
        wanted = f"one of {', '.join(map(str, args))}"
    elif get_origin(kind) is tuple and Ellipsis not in args and isinstance(value, (list, tuple)):
        return InputError(f"option {name}{place}: expected {len(args)} values, got {len(value)}")
    return InputError(f"option {name}{place}: expected {wanted}, got {short(value)}")


def _name(kind: Any) -> str:
    kind = bare(kind)
    if kind is type(None):
        return "none"
    if isinstance(kind, type) and get_origin(kind) is None:
        return kind.__qualname__ if dataclasses.is_dataclass(kind) else kind.__name__
    return str(kind).replace("typing.", "")


def short(value: object) -> str:
    """`repr` of a value for a message, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4}


def _amount(
    text: str, prefixes: str, endings: str = "", number: str = r"[0-9]*\.?[0-9]+"
) -> tuple[Decimal, str, int]:
    """(amount, ending, power of 1000 that its prefix stands for); 0 for what is none of these."""
    form = rf"({number})\s*([{prefixes}{prefixes.upper()}]?)\s*({endings})"
    match = re.fullmatch(form, text.strip())
    if match is None:
        return Decimal(0), "", 0
    power = _POWERS[match[2].lower()]
    # decimal: 2.4T is 2.4e12 to the last bit
    return Decimal(match[1]).scaleb(3 * power), match[3], power


@dataclass(frozen=True, kw_only=True, slots=True)
class Duration:
    """How long to train."""

    amount: float
    unit: Literal["step", "epoch", "token"]

    @classmethod
    def parse(cls, text: str) -> Duration:
        """`2000steps`, `3epochs`, `5Mtokens`. Raises InputError for anything else."""
        amount, ending, _ = _amount(text, "kmg", "steps?|epochs?|tokens?")
        if not ending:
            forms = "2000steps, 3epochs or 5Mtokens"
            raise InputError(f"--duration must be like {forms}, got {short(text)}")
        if not 0 < amount <= LARGEST:
            raise InputError(f"--duration must be above 0 and finite, got {short(text)}")
        unit = cast(Literal["step", "epoch", "token"], ending.removesuffix("s"))
        return cls(amount=float(amount), unit=unit)

    def steps(self, *, tokens_per_step: int, steps_per_epoch: float) -> int:
        """Optimiser steps, rounded up, at least one. Raises InputError for more than `MOST`."""
        per_unit = {"step": 1.0, "epoch": steps_per_epoch, "token": 1 / tokens_per_step}
        steps = max(1, math.ceil(self.amount * per_unit[self.unit] - 1e-9))
        at_least(1, f"the steps of --duration {self.amount:g}{self.unit}s", steps)
        return steps


def parse_bytes(text: str, flag: str) -> int:
    """`500MB`, `20G`, `1.5GiB` in bytes. Raises InputError naming the flag for anything else."""
    size, ending, power = _amount(text, "kmgt", "[iI]?[bB]?")
    if ending[:1] in ("i", "I"):
        size *= Decimal("1.024") ** power
    if not 1 <= size < 2**63:
        form = "a size such as 500MB or 20GB, below 2^63 bytes"
        raise InputError(f"{flag} must be {form}, got {short(text)}")
    return int(size)


def parse_count(text: str, name: str) -> float:
    """How many parameters or tokens: `1.8e11`, `180000000000.0` or `180B` (K, M, B, T).

    Raises InputError naming `name` for anything else and for less than 1.
    """
    number = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
    count = float(_amount(text, "kmbt", number=number)[0])
    if not 1 <= count <= LARGEST:
        raise InputError(
            f"{name} must be a count of 1 or more such as 1.8e11, 180000000000 or 180B (K, M, B "
            f"or T), and at most {LARGEST:g}, got {short(text)}"
        )
    return count


class Repeated:
    """Marks a list field that is given one value at a time: `--prompt A --prompt B`."""


class Leading:
    """Marks a field that words in front of all flags fill: `report RUN RUN` is `report --runs RUN
    RUN`."""


@dataclass(frozen=True, slots=True)
class Form:
    """Marks a text in a union with numbers or words: it must match `pattern`, so that a misspelt
    word is refused."""

    pattern: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag of a verb and the field that it fills."""

    name: str
    path: tuple[str, ...]
    kind: Any
    """The field's type."""
    default: Any
    """The field's default, `dataclasses.MISSING` when it is required."""
    is_switch: bool
    """It takes no value: giving it turns the default around."""
    is_list: bool
    is_repeated: bool
    is_leading: bool


def flags_of(cls: type) -> dict[str, Flag]:
    """Every flag of an options dataclass, nested groups included, by name and in order."""
    return {flag.name: flag for flag in _walk(cls, (), None)}


def to_argv(options: object) -> list[str]:
    """The shortest list of flags that gives these options back."""
    argv: list[str] = []
    for flag in flags_of(type(options)).values():
        value: Any = options
        for name in flag.path:
            value = getattr(value, name)
        if value == flag.default:
            continue
        if flag.is_switch:
            argv.append(flag.name)
        elif flag.is_list and not flag.is_repeated:
            argv += [flag.name, *(str(item) for item in as_dict(value))]
        else:
            for item in as_dict(value) if flag.is_list else [as_dict(value)]:
                text = str(item)
                argv += [f"{flag.name}={text}"] if text.startswith("-") else [flag.name, text]
    return argv


def join_minus_values(argv: Sequence[str], flags: Mapping[str, Flag]) -> list[str]:
    """`--logit-bias -5:3` becomes `--logit-bias=-5:3`, so that a value may start with a minus.

    What looks like another long option (two minus signs, no blank) stays one: a forgotten value is
    likelier than a text such as `--x`, and `--prompt=--x` says the latter.
    """
    joined: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag = flags.get(word.replace("_", "-"))
        if flag is not None and not flag.is_switch and words and _is_minus_value(words[0]):
            word = f"{word}={words.pop(0)}"
        joined.append(word)
    return joined


def name_leading(argv: Sequence[str], flags: Mapping[str, Flag]) -> list[str]:
    """Put the flag that leading words belong to in front of them, where a verb has one; a repeated
    flag in front of each word. Words behind `--` are such words too, whatever they begin with.

    "-5 + 3"  --target T  --  -7      becomes      "--prompt=-5 + 3"  --prompt=-7  --target T
    """
    leading = next((flag for flag in flags.values() if flag.is_leading), None)
    words = list(argv)
    if leading is None:
        return words
    end = words.index("--") if "--" in words else len(words)
    count = next((at for at, word in enumerate(words[:end]) if _is_option(word)), end)
    named = words[:count] + words[end + 1 :]
    if not named:
        return words[:end]
    if leading.is_repeated or (len(named) == 1 and named[0].startswith("-")):
        first = [f"{leading.name}={word}" for word in named]
    else:
        first = [leading.name, *named]
    return first + words[count:end]


def _is_option(word: str) -> bool:
    """It begins with a minus, and what could be an option's name holds no blank."""
    return word.startswith("-") and not any(c in word.split("=", 1)[0] for c in " \n\t")


def check_known(
    argv: Sequence[str],
    flags: Mapping[str, Flag],
    verb: str,
    meant: Callable[[str], str | None] = lambda name: None,
) -> None:
    """Raise `InputError` for the first `--option` that the verb does not have.

    Args:
        meant: what to write for a name (`draft_vocab`) that is known elsewhere, if it is. Else, or
            where the name ends a flag's (`--length`, `--draft-length`), the flag of the nearest
            name is proposed.
    """
    for word in argv:
        name = word.split("=", 1)[0]
        if not name.startswith("--") or any(blank in name for blank in " \t\n"):
            continue
        if name in ("--", "--help") or name.replace("_", "-") in flags:
            continue
        bare = name.removeprefix("--").replace("_", "-")
        ends_one = any(flag.endswith(f"-{bare}") for flag in flags)
        other = None if ends_one else meant(bare.replace("-", "_"))
        hint = nearest(name, flags).split(" (known", 1)[0]
        hint = hint if other is None else f"; did you mean {other!r}?"
        more = f"'draftsmith {verb} --help' lists all options"
        raise InputError(f"unknown option {name!r} of draftsmith {verb}{hint}; {more}")


def check_values(argv: Sequence[str], flags: Mapping[str, Flag], verb: str) -> None:
    """Raise `InputError` for a value that its flag cannot have, and for required flags that are not
    there. `argv` has been through `join_minus_values` and `check_known`."""
    if any(word in ("-h", "--help") for word in argv):
        return
    words = list(argv)
    missing = {f.name for f in flags.values() if f.default is dataclasses.MISSING}
    while words:
        word = words.pop(0)
        given, equals, text = word.partition("=")
        flag = flags.get(given.replace("_", "-"))
        if flag is None:
            more = f"'draftsmith {verb} --help' lists all options"
            raise InputError(f"{word!r} belongs to no option of draftsmith {verb}; {more}")
        missing.discard(flag.name)
        values = [text] if equals else []
        most = 0 if flag.is_switch else 1
        if flag.is_list and not flag.is_repeated:
            most = len(argv)
        while len(values) < most and words and not _is_flag(words[0], flags):
            values.append(words.pop(0))
        _check(flag, values)
    if missing:
        names = " and ".join(name for name in flags if name in missing)
        raise InputError(f"draftsmith {verb} needs {names}")


def _is_flag(word: str, flags: Mapping[str, Flag]) -> bool:
    return word.split("=", 1)[0].replace("_", "-") in flags


def _check(flag: Flag, values: Sequence[str]) -> None:
    """The values behind one flag, by its type."""
    kinds = get_args(flag.kind) if flag.is_list else (flag.kind,)
    if flag.is_switch:
        if values:
            raise InputError(f"{flag.name} takes no value, got {values[0]!r}")
        return
    if Ellipsis in kinds or get_origin(flag.kind) is list:
        if flag.is_repeated and not values:
            raise InputError(f"{flag.name} needs a value")
        kinds = (kinds[0],) * len(values)
    elif len(values) != len(kinds):
        count = "a value" if len(kinds) == 1 else f"{len(kinds)} values, got {len(values)}"
        raise InputError(f"{flag.name} needs {count}")
    for kind, value in zip(kinds, values, strict=True):
        _check_word(flag, value)
        wanted: list[str] = []
        choices: list[str] = []
        for option in _alternatives(kind):
            if isinstance(option, Form):
                if re.fullmatch(option.pattern, value):
                    break
            elif get_origin(option) is Literal:
                choices = [str(choice) for choice in get_args(option)]
                wanted += [f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]]
                if value in choices:
                    break
            elif option in _NUMBERS:
                wanted.append(_NUMBERS[option].name)
                try:
                    _NUMBERS[option].read(value, flag.name)
                    break
                except InputError:
                    raise
                except ValueError:
                    continue
            else:
                break  # any text
        else:
            hint = nearest(value, choices).split(" (known", 1)[0]
            raise InputError(f"{flag.name} must be {' or '.join(wanted)}, got {short(value)}{hint}")


def _check_word(flag: Flag, value: str) -> None:
    """A word of the command line may be any bytes. An empty one is what a shell makes of a variable
    that is not set; as a path it would be the current folder."""
    require(bool(value) or flag.default == "", f"{flag.name} must not be empty")
    check_text(value, flag.name)
    if Path in map(bare, get_args(flag.kind) or (flag.kind,)):
        require(not _too_long(value), f"{flag.name}: the path is too long, got {short(value)}")


def _alternatives(kind: Any) -> list[Any]:
    """The members of a union but None, which is said by leaving the flag out; the form of a text
    that has one in place of its type."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    forms = [next((one for one in get_args(m) if isinstance(one, Form)), None) for m in members]
    return [
        form or bare(member)
        for member, form in zip(members, forms, strict=True)
        if member is not type(None)
    ]


def _is_minus_value(word: str) -> bool:
    if word in ("-h", "--help"):
        return False
    return word.startswith("-") and (not word.startswith("--") or any(c in word for c in " \n\t"))


def _walk(cls: type, path: tuple[str, ...], given: object | None) -> Iterator[Flag]:
    """The flags of a class; `given`: an instance whose values are its defaults where it is used."""
    kinds = field_types(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        annotated = kinds[field.name]
        kind = bare(annotated)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _walk(kind, (*path, field.name), _default(field, given))
            continue
        default = _default(field, given, absent=dataclasses.MISSING)
        markers = get_args(annotated)[1:] if get_origin(annotated) is Annotated else ()
        stem = field.name.replace("_", "-")
        yield Flag(
            name=f"--no-{stem}" if default is True else f"--{stem}",
            path=(*path, field.name),
            kind=kind,
            default=default,
            is_switch=kind is bool,
            is_list=get_origin(kind) in (tuple, list),
            is_repeated=Repeated in markers,
            is_leading=Leading in markers,
        )


def _default(field: dataclasses.Field[Any], given: object | None, *, absent: Any = None) -> Any:
    if given is not None:
        return getattr(given, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return absent if field.default is dataclasses.MISSING else field.default


Many = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, Repeated]
"""A flag that may be given several times, one value each."""


Range = Annotated[str, Form(r"[0-9]+\.\.[0-9]+")]
"""A..B: whole numbers, both ends included."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Values that belong together, with their checks."""

    def validate(self) -> None:
        """Raise `InputError` for values that cannot be used; nested groups check themselves."""
        for f in dataclasses.fields(self):
            group = getattr(self, f.name)
            if isinstance(group, Configuration):
                group.validate()


def require(good: bool, sentence: str) -> None:
    if not good:
        raise InputError(sentence)


def is_whole(value: object) -> bool:
    """Whether it is an integer, also numpy's; True and False are none."""
    # the first question answers for the many tokens of a prompt, at a tenth of the other's cost
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def check_whole(text: str, where: str) -> None:
    """Raise `InputError` for half a character: half an emoji, written as an escape, is JSON but no
    text, and bytes that are not UTF-8 are read as such halves; no tokenizer or file takes them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"it holds a lone surrogate, {error.object[error.start]!r}"
        raise InputError(f"{where} is not UTF-8: {half}; convert the text") from None


def check_text(text: str, where: str) -> None:
    """Raise `InputError` for what is no text, what `check_whole` refuses, and a NUL character."""
    require(isinstance(text, str), f"{where} must be a text, got {short(text)}")
    check_whole(text, where)
    require("\0" not in text, f"{where} holds a NUL character: is it UTF-16, or no text?")


def require_name(what: str, value: object) -> None:
    """Raise `InputError` unless it is a text or a path."""
    good = isinstance(value, (str, os.PathLike))
    require(good, f"{what} must be a text or a path, got {short(value)}")


def require_short(what: str, path: object) -> None:
    """Raise `InputError` for a name that is no path because of its length."""
    require(not _too_long(path), f"{what} is too long for a path, got {short(path)}")


def require_another(out: Path | None, **inputs: Path | None) -> None:
    """Raise `InputError` where `--out` is one of the files that are read: it would replace it."""
    for name, path in inputs.items():
        same = (
            out is not None and path is not None and os.path.realpath(out) == os.path.realpath(path)
        )
        require(not same, f"--out {out} is --{name} itself, which it would replace: name another")


def _too_long(path: Any) -> bool:
    """Whether the system takes it for no path because of its length."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    except ValueError:  # what no path can hold is said elsewhere
        pass
    return False


_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "int": (is_whole, "a whole number"),
    "float": (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
}


def check_plain(options: Any) -> None:
    """Raise `InputError` for a number, or True or False, of a dataclass that is something else."""
    for field in dataclasses.fields(options):
        kind, _, optional = str(field.type).partition(" | ")
        if kind in _KINDS:
            good, words = _KINDS[kind]
            value = getattr(options, field.name)
            if not (good(value) or (value is None and optional)):
                raise InputError(f"{field.name} must be {words}, got {short(value)}")


def require_kind(name: str, value: object, kind: type, hint: str = "") -> None:
    """Raise `InputError` unless the value is of this class; `hint`: how to make one."""
    good = isinstance(value, kind) and not isinstance(value, type)  # a class has methods, too
    require(good, f"{name} must be a {kind.__name__}{hint}, got {short(value)}")


def unused(flag: str, value: object, default: object, needs: str) -> None:
    """Raise `InputError` for an option that was given and would do nothing."""
    require(value == default, f"{flag} does nothing without {needs}")


def each_unused(needs: str, options: Configuration, *names: str) -> None:
    """Check each of these fields with `unused`, against its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name in names:
        unused(f"--{name.replace('_', '-')}", getattr(options, name), defaults[name], needs)


def at_least(least: int, name: str, value: int, *, most: int = MOST) -> None:
    """Raise InputError, naming the flag or argument, unless it is a whole number between `least`
    and `most`."""
    require(is_whole(value), f"{name} must be a whole number, got {short(value)}")
    require(value >= least, f"{name} must be at least {least}, got {short(value)}")
    require(value <= most, f"{name} must be at most {most}, got {short(value)}")


def positive(flag: str, value: float | None) -> None:
    """Raise InputError unless the value is None, or finite and above 0."""
    good = value is None or (math.isfinite(value) and value > 0)
    require(good, f"{flag} must be above 0, got {value}")


def each_at_least(least: int, options: object, *names: str, most: int = MOST) -> None:
    """Check each of these fields that is not None with `at_least`, by the name of its flag."""
    for name in names:
        value = getattr(options, name)
        if value is not None:
            at_least(least, f"--{name.replace('_', '-')}", value, most=most)
