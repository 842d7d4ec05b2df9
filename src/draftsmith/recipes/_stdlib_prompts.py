"""Real code to continue, on every machine: beginnings of functions of Python's standard library.

They are taken from the files that the shipped models were not trained on (`mini_code`: by a hash of
the file's name, so the choice is the same everywhere), and nothing of them is copied into the
project. Library modules come first, their tests fill up.

    file     ... context ... def f(...):  body body | body body        prompt: up to the bar
                 `--- CONTEXT_LINES ----------------'
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from draftsmith.bench.suites import Prompt
from draftsmith.errors import InputError
from draftsmith.recipes import _text, mini_code

CONTEXT_LINES = 32
_SHORTEST = 9
"""Functions with fewer lines leave nothing to continue."""
_SHARE = 0.4
"""Of a function's lines, given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """Where a prompt ends."""

    file: _text.TextFile
    name: str
    """Of the function."""
    lines: tuple[str, ...]
    stop: int


def held_out_prompts(count: int) -> tuple[Prompt, ...]:
    """The first `count` prompts.

    Raises:
        InputError: this Python comes without its library's sources.
    """
    chosen = mini_code.text()
    files = _text.find_files(chosen.text, chosen.include, chosen.exclude)
    _, held = _text.hold_out(files, mini_code.HELD_OUT)
    held.sort(key=lambda file: ("test" in file.name, file.name))
    cuts = [list(_cuts(file)) for file in held]
    # one function of every file, then a second one of every file, ...
    order = [some[depth] for depth in range(3) for some in cuts if depth < len(some)]
    prompts = tuple(
        Prompt(
            id=f"{cut.file.name}:{cut.name}",
            text="".join(cut.lines[max(0, cut.stop - CONTEXT_LINES) : cut.stop]),
        )
        for cut in order[:count]
    )
    if not prompts:
        raise InputError("This Python comes without the sources of its standard library.")
    return prompts


def _cuts(file: _text.TextFile) -> Iterator[_Cut]:
    """Up to three places in a file, far apart, in an order that begins in the middle."""
    try:
        text = _text.read_text(file.path)
        tree = ast.parse(text)
    except (InputError, SyntaxError, ValueError):
        return  # tests hold files that are broken on purpose
    lines = tuple(text.splitlines(keepends=True))
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and _length(node) >= _SHORTEST
        and node.lineno > CONTEXT_LINES // 2
    ]
    functions.sort(key=lambda node: node.lineno)
    places = [len(functions) // 2, len(functions) // 5, (4 * len(functions)) // 5]
    for place in dict.fromkeys(place for place in places if place < len(functions)):
        node = functions[place]
        stop = node.lineno - 1 + max(2, round(_SHARE * _length(node)))
        yield _Cut(file=file, name=node.name, lines=lines, stop=stop)


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
