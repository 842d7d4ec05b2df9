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
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.distill.distillation import Distillation
from draftsmith.distill.narrow import narrowed
from draftsmith.distill.objective import Head, LossTerms
from draftsmith.errors import InputError
from draftsmith.types import DraftPrediction, TrajectoryBatch


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
