"""A truncated teacher beside a student: laws over cells, for any divergence.

N places, C cells, K kept tokens, V vocabulary. A cell is a vocabulary entry, or all that lies
outside the tokens that a truncated teacher kept:

    whole law      v0  v1  v2  v3  v4  v5
    kept, K = 2        v1          v4          true p, not renormalised
    bucket             v1          v4  rest    rest = 1 - kept, in p and in q: V is now K + 1 cells
    renormalise        v1          v4  rest    p of the kept sums to 1; p(rest) = 0, q(rest) = rho
    floor          v0  v1  v2  v3  v4  v5      as renormalise, each raised to the floor, sum 1

Sources: DistillBeam (OpenReview Kf5I0OrZrr, eq. 9: renormalised); bucket and floor are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftsmith.distill.divergence import LOWEST, Cells, Divergence, whole_cells
from draftsmith.errors import InputError
from draftsmith.types import TopLaws

Tail = Literal["bucket", "renormalise", "floor"]
"""What a truncated teacher is taken to say outside the tokens it kept."""

REST = 2.0**-23
"""Least teacher mass outside the kept tokens: laws come in float32, less would be rounding."""


def truncated_cells(
    laws: TopLaws,
    logits_NV: Tensor,
    *,
    tail: Tail,
    divergence: Divergence,
    temperature: float = 1.0,
    floor: float = 1e-8,
) -> Cells:
    """A truncated teacher, tempered, beside the student.

    The kept tokens at another temperature are exact up to a factor, so that `renormalise` and
    `floor` need nothing more. The mass outside is known at temperature 1 only: InputError for a
    `bucket` at another one. Where nothing lies outside (K = V) all three are the whole law.
    """
    whole = laws.ids_NK.shape[1] >= logits_NV.shape[1]
    if tail == "bucket" and temperature != 1 and not whole:
        raise InputError(
            f"--tail bucket needs temperature 1, not {temperature:g}: a truncated teacher's mass "
            "outside its kept tokens is known at temperature 1 only; use --tail renormalise or "
            "floor, or whole laws"
        )
    log_p_NK = laws.log_p_NK.to(logits_NV.dtype) / temperature
    used_NK = log_p_NK > -math.inf
    if log_p_NK.shape == logits_NV.shape and bool(used_NK.all()):
        # In the order of the vocabulary the student's side needs no gather, the dear part.
        nothing_NV = torch.full_like(log_p_NK, -math.inf)
        log_p_NV = nothing_NV.scatter_(1, laws.ids_NK.long(), log_p_NK)
        return whole_cells(torch.log_softmax(log_p_NV, dim=-1), logits_NV)
    best_N1 = log_p_NK.argmax(-1, keepdim=True)
    kept = _Kept(
        # An empty cell has id 0, which may be a token that was kept or not: point it elsewhere.
        ids_NK=torch.where(used_NK, laws.ids_NK, laws.ids_NK.gather(-1, best_N1)).long(),
        log_p_NK=log_p_NK,
        used_NK=used_NK,
        all_N=used_NK.sum(-1) >= logits_NV.shape[1],
    )
    # of a whole law nothing is outside; a tempered one is only to be normalised again
    treatment = "renormalise" if whole and temperature != 1 else tail
    return TAILS[treatment](kept, logits_NV, divergence, floor)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """Which tokens the teacher kept, at each place."""

    ids_NK: Tensor
    """In empty cells: the id of the most probable one again."""
    log_p_NK: Tensor
    """Tempered, not renormalised; -inf in empty cells."""
    used_NK: Tensor
    all_N: Tensor
    """True where every vocabulary entry was kept: nothing lies outside."""


def _bucket(kept: _Kept, logits_NV: Tensor, divergence: Divergence, floor: float) -> Cells:
    rest_N = (1 - kept.log_p_NK.exp().sum(-1)).clamp(min=REST).log()
    return _with_rest(kept, kept.log_p_NK, rest_N.masked_fill(kept.all_N, -math.inf), logits_NV)


def _renormalise(kept: _Kept, logits_NV: Tensor, divergence: Divergence, floor: float) -> Cells:
    if divergence.pools_cells:
        return _spread(kept, logits_NV, 0.0)
    log_p_NK = torch.log_softmax(kept.log_p_NK, dim=-1)
    if divergence.on_support:
        log_q_NK = torch.log_softmax(_kept_logits(kept, logits_NV), dim=-1)
        return Cells(log_p_NC=log_p_NK, log_q_NC=log_q_NK, letters_NC=kept.used_NK)
    return _with_rest(kept, log_p_NK, torch.full_like(log_p_NK[:, 0], -math.inf), logits_NV)


def _floor(kept: _Kept, logits_NV: Tensor, divergence: Divergence, floor: float) -> Cells:
    if floor * logits_NV.shape[1] >= 1:
        raise InputError(
            f"floor {floor:g} times {logits_NV.shape[1]} vocabulary entries is more probability "
            "than the teacher's law has; choose a smaller floor"
        )
    return _spread(kept, logits_NV, floor)


TAILS: dict[Tail, Callable[[_Kept, Tensor, Divergence, float], Cells]] = {
    "bucket": _bucket,
    "renormalise": _renormalise,
    "floor": _floor,
}


def _with_rest(kept: _Kept, log_p_NK: Tensor, rest_N: Tensor, logits_NV: Tensor) -> Cells:
    """K + 1 cells; the last is all that was not kept. One pass over the vocabulary:

    logits      a  b  c  d  e        kept: b d
    outside     a  .  c  .  e   ->   their log-sum-exp: q(rest) keeps its digits however small
    """
    inside_NK = _kept_logits(kept, logits_NV)
    inside_N = _log_sum(inside_NK.clamp(min=LOWEST))
    outside_N = _log_sum(logits_NV.scatter(-1, kept.ids_NK, LOWEST))
    log_q_NC = torch.cat([inside_NK, outside_N[:, None]], dim=-1)
    log_q_NC = log_q_NC - torch.logaddexp(inside_N, outside_N)[:, None]
    return Cells(
        log_p_NC=torch.cat([log_p_NK, rest_N[:, None]], dim=-1),
        log_q_NC=log_q_NC,
        letters_NC=torch.cat([kept.used_NK, ~kept.all_N[:, None]], dim=-1),
    )


def _spread(kept: _Kept, logits_NV: Tensor, floor: float) -> Cells:
    """V cells; no entry of p lies below `floor` (unless everything was kept), and p sums to 1."""
    with torch.no_grad():
        lowest = math.log(floor) if floor else -math.inf
        lowest_N1 = kept.log_p_NK.new_full((len(kept.ids_NK), 1), lowest)
        lowest_N1 = lowest_N1.masked_fill(kept.all_N[:, None], -math.inf)
        log_p_NK = torch.log_softmax(kept.log_p_NK, dim=-1)
        # Empty cells point at the most probable token: they must carry its probability.
        log_p_NK = torch.where(kept.used_NK, log_p_NK, log_p_NK.amax(-1, keepdim=True))
        log_p_NV = lowest_N1.expand_as(logits_NV).contiguous()
        log_p_NV = log_p_NV.scatter_(-1, kept.ids_NK, torch.maximum(log_p_NK, lowest_N1))
        log_p_NV = torch.log_softmax(log_p_NV, dim=-1)
    return whole_cells(log_p_NV, logits_NV)


def _kept_logits(kept: _Kept, logits_NV: Tensor) -> Tensor:
    return logits_NV.gather(-1, kept.ids_NK).masked_fill(~kept.used_NK, -math.inf)


def _log_sum(nats_NC: Tensor) -> Tensor:
    """Log of the sum of exp; -inf, without a gradient, where all of them are `LOWEST`."""
    total_N = nats_NC.logsumexp(-1)
    return total_N.masked_fill(total_N < LOWEST / 2, -math.inf)
