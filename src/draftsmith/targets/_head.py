"""A language model's head: hidden states -> logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel


def causal_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Hidden [.., H] -> logits [.., V], with the scale or soft-cap of the model's own forward."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config(decoder=True).to_dict()
    multiply = config.get("logit_scale") or 1.0  # Cohere
    divide = config.get("logits_scaling") or 1.0  # Granite
    cap = config.get("final_logit_softcapping")  # Gemma 2

    def logits(hidden: Tensor) -> Tensor:
        out: Tensor = head(hidden)
        if multiply != 1.0 or divide != 1.0:
            out = out * (multiply / divide)
        return cap * torch.tanh(out / cap) if cap else out

    return logits
