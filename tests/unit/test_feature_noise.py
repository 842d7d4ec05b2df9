"""The published noise: features += (U[0, 1) - 0.5) * 0.2 * 512 / tokens of the text."""

from __future__ import annotations

import pytest
import torch

from draftsmith.core.types import TrajectoryBatch
from draftsmith.distill.batches import TrainingExample, assemble, pack
from draftsmith.distill.trajectories.types import Trajectory
from draftsmith.drafters.griffin import Griffin
from draftsmith.drafters.hass import Hass
from draftsmith.drafters.hidden.unroll import begin, text_lengths
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

HIDDEN = 32


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(hidden=HIDDEN)


def documents(lengths: list[int], block: int) -> TrajectoryBatch:
    """Texts of these lengths in one block, the first half of each a prompt."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, length in enumerate(lengths):
        states = torch.randn(length, HIDDEN, generator=generator)
        half = length // 2
        one = Trajectory(
            prompt_id=str(number),
            prompt=tuple(range(1, half + 1)),
            tokens=tuple(range(1, length - half + 1)),
            features=states.numpy(),
            forcing="gold",
            score=0.0,
        )
        made.append(TrainingExample(trajectory=one))
    return assemble(pack(made, block), block, 0)


def moved(batch: TrajectoryBatch, noise: float = 0.2) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return begin(batch, noise=noise).feature_BTH - batch.features_BTS


def test_a_text_is_as_long_as_its_own_tokens() -> None:
    """Neither the separator behind it nor padding belongs to it; what a block cuts off does not."""
    packed = text_lengths(documents([8, 20], 40))
    assert packed[0, :8].tolist() == [8] * 8 and packed[0, 9:29].tolist() == [20] * 20
    assert text_lengths(documents([50], 40)).tolist() == [[40] * 40]
    bare = TrajectoryBatch(
        tokens_BT=torch.zeros(1, 12, dtype=torch.long),
        loss_mask_BT=torch.tensor([[0] * 4 + [1] * 6 + [0] * 2]),
    )
    assert text_lengths(bare).tolist() == [[10] * 12]


def test_noise_is_uniform_and_as_wide_as_the_text_is_short() -> None:
    shift = moved(documents([8, 120], 130))
    for places, length in ((slice(0, 8), 8), (slice(9, 129), 120)):
        own, half = shift[:, places], 0.1 * 512 / length
        assert 0.98 * half < float(own.abs().max()) <= half * (1 + 1e-5)
        sigma = half / 3**0.5
        assert abs(float(own.mean())) < 4 * sigma / own.numel() ** 0.5  # wrong once in 16,000
        assert float(own.std()) == pytest.approx(sigma, rel=0.1)


def test_narrow_numbers_do_not_make_the_noise_lopsided() -> None:
    """Uniform draws of bfloat16 are multiples of 1/256 below 1: their mean is not 1/2."""
    still = TrajectoryBatch(
        tokens_BT=torch.zeros(1, 512, dtype=torch.long),
        loss_mask_BT=torch.ones(1, 512, dtype=torch.bool),
        features_BTS=torch.zeros(1, 512, 4096, dtype=torch.bfloat16),
    )
    shift = moved(still).double()
    assert abs(float(shift.mean())) < 4 * float(shift.std()) / shift.numel() ** 0.5


@pytest.mark.parametrize("cls", [Hass, Griffin])
def test_training_alone_has_noise_and_what_it_imitates_has_none(
    cls: type[Hass] | type[Griffin], target: HFTarget
) -> None:
    batch = documents([12], 16)
    assert batch.features_BTS is not None
    batch = TrajectoryBatch(
        tokens_BT=batch.tokens_BT,
        loss_mask_BT=batch.loss_mask_BT,
        features_BTS=batch.features_BTS.double(),
    )
    assert batch.features_BTS is not None
    clean, wanted = batch.features_BTS.clone(), batch.features_ahead(1)
    drafter, quiet = cls(cls.Config(seed=1)), cls(cls.Config(seed=1, noise=0.0))
    for one in (drafter, quiet):
        one.bind(target)
    expected = quiet.train()(batch, None)[0].hidden_BTH
    assert not torch.equal(drafter.train()(batch, None)[0].hidden_BTH, expected)
    assert torch.equal(drafter.eval()(batch, None)[0].hidden_BTH, expected)
    assert torch.equal(batch.features_BTS, clean)
    assert torch.equal(batch.features_ahead(1), wanted)
