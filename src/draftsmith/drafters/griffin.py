"""`griffin`: token-aligned training, token-guided fusion, a head of its own (GRIFFIN, arXiv
2502.11018; network and mask as in the released code).

    h = W [e ; f] + b,   z = rms_A(h)
    x = h + W_down silu(W_up [rms_B(z) ; rms_B(e)])                      token-guided fusion
    [predict | regress] = [r | r] + mlp(rms(r)),  r = x + attention(x)   token-enhanced head

Training rolls chains out as HASS does, but a chain counts only while its drafts would have been
among the first: step j + 1 counts where the text's token was in the top 3 at every step before.

    chain from t     step 0: x_{t+2} in top 3?    step 1: x_{t+3} in top 3?    ...
    decode           counts at t    while the chain from t itself is alive
    official         counts at t    while the chain from t + 1 is: the released code's mask, which
                                    stands one place to the right of what decoding does
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.drafters._feature_drafter import FeatureDrafter
from draftsmith.drafters._features import Network
from draftsmith.drafters._layers import Attend, DraftLayer, RMSNorm, Rotary
from draftsmith.drafters._rollout import Rollout
from draftsmith.types import DraftPrediction, TrajectoryBatch

_PLACES = 1024
"""Whose logits exist at a time."""


class Guidance(nn.Module):
    """The second stage of the fusion; one norm serves both branches."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.up_proj = nn.Linear(2 * hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, mixed: Tensor, embedded: Tensor) -> Tensor:
        both = torch.cat([self.input_layernorm(mixed), self.input_layernorm(embedded)], dim=-1)
        out: Tensor = self.down_proj(F.silu(self.up_proj(both)))
        return out


class TokenGuidedFusion(nn.Module):
    """In place of EAGLE's `fc`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = Guidance(config)

    def forward(self, embedded: Tensor, feature: Tensor) -> Tensor:
        mixed: Tensor = self.fc(torch.cat([embedded, feature], dim=-1))
        guided: Tensor = self.mlp(self.post_attention_layernorm(mixed), embedded)
        return mixed + guided


class GriffinNetwork(Network):
    """Token-guided fusion, then a layer with two outputs."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.fc = TokenGuidedFusion(config)
        self.layers = nn.ModuleList([DraftLayer(config, halves=2)])
        self.rotary = Rotary(config)

    def forward(
        self, embedded_BTH: Tensor, feature_BTS: Tensor, positions_BT: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        mixed = self.fc(embedded_BTH, feature_BTS)
        out: tuple[Tensor, Tensor] = self.layers[0](mixed, self.rotary(positions_BT, mixed), attend)
        return out


class Griffin(FeatureDrafter):
    """GRIFFIN. The published schedule trains with 1, 2, 3, .. forwards, each from the last."""

    @dataclass(frozen=True, kw_only=True)
    class Config(FeatureDrafter.Config):
        num_forwards: int = 3
        """Training: drafts in a row that are learnt."""
        mask_top: int = 3
        """Training: a chain lives while the text's token is among so many of its best."""
        mask_shift: Literal["decode", "official"] = "decode"
        """Training: which chain's life counts at a place (see the module)."""

    config: Config
    network_class = GriffinNetwork
    backward = "each"

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.num_steps = self.config.num_forwards

    def settle(
        self, prediction: DraftPrediction, batch: TrajectoryBatch, after: Rollout
    ) -> Rollout:
        """Chains whose draft at this step would not have been near the top are over."""
        hits_BT = self._hits(prediction, batch.tokens_ahead(prediction.ahead))
        survived = hits_BT if after.survived_BT is None else after.survived_BT & hits_BT
        counts = survived
        if self.config.mask_shift == "official":
            counts = torch.zeros_like(survived)
            counts[:, :-1] = survived[:, 1:]
        return replace(after, survived_BT=survived, alive_BT=counts)

    @torch.no_grad()
    def _hits(self, prediction: DraftPrediction, wanted_BT: Tensor) -> Tensor:
        """[B, T]: the wanted token is among the best."""
        head = self.head()
        hidden_NH, wanted_N = prediction.hidden_BTH.flatten(0, 1), wanted_BT.flatten()
        hits = []
        for hidden, wanted in zip(hidden_NH.split(_PLACES), wanted_N.split(_PLACES), strict=True):
            logits = head(hidden)
            own = logits.gather(1, wanted[:, None])
            hits.append((logits > own).sum(1) < self.config.mask_top)
        return torch.cat(hits).view_as(wanted_BT)


DRAFTER = Griffin
