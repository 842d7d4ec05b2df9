"""Training on one's own outputs: the chains below all positions of a text, one step at a time.

In step j, place t stands for the (j+1)-th draft below position t (see `ops.rollout`):

    step      reads                                gives
    0         f_t, x_{t+1}                         g1_t like f_{t+1}, and the law of x_{t+2}
    1         g1_t, x_{t+2} at position t + 1      g2_t like f_{t+2}, and the law of x_{t+3}
    j         gj_t, x_{t+1+j} at position t + j    ..., and the law of x_{t+2+j}

Tokens are those of the text, unless a drafter replaces them (`fed_BT`). HASS writes the same in
natural coordinates (place t + j).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftsmith.core.types import DraftPrediction, TrajectoryBatch
from draftsmith.drafters.base import TargetView
from draftsmith.drafters.causal_lm import document_positions
from draftsmith.drafters.hidden.network import Network
from draftsmith.drafters.hidden.unroll_attention import attend_rollout, attend_rollout_official
from draftsmith.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Where the chains of all places stand before step `step`."""

    step: int
    feature_BTH: Tensor
    """What the network goes on with."""
    keys_and_values: tuple[Tensor, ...] = ()
    """One entry per step so far; step 0 is the text's."""
    survived_BT: Tensor | None = None
    """Chains that a drafter still follows (GRIFFIN); None: all."""
    fed_BT: Tensor | None = None
    """Tokens that the next step reads; None: the text's."""
    official: bool = False
    """Attention leaks as in the released code (see `ops.rollout_official`)."""


def begin(batch: TrajectoryBatch, noise: float) -> Rollout:
    """The text's own features, with the published noise: uniform, of width noise * 512 / length of
    the text. The batch's, which are imitated, stay as they are.

    Raises:
        InputError: the batch has no features.
    """
    if batch.features_BTS is None:
        raise InputError(
            "these trajectories hold no hidden states: collect them with --features last, or let "
            "the target say them with --laws teacher"
        )
    feature_BTS = batch.features_BTS
    if noise:
        wide = torch.promote_types(feature_BTS.dtype, torch.float32)
        shift = torch.rand_like(feature_BTS, dtype=wide) - 0.5
        width_BT1 = noise * 512 / text_lengths(batch)[..., None]
        feature_BTS = (feature_BTS + shift * width_BT1).to(feature_BTS.dtype)
    return Rollout(step=0, feature_BTH=feature_BTS)


def advance(
    network: Network,
    target: TargetView,
    batch: TrajectoryBatch,
    now: Rollout,
    *,
    keep: bool = True,
) -> tuple[DraftPrediction, Rollout]:
    """One step of all chains; what comes back in the roll-out still has its gradient.

    `keep` False: what the network computes on its way is computed again in the backward pass, so
    that only one step's is in memory at a time.
    """
    own, documents_BT = now.step, batch.documents_BT
    fed_BT = batch.tokens_ahead(1 + own) if now.fed_BT is None else now.fed_BT
    positions_BT = torch.arange(fed_BT.shape[1], device=fed_BT.device).expand_as(fed_BT)
    if documents_BT is not None:
        positions_BT = document_positions(documents_BT)
    attention = attend_rollout
    if now.official:
        dots_BT = (text_lengths(batch) - 1 - positions_BT - own).clamp(min=0)
        attention = partial(attend_rollout_official, dots_BT=dots_BT)

    def step(feature_BTH: Tensor, *earlier: Tensor) -> tuple[Tensor, ...]:
        made: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            made.extend((k, v))
            groups = q.shape[1] // k.shape[1]
            wide = [one.repeat_interleave(groups, 1) for one in (*earlier, k, v)]
            keys, values = wide[::2], wide[1::2]
            scale = q.shape[-1] ** -0.5
            return attention(q, keys[0], values[0], keys[1:], values[1:], documents_BT, scale=scale)

        with torch.no_grad():
            embedded_BTH = target.embed(fed_BT)
        return *network(embedded_BTH, feature_BTH, positions_BT + own, attend), *made

    inputs = (now.feature_BTH, *now.keys_and_values)
    if keep:
        predict, regress, *made = step(*inputs)
    else:
        predict, regress, *made = checkpoint(
            step, *inputs, use_reentrant=False, preserve_rng_state=False
        )
    prediction = DraftPrediction(
        hidden_BTH=predict,
        mask_BT=torch.ones_like(fed_BT, dtype=torch.bool),
        ahead=2 + own,
        feature_BTH=regress,
    )
    after = replace(
        now,
        step=own + 1,
        feature_BTH=regress,
        keys_and_values=(*now.keys_and_values, *made),
    )
    return prediction, after


def text_lengths(batch: TrajectoryBatch) -> Tensor:
    """[B, T]: tokens of the text that each place is in, up to the last one that counts (behind it
    stands the separator of a block); all places of a document where none counts."""
    tokens_BT, documents_BT = batch.tokens_BT, batch.documents_BT
    if documents_BT is None:
        documents_BT = torch.zeros_like(tokens_BT)
    count_BT = document_positions(documents_BT) + 1
    none = torch.zeros_like(documents_BT)
    places, ends = (
        none.scatter_reduce(1, documents_BT, one, "amax")
        for one in (count_BT, count_BT * batch.loss_mask_BT.bool())
    )
    return torch.where(ends > 0, ends, places).gather(1, documents_BT)
