"""Trajectories on disk: a folder of shards, each written once, whole or not at all.

    manifest.json                        whose laws these are (`StoreHeader`); never changes
    shard-00000.parquet                  a row per trajectory, laws as in `shards`
    shard-00000.features.safetensors     hidden signals, when asked for; names are row numbers
    shard-00000.json                     written last: makes the shard visible. Counts, checksums

Nothing is shared between shards: several processes may write different numbers at the same time,
and one waits for another that writes the same. Two whole collections are refused (`output_folder`).
What a killed process left of a shard is invisible, and replaced when that number is written again.
Both JSON files carry a checksum of their own content, and a shard that of its store's header, so a
flipped bit or a file of another store is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.utils import cached_file, extract_commit_hash

from draftsmith.config import as_dict, from_dict
from draftsmith.core.types import Signals
from draftsmith.distill.checkpoint import sha256
from draftsmith.distill.trajectories import shards as shard_rows
from draftsmith.distill.trajectories.readers import (
    ByteCache,
    CheckedFile,
    FeatureFile,
    ShardReader,
    pieces_of,
)
from draftsmith.distill.trajectories.shards import (
    FeatureType,
    read_sealed,
    write_sealed,
)
from draftsmith.distill.trajectories.types import Trajectory
from draftsmith.errors import BackendError, InputError
from draftsmith.provenance import (
    atomic_path,
    check_room,
    digest,
    held,
    jsonable,
    portable_text,
)
from draftsmith.targets.gguf import checkpoint
from draftsmith.targets.hf import loading


def revision_of(target: str, revision: str | None = None) -> str | None:
    """Return a digest of a folder's weights, or the commit that `revision` of a hub model is today.

    Where the commit cannot be told, `revision` itself. Raises BackendError: there is no such model.
    """
    weights = sorted(Path(checkpoint(target)).glob("*.safetensors"))
    if weights:
        return digest([sha256(path) for path in weights])
    with loading(f"the configuration of {target!r}"):
        # its place in the cache names the commit; configurations no longer do
        config = cached_file(target, "config.json", revision=revision or "main")
    commit: str | None = extract_commit_hash(config, None)
    return commit or revision


def differences(there: Any, here: Any, name: str = "") -> list[str]:
    """`name is 'a' there and 'b' here`, for every value of two JSON contents that differs."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*there, *(key for key in here if key not in there)]
        inner = [(key, there.get(key), here.get(key)) for key in keys]
        prefix = f"{name}." if name else ""
        return [text for key, a, b in inner for text in differences(a, b, f"{prefix}{key}")]
    return [] if there == here else [f"{name} is {short(there)} there and {short(here)} here"]


def weights_by(
    name: str, revision: str | None, other_name: str, other_revision: str | None
) -> tuple[str, str | None, str | None]:
    """By what the weights of two targets are compared, and what each of them has; None: unknown.

    A digest of weights tells most, then a commit. Where there is neither, names are all there is;
    but a folder may be a copy of a hub model under any name: of such a pair nothing is known.
    """
    kinds = {_kind(revision), _kind(other_revision)}
    if kinds == {"digest"}:
        return "digest of its weights", revision, other_revision
    if "digest" in kinds:
        return "digest of its weights", None, None
    if kinds == {"commit"}:
        return "commit", revision, other_revision
    return "name", name, other_name


def short(value: object) -> str:
    """`repr`, cut where it would fill a line; a commit is whole: it is typed again."""
    text = repr(value)
    return text if len(text) <= 42 else f"{text[:37]}..."


