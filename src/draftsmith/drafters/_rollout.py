"""Training on one's own outputs: the chains below all positions of a text, one step at a time.

In step j, place t stands for the (j+1)-th draft below position t (see `ops.rollout`):

    step      reads                                gives
    0         f_t, x_{t+1}                         g1_t like f_{t+1}, and the law of x_{t+2}
    1         g1_t, x_{t+2} at position t + 1      g2_t like f_{t+2}, and the law of x_{t+3}
    j         gj_t, x_{t+1+j} at position t + j    ..., and the law of x_{t+2+j}

Tokens are always those of the text. HASS writes the same in natural coordinates (place t + j).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.drafters._base import TargetView
from draftsmith.drafters._causal import document_positions
from draftsmith.drafters._network import Network
from draftsmith.errors import InputError
from draftsmith.ops.rollout import attend_rollout
from draftsmith.types import DraftPrediction, TrajectoryBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Where the chains of all places stand before step `step`."""

    step: int
    feature_BTH: Tensor
    """What the network goes on with."""
    keys: tuple[Tensor, ...] = ()
    """Of the steps so far; those of step 0 are the text's."""
    values: tuple[Tensor, ...] = ()
    survived_BT: Tensor | None = None
    """Chains that a drafter still follows (GRIFFIN); None: all."""


def begin(batch: TrajectoryBatch, noise: float) -> Rollout:
    """The text's own features, with the published noise: uniform, of width noise * 512 / length.

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
        width_BT1 = noise * 512 / _document_lengths(batch)[..., None]
        shift = torch.rand_like(feature_BTS) - 0.5
        feature_BTS = feature_BTS + shift * width_BT1.to(feature_BTS.dtype)
    return Rollout(step=0, feature_BTH=feature_BTS)


def advance(
    network: Network, target: TargetView, batch: TrajectoryBatch, now: Rollout
) -> tuple[DraftPrediction, Rollout]:
    """One step of all chains; what comes back in the roll-out still has its gradient."""
    tokens_BT, own = batch.tokens_BT, now.step
    keys, values = list(now.keys), list(now.values)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k)
        values.append(v)
        groups = q.shape[1] // k.shape[1]
        wide_k, wide_v = (
            [one.repeat_interleave(groups, 1) for one in some] for some in (keys, values)
        )
        return attend_rollout(
            q,
            wide_k[0],
            wide_v[0],
            wide_k[1:],
            wide_v[1:],
            seen,
            scale=q.shape[-1] ** -0.5,
        )

    seen = None
    positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    if batch.documents_BT is not None:
        positions_BT = document_positions(batch.documents_BT)
        seen = (batch.documents_BT[:, :, None] == batch.documents_BT[:, None, :]).tril()
    with torch.no_grad():
        embedded_BTH = target.embed(batch.tokens_ahead(1 + own))
    predict, regress = network(embedded_BTH, now.feature_BTH, positions_BT + own, attend)
    prediction = DraftPrediction(
        hidden_BTH=predict,
        mask_BT=torch.ones_like(tokens_BT, dtype=torch.bool),
        ahead=2 + own,
        feature_BTH=regress,
    )
    after = replace(now, step=own + 1, feature_BTH=regress, keys=tuple(keys), values=tuple(values))
    return prediction, after


def detached(rollout: Rollout) -> Rollout:
    """The same without its gradient, for steps that are learnt one by one (HASS, GRIFFIN)."""
    return replace(
        rollout,
        feature_BTH=rollout.feature_BTH.detach(),
        keys=tuple(key.detach() for key in rollout.keys),
        values=tuple(value.detach() for value in rollout.values),
    )


def _document_lengths(batch: TrajectoryBatch) -> Tensor:
    """[B, T]: tokens of the document that each place is in."""
    tokens_BT, documents_BT = batch.tokens_BT, batch.documents_BT
    if documents_BT is None:
        return torch.full(tokens_BT.shape, float(tokens_BT.shape[1]), device=tokens_BT.device)
    counts = torch.zeros_like(documents_BT).scatter_add(
        1, documents_BT, torch.ones_like(documents_BT)
    )
    return counts.gather(1, documents_BT).float()
