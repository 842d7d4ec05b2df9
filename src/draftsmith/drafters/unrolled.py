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

from draftsmith.drafters.base import STRUCTURE, LossWeights
from draftsmith.drafters.eagle import EagleNetwork
from draftsmith.drafters.fspad import FspadNetwork
from draftsmith.drafters.hidden.drafter import ChainDrafter
from draftsmith.drafters.hidden.network import Network

NETWORKS: dict[str, type[Network]] = {"gated": FspadNetwork, "plain": EagleNetwork}


class Unrolled(ChainDrafter):
    """FSPAD's network with EAGLE-3's way of training: the graph of all forwards is kept."""

    @dataclass(frozen=True, kw_only=True)
    class Config(ChainDrafter.Config):
        fusion: Literal["gated", "plain"] = field(default="gated", metadata=STRUCTURE)
        """Training: FSPAD's fusion and two outputs; or EAGLE's, cheaper to draft with."""

    config: Config
    loss_weights = LossWeights(token=1.0, feature=0.3)

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.network_class = NETWORKS[self.config.fusion]


DRAFTER = Unrolled
