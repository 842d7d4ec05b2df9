"""Prompts from files and installed suites (what a record may hold: `prompts.py`).

.jsonl .ndjson   one JSON object per line          .json   an array of objects (or JSONL)
anything else    plain text, one prompt per line; blank lines separate and are skipped
each of them also compressed as .gz or .xz
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from draftsmith.data.prompts import Prompt, read_record
from draftsmith.data.text import parse_json, read_lines
from draftsmith.errors import InputError, nearest
from draftsmith.plugins import SUITES, load_plugin, plugin_names, wrong_plugin


def load_suite(name: str | Path, *, limit: int | None = None) -> tuple[Prompt, ...]:
    """The first `limit` prompts of a file, or of a suite that an installed package offers.

    Raises:
        InputError: there is neither, or no prompt in it.
        BackendError: the package that offers the suite cannot be imported, or offers no prompts.
    """
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
            whole = json.loads("\n".join(line for _, line in known))
        except (ValueError, RecursionError):
            lines = iter(known)  # several objects: JSONL under another name
        else:
            for number, record in enumerate(whole if isinstance(whole, list) else [whole], start=1):
                yield read_record(record, str(number), f"{path}, record {number}", keep_empty)
            return
    for number, (where, line) in enumerate(lines, start=1):
        if line.strip():
            yield read_record(parse_json(line, where), str(number), where, keep_empty)
