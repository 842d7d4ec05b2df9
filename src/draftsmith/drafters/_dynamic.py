"""Growing a draft tree that follows what the draft model says (EAGLE-2, arXiv 2406.16858).

A path's score is the sum of log q along it. At every depth the `width` best beams live on and each
gets `width` children; all children, not only the beams among them, go to a pool. The `keep` best of
the pool are proposed:

    depth 1    a b        pool   a b | c d e f         width 2, keep 4: the best four of the six
    depth 2    a: c d            0 1   2 3 4 5         scores never rise along a path and of equals
               b: e f                                  the earlier wins, so parents are kept, too

The choice depends on the draft model alone, never on the verifier's noise: opaque, and exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.drafters._reader import Reader
from draftsmith.types import PADDING, ROOT, DraftTree, Proposal, TreeShape


def grow_dynamic(reader: Reader, shape: TreeShape) -> DraftTree:
    """The best `shape.keep` nodes, found where the reader's logits are."""
    assert shape.keep is not None
    width = shape.widths[0]
    logits_BV = reader.root()
    score_BP, token_BP = _best(logits_BV[:, None], width)
    score_BP, token_BP = score_BP[:, 0], token_BP[:, 0]
    parent_BP = torch.full_like(token_BP, ROOT)
    fed_BP = torch.full_like(token_BP, -1)
    beam_BF = torch.arange(token_BP.shape[1], device=token_BP.device).expand_as(token_BP)
    above_BF = torch.zeros_like(beam_BF)
    see_BFC = torch.zeros((*beam_BF.shape, 0), dtype=torch.bool, device=token_BP.device)
    fed = 0
    for width in shape.widths[1:]:
        count = beam_BF.shape[1]
        itself = torch.eye(count, dtype=torch.bool, device=see_BFC.device)
        see_BFC = torch.cat([see_BFC, itself.expand(len(see_BFC), -1, -1)], dim=2)
        numbers_F = torch.arange(fed, fed + count, device=fed_BP.device)
        fed_BP = fed_BP.scatter(1, beam_BF, numbers_F.expand_as(beam_BF))
        fed += count
        logits_BFV = reader.level(token_BP.gather(1, beam_BF), see_BFC, above_BF)
        log_q_BFK, child_BFK = _best(logits_BFV, width)
        child_score = (score_BP.gather(1, beam_BF)[..., None] + log_q_BFK).flatten(1)
        start = token_BP.shape[1]
        token_BP = torch.cat([token_BP, child_BFK.flatten(1)], dim=1)
        score_BP = torch.cat([score_BP, child_score], dim=1)
        parents = beam_BF[..., None].expand_as(child_BFK).flatten(1)
        parent_BP = torch.cat([parent_BP, parents], dim=1)
        fed_BP = torch.cat([fed_BP, torch.full_like(parents, -1)], dim=1)
        chosen_BF = _first(child_score, width)
        above_BF = chosen_BF // child_BFK.shape[2]
        beam_BF = start + chosen_BF
        see_BFC = see_BFC.gather(1, above_BF[..., None].expand(-1, -1, see_BFC.shape[2]))
    kept_BN = _first(score_BP, min(shape.keep, score_BP.shape[1])).sort(dim=1).values
    parent_BN = parent_BP.gather(1, kept_BN)
    place_BN = torch.searchsorted(kept_BN, parent_BN.clamp(min=0))
    parent_BN = torch.where(parent_BN == ROOT, ROOT, place_BN)
    # a draft model with fewer tokens than the target may have run out of them
    impossible = score_BP.gather(1, kept_BN) == -torch.inf
    parent_BN = parent_BN.masked_fill(impossible, PADDING)
    return DraftTree(
        tokens_BN=token_BP.gather(1, kept_BN),
        parents_BN=parent_BN,
        proposal=Proposal.OPAQUE,
        fed_BN=fed_BP.gather(1, kept_BN),
    )


def _best(logits_BFV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(log q, tokens) [B, F, count] of the most probable tokens."""
    wide = logits_BFV if logits_BFV.dtype == torch.float64 else logits_BFV.float()
    top, tokens = wide.topk(min(count, wide.shape[-1]), dim=-1)
    return top - wide.logsumexp(-1, keepdim=True), tokens


def _first(score_BP: Tensor, count: int) -> Tensor:
    """[B, count] places of the largest, equal ones in order."""
    return score_BP.sort(dim=1, descending=True, stable=True).indices[:, :count]
