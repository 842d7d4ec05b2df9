"""A target that says only its first tokens.

Two models with one tokenizer may have heads padded to different sizes (Qwen2.5: 152,064 and 151,936
entries). What one of them draws, the other has to be able to read.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from draftsmith.cache import Block, KVCache
from draftsmith.errors import InputError
from draftsmith.targets._base import Target
from draftsmith.types import Signals, TargetOutput


class CappedTarget:
    """`target`, its laws renormalised over the tokens before `vocab_size`.

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
