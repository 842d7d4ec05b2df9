"""Cross-entropy and distillation as their formulas read, with all logits at once.

Tests compare the objectives of `distill.objectives.distillation` with these; the study of memory
measures both. Shape letters as in that module.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.core.types import DraftPrediction, TeacherLogprobs, TrajectoryBatch
from draftsmith.distill.objectives import divergence as div
from draftsmith.distill.objectives.distillation import (
    Distillation,
    Head,
    LossTerms,
    masks,
    over_both,
    wide,
)
from draftsmith.distill.objectives.divergence import FLOOR, REST, Knobs, Rewards, Tail, TokenBins


def dense_cross_entropy(
    prediction: DraftPrediction, batch: TrajectoryBatch, head: Head
) -> LossTerms:
    """What `CrossEntropy.loss` gives."""
    log_q_BTV = torch.log_softmax(head(prediction.hidden_BTH).float(), dim=-1)
    wanted_BT1 = batch.tokens_ahead(prediction.ahead)[..., None]
    counted_BT = prediction.mask_BT.bool() & batch.mask_ahead(prediction.ahead)
    nats_BT = -log_q_BTV.gather(-1, wanted_BT1)[..., 0]
    return LossTerms(total=(nats_BT * counted_BT).sum(), weight=counted_BT.sum().float())


def dense_distillation(
    objective: Distillation, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head
) -> LossTerms:
    """What `objective.loss` gives, as its formula reads."""
    logits_BTV = wide(head(prediction.hidden_BTH))
    taught_BT, plain_BT = masks(prediction, batch, objective.record)
    wanted_BT1 = batch.tokens_ahead(prediction.ahead)[..., None]
    nats_BT = -torch.log_softmax(logits_BTV, dim=-1).gather(-1, wanted_BT1)[..., 0]
    if taught_BT.any():
        assert batch.laws is not None
        laws = batch.laws.take(batch.law_ahead(prediction.ahead)[taught_BT])
        cells = _dense_cells(objective, laws, logits_BTV[taught_BT])
        uniform_N = drawn_N1 = None
        if objective.record.pools_cells and objective.reading in div.DRAWING:
            uniform_N = torch.rand(len(laws), device=logits_BTV.device)
            if objective.reading == "draws":
                drawn_N1 = div.drawn(cells.log_q_NC, uniform_N)
        knobs = Knobs(
            beta=objective.beta,
            reading=objective.reading,
            rewards=Rewards.of(div.count_rewards(cells, drawn_N1)),
            uniform_N=uniform_N,
        )
        nats_N = objective.record.nats(cells, knobs)
        if objective.top_weight:
            top_N = div.top_cross_entropy(cells, objective.top)
            nats_N = nats_N + objective.top_weight * top_N
        nats_BT = nats_BT.masked_scatter(taught_BT, nats_N)
    weights_BT = batch.weights_ahead(prediction.ahead) * (taught_BT | plain_BT)
    return LossTerms(total=(nats_BT * weights_BT).sum(), weight=weights_BT.sum())


def _dense_cells(objective: Distillation, laws: TeacherLogprobs, logits_NV: Tensor) -> TokenBins:
    """Both laws with a cell for every vocabulary entry, and after a `bucket` one more."""
    kept, logits_NV = over_both(laws, logits_NV)
    log_q_NV = torch.log_softmax(logits_NV, dim=-1)
    if isinstance(kept, Tensor):
        log_p_NV = torch.log_softmax(kept / objective.teacher_temperature, dim=-1)
        return TokenBins(log_p_NC=log_p_NV, log_q_NC=log_q_NV)
    p_NK = kept.log_p_NK.to(logits_NV.dtype).exp()
    p_NV = torch.zeros_like(log_q_NV).scatter_add(-1, kept.ids_NK.long(), p_NK)
    hat_NV = p_NV ** (1 / objective.teacher_temperature)
    hat_NV = hat_NV / hat_NV.sum(-1, keepdim=True)
    return _DENSE_TAILS[objective.tail](objective, p_NV, hat_NV, log_q_NV)


def _dense_bucket(
    objective: Distillation, p_NV: Tensor, hat_NV: Tensor, log_q_NV: Tensor
) -> TokenBins:
    inside_NV = p_NV > 0
    outside_N1 = ~inside_NV.all(-1, keepdim=True)
    p_rest_N1 = (1 - p_NV.sum(-1, keepdim=True)).clamp(min=REST) * outside_N1
    q_rest_N1 = (log_q_NV.exp() * ~inside_NV).sum(-1, keepdim=True)
    q_rest_N1 = q_rest_N1.clamp(min=torch.finfo(q_rest_N1.dtype).tiny)
    log_q_rest_N1 = q_rest_N1.log().masked_fill(~outside_N1, -math.inf)
    return TokenBins(
        log_p_NC=torch.cat([p_NV, p_rest_N1], dim=-1).log(),
        log_q_NC=torch.cat([log_q_NV.masked_fill(~inside_NV, -math.inf), log_q_rest_N1], dim=-1),
        valid_NC=torch.cat([inside_NV, outside_N1], dim=-1),
    )


def _dense_hat(
    objective: Distillation, p_NV: Tensor, hat_NV: Tensor, log_q_NV: Tensor
) -> TokenBins:
    if objective.record.on_support:
        log_q_NV = torch.log_softmax(log_q_NV.masked_fill(p_NV == 0, -math.inf), dim=-1)
    return TokenBins(log_p_NC=hat_NV.log(), log_q_NC=log_q_NV)


def _dense_floor(
    objective: Distillation, p_NV: Tensor, hat_NV: Tensor, log_q_NV: Tensor
) -> TokenBins:
    outside_N1 = ~(p_NV > 0).all(-1, keepdim=True)
    hat_NV = hat_NV.clamp(min=FLOOR).where(outside_N1, hat_NV)
    return TokenBins(log_p_NC=(hat_NV / hat_NV.sum(-1, keepdim=True)).log(), log_q_NC=log_q_NV)


_DENSE_TAILS: dict[Tail, Callable[[Distillation, Tensor, Tensor, Tensor], TokenBins]] = {
    "bucket": _dense_bucket,
    "renormalise": _dense_hat,
    "floor": _dense_floor,
}
