"""Training over several forwards against the released formulas, written again pair by pair in their
own coordinates: values, gradients, and the weight that leaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.rollout_twin import attend_rollout_reference
from torch import Tensor, nn

from draftsmith.core.types import DraftPrediction, TrajectoryBatch
from draftsmith.drafters.griffin import Griffin
from draftsmith.drafters.hass import Hass
from draftsmith.drafters.hidden.unroll import attend_rollout_official
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

VOCAB, T = 64, 9
CASES = [(Hass, 3), (Griffin, 2), (Griffin, 3)]
Aligned = Hass | Griffin


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(VOCAB)


def aligned(cls: type[Aligned], target: HFTarget, forwards: int, attention: str) -> Aligned:
    config = cls.Config(seed=3, noise=0.0, mask_top=0) if cls is Griffin else cls.Config(seed=3)
    config = replace(config, noise=0.0, num_forwards=forwards, attention=attention)
    drafter = cls(config)
    drafter.bind(target)
    assert drafter.network is not None
    with torch.no_grad():  # farther from 0 than first weights are
        for name, weight in drafter.network.named_parameters():
            if weight.ndim > 1:
                generator = torch.Generator().manual_seed(len(name))
                weight.copy_(torch.randn(weight.shape, generator=generator).double() * 0.1)
    return drafter.train().requires_grad_(True)


def text(length: int = T, seed: int = 0) -> TrajectoryBatch:
    generator = torch.Generator().manual_seed(seed)
    return TrajectoryBatch(
        tokens_BT=torch.randint(0, VOCAB, (1, length), generator=generator),
        loss_mask_BT=torch.ones(1, length, dtype=torch.bool),
        features_BTS=torch.randn(1, length, 32, generator=generator).double(),
    )


def turned(x_D: Tensor, position: int) -> Tensor:
    """Rotary position: halves are real and imaginary parts (angles are float32 everywhere)."""
    half = len(x_D) // 2
    angle = position / 10_000.0 ** (torch.arange(half, dtype=torch.float32) / half)
    real, imaginary = x_D[:half], x_D[half:]
    return torch.cat(
        [
            real * angle.cos() - imaginary * angle.sin(),
            imaginary * angle.cos() + real * angle.sin(),
        ]
    )


def released(
    network: nn.Module, target: HFTarget, batch: TrajectoryBatch, forwards: int, *, leaks: bool
) -> list[tuple[Tensor, Tensor]]:
    """(predict, regress) [T, H] of each forward, natural pairs."""
    attention, length = network.layers[0].self_attn, batch.tokens_BT.shape[1]
    shifted = torch.cat([batch.tokens_BT[0, 1:], torch.zeros(1, dtype=torch.long)])
    with torch.no_grad():
        embedded_TH = target.embed(shifted)
    sets = [batch.features_BTS[0]]
    made = []
    for n in range(1, forwards + 1):
        inputs = [network.fc(embedded_TH, one) for one in sets]
        query = attention.q_proj(inputs[-1]).unflatten(-1, (-1, attention.head_dim))
        keys, values = (
            [project(one).unflatten(-1, (-1, attention.head_dim)) for one in inputs]
            for project in (attention.k_proj, attention.v_proj)
        )
        rows = []
        for t in range(length):
            heads = []
            for head in range(query.shape[1]):
                group = head // (query.shape[1] // keys[0].shape[1])
                q = turned(query[t, head], t) / attention.head_dim**0.5
                logits, found = [], []
                for s in range(length):
                    seen = 0 if s <= t - (n - 1) else None
                    for j in range(1, n):
                        if s == t - (n - 1 - j):
                            seen = j
                    found.append(None if seen is None else values[seen][s, group])
                    if seen is None:
                        logits.append(q.new_tensor(0.0 if leaks else -torch.inf))
                    else:
                        logits.append(q @ turned(keys[seen][s, group], s))
                weights = torch.stack(logits).softmax(0)
                parts = [w * v for w, v in zip(weights, found, strict=True) if v is not None]
                heads.append(torch.stack(parts).sum(0))
            rows.append(torch.cat(heads))
        state = inputs[-1] + attention.o_proj(torch.stack(rows))
        added = network.layers[0].mlp(network.layers[0].post_attention_layernorm(state))
        both = added.chunk(2, -1) if added.shape[1] > state.shape[1] else (added, added)
        predict, regress = (state + one for one in both)
        made.append((predict, regress))
        sets.append(torch.cat([sets[-1][:1], regress[:-1]]).detach())
    return made


def forwards_of(drafter: Aligned, batch: TrajectoryBatch) -> list[DraftPrediction]:
    carry, made = None, []
    for _ in range(drafter.num_steps):
        prediction, carry = drafter(batch, carry)
        made.append(prediction)
    return made


@pytest.mark.parametrize("attention", ["exact", "official"])
@pytest.mark.parametrize(("cls", "forwards"), CASES)
def test_values_and_gradients_are_those_of_the_released_formulas(
    cls: type[Aligned], forwards: int, attention: str, target: HFTarget
) -> None:
    """Pair t of forward j + 1 is our place t - j; what lies outside counts nowhere."""
    batch, leaks = text(), attention == "official"
    drafter = aligned(cls, target, forwards, attention)
    theirs = released(drafter.network, target, batch, forwards, leaks=leaks)
    ours = forwards_of(drafter, batch)
    own, other = torch.zeros(()).double(), torch.zeros(()).double()
    for step, (one, (predict, regress)) in enumerate(zip(ours, theirs, strict=True)):
        for mine, wanted in ((one.hidden_BTH, predict), (one.feature_BTH, regress)):
            assert mine is not None
            mine = mine[0, : T - step]
            torch.testing.assert_close(mine, wanted[step:], rtol=1e-9, atol=1e-10)
            generator = torch.Generator().manual_seed(step)
            slope = torch.randn(mine.shape, generator=generator).double()
            own, other = own + (mine * slope).sum(), other + (wanted[step:] * slope).sum()
    names, weights = zip(*drafter.network.named_parameters(), strict=True)
    for name, mine, wanted in zip(
        names,
        torch.autograd.grad(own, weights),
        torch.autograd.grad(other, weights),
        strict=True,
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize(("cls", "forwards"), CASES)
def test_a_text_in_a_block_learns_as_if_it_were_alone(
    cls: type[Aligned], forwards: int, target: HFTarget
) -> None:
    """Neither its neighbours nor the separator behind it change how much leaks."""
    first, second = text(6, seed=1), text(8, seed=2)
    nothing = torch.zeros(1, 1, 32, dtype=torch.float64)
    end = torch.zeros(1, 1, dtype=torch.long)
    packed = TrajectoryBatch(
        tokens_BT=torch.cat([first.tokens_BT, end, second.tokens_BT, end], 1),
        loss_mask_BT=torch.tensor([[1] * 6 + [0] + [1] * 8 + [0]]),
        documents_BT=torch.tensor([[0] * 7 + [1] * 9]),
        features_BTS=torch.cat([first.features_BTS, nothing, second.features_BTS, nothing], 1),
    )
    drafter = aligned(cls, target, forwards, "official")
    together = forwards_of(drafter, packed)
    for single, at, length in ((first, 0, 6), (second, 7, 8)):
        for step, (one, alone) in enumerate(
            zip(together, forwards_of(drafter, single), strict=True)
        ):
            counted = length - 2 - step  # places with a token to predict
            torch.testing.assert_close(
                one.hidden_BTH[:, at : at + counted],
                alone.hidden_BTH[:, :counted],
                rtol=1e-9,
                atol=1e-10,
            )


@pytest.mark.parametrize("steps", [0, 2])
def test_rows_leak_what_columns_of_logit_zero_take(steps: int) -> None:
    """Values of 1 make the output the sum of a row's weights."""
    length, heads = 2048, 2
    generator = torch.Generator().manual_seed(steps)
    q, k, *own = torch.randn(2 + steps, 1, heads, length, 64, generator=generator)
    ones = torch.ones(1, heads, length, 1)
    scale = 64**-0.5  # logits of variance 1
    dots = (length - 1 - steps - torch.arange(length)[None]).clamp(min=0)
    exact = attend_rollout_reference(q, k, ones, own, [ones] * steps, None, scale=scale)
    torch.testing.assert_close(exact, ones)
    official = attend_rollout_official(q, k, ones, own, [ones] * steps, None, dots, scale=scale)
    leak = 1 - official[0].mean(0)[:, 0]
    assert (official <= 1 + 1e-5).all() and (official[:, :, : length - 1 - steps] < 1).all()
    # shares that one would expect of such logits
    for place, share in ((64, 0.95), (256, 0.81), (1024, 0.39), (1900, 0.05)):
        assert float(leak[place]) == pytest.approx(share, abs=0.05)
    assert leak[length - 1 - steps :].abs().max() < 1e-5


def test_only_training_leaks_and_griffin_from_two_forwards_on(target: HFTarget) -> None:
    batch = text()

    def first(cls: type[Aligned], forwards: int, attention: str, *, train: bool) -> Tensor:
        drafter = aligned(cls, target, forwards, attention).train(train)
        return drafter(batch, None)[0].hidden_BTH

    for cls, forwards, leaks in ((Hass, 1, True), (Griffin, 1, False), (Griffin, 2, True)):
        exact = first(cls, forwards, "exact", train=True)
        assert torch.equal(first(cls, forwards, "official", train=True), exact) is not leaks
        assert torch.equal(first(cls, forwards, "official", train=False), exact)
