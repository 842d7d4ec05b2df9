"""Several drafters fill one tree: what is kept, whose it is, and who is asked at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.law import Law, Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.trees import depths, stack_drafts
from draftsmith.core.types import PADDING, ROOT, DraftTree, Proposal, RequestBatch, TreeShape
from draftsmith.drafters.base import Accepted, Drafter, DraftState
from draftsmith.drafters.cascade import Cascade, _State
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.independent import _State as ModelState
from draftsmith.drafters.merging import SURE, FilledTree, add_draft, stacked
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prediction import PredictionDrafter
from draftsmith.drafters.suffix import Suffix
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other

V = 24
A, B, C, D, E = range(5)
TREE = TreeShape(widths=(3, 2, 1))


def filled(depth: int, most: int, *drafts: DraftTree) -> FilledTree:
    tree = FilledTree(depth=depth, most=most)
    for number, draft in enumerate(drafts):
        add_draft([tree], draft, number)
    return tree


def draft(tokens: list[int], parents: list[int], probs: list[float] | None = None) -> DraftTree:
    return stack_drafts([tokens], [parents], probs=None if probs is None else [probs])


def paths(tree: DraftTree, row: int = 0) -> list[tuple[int, ...]]:
    """The nodes by the tokens that lead to them, in their order."""
    found: dict[int, tuple[int, ...]] = {ROOT: ()}
    tokens, parents = tree.tokens_BN[row].tolist(), tree.parents_BN[row].tolist()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent != PADDING:
            found[node] = (*found[parent], token)
    return [path for node, path in found.items() if node != ROOT]


FIRST = draft([A, B], [ROOT, 0], [0.9, 0.5])
SECOND = draft([A, C, D], [ROOT, ROOT, 0], [0.6, 0.2, 0.3])


def test_one_path_of_two_drafters_is_one_path_of_the_first() -> None:
    """The drawing of the module."""
    tree = stacked([filled(2, 4, FIRST, SECOND)])
    assert paths(tree) == [(A,), (A, B), (C,), (A, D)]
    assert tree.origin_BN is not None and tree.origin_BN.tolist() == [[0, 0, 2, 2]]
    assert tree.proposal is Proposal.OPAQUE and tree.q is None


@pytest.mark.parametrize("most", range(5))
def test_where_there_is_no_room_the_nodes_of_most_value_stay(most: int) -> None:
    tree = stacked([filled(2, most, FIRST, SECOND)])
    assert paths(tree) == [(A,), (A, B), (C,), (A, D)][:most]


def test_a_node_that_another_drafter_thinks_more_of_rises() -> None:
    certain = draft([A, D], [ROOT, 0], [1.0, 0.95])
    assert paths(stacked([filled(2, 4, FIRST, certain)])) == [(A,), (A, D), (A, B)]
    low = draft([C, D], [ROOT, 0], [0.1, 0.5])
    high = draft([C], [ROOT], [0.8])
    assert paths(stacked([filled(2, 2, FIRST, low, high)])) == [(A,), (C,)]


def test_what_is_too_deep_and_what_hangs_on_it_is_left_out() -> None:
    deep = draft([C, D, E], [ROOT, 0, 1], [0.9, 0.9, 0.9])
    tree = filled(2, 9, deep, draft([A, B], [PADDING, PADDING]))
    assert paths(stacked([tree])) == [(C,), (C, D)]


def test_the_values_of_draws_are_those_of_their_law() -> None:
    law = Law(torch.tensor([[0.1, 0.3, 0.6, 0.0, 0.0]], dtype=torch.float64), 5)
    one = draft([B, C, B], [ROOT, ROOT, ROOT])
    drawn = replace(
        one, proposal=Proposal.SAMPLED, q=law, q_rows_BN=torch.zeros(1, 3, dtype=torch.long)
    )
    tree = filled(1, 9, drawn)
    assert paths(stacked([tree])) == [(C,), (B,)]  # a token drawn twice is one node
    assert tree.values == [0.3, 0.6]


def test_a_drafter_that_does_not_say_is_ranked_by_its_order() -> None:
    tree = filled(2, 9, draft([A, B, C], [ROOT, ROOT, 0]))
    assert tree.values == pytest.approx([0.8, 0.16, 0.64])
    assert paths(stacked([tree])) == [(A,), (A, C), (B,)]


def test_notes_stay_where_the_whole_path_is_of_one_drafter() -> None:
    """Its drafter takes them up from the root on: behind another's node they would be of a place
    that it has not."""

    def noted(one: DraftTree, notes: list[int]) -> DraftTree:
        return replace(one, fed_BN=torch.tensor([notes]))

    first = noted(FIRST, [0, -1])
    second = noted(draft([A, D, C, E], [ROOT, 0, ROOT, 2]), [0, 2, 1, 3])
    tree = stacked([filled(2, 9, first, second)])
    assert tree.fed_BN is not None
    notes = dict(zip(paths(tree), tree.fed_BN[0].tolist(), strict=True))
    assert notes == {(A,): 0, (A, B): -1, (A, D): -1, (C,): 1, (C, E): 3}


def test_sure_is_a_tree_with_a_probable_path_of_full_depth() -> None:
    assert filled(2, 9, draft([A, B], [ROOT, 0], [1.0, SURE])).is_sure
    assert not filled(2, 9, draft([A, B], [ROOT, 0], [0.9, SURE])).is_sure
    assert not filled(3, 9, draft([A, B], [ROOT, 0], [1.0, 1.0])).is_sure


# --------------------------------------------------------------------------- the cascade


def target() -> HFTarget:
    return tiny_target(V, seed=3, dtype=torch.float64)


def draft_model(seed: int, proposal: str = "greedy") -> Independent:
    model = tiny_target(V, seed=seed, dtype=torch.float64)
    return Independent(Independent.Config(proposal=proposal), model=model)


REPEATED, NEW = [1, 2, 3, 4, 1, 2], [5, 6, 7, 8]


def proposed(
    drafter: Drafter, texts: list[list[int]], depth: list[int], shape: TreeShape
) -> DraftTree:
    request = RequestBatch(tokens=texts, request_ids=tuple(range(len(texts))), max_new_tokens=20)
    noise = Noise(0, request.request_ids, [len(text) for text in texts])
    sampler = Sampler(temperature=1.0)
    shape = shape.clip(max(depth))
    return drafter.propose(drafter.start(request), shape, np.array(depth), sampler, noise)


@pytest.mark.parametrize("shape", [TREE, TreeShape(widths=(3, 3, 3), keep=7)], ids=str)
@pytest.mark.parametrize("proposal", ["greedy", "sampled", "without_replacement"])
def test_a_row_does_not_depend_on_its_neighbours(shape: TreeShape, proposal: str) -> None:
    cascade = Cascade([Suffix(), draft_model(8, proposal)])
    cascade.bind(target())
    texts, depth = [REPEATED, NEW, NEW, REPEATED], [3, 1, 3, 0]
    together = proposed(cascade, texts, depth, shape)
    for row, deep in enumerate(depth[:3]):
        # the noise of a row is that of its number
        rows = [NEW] * row + [texts[row]]
        alone = proposed(cascade, rows, [0] * row + [deep], shape)
        assert paths(together, row) == paths(alone, row)
        assert len(paths(alone, row)) <= shape.clip(deep).num_nodes
    assert paths(together, 3) == []
    origins = together.origin_BN
    assert origins is not None and set(origins[0].tolist()) == {0, 2}


def test_a_tree_is_the_draft_models_with_the_lookup_in_it() -> None:
    """The match of REPEATED is two tokens long, so that suffix drafts two."""
    alone, cascade = draft_model(8), Cascade([Suffix(), draft_model(8)])
    for drafter in (alone, cascade):
        drafter.bind(target())
    tree, own = (proposed(one, [REPEATED, NEW], [3, 3], TREE) for one in (cascade, alone))
    assert set(paths(tree, 1)) == set(paths(own, 1))
    assert (3, 4) in paths(tree) and (3, 4) not in paths(own)
    assert len(paths(tree)) == TREE.num_nodes == len(paths(own))
    assert set(paths(tree)) - set(paths(own)) <= {(3,), (3, 4)}


class Asked(Independent):
    """A draft model that notes how deep it is asked to draft."""

    def __init__(self, seed: int, **options: int) -> None:
        model = tiny_target(V, seed=seed, dtype=torch.float64)
        super().__init__(Independent.Config(proposal="greedy", **options), model=model)
        self.asked: list[list[int]] = []

    def propose(
        self,
        state: DraftState,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        self.asked.append(depth_B.tolist())
        return super().propose(state, shape, depth_B, sampler, noise)


def test_a_drafter_that_is_sure_saves_asking_the_next() -> None:
    for depth, asked in ((2, [[0, 2]]), (3, [[3, 3]])):
        second = Asked(8)
        cascade = Cascade([Suffix(), second])
        cascade.bind(target())
        proposed(cascade, [REPEATED, NEW], [depth, depth], TREE)
        assert second.asked == asked
    second = Asked(8)
    cascade = Cascade([Suffix(), second])
    cascade.bind(target())
    proposed(cascade, [REPEATED], [2], TREE)
    assert second.asked == []


def test_later_drafters_are_no_deeper_than_their_own_shape() -> None:
    model = tiny_target(V, seed=8, dtype=torch.float64)
    later = Independent(Independent.Config(proposal="greedy", length=2), model=model)
    cascade = Cascade([Suffix(Suffix.Config(factor=9.0)), later])
    cascade.bind(target())
    shape = TreeShape(widths=(2, 2, 1, 1, 1))
    tree = proposed(cascade, [REPEATED, NEW], [5, 5], shape)
    deep = depths(tree.parents_BN.numpy()).max(1).tolist()
    assert deep == [5, 2] or deep == [4, 2]  # the lookup goes on, up to the end of its text
    assert len(paths(tree, 1)) == 6


def test_origins_of_accepted_tokens_and_the_text() -> None:
    """Whatever the very target's tree holds is accepted whole; the text is plain decoding's."""
    model = target()
    options = DecodeOptions(max_new_tokens=40, ignore_end=True, shape=TREE)
    plain = [step.emitted for step in decode(model, NoDrafter(), [REPEATED, NEW], options)]
    expected = [[t for step in plain for t in step[row]] for row in range(2)]
    for parts in (
        [Suffix(), draft_model(3)],
        [draft_model(8), Suffix(), draft_model(3)],
        [draft_model(8), Suffix(), Eagle(), draft_model(3)],
        [Eagle(), draft_model(3)],
    ):
        cascade = Cascade(parts)
        cascade.bind(model)
        found: list[list[int]] = [[], []]
        origins: set[int] = set()
        steps = list(decode(model, cascade, [REPEATED, NEW], options))
        for step in steps:
            assert max(step.proposed) <= TREE.num_nodes
            origins.update(*step.origins)
            for row in range(2):
                found[row] += step.emitted[row]
        assert found == expected
        assert len(parts) in origins, "no token of the last drafter's was accepted"
        assert origins <= {0, *range(2, len(parts) + 1)}


class TakenUp(Cascade):
    """Notes what the second part's cache holds more than the text before the step."""

    more: list[int]

    def advance(self, state: DraftState, accepted: Accepted) -> _State:
        assert isinstance(state, _State) and isinstance(state.parts[1], ModelState)
        known = [len(row) for row in state.parts[1].known]
        after = super().advance(state, accepted)
        assert isinstance(after.parts[1], ModelState)
        lengths_B = after.parts[1].cache.lengths_B
        self.more += [int(have) - len_ for have, len_ in zip(lengths_B, known, strict=True)]
        return after


