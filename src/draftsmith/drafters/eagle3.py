"""`eagle3`: features of three layers, vocabulary and head of its own (EAGLE-3, arXiv 2503.01840).

    f_t = fc [h_low ; h_middle ; h_high]               at the first draft
    attention reads [rms e(x_{t+1}) ; rms f_t]          twice as wide; the residual is f_t
    logits = lm_head(rms(g)) over the draft vocabulary, g goes on un-normed

Training unrolls the drafter (`hidden/unroll.py`) in one graph (training-time test): no feature is
imitated, later steps count 0.8 ** step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.core.types import DraftPrediction, Signals, TrajectoryBatch
from draftsmith.drafters.base import STRUCTURE, TRAINING, LossWeights, TargetView, at_least
from draftsmith.drafters.hidden.checkpoint import fused_by, read_config
from draftsmith.drafters.hidden.drafter import FeatureDrafter
from draftsmith.drafters.hidden.network import (
    Attend,
    Attention,
    Compilable,
    FusionParts,
    PairNetwork,
    RMSNorm,
    SwiGLU,
    target_ids,
)
from draftsmith.drafters.hidden.unroll import Rollout


class WideLayer(nn.Module):
    """Attention over token and feature side by side; the feature alone is the residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, width=2 * hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, config.intermediate_size, hidden)

    def forward(
        self,
        embedded_BTH: Tensor,
        feature_BTH: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        both = [self.input_layernorm(embedded_BTH), self.hidden_norm(feature_BTH)]
        out = feature_BTH + self.self_attn(torch.cat(both, dim=-1), cos_sin, attend)
        added: Tensor = self.mlp(self.post_attention_layernorm(out))
        return out + added


class Eagle3Network(PairNetwork):
    """Fusion, one wide layer, norm and head."""

    d2t: Tensor
    """[Vd] int64: a draft id's distance to the target's id."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        size = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = WideLayer(config)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, size, bias=False)
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))

    def compilable(self) -> Compilable:
        layer = self.midlayer
        beside = FusionParts(fc=self.fc, norm=layer.hidden_norm, beside=layer.input_layernorm)
        return Compilable(layer=layer, fusion=beside, norm=self.norm, head=self.lm_head)

    @property
    def target_ids(self) -> Tensor:
        """[Vd]: the target's id of each draft id."""
        return target_ids(self.d2t)

    def forward(
        self, embedded_BTH: Tensor, feature_BTS: Tensor, positions_BT: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        # the target's three layers at the first draft, then the state of the draft before
        own = feature_BTS.shape[-1] == self.fc.out_features
        feature = feature_BTS if own else self.fc(feature_BTS)
        out = self.midlayer(embedded_BTH, feature, self.rotary(positions_BT, feature), attend)
        return out, out

    def own_logits(self, predict: Tensor, target: TargetView) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(predict))
        return logits


class Eagle3(FeatureDrafter):
    """EAGLE-3."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureDrafter.Config):
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

    def _signals_for(self, target: TargetView) -> Signals:
        layers = None
        if self.config.source:
            folder = Path(self.config.source)
            layers = fused_by(read_config(folder), int(target.config.num_hidden_layers), folder)
        return self.signals_of(target.config) if layers is None else Signals(layers=layers)

    def network_config(self, target: TargetView) -> LlamaConfig:
        layer = super().network_config(target)
        layer.draft_vocab_size = self._draft_vocab(target)
        return layer

    def choose_vocabulary(self, counts_V: Tensor | None) -> None:
        """As others, and the target's own rows are the first of the head."""
        super().choose_vocabulary(counts_V)
        network = self.network
        assert isinstance(network, Eagle3Network)
        if not self.config.source:
            with torch.no_grad():
                network.lm_head.weight.copy_(self.target.head_weight()[network.target_ids])

    @classmethod
    def signals_of(cls, config: Any) -> Signals:
        return Signals(layers=fused_layers(int(config.num_hidden_layers)))

    def _signal_width(self) -> int:
        return 3 * super()._signal_width()

    def forward(
        self, batch: TrajectoryBatch, carry: Rollout | None
    ) -> tuple[DraftPrediction, Rollout]:
        step = 0 if carry is None else carry.step
        prediction, after = super().forward(batch, carry)
        return replace(prediction, feature_BTH=None, weight=self.config.decay**step), after


def fused_layers(count: int) -> tuple[int, int, int]:
    """Layers whose outputs are fused: 1, L / 2 - 1 and L - 4 (0-based); of a target with fewer than
    seven layers, where these are not three, the first, the middle one and the last."""
    if count < 7:
        return (0, (count - 1) // 2, count - 1)
    return (1, count // 2 - 1, count - 4)


DRAFTER = Eagle3
