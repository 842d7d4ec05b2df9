"""Reading users' files: text and JSON lines, files, folders and globs, also compressed."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import gzip
import hashlib
import lzma
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from draftsmith.config import Configuration, check_text, require
from draftsmith.errors import InputError
from draftsmith.provenance import parse_json, refuse_device

STANDARD_LIBRARY = "python:stdlib"
"""Stands for the folder of the running Python's own sources, wherever that is."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(Configuration):
    """What is learnt from, and what is held out."""

    text: tuple[str, ...]
    """Files, folders or glob patterns: plain text (a file is a document), JSONL with a field
    `text` (a line is one), also .gz and .xz. python:stdlib is the folder of Python's sources."""
    include: tuple[str, ...] = ("*",)
    """Names to take from folders, relative to the folder: patterns such as *.py."""
    exclude: tuple[str, ...] = ()
    """Names to leave out of folders."""
    eval_text: tuple[str, ...] = ()
    """Held-out files, read like --text."""
    hold_out: float = 0.0
    """Without --eval-text: the share of files to hold out, chosen by a hash of their names."""
    attend_across_documents: bool = True
    """Tokens of a packed block may look at the documents before their own."""

    def validate(self) -> None:
        require(bool(self.text), "--text must name at least one file or folder")
        require(0 <= self.hold_out < 1, "--hold-out must be at least 0 and less than 1")
        alone = not (self.hold_out and self.eval_text)
        require(alone, "--hold-out and --eval-text exclude each other: give one")


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


MOST_LINE, MOST_TEXT = 64 * 2**20, 2**30
"""Bytes of a line, and of a file that is one text: a small compressed file may hold more than any
memory."""


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A plain, .gz or .xz file. What cannot be read is an InputError that names it."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with openers.get(path.suffix.lower(), open)(path, "rb") as file:
            if not file.isatty():
                refuse_device(path)
            yield file
    except FileNotFoundError:
        raise InputError(f"cannot read: {path} does not exist") from None
    except IsADirectoryError:
        raise InputError(f"cannot read: {path} is a folder") from None
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: damaged or not a {path.suffix} file ({error})") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def _decoded(data: bytes, encoding: str, where: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8 text (byte {data[error.start]:#04x} at {error.start}); convert "
            "the file to UTF-8"
        ) from error


def read_text(path: Path) -> str:
    """The whole text of a plain, .gz or .xz file. Raises InputError naming it."""
    with _opened(path) as file:
        raw = file.read(MOST_TEXT + 1)
    require(
        len(raw) <= MOST_TEXT,
        f"{path} is a text of more than {MOST_TEXT:,} bytes: split it, or give JSONL with the "
        "field `text`",
    )
    return _decoded(raw, "utf-8", str(path))


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """(file and number, line without its end) of every line. Raises InputError naming it.

    Lines end at line feeds: U+2028, U+0085 and the like are text.
    """
    with _opened(path) as file:
        for number, raw in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), start=1):
            where = f"{path}, line {number}"
            require(len(raw) <= MOST_LINE, f"{where} has more than {MOST_LINE:,} bytes: split it")
            line = _decoded(raw, "utf-8-sig" if number == 1 else "utf-8", where)
            check_text(line, where)
            yield where, line.rstrip("\r\n")


def sentences(path: Path, limit: int | None = None) -> list[str]:
    """The lines of a file, or the first `limit`, without empty ones at its end.

    Raises:
        InputError: it cannot be read, or holds nothing.
    """
    lines = [line for _, line in islice(read_lines(path), limit)]
    while lines and not lines[-1]:
        lines.pop()
    require(bool(lines), f"{path} holds no line of text")
    return lines


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
        for where, record in _records(file):
            prompt, completion = record.get("prompt"), record.get("completion")
            if not isinstance(prompt, str) or not isinstance(completion, str):
                raise InputError(f"{where}: expected texts in the fields `prompt` and `completion`")
            if completion:
                yield prompt, completion


def _lines(file: TextFile) -> Iterator[str]:
    for where, record in _records(file):
        value = record.get("text")
        if not isinstance(value, str):
            what = "has no field" if value is None else "is not a text in the field"
            raise InputError(f"{where}: {what} `text`")
        if value:
            yield value


def _records(file: TextFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """JSON objects, one per line, and where they stand; blank lines are skipped."""
    for where, line in read_lines(file.path):
        if line.strip():
            record = parse_json(line, where)
            if not isinstance(record, dict):
                raise InputError(f"{where}: expected a JSON object, got {type(record).__name__}")
            yield where, record
