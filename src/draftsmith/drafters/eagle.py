"""`eagle`: the drafter of EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858).

    pair (f_t, x_{t+1})  ->  fc [e(x_{t+1}) ; f_t]  ->  one decoder layer  ->  g like f_{t+1}

Both have this network and this training; they differ in their trees, which are options: EAGLE-1
draws a static tree without replacement, EAGLE-2 grows one from the drafter's own confidence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.drafters._feature_drafter import FeatureDrafter
from draftsmith.drafters._features import Network
from draftsmith.drafters._layers import Attend, DraftLayer, Rotary
from draftsmith.types import TreeShape


class EagleNetwork(Network):
    """Section 6.1 of the family's description: `fc`, then a layer without norm before attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=getattr(config, "bias", True))
        self.layers = nn.ModuleList([DraftLayer(config)])
        self.rotary = Rotary(config)

    def forward(
        self, embedded_BTH: Tensor, feature_BTS: Tensor, positions_BT: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        mixed = self.fc(torch.cat([embedded_BTH, feature_BTS], dim=-1))  # the token comes first
        out: tuple[Tensor, Tensor] = self.layers[0](mixed, self.rotary(positions_BT, mixed), attend)
        return out


STATIC = TreeShape(
    paths=tuple(
        tuple(int(rank) for rank in path)
        for path in (
            *("0", "1", "2", "3"),
            *("00", "01", "02", "10", "11", "20", "21", "30"),
            *("000", "001", "002", "010", "011", "020", "021", "100"),
            *("0000", "0001", "0002"),
            *("00000", "00001"),
        )
    )
)
"""EAGLE-1's tree of 25 nodes, five deep."""


class Eagle(FeatureDrafter):
    """EAGLE-1 and EAGLE-2."""

    network_class = EagleNetwork


DRAFTER = Eagle
