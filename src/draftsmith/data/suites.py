"""Prompts from files, installed suites and Python's standard library.

What a record of a file may hold: `prompts.py`.

.jsonl .ndjson   one JSON object per line          .json   an array of objects (or JSONL)
anything else    plain text, one prompt per line; blank lines separate and are skipped
each of them also compressed as .gz or .xz

The standard library gives real code to continue, on every machine: beginnings of functions. What
is measured on comes from files that the shipped models were not trained on (by a hash of the file's
name, so the choice is the same everywhere); what is learnt from comes from the others. Nothing of
them is copied into the project. Library modules come first, their tests fill up.

    file     ... context ... def f(...):  body body | body body        prompt: up to the bar
                 `--- CONTEXT_LINES ----------------'
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from draftsmith.config import require_name, require_short
from draftsmith.data.prompts import Prompt, read_record
from draftsmith.data.text import (
    STANDARD_LIBRARY,
    TextFile,
    documents,
    find_files,
    hold_out,
    is_utf8,
    read_lines,
    read_text,
)
from draftsmith.errors import InputError, nearest
from draftsmith.plugins import SUITES, load_plugin, plugin_names, wrong_plugin
from draftsmith.provenance import parse_json


def load_suite(name: str | Path, *, limit: int | None = None) -> tuple[Prompt, ...]:
    """The first `limit` prompts of a file, or of a suite that an installed package offers.

    Raises:
        InputError: there is neither, or no prompt in it.
        BackendError: the package that offers the suite cannot be imported, or offers no prompts.
    """
    require_name("a suite", name)
    require_short("a suite", name)
    path = Path(name)
    if path.exists() or path.suffix:
        return load_prompts(path, limit=limit)
    make = load_plugin(SUITES, str(name), ())
    if make is None:
        names = plugin_names(SUITES)
        what = f"file or installed suite {str(name)!r}" if names else f"file {str(name)!r}"
        hint = nearest(str(name), names) if names else ""
        raise InputError(f"there is no prompt {what}{hint}")
    found = make() if callable(make) else None
    if isinstance(found, (str, Path)):
        return load_prompts(found, limit=limit)
    good = isinstance(found, Sequence) and all(isinstance(one, Prompt) for one in found)
    if not good or not found:
        wanted = "a function that returns prompts (`draftsmith.Prompt`) or the path of a file"
        raise wrong_plugin(SUITES, str(name), wanted)
    return _with_unique_ids(found[:limit])


def load_prompts(
    path: Path | str, *, limit: int | None = None, keep_empty: bool = False
) -> tuple[Prompt, ...]:
    """The first `limit` prompts of a file. Errors name the file and the line.

    Ids are made unique (figures are kept by id): the second "a" is "a#2". `keep_empty`: a record
    with an empty `prompt` or `text` becomes a prompt of no text, for callers that count and skip.
    """
    path = Path(path)
    prompts = _with_unique_ids(islice(_read(path, keep_empty), limit))
    if not prompts:
        raise InputError(f"{path}: no prompts in this file")
    return prompts


def _with_unique_ids(found: Iterable[Prompt]) -> tuple[Prompt, ...]:
    """The second "a" becomes "a#2"."""
    prompts: list[Prompt] = []
    times: dict[str, int] = {}
    for prompt in found:
        label = prompt.id
        while label in times:
            times[prompt.id] += 1
            label = f"{prompt.id}#{times[prompt.id]}"
        times[label] = 1
        prompts.append(replace(prompt, id=label))
    return tuple(prompts)


# --------------------------------------------------------------------------- reading


def _read(path: Path, keep_empty: bool) -> Iterator[Prompt]:
    kind = next((s for s in reversed(path.suffixes) if s not in (".gz", ".xz")), "").lower()
    lines = read_lines(path)
    if kind not in (".jsonl", ".ndjson", ".json"):
        for number, (_, line) in enumerate(lines, start=1):
            if line.strip():
                yield Prompt(id=str(number), text=line)
        return
    if kind == ".json":
        known = list(lines)
        try:
            whole = parse_json("\n".join(line for _, line in known), str(path))
        except InputError:
            first = next((line.rstrip() for _, line in known if line.strip()), "}")
            if not first.endswith("}"):  # several objects: JSONL under another name
                raise
            lines = iter(known)
        else:
            for number, record in enumerate(whole if isinstance(whole, list) else [whole], start=1):
                yield read_record(record, str(number), f"{path}, record {number}", keep_empty)
            return
    for number, (where, line) in enumerate(lines, start=1):
        if line.strip():
            yield read_record(parse_json(line, where), str(number), where, keep_empty)


# --------------------------------------------------------------------------- Python's own library

LIBRARY_INCLUDE = ("*.py",)
LIBRARY_EXCLUDE = (
    "site-packages/*",
    "dist-packages/*",
    "encodings/*",
    "_sysconfigdata*",
    "config-*",
)
"""The .py files of the running Python, without installed packages and character tables."""
LIBRARY_HELD_OUT = 0.02
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


def held_out_prompts(count: int) -> tuple[Prompt, ...]:
    """The first `count` prompts from files that no shipped model was trained on.

    Raises:
        InputError: this Python comes without its library's sources.
    """
    _, held = _library_files()
    ordered = sorted(held, key=lambda file: (_is_test(file), file.name))
    found = [_prompts(file) for file in ordered]
    # one function of every file, then a second one of every file, ...; read as far as needed
    order = (prompt for _ in _PLACES for some in found for prompt in islice(some, 1))
    prompts = tuple(islice(order, count))
    if not prompts:
        raise InputError("This Python comes without the sources of its standard library.")
    return prompts


def dozen_prompts() -> tuple[Prompt, ...]:
    """Twelve chats of one turn: code, mathematics, everyday questions."""
    return load_prompts(Path(__file__).with_name("dozen.jsonl"))


def training_prompts() -> Iterator[Prompt]:
    """Prompts from the other files, which are read one by one as they are needed. No file gives
    both these and held-out prompts."""
    return (prompt for file in _learnt_from() for prompt in islice(_prompts(file), _TAUGHT))


def training_texts() -> Iterator[str]:
    """Those files themselves, whole and in the same order."""
    return documents(filter(is_utf8, _learnt_from()))


def _learnt_from() -> list[TextFile]:
    """In an order by a hash of their names: a little of everywhere, tests last."""
    kept, _ = _library_files()

    def place(file: TextFile) -> tuple[bool, bytes]:
        return _is_test(file), hashlib.sha256(file.name.encode()).digest()

    return sorted(kept, key=place)


@functools.cache
def _library_files() -> tuple[Sequence[TextFile], Sequence[TextFile]]:
    """(learnt from, held out) when the shipped models were made."""
    files = find_files((STANDARD_LIBRARY,), LIBRARY_INCLUDE, LIBRARY_EXCLUDE)
    return hold_out(files, LIBRARY_HELD_OUT)


def _is_test(file: TextFile) -> bool:
    return "test" in file.name


def _prompts(file: TextFile) -> Iterator[Prompt]:
    """Beginnings of a file's functions, in an order that begins in the middle."""
    try:
        source = read_text(file.path)
        tree = ast.parse(source)
    except (InputError, SyntaxError, ValueError):
        return  # tests hold files that are broken on purpose
    lines = source.splitlines(keepends=True)
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
        start = max(0, stop - CONTEXT_LINES)
        read = range(start, node.lineno - 1 + _length(node))
        if number < _TAUGHT or not any(
            read.start < other.stop and other.start < read.stop for other in taken
        ):
            taken.append(read)
            yield Prompt(id=f"{file.name}:{node.name}", text="".join(lines[start:stop]))


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
