"""Learning over a smaller vocabulary, against the formula written out over the large one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.core.types import (
    DraftPrediction,
    FullLogprobs,
    NarrowHead,
    TeacherLogprobs,
    TopLogprobs,
    TrajectoryBatch,
)
from draftsmith.distill.objectives.distillation import Distillation, Imitation

T, H, V = 9, 5, 12
IDS = torch.tensor([1, 3, 4, 7, 11])


def made(laws: str) -> tuple[DraftPrediction, TrajectoryBatch, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    teacher_VH, student_DH, hidden_NH = 2 * normal(V, H), normal(len(IDS), H), normal(T - 2, H)
    log_p_NV = torch.log_softmax(hidden_NH @ teacher_VH.T, -1)
    top = log_p_NV.topk(V if laws == "all" else 6)
    kept: dict[str, TeacherLogprobs] = {
        "full": FullLogprobs(hidden_NH=hidden_NH, head=lambda hidden: hidden @ teacher_VH.T),
        "all": TopLogprobs(ids_NK=top.indices, log_p_NK=top.values),
        "top": TopLogprobs(ids_NK=top.indices, log_p_NK=top.values),
    }
    rows = torch.full((1, T), -1)
    rows[0, 2:] = torch.arange(T - 2)
    batch = TrajectoryBatch(
        tokens_BT=torch.randint(0, V, (1, T), generator=generator),
        loss_mask_BT=torch.ones(1, T, dtype=torch.bool),
        laws=kept[laws],
        law_row_BT=rows,
    )
    prediction = DraftPrediction(
        hidden_BTH=normal(1, T, H).requires_grad_(),
        mask_BT=torch.ones(1, T, dtype=torch.bool),
        ahead=2,
        narrow=NarrowHead(ids_D=IDS, head=lambda hidden: hidden @ student_DH.T),
    )
    return prediction, batch, log_p_NV, student_DH


def wide_head(hidden: Tensor) -> Tensor:
    raise AssertionError("what learns over some tokens does not ask for all")


@pytest.mark.parametrize("laws", ["full", "all"])
def test_the_law_is_that_of_the_known_tokens(laws: str) -> None:
    prediction, batch, log_p_NV, student_DH = made(laws)
    objective = Imitation(token=Distillation(objective="kl"), token_weight=1.0, feature_weight=0.0)
    found = objective.loss(prediction, batch, wide_head)
    nats, counted = torch.zeros((), dtype=torch.float64), 0
    for t in range(T - 2):
        if int(log_p_NV[t].argmax()) not in IDS.tolist():
            continue
        log_p = torch.log_softmax(log_p_NV[t, IDS], -1)
        log_q = torch.log_softmax(prediction.hidden_BTH[0, t] @ student_DH.T, -1)
        nats = nats + (log_p.exp() * (log_p - log_q)).sum()
        counted += 1
    assert 0 < counted < T - 2
    torch.testing.assert_close(found.total / found.weight, nats / counted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("tail", ["bucket", "renormalise", "floor"])
@pytest.mark.parametrize("divergence", ["kl", "rkl", "tvd", "lk"])
def test_cut_laws_stay_laws(divergence: str, tail: str) -> None:
    prediction, batch, _, _ = made("top")
    token = Distillation(objective=divergence, tail=tail)
    found = Imitation(token=token, token_weight=1.0).loss(prediction, batch, wide_head)
    (gradient,) = torch.autograd.grad(found.total, prediction.hidden_BTH)
    assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_cut_law_that_names_all_known_tokens_is_their_law(count: int) -> None:
    """However much of the rest it leaves unsaid: then nothing of that lies inside."""
    prediction, batch, log_p_NV, student_DH = made("top")
    assert batch.laws is not None and prediction.narrow is not None
    best_D = log_p_NV[0].topk(count).indices.sort().values
    narrow = NarrowHead(ids_D=best_D, head=lambda hidden: hidden @ student_DH[:count].T)
    place = replace(batch, laws=batch.laws.take(torch.tensor([0])))
    place.law_row_BT[0, 3:] = -1
    place.loss_mask_BT[0, 3:] = False
    objective = Imitation(token=Distillation(objective="kl"), token_weight=1.0, feature_weight=0.0)
    found = objective.loss(replace(prediction, narrow=narrow), place, wide_head)
    log_p = torch.log_softmax(log_p_NV[0, best_D], -1)
    log_q = torch.log_softmax(prediction.hidden_BTH[0, 0] @ student_DH[:count].T, -1)
    torch.testing.assert_close(found.total, (log_p.exp() * (log_p - log_q)).sum() * found.weight)


@pytest.mark.parametrize("laws", ["none", "full", "top"])
def test_hard_labels_outside_do_not_count(laws: str) -> None:
    """Whatever the target finds most probable there."""
    prediction, batch, _, student_DH = made("full" if laws == "none" else laws)
    if laws == "none":
        batch = TrajectoryBatch(tokens_BT=batch.tokens_BT, loss_mask_BT=batch.loss_mask_BT)
    found = Imitation(token=Distillation(objective="sft"), token_weight=1.0).loss(
        prediction, batch, wide_head
    )
    nats = []
    for t in range(T - 2):
        place = (batch.tokens_BT[0, t + 2] == IDS).nonzero()
        if len(place):
            log_q = torch.log_softmax(prediction.hidden_BTH[0, t] @ student_DH.T, -1)
            nats.append(-log_q[place[0, 0]])
    assert 0 < len(nats) < T - 2
    torch.testing.assert_close(
        found.total / found.weight, torch.stack(nats).mean(), rtol=1e-6, atol=1e-8
    )
