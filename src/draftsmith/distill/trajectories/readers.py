"""Reading stored trajectories during training: row by row, checked when first read, in any order.

    shard-00003.json                     lengths and keys of all rows: enough to form batches
    shard-00003.parquet                  [group 0: rows 0-6] [group 1: rows 7-12] ..
    shard-00003.features.safetensors     "0" [T, S]   "2" [T, S]   "17" [T, S]   names: row numbers

    a block of rows 9, 2                 decodes groups 1 and 0, maps the signals of rows 9 and 2

Decoded row groups stay in a cache of bounded size, hidden signals are read from the mapped file. A
store of any size is learnt from in the memory of that cache, and nothing is copied before.

A file is checked piece by piece, each piece of 1 MiB when something in it is first read. Files that
were written without checksums of pieces are checked as a whole at their first read.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.distill.checkpoint import sha256
from draftsmith.distill.trajectories import shards
from draftsmith.distill.trajectories.types import Forcing, TopK
from draftsmith.errors import BackendError
from draftsmith.provenance import parse_json

if TYPE_CHECKING:
    from draftsmith.distill.trajectories.store import Shard

T = TypeVar("T")

PIECE = 1 << 20
"""Bytes that one checksum of a piece covers."""
_DIGITS = 16
CACHE_BYTES = 256 << 20
"""Decoded row groups that are kept in memory."""


class ByteCache:
    """The most recently used values, up to a number of bytes; threads may share it.

    Args:
        limit: bytes that are kept; a single larger value is kept alone.
    """

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit, self._size = limit, 0
        self._values: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], tuple[T, int]]) -> T:
        """The value of a key; `make` returns it and its bytes when it is not there."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                found: T = self._values[key][0]
                return found
        value, size = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = (value, size)
                self._size += size
            while self._size > self._limit and len(self._values) > 1:
                self._size -= self._values.popitem(last=False)[1][1]
        return value


def pieces_of(path: Path) -> str:
    """The checksums of a file's pieces, as words."""
    found = []
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            found.append(_checksum(piece))
    return " ".join(found)


def _checksum(piece: bytes) -> str:
    return hashlib.sha256(piece).hexdigest()[:_DIGITS]


