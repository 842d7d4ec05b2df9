"""Attention over a text and a chain's own drafts: fused against written out, value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.ops.rollout import attend_rollout, attend_rollout_reference

B, H, T, D = 2, 3, 37, 8


def tensors(steps: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(steps)
    shape = (3 + 2 * steps, B, H, T, D)
    made = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return [one.clone().requires_grad_() for one in made]


def causal() -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)


def documents() -> Tensor:
    owner = torch.tensor([[0] * 10 + [1] * 27, [0] * 20 + [1] * 1 + [2] * 16])
    return causal() & (owner[:, :, None] == owner[:, None, :])


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients_are_those_of_one_softmax(steps: int, packed: bool) -> None:
    ours, theirs = tensors(steps, torch.float64), tensors(steps, torch.float64)
    weights = torch.randn(
        B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    allowed = documents() if packed else None
    q, k, v, *own = ours
    fast = attend_rollout(q, k, v, own[:steps], own[steps:], allowed, scale=0.3)
    (fast * weights).sum().backward()
    q, k, v, *own = theirs
    slow = attend_rollout_reference(
        q, k, v, own[:steps], own[steps:], causal() if allowed is None else allowed, scale=0.3
    )
    (slow * weights).sum().backward()
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10)


def test_bfloat16_stays_near_the_exact_value() -> None:
    exact = tensors(2, torch.float64)
    q, k, v, *own = [one.detach().bfloat16() for one in exact]
    rough = attend_rollout(q, k, v, own[:2], own[2:], None, scale=0.3).double()
    q, k, v, *own = [one.detach().bfloat16().double() for one in exact]
    exactly = attend_rollout_reference(q, k, v, own[:2], own[2:], causal(), scale=0.3)
    assert float((rough - exactly).abs().max()) < 0.05


def test_no_square_matrix_is_kept_for_backward() -> None:
    sizes: list[int] = []

    def note(kept: Tensor) -> Tensor:
        sizes.append(kept.numel())
        return kept

    q, k, v, *own = tensors(2, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        attend_rollout(q, k, v, own[:2], own[2:], None, scale=0.3)
    assert sizes and max(sizes) <= B * H * T * D < B * H * T * T
