"""What the engine needs of a target."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.cache import Block, KVCache
from draftsmith.types import Signals, TargetOutput


class Target(Protocol):
    """A model that turns a block of tokens and a cache into logits. It holds no decoding state."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_ids(self) -> frozenset[int]: ...
    @property
    def max_length(self) -> int | None:
        """Positions the model knows; None: no limit."""
        ...

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer, or None."""
        ...

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """An empty cache for this many rows of up to this many tokens."""
        ...

    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        """Logits after the last `keep` tokens of the block, [B, keep, V]; keys go to the cache."""
        ...
