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

from collections.abc import Iterator
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
        if self.config.mask_top:
            near_BT = self._near_top(prediction, batch.tokens_ahead(prediction.ahead))
            if carry is not None and carry.survived_BT is not None:
                near_BT = near_BT & carry.survived_BT
            after = replace(after, survived_BT=near_BT)
        if self.config.feeds == "draft":
            after = replace(after, fed_BT=self._best(prediction))
        return prediction, after

    def _counting(self, survived_BT: Tensor) -> Tensor:
        """[B, T]: where a step counts, given the chains that live (see the module)."""
        if self.config.mask_shift == "decode":
            return survived_BT
        counts = torch.zeros_like(survived_BT)
        counts[:, :-1] = survived_BT[:, 1:]
        return counts

    @torch.no_grad()
    def _near_top(self, prediction: DraftPrediction, wanted_BT: Tensor) -> Tensor:
        """[B, T]: the wanted token is one of the `mask_top` best."""
        narrow = prediction.narrow
        column_BT = wanted_BT if narrow is None else narrow.columns(wanted_BT)
        near = []
        for logits, column in zip(
            self._logits(prediction), column_BT.flatten().split(_PLACES), strict=True
        ):
            own = logits.gather(1, column.clamp(min=0)[:, None])[:, 0]
            # fewer than `mask_top` are greater where it is no less than the last of the best
            last = logits.topk(min(self.config.mask_top, logits.shape[1])).values[:, -1]
            near.append((own >= last) & (column >= 0))
        return torch.cat(near).view_as(wanted_BT)

    @torch.no_grad()
    def _best(self, prediction: DraftPrediction) -> Tensor:
        """[B, T]: the best token."""
        best_BT = torch.cat([logits.argmax(1) for logits in self._logits(prediction)])
        best_BT = best_BT.view(prediction.hidden_BTH.shape[:2])
        return best_BT if prediction.narrow is None else prediction.narrow.ids_D[best_BT]

    def _logits(self, prediction: DraftPrediction) -> Iterator[Tensor]:
        """Over the draft vocabulary, of some places at a time."""
        head = self.head() if prediction.narrow is None else prediction.narrow.head
        return map(head, prediction.hidden_BTH.flatten(0, 1).split(_PLACES))


DRAFTER = Griffin
