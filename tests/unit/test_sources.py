"""Batches of a distillation: functions of the step, complete, and with the teacher's own laws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.tiny_models import tiny_model
from tests.unit.test_packing import END, plain, trajectory

from draftsmith.core.types import FullLogprobs, TrajectoryBatch
from draftsmith.distill.batches import InLoop, PackedBlocks, TextRows, TrajectoryBlocks
from draftsmith.distill.datasets import Multi, Online
from draftsmith.distill.trajectories.types import (
    CollectRequest,
    CollectSettings,
    Trajectory,
)
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget

DOCUMENTS = plain(*(trajectory((n % 7, 1), (n % 5, 2, END), name=str(n)) for n in range(20)))


def blocks(**changes: int) -> TrajectoryBlocks:
    sizes = {"length": 14, "batch_blocks": 4, "seed": 3} | changes
    return TrajectoryBlocks(DOCUMENTS, end_id=END, **sizes)


def same(a: TrajectoryBatch, b: TrajectoryBatch) -> bool:
    return torch.equal(a.tokens_BT, b.tokens_BT) and torch.equal(a.loss_mask_BT, b.loss_mask_BT)


def test_a_batch_is_a_function_of_the_step() -> None:
    source, again = blocks(), blocks()
    forward = [source.batch(step, 0, 1) for step in range(7)]
    for step in (5, 0, 6, 2):
        assert same(again.batch(step, 0, 1), forward[step])


def test_every_document_comes_once_per_epoch_and_epochs_differ() -> None:
    source = blocks(batch_blocks=1)
    per_epoch = len(source.blocks)
    rows = [tuple(source.batch(step, 0, 1).tokens_BT[0].tolist()) for step in range(2 * per_epoch)]
    first, second = rows[:per_epoch], rows[per_epoch:]
    assert Counter(first) == Counter(second)
    assert first != second
    counted = sum(int(source.batch(s, 0, 1).loss_mask_BT.sum()) for s in range(per_epoch))
    assert counted == 3 * len(DOCUMENTS)


def test_parts_together_are_the_batch() -> None:
    source = blocks()
    whole = source.batch(1, 0, 1).tokens_BT
    parts = [source.batch(1, part, 2).tokens_BT for part in range(2)]
    assert torch.equal(torch.stack(parts, 1).reshape(whole.shape), whole)
    with pytest.raises(InputError, match="do not fill"):
        source.batch(0, 4, 5)


def test_evaluation_ends_with_its_last_batch() -> None:
    source = TrajectoryBlocks(DOCUMENTS[:5], end_id=END, length=14, batch_blocks=2, seed=None)
    rows = sum(len(source.batch(step).tokens_BT) for step in range(source.num_batches))
    assert rows == len(source.blocks)
    for step in (source.num_batches, source.num_batches + 1):
        with pytest.raises(InputError, match="do not fill"):
            source.batch(step)


def test_laws_can_be_left_out() -> None:
    bare = TrajectoryBlocks(
        [one.without_logprobs() for one in DOCUMENTS],
        end_id=END,
        length=14,
        batch_blocks=4,
        seed=3,
    )
    assert bare.batch(0).laws is None
    assert blocks().batch(0).laws is not None
    assert same(bare.batch(0), blocks().batch(0))


def test_held_out_blocks_give_every_token_once() -> None:
    held = TrajectoryBlocks(DOCUMENTS, end_id=END, length=14, batch_blocks=3, seed=None)
    counted = sum(int(held.batch(i).loss_mask_BT.sum()) for i in range(held.num_batches))
    assert counted == 3 * len(DOCUMENTS)


def test_text_rows_stand_below_and_have_no_laws() -> None:
    documents = [torch.arange(50).numpy().astype("int32") % 8]
    text = PackedBlocks(
        documents, end_id=END, length=14, batch_tokens=14, seed=0, attend_across=False
    )
    mixed = TextRows(first=blocks(), text=text)
    batch = mixed.batch(0, 0, 1)
    assert batch.tokens_BT.shape == (5, 14)
    assert batch.law_row_BT is not None
    assert batch.weights_BT is not None
    assert bool((batch.law_row_BT[4] == -1).all())
    assert bool((batch.weights_BT[4] == 1).all())
    assert bool(batch.loss_mask_BT[4].all())
    assert bool((batch.law_row_BT[:4] >= 0).any())


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_of_a_mixed_batch_are_together_the_batch(parts: int) -> None:
    """Four blocks and two rows of text: of three parts and of four, some have no text."""
    documents = [torch.arange(90).numpy().astype("int32") % 8]
    text = PackedBlocks(
        documents, end_id=END, length=14, batch_tokens=28, seed=0, attend_across=False
    )
    mixed = TextRows(first=blocks(), text=text)
    whole = rows_of(mixed.batch(1, 0, 1))
    divided = [rows_of(mixed.batch(1, part, parts)) for part in range(parts)]
    assert Counter(row for rows in divided for row in rows) == Counter(whole)
    assert max(map(len, divided)) - min(map(len, divided)) <= 1
    with pytest.raises(InputError, match=r"4 blocks.*5 parts"):
        mixed.batch(0, 4, 5)


def rows_of(batch: TrajectoryBatch) -> list[tuple[object, ...]]:
    """What is learnt in each row: tokens, what counts, how much, and by which law."""
    assert batch.law_row_BT is not None and batch.weights_BT is not None
    out: list[tuple[object, ...]] = []
    for b in range(len(batch.tokens_BT)):
        numbers = batch.law_row_BT[b]
        laws = batch.laws.take(numbers[numbers >= 0])
        said = tuple(laws.log_p_NK.flatten().tolist())
        columns = (batch.tokens_BT[b], batch.loss_mask_BT[b], batch.weights_BT[b], numbers >= 0)
        out.append((*(tuple(column.tolist()) for column in columns), said))
    return out


class Scripted:
    """A backend whose continuation tells the prompt and the seed."""

    def __init__(self) -> None:
        self.asked: list[CollectSettings] = []
        self.made: list[tuple[str, tuple[int, ...]]] = []

    def collect(
        self, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> list[Trajectory]:
        self.asked.append(settings)
        made = [
            Trajectory(
                prompt_id=r.prompt_id,
                forcing=settings.forcing,
                prompt=r.prompt,
                tokens=(settings.seed % 8, settings.seed // 8 % 8, END),
                score=0.0,
            )
            for r in requests
        ]
        self.made += [(one.prompt_id, one.tokens) for one in made]
        return made


ALIKE = Multi()


def online(
    teacher: Scripted,
    student: Scripted | None = None,
    share: float = 0.0,
    multi: Multi = ALIKE,
) -> Online:
    return Online(
        [CollectRequest(prompt_id=str(n), prompt=(n, 1)) for n in range(6)],
        teacher=teacher,
        settings=CollectSettings(forcing="beam", beams=2),
        multi=multi,
        end_id=END,
        length=10,
        prompts_per_step=4,
        seed=1,
        student=student,
        on_policy=share,
    )


def test_online_batches_are_functions_of_the_step_and_visit_every_prompt() -> None:
    source = online(Scripted())
    first = [source.batch(step, 0, 1) for step in range(3)]
    again = online(Scripted())
    assert same(again.batch(2, 0, 1), first[2])
    seen = Counter(n for step in range(3) for n in source._numbers(step))
    assert seen == Counter(dict.fromkeys(range(6), 2))  # twelve of six: each twice


def test_the_student_continues_its_share_and_draws_single_samples() -> None:
    teacher, student = Scripted(), Scripted()
    batch = online(teacher, student, 0.5).batch(0, 0, 1)
    assert int(batch.loss_mask_BT.sum()) == 12
    (asked,) = student.asked
    assert (asked.forcing, asked.samples, asked.temperatures) == ("sample", 1, (1.0,))
    assert teacher.asked[0].forcing == "beam"
    with pytest.raises(ValueError, match="student"):
        online(teacher, None, 0.5)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75])
def test_the_students_share_holds_over_steps_and_does_not_depend_on_the_parts(share: float) -> None:
    alone, parted = online(Scripted(), Scripted(), share), online(Scripted(), Scripted(), share)
    whole = [len(alone._own(step)) for step in range(20)]
    assert sum(whole) == 4 * 20 * share
    drawn = 0
    for step in range(20):
        for part in range(4):
            before = len(parted.student.asked)
            parted.batch(step, part, 4)
            drawn += len(parted.student.asked) - before
    assert drawn == sum(whole)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_part_draws_its_own_prompts_alone_and_parts_draw_what_one_would(parts: int) -> None:
    """Text rows beside it or not, nothing is drawn twice: a row may cost a generation."""
    text = PackedBlocks(
        [torch.arange(50).numpy().astype("int32") % 8],
        end_id=END, length=10, batch_tokens=10, seed=0, attend_across=False,
    )  # fmt: skip
    alone, teacher = Scripted(), Scripted()
    whole = TextRows(first=online(alone), text=text).batch(3, 0, 1)
    divided = TextRows(first=online(teacher), text=text)
    batches = []
    for part in range(parts):
        batches.append(divided.batch(3, part, parts))
        assert len(teacher.made) == 4 // parts * (part + 1)
    assert Counter(teacher.made) == Counter(alone.made)
    counted = sum(int(batch.loss_mask_BT.sum()) for batch in batches)
    assert counted == int(whole.loss_mask_BT.sum())
    with pytest.raises(InputError, match=r"4 prompts.*5 parts"):
        divided.batch(0, 4, 5)


class Beams(Scripted):
    """Beams of different lengths and scores."""

    def collect(
        self, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> list[Trajectory]:
        return [
            replace(one, index=beam, score=-float(beam), tokens=(*one.tokens[:2], *[beam] * beam))
            for one in super().collect(requests, settings)
            for beam in range(settings.beams if settings.forcing == "beam" else 1)
        ]


def weight_of_texts(batches: Sequence[TrajectoryBatch]) -> dict[tuple[int, ...], float]:
    """How much each text counts, wherever it stands."""
    out: Counter[tuple[int, ...]] = Counter()
    for batch in batches:
        assert batch.documents_BT is not None and batch.weights_BT is not None
        for b, owner in enumerate(batch.documents_BT):
            for number in owner.unique():
                place = (b, owner == number)
                counted = batch.weights_BT[place] * batch.loss_mask_BT[place]
                out[tuple(batch.tokens_BT[place].tolist())] += float(counted.sum())
    return {text: weight for text, weight in out.items() if weight}


@pytest.mark.parametrize("weights", ["uniform", "score"])
@pytest.mark.parametrize("parts", [2, 4])
def test_texts_weigh_the_same_in_parts_as_in_one_batch(parts: int, weights: str) -> None:
    """Also where only some prompts have several texts, and where a step has a prompt twice: of six
    prompts, four per step."""
    multi = Multi(weights=weights)
    twice = 0
    for step in range(12):
        source = online(Beams(), Beams(), 0.5, multi)
        twice += len(set(source._numbers(step))) < 4
        whole = weight_of_texts([source.batch(step, 0, 1)])
        divided = weight_of_texts([source.batch(step, part, parts) for part in range(parts)])
        assert divided == pytest.approx(whole)
    assert twice


def test_the_mean_weight_of_a_token_is_1_where_beams_are_equally_long() -> None:
    """As plain text beside them counts."""

    class Even(Beams):
        def collect(
            self, requests: Sequence[CollectRequest], settings: CollectSettings
        ) -> list[Trajectory]:
            made = super().collect(requests, settings)
            return [replace(one, tokens=(one.index, 1, END)) for one in made]

    for step in range(4):
        batch = online(Even(), Even(), 0.25).batch(step, 0, 1)
        assert batch.weights_BT is not None
        counted = batch.weights_BT[batch.loss_mask_BT]
        assert float(counted.mean()) == pytest.approx(1.0)
        assert float(counted.min()) < 1 < float(counted.max())


def test_every_part_of_a_step_brings_the_student_up_to_date() -> None:
    calls = []
    source = online(Scripted(), Scripted(), 0.25)  # one of four prompts
    source.refresh = lambda: calls.append(1)
    for part in range(4):
        source.batch(0, part, 4)
    assert len(calls) == 4


def test_a_teacher_in_the_loop_says_its_own_law_of_every_counted_token() -> None:
    target = HFTarget(tiny_model().double(), end_ids=frozenset({0}))
    source = InLoop(
        source=TrajectoryBlocks(
            [one.without_logprobs() for one in DOCUMENTS],
            end_id=END,
            length=14,
            batch_blocks=2,
            seed=3,
        ),
        teacher=target,
    )
    batch = source.batch(0, 0, 1)
    assert isinstance(batch.laws, FullLogprobs)
    counted = batch.mask_ahead(1)
    rows = batch.law_ahead(1)[counted]
    assert sorted(rows.tolist()) == list(range(len(batch.laws)))
    assert int(counted.sum()) == len(batch.laws)
    said = torch.log_softmax(batch.laws.head(batch.laws.take(rows).hidden_NH), -1)
    # the first document of the first row, read alone
    own = batch.documents_BT[0] == 0
    alone = batch.tokens_BT[:1, own]
    with target.native() as model, torch.no_grad():
        logits = model(input_ids=alone).logits[0]
    expected = torch.log_softmax(logits, -1)[counted[0, own]]
    torch.testing.assert_close(said[: len(expected)], expected, rtol=1e-9, atol=1e-9)
