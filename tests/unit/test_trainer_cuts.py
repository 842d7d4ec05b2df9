"""Training that is cut between the parts of one optimiser step, where gradients are half summed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from tests.small_trainer import CONFIG, make_source, make_trainer, same, weights

from draftsmith.core.types import TrajectoryBatch
from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.batches import BatchSource
from draftsmith.distill.trainer import Trainer, TrainReport

PARTS, EVERY = 4, 3
SPLIT = replace(CONFIG, gradient_accumulation=PARTS, save_every=EVERY)


class Cut(Exception):
    """What ends a run in the middle of a step."""


@dataclass(kw_only=True)
class CutSource:
    """Another source up to one part of one step, and all that was read of it."""

    source: BatchSource = field(default_factory=make_source)
    at: tuple[int, int] | None = None
    seen: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def batch(self, step: int, part: int, parts: int) -> TrajectoryBatch:
        if (step, part) == self.at:
            raise Cut
        batch = self.source.batch(step, part, parts)
        self.seen.append((step, part, batch.tokens_BT.flatten().tolist()))
        return batch


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> tuple[CutSource, Trainer, TrainReport]:
    """A run to the end: what it was fed, itself and what it reports."""
    order = CutSource()
    whole = make_trainer(tmp_path_factory.mktemp("whole"), config=SPLIT, source=order)
    return order, whole, whole.train()


@pytest.mark.parametrize("anew", [True, False], ids=["a new process", "the same trainer"])
@pytest.mark.parametrize("part", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 6, 8, 11])
@pytest.mark.every(5)
def test_a_run_cut_within_a_step_ends_in_bit_equal_weights(
    tmp_path: Path,
    uncut: tuple[CutSource, Trainer, TrainReport],
    step: int,
    part: int,
    anew: bool,
) -> None:
    """Before the first checkpoint, right behind one, some steps behind one, in the last step."""
    order, whole, report = uncut
    source = CutSource(at=(step, part))
    trainer = make_trainer(tmp_path / "cut", config=SPLIT, source=source)
    begun = weights(trainer)
    with pytest.raises(Cut):
        trainer.train()
    assert trainer.step == step
    assert source.seen == order.seen[: PARTS * step + part]
    newest = checkpoints.latest(tmp_path / "cut" / "checkpoints")
    kept = 0 if newest is None else checkpoints.load(newest).step
    assert kept == step - step % EVERY
    torch.manual_seed(step)  # the state of the global generator must not matter
    if anew or newest is None:
        source = CutSource()
        trainer = make_trainer(tmp_path / "cut", config=SPLIT, source=source)
        assert same(weights(trainer), begun)
    source.at, source.seen = None, []
    assert trainer.train() == report
    assert source.seen == order.seen[PARTS * kept :]
    assert same(weights(trainer), weights(whole))
    one, other = (each.optimizer.state_dict()["state"] for each in (whole, trainer))
    assert one.keys() == other.keys() and len(one) == 3
    for number, moments in one.items():
        assert same(moments, other[number])
