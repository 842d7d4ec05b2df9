"""`hass`: EAGLE's network, trained on its own outputs (HASS, arXiv 2408.15766).

    step 0     features of the target                             as EAGLE
    step j     states of step j - 1, seen from the same place     what decoding will see

Harmonised context alignment unrolls the drafter (`hidden/unroll.py`, `AlignedDrafter`). Harmonised
objective distillation is the top-10 term of the objective. Weights load and decode as EAGLE's.
"""

from __future__ import annotations

from draftsmith.drafters.base import LossWeights
from draftsmith.drafters.eagle import EagleNetwork
from draftsmith.drafters.hidden.drafter import AlignedDrafter


class Hass(AlignedDrafter):
    """EAGLE's drafter with aligned training."""

    network_class = EagleNetwork
    loss_weights = LossWeights(token=0.1, feature=1.0, top=1.0)


DRAFTER = Hass
