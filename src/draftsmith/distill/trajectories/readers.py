"""Laws on disk while they are learnt from: as small as in the store, decoded when a batch asks.

    store    shard 0: a b c   shard 1: d e      compressed together, in the order of the prompts
    file     a b c d e                          one after the other, to be read in any order

A store of any size is learnt from in the same memory: that of its tokens, and of one batch's laws.

Hidden signals while they are learnt from: they stay in the shards of their store.

    shard-00003.features.safetensors     "0" [T, S]   "2" [T, S]   "17" [T, S]    names: row numbers
    a block of rows 17, 2                read from the mapped file when the block is put together

A store of any size is learnt from in the memory of one batch's signals, and nothing is copied
before. A mapped file has no place in it that readers move: processes that were forked or spawned
read the same shard at the same time.
"""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.distill.trajectories import shards
from draftsmith.distill.trajectories.types import TopK
from draftsmith.errors import BackendError

_PARTS = tuple(part.name for part in fields(shards.EncodedLaws))


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

    def add(self, laws: shards.EncodedLaws) -> StoredLaws:
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
        return self.add(shards.encode(top, self._vocab_size))

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
        return shards.decode(shards.EncodedLaws(**parts))


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # a full disk, once more
        file.close()


class FeatureFile:
    """The hidden signals of one shard; the file is opened when it is first needed.

    Args:
        number: of the shard.
        remedy: what to do about a shard that cannot be used.
    """

    def __init__(self, path: Path, number: int, remedy: str) -> None:
        self._path, self._number, self._remedy = path, number, remedy
        self._mapped: Any = None

    def __reduce__(self) -> tuple[type[FeatureFile], tuple[Path, int, str]]:
        return FeatureFile, (self._path, self._number, self._remedy)  # a map is of one process

    def of(self, row: int, places: int, width: int | None = None) -> StoredFeatures:
        """Those of a row, not read yet. Raises BackendError when they are not `places` many, or of
        another width than this (None: of any)."""
        shape = self._slice(row).get_shape()
        if len(shape) != 2 or shape[0] != places:
            raise self._broken(row, f"have the shape {shape}, its text has {places} tokens")
        if width is not None and shape[1] != width:
            raise self._broken(row, f"are {shape[1]} wide, those of this target {width}")
        return StoredFeatures(file=self, row=row, width=shape[1])

    def read(self, row: int, places: int) -> Tensor:
        """[places, S] float32: those of the first places of a row. Raises BackendError."""
        states_TS: Tensor = self._slice(row)[:places]
        self.check(row, states_TS)
        return states_TS.float()

    def check(self, row: int, states_TS: Tensor) -> None:
        """BackendError when what was read of a row is not finite."""
        if not torch.isfinite(states_TS).all():
            raise self._broken(row, "hold NaN or infinite values")

    def _slice(self, row: int) -> Any:
        try:
            if self._mapped is None:
                self._mapped = safe_open(self._path, framework="pt")
            return self._mapped.get_slice(str(row))
        except (OSError, SafetensorError) as error:
            raise self._broken(row, f"cannot be read ({error})") from error

    def _broken(self, row: int, what: str) -> BackendError:
        return BackendError(
            f"shard {self._number} of {self._path.parent}, trajectory {row}: its hidden states "
            f"{what}; {self._remedy}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFeatures:
    """Where a trajectory's hidden signals are."""

    file: FeatureFile
    row: int
    """In the shard."""
    width: int

    def read(self, places: int) -> Tensor:
        """[places, S] float32: those of the first places. Raises BackendError."""
        return self.file.read(self.row, places)
