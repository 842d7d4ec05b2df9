"""Trajectories become blocks: nothing is cut, every law stands with its own token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftsmith.distill.batches import TrainingExample, assemble, pack
from draftsmith.distill.datasets import Multi, mixed
from draftsmith.distill.trajectories.types import TopK, Trajectory
from draftsmith.errors import InputError

END = 9


def laws(tokens: tuple[int, ...], width: int = 2) -> TopK:
    """Laws that can be told apart: the token itself and its follower."""
    ids = np.array([sorted({t, (t + 1) % 10}) for t in tokens], np.int32)
    log_p = np.log(np.array([[0.5 + t / 100, 0.3] for t in tokens], np.float32))
    return TopK(ids_NK=ids[:, :width], log_p_NK=log_p[:, :width])


def trajectory(
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    *,
    name: str = "p",
    index: int = 0,
    score: float = 0.0,
) -> Trajectory:
    return Trajectory(
        prompt_id=name,
        forcing="beam",
        index=index,
        prompt=prompt,
        tokens=tokens,
        score=score,
        top=laws(tokens),
    )


def plain(*documents: Trajectory) -> list[TrainingExample]:
    return [TrainingExample(trajectory=document) for document in documents]


def test_the_drawing() -> None:
    first = trajectory((1, 2), (3, 4, END))
    second = trajectory((5,), (6, 7, 8, END))
    third = trajectory((1, 2, 3), (4, 5))
    blocks = pack(plain(first, second, third), 12)
    assert [len(block) for block in blocks] == [2, 1]
    batch = assemble(blocks, 12, END)
    assert batch.tokens_BT.tolist() == [
        [1, 2, 3, 4, 9, 9, 5, 6, 7, 8, 9, 9],
        [1, 2, 3, 4, 5, 9, 9, 9, 9, 9, 9, 9],
    ]
    assert batch.loss_mask_BT.int().tolist() == [
        [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert batch.law_row_BT is not None
    assert batch.law_row_BT.tolist()[0] == [-1, -1, 0, 1, 2, -1, -1, 3, 4, 5, 6, -1]
    assert batch.law_row_BT.tolist()[1][:6] == [-1, -1, -1, 7, 8, -1]


def test_each_counted_place_imitates_the_law_of_the_token_behind_it() -> None:
    documents = [trajectory((n, n + 1), (n, 3, END), name=str(n)) for n in range(1, 6)]
    batch = assemble(pack(plain(*documents), 11), 11, END)
    counted = batch.mask_ahead(1)
    assert int(counted.sum()) == 15
    assert batch.laws is not None
    wanted = batch.tokens_ahead(1)[counted]
    said = batch.laws.take(batch.law_ahead(1)[counted])
    assert bool((said.ids_NK == wanted[:, None]).any(1).all())  # the law of this very token
    assert bool((batch.law_ahead(1)[counted] >= 0).all())


def test_documents_do_not_see_each_other_nor_the_padding() -> None:
    batch = assemble(
        pack(plain(trajectory((1,), (2, END)), trajectory((3,), (4, END))), 12), 12, END
    )
    owner = batch.documents_BT
    assert owner is not None
    assert owner[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


def test_a_document_longer_than_a_block_loses_its_end_only() -> None:
    long = trajectory((1, 2), (3, 4, 5, 6, 7))
    batch = assemble(pack(plain(long), 5), 5, END)
    assert batch.tokens_BT.tolist() == [[1, 2, 3, 4, 5]]
    assert batch.law_row_BT is not None
    assert batch.law_row_BT.tolist() == [[-1, -1, 0, 1, 2]]


def test_no_block_is_left_half_empty_without_need() -> None:
    documents = plain(*(trajectory((1,), (2, 3, END), name=str(n)) for n in range(10)))
    blocks = pack(documents, 10)  # two of five places each
    assert [len(block) for block in blocks] == [2] * 5


def test_documents_whose_answer_begins_behind_the_block_are_refused() -> None:
    with pytest.raises(InputError, match="none of 1 trajectories"):
        pack(plain(trajectory((1, 2, 3, 4), (5,))), 4)


def test_narrow_and_wide_laws_share_a_batch() -> None:
    narrow = trajectory((1,), (2,))
    wide = Trajectory(
        prompt_id="w",
        forcing="gold",
        prompt=(1,),
        tokens=(3,),
        score=0.0,
        top=TopK(
            ids_NK=np.array([[1, 2, 3]], np.int32),
            log_p_NK=np.log(np.array([[0.2, 0.3, 0.5]], np.float32)),
        ),
    )
    batch = assemble(pack(plain(narrow, wide), 8), 8, END)
    assert batch.laws is not None
    sums = batch.laws.log_p_NK.exp().sum(1)
    torch.testing.assert_close(sums, torch.tensor([0.82, 1.0]))


# --------------------------------------------------------------------------- hidden states


def heard(document: Trajectory, first: float, width: int = 2) -> Trajectory:
    """With features that tell whose they are, and of which place."""
    places = len(document.prompt) + len(document.tokens)
    ramp = first + np.arange(places * width, dtype=np.float32).reshape(places, width)
    return replace(document, features=ramp)


def test_features_stand_at_the_places_of_their_own_document() -> None:
    """The drawing: two documents in a row, one in the other; separators and padding have none."""
    first = heard(trajectory((1, 2), (3, 4, END)), 100)
    second = heard(trajectory((5,), (6, 7, 8, END)), 200)
    third = heard(trajectory((1, 2, 3), (4, 5)), 300)
    batch = assemble(pack(plain(first, second, third), 12), 12, END)
    assert batch.features_BTS is not None and batch.features_BTS.dtype == torch.float32
    none = [0.0] * 2
    rows = [
        [*first.features.tolist(), none, *second.features.tolist(), none],
        [*third.features.tolist(), *[none] * 7],
    ]
    assert batch.features_BTS.tolist() == rows
    # what a place is to imitate one step ahead is the feature of the place behind it
    assert batch.features_ahead(1)[0, :4].tolist() == rows[0][1:5]


def test_features_are_cut_where_their_document_is() -> None:
    long = heard(trajectory((1, 2), (3, 4, 5, 6, 7)), 100)
    batch = assemble(pack(plain(long), 5), 5, END)
    assert batch.features_BTS is not None and long.features is not None
    assert batch.features_BTS[0].tolist() == long.features[:5].tolist()


def test_without_features_there_are_none_and_some_are_refused() -> None:
    bare, rich = trajectory((1,), (2, END)), heard(trajectory((3,), (4, END)), 1)
    assert assemble(pack(plain(bare), 12), 12, END).features_BTS is None
    with pytest.raises(InputError, match="1 of 2 trajectories"):
        assemble(pack(plain(bare, rich), 12), 12, END)
    wide = heard(trajectory((3,), (4, END)), 1, width=3)
    with pytest.raises(InputError, match=r"width 3 and 2\b"):
        assemble(pack(plain(rich, wide), 12), 12, END)


def test_a_text_keeps_its_features_when_it_loses_its_laws_or_they_are_mixed() -> None:
    group = plain(
        *(heard(trajectory((1,), (n, END), index=n), 10.0 * n) for n in range(2, 5)),
    )
    for document, mixture in zip(group, mixed(group, Multi().shares_of), strict=True):
        for other in (document.without_logprobs(), mixture):
            assert torch.equal(other.trajectory.states(3), document.trajectory.states(3))
    assert assemble(pack([d.without_logprobs() for d in group], 12), 12, END).laws is None


# --------------------------------------------------------------------------- many of one prompt


def test_a_prompt_counts_as_much_as_another_and_the_mean_weight_is_1() -> None:
    group = [trajectory((1,), (2, END), name="many", index=i) for i in range(4)]
    single = [trajectory((1,), (3, END), name="one")]
    items = Multi().apply(plain(*group, *single))
    per_prompt = {
        name: sum(i.weight for i in items if i.trajectory.prompt_id == name)
        for name in ("many", "one")
    }
    assert per_prompt["many"] == pytest.approx(per_prompt["one"])
    tokens = sum(len(i.trajectory.tokens) for i in items)
    assert sum(i.weight * len(i.trajectory.tokens) for i in items) == pytest.approx(tokens)


def test_one_trajectory_per_prompt_is_plain_distillation_in_both_readings() -> None:
    singles = [trajectory((1,), (2, END), name=str(n)) for n in range(3)]
    for aggregate in ("per_beam", "mixture"):
        items = Multi(aggregate=aggregate).apply(plain(*singles))
        assert [item.weight for item in items] == pytest.approx([1.0] * 3)
        for item, known in zip(items, singles, strict=True):
            assert item.trajectory.top is not None
            assert known.top is not None
            np.testing.assert_array_equal(item.trajectory.top.ids_NK, known.top.ids_NK)
            np.testing.assert_allclose(item.trajectory.top.log_p_NK, known.top.log_p_NK, rtol=1e-6)


def test_score_weights_are_a_softmax_of_the_scores() -> None:
    group = [
        trajectory((1,), (2, END), index=0, score=-1.0),
        trajectory((1,), (3, END), index=1, score=-3.0),
    ]
    first, second = Multi(weights="score", score_temperature=2.0).apply(plain(*group))
    assert first.weight / second.weight == pytest.approx(math.e)


def test_the_best_trajectories_are_kept_when_fewer_are_wanted() -> None:
    group = [trajectory((1,), (i + 2, END), index=i) for i in (2, 0, 1)]
    items = Multi(most=2).apply(plain(*group))
    assert [item.trajectory.index for item in items] == [0, 1]


def test_the_best_samples_are_the_most_probable_at_whatever_temperature() -> None:
    """They come in the order of their temperatures; beams in that of their search."""
    scores = {(0, 0.3): -9.0, (0, 1.0): -2.0, (1, 0.3): -1.0, (1, 1.0): -5.0}
    group = [
        replace(
            trajectory((1,), (2, END), index=index, score=score),
            forcing="sample",
            temperature=temperature,
        )
        for (index, temperature), score in scores.items()
    ]
    items = [item.trajectory for item in Multi(most=2).apply(plain(*group))]
    assert [(one.index, one.temperature) for one in items] == [(0, 1.0), (1, 0.3)]
    assert len(Multi(most=9).apply(plain(*group))) == 4
    beams = [trajectory((1,), (2, END), index=i, score=-5.0 + i) for i in range(3)]  # a penalty
    items = [item.trajectory for item in Multi(most=1).apply(plain(*beams))]
    assert [one.index for one in items] == [0]
    (best,) = Multi(most=1).apply(plain(*beams, *group))
    assert best.trajectory.score == -1.0


def test_a_mixture_is_the_mean_over_the_beams_that_still_have_a_token() -> None:
    def law(*rows: tuple[float, float, float]) -> TopK:
        return TopK(
            ids_NK=np.tile(np.arange(3, dtype=np.int32), (len(rows), 1)),
            log_p_NK=np.log(np.array(rows, np.float32)),
        )

    short = Trajectory(
        prompt_id="p", forcing="beam", prompt=(1,), tokens=(2,), score=0.0,
        top=law((0.2, 0.3, 0.5)),
    )  # fmt: skip
    long = Trajectory(
        prompt_id="p", forcing="beam", index=1, prompt=(1,), tokens=(1, 2), score=0.0,
        top=law((0.6, 0.3, 0.1), (0.1, 0.1, 0.8)),
    )  # fmt: skip
    first, second = (document.top() for document in mixed(plain(short, long), Multi().shares_of))
    assert first is not None
    assert second is not None
    np.testing.assert_allclose(np.exp(first.log_p_NK), [[0.4, 0.3, 0.3]], rtol=1e-5)
    np.testing.assert_allclose(
        np.exp(second.log_p_NK), [[0.4, 0.3, 0.3], [0.1, 0.1, 0.8]], rtol=1e-5
    )


@pytest.mark.parametrize("temperature", [0.001, 1e-310])
def test_beams_too_poor_to_count_are_mixed_among_themselves_behind_the_end_of_the_best(
    temperature: float,
) -> None:
    best = trajectory((1,), (END,), index=0, score=-1.0)
    good = trajectory((1,), (2, 3, END), index=1, score=-2.0)
    poor = trajectory((1,), (2, 5, END), index=2, score=-3.0)
    even = replace(good, index=3)
    multi = Multi(aggregate="mixture", weights="score", score_temperature=temperature)
    shares = multi.share(plain(best, good, poor, even))
    assert [share for _, share in shares] == [1.0, 0.0, 0.0, 0.0]
    for other, _ in shares[1:]:
        top = other.top()
        assert top is not None
        for t, token in enumerate((END, 3, END)):  # the best while it goes on, then good and even
            law = np.exp(laws((token,)).log_p_NK[0])
            np.testing.assert_allclose(np.exp(top.log_p_NK[t]), law, rtol=1e-5)
            assert top.ids_NK[t].tolist() == laws((token,)).ids_NK[0].tolist()


def test_a_mixture_of_cut_laws_is_over_the_union_of_what_they_keep() -> None:
    def law(ids: list[int], p: list[float]) -> TopK:
        return TopK(ids_NK=np.array([ids], np.int32), log_p_NK=np.log(np.array([p], np.float32)))

    beams = [
        Trajectory(
            prompt_id="p", forcing="beam", index=i, prompt=(1,), tokens=(2,), score=0.0, top=top
        )
        for i, top in enumerate((law([1, 4], [0.5, 0.4]), law([4, 7], [0.2, 0.6])))
    ]
    (top, _) = (document.top() for document in mixed(plain(*beams), Multi().shares_of))
    assert top is not None
    assert top.ids_NK.tolist() == [[1, 4, 7]]
    np.testing.assert_allclose(np.exp(top.log_p_NK), [[0.25, 0.3, 0.3]], rtol=1e-5)


def test_a_mixture_needs_laws() -> None:
    bare = Trajectory(prompt_id="p", forcing="beam", prompt=(1,), tokens=(2,), score=0.0)
    with pytest.raises(InputError, match="needs a store with logprobs"):
        Multi(aggregate="mixture").apply(plain(bare))