def _kind(revision: str | None) -> str | None:
    """Names of revisions on a hub may move: they tell nothing, as no revision does."""
    if revision is None or not re.fullmatch("[0-9a-f]+", revision):
        return None
    return {64: "digest", 40: "commit"}.get(len(revision))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreHeader:
    """Whose laws a store holds, and how they were collected. Equal headers, same store."""

    target: str
    revision: str | None = None
    """The target's revision: a digest of a folder's weights, or the commit of a hub model."""
    tokenizer_sha256: str
    vocab_size: int
    top_k: int | None
    """Largest number of ids of a law; None: whole laws."""
    signals: Signals = field(default_factory=Signals)
    feature_type: FeatureType = "bfloat16"
    """How hidden signals are kept."""
    settings: dict[str, Any]
    """JSON: everything else that decides the trajectories."""
    prompts_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A prompt without trajectories, and why."""

    prompt_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file of a shard."""

    name: str
    sha256: str
    bytes: int
    pieces: str = ""
    """First 16 digits of the SHA-256 of every MiB, as words; empty: the file is checked whole."""
    rows: dict[str, str] = field(default_factory=dict)
    """`ShardIndex.words` of a Parquet file; empty: it was written without an index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What a shard's own JSON file says."""

    number: int
    header: str
    """Digest of the store's header."""
    trajectories: int
    prompt_tokens: int
    tokens: int
    """Tokens of the continuations."""
    skipped: tuple[Skipped, ...] = ()
    cut: dict[str, int] = field(default_factory=dict)
    """References of which only the beginning was kept, per reason."""
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSummary:
    """What a store holds."""

    shards: int
    trajectories: int
    prompt_tokens: int
    tokens: int
    bytes: int
    """All files."""
    feature_bytes: int
    """Those of hidden signals."""
    skipped: dict[str, int]
    """Prompts per reason."""
    cut: dict[str, int]
    """References of which only the beginning is there, per reason."""

    @property
    def bytes_per_token(self) -> float | None:
        """All but hidden signals, per token of a continuation; None in an empty store."""
        return (self.bytes - self.feature_bytes) / self.tokens if self.tokens else None


MANIFEST = "manifest.json"
FEATURES = "features.safetensors"

_SHARD = re.compile(r"shard-(\d{5,})\.json")


