"""`unrolled`: FSPAD's network, trained through its own chains.

    forward     reads                  gives     its loss reaches
    1           the target's states    g1        forward 1
    2           g1                     g2        forward 2, and through g1 forward 1
    3           g2                     g3        forwards 3, 2 and 1

HASS and GRIFFIN learn from their own states, too, but take each as given: no draft learns to give a
state from which the next one drafts well. EAGLE-3 goes back through all (training-time test, arXiv
2503.01840), but reads three layers and imitates no state. Here states are imitated, as one that is
like the target's is what a later draft can read (`fusion=plain`: EAGLE's network and tensors).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from transformers import LlamaConfig

from draftsmith.drafters.base import STRUCTURE, TRAINING, LossWeights, TargetView, at_least
from draftsmith.drafters.fspad import FeatureSampling
from draftsmith.drafters.hidden.drafter import FeatureDrafter
from draftsmith.drafters.hidden.network import ConcatLinear, FusionNetwork


class UnrolledNetwork(FusionNetwork):
    """FSPAD's network, or EAGLE's."""

    def __init__(self, config: LlamaConfig) -> None:
        # a released folder of FSPAD does not say
        plain = getattr(config, "plain_fusion", False)
        hidden = config.hidden_size
        fusion = ConcatLinear(2 * hidden, hidden) if plain else FeatureSampling(config)
        super().__init__(config, fusion, halves=1 if plain else 2)


class Unrolled(FeatureDrafter):
    """FSPAD's network with EAGLE-3's way of training."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureDrafter.Config):
        num_forwards: int = field(default=3, metadata=TRAINING)
        """Training: drafts in a row that are trained, all in one graph."""
        fusion: Literal["gated", "plain"] = field(default="gated", metadata=STRUCTURE)
        """Training: FSPAD's fusion and two outputs; or EAGLE's, cheaper to draft with."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, num_forwards=self.num_forwards)

    config: Config
    network_class = UnrolledNetwork
    loss_weights = LossWeights(token=1.0, feature=0.3)

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.num_steps = self.config.num_forwards

    def network_config(self, target: TargetView) -> LlamaConfig:
        layer = super().network_config(target)
        layer.plain_fusion = self.config.fusion == "plain"
        return layer


DRAFTER = Unrolled