class CheckedFile:
    """A file of a shard whose bytes are compared with their checksums when they are first needed.

    Args:
        size: bytes that it was written with.
        whole: SHA-256 of all of it.
        pieces: `pieces_of` it; empty: only `whole` is known.
        where: names the shard in errors.
        remedy: what to do about a damaged shard.
    """

    def __init__(
        self, path: Path, size: int, whole: str, pieces: str, where: str, remedy: str
    ) -> None:
        self.path, self.size, self.remedy = path, size, remedy
        self._whole, self._pieces, self._where = whole, pieces, where
        self._good: set[int] = set()
        """Numbers of the pieces that were checked; -1: the whole file."""

    def check_size(self) -> None:
        """Raise BackendError when the file is missing, or longer or shorter than it was written."""
        try:
            found = self.path.stat().st_size
        except OSError as error:
            raise self.unreadable(error) from error
        if found != self.size:
            raise self._damaged()

    @property
    def is_checked(self) -> bool:
        """Whether all bytes were checked."""
        return -1 in self._good

    def check(self, start: int = 0, stop: int | None = None) -> None:
        """Raise BackendError when the bytes [start, stop) are not those that were written; None:
        all bytes of the file."""
        if self.is_checked:
            return
        try:
            if stop is None or not self._pieces:
                if sha256(self.path) != self._whole:
                    raise self._damaged()
                self._good.add(-1)
                return
            numbers = range(start // PIECE, -(-stop // PIECE))
            missing = [number for number in numbers if number not in self._good]
            if missing:
                self._check_pieces(missing)
        except OSError as error:
            raise self.unreadable(error) from error

    def content(self) -> bytes:
        """All bytes of the file. Raises BackendError where they are not those that were written."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise self.unreadable(error) from error
        if hashlib.sha256(data).hexdigest() != self._whole:
            raise self._damaged()
        return data

    def _check_pieces(self, numbers: Sequence[int]) -> None:
        step = _DIGITS + 1
        with self.path.open("rb") as file:
            for number in numbers:
                file.seek(number * PIECE)
                known = self._pieces[number * step : number * step + _DIGITS]
                if _checksum(file.read(PIECE)) != known:
                    raise self._damaged()
                self._good.add(number)
        if len(self._good) == -(-self.size // PIECE):
            self._good = {-1}

    def unreadable(self, error: Exception) -> BackendError:
        """The error for a file that cannot be read."""
        said = " ".join(str(error).split())
        return BackendError(f"cannot read {self.path}: {said}; {self.remedy}")

    def _damaged(self) -> BackendError:
        return BackendError(
            f"{self._where} is damaged: {self.path.name} has not the sha256 it was written with; "
            f"{self.remedy}"
        )


class FeatureFile:
    """The hidden signals of one shard; the file is opened when it is first needed.

    A mapped file has no position that readers move: threads and forked processes read the same
    shard at the same time.

    Args:
        file: compares what is read with its checksums.
        number: of the shard.
    """

    def __init__(self, file: CheckedFile, number: int) -> None:
        self.file, self._number = file, number
        self._mapped: Any = None
        self._offsets_RE: NDArray[np.int64] | None = None
        """[rows, 2]: first byte of every row's tensor, and the byte behind it."""

    def check_shapes(self, places: Mapping[int, int], width: int) -> None:
        """Compare the shapes that the file's header names with those of the texts.

        Args:
            places: tokens of the text of each row.

        Raises:
            BackendError: a row lacks signals, or has too many, too few, or others.
        """
        header = self._header()
        for row, length in places.items():
            if row not in header:
                raise self._broken(row, "cannot be read (the file has none of this row)")
            shape = header[row][0]
            if len(shape) != 2 or shape[0] != length:
                raise self._broken(row, f"have the shape {shape}, its text has {length} tokens")
            if shape[1] != width:
                raise self._broken(row, f"are {shape[1]} wide, those of this target {width}")

    def read(self, row: int, places: int) -> Tensor:
        """[places, S] float32: the signals of the first places of a row. Raises BackendError."""
        # bytes behind the end of a mapped file that was cut short end the process (SIGBUS)
        self.file.check_size()
        try:
            if self._mapped is None:
                self.file.check(0, 8)
                self.file.check(0, self._begin())
                self._mapped = safe_open(self.file.path, framework="pt")
            found = self._mapped.get_slice(str(row))
        except (OSError, SafetensorError) as error:
            raise self._broken(row, f"cannot be read ({error})") from error
        if not self.file.is_checked:
            if self._offsets_RE is None:
                header, begin = self._header(), self._begin()
                self._offsets_RE = np.zeros((max(header) + 1, 2), np.int64)
                for number, (_, offsets) in header.items():
                    self._offsets_RE[number] = begin + offsets[0], begin + offsets[1]
            self.file.check(*self._offsets_RE[row].tolist())
        states_TS: Tensor = found[:places]
        self.check(row, states_TS)
        return states_TS.float()

    def check(self, row: int, states_TS: Tensor) -> None:
        """Raise BackendError when what was read of a row is not finite."""
        if not torch.isfinite(states_TS).all():
            raise self._broken(row, "hold NaN or infinite values")

    def _begin(self) -> int:
        """Where tensors begin: behind the size of the header (8 bytes) and the header (JSON)."""
        with self.file.path.open("rb") as file:
            return 8 + int.from_bytes(file.read(8), "little")

    def _header(self) -> dict[int, tuple[list[int], list[int]]]:
        """Shape and place of every row's tensor, as the file says. Raises BackendError."""
        try:
            with self.file.path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = file.read(min(size, self.file.path.stat().st_size)).decode()
            found = parse_json(header, "its header")
            return {
                int(name): (list(tensor["shape"]), list(tensor["data_offsets"]))
                for name, tensor in found.items()
                if name != "__metadata__"
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.file.check()
            raise self.file.unreadable(error) from error

    def _broken(self, row: int, what: str) -> BackendError:
        return BackendError(
            f"shard {self._number} of {self.file.path.parent}, trajectory {row}: its hidden states "
            f"{what}; {self.file.remedy}"
        )


_COLUMNS = ["prompt", "tokens", *shards.LAW_COLUMNS]


class ShardReader:
    """The rows of one shard, each read when it is asked for; see `TrajectoryStore.reader`.

    Args:
        facts: what the shard's JSON file says.
        cache: receives decoded row groups.
        width: of the hidden states that are wanted; 0: none.
    """

    def __init__(
        self,
        *,
        facts: Shard,
        rows: CheckedFile,
        features: CheckedFile | None,
        cache: ByteCache,
        width: int,
    ) -> None:
        self.facts, self.number, self.width, self.path = facts, facts.number, width, rows.path
        self._rows, self._cache = rows, cache
        self._starts: list[int] | None = None
        self.features = None if features is None else FeatureFile(features, facts.number)

    def texts(self) -> list[StoredText]:
        """Every row that has an answer. Raises BackendError for a damaged file."""
        try:
            words = self.facts.files[0].rows
            if words:
                index = shards.ShardIndex.from_words(words)
            else:
                index = shards.read_index(self.path)
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
            self._rows.check()
            raise self._rows.unreadable(error) from error
        if len(index) != self.facts.trajectories:
            self._rows.check()
            raise self.unreadable("it has another number of rows")
        columns = zip(*(getattr(index, one.name) for one in fields(index)), strict=True)
        found = (StoredText(self, row, *values) for row, values in enumerate(columns))
        texts = [text for text in found if text.answer_length > 0]
        if self.width and self.features is not None:
            places = {text.row: text.prompt_length + text.answer_length for text in texts}
            self.features.check_shapes(places, self.width)
        return texts

    def tokens(self, row: int, column: str) -> NDArray[np.int32]:
        """The token ids in column `prompt` or `tokens` of a row. Raises BackendError."""
        group, place = self._group(row)
        listed = group.column(column).chunk(0)
        start, stop = listed.offsets[place].as_py(), listed.offsets[place + 1].as_py()
        found: NDArray[np.int32] = listed.values.slice(start, stop - start).to_numpy()
        return found

    def logprobs(self, row: int) -> TopK | None:
        """The teacher's logprobs of a row, decoded; None: none are stored. Raises BackendError."""
        group, place = self._group(row)
        columns = {name: group.column(name)[place].as_py() for name in shards.LAW_COLUMNS}
        try:
            return shards.stored_logprobs(columns)
        except BackendError as error:
            raise self.unreadable(f"row {row}: {error}") from error

    def all_tokens(self, column: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Column `prompt` or `tokens` of all rows, not compared with any checksum.

        Returns:
            [tokens]: those of all rows, one behind the other. [rows]: how many each row has.

        Raises:
            BackendError: the file cannot be read.
        """
        found: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        lengths: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        try:
            with pq.ParquetFile(self.path, memory_map=True) as file:
                for group in range(file.num_row_groups):
                    rows = file.read_row_group(group, columns=[column]).column(column)
                    found += [chunk.flatten().to_numpy() for chunk in rows.chunks]
                    lengths += [np.diff(chunk.offsets.to_numpy()) for chunk in rows.chunks]
        except (OSError, pa.ArrowException) as error:
            raise self._rows.unreadable(error) from error
        return np.concatenate(found), np.concatenate(lengths)

    def unreadable(self, why: str) -> BackendError:
        """The error for rows that are not those that were written."""
        return self._rows.unreadable(ValueError(why))

    def states(self, row: int, places: int) -> Tensor:
        """[places, S] float32: the hidden signals of the first places. Raises BackendError."""
        if self.features is None:
            raise self.unreadable(f"row {row} has no hidden states")
        return self.features.read(row, places)

    def check(self) -> None:
        """Compare all files of the shard with their checksums. Raises BackendError."""
        self._rows.check()
        if self.features is not None:
            self.features.file.check()

    def _group(self, row: int) -> tuple[pa.Table, int]:
        """The decoded row group that a row lies in, and the row's place there."""
        try:
            if self._starts is None:
                with self._open() as file:
                    sizes = [
                        file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)
                    ]
                self._starts = [0, *np.cumsum(sizes).tolist()]
            group = bisect_right(self._starts, row) - 1
            table = self._cache.get((self.path, group), lambda: self._decoded(group))
        except (OSError, pa.ArrowException, IndexError) as error:
            self._rows.check()  # it may have changed behind the check of its pieces
            raise self._rows.unreadable(error) from error
        return table, row - self._starts[group]

    def _open(self) -> pq.ParquetFile:
        """The file, when its footer is good: rows, footer, its length (4 bytes), `PAR1`."""
        if not self._rows.is_checked:
            size = self._rows.size
            self._rows.check(max(0, size - 8), size)
            with self.path.open("rb") as file:
                file.seek(-8, 2)
                footer = int.from_bytes(file.read(4), "little")
            self._rows.check(max(0, size - 8 - footer), size)
        return pq.ParquetFile(self.path, memory_map=True)

    def _decoded(self, number: int) -> tuple[pa.Table, int]:
        with self._open() as file:
            group = file.metadata.row_group(number)
            columns = [group.column(place) for place in range(group.num_columns)]
            starts = [c.dictionary_page_offset or c.data_page_offset for c in columns]
            ends = [
                start + c.total_compressed_size for start, c in zip(starts, columns, strict=True)
            ]
            self._rows.check(min(starts), max(ends))
            table = file.read_row_group(number, columns=_COLUMNS).combine_chunks()
        return table, table.nbytes


@dataclass(slots=True, eq=False)
class StoredText:
    """A row of a shard: what its index says of it, and the rest when it is asked for.

    It has the attributes of a `Trajectory` that training reads; every one that is a property here
    raises BackendError when the shard is damaged.
    """

    shard: ShardReader
    row: int
    prompt_id: str
    """`prompt_key`: ids are names within one prompt file, and two stores may use one for two."""
    forcing: Forcing
    index: int
    temperature: float | None
    score: float
    prompt_length: int
    answer_length: int
    highest: int
    """Highest token id of prompt and answer."""
    has_logprobs: int

    @property
    def prompt(self) -> NDArray[np.int32]:
        return self._checked("prompt", self.prompt_length)

    @property
    def tokens(self) -> NDArray[np.int32]:
        return self._checked("tokens", self.answer_length)

    def _checked(self, column: str, length: int) -> NDArray[np.int32]:
        found = self.shard.tokens(self.row, column)
        if len(found) != length:
            raise self.shard.unreadable(f"row {self.row} has another length than its index says")
        return found

    @property
    def top(self) -> TopK | None:
        return self.shard.logprobs(self.row) if self.has_logprobs else None

    @property
    def has_features(self) -> bool:
        return self.shard.width > 0 and self.shard.features is not None

    def states(self, places: int) -> Tensor:
        """[places, S] float32: the hidden signals of the first places."""
        return self.shard.states(self.row, places)

    def without_logprobs(self) -> StoredText:
        """The same text without its teacher's logprobs."""
        return replace(self, has_logprobs=0)
