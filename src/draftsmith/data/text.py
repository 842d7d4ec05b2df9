"""Reading training text: files, folders and globs, plain or JSONL, also compressed."""

from __future__ import annotations

import fnmatch
import glob
import gzip
import hashlib
import json
import lzma
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError

STANDARD_LIBRARY = "python:stdlib"
"""Stands for the folder of the running Python's own sources, wherever that is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """A file and the name that records use for it: never an absolute path."""

    path: Path
    name: str


def find_files(
    patterns: Sequence[str],
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    *,
    flag: str = "--text",
) -> list[TextFile]:
    """All files that the patterns mean, by name, each once. Raises InputError naming a missing one
    (`flag`: where it was given).

    Folders are searched below; `include` and `exclude` match names relative to the folder (`*`
    also matches slashes) or their last part. Hidden files and folders are left out.
    """
    found: dict[Path, TextFile] = {}
    for pattern in patterns:
        path = Path(pattern)
        if pattern == STANDARD_LIBRARY:
            path = Path(sysconfig.get_paths()["stdlib"])
        if path.is_dir():
            files = list(_walk(path, include, exclude))
            if not files:
                raise InputError(f"{flag} {pattern}: no file in this folder matches")
        elif path.exists():
            files = [TextFile(path=path, name=path.name)]
        else:
            matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
            files = [TextFile(path=match, name=match.name) for match in matches if match.is_file()]
            if not files:
                raise InputError(f"{flag} {pattern}: there is no such file or folder")
        for file in files:
            found.setdefault(file.path.resolve(), file)
    return sorted(found.values(), key=lambda file: (file.name, str(file.path)))


def hold_out(files: Sequence[TextFile], share: float) -> tuple[list[TextFile], list[TextFile]]:
    """(kept, held out): by a hash of the name, so that the choice never depends on other files."""
    kept: list[TextFile] = []
    held: list[TextFile] = []
    for file in files:
        number = int.from_bytes(hashlib.sha256(file.name.encode()).digest()[:8], "big")
        (held if number < share * 2**64 else kept).append(file)
    return kept, held


def documents(files: Iterable[TextFile]) -> Iterator[str]:
    """The documents of the files, in order; empty ones are left out.

    Files that are not UTF-8 are unreadable: InputError names the file (and the line of a JSONL).
    """
    for file in files:
        if ".jsonl" in file.path.suffixes:
            yield from _lines(file)
        elif text := read_text(file.path):
            yield text


def texts(files: Sequence[TextFile]) -> Iterator[str]:
    """All text of the files, whether documents or examples: what a tokenizer is trained on."""
    if not are_examples(files):
        yield from documents(files)
        return
    for prompt, completion in examples(files):
        yield prompt
        yield completion


def read_text(path: Path) -> str:
    """The whole text of a plain, .gz or .xz file. Raises InputError naming it."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as file:
            return file.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def is_utf8(file: TextFile) -> bool:
    """Whether the file can be read as text at all."""
    try:
        read_text(file.path)
    except InputError as error:
        if isinstance(error.__cause__, UnicodeDecodeError):
            return False
        raise
    return True


def digest(files: Sequence[TextFile]) -> str:
    """sha256 over names, sizes and contents, in order: what the data was."""
    total = hashlib.sha256()
    for file in files:
        with file.path.open("rb") as handle:
            content = hashlib.file_digest(handle, "sha256").hexdigest()
        total.update(f"{file.name}\t{file.path.stat().st_size}\t{content}\n".encode())
    return total.hexdigest()


def _walk(folder: Path, include: Sequence[str], exclude: Sequence[str]) -> Iterator[TextFile]:
    """Matching files below a folder, in the order of their paths. Folders that can hold none are
    not entered: installed packages lie inside the standard library's."""
    found = []
    for place, folders, files in os.walk(folder):
        inside = Path(place).relative_to(folder)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and not _all_match((inside / name).as_posix(), exclude)
        ]
        for file in files:
            name = (inside / file).as_posix()
            matches = _matches(name, include) and not _matches(name, exclude)
            if matches and not file.startswith("."):
                found.append(TextFile(path=folder / name, name=name))
    found.sort(key=lambda file: file.path)
    return (file for file in found if file.path.is_file())  # no broken link, no socket


def _all_match(folder: str, patterns: Sequence[str]) -> bool:
    """Whether the patterns match every name in this folder and below: `*` also matches slashes."""
    return any(p.endswith("*") and fnmatch.fnmatch(f"{folder}/", p) for p in patterns)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    last = name.rsplit("/", 1)[-1]
    return any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(last, p) for p in patterns)


def are_examples(files: Sequence[TextFile]) -> bool:
    """Whether the first line of the first JSONL file has a field `completion`."""
    for file in files:
        if ".jsonl" in file.path.suffixes:
            return any("completion" in record for _, record in islice(_records(file), 1))
    return False


def examples(files: Iterable[TextFile]) -> Iterator[tuple[str, str]]:
    """(prompt, completion) of every line; a line without a completion is left out.

    Raises InputError for a file or line that is no example: examples and plain text do not mix.
    """
    for file in files:
        if ".jsonl" not in file.path.suffixes:
            raise InputError(
                f"{file.path} is plain text, and others here are JSONL with prompt and completion; "
                "train on one kind at a time"
            )
        for number, record in _records(file):
            prompt, completion = record.get("prompt"), record.get("completion")
            if not isinstance(prompt, str) or not isinstance(completion, str):
                raise InputError(
                    f"{file.path}, line {number}: expected texts in the fields `prompt` and "
                    "`completion`"
                )
            if completion:
                yield prompt, completion


def _lines(file: TextFile) -> Iterator[str]:
    for number, record in _records(file):
        value = record.get("text")
        if not isinstance(value, str):
            what = "has no field" if value is None else "is not a text in the field"
            raise InputError(f"{file.path}, line {number}: {what} `text`")
        if value:
            yield value


def _records(file: TextFile) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered JSON objects, one per line; blank lines are skipped."""
    # not splitlines: U+2028, U+0085 and the like may stand in a JSON string as they are
    for number, line in enumerate(read_text(file.path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{file.path}, line {number}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise InputError(f"{file.path}, line {number}: expected a JSON object")
        yield number, record
