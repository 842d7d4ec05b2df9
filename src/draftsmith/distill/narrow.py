"""Learning over a drafter's own, smaller vocabulary (EAGLE-3, arXiv 2503.01840).

    target's ids      0  1  2  3  4  5  6  7
    drafter's ids     .  0  .  1  .  2  .  .      ids_D = [1, 3, 5]
    law of a place    p(1), p(3), p(5), divided by their sum
    counts            where the target's most probable token is one of these; where the place learns
                      its token (no law, or a hard objective), where that one is

D tokens of the drafter, V of the target, K kept tokens of a law, N places, B rows, T time.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.distill.places import CELLS, preferred
from draftsmith.types import DraftPrediction, FullLaws, TeacherLaws, TopLaws, TrajectoryBatch


def narrowed(
    prediction: DraftPrediction, batch: TrajectoryBatch, *, hard: bool
) -> tuple[DraftPrediction, TrajectoryBatch]:
    """Both over the drafter's ids; nothing changes for a drafter that knows all tokens."""
    narrow = prediction.narrow
    if narrow is None:
        return prediction, batch
    ids_D = narrow.ids_D
    size = max(int(batch.tokens_BT.max()), int(ids_D.max())) + 1
    if isinstance(batch.laws, TopLaws) and len(batch.laws):
        size = max(size, int(batch.laws.ids_NK.max()) + 1)
    own_V = torch.full((size,), -1, device=ids_D.device)
    own_V[ids_D] = torch.arange(len(ids_D), device=ids_D.device)
    known_BT = own_V[batch.tokens_ahead(prediction.ahead)] >= 0
    row_BT = batch.law_ahead(prediction.ahead)
    if batch.laws is not None and len(batch.laws) and not hard:
        best_N = _known_best(batch.laws, ids_D)
        known_BT = torch.where(row_BT >= 0, best_N[row_BT.clamp(min=0)], known_BT)
    inside = replace(
        batch,
        tokens_BT=own_V[batch.tokens_BT].clamp(min=0),
        laws=None if batch.laws is None else _cut(batch.laws, ids_D, own_V),
    )
    return replace(prediction, mask_BT=prediction.mask_BT.bool() & known_BT), inside


def _known_best(laws: TeacherLaws, ids_D: Tensor) -> Tensor:
    """[N]: whether the drafter knows the target's most probable token."""
    if isinstance(laws, TopLaws):
        return torch.isin(preferred(laws), ids_D)
    with torch.no_grad():
        vocab = laws.head(laws.hidden_NH[:1]).shape[-1]
        parts = torch.arange(len(laws), device=laws.hidden_NH.device).split(max(1, CELLS // vocab))
        return torch.cat([torch.isin(preferred(laws.take(part)), ids_D) for part in parts])


def _cut(laws: TeacherLaws, ids_D: Tensor, own_V: Tensor) -> TeacherLaws:
    """Laws over the drafter's tokens. What a cut law does not say is taken to lie inside, unless it
    says all that is inside."""
    if isinstance(laws, FullLaws):
        return replace(laws, head=lambda hidden: laws.head(hidden)[..., ids_D])
    used_NK = laws.log_p_NK > -math.inf
    own_NK = own_V[laws.ids_NK.long()]
    outside_NK = used_NK & (own_NK < 0)
    kept_NK = used_NK & ~outside_NK
    p_NK = laws.log_p_NK.exp()
    said_N1 = kept_NK.sum(-1, keepdim=True) == len(ids_D)
    inside_N1, outside_N1 = ((p_NK * one).sum(-1, keepdim=True) for one in (kept_NK, outside_NK))
    left_N1 = inside_N1.where(said_N1, 1 - outside_N1).clamp(min=torch.finfo(p_NK.dtype).tiny)
    return TopLaws(
        ids_NK=own_NK.where(kept_NK, 0),
        log_p_NK=(laws.log_p_NK - left_N1.log()).masked_fill(~kept_NK, -math.inf).clamp(max=0.0),
    )
