"""What a drafter is trained for. The only place that turns hidden states into logits, in chunks.

No [B, T, V] tensor exists: the head runs on a few thousand positions at a time, and again in the
backward pass (recomputed, not kept).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftsmith.core.types import DraftPrediction, TrajectoryBatch

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """A loss before it is averaged: sums, so that uneven parts combine exactly."""

    total: Tensor
    """Sum over counted positions, in nats, differentiable."""
    weight: Tensor
    """How much was counted (positions), no gradient."""


class Objective(Protocol):
    """Compares a drafter's prediction with what the batch says."""

    def loss(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head) -> LossTerms:
        """Summed loss of one prediction and its weight."""


def vocabulary(head: Head, hidden_NH: Tensor) -> int:
    """V, from the logits of the first place."""
    with torch.no_grad():
        return int(head(hidden_NH[:1]).shape[-1])


CACHED = 1 << 19
"""Logits of which a core's cache still holds the few tensors that a loss makes."""
FEWEST = 64
"""Positions at a time; with fewer, reading the head's weights costs more than the logits."""
WIDEST = 256
"""Head for which that is so."""


def cached_places(vocab: int, width: int, device: torch.device) -> int | None:
    """For how many places at a time logits stay in a CPU's cache; None: for none.

    A loss reads and writes its logits a dozen times, which is up to three times as fast there. But
    each part reads the [vocab, width] head again, and adds up a gradient of that size.
    """
    if device.type != "cpu" or width > WIDEST or FEWEST * vocab > 2 * CACHED:
        return None
    return max(FEWEST, CACHED // vocab)


POSITIONS = 2048


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Next-token loss: -log q(token that is `ahead` places to the right), in nats."""

    chunk: int | None = None
    """Positions per call of the head; None: those that stay in a cache, else `POSITIONS`."""

    def loss(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head) -> LossTerms:
        """Sum over positions that the prediction's and the batch's masks both count."""
        counted_BT = prediction.mask_BT.bool() & batch.mask_ahead(prediction.ahead)
        hidden_NH = prediction.hidden_BTH[counted_BT]
        wanted_N = batch.tokens_ahead(prediction.ahead)[counted_BT]
        # A zero that depends on the hidden states keeps backward legal when nothing is counted.
        total = prediction.hidden_BTH.sum().float() * 0.0 if not len(wanted_N) else None
        chunk = self.chunk or _positions(hidden_NH, head)
        for hidden, wanted in zip(hidden_NH.split(chunk), wanted_N.split(chunk), strict=True):
            if not len(wanted):
                continue
            part = checkpoint(_summed, head, hidden, wanted, use_reentrant=False)
            assert isinstance(part, Tensor)
            total = part if total is None else total + part
        assert total is not None
        return LossTerms(total=total, weight=counted_BT.sum().float())


def _positions(hidden_NH: Tensor, head: Head) -> int:
    if not len(hidden_NH):
        return POSITIONS
    vocab = vocabulary(head, hidden_NH)
    return cached_places(vocab, hidden_NH.shape[-1], hidden_NH.device) or POSITIONS


def _summed(head: Head, hidden_NH: Tensor, wanted_N: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden_NH).float(), wanted_N, reduction="sum")


def dense_cross_entropy(
    prediction: DraftPrediction, batch: TrajectoryBatch, head: Head
) -> LossTerms:
    """The readable twin of `CrossEntropy`: all logits at once. For tests."""
    log_q_BTV = torch.log_softmax(head(prediction.hidden_BTH).float(), dim=-1)
    wanted_BT1 = batch.tokens_ahead(prediction.ahead)[..., None]
    counted_BT = prediction.mask_BT.bool() & batch.mask_ahead(prediction.ahead)
    nats_BT = -log_q_BTV.gather(-1, wanted_BT1)[..., 0]
    return LossTerms(total=(nats_BT * counted_BT).sum(), weight=counted_BT.sum().float())
