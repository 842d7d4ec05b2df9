"""What feature-level drafters learn: the target's laws, and its states.

    place              t
    prediction         states that predict x_{t+a}, and states like f_{t+a-1}      a: `ahead`
    token term         any divergence from the law of x_{t+a}
    feature term       smooth L1 between the state and f_{t+a-1}, mean over its width

Weights are those of EAGLE (1 and 0.1); the token term is whatever `Distillation` can be, so that
every objective of a draft model is one of a feature-level drafter, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.distill.distillation import Distillation
from draftsmith.distill.objective import Head, LossTerms
from draftsmith.errors import InputError
from draftsmith.types import DraftPrediction, TrajectoryBatch


@dataclass(frozen=True, kw_only=True)
class Imitation:
    """token_weight x divergence + feature_weight x distance of states."""

    token: Distillation
    token_weight: float = 0.1
    feature_weight: float = 1.0

    def __post_init__(self) -> None:
        if min(self.token_weight, self.feature_weight) < 0:
            raise InputError("the weights of the token and the feature term are 0 or more")

    def loss(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head) -> LossTerms:
        """Sums over counted places; drafters without states to imitate have the token term only."""
        terms = self.token.loss(prediction, batch, head)
        total = self.token_weight * terms.total
        if prediction.feature_BTH is not None and self.feature_weight:
            total = total + self.feature_weight * _distance(prediction, batch)
        return LossTerms(total=total, weight=terms.weight)


def _distance(prediction: DraftPrediction, batch: TrajectoryBatch) -> Tensor:
    assert prediction.feature_BTH is not None
    counted_BT = prediction.mask_BT.bool() & batch.mask_ahead(prediction.ahead)
    own = prediction.feature_BTH[counted_BT]
    wanted = batch.features_ahead(prediction.ahead - 1)[counted_BT]
    wide = torch.promote_types(own.dtype, torch.float32)
    apart_N = F.smooth_l1_loss(own.to(wide), wanted.to(wide), reduction="none").mean(-1)
    weights_N = batch.weights_ahead(prediction.ahead)[counted_BT]
    return (apart_N * weights_N.to(wide)).sum()
