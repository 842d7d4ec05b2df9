"""Packing: what goes into blocks, in which order, and that nothing is lost or repeated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from draftsmith.distill.batches import EvaluationBlocks, PackedBlocks, Phases
from draftsmith.errors import InputError

END = 0


def make_documents(count: int = 9, seed: int = 0) -> list[np.ndarray]:
    """Documents whose tokens are all different, so that a token tells where it came from."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 12, count)
    ids = iter(range(1, 1 + int(sizes.sum())))
    return [np.array([next(ids) for _ in range(size)], np.int32) for size in sizes]


def pack(documents: list[np.ndarray], **changes: object) -> PackedBlocks:
    options: dict[str, object] = {"end_id": END, "length": 4, "batch_tokens": 4, "seed": 3}
    return PackedBlocks(documents, **(options | changes))


def epoch(source: PackedBlocks, number: int) -> list[list[int]]:
    steps = range(number * source.num_blocks, (number + 1) * source.num_blocks)
    return [source.batch(step, 0, 1).tokens_BT[0].tolist() for step in steps]


def test_every_token_is_used_exactly_once_per_epoch_up_to_the_tail() -> None:
    documents = make_documents()
    source = pack(documents)
    for number in range(3):
        used = [token for block in epoch(source, number) for token in block]
        words = [token for token in used if token != END]
        assert len(words) == len(set(words))
        total = sum(len(document) + 1 for document in documents)
        assert len(used) == total - total % 4


def test_an_end_token_follows_every_document() -> None:
    documents = [d for d in make_documents() if len(d)]
    last = {int(document[-1]) for document in documents}
    source = pack(documents, length=2, batch_tokens=2)
    source.batch(0, 0, 1)
    stream = source._stream.tolist()
    for here, following in itertools.pairwise(stream):
        assert (following == END) == (here in last)


def test_the_order_is_keyed_by_seed_and_epoch() -> None:
    documents = make_documents()
    source = pack(documents)
    first, second = epoch(source, 0), epoch(source, 1)
    assert first != second
    assert epoch(source, 0) == first  # going back gives the same: nothing is remembered
    assert epoch(pack(documents), 1) == second
    assert epoch(pack(documents, seed=4), 0) != first


def test_parts_of_a_batch_are_the_batch() -> None:
    source = pack(make_documents(40), batch_tokens=24)
    whole = source.batch(1, 0, 1).tokens_BT.tolist()
    parts = [source.batch(1, part, 3).tokens_BT.tolist() for part in range(3)]
    assert sorted(row for part in parts for row in part) == sorted(whole)
    with pytest.raises(InputError, match="do not fill"):
        source.batch(1, 6, 7)


def test_a_batch_may_reach_into_the_next_epoch() -> None:
    documents = make_documents()
    one_by_one = pack(documents)
    many = pack(documents, batch_tokens=4 * (one_by_one.num_blocks - 1))
    blocks = [row for step in range(3) for row in many.batch(step, 0, 1).tokens_BT.tolist()]
    expected = [block for number in range(3) for block in epoch(one_by_one, number)]
    assert blocks == expected[: len(blocks)]


def test_document_numbers_separate_documents_in_a_block() -> None:
    documents = [np.array([1, 2], np.int32), np.array([3], np.int32), np.array([4, 5], np.int32)]
    batch = pack(documents, length=8, batch_tokens=8, attend_across=False).batch(0, 0, 1)
    assert batch.documents_BT is not None
    owner = {1: 0, 2: 0, 3: 1, 4: 2, 5: 2}
    tokens, numbers = batch.tokens_BT[0].tolist(), batch.documents_BT[0].tolist()
    owners = []
    for place, token in enumerate(tokens):
        before = tokens[place - 1] if token == END else token  # an end token is its document's
        owners.append(owner[before])
    order = list(dict.fromkeys(owners))
    assert numbers == [order.index(one) for one in owners]  # 0, 1, 2, whichever comes first
    # The end token is predicted, the first token of the next document is not.
    ends = batch.tokens_BT[0, :-1] == END
    assert not batch.mask_ahead(1)[0, :-1][ends].any()
    assert batch.mask_ahead(1)[0, :-1][~ends].all()


def test_a_token_outside_the_vocabulary_is_fed_but_not_predicted() -> None:
    documents = [np.array([5, -1, 6], np.int32)]
    batch = pack(documents, stand_in=9).batch(0, 0, 1)
    assert batch.tokens_BT.tolist() == [[5, 9, 6, END]]
    assert batch.loss_mask_BT.tolist() == [[True, False, True, True]]
    held = EvaluationBlocks(documents, end_id=END, length=3, batch_blocks=8, stand_in=9).batch(0)
    assert held.tokens_BT.tolist() == [[END, 5, 9], [9, 6, END]]
    assert held.mask_ahead(1).tolist() == [[True, False, False], [True, True, False]]


def test_phases_count_their_own_steps() -> None:
    documents = make_documents(40)
    short, long = pack(documents, batch_tokens=8), pack(documents, length=8, batch_tokens=8)
    source = Phases(first=short, second=long, second_from=3)
    for step, (inner, at) in enumerate([(short, 0), (short, 1), (short, 2), (long, 0), (long, 1)]):
        assert torch.equal(source.batch(step, 0, 1).tokens_BT, inner.batch(at, 0, 1).tokens_BT)


@pytest.mark.parametrize("length", [2, 3, 5, 64])
def test_evaluation_predicts_every_token_exactly_once(length: int) -> None:
    documents = make_documents(7)
    blocks = EvaluationBlocks(documents, end_id=END, length=length, batch_blocks=3)
    predicted = []
    for index in range(blocks.num_batches):
        batch = blocks.batch(index)
        predicted += batch.tokens_ahead(1)[batch.mask_ahead(1)].tolist()
    expected = [token for document in documents for token in [*document.tolist(), END]]
    assert predicted == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"length": 1000, "batch_tokens": 1000}, "fewer than one block"),
        ({"batch_tokens": 6}, "multiple"),
        ({"batch_tokens": 2}, "multiple"),
        ({"length": 1, "batch_tokens": 1}, "multiple"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(changes: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        pack(make_documents(), **changes)