class TrajectoryStore:
    """A folder of trajectories; get one from `create` or `open`."""

    def __init__(self, folder: Path, header: StoreHeader, *, max_bytes: int | None = None) -> None:
        self.folder = folder
        self.header = header
        self.max_bytes = max_bytes
        self._digest = digest(header)

    @classmethod
    def create(
        cls, folder: Path, header: StoreHeader, *, max_bytes: int | None = None
    ) -> TrajectoryStore:
        """A new store, or the one that is there, to go on with.

        `max_bytes`: of all its files; what other processes write at the same moment is not counted.
        Raises InputError when the store there has another header, and says where they differ.
        """
        folder = Path(folder)
        if header.vocab_size < 1 or (header.top_k is not None and header.top_k < 1):
            raise InputError("a store needs a vocabulary and a top-k of at least 1")
        if not (folder / MANIFEST).exists():
            if folder.is_dir() and any(_SHARD.fullmatch(path.name) for path in folder.iterdir()):
                raise BackendError(
                    f"{folder} holds shards but no {MANIFEST}: whose they are is unknown; "
                    "restore it, or use another folder"
                )
            write_sealed(folder / MANIFEST, {"header": header})
        # Read back even when just written: of two processes that create, the second to write wins.
        store = cls.open(folder, max_bytes=max_bytes)
        differing = differences(as_dict(store.header), jsonable(header))
        if differing:
            raise InputError(
                f"the store {folder} was made otherwise ({'; '.join(differing)}); "
                "use another folder, or what it was made with"
            )
        return store

    @classmethod
    def open(cls, folder: Path, *, max_bytes: int | None = None) -> TrajectoryStore:
        """The store in `folder`. Raises InputError (there is none), BackendError (damaged)."""
        path = Path(folder) / MANIFEST
        if not path.is_file():
            raise InputError(f"{folder} is no trajectory store: it has no {MANIFEST}")
        content = read_sealed(path, "restore it from a copy, or collect into another folder")
        header = from_dict(StoreHeader, content.get("header"), where=str(path))
        return cls(Path(folder), header, max_bytes=max_bytes)

    def check_teacher(
        self, target: str, revision: str | None, tokenizers: Sequence[str], vocab_size: int
    ) -> None:
        """Raises InputError when the logprobs are those of another target than this one.

        `target` as the user gave it, all else as in a header; one of `tokenizers` must be its
        digest. Weights are compared by their digests, or else by commits, or by names.
        """
        header = self.header
        known = header.tokenizer_sha256
        for what, ours, theirs in (
            ("tokenizer", known, known if known in tokenizers else tokenizers[0]),
            ("vocabulary size", header.vocab_size, vocab_size),
            weights_by(header.target, header.revision, portable_text(target), revision),
        ):
            if ours != theirs:
                folder = f" (a folder of it: hf download {header.target} --revision {ours})"
                raise InputError(
                    f"the store {self.folder} was collected from {header.target!r}, and this "
                    f"target {target!r} has another {what} ({short(ours)} there, "
                    f"{short(theirs)} here); give the target it was collected from"
                    f"{folder if what == 'commit' else ''}, or collect again"
                )

    # ----------------------------------------------------------------- shards

    def shards(self) -> list[int]:
        """Numbers of the shards that are complete, ascending."""
        files = (path.name for path in self.folder.iterdir() if path.is_file())
        found = map(_SHARD.fullmatch, files)
        return sorted(int(match[1]) for match in found if match)

    def has(self, number: int) -> bool:
        """Whether shard `number` is complete."""
        return self._path(number, "json").is_file()

    def shard(self, number: int) -> Shard:
        """What is in a shard, without reading it. Raises InputError (none), BackendError."""
        path = self._path(number, "json")
        if number < 0 or not path.is_file():
            raise InputError(f"the store {self.folder} has no shard {number}")
        try:
            facts = from_dict(Shard, read_sealed(path, self._remedy(number)), where=str(path))
        except InputError as error:
            raise BackendError(f"{error}; {self._remedy(number)}") from None
        if facts.header != self._digest or facts.number != number:
            raise BackendError(
                f"shard {number} of {self.folder} belongs to another store or place; "
                f"{self._remedy(number)}"
            )
        return facts

    def write(
        self,
        number: int,
        trajectories: Sequence[Trajectory],
        skipped: Sequence[Skipped] = (),
        cut: Mapping[str, int] | None = None,
    ) -> Shard:
        """Add shard `number`, whole or not at all; who comes second to a number is refused.

        `cut`: references of which only the beginning is among the trajectories, per reason.

        Raises:
            InputError: the shard is there already, a trajectory does not fit the header, or the
                store would grow over `max_bytes`.
            BackendError: there is no room on the disk.
        """
        if number < 0:
            raise InputError(f"shards are numbered from 0, got {number}")
        with held(self.folder / f".lock-{number:05d}"):
            if self.has(number):
                raise InputError(
                    f"shard {number} of {self.folder} exists already; remove shard-{number:05d}.* "
                    "to collect it again"
                )
            return self._write(number, trajectories, skipped, cut or {})

    def _write(
        self,
        number: int,
        trajectories: Sequence[Trajectory],
        skipped: Sequence[Skipped],
        cut: Mapping[str, int],
    ) -> Shard:
        """`write`, where nobody else writes this number."""
        header = self.header
        for trajectory in trajectories:
            shard_rows.check(trajectory, header.vocab_size, header.top_k)
        rows = shard_rows.to_parquet(trajectories, header.vocab_size)
        features = shard_rows.hidden_signals(trajectories, header.feature_type)
        self._sweep(number)
        size = _size(rows, features, skipped)
        check_room(self.folder, size, self.max_bytes, f"shard {number} of {size:,} bytes")
        files = []
        try:
            path = self._path(number, "parquet")
            with atomic_path(path) as part:
                part.write_bytes(rows)
            index = shard_rows.index_of(trajectories).words()
            files.append(_stored(path, hashlib.sha256(rows).hexdigest(), index))
            if features:
                path = self._path(number, FEATURES)
                with atomic_path(path) as part:
                    save_file(features, part)
                    checksum = sha256(part)
                files.append(_stored(path, checksum))
            facts = Shard(
                number=number,
                header=self._digest,
                trajectories=len(trajectories),
                prompt_tokens=sum(len(trajectory.prompt) for trajectory in trajectories),
                tokens=sum(len(trajectory.tokens) for trajectory in trajectories),
                skipped=tuple(skipped),
                cut=dict(cut),
                files=tuple(files),
            )
            write_sealed(self._path(number, "json"), facts)
        except BaseException:
            if not self.has(number):  # the very last sync may fail behind the rename
                self._sweep(number)
            raise
        return facts

    def read(self, number: int) -> list[Trajectory]:
        """The trajectories of a shard. Raises InputError (none there), BackendError (damaged)."""
        rows, features = self._files(self.shard(number))
        data, states = rows.content(), {}
        if features is not None:
            features.check()
            try:
                states = load_file(features.path)
            except (OSError, SafetensorError) as error:
                raise features.unreadable(error) from error
            for row, states_TS in states.items():
                FeatureFile(features, number).check(int(row), states_TS)
        try:
            return shard_rows.from_parquet(data, states)
        except pa.ArrowException as error:
            raise rows.unreadable(error) from error

    def check(self, number: int) -> None:
        """Raises BackendError unless all files of a shard are there, as they were written.

        Their bytes are read: as many as the shard has, at the speed of the disk.
        """
        for file in self._files(self.shard(number)):
            if file is not None:
                file.check()

    def reader(self, number: int, cache: ByteCache, width: int, hint: str = "") -> ShardReader:
        """Open a shard for reading row by row; nothing but its JSON file is read before.

        Args:
            cache: receives decoded row groups.
            width: of the hidden states that are wanted; 0: none.
            hint: what else to do about damage.

        Raises:
            InputError: there is no such shard.
            BackendError: its JSON file is damaged, or a file is missing or of another size.
        """
        facts = self.shard(number)
        rows, features = self._files(facts, hint)
        for file in (rows, features):
            if file is not None:
                file.check_size()
        return ShardReader(facts=facts, rows=rows, features=features, cache=cache, width=width)

    def _files(self, facts: Shard, hint: str = "") -> tuple[CheckedFile, CheckedFile | None]:
        """Rows and hidden signals of a shard."""
        where = f"shard {facts.number} of {self.folder}"
        remedy = self._remedy(facts.number) + hint
        rows, *features = (
            CheckedFile(self.folder / f.name, f.bytes, f.sha256, f.pieces, where, remedy)
            for f in facts.files
        )
        return rows, features[0] if features else None

    def trajectories(self) -> Iterator[Trajectory]:
        """All trajectories in order, one shard in memory at a time."""
        for number in self.shards():
            yield from self.read(number)

    def summary(self, shards: Iterable[Shard] | None = None) -> StoreSummary:
        """Counts of these shards; None: of all that are complete."""
        facts = list(map(self.shard, self.shards()) if shards is None else shards)
        stored = [file for shard in facts for file in shard.files]
        features = [file.bytes for file in stored if not file.name.endswith(".parquet")]
        own = [self.folder / MANIFEST, *(self._path(shard.number, "json") for shard in facts)]
        return StoreSummary(
            shards=len(facts),
            trajectories=sum(shard.trajectories for shard in facts),
            prompt_tokens=sum(shard.prompt_tokens for shard in facts),
            tokens=sum(shard.tokens for shard in facts),
            bytes=sum(file.bytes for file in stored) + sum(path.stat().st_size for path in own),
            feature_bytes=sum(features),
            skipped=dict(Counter(skip.reason for shard in facts for skip in shard.skipped)),
            cut=dict(sum((Counter(shard.cut) for shard in facts), Counter())),
        )

    # ----------------------------------------------------------------- inside

    def _path(self, number: int, ending: str) -> Path:
        return self.folder / f"shard-{number:05d}.{ending}"

    def _remedy(self, number: int) -> str:
        return (
            f"remove shard-{number:05d}.* and collect again with the same command to replace it; "
            "the other shards stay as they are"
        )

    def _sweep(self, number: int) -> None:
        """Remove what a killed or failed write of this shard left; its lock is ours."""
        prefix = f"shard-{number:05d}."
        for path in self.folder.iterdir():
            if path.name.startswith((prefix, f".{prefix}")):
                with contextlib.suppress(OSError):
                    path.unlink()


# --------------------------------------------------------------------------- inside


def _size(rows: pa.Buffer, features: Mapping[str, torch.Tensor], skipped: Sequence[Skipped]) -> int:
    """Bytes of a shard's files, rather more than fewer: the last one is counted generously."""
    facts = 2048 + len(json.dumps(jsonable(skipped), indent=8))
    return len(rows) + facts + sum(tensor.nbytes + 128 for tensor in features.values())


def _stored(path: Path, checksum: str, rows: dict[str, str] | None = None) -> StoredFile:
    size, pieces = path.stat().st_size, pieces_of(path)
    return StoredFile(name=path.name, sha256=checksum, bytes=size, pieces=pieces, rows=rows or {})
