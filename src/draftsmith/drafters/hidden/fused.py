"""What EAGLE-3 and its parallel variant share: features of three layers, a first layer that reads
token and feature side by side, a vocabulary and a head of their own.

    f_t = fc [h_low ; h_middle ; h_high]
    attention reads [rms e(x_{t+1}) ; rms f_t]          the residual is f_t
    logits = lm_head(rms(g)) over the draft vocabulary
"""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.core.types import Signals
from draftsmith.drafters.base import TargetView
from draftsmith.drafters.hidden.checkpoint import fused_by, read_config
from draftsmith.drafters.hidden.drafter import FeatureDrafter
from draftsmith.drafters.hidden.network import (
    Attend,
    Attention,
    FusionParts,
    Network,
    RMSNorm,
    SwiGLU,
    target_ids,
)


def fused_layers(count: int) -> tuple[int, int, int]:
    """Layers whose outputs are fused: 1, L / 2 - 1 and L - 4 (0-based); of a target with fewer than
    seven layers, where these are not three, the first, the middle one and the last."""
    if count < 7:
        return (0, (count - 1) // 2, count - 1)
    return (1, count // 2 - 1, count - 4)


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

    def parts(self, fc: nn.Linear, unknown: Tensor | None = None) -> FusionParts:
        """For the compiled engine, behind this fusion of features."""
        return FusionParts(
            fc=fc, norm=self.hidden_norm, beside=self.input_layernorm, unknown=unknown
        )


class FusedNetwork(Network):
    """Fusion, layers (those of subclasses), norm and head."""

    d2t: Tensor
    """[Vd] int64: a draft id's distance to the target's id."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        size = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self._add_layers(config)  # in the order in which first weights are drawn
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, size, bias=False)
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))

    @abc.abstractmethod
    def _add_layers(self, config: LlamaConfig) -> None:
        """Make the layers."""

    @property
    def target_ids(self) -> Tensor:
        """[Vd]: the target's id of each draft id."""
        return target_ids(self.d2t)

    def own_logits(self, predict: Tensor, target: TargetView) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(predict))
        return logits


class FusedDrafter(FeatureDrafter):
    """Reads the three layers, and has a head of its own."""

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
        assert isinstance(network, FusedNetwork)
        if not self.config.source:
            with torch.no_grad():
                network.lm_head.weight.copy_(self.target.head_weight()[network.target_ids])

    @classmethod
    def signals_of(cls, config: Any) -> Signals:
        return Signals(layers=fused_layers(int(config.num_hidden_layers)))

    def _signal_width(self) -> int:
        return 3 * super()._signal_width()
