"""Real code to continue, on every machine: beginnings of functions of Python's standard library.

What is measured on comes from files that the shipped models were not trained on (by a
hash of the file's name, so the choice is the same everywhere); what is learnt from comes from the
others. Nothing of them is copied into the project. Library modules come first, their tests fill up.

    file     ... context ... def f(...):  body body | body body        prompt: up to the bar
                 `--- CONTEXT_LINES ----------------'
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from draftsmith.data import text
from draftsmith.data.prompts import Prompt
from draftsmith.errors import InputError

INCLUDE = ("*.py",)
EXCLUDE = ("site-packages/*", "dist-packages/*", "encodings/*", "_sysconfigdata*", "config-*")
"""The .py files of the running Python, without installed packages and character tables."""
HELD_OUT = 0.02
"""Share of files, by a hash of their names, that `models/mini-code` never saw."""

CONTEXT_LINES = 32
_SHORTEST = 9
"""Functions with fewer lines leave nothing to continue."""
_SHARE = 0.4
"""The share of a function's lines that the prompt gives."""
_PLACES = ((1, 2), (1, 5), (4, 5), (1, 3), (2, 3), (1, 10))
"""In a file's functions: fractions, in the order in which they are taken."""
_TAUGHT = 3
"""Places in a file that is learnt from. Held-out files give more, which do not overlap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """Where a prompt ends."""

    file: text.TextFile
    name: str
    """Lines of the function."""
    lines: tuple[str, ...]
    stop: int


def held_out_prompts(count: int) -> tuple[Prompt, ...]:
    """The first `count` prompts from files that no shipped model was trained on.

    Raises:
        InputError: this Python comes without its library's sources.
    """
    _, held = _files()
    ordered = sorted(held, key=lambda file: (_is_test(file), file.name))
    cuts = [_cuts(file) for file in ordered]
    # one function of every file, then a second one of every file, ...; read as far as needed
    order = (cut for _ in _PLACES for some in cuts for cut in islice(some, 1))
    prompts = tuple(_prompt(cut) for cut in islice(order, count))
    if not prompts:
        raise InputError("This Python comes without the sources of its standard library.")
    return prompts


def training_prompts() -> Iterator[Prompt]:
    """Prompts from the other files, which are read one by one as they are needed. No file gives
    both these and held-out prompts."""
    return (_prompt(cut) for file in _learnt_from() for cut in islice(_cuts(file), _TAUGHT))


def training_texts() -> Iterator[str]:
    """Those files themselves, whole and in the same order."""
    return text.documents(filter(text.is_utf8, _learnt_from()))


def _learnt_from() -> list[text.TextFile]:
    """In an order by a hash of their names: a little of everywhere, tests last."""
    kept, _ = _files()

    def place(file: text.TextFile) -> tuple[bool, bytes]:
        return _is_test(file), hashlib.sha256(file.name.encode()).digest()

    return sorted(kept, key=place)


@functools.cache
def _files() -> tuple[Sequence[text.TextFile], Sequence[text.TextFile]]:
    """(learnt from, held out) when the shipped models were made."""
    files = text.find_files((text.STANDARD_LIBRARY,), INCLUDE, EXCLUDE)
    return text.hold_out(files, HELD_OUT)


def _is_test(file: text.TextFile) -> bool:
    return "test" in file.name


def _prompt(cut: _Cut) -> Prompt:
    return Prompt(
        id=f"{cut.file.name}:{cut.name}",
        text="".join(cut.lines[max(0, cut.stop - CONTEXT_LINES) : cut.stop]),
    )


def _cuts(file: text.TextFile) -> Iterator[_Cut]:
    """Places in a file, in an order that begins in the middle."""
    try:
        source = text.read_text(file.path)
        tree = ast.parse(source)
    except (InputError, SyntaxError, ValueError):
        return  # tests hold files that are broken on purpose
    lines = tuple(source.splitlines(keepends=True))
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and _length(node) >= _SHORTEST
        and node.lineno > CONTEXT_LINES // 2
    ]
    functions.sort(key=lambda node: node.lineno)
    places = [part * len(functions) // whole for part, whole in _PLACES]
    taken: list[range] = []
    for number, place in enumerate(dict.fromkeys(p for p in places if p < len(functions))):
        node = functions[place]
        stop = node.lineno - 1 + max(2, round(_SHARE * _length(node)))
        read = range(max(0, stop - CONTEXT_LINES), node.lineno - 1 + _length(node))
        if number < _TAUGHT or not any(
            read.start < other.stop and other.start < read.stop for other in taken
        ):
            taken.append(read)
            yield _Cut(file=file, name=node.name, lines=lines, stop=stop)


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
