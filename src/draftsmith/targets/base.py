"""The protocols of a target: what decoding needs of it, and what drafters borrow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.cache import Block, KVCache, lay_out
from draftsmith.core.types import Signals, TargetOutput
from draftsmith.errors import InputError

CHUNK = 2048
"""Known tokens that are fed at once: a mask of a whole long prompt would fill gigabytes."""


class _Described(Protocol):
    """What `Target` and `TargetView` both say of the model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def end_ids(self) -> frozenset[int]: ...
    @property
    def max_length(self) -> int | None:
        """Length of the model's context; None: no limit."""
        ...

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer, or None."""
        ...

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Target(_Described, Protocol):
    """A model that turns a block of tokens and a cache into logits. It holds no decoding state."""

    @property
    def name(self) -> str: ...

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """An empty cache for this many rows of up to this many tokens."""
        ...

    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        """Logits after the last `keep` tokens of the block, [B, keep, V]; keys go to the cache."""
        ...


class TargetView(_Described, Protocol):
    """What a drafter may borrow from the target. Borrowed modules never join its module tree."""

    @property
    def config(self) -> Any:
        """The transformers configuration of its text decoder; None for targets without one."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [..] -> its input embeddings [.., H]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """States after the final norm [.., H] -> logits [.., V], scale and soft-cap included."""
        ...

    def head_over(self, ids_D: Tensor) -> Callable[[Tensor], Tensor]:
        """`head` over these tokens alone: [.., H] -> [.., D]."""
        ...

    def head_weight(self) -> Tensor:
        """[V, H]: the matrix of `head`."""
        ...


class BindableTarget(Target, TargetView, Protocol):
    """A target that can be decoded and that drafters can be bound to."""


class VocabLimitedTarget:
    """`target`, its laws renormalised over the tokens before `vocab_size`.

    Two models with one tokenizer may have heads padded to different sizes (Qwen2.5: 152,064 and
    151,936 entries). Tokens drawn from one of them must exist in the other.

    Raises:
        InputError: `vocab_size` is below 1 or above the target's.
    """

    def __init__(self, target: Target, vocab_size: int) -> None:
        if not 1 <= vocab_size <= target.vocab_size:
            raise InputError(
                f"{target.name} has {target.vocab_size} tokens: it cannot be capped to {vocab_size}"
            )
        self._target = target
        self.vocab_size = vocab_size
        self.name, self.tokenizer, self.end_ids = target.name, target.tokenizer, target.end_ids
        self.max_length, self.device, self.dtype = target.max_length, target.device, target.dtype

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        return self._target.new_cache(num_rows, capacity)

    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        out = self._target.forward(tokens_BT, block, keep, signals)
        return replace(out, logits_BNV=out.logits_BNV[..., : self.vocab_size])


_NO_SIGNALS = Signals()


def feed_beginning(
    target: Target,
    cache: KVCache,
    pending: Sequence[Sequence[int]],
    signals: Signals = _NO_SIGNALS,
    on_piece: Callable[[list[Sequence[int]], TargetOutput], None] = lambda fed, out: None,
) -> list[Sequence[int]]:
    """Feed and commit what lies before the last `CHUNK` pending tokens of each row.

    Args:
        on_piece: called with what each row was fed by a forward, and what that gave.

    Returns:
        The pending tokens that are left, at most `CHUNK` per row and the root among them.
    """
    left = list(pending)
    while any(len(row) > CHUNK for row in left):
        pieces: list[Sequence[int]]
        pieces = [row[: min(CHUNK, len(row) - CHUNK)] if len(row) > CHUNK else [] for row in left]
        tokens, block = lay_out(cache, pieces)
        stay_inside(target, block)
        on_piece(pieces, target.forward(torch.from_numpy(tokens), block, 1, signals))
        cache.commit(np.array([len(piece) for piece in pieces]))
        left = [row[len(piece) :] for row, piece in zip(left, pieces, strict=True)]
    return left


def stay_inside(target: Target, block: Block) -> None:
    """Clamp positions to the model's context.

    Only a draft model outgrows its context, and its drafts there are dropped.
    """
    if target.max_length is not None:
        block.stop_at(target.max_length - 1)
