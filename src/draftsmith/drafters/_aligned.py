"""What HASS and GRIFFIN have in common: they are trained on their own outputs, several forwards of a
text, and every forward takes the states of the one before as given.

    forward 1    features of the target -> g1
    forward 2    g1, detached -> g2                    keys of forward 1, with their gradient
    forward 3    g2, detached -> g3                    keys of forwards 1 and 2, with their gradient

Gradients of all forwards add up, as in the released code: there a forward computes the keys of all
feature sets again and goes backward by itself; here keys are computed once, and the sum goes
backward once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from draftsmith.drafters import _rollout
from draftsmith.drafters._feature_drafter import FeatureDrafter
from draftsmith.drafters._options import TRAINING
from draftsmith.drafters._rollout import Rollout
from draftsmith.types import DraftPrediction, TrajectoryBatch


class AlignedDrafter(FeatureDrafter):
    """A drafter that learns to draft from its own states."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureDrafter.Config):
        num_forwards: int = field(default=3, metadata=TRAINING)
        """Training: drafts in a row that are learnt."""
        attention: Literal["exact", "official"] = field(default="exact", metadata=TRAINING)
        """Training: `exact` is what decoding computes; `official` leaks weight to places that are
        not seen, as the released code does, for parity with its curves. Held-out figures are
        always exact."""

    config: Config
    official_from: ClassVar[int] = 1
    """The least number of forwards with which the released code leaks."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.num_steps = self.config.num_forwards

    def _begin(self, batch: TrajectoryBatch) -> Rollout:
        asked = self.config.attention == "official" and self.num_steps >= self.official_from
        return replace(super()._begin(batch), official=asked and self.training)

    def forward(
        self, batch: TrajectoryBatch, carry: Rollout | None
    ) -> tuple[DraftPrediction, Rollout]:
        prediction, after = super().forward(batch, carry)
        return prediction, replace(after, feature_BTH=after.feature_BTH.detach())
