"""Hidden signals while they are learnt from: they stay in the shards of their store.

    shard-00003.features.safetensors     "0" [T, S]   "2" [T, S]   "17" [T, S]    names: row numbers
    a block of rows 17, 2                read from the mapped file when the block is put together

A store of any size is learnt from in the memory of one batch's signals, and nothing is copied
before. A mapped file has no place in it that readers move: processes that were forked or spawned
read the same shard at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.errors import BackendError


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
