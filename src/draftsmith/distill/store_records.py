"""What a store says about itself: its header, and the facts of its shards. See `store`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draftsmith.distill.shard_rows import FeatureType
from draftsmith.types import Signals


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreHeader:
    """Whose laws a store holds, and how they were collected. Equal headers, same store."""

    target: str
    revision: str | None = None
    """Of the target: a digest of its weights (a folder's), or its commit (a hub model's)."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What a shard's own JSON file says."""

    number: int
    header: str
    """Digest of the store's header."""
    trajectories: int
    prompt_tokens: int
    tokens: int
    """Of the continuations."""
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
