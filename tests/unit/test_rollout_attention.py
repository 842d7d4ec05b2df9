"""Attention over a text and a chain's own drafts: fused against written out, value and gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.rollout_twin import attend_rollout_reference
from torch import Tensor

from draftsmith.core.types import TrajectoryBatch
from draftsmith.distill.objectives.distillation import Distillation, Imitation
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.griffin import Griffin
from draftsmith.drafters.hass import Hass
from draftsmith.drafters.hidden import unroll
from draftsmith.drafters.hidden.drafter import AlignedDrafter, FeatureDrafter
from draftsmith.drafters.hidden.unroll import attend_rollout
from draftsmith.targets.toy import tiny_target

B, H, T, D = 2, 3, 37, 8


@pytest.fixture(params=["fused", "5", "37", "64"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's, or what other devices do, with so many rows of scores at a time."""
    if request.param != "fused":
        monkeypatch.setattr(unroll, "FUSED", ())
        monkeypatch.setattr(unroll, "CHUNK", int(request.param))


def tensors(steps: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(steps)
    shape = (3 + 2 * steps, B, H, T, D)
    made = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return [one.clone().requires_grad_() for one in made]


def documents() -> Tensor:
    return torch.tensor([[0] * 10 + [1] * 27, [0] * 20 + [1] * 1 + [2] * 16])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients_are_those_of_one_softmax(steps: int, packed: bool) -> None:
    ours, theirs = tensors(steps, torch.float64), tensors(steps, torch.float64)
    weights = torch.randn(
        B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    owner = documents() if packed else None
    q, k, v, *own = ours
    fast = attend_rollout(q, k, v, own[:steps], own[steps:], owner, scale=0.3)
    (fast * weights).sum().backward()
    q, k, v, *own = theirs
    slow = attend_rollout_reference(q, k, v, own[:steps], own[steps:], owner, scale=0.3)
    (slow * weights).sum().backward()
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_stays_near_the_exact_value(autocast: bool) -> None:
    """Scores and sums are float32, also where everything else is cast."""
    rough, exact = (
        [one.detach().bfloat16().to(dtype).requires_grad_() for one in tensors(2, torch.float64)]
        for dtype in (torch.bfloat16, torch.float64)
    )
    q, k, v, *own = rough
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attend_rollout(q, k, v, own[:2], own[2:], None, scale=0.3)
        out.square().sum().backward()
    q, k, v, *own = exact
    exactly = attend_rollout_reference(q, k, v, own[:2], own[2:], None, scale=0.3)
    exactly.square().sum().backward()
    assert float((out.double() - exactly).norm() / exactly.norm()) < 0.006
    for one, other in zip(rough, exact, strict=True):
        assert one.grad is not None and other.grad is not None
        assert float((one.grad.double() - other.grad).norm() / other.grad.norm()) < 0.006


@pytest.mark.parametrize("packed", [False, True])
def test_places_see_neither_what_comes_nor_other_texts(packed: bool) -> None:
    """The reference's own columns, one by one."""
    q, k, v, *own = (one.detach() for one in tensors(1, torch.float64))
    owner = documents() if packed else torch.zeros(B, T, dtype=torch.long)
    out = attend_rollout_reference(q, k, v, own[:1], own[1:], owner, scale=0.3)
    for b, t in ((0, 0), (0, 9), (0, 10), (1, 20), (1, 36)):
        seen = [s for s in range(t + 1) if owner[b, s] == owner[b, t]]
        keys = torch.cat([k[b, :, seen], own[0][b, :, t : t + 1]], 1)
        values = torch.cat([v[b, :, seen], own[1][b, :, t : t + 1]], 1)
        weights = (torch.einsum("hd,hsd->hs", q[b, :, t], keys) * 0.3).softmax(-1)
        torch.testing.assert_close(out[b, :, t], torch.einsum("hs,hsd->hd", weights, values))


def squares(drafter: FeatureDrafter, batch: TrajectoryBatch) -> list[tuple[int, ...]]:
    """Shapes with two times T in them, of all that a training step saves for its backward."""
    saved: list[tuple[int, ...]] = []

    def note(kept: Tensor) -> Tensor:
        saved.append(tuple(kept.shape))
        return kept

    carry = None
    with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        for _ in range(drafter.num_steps):
            prediction, carry = drafter(batch, carry)
            Imitation(token=Distillation(objective="sft")).loss(prediction, batch, drafter.head())
    assert saved
    return [shape for shape in saved if shape.count(T) >= 2]


KEEPING: tuple[Callable[[], FeatureDrafter], ...] = (
    lambda: Hass(Hass.Config(recompute=False)),
    lambda: Griffin(Griffin.Config(recompute=False)),
    Eagle3,
)
"""With `recompute` only what comes and goes is saved, and all is made again."""


@pytest.mark.parametrize("make", KEEPING)
@pytest.mark.parametrize("packed", [False, True])
def test_a_training_step_keeps_no_square_matrix(
    make: Callable[[], FeatureDrafter], packed: bool
) -> None:
    target = tiny_target(layers=8)
    drafter = make()
    drafter.bind(target)
    drafter.train().requires_grad_(True)
    width = 32 * max(1, len(drafter.signals.layers))
    batch = TrajectoryBatch(
        tokens_BT=torch.ones(B, T, dtype=torch.long),
        loss_mask_BT=torch.ones(B, T, dtype=torch.bool),
        documents_BT=documents() if packed else None,
        features_BTS=torch.randn(B, T, width, dtype=torch.float64),
    )
    assert not squares(drafter, batch)


@pytest.mark.parametrize("recompute", [True, False])
def test_the_released_attention_keeps_them_unless_it_is_computed_again(recompute: bool) -> None:
    target = tiny_target()
    drafter = Hass(Hass.Config(attention="official", recompute=recompute))
    drafter.bind(target)
    drafter.train().requires_grad_(True)
    batch = TrajectoryBatch(
        tokens_BT=torch.ones(B, T, dtype=torch.long),
        loss_mask_BT=torch.ones(B, T, dtype=torch.bool),
        features_BTS=torch.randn(B, T, 32, dtype=torch.float64),
    )
    assert bool(squares(drafter, batch)) is not recompute


@pytest.mark.parametrize("cls", [Hass, Griffin])
def test_what_is_computed_again_has_the_same_gradients(cls: type[AlignedDrafter]) -> None:
    target = tiny_target()
    torch.manual_seed(0)
    batch = TrajectoryBatch(
        tokens_BT=torch.randint(1, 40, (B, T)),
        loss_mask_BT=torch.ones(B, T, dtype=torch.bool),
        documents_BT=documents(),
        features_BTS=torch.randn(B, T, 32, dtype=torch.float64),
    )
    found: list[dict[str, Tensor]] = []
    for recompute in (True, False):
        drafter = cls(cls.Config(recompute=recompute))
        drafter.bind(target)
        drafter.train().requires_grad_(True)
        total: Tensor | float = 0.0
        carry = None
        torch.manual_seed(1)  # the noise
        for _ in range(drafter.num_steps):
            prediction, carry = drafter(batch, carry)
            step = Imitation(token=Distillation(objective="sft"))
            total = total + step.loss(prediction, batch, drafter.head()).total
        assert isinstance(total, Tensor)
        total.backward()
        named = drafter.named_parameters()
        found.append({name: one.grad for name, one in named if one.grad is not None})
    again, kept = found
    assert again.keys() == kept.keys() and len(kept) > 5
    for name, gradient in kept.items():
        assert torch.equal(again[name], gradient), name
