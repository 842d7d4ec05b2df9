"""The chunked loss equals the dense one, in value and gradient, and never sees all logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dense_objectives import dense_cross_entropy
from draftsmith.core.types import DraftPrediction, TrajectoryBatch
from draftsmith.distill.objectives import distillation
from draftsmith.distill.objectives.distillation import (
    CACHED,
    CELLS,
    CPU_CELLS,
    CPU_FEWEST,
    FEWEST,
    CrossEntropy,
    LossTerms,
    cached_places,
    places_at_once,
)


def case(dtype: torch.dtype, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, TrajectoryBatch]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(3, 11, 16, generator=generator).to(dtype).requires_grad_()
    weight = (4 * torch.randn(vocab, 16, generator=generator)).to(dtype).requires_grad_()
    batch = TrajectoryBatch(
        tokens_BT=torch.randint(0, vocab, (3, 11), generator=generator),
        loss_mask_BT=torch.rand(3, 11, generator=generator) > 0.3,
    )
    return hidden, weight, batch


def in_chunks_of(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "cached_places", lambda *_: chunk)


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("chunk", [1, 7, 32, 1000])
@pytest.mark.parametrize(
    # bfloat16: both forms round the same logits, only gradient sums are in another order.
    ("dtype", "tolerance"),
    [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)],
)
def test_chunked_loss_is_the_dense_loss(
    dtype: torch.dtype,
    tolerance: float,
    chunk: int,
    ahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_chunks_of(chunk, monkeypatch)
    results = []
    for compute in (CrossEntropy().loss, dense_cross_entropy):
        hidden, weight, batch = case(dtype, vocab=53)
        mask = torch.ones(3, 11, dtype=torch.bool)
        mask[1, :4] = False
        prediction = DraftPrediction(hidden_BTH=hidden, mask_BT=mask, ahead=ahead)
        terms = compute(prediction, batch, lambda h, w=weight: h @ w.T)
        assert isinstance(terms, LossTerms)
        terms.total.backward()
        results.append((terms.total.detach(), terms.weight, hidden.grad, weight.grad))
    for chunked, dense in zip(*results, strict=True):
        assert chunked is not None and dense is not None
        scale = dense.abs().max().item()
        torch.testing.assert_close(chunked, dense, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("vocab", [1, 300, 4096, 16_384, 16_385, 128_256])
def test_logits_that_a_cache_holds_are_of_many_places(vocab: int) -> None:
    places = cached_places(vocab, 128, torch.device("cpu"))
    assert (places is None) == (vocab > 16_384)
    assert places is None or (places >= FEWEST and places * vocab <= 2 * CACHED)
    assert cached_places(vocab, 128, torch.device("cuda")) is None
    assert cached_places(vocab, 1024, torch.device("cpu")) is None


@pytest.mark.parametrize("shape", [(0, 11, 16), (3, 11, 16)])
def test_where_nothing_counts_the_loss_is_zero(shape: tuple[int, int, int]) -> None:
    hidden = torch.randn(shape, requires_grad=True)
    batch = TrajectoryBatch(
        tokens_BT=torch.zeros(shape[:2], dtype=torch.long),
        loss_mask_BT=torch.zeros(shape[:2], dtype=torch.bool),
    )
    prediction = DraftPrediction(hidden_BTH=hidden, mask_BT=torch.ones(shape[:2]), ahead=1)
    terms = CrossEntropy().loss(prediction, batch, lambda h: h @ torch.randn(16, 53))
    terms.total.backward()
    assert terms.total == 0 and terms.weight == 0


@pytest.mark.parametrize("learns", [True, False])
def test_the_head_never_sees_more_than_a_chunk(
    monkeypatch: pytest.MonkeyPatch, learns: bool
) -> None:
    in_chunks_of(5, monkeypatch)
    hidden, weight, batch = case(torch.float32, vocab=53)
    weight.requires_grad_(learns)
    sizes = []

    def head(h: Tensor) -> Tensor:
        sizes.append(h.shape[0])
        return h @ weight.T

    prediction = DraftPrediction(
        hidden_BTH=hidden, mask_BT=torch.ones(3, 11, dtype=torch.bool), ahead=1
    )
    CrossEntropy().loss(prediction, batch, head).total.backward()
    assert max(sizes) == 5
    # every place once, and one more to see how large the vocabulary is
    assert sum(sizes) == int(batch.mask_ahead(1).sum()) + 1


@pytest.mark.parametrize("vocab", [1, 300, 8192, 16_385, 49_152, 128_256, 1 << 25])
def test_blocks_of_logits_are_large_and_bounded(vocab: int) -> None:
    for width in (128, 1024):
        places = places_at_once(vocab, width, torch.device("cpu"))
        assert places >= FEWEST
        if width == 1024:
            assert places == CPU_FEWEST or CPU_CELLS - vocab < places * vocab <= CPU_CELLS
    on_a_gpu = places_at_once(vocab, 1024, torch.device("cuda"))
    assert on_a_gpu == 1 or on_a_gpu * vocab <= CELLS


def test_nothing_counted_is_zero_with_a_zero_gradient() -> None:
    hidden, weight, batch = case(torch.float32, vocab=53)
    prediction = DraftPrediction(
        hidden_BTH=hidden, mask_BT=torch.zeros(3, 11, dtype=torch.bool), ahead=1
    )
    terms = CrossEntropy().loss(prediction, batch, lambda h: h @ weight.T)
    terms.total.backward()
    assert terms.total == 0 and terms.weight == 0
    assert hidden.grad is not None and not hidden.grad.any()


def test_saturated_logits_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks_of(4, monkeypatch)
    hidden, weight, batch = case(torch.float32, vocab=53)
    prediction = DraftPrediction(
        hidden_BTH=hidden * 1e4, mask_BT=torch.ones(3, 11, dtype=torch.bool), ahead=1
    )
    terms = CrossEntropy().loss(prediction, batch, lambda h: h @ weight.T)
    terms.total.backward()
    assert torch.isfinite(terms.total)
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all()
