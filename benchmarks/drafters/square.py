"""GRIFFIN's training step as it is published, to compare ours with: every forward reads all feature
sets again and writes one T x T matrix of scores for each; its gradient is taken at once.

Its masks are not the released ones but those of decoding, so that it computes what our step does.
In natural coordinates (see `draftsmith.drafters.hidden.unroll`), step j:

    query t, key s      set 0: s <= t - j        set i > 0: s = t - j + i        else -inf
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from draftsmith.core.types import DraftPrediction, TrajectoryBatch
from draftsmith.drafters.griffin import Griffin
from draftsmith.drafters.hidden.drafter import AlignedDrafter
from draftsmith.drafters.hidden.network import DraftLayer, FusionNetwork
from draftsmith.drafters.hidden.unroll import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Sets(Rollout):
    """Instead of keys: what the forwards so far read."""

    features: tuple[Tensor, ...] = ()


class _SquareForward(AlignedDrafter):
    """One forward, without GRIFFIN's mask over chains."""

    def forward(
        self, batch: TrajectoryBatch, carry: Rollout | None
    ) -> tuple[DraftPrediction, Rollout]:
        now = Sets(step=0, feature_BTH=self._begin(batch).feature_BTH) if carry is None else carry
        network, documents_BT = self.network, batch.documents_BT
        assert isinstance(now, Sets) and network is not None and documents_BT is not None
        positions_BT = batch.positions_BT
        earlier = [
            self._keys_and_values(batch, feature_BTH, positions_BT, step)
            for step, feature_BTH in enumerate(now.features)
        ]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = zip(*earlier, (k, v), strict=True)
            return attend_square(q, keys, values, documents_BT)

        predict, regress = network(
            self.target.embed(batch.tokens_ahead(1 + now.step)),
            now.feature_BTH,
            positions_BT + now.step,
            attend,
        )
        prediction = DraftPrediction(
            hidden_BTH=predict,
            mask_BT=torch.ones_like(batch.tokens_BT, dtype=torch.bool),
            ahead=2 + now.step,
            feature_BTH=regress,
        )
        after = Sets(
            step=now.step + 1,
            feature_BTH=regress.detach(),
            features=(*now.features, now.feature_BTH),
        )
        return prediction, after

    def _keys_and_values(
        self, batch: TrajectoryBatch, feature_BTH: Tensor, positions_BT: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        network = self.network
        assert isinstance(network, FusionNetwork)
        (layer,) = network.layers
        assert isinstance(layer, DraftLayer)
        attention = layer.self_attn
        mixed = network.fc(self.target.embed(batch.tokens_ahead(1 + step)), feature_BTH)
        k, v = (
            project(mixed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for project in (attention.k_proj, attention.v_proj)
        )
        _, k = apply_rotary_pos_emb(k, k, *network.rotary(positions_BT + step, mixed))
        return k, v


class SquareGriffin(Griffin, _SquareForward):
    """The published step; in all else GRIFFIN (whose forward calls the one above)."""

    backward = "each"


def attend_square(
    query_BHTD: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], documents_BT: Tensor
) -> Tensor:
    """All scores of all sets, combined by masks, and one softmax; [B, H, T, D]."""
    step, length = len(keys) - 1, query_BHTD.shape[2]

    def natural(x_BHTD: Tensor, by: int) -> Tensor:
        return F.pad(x_BHTD, (0, 0, by, 0))[:, :, :length]

    key_NBHTD, value_NBHTD = (
        torch.stack([natural(one, by) for by, one in enumerate(some)]) for some in (keys, values)
    )
    index = torch.arange(length)
    behind_TT = index[:, None] - index
    seen = [behind_TT >= step, *(behind_TT == step - by for by in range(1, step + 1))]
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    seen_NBHTT = (torch.stack(seen)[:, None] & same_BTT)[:, :, None]

    scale = query_BHTD.shape[-1] ** -0.5
    scores_NBHTT = natural(query_BHTD, step) @ key_NBHTD.transpose(-1, -2) * scale
    scores_BHTT = (scores_NBHTT * seen_NBHTT).sum(0).masked_fill(~seen_NBHTT.any(0), -torch.inf)
    weights_BHTT = scores_BHTT.float().softmax(-1).to(value_NBHTD.dtype)
    out_BHTD = (weights_BHTT * seen_NBHTT @ value_NBHTD).sum(0)
    return F.pad(out_BHTD[:, :, step:], (0, 0, 0, step))
