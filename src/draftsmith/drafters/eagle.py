"""`eagle`: the drafter of EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858).

    pair (f_t, x_{t+1})  ->  fc [e(x_{t+1}) ; f_t]  ->  one decoder layer  ->  g like f_{t+1}

Both have this network and this training; they differ in their trees, which are options: EAGLE-1
draws a static tree without replacement, EAGLE-2 grows one from the drafter's own confidence.
"""

from __future__ import annotations

from transformers import LlamaConfig

from draftsmith.core.types import TreeShape
from draftsmith.drafters.hidden.drafter import FeatureDrafter
from draftsmith.drafters.hidden.network import ConcatLinear, FusionNetwork


class EagleNetwork(FusionNetwork):
    """A linear layer of token and feature, then a layer without norm before attention."""

    def __init__(self, config: LlamaConfig) -> None:
        hidden, bias = config.hidden_size, getattr(config, "bias", True)
        super().__init__(config, ConcatLinear(2 * hidden, hidden, bias=bias))


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
