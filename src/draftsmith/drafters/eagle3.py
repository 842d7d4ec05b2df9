"""`eagle3`: features of three layers, vocabulary and head of its own (EAGLE-3, arXiv 2503.01840).

    f_t = fc [h_low ; h_middle ; h_high]               at the first draft
    attention reads [rms e(x_{t+1}) ; rms f_t]          twice as wide; the residual is f_t
    logits = lm_head(rms(g)) over the draft vocabulary, g goes on un-normed

Training unrolls the drafter (`hidden/unroll.py`) in one graph (training-time test): no feature is
imitated, later steps count 0.8 ** step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor
from transformers import LlamaConfig

from draftsmith.core.types import DraftPrediction, TrajectoryBatch
from draftsmith.drafters.base import STRUCTURE, TRAINING, LossWeights, at_least
from draftsmith.drafters.hidden.fused import FusedDrafter, FusedNetwork, WideLayer
from draftsmith.drafters.hidden.network import Attend, Compilable, PairNetwork
from draftsmith.drafters.hidden.unroll import Rollout


class Eagle3Network(FusedNetwork, PairNetwork):
    """Fusion, one wide layer, norm and head."""

    def _add_layers(self, config: LlamaConfig) -> None:
        self.midlayer = WideLayer(config)

    def compilable(self) -> Compilable:
        layer = self.midlayer
        return Compilable(
            layers=(layer,), fusion=layer.parts(self.fc), norm=self.norm, head=self.lm_head
        )

    def forward(
        self, embedded_BTH: Tensor, feature_BTS: Tensor, positions_BT: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        # the target's three layers at the first draft, then the state of the draft before
        own = feature_BTS.shape[-1] == self.fc.out_features
        feature = feature_BTS if own else self.fc(feature_BTS)
        out = self.midlayer(embedded_BTH, feature, self.rotary(positions_BT, feature), attend)
        return out, out


class Eagle3(FusedDrafter):
    """EAGLE-3."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FusedDrafter.Config):
        num_forwards: int = field(default=7, metadata=TRAINING)
        """Training: drafts in a row that are trained (length of the training-time test)."""
        decay: float = field(default=0.8, metadata=TRAINING)
        """Training: each counts this much of the one before."""
        noise: float = field(default=0.0, metadata=TRAINING)
        """Training: none, as published."""
        draft_vocab: int = field(default=0, metadata=STRUCTURE)
        """Training: knows so many tokens, those that answers hold most often; 0: all. (Of the first
        version, so checkpoints name it.)"""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(1, num_forwards=self.num_forwards)
            at_least(0, decay=self.decay)

    config: Config
    network_class = Eagle3Network
    loss_weights = LossWeights()

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.num_steps = self.config.num_forwards

    def forward(
        self, batch: TrajectoryBatch, carry: Rollout | None
    ) -> tuple[DraftPrediction, Rollout]:
        step = 0 if carry is None else carry.step
        prediction, after = super().forward(batch, carry)
        return replace(prediction, feature_BTH=None, weight=self.config.decay**step), after


DRAFTER = Eagle3
