"""`recycling`: the tree that a table gives, what fills the table, and how long it is kept."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch

from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.types import TreeShape
from draftsmith.drafters.base import RowStates
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.recycling import Recycling, Row, expanded
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import InputError
from draftsmith.targets.toy import tiny_target

torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other

FIVE = TreeShape(paths=((0,), (1,), (0, 0), (0, 1), (1, 0)))
DEEP = TreeShape(paths=((0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 1, 0)))
TABLE = {0: (1, 2, 3), 1: (2, 0), 2: (3,)}


@pytest.mark.parametrize(
    ("shape", "depth", "wanted"),
    [
        (TreeShape.chain(3), 3, ([1, 2, 3], [-1, 0, 1])),
        (TreeShape.chain(3), 2, ([1, 2], [-1, 0])),
        (TreeShape.chain(4), 4, ([1, 2, 3], [-1, 0, 1])),  # nothing is known of 3
        (TreeShape(widths=(2, 2)), 2, ([1, 2, 2, 0, 3], [-1, -1, 0, 0, 1])),
        (TreeShape(widths=(2, 2), keep=3), 2, ([1, 2, 2], [-1, -1, 0])),
        (FIVE, 2, ([1, 2, 2, 0, 3], [-1, -1, 0, 0, 1])),
        # of 2 one successor is known, so what lies below its second is not there
        (DEEP, 4, ([1, 2, 3], [-1, 0, 1])),
    ],
)
def test_a_shape_is_filled_from_the_table(
    shape: TreeShape, depth: int, wanted: tuple[list[int], list[int]]
) -> None:
    assert expanded(0, (TABLE,), shape, depth) == wanted


def test_the_first_table_that_knows_a_token_counts() -> None:
    first, second = {0: (5,)}, {0: (6,), 5: (7,)}
    assert expanded(0, (first, second), TreeShape.chain(2), 2)[0] == [5, 7]


def test_text_is_followed_as_it_was_last() -> None:
    row = Row([1, 2, 1, 3])
    row.extend([4])
    assert row.seen == {1: (3,), 2: (1,), 3: (4,)}
    assert row.rewound([1, 2, 1, 3, 4, 5]) is row
    assert row.rewound([1, 2]).table == {} and row.rewound([1, 2]).tokens == [1, 2]


def test_logits_fill_the_table_at_the_root_and_at_every_node() -> None:
    target = tiny_target(12, seed=1)
    drafter = Recycling(Recycling.Config(successors=3))
    drafter.bind(target)
    options = DecodeOptions(max_new_tokens=12, shape=TreeShape(widths=(2, 1)), ignore_end=True)
    prompt, told = [1, 2, 3, 1, 2, 3, 1], []
    session = Session()
    for step in decode(target, drafter, [prompt], options, session=session):
        told += step.emitted[0]
    assert isinstance(session.state, RowStates)
    (row,) = session.state.rows
    assert row.tokens == prompt + told
    # every token that was emitted has been fed, but the last; so have refused drafts
    fed = {prompt[-1], *told[:-1]}
    assert fed < set(row.table)
    assert all(len(set(after)) == 3 for after in row.table.values())
    # plain decoding says what the best successor of each token was at its last place
    plain = [one.emitted[0] for one in decode(target, NoDrafter(), [prompt], options)]
    assert [token for step in plain for token in step] == told
    best = dict(pairwise([prompt[-1], *told]))
    assert {token: row.table[token][0] for token in fed} == best


def test_it_drafts_where_the_text_does_not_repeat_itself() -> None:
    """A token that was seen in a draft, never in the text, is followed by what its logits said."""
    row = Row([1, 2])
    row.table = {2: (5, 6), 5: (7, 8), 7: (9, 1)}
    assert expanded(row.tokens[-1], (row.table, {}, row.seen), TreeShape.chain(3), 3)[0] == [
        5,
        7,
        9,
    ]


@pytest.mark.parametrize("memory", [False, True])
def test_a_table_is_taken_over_by_the_next_request_if_it_is_asked_for(memory: bool) -> None:
    target = tiny_target(12, seed=1)
    drafter = Recycling(Recycling.Config(memory=memory))
    drafter.bind(target)
    options = DecodeOptions(max_new_tokens=16, ignore_end=True)

    def steps() -> int:
        count = len(list(decode(target, drafter, [[1, 2, 3]], options)))
        gc.collect()
        return count

    first, second = steps(), steps()
    assert bool(drafter.past) == memory
    assert second < first if memory else second == first
    if memory:
        assert len(drafter.past) <= 12
        with pytest.raises(InputError, match="remembers texts of a target with 12 tokens"):
            drafter.bind(tiny_target(13, seed=1))


def test_options_are_checked() -> None:
    for wrong in ("successors=0", "successors=65", "length=-1"):
        with pytest.raises(InputError, match=wrong.partition("=")[0]):
            load_drafter("recycling", [wrong])
    assert load_drafter("recycling", ["length=6"]).default_shape == TreeShape.chain(6)
    assert load_drafter("recycling").default_shape.num_nodes == 12
