"""`fspad`: the sampled token selects what it needs of a feature (FSPAD, arXiv 2408.15562).

    h = W [e ; f] + b,   x = h + W_d (silu(W_g e) * W_u rms(h))          feature sampling
    [predict | regress] = [r | r] + mlp(rms(r)),  r = x + attention(x)   partial alignment

The gate sees the token's embedding alone. One half of the output predicts the token, the other is
aligned with the target's feature and goes on to the next draft.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.drafters.hidden.drafter import FeatureDrafter
from draftsmith.drafters.hidden.network import (
    ConcatLinear,
    FusionNetwork,
    FusionParts,
    RMSNorm,
    SwiGLU,
)


class FeatureSampling(nn.Module):
    """Fuses token and feature; it replaces EAGLE's `fc`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = ConcatLinear(2 * hidden, hidden)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = SwiGLU(hidden, config.intermediate_size, hidden)

    def parts(self) -> FusionParts:
        mlp = self.mlp
        return FusionParts(
            fc=self.fc,
            norm=self.post_attention_layernorm,
            gate=mlp.gate_proj,
            up=mlp.up_proj,
            down=mlp.down_proj,
        )

    def forward(self, embedded: Tensor, feature: Tensor) -> Tensor:
        mixed: Tensor = self.fc(embedded, feature)
        gate = F.silu(self.mlp.gate_proj(embedded))
        chosen: Tensor = gate * self.mlp.up_proj(self.post_attention_layernorm(mixed))
        return mixed + self.mlp.down_proj(chosen)


class FspadNetwork(FusionNetwork):
    """Feature sampling, then a layer with two outputs."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, FeatureSampling(config), halves=2)


class Fspad(FeatureDrafter):
    """FSPAD; trained in one step, as EAGLE."""

    network_class = FspadNetwork


DRAFTER = Fspad
