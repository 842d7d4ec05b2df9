"""Laws on disk while they are learnt from: as small as in the store, decoded when a batch asks.

    store    shard 0: a b c   shard 1: d e      compressed together, in the order of the prompts
    file     a b c d e                          one after the other, to be read in any order

A store of any size is learnt from in the same memory: that of its tokens, and of one batch's laws.
"""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO

from draftsmith.distill import codec
from draftsmith.distill.trajectory import TopK
from draftsmith.errors import BackendError

_PARTS = tuple(part.name for part in fields(codec.EncodedLaws))


class LawFile:
    """A file without a name that is gone when this process is.

    Args:
        folder: of a disk with room for the laws of the stores, as large as they are.
        vocab_size: of the laws.

    Raises:
        BackendError: the folder is not there, or the disk is full.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder, self._vocab_size, self._end = folder, vocab_size, 0
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise self._failed(error) from error
        weakref.finalize(self, _close, self._file)  # it is open as long as somebody may read

    def add(self, laws: codec.EncodedLaws) -> StoredLaws:
        """Keep these laws."""
        parts = [getattr(laws, part) for part in _PARTS]
        at = self._end
        try:
            self._file.seek(at)
            self._file.write(b"".join(parts))
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from error
        self._end += laws.num_bytes
        return StoredLaws(file=self, at=at, sizes=tuple(map(len, parts)))

    def encode(self, top: TopK) -> StoredLaws:
        """Keep laws that no store holds; log-probabilities are rounded as a store rounds them."""
        return self.add(codec.encode(top, self._vocab_size))

    def read(self, at: int, size: int) -> bytes:
        """What stands there."""
        try:
            self._file.seek(at)
            return self._file.read(size)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> BackendError:
        return BackendError(
            f"cannot keep the laws of the stores in {self._folder} while they are learnt from: "
            f"{error.strerror}; give --out on a disk with as much room as the stores take"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLaws:
    """Where a trajectory's laws are."""

    file: LawFile
    at: int
    sizes: tuple[int, ...]
    """Bytes of each part of `EncodedLaws`."""

    def read(self) -> TopK:
        """The laws. Raises BackendError when they can be read no more."""
        whole = self.file.read(self.at, sum(self.sizes))
        parts, start = {}, 0
        for name, size in zip(_PARTS, self.sizes, strict=True):
            parts[name] = whole[start : start + size]
            start += size
        return codec.decode(codec.EncodedLaws(**parts))


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # a full disk, once more
        file.close()
