"""What HASS and GRIFFIN have in common: they are trained on their own outputs, several forwards of
a text, and every forward takes the states of the one before as given.

    forward    reads                  attends to, with gradient      gives
    1          the target's states    keys of 1                      g1
    2          g1, detached           keys of 1, 2                   g2
    3          g2, detached           keys of 1, 2, 3                g3

In the released code each forward makes all keys again and goes backward by itself, which adds
gradients up (`gradients=sum`). Here keys are made once, all losses go backward together, and what a
forward computed on the way to it is computed again, as a graph of all forwards would take their sum
in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from draftsmith.core.types import DraftPrediction, TrajectoryBatch
from draftsmith.drafters.base import COST, TRAINING, at_least
from draftsmith.drafters.hidden.drafter import FeatureDrafter
from draftsmith.drafters.hidden.unroll import Rollout


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
        gradients: Literal["mean", "sum"] = field(default="mean", metadata=TRAINING)
        """Training: of all forwards, their mean, or their sum as published. AdamW takes the same
        step by either; what is clipped differs."""
        recompute: bool = field(default=True, metadata=COST)
        """Training: what a forward computed is computed again on the way back, so that the graph of
        one forward is in memory at a time. Without it: the same gradients, faster."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, num_forwards=self.num_forwards)

    config: Config
    official_from: ClassVar[int] = 1
    """The least number of forwards with which the released code leaks."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.num_steps = self.config.num_forwards
        self.keeps_steps = self.num_steps == 1 or not self.config.recompute

    def _begin(self, batch: TrajectoryBatch) -> Rollout:
        asked = self.config.attention == "official" and self.num_steps >= self.official_from
        return replace(super()._begin(batch), official=asked and self.training)

    def forward(
        self, batch: TrajectoryBatch, carry: Rollout | None
    ) -> tuple[DraftPrediction, Rollout]:
        prediction, after = super().forward(batch, carry)
        if self.config.gradients == "sum":  # all forwards share one normalisation
            prediction = replace(prediction, weight=float(self.num_steps))
        return prediction, replace(after, feature_BTH=after.feature_BTH.detach())
