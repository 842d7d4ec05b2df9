"""`eagle`: the drafter of EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858).

    pair (f_t, x_{t+1})  ->  fc [e(x_{t+1}) ; f_t]  ->  one decoder layer  ->  g like f_{t+1}

Both have this network and this training; they differ in their trees, which are options: EAGLE-1
draws a static tree without replacement, EAGLE-2 grows one from the drafter's own confidence.
"""

from __future__ import annotations

from transformers import LlamaConfig

from draftsmith.drafters.hidden.drafter import FeatureDrafter
from draftsmith.drafters.hidden.network import ConcatLinear, FusionNetwork


class EagleNetwork(FusionNetwork):
    """A linear layer of token and feature, then a layer without norm before attention."""

    def __init__(self, config: LlamaConfig) -> None:
        hidden, bias = config.hidden_size, getattr(config, "bias", True)
        super().__init__(config, ConcatLinear(2 * hidden, hidden, bias=bias))


class Eagle(FeatureDrafter):
    """EAGLE-1 and EAGLE-2."""

    network_class = EagleNetwork


DRAFTER = Eagle
