"""Prompts from files (what their records may hold: `prompt_records.py`).

.jsonl .ndjson   one JSON object per line          .json   an array of objects (or JSONL)
anything else    plain text, one prompt per line; blank lines separate and are skipped
each of them also compressed as .gz or .xz
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from draftsmith.data.prompts import Prompt, check_whole, read_record
from draftsmith.errors import InputError, nearest


def plain_prompts(texts: Sequence[str]) -> tuple[Prompt, ...]:
    """Prompts given on the command line: continued as they stand."""
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise InputError(f"prompt {number} is empty: give some text to continue")
        check_whole(text, f"prompt {number}")
    return tuple(Prompt(id=str(number), text=text) for number, text in enumerate(texts, start=1))


def load_suite(name: str | Path, *, limit: int | None = None) -> tuple[Prompt, ...]:
    """The prompts of a file, or of a built-in suite when no such file exists."""
    path = Path(name)
    if path.exists() or path.suffix:
        return load_prompts(path, limit=limit)
    built_in = built_in_suites()
    if str(name) not in built_in:
        what = f"file or built-in suite {str(name)!r}" if built_in else f"file {str(name)!r}"
        hint = nearest(str(name), built_in) if built_in else ""
        raise InputError(f"there is no prompt {what}{hint}")
    return load_prompts(built_in[str(name)], limit=limit)


def built_in_suites() -> dict[str, Path]:
    """The suites that are part of the package, by name."""
    folder = Path(str(resources.files("draftsmith.bench"))) / "prompts"
    return {path.name.split(".")[0]: path for path in sorted(folder.glob("*.jsonl*"))}


def load_prompts(
    path: Path | str, *, limit: int | None = None, keep_empty: bool = False
) -> tuple[Prompt, ...]:
    """The first `limit` prompts of a file. Errors name the file and the line.

    Ids are made unique (figures are kept by id): the second "a" is "a#2". `keep_empty`: a record
    with an empty `prompt` or `text` becomes a prompt of no text, for callers that count and skip.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    times: dict[str, int] = {}
    for prompt in _read(path, keep_empty):
        if limit is not None and len(prompts) >= limit:
            break
        label = prompt.id
        while label in times:
            times[prompt.id] += 1
            label = f"{prompt.id}#{times[prompt.id]}"
        times[label] = 1
        prompts.append(replace(prompt, id=label))
    if not prompts:
        raise InputError(f"{path}: no prompts in this file")
    return tuple(prompts)


# --------------------------------------------------------------------------- reading


def _read(path: Path, keep_empty: bool) -> Iterator[Prompt]:
    kind = next((s for s in reversed(path.suffixes) if s not in (".gz", ".xz")), "").lower()
    lines = _lines(path)
    if kind not in (".jsonl", ".ndjson", ".json"):
        for number, line in lines:
            if line.strip():
                yield Prompt(id=str(number), text=line)
        return
    if kind == ".json":
        numbered = list(lines)
        try:
            whole = json.loads("\n".join(line for _, line in numbered))
        except (ValueError, RecursionError):
            lines = iter(numbered)  # several objects: JSONL under another name
        else:
            for number, record in enumerate(whole if isinstance(whole, list) else [whole], start=1):
                yield read_record(record, str(number), f"{path}, record {number}", keep_empty)
            return
    for number, line in lines:
        if line.strip():
            where = f"{path}, line {number}"
            yield read_record(_parse(line, where), str(number), where, keep_empty)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends; U+2028 and the like are text, not line ends."""
    number = 0
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if "\0" in line:
                    raise InputError(f"{path}, line {number}: this is not a text file")
                yield number, line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, line {number}: not UTF-8 text (byte {error.object[error.start]:#04x}); "
            "convert the file to UTF-8"
        ) from None
    except FileNotFoundError:
        raise InputError(f"prompt file {path} does not exist") from None
    except IsADirectoryError:
        raise InputError(f"prompt file {path} is a folder") from None
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: damaged or not a {path.suffix} file ({error})") from None
    except OSError as error:
        raise InputError(f"cannot read prompt file {path}: {error.strerror or error}") from None


def _open(path: Path) -> io.BufferedIOBase:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path, "rb")
    return lzma.open(path, "rb") if suffix == ".xz" else path.open("rb")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON that can be read ({error})") from None
