"""Options as command-line flags: the names, the way back from options to flags, and minus signs.

A field `max_new_tokens` is the flag `--max-new-tokens`; the fields of a nested group are flags of
the verb (no prefix). A true-or-false field that starts as False is a bare flag `--stream`; one that
starts as True is switched off by `--no-...`. This is what tyro does under the settings of `cli`;
here it is stated once more without tyro, so that records can spell a command that reruns them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from draftsmith.config import as_dict, bare, field_types
from draftsmith.errors import InputError, nearest


class Repeated:
    """Marks a list field that is given one value at a time: `--prompt A --prompt B`."""


class Leading:
    """Marks a field that words in front of all flags fill: `report RUN RUN` is `report --runs RUN
    RUN`."""


@dataclass(frozen=True, slots=True)
class Form:
    """Marks a text in a union with numbers or words: only one that matches `pattern` is let by, so
    that a misspelt word is still noticed."""

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
    """With the flag that words in front of all others belong to, where a verb has one."""
    leading = [name for name, flag in flags.items() if flag.is_leading]
    bare_word = bool(argv) and not argv[0].startswith("-")
    return [*leading, *argv] if bare_word else list(argv)


def check_known(argv: Sequence[str], flags: Mapping[str, Flag], verb: str) -> None:
    """Raise `InputError` for the first `--option` that the verb does not have."""
    for word in argv:
        name = word.split("=", 1)[0]
        if not name.startswith("--") or any(blank in name for blank in " \t\n"):
            continue
        if name in ("--", "--help") or name.replace("_", "-") in flags:
            continue
        hint = nearest(name, flags).split(" (known", 1)[0]
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
                wanted.append(_NUMBERS[option])
                with contextlib.suppress(ValueError):
                    option(value)
                    break
            else:
                break  # any text
        else:
            hint = nearest(value, choices).split(" (known", 1)[0]
            raise InputError(f"{flag.name} must be {' or '.join(wanted)}, got {value!r}{hint}")


_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


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
