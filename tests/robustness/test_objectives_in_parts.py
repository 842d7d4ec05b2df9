"""Every objective gives the step of the whole batch, however the batch is divided: over passes of
one process, or over two processes. TVD++ normalises its reward over all that is learnt together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forks import Forks
from tests.small_laws import CASES
from tests.small_trainer import VOCAB, build, check_close, make_source, named, whole
from torch import Tensor

from draftsmith.core.types import TopLogprobs, TrajectoryBatch
from draftsmith.distill.batches import PackedBlocks
from draftsmith.distill.objectives import divergence
from draftsmith.distill.objectives.distillation import Distillation
from draftsmith.distill.objectives.divergence import DRAWING, drawn

DIVIDED = [
    pytest.param({"gradient_accumulation": 4}, 1, id="passes"),
    pytest.param({"parallel": "data"}, 2, id="processes", marks=pytest.mark.full),
    pytest.param({"parallel": "sharded", "gradient_accumulation": 2}, 2, id="sharded"),
]


class Taught(PackedBlocks):
    """The target's five best tokens behind each token; every seventh place learns its token."""

    def batch(self, step: int, part: int, parts: int) -> TrajectoryBatch:
        batch = super().batch(step, part, parts)
        generator = torch.Generator().manual_seed(3)
        table_VV = (2 * torch.randn(VOCAB, VOCAB, generator=generator)).log_softmax(-1)
        before_BT = batch.tokens_BT.roll(1, 1)
        best = table_VV[before_BT.flatten()].topk(5)
        rows_BT = torch.arange(before_BT.numel()).view_as(before_BT)
        plain_BT = (batch.tokens_BT * 3 + before_BT) % 7 == 0
        return replace(
            batch,
            laws=TopLogprobs(ids_NK=best.indices, log_p_NK=best.values),
            law_row_BT=rows_BT.masked_fill(plain_BT, -1),
        )


def three_steps(folder: Path, argument: dict[str, Any]) -> dict[str, Tensor]:
    name, reading = argument.pop("objective")
    objective = Distillation(objective=name, reading=reading)
    source = Taught(make_source().documents, end_id=0, length=8, batch_tokens=32, seed=0)
    trainer = build(folder, argument, objective=objective, source=source)
    for _ in range(3):
        trainer.one_step()
    return {name: whole(value) for name, value in named(trainer).items()}


@pytest.mark.parametrize(("name", "reading"), [one for one in CASES if one[1] not in DRAWING])
@pytest.mark.parametrize(("divided", "size"), DIVIDED)
@pytest.mark.every(5)
def test_three_steps_are_those_of_the_whole_batch(
    forks: Forks, tmp_path: Path, name: str, reading: str, divided: dict[str, Any], size: int
) -> None:
    argument = {"drafter": "sum", "objective": [name, reading]}
    alone = three_steps(tmp_path / "one", dict(argument))
    for member in forks.group(
        three_steps, tmp_path / "parts", size=size, argument=argument | divided
    ):
        check_close(member, alone, rtol=1e-4, atol=1e-5)


def test_the_draws_that_are_counted_are_those_that_are_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eq. 1 of TVD++ normalises the rewards of its own draws: the pass over all parts that counts
    them and the loss draw the same tokens."""
    made: list[Tensor] = []

    def noted(*given: Any) -> Tensor:
        made.append(drawn(*given))
        return made[-1]

    monkeypatch.setattr(divergence, "drawn", noted)
    objective = Distillation(objective="tvdpp", reading="draws")
    source = Taught(make_source().documents, end_id=0, length=8, batch_tokens=32, seed=0)
    argument = {"drafter": "sum", "gradient_accumulation": 4}
    build(tmp_path, argument, objective=objective, source=source).one_step()
    counted, learnt = made[:12], made[12:]  # four parts of three steps each
    assert len(learnt) == 12 and all(map(torch.equal, counted, learnt))
    assert len(torch.cat(counted).unique()) > 1


def test_statistics_of_a_part_are_another_step(tmp_path: Path) -> None:
    """What the pass over all parts is for: without it TVD++ learns something else."""

    class Alone(Distillation):
        pools = False

        def loss(self, *given: Any) -> Any:
            return Distillation(objective="tvdpp", reading="uniform").loss(*given)

    def weights(objective: Distillation, accumulation: int) -> dict[str, Tensor]:
        source = Taught(make_source().documents, end_id=0, length=8, batch_tokens=32, seed=0)
        argument = {"drafter": "sum", "gradient_accumulation": accumulation}
        folder = tmp_path / f"{type(objective).__name__}-{accumulation}"
        trainer = build(folder, argument, objective=objective, source=source)
        trainer.one_step()
        return {name: whole(value) for name, value in named(trainer).items()}

    pooled = weights(Distillation(objective="tvdpp", reading="uniform"), 4)
    with pytest.raises(AssertionError):
        check_close(weights(Alone(objective="tvdpp"), 4), pooled, rtol=1e-4, atol=1e-5)
