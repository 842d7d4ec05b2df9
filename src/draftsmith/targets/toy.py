"""Small targets for tests and examples: a tabular law, and a tiny random transformer.

`TabularTarget` is as sensitive as a transformer to every mistake of a decoding engine: its law
depends on the tokens that the mask shows, at the positions where they stand, read back from the
cache. A wrong mask, position, commit or rollback changes the law that comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.config import at_least, require, require_kind
from draftsmith.core.cache import Block, KVCache, KVSpec
from draftsmith.core.config import check_seed
from draftsmith.core.types import Signals, TargetOutput

if TYPE_CHECKING:
    from draftsmith.targets.hf import HFTarget


class TabularTarget:
    """logits(next) = table[last `order` tokens], for a vocabulary small enough to enumerate.

    Args:
        vocab_size: V, 2 to 8 for enumeration; any size for a table that is drawn when needed.
        order: how many preceding tokens the law depends on.
        seed: of the random table.
        scale: standard deviation of the logits (larger: more peaked).
        negated: use minus the table of the same seed (the most adverse drafter for it).
    """

    name = "tabular"
    tokenizer = None
    device = torch.device("cpu")
    dtype = torch.float64

    def __init__(
        self,
        vocab_size: int = 8,
        *,
        order: int = 2,
        seed: int = 0,
        scale: float = 1.5,
        negated: bool = False,
        end_ids: frozenset[int] = frozenset(),
        max_length: int | None = None,
    ) -> None:
        at_least(1, "vocab_size", vocab_size)
        at_least(0, "order", order)
        check_seed(seed)
        self.vocab_size, self.order = vocab_size, order
        self.end_ids, self.max_length = end_ids, max_length
        generator = torch.Generator().manual_seed(seed)
        contexts = (vocab_size + 1) ** order
        table = torch.randn(contexts, vocab_size, generator=generator, dtype=torch.float64)
        self.table_CV = (-scale if negated else scale) * table
        self._spec = KVSpec(layers=((1, 1, 1),), dtype=torch.float64, device=self.device)

    def logits_after(self, tokens: list[int]) -> Tensor:
        """[V]: the law's logits after these tokens, straight from the table (the tests' oracle)."""
        row = 0
        for lag in range(self.order):
            token = tokens[-1 - lag] + 1 if lag < len(tokens) else 0
            row = row * (self.vocab_size + 1) + token
        return self.table_CV[row]

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        return KVCache(self._spec, num_rows, capacity)

    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        positions_BT = block.positions(self.device).double()
        # keys: token + 1; values: the position at which it was written
        tokens_BS, at_BS = (
            view[:, 0, :, 0]
            for view in block.cache.extend(
                block, 0, (tokens_BT.double() + 1)[:, None, :, None], positions_BT[:, None, :, None]
            )
        )
        seen_BTS = block.mask(None, torch.float16)[:, 0] == 0
        # of the view's columns most are seen by no token: a few decide, so only they are compared
        some_S = seen_BTS.any(1).any(0).nonzero()[:, 0]
        seen_BTS, tokens_BS, at_BS = (
            all_columns[..., some_S] for all_columns in (seen_BTS, tokens_BS, at_BS)
        )
        row_BT = torch.zeros_like(positions_BT)
        for lag in range(self.order):
            there_BTS = seen_BTS & (at_BS[:, None, :] == (positions_BT - lag)[:, :, None])
            token_BT = (there_BTS * tokens_BS[:, None, :]).sum(-1)
            row_BT = row_BT * (self.vocab_size + 1) + token_BT
        # two tokens at one position (a broken mask) can point outside the table
        row_BT = row_BT.long().remainder(len(self.table_CV))
        return TargetOutput(
            logits_BNV=self.table_CV[row_BT[:, -keep:]],
            signals_BTS=self._states(row_BT, signals),
        )

    def _states(self, row_BT: Tensor, signals: Signals) -> Tensor | None:
        """[B, T, C] per signal: which row of the table the law is, as a hidden state."""
        count = len(signals.layers) + signals.last_hidden
        if not count:
            return None
        return F.one_hot(row_BT, len(self.table_CV)).to(self.dtype).repeat(1, 1, count)

    @cached_property
    def config(self) -> Any:
        """Measures for drafters that read hidden states; there are no layers."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=len(self.table_CV),
            intermediate_size=16,
            num_hidden_layers=8,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=self.max_length or 512,
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """[.., C]: one-hot, as far as the states are wide."""
        return F.one_hot(tokens.remainder(len(self.table_CV)), len(self.table_CV)).to(self.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        # of tokens without probability: -inf times anything would be NaN
        return hidden @ self.table_CV.clamp(min=-100.0)

    def head_over(self, ids_D: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda hidden: hidden @ self.table_CV[:, ids_D].clamp(min=-100.0)

    def head_weight(self) -> Tensor:
        return self.table_CV.T


def tiny_target(
    vocab_size: int = 64,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    dtype: torch.dtype = torch.float64,
    max_length: int = 512,
    end_ids: frozenset[int] = frozenset(),
) -> HFTarget:
    """A random Llama of a few thousand parameters, without tokenizer."""
    at_least(1, "vocab_size", vocab_size)
    at_least(1, "layers", layers)
    at_least(1, "hidden", hidden)
    at_least(1, "max_length", max_length)
    check_seed(seed)
    require(hidden % 8 == 0, f"hidden must be a multiple of 8 (4 heads), got {hidden}")
    require_kind("dtype", dtype, torch.dtype, ", such as torch.float64")
    from transformers import LlamaConfig, LlamaForCausalLM

    from draftsmith.targets.hf import HFTarget

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():  # far from uniform laws, unlike the usual start
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.25)
    return HFTarget(model.to(dtype), tokenizer=None, end_ids=end_ids)
