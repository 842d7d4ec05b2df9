"""Both ends of a target without its layers: what a drafter over hidden states borrows of it.

    tokens -> [embedding] -> (layers, not loaded) -> states after the final norm -> [head] -> logits

Training from stored hidden states needs no more of an 8 B model than these two matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftsmith.targets._head import causal_head
from draftsmith.targets.hf import end_ids_of, load_model


class Ends:
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
    def load(cls, name: str, config: Any, tokenizer: Any) -> Ends:
        """Of a model folder or hub id; its layers are not read.

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
