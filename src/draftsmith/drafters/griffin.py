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

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.core.types import DraftPrediction, TrajectoryBatch
from draftsmith.drafters.base import STRUCTURE, TRAINING, LossWeights, TargetView, at_least
from draftsmith.drafters.hidden.drafter import AlignedDrafter
from draftsmith.drafters.hidden.network import ConcatLinear, FusionNetwork, FusionParts, RMSNorm
from draftsmith.drafters.hidden.unroll import Rollout

_PLACES = 512
"""Whose logits exist at a time."""


class Guidance(nn.Module):
    """The second stage of the fusion; one norm serves both branches."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.up_proj = ConcatLinear(2 * hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, mixed: Tensor, embedded: Tensor) -> Tensor:
        inner = self.up_proj(self.input_layernorm(mixed), self.input_layernorm(embedded))
        out: Tensor = self.down_proj(F.silu(inner))
        return out


class TokenGuidedFusion(nn.Module):
    """Fuses token and feature; it replaces EAGLE's `fc`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = ConcatLinear(2 * hidden, hidden)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = Guidance(config)

    def parts(self) -> FusionParts:
        return FusionParts(
            fc=self.fc,
            norm=self.post_attention_layernorm,
            both=self.mlp.input_layernorm,
            up=self.mlp.up_proj,
            down=self.mlp.down_proj,
        )

    def forward(self, embedded: Tensor, feature: Tensor) -> Tensor:
        mixed: Tensor = self.fc(embedded, feature)
        guided: Tensor = self.mlp(self.post_attention_layernorm(mixed), embedded)
        return mixed + guided


class GriffinNetwork(FusionNetwork):
    """Token-guided fusion, then a layer with two outputs; without them it is EAGLE's."""

    def __init__(self, config: LlamaConfig) -> None:
        fusion: nn.Module = TokenGuidedFusion(config)
        if not getattr(config, "guided_fusion", True):
            fusion = ConcatLinear(2 * config.hidden_size, config.hidden_size)
        super().__init__(config, fusion, halves=2 if getattr(config, "enhanced_head", True) else 1)


class Griffin(AlignedDrafter):
    """GRIFFIN. The published schedule trains with 1, 2, 3, .. forwards, each from the last."""

    @dataclass(frozen=True, kw_only=True)
    class Config(AlignedDrafter.Config):
        mask_top: int = field(default=3, metadata=TRAINING)
        """Training: a chain lives while the text's token is among so many of its best; 0: all
        live."""
        mask_shift: Literal["decode", "official"] = field(default="decode", metadata=TRAINING)
        """Training: which chain's life counts at a place (see the module)."""
        guided_fusion: bool = field(default=True, metadata=STRUCTURE)
        """Training: fuse as above; or as EAGLE does, to see what it brings."""
        enhanced_head: bool = field(default=True, metadata=STRUCTURE)
        """Training: halves to predict from and to go on with; or one state for both."""
        feeds: Literal["text", "draft"] = field(default="text", metadata=TRAINING)
        """Training: later steps read the text, or the drafter's own best tokens (which the paper
        finds harmful)."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(0, mask_top=self.mask_top)

    config: Config
    network_class = GriffinNetwork
    loss_weights = LossWeights(token=0.1, feature=1.0, top=0.5)
    official_from = 2
    """Released training with one forward is another file, with ordinary attention."""

    def network_config(self, target: TargetView) -> LlamaConfig:
        layer = super().network_config(target)
        layer.guided_fusion = self.config.guided_fusion
        layer.enhanced_head = self.config.enhanced_head
        return layer

    def forward(
        self, batch: TrajectoryBatch, carry: Rollout | None
    ) -> tuple[DraftPrediction, Rollout]:
        """One step, counted only for chains whose drafts so far were all near the top."""
        prediction, after = super().forward(batch, carry)
        if carry is not None and carry.survived_BT is not None:
            prediction = replace(prediction, mask_BT=self._counting(carry.survived_BT))
        if not self.training or after.step >= self.num_steps:  # no step will ask who survived
            return prediction, after
        survived_BT, best_BT = self._hits(prediction, batch.tokens_ahead(prediction.ahead))
        if carry is not None and carry.survived_BT is not None:
            survived_BT = survived_BT & carry.survived_BT
        if self.config.feeds == "draft":
            after = replace(after, fed_BT=best_BT)
        return prediction, replace(after, survived_BT=survived_BT)

    def _counting(self, survived_BT: Tensor) -> Tensor:
        """[B, T]: where a step counts, given the chains that live (see the module)."""
        if self.config.mask_shift == "decode":
            return survived_BT
        counts = torch.zeros_like(survived_BT)
        counts[:, :-1] = survived_BT[:, 1:]
        return counts

    @torch.no_grad()
    def _hits(self, prediction: DraftPrediction, wanted_BT: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, T] each: the wanted token is among the best; the best token, where it is fed."""
        top, narrow = self.config.mask_top, prediction.narrow
        head, ids_D = (self.head(), None) if narrow is None else (narrow.head, narrow.ids_D)
        hidden_NH, wanted_N = prediction.hidden_BTH.flatten(0, 1), wanted_BT.flatten()
        hits, best = [], []
        for hidden, wanted in zip(hidden_NH.split(_PLACES), wanted_N.split(_PLACES), strict=True):
            logits = head(hidden)
            column, known = wanted, torch.ones_like(wanted, dtype=torch.bool)
            if ids_D is not None:
                column = torch.searchsorted(ids_D, wanted).clamp(max=len(ids_D) - 1)
                known = ids_D[column] == wanted
            # no fewer than `top` are greater where the last of the best is greater
            last = logits.topk(min(top, logits.shape[1])).values[:, -1] if top else -torch.inf
            hits.append(known & (logits.gather(1, column[:, None])[:, 0] >= last) | (top == 0))
            if self.config.feeds == "draft":
                best.append(logits.argmax(1) if ids_D is None else ids_D[logits.argmax(1)])
        return torch.cat(hits).view_as(wanted_BT), torch.cat(best).view_as(
            wanted_BT
        ) if best else None


DRAFTER = Griffin
