"""Packed weights, kept from load to load: to convert them takes several times as long as
to read what came of it.

    checkpoint --panels, blocks, rounding--> extension's memory --> ~/.cache/draftsmith/packed/...
                                                 ^                            |
                                                 `------ the next load -------'

    file    length and check sum of the header (8 bytes each), header (JSON: key, matrices with
            their check sums), numbers

A file counts for its key alone: path, size and times of the checkpoint's files, format, our code
and the processor's instructions. One that is damaged, or belongs to something else, is told and
made again; a folder that cannot be written keeps nothing. The files used longest ago go where all
together are larger than `MOST_BYTES`, or than half of what the disk has left.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import mmap
import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.errors import DraftsmithError
from draftsmith.provenance import (
    atomic_path,
    cache_folder,
    digest,
    held,
    parse_json,
    portable_text,
    sweep,
)
from draftsmith.targets.native.bindings import SOURCES, Library
from draftsmith.targets.native.weights import PackedMatrix

_log = logging.getLogger(__name__)

LEAST_BYTES = 32 << 20
"""Less than this is converted as fast as it is read."""
MOST_BYTES = 16 << 30
_ALIGNED = 64
_LONGEST_HEADER = 1 << 24
_CODE = ("engine.py", "weights.py", "packed.py", "../gguf.py", *SOURCES)


def packed_folder() -> Path:
    """Where the files are."""
    return cache_folder("packed")


@functools.cache
def _code() -> str:
    """Digest of what converts."""
    known = hashlib.sha256()
    for name in _CODE:
        known.update((Path(__file__).parent / name).read_bytes())
    return known.hexdigest()[:16]


Versions = Sequence[tuple[str, int, int, int]]
"""Which versions of files they are: path, size and times of each."""


def versions_of(files: Sequence[Path]) -> Versions:
    """Ask before the files are read: one that is replaced meanwhile is another version."""
    found = []
    for file in files:
        status = file.stat()
        # a copy may keep the time of its contents (`cp -p`), never that of its place on the disk
        times = status.st_mtime_ns, status.st_ctime_ns
        found.append((os.fspath(file.resolve()), status.st_size, *times))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedFile:
    """The packed matrices of one checkpoint in one format."""

    path: Path
    key: str

    @classmethod
    def of(cls, sources: Versions, form: str, dtype: str, library: Library) -> PackedFile:
        """`sources`: all files that the weights are from; `dtype`: what they were read as."""
        key = digest([sources, form, dtype, _code(), library.instructions])
        return cls(path=packed_folder() / f"{key[:24]}.bin", key=key)

    def load(self, library: Library) -> list[PackedMatrix] | None:
        """The matrices, in the order in which they were made; None: they have to be made."""
        try:
            with self.path.open("rb") as opened:
                whole = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError):  # of somebody else; empty
            self._complain("cannot be read")
            return None
        try:
            made = self._read(library, whole)
        except _Damaged as error:
            self._complain(str(error))
            return None
        with contextlib.suppress(OSError):  # it was used: the last one to go
            os.utime(self.path)
        return made

    def _read(self, library: Library, whole: mmap.mmap) -> list[PackedMatrix]:
        start = 16 + int.from_bytes(whole[:8], "little")
        if start > min(len(whole), _LONGEST_HEADER):
            raise _Damaged("is cut")
        text = whole[16:start]
        if not text or zlib.crc32(text) != int.from_bytes(whole[8:16], "little"):
            raise _Damaged("is damaged")
        header = parse_json(text.decode(), os.fspath(self.path))
        if header["key"] != self.key:
            raise _Damaged("belongs to something else")
        made = []
        for matrix in header["matrices"]:
            parts = {}
            for name, (at, count, check) in matrix["parts"].items():
                if start + at + count > len(whole):
                    raise _Damaged("is cut")
                values = np.frombuffer(whole, dtype=np.uint8, count=count, offset=start + at)
                if zlib.crc32(values.data) != check:
                    raise _Damaged("is damaged")
                parts[name] = values
            rows, cols = matrix["shape"]
            made.append(
                PackedMatrix(library, matrix["format"], (rows, cols), matrix["group"], parts)
            )
        return made

    def _complain(self, what: str) -> None:
        place = portable_text(os.fspath(self.path))
        _log.warning("%s %s: the weights are converted again", place, what)

    def store(self, matrices: Sequence[PackedMatrix]) -> None:
        """Keep these, where they are large enough and there is room."""
        size = sum(matrix.bytes for matrix in matrices)
        if size < LEAST_BYTES:
            return
        try:
            with held(self.path.parent / ".lock") as locked:
                if locked:
                    sweep(self.path.parent)
                if not make_room(self.path.parent, size):
                    return
                with atomic_path(self.path) as part, part.open("wb") as opened:
                    self._write(opened, matrices)
        except (DraftsmithError, OSError) as error:
            _log.info("packed weights are not kept: %s", error)

    def _write(self, opened: Any, matrices: Sequence[PackedMatrix]) -> None:
        entries, numbers, at = [], [], 0
        for matrix in matrices:
            parts = {}
            for name, values in matrix.parts().items():
                parts[name] = [at, values.nbytes, zlib.crc32(values.data)]
                numbers.append(values)
                at += -(-values.nbytes // _ALIGNED) * _ALIGNED
            entries.append(
                {
                    "format": matrix.format,
                    "shape": matrix.shape,
                    "group": matrix.group,
                    "parts": parts,
                }
            )
        header = json.dumps({"key": self.key, "matrices": entries}).encode()
        opened.write(len(header).to_bytes(8, "little"))
        opened.write(zlib.crc32(header).to_bytes(8, "little") + header)
        for values in numbers:
            opened.write(values)
            opened.write(bytes(-values.nbytes % _ALIGNED))


class _Damaged(DraftsmithError):
    """What is wrong with a file, as the end of a sentence about it."""


def make_room(folder: Path, size: int) -> bool:
    """Remove the files used longest ago until there is room for so many bytes; False: there never
    is."""
    found = sorted((file.stat().st_mtime_ns, file) for file in folder.glob("*.bin"))
    sizes = {file: file.stat().st_size for _, file in found}
    whole = sum(sizes.values())
    most = min(MOST_BYTES, (shutil.disk_usage(folder).free + whole) // 2)
    if size > most:
        return False
    for _, file in found:
        if whole + size <= most:
            break
        with contextlib.suppress(OSError):
            file.unlink()
        whole -= sizes[file]
    return True
