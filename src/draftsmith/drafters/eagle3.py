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

from draftsmith.core.types import DraftPrediction, NarrowHead, Signals, TrajectoryBatch
from draftsmith.drafters.base import STRUCTURE, TRAINING, LossWeights, TargetView, at_least
from draftsmith.drafters.hidden.checkpoint import fused_by, read_config, target_ids
from draftsmith.drafters.hidden.drafter import FeatureDrafter
from draftsmith.drafters.hidden.network import Attend, Attention, Network, RMSNorm, Rotary, SwiGLU
from draftsmith.drafters.hidden.unroll import Rollout
from draftsmith.errors import InputError


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


class Eagle3Network(Network):
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
        self.rotary = Rotary(config)

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

    def own_logits(self, predict: Tensor) -> Tensor:
        """[.., Vd] over the draft vocabulary."""
        logits: Tensor = self.lm_head(self.norm(predict))
        return logits

    def logits(self, predict: Tensor, target: TargetView) -> Tensor:
        own = self.own_logits(predict)
        if own.shape[-1] == target.vocab_size:  # ascending ids: all of them
            return own
        wide = own.new_full((*own.shape[:-1], target.vocab_size), -torch.inf)
        return wide.index_copy(-1, self.target_ids, own)


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
        """Training: knows so many tokens, those that answers hold most often; 0: all."""

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
        known, own = target.vocab_size, self.config.draft_vocab
        if not 0 <= own <= known:
            raise InputError(f"draft_vocab must lie between 0 (all) and {known}, got {own}")
        layer = super().network_config(target)
        layer.draft_vocab_size = own or known
        return layer

    @property
    def wants_token_counts(self) -> bool:
        assert isinstance(self.network, Eagle3Network)
        return not self.config.source and len(self.network.d2t) < self.target.vocab_size

    def choose_vocabulary(self, counts_V: Tensor | None) -> None:
        """Unless it was loaded: the most frequent tokens (of equal ones the lower ids), and for
        each the target's own row as the first row of the head."""
        network = self.network
        assert isinstance(network, Eagle3Network)
        if self.config.source:
            return
        size = len(network.d2t)
        if size == self.target.vocab_size:
            counts_V = torch.zeros(size)
        if counts_V is None:
            raise InputError(
                "draft_vocab keeps the tokens that answers hold most often, which is not known "
                "before they are drawn: learn from a --store, or leave it out"
            )
        order_V = torch.argsort(counts_V, descending=True, stable=True)
        ids_D = order_V[:size].sort().values.to(network.d2t.device)
        network.d2t.copy_(ids_D - torch.arange(size, device=ids_D.device))
        with torch.no_grad():
            network.lm_head.weight.copy_(self.target.head_weight()[ids_D])

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
        network = self.network
        assert isinstance(network, Eagle3Network)
        narrow = None
        if len(network.d2t) < self.target.vocab_size:
            narrow = NarrowHead(ids_D=network.target_ids, head=network.own_logits)
        weight = self.config.decay**step
        return replace(prediction, feature_BTH=None, weight=weight, narrow=narrow), after


def fused_layers(count: int) -> tuple[int, int, int]:
    """Layers whose outputs are fused: 1, L / 2 - 1 and L - 4 (0-based); of a target with fewer than
    seven layers, where these are not three, the first, the middle one and the last."""
    if count < 7:
        return (0, (count - 1) // 2, count - 1)
    return (1, count // 2 - 1, count - 4)


DRAFTER = Eagle3
