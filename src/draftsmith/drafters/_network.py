"""Networks of EAGLE and its descendants, which read pairs (see `_features.py`).

    token, feature  ->  fusion  ->  decoder layer  ->  state to predict from, state to go on with

How token and feature are fused is the drafter's own; most have the rest in common.
"""

from __future__ import annotations

import abc

from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.drafters._base import TargetView
from draftsmith.drafters._layers import Attend, DraftLayer, Rotary


class Network(nn.Module, abc.ABC):
    """What a descendant of EAGLE computes for a pair. `config`: its measures."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()

    @abc.abstractmethod
    def forward(
        self, embedded_BTH: Tensor, feature_BTS: Tensor, positions_BT: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """(states to predict from, states to go on with), [B, T, H] each."""

    def logits(self, predict: Tensor, target: TargetView) -> Tensor:
        """[.., V] over the target's vocabulary; most borrow its head."""
        return target.head(predict)


class FusionNetwork(Network):
    """A fusion and one layer; the attributes are named as in the released checkpoints."""

    def __init__(self, config: LlamaConfig, fusion: nn.Module, *, halves: int = 1) -> None:
        """`fusion(embedded, feature)` gives what the layer reads; `halves`: see `DraftLayer`."""
        super().__init__(config)
        self.fc = fusion
        self.layers = nn.ModuleList([DraftLayer(config, halves)])
        self.rotary = Rotary(config)

    def forward(
        self, embedded_BTH: Tensor, feature_BTS: Tensor, positions_BT: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        mixed = self.fc(embedded_BTH, feature_BTS)
        out: tuple[Tensor, Tensor] = self.layers[0](mixed, self.rotary(positions_BT, mixed), attend)
        return out
