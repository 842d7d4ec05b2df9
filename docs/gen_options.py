"""Tables of options for the pages: a verb's from its options class, a drafter's from its Config.

A page holds a marker where its table goes, `<!-- options: generate -->` or `<!-- config: griffin
-->`. The table is made when the site is built, so it cannot differ from the program.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

from draftsmith.cli import verbs
from draftsmith.config import Flag, Form, as_dict, bare, field_types, flags_of
from draftsmith.drafters.registry import drafter_class

MARKER = re.compile(r"<!-- (options|config): ([a-z0-9_ -]+?) -->")


def fill(markdown: str) -> str:
    """The page with its markers replaced by tables."""
    makers = {"options": verb_tables, "config": config_table}
    return MARKER.sub(lambda found: makers[found[1]](found[2]), markdown)


def verb_tables(verb: str) -> str:
    """One table per group of options, the verb's own options first."""
    cls = verbs()[verb]
    groups: dict[tuple[str, ...], list[Flag]] = {}
    for flag in flags_of(cls).values():
        groups.setdefault(flag.path[:-1], []).append(flag)
    inherited = {name for base in cls.__bases__ for name in getattr(base, "__annotations__", ())}
    groups.get((), []).sort(key=lambda flag: flag.path[0] in inherited)  # what every verb has: last
    parts = []
    for path in sorted(groups, key=len):
        owner = cls
        for name in path:
            owner = bare(field_types(owner)[name])
        docs = field_docs(owner)
        title = f"{first_sentence(owner)}\n\n" if path else ""
        rows = (
            (
                f"`{flag.name}`",
                values(flag.kind)
                + (", also in first place without the flag" if flag.is_leading else ""),
                default(flag.default),
                docs.get(flag.path[-1], ""),
            )
            for flag in groups[path]
        )
        parts.append(title + table(("Option", "Values", "Default", "Meaning"), rows))
    return "\n\n".join(parts)


def config_table(kind: str) -> str:
    """What a drafter's class declares, and the fields of its Config with the moment at which each
    is read."""
    drafter = drafter_class(kind)
    config = drafter.Config
    docs, kinds = field_docs(config), field_types(config)
    rows = []
    for field in dataclasses.fields(config):
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        read = "training" if field.metadata.get("when") == "training" else "decoding"
        if field.metadata.get("fixed"):
            read = "first training only"
        name, meaning = f"`{field.name}`", docs.get(field.name, "")
        rows.append((name, values(kinds[field.name]), default(value), read, meaning))
    learns = "is trained with `draftsmith distill`" if drafter.trains else "needs no training"
    shapes = "trees and chains" if drafter.takes_trees else "chains"
    facts = f"This drafter {learns} and takes {shapes}."
    if not rows:
        return f"{facts} It has no options."
    head = ("Option", "Values", "Default", "Read in", "Meaning")
    return f"{facts} `--drafter-option NAME=VALUE` sets an option.\n\n{table(head, rows)}"


def field_docs(cls: type) -> dict[str, str]:
    """The text below each field of a dataclass, those of its bases included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for one, after in zip(tree.body, tree.body[1:], strict=False):
            if not (isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)):
                continue
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[one.target.id] = " ".join(text.value.split())
    return found


def first_sentence(cls: type) -> str:
    """The first paragraph of the class's docstring, on one line."""
    return " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())


def values(kind: Any) -> str:
    """What may be given, as code: `int`, `text`, `a`, `b`."""
    return ", ".join(dict.fromkeys(_values(kind)))


def _values(kind: Any) -> Iterable[str]:
    if kind is type(None):
        return
    for marker in get_args(kind)[1:] if hasattr(kind, "__metadata__") else ():
        if isinstance(marker, Form):
            yield "`A..B`" if ".." in marker.pattern.replace("\\", "") else f"`{marker.pattern}`"
            return
    kind = bare(kind)
    origin = get_origin(kind)
    if origin is Literal:
        yield from (f"`{choice}`" for choice in get_args(kind))
    elif origin in (Union, types.UnionType):
        for member in get_args(kind):
            yield from _values(member)
    elif origin in (tuple, list):
        members = [member for member in get_args(kind) if member is not Ellipsis]
        several = "several" if Ellipsis in get_args(kind) or origin is list else str(len(members))
        yield f"{several} of {values(members[0])}"
    else:
        known = {bool: "switch", int: "whole number", float: "number", str: "text"}
        yield known.get(kind, getattr(kind, "__name__", str(kind)).lower())


def default(value: object) -> str:
    """A default as it would be written on the command line."""
    if value is dataclasses.MISSING:
        return "required"
    plain = as_dict(value)
    if plain is None or plain == [] or plain == "":
        return ""
    if isinstance(plain, bool):
        return "on" if plain else "off"
    if isinstance(plain, list):
        return f"`{' '.join(str(item) for item in plain)}`"
    return f"`{plain}`"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(escape(cell) for cell in line)} |" for line in lines)


def escape(cell: str) -> str:
    """A cell's text: a bar would end the cell, an angle bracket would open a tag."""
    inside = re.split(r"(`[^`]*`)", cell.replace("|", "\\|"))
    plain = (one if one.startswith("`") else one.replace("<", "&lt;") for one in inside)
    return "".join(plain)
