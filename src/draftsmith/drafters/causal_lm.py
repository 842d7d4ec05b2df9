"""Training forward and head of a plain causal language model, for drafters that are one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.types import DraftPrediction, TrajectoryBatch
from draftsmith.errors import UnsupportedModel


def causal_forward(model: PreTrainedModel, batch: TrajectoryBatch) -> DraftPrediction:
    """Hidden states after the final norm, predicting one token ahead.

    With `batch.documents_BT` attention stays inside a document and positions restart there:

        documents   0 0 0 1 1        may look   x . . . .
        positions   0 1 2 0 1        at         x x . . .
                                                x x x . .
                                                . . . x .
                                                . . . x x
    """
    tokens_BT = batch.tokens_BT
    mask: Any = None
    if batch.documents_BT is None:
        positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        positions_BT = positions_BT.expand_as(tokens_BT)
    else:
        idle_BT = _idle(batch.loss_mask_BT.to(tokens_BT.device), batch.documents_BT)
        positions_BT = document_positions(batch.documents_BT)
        last = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if last is not None:
            positions_BT = positions_BT.where(~idle_BT, positions_BT.clamp(max=last - 1))
        mask = _document_masks(model, batch.documents_BT)
    out = model.get_decoder()(
        input_ids=tokens_BT, attention_mask=mask, position_ids=positions_BT, use_cache=False
    )
    return DraftPrediction(
        hidden_BTH=out.last_hidden_state,
        mask_BT=torch.ones_like(tokens_BT, dtype=torch.bool),
        ahead=1,
    )


def document_positions(documents_BT: Tensor) -> Tensor:
    """Position inside its document; a document that begins before the block restarts at 0."""
    index_BT = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    index_BT = index_BT.expand_as(documents_BT)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return index_BT - torch.where(begins_BT, index_BT, 0).cummax(dim=1).values


def _idle(counts_BT: Tensor, documents_BT: Tensor) -> Tensor:
    """Places behind the last token that counts in their document, separators and padding: nothing
    that counts sees them, and their positions may lie outside of a model's context."""
    places = counts_BT.shape[1]
    index_BT = torch.arange(places, device=counts_BT.device).expand_as(documents_BT)
    ahead_BT = torch.where(counts_BT, index_BT, places).flip(1).cummin(dim=1).values.flip(1)
    theirs_BT = documents_BT.gather(1, ahead_BT.clamp(max=places - 1))
    return (ahead_BT == places) | (theirs_BT != documents_BT)


def _document_masks(model: PreTrainedModel, documents_BT: Tensor) -> Any:
    """A block-diagonal causal mask in the form that this model's attention takes."""
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise UnsupportedModel(
            f"attention {implementation!r} takes no document mask; load the model with sdpa"
        )
    length = documents_BT.shape[1]
    index = torch.arange(length, device=documents_BT.device)
    distance = index[:, None] - index[None, :]
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    full = (same_BTT & (distance >= 0))[:, None]

    def shaped(allowed: Tensor) -> Tensor:
        if implementation == "sdpa":
            return allowed
        lowest = torch.finfo(model.dtype).min
        return torch.where(allowed, 0.0, lowest).to(model.dtype)

    config = model.config.to_dict()
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = set(config.get("layer_types") or ())
    if not window or kinds == {"full_attention"}:
        return shaped(full)
    narrow = shaped(full & (distance < window))
    return {"full_attention": shaped(full), "sliding_attention": narrow} if kinds else narrow
