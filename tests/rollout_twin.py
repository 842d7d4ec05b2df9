"""The attention of rolled-out chains, written out: the readable twin of `hidden.unroll`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attend_rollout_reference(
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    documents_BT: Tensor | None,
    *,
    scale: float,
) -> Tensor:
    """All scores at once: of the text's columns, then of the place's own drafts."""
    scores = (query_BHTD @ key_BHTD.mT) * scale
    seen = torch.ones_like(scores, dtype=torch.bool).tril()
    if documents_BT is not None:
        seen &= (documents_BT[:, :, None] == documents_BT[:, None, :])[:, None]
    own = [(query_BHTD * key).sum(-1, keepdim=True) * scale for key in own_keys]
    weights = torch.cat([scores.masked_fill(~seen, -torch.inf), *own], dim=-1).softmax(-1)
    length = value_BHTD.shape[2]
    out = weights[..., :length] @ value_BHTD
    for j, value in enumerate(own_values):
        out = out + weights[..., length + j, None] * value
    return out
