"""`hass`: EAGLE's network, trained on its own outputs (HASS, arXiv 2408.15766).

    step 0     features of the target                             as EAGLE
    step j     states of step j - 1, seen from the same place     what decoding will see

Harmonised context alignment is the roll-out of `_rollout.py`; each step is learnt by itself, its
inputs detached, and gradients add up. Harmonised objective distillation is the top-10 term of the
objective. Weights load and decode as EAGLE's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from draftsmith.drafters._base import LossWeights
from draftsmith.drafters._feature_drafter import FeatureDrafter
from draftsmith.drafters._options import TRAINING
from draftsmith.drafters.eagle import EagleNetwork


class Hass(FeatureDrafter):
    """EAGLE's drafter with aligned training."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureDrafter.Config):
        num_forwards: int = field(default=3, metadata=TRAINING)
        """Training: drafts in a row that are learnt."""

    config: Config
    network_class = EagleNetwork
    backward = "each"
    loss_weights = LossWeights(token=0.1, feature=1.0, top=1.0)

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.num_steps = self.config.num_forwards


DRAFTER = Hass