def test_a_draft_models_cache_stays_that_of_its_text() -> None:
    """The draft model is the target itself: all that it drafts is accepted, unless its cache holds
    the keys of another drafter's node. It drafts no deeper than 3, so the tree has room for all."""
    model, second = target(), Asked(3, length=3)
    cascade = TakenUp([PredictionDrafter(), second])
    cascade.more = []
    cascade.bind(model)
    shape = TreeShape(widths=(3, 2, 1, 1, 1))
    options = DecodeOptions(max_new_tokens=60, ignore_end=True, shape=shape)
    plain = [step.emitted for step in decode(model, NoDrafter(), [REPEATED, NEW], options)]
    texts = [[t for step in plain for t in step[row]] for row in range(2)]
    wrong = [[(t + (n % 3 == 2)) % V for n, t in enumerate(text)] for text in texts]
    mixed = 0
    for step in decode(model, cascade, [REPEATED, NEW], options, predictions=wrong):
        for row, asked in enumerate(second.asked.pop() if second.asked else ()):
            assert step.accepted[row] >= asked
            mixed += len(set(step.origins[row])) > 1
    assert mixed > 2, "no accepted path was of both"
    assert max(cascade.more) > 0, "no note was taken up"


def test_a_tree_that_does_not_branch_at_the_root_is_refused() -> None:
    cascade = Cascade([Suffix(), draft_model(3)])
    model = target()
    cascade.bind(model)
    for shape in (TreeShape(widths=(1, 2)), TreeShape(paths=((0,), (0, 0), (0, 1)))):
        with pytest.raises(InputError, match="branch at the root"):
            next(decode(model, cascade, [NEW], DecodeOptions(shape=shape)))
