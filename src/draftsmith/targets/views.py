"""`EmbeddingAndHead`: what a drafter over hidden states borrows, without the target's layers.

    tokens -> [embedding] -> (layers, not loaded) -> states after the final norm -> [head] -> logits

Training from stored hidden states needs no more of an 8 B model than these two matrices.

`VocabLimitedTarget`: a target restricted to its first tokens.

Two models with one tokenizer may have heads padded to different sizes (Qwen2.5: 152,064 and 151,936
entries). Tokens drawn from one of them must exist in the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.core.cache import Block, KVCache
from draftsmith.core.types import Signals, TargetOutput
from draftsmith.errors import InputError
from draftsmith.targets.base import Target
from draftsmith.targets.hf import causal_head, end_ids_of, load_model


class EmbeddingAndHead:
    """Embedding and head of a transformers causal language model (a `TargetView`).

    States and embeddings go in and out in float32, whatever the target's own numbers are: what
    learns keeps float32 weights. Both matrices move to where they are asked for.
    """

    def __init__(self, model: Any, config: Any, tokenizer: Any) -> None:
        """`model`: its layers are not used. `config`: of the target's text decoder, whole."""
        self._model = model.eval().requires_grad_(False)
        self._logits = causal_head(model)
        self.config, self.tokenizer = config, tokenizer
        self.end_ids = end_ids_of(model, tokenizer)
        self.vocab_size: int = self.head_weight().shape[0]
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self.dtype = torch.float32

    @classmethod
    def load(cls, name: str, config: Any, tokenizer: Any) -> EmbeddingAndHead:
        """Read both from a model folder or hub id, without the layers.

        Raises:
            BackendError: the folder is missing, unreadable or incomplete.
        """
        return cls(load_model(name, layers=False), config, tokenizer)

    @property
    def device(self) -> torch.device:
        return self._model.get_output_embeddings().weight.device

    def embed(self, tokens: Tensor) -> Tensor:
        self._follow(tokens)
        embedded: Tensor = self._model.get_input_embeddings()(tokens)
        return embedded.to(self.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        self._follow(hidden)
        return self._logits(hidden.to(self.head_weight().dtype)).to(self.dtype)

    def head_weight(self) -> Tensor:
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight

    def _follow(self, values: Tensor) -> None:
        if values.device != self.device:
            self._model.to(values.device)


class VocabLimitedTarget:
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
