"""Small random laws, and divergences of them with the gradient in the student's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from draftsmith.core.types import TopLogprobs
from draftsmith.distill.objectives import divergence as div
from draftsmith.distill.objectives.divergence import (
    DIVERGENCES,
    Knobs,
    Reading,
    Rewards,
    Tail,
    TokenBins,
    truncated_cells,
)

PLACES, VOCAB = 5, 12
TAILS: tuple[Tail, ...] = get_args(Tail)
READINGS: tuple[Reading, ...] = get_args(Reading)
TAUGHT = [name for name, record in DIVERGENCES.items() if not record.hard]
PROPER = [name for name in TAUGHT if name != "tvdpp"]
"""Their value is 0 where q = p and above 0 elsewhere; tvdpp is only a direction."""
CASES: list[tuple[str, Reading]] = [(name, "exact") for name in PROPER]
CASES += [("tvdpp", reading) for reading in READINGS]


def logits(seed: int, places: int = PLACES, scale: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(places, VOCAB, generator=generator, dtype=torch.float64)


def law(seed: int, places: int = PLACES) -> Tensor:
    return torch.log_softmax(logits(seed, places), dim=-1)


def top(log_p_NV: Tensor, k: int) -> TopLogprobs:
    """The k most probable tokens, ids ascending as the store keeps them."""
    ids_NK = log_p_NV.topk(k, dim=-1).indices.sort(-1).values
    return TopLogprobs(ids_NK=ids_NK, log_p_NK=log_p_NV.gather(-1, ids_NK))


def knobs_for(cells: TokenBins, reading: Reading = "exact") -> Knobs:
    uniform = torch.linspace(0.05, 0.95, len(cells.log_q_NC), dtype=torch.float64)
    drawn = div.drawn(cells.log_q_NC, uniform) if reading == "draws" else None
    rewards = Rewards.of(div.count_rewards(cells, drawn))
    return Knobs(rewards=rewards, reading=reading, uniform_N=uniform)


def truncated(
    name: str, laws: TopLogprobs, logits_NV: Tensor, tail: Tail, **more: float
) -> TokenBins:
    record = DIVERGENCES[name]
    return truncated_cells(laws, logits_NV, tail=tail, divergence=record, **more)


def nats(name: str, cells: TokenBins, reading: Reading = "exact") -> Tensor:
    return DIVERGENCES[name].nats(cells, knobs_for(cells, reading))


def with_gradient(of: Callable[[Tensor], Tensor], logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The values at each place, and the gradient of their sum in the student's logits."""
    student = logits_NV.clone().requires_grad_()
    values = of(student)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    return values.detach(), gradient
