"""What feature-level drafters learn, against the formulas written out."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dense_objectives import dense_distillation
from draftsmith.core.types import DraftPrediction, FullLogprobs, TrajectoryBatch
from draftsmith.distill.objectives.distillation import Distillation, Imitation
from draftsmith.errors import InputError

B, T, H, V = 2, 7, 5, 13


def made(*, feature: bool = True) -> tuple[DraftPrediction, TrajectoryBatch, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weight, features = normal(V, H), normal(B, T, H)
    counted = torch.rand(B, T, generator=generator) < 0.7
    wanted = torch.zeros_like(counted)
    wanted[:, 2:] = counted[:, 2:]
    rows = torch.full((B, T), -1)
    rows[wanted] = torch.arange(int(wanted.sum()))
    before = torch.zeros_like(wanted)  # the law of a token is said one place before it
    before[:, 1:-1] = wanted[:, 2:]
    batch = TrajectoryBatch(
        tokens_BT=torch.randint(0, V, (B, T), generator=generator),
        loss_mask_BT=wanted,
        laws=FullLogprobs(hidden_NH=features[before], head=lambda hidden: hidden @ weight.T),
        law_row_BT=rows,
        weights_BT=torch.rand(B, T, generator=generator),
        features_BTS=features,
    )
    mask = torch.rand(B, T, generator=generator) < 0.8
    prediction = DraftPrediction(
        hidden_BTH=normal(B, T, H).requires_grad_(),
        mask_BT=mask,
        ahead=2,
        feature_BTH=normal(B, T, H).requires_grad_() if feature else None,
    )
    return prediction, batch, weight


@pytest.mark.parametrize("mean_over", ["counted", "all"])
@pytest.mark.parametrize("top_weight", [0.0, 0.5])
def test_the_loss_is_the_published_sum(
    top_weight: float, mean_over: Literal["counted", "all"]
) -> None:
    prediction, batch, weight = made()
    assert prediction.feature_BTH is not None and batch.features_BTS is not None
    token = Distillation(objective="kl", top=4)
    objective = Imitation(
        token=token,
        token_weight=0.1,
        feature_weight=1.0,
        top_weight=0.1 * top_weight,
        mean_over=mean_over,
    )
    found = objective.loss(prediction, batch, lambda hidden: hidden @ weight.T)
    expected = torch.zeros((), dtype=torch.float64)
    counted = all_counted = 0.0
    for b in range(B):
        for t in range(T - 2):
            assert batch.weights_BT is not None
            much = float(batch.weights_BT[b, t + 2])
            if not batch.loss_mask_BT[b, t + 2]:
                continue
            all_counted += much
            if not prediction.mask_BT[b, t]:
                continue
            target = batch.features_BTS[b, t + 1]
            log_p = torch.log_softmax(target @ weight.T, -1)
            log_q = torch.log_softmax(prediction.hidden_BTH[b, t] @ weight.T, -1)
            nats = (log_p.exp() * (log_p - log_q)).sum()
            best = log_p.topk(4).indices
            nats = nats - top_weight * (log_p[best].exp() * log_q[best]).sum()
            apart = F.smooth_l1_loss(prediction.feature_BTH[b, t], target)
            expected = expected + much * (0.1 * nats + apart)
            counted += much
    # a mean over what the mask leaves, or over all that the batch counts (1/T sum m_t loss_t)
    mean = expected / (counted if mean_over == "counted" else all_counted)
    torch.testing.assert_close(found.total / found.weight, mean, rtol=1e-6, atol=1e-8)
    assert float(found.weight) == pytest.approx(all_counted, rel=1e-6)
    assert counted < all_counted


def test_the_top_term_has_a_readable_twin() -> None:
    prediction, batch, weight = made()
    objective = Distillation(objective="rkl", top_weight=0.7, top=3, cells=V)
    chunked = objective.loss(prediction, batch, lambda hidden: hidden @ weight.T)
    (fast,) = torch.autograd.grad(chunked.total, prediction.hidden_BTH)
    dense = dense_distillation(objective, prediction, batch, lambda hidden: hidden @ weight.T)
    (slow,) = torch.autograd.grad(dense.total, prediction.hidden_BTH)
    torch.testing.assert_close(chunked.total, dense.total, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(fast, slow, rtol=1e-6, atol=1e-8)


def test_a_drafter_without_states_learns_tokens_alone() -> None:
    prediction, batch, weight = made(feature=False)
    token = Distillation(objective="tvd")
    found = Imitation(token=token).loss(prediction, batch, lambda hidden: hidden @ weight.T)
    alone = token.loss(prediction, batch, lambda hidden: hidden @ weight.T)
    mean = found.total / found.weight
    torch.testing.assert_close(mean, 0.1 * alone.total / alone.weight)


def test_negative_weights_are_refused() -> None:
    with pytest.raises(InputError, match="0 or more"):
        Imitation(token=Distillation(objective="kl"), feature_weight=-1.0)
    with pytest.raises(InputError, match="top-weight"):
        Distillation(objective="kl", top_weight=-0.1)
