"""What feature-level drafters learn: the target's laws, and its states.

    place              t
    prediction         states that predict x_{t+a}, and states like f_{t+a-1}      a: `ahead`
    token term         any divergence from the law of x_{t+a}
    top term           -sum p log q over the law's best tokens (HASS)
    feature term       smooth L1 between the state and f_{t+a-1}, mean over its width

Each step of a roll-out is a mean over the places that it counts, as published: where GRIFFIN's mask
leaves few chains, these few count as much as all did in the first step. So two parts of a batch,
accumulated or in two processes, are two means, as published, and with that mask not the mean of the
whole. The token term is whatever `Distillation` can be, so that every objective of a draft model is
one of a feature-level drafter.

Learning over a drafter's own, smaller vocabulary (EAGLE-3, arXiv 2503.01840).

    target's ids      0  1  2  3  4  5  6  7
    drafter's ids     .  0  .  1  .  2  .  .      ids_D = [1, 3, 5]
    law of a place    p(1), p(3), p(5), divided by their sum
    counts            where the target's most probable token is one of these; where the place learns
                      its token (no law, or a hard objective), where that one is

D tokens of the drafter, V of the target, K kept tokens of a law, N places, B rows, T time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.core.types import (
    DraftPrediction,
    FullLaws,
    TeacherLaws,
    TopLaws,
    TrajectoryBatch,
)
from draftsmith.distill.objectives.distillation import (
    CELLS,
    Distillation,
    Head,
    LossTerms,
    preferred,
)
from draftsmith.errors import InputError


def narrowed(
    prediction: DraftPrediction, batch: TrajectoryBatch, *, hard: bool
) -> tuple[DraftPrediction, TrajectoryBatch]:
    """Both over the drafter's ids; nothing changes for a drafter that knows all tokens."""
    narrow = prediction.narrow
    if narrow is None:
        return prediction, batch
    ids_D = narrow.ids_D
    size = max(int(batch.tokens_BT.max()), int(ids_D.max())) + 1
    if isinstance(batch.laws, TopLaws) and len(batch.laws):
        size = max(size, int(batch.laws.ids_NK.max()) + 1)
    own_V = torch.full((size,), -1, device=ids_D.device)
    own_V[ids_D] = torch.arange(len(ids_D), device=ids_D.device)
    known_BT = own_V[batch.tokens_ahead(prediction.ahead)] >= 0
    row_BT = batch.law_ahead(prediction.ahead)
    if batch.laws is not None and len(batch.laws) and not hard:
        best_N = _known_best(batch.laws, ids_D)
        known_BT = torch.where(row_BT >= 0, best_N[row_BT.clamp(min=0)], known_BT)
    inside = replace(
        batch,
        tokens_BT=own_V[batch.tokens_BT].clamp(min=0),
        laws=None if batch.laws is None else _cut(batch.laws, ids_D, own_V),
    )
    return replace(prediction, mask_BT=prediction.mask_BT.bool() & known_BT), inside


def _known_best(laws: TeacherLaws, ids_D: Tensor) -> Tensor:
    """[N]: whether the drafter knows the target's most probable token."""
    if isinstance(laws, TopLaws):
        return torch.isin(preferred(laws), ids_D)
    with torch.no_grad():
        vocab = laws.head(laws.hidden_NH[:1]).shape[-1]
        parts = torch.arange(len(laws), device=laws.hidden_NH.device).split(max(1, CELLS // vocab))
        return torch.cat([torch.isin(preferred(laws.take(part)), ids_D) for part in parts])


def _cut(laws: TeacherLaws, ids_D: Tensor, own_V: Tensor) -> TeacherLaws:
    """Laws over the drafter's tokens. What a cut law does not say is taken to lie inside, unless it
    says all that is inside."""
    if isinstance(laws, FullLaws):
        return replace(laws, head=lambda hidden: laws.head(hidden)[..., ids_D])
    used_NK = laws.log_p_NK > -math.inf
    own_NK = own_V[laws.ids_NK.long()]
    outside_NK = used_NK & (own_NK < 0)
    kept_NK = used_NK & ~outside_NK
    p_NK = laws.log_p_NK.exp()
    said_N1 = kept_NK.sum(-1, keepdim=True) == len(ids_D)
    inside_N1, outside_N1 = ((p_NK * one).sum(-1, keepdim=True) for one in (kept_NK, outside_NK))
    left_N1 = inside_N1.where(said_N1, 1 - outside_N1).clamp(min=torch.finfo(p_NK.dtype).tiny)
    return TopLaws(
        ids_NK=own_NK.where(kept_NK, 0),
        log_p_NK=(laws.log_p_NK - left_N1.log()).masked_fill(~kept_NK, -math.inf).clamp(max=0.0),
    )


@dataclass(frozen=True, kw_only=True)
class Imitation:
    """token_weight x divergence + top_weight x top term + feature_weight x distance of states."""

    token: Distillation
    token_weight: float = 0.1
    feature_weight: float = 1.0
    top_weight: float = 0.0

    def __post_init__(self) -> None:
        if min(self.token_weight, self.feature_weight, self.top_weight) < 0:
            raise InputError("the weights of the token, top and feature terms are 0 or more")
        if not max(self.token_weight, self.feature_weight):
            raise InputError("the token and the feature term cannot both weigh nothing")
        if self.top_weight and not self.token_weight:
            raise InputError("the top term belongs to the token term: give --token-weight, too")

    def loss(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head) -> LossTerms:
        """Sums over counted places; drafters without states to imitate have no feature term."""
        token = self.token
        if self.top_weight:
            token = replace(token, top_weight=self.top_weight / self.token_weight)
        own, inside = narrowed(prediction, batch, hard=token.record.hard)
        terms = token.loss(own, inside, head if own.narrow is None else own.narrow.head)
        total = self.token_weight * terms.total
        if prediction.feature_BTH is not None and self.feature_weight:
            total = total + self.feature_weight * _distance(prediction, batch)
        weight = batch.weights_ahead(prediction.ahead)[batch.mask_ahead(prediction.ahead)].sum()
        return LossTerms(total=total * (weight / terms.weight.clamp(min=1e-5)), weight=weight)


def _distance(prediction: DraftPrediction, batch: TrajectoryBatch) -> Tensor:
    assert prediction.feature_BTH is not None
    counted_BT = prediction.mask_BT.bool() & batch.mask_ahead(prediction.ahead)
    own = prediction.feature_BTH[counted_BT]
    wanted = batch.features_ahead(prediction.ahead - 1)[counted_BT]
    wide = torch.promote_types(own.dtype, torch.float32)
    apart_N = F.smooth_l1_loss(own.to(wide), wanted.to(wide), reduction="none").mean(-1)
    weights_N = batch.weights_ahead(prediction.ahead)[counted_BT]
    return (apart_N * weights_N.to(wide)).sum()
