"""The key/value cache against a list of tokens: whatever its owner does, a row holds what it should
and a token sees what it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from draftsmith.core.cache import BUCKET, Block, KVCache, KVSpec, lay_out
from draftsmith.core.trees import depths, sees
from draftsmith.core.types import PADDING, ROOT

SPEC = KVSpec(
    layers=((2, 3, 3), (1, 2, 4), (2, 3, 3)), dtype=torch.float64, device=torch.device("cpu")
)
"""Three layers, two of one shape; keys and values of another width in the second."""


class Marks:
    """Writes a number of its own for every token into every layer, and reads it back."""

    def __init__(self) -> None:
        self.next = 1

    def new(self, rows: int, width: int) -> np.ndarray:
        out = np.arange(self.next, self.next + rows * width).reshape(rows, width)
        self.next += rows * width
        return out

    @staticmethod
    def write(cache: KVCache, block: Block, marks_BT: np.ndarray) -> list[tuple[torch.Tensor, ...]]:
        """Keys hold mark + layer/10, values the negative; returns what attention would read."""
        read = []
        for layer, (heads, k, v) in enumerate(SPEC.layers):
            base = torch.from_numpy(marks_BT).double()[:, None, :, None] + layer / 10
            keys = base.expand(-1, heads, -1, k)
            read.append(cache.extend(block, layer, keys, -base.expand(-1, heads, -1, v)))
        return read


def held(cache: KVCache, row: int) -> list[int]:
    """The marks of a row, checked to be the same in every layer, head and component."""
    marks: set[tuple[int, ...]] = set()
    for part in cache.contents(row):  # [G, H, length, D]
        numbers = part.abs().floor().long()
        for layer in numbers:
            for head in layer:
                for component in head.unbind(-1):
                    marks.add(tuple(component.tolist()))
    assert len(marks) <= 1, f"layers of row {row} hold different tokens: {marks}"
    return list(marks.pop()) if marks else []


def visible(block: Block, read: list[tuple[torch.Tensor, ...]], row: int, token: int) -> set[int]:
    """Marks that one new token sees, through the mask, in every layer."""
    seen = block.mask(None, torch.float64)[row, 0, token] == 0
    out = {
        frozenset(part[row, 0, seen, 0].abs().floor().long().tolist()) for kv in read for part in kv
    }
    assert len(out) == 1
    return set(out.pop())


class CacheMachine(RuleBasedStateMachine):
    """Random life of a cache beside the lists that it stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = Marks()
        self.cache = KVCache(SPEC, 3, 8)
        self.rows: list[list[int]] = [[], [], []]
        self.head: list[list[int]] = []
        """Pending marks of the current step per row; empty: nothing is staged."""
        self.nodes: list[list[int]] = []
        self.parents = np.zeros((3, 0), dtype=np.int64)

    @rule(
        counts=st.lists(st.integers(1, 5), min_size=3, max_size=3),
        dice=st.lists(st.integers(-2, 4), max_size=5),
    )
    @precondition(lambda self: not self.head)
    def step(self, counts: list[int], dice: list[int]) -> None:
        """Stage a ragged head and one tree; every token sees its past, the head, and its path."""
        num_rows, width, num_nodes = len(self.rows), max(counts), len(dice)
        counts = counts[:num_rows]
        width = max(counts)
        marks = self.marks.new(num_rows, width + num_nodes)
        self.head = [marks[b, width - c : width].tolist() for b, c in enumerate(counts)]
        self.nodes = [marks[b, width:].tolist() for b in range(num_rows)]
        parents: list[int] = []
        for n, die in enumerate(dice):
            real = die < n and (die < 0 or parents[die] != PADDING)
            parents.append(die if real else PADDING)
        self.parents = np.tile(np.array(parents, dtype=np.int64), (num_rows, 1))
        _, block = lay_out(self.cache, self.head, np.zeros_like(self.parents), self.parents)
        read = Marks.write(self.cache, block, marks)
        see = sees(self.parents)
        depth = depths(self.parents)
        for b, past in enumerate(self.rows):
            for i, mark in enumerate(self.head[b]):
                at = width - len(self.head[b]) + i
                assert visible(block, read, b, at) == {*past, *self.head[b][: i + 1]}, mark
                assert block.positions_BT[b, at] == len(past) + i
            for n in range(num_nodes):
                if parents[n] == PADDING:
                    continue
                wanted = {
                    *past,
                    *self.head[b],
                    *(self.nodes[b][m] for m in np.flatnonzero(see[b, n])),
                }
                assert visible(block, read, b, width + n) == wanted
                assert (
                    block.positions_BT[b, width + n]
                    == len(past) + len(self.head[b]) - 1 + depth[b, n]
                )

    @rule(choice=st.lists(st.integers(0, 9), min_size=3, max_size=3))
    @precondition(lambda self: bool(self.head))
    def commit(self, choice: list[int]) -> None:
        """Keep the head and, per row, the path to some node (or no node)."""
        num_rows = len(self.rows)
        paths: list[list[int]] = []
        for b in range(num_rows):
            real = [n for n in range(self.parents.shape[1]) if self.parents[b, n] != PADDING]
            node = [*real, ROOT][choice[b] % (len(real) + 1)]
            path: list[int] = []
            while node >= 0:
                path.insert(0, node)
                node = int(self.parents[b, node])
            paths.append(path)
        width = max(map(len, paths))
        path_BD = np.array(
            [[*path, *[PADDING] * (width - len(path))] for path in paths], dtype=np.int64
        )
        heads = np.array([len(row) for row in self.head])
        self.cache.commit(
            heads, path_BD.reshape(num_rows, width), np.array([len(p) for p in paths])
        )
        for b, path in enumerate(paths):
            self.rows[b] += self.head[b] + [self.nodes[b][n] for n in path]
        self.head = []

    @rule()
    def rollback(self) -> None:
        self.cache.rollback()
        self.head = []

    @rule(cuts=st.lists(st.integers(0, 4), min_size=3, max_size=3))
    def rewind(self, cuts: list[int]) -> None:
        self.rows = [
            row[: max(len(row) - cut, 0)] for row, cut in zip(self.rows, cuts, strict=False)
        ]
        self.cache.rewind([len(row) for row in self.rows])
        self.head = []

    @rule(order=st.permutations([0, 1, 2]), keep=st.integers(1, 3))
    def take(self, order: list[int], keep: int) -> None:
        chosen = [row for row in order if row < len(self.rows)][:keep]
        self.cache.take(chosen)
        self.rows = [self.rows[row] for row in chosen]
        self.head = []

    @invariant()
    def holds_what_was_committed(self) -> None:
        assert self.cache.lengths_B.tolist() == [len(row) for row in self.rows]
        for b, row in enumerate(self.rows):
            assert held(self.cache, b) == row


CacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestCache = CacheMachine.TestCase


# ---------------------------------------------------------------------- by hand


def filled(rows: Sequence[Sequence[int]], nodes: int = 0) -> tuple[KVCache, Block]:
    """A cache with these heads and a chain of `nodes` staged; marks are the numbers given, and
    1000 + n for node n."""
    cache = KVCache(SPEC, len(rows), 4)
    parents = np.tile(np.arange(-1, nodes - 1), (len(rows), 1))
    _, block = lay_out(cache, rows, np.zeros_like(parents), parents)
    width = max(map(len, rows))
    marks = np.array([[0] * (width - len(row)) + list(row) for row in rows])
    more = np.tile(1000 + np.arange(nodes), (len(rows), 1))
    Marks.write(cache, block, np.concatenate([marks, more], 1).astype(np.int64))
    return cache, block


def test_rows_that_stay_in_their_order_close_up_where_they_lie() -> None:
    """In another order they are copied, and where they need less than half of the memory. A graph
    of a cache at one place is not one of another that has its shape there, and other strides."""
    cache, _ = filled([[1, 2], [3], [4, 5, 6]])
    cache.commit(np.array([2, 1, 3]))
    before = cache.places()[0].address
    cache.take([1, 2])
    place, other = cache.places()[0], KVCache(SPEC, 2, 4).places()[0]
    assert place.address == before and [held(cache, b) for b in (0, 1)] == [[3], [4, 5, 6]]
    assert other.shape == place.shape and other.strides != place.strides
    cache.take([1, 0])
    assert cache.places()[0].address != before
    assert [held(cache, b) for b in (0, 1)] == [[4, 5, 6], [3]]


def test_memory_that_few_rows_need_is_given_back() -> None:
    """Rows leave one by one: as soon as less than half is needed, they are copied."""
    cache, _ = filled([[n] for n in range(8)])
    cache.commit(np.ones(8, dtype=np.int64))
    first = cache.places()[0].address
    moved = []
    for left in range(7, 0, -1):
        cache.take(range(1, left + 1))
        if cache.places()[0].address != first:
            first = cache.places()[0].address
            moved.append(left)
        assert [held(cache, b) for b in range(left)] == [[8 - left + b] for b in range(left)]
    assert moved == [3, 1]


def test_the_modules_drawing() -> None:
    """[a b c d] + [root n0 n1 n2], path 0 2 -> [a b c d root n0 n2]"""
    cache, _ = filled([[1, 2, 3, 4]])
    cache.commit(np.array([4]))
    parents = np.array([[-1, -1, 0]])
    _, block = lay_out(cache, [[5]], np.zeros_like(parents), parents)
    Marks.write(cache, block, np.array([[5, 10, 11, 12]]))
    cache.commit(np.array([1]), np.array([[0, 2]]), np.array([2]))
    assert held(cache, 0) == [1, 2, 3, 4, 5, 10, 12]


def test_rows_commit_different_numbers_of_tokens() -> None:
    cache, _ = filled([[1], [2, 3, 4]], nodes=3)
    cache.commit(np.array([1, 3]), np.array([[0, 1, 2], [0, -2, -2]]), np.array([3, 1]))
    assert held(cache, 0) == [1, 1000, 1001, 1002]
    assert held(cache, 1) == [2, 3, 4, 1000]


def test_a_rollback_forgets_what_was_staged() -> None:
    cache, _ = filled([[1, 2], [3, 4]])
    cache.commit(np.array([2, 2]))
    parents = np.array([[-1, 0]] * 2)
    _, block = lay_out(cache, [[5], [6]], np.zeros_like(parents), parents)
    Marks.write(cache, block, np.full((2, 3), 77))
    cache.rollback()
    assert cache.staged == 0
    assert [held(cache, 0), held(cache, 1)] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("lengths", [[3, 2], [0, -1]])
def test_a_rewind_beyond_what_is_there_is_refused(lengths: list[int]) -> None:
    cache, _ = filled([[1, 2], [3, 4]])
    cache.commit(np.array([2, 2]))
    with pytest.raises(ValueError, match="rewind"):
        cache.rewind(lengths)
    assert [held(cache, 0), held(cache, 1)] == [[1, 2], [3, 4]]


def test_views_and_stores_are_multiples_of_the_specs_bucket() -> None:
    cache = KVCache(replace(SPEC, bucket=48), 1, 50)
    assert cache.capacity == 96
    for count, view in ((10, 48), (37, 48), (1, 96), (60, 144)):
        _, block = lay_out(cache, [[1] * count])
        assert block.view == view
        cache.commit(block.pending_B)
    assert cache.capacity % 48 == 0


def test_the_cache_grows_and_keeps_what_it_holds() -> None:
    """Capacity 8 is allocated as one bucket; 700 tokens need three."""
    cache = KVCache(SPEC, 2, 8)
    assert cache.capacity == BUCKET
    tokens = [list(range(1, 701)), list(range(1001, 1701))]
    for start in range(0, 700, 100):
        _, block = lay_out(cache, [row[start : start + 100] for row in tokens])
        Marks.write(cache, block, np.array([row[start : start + 100] for row in tokens]))
        cache.commit(np.array([100, 100]))
    assert cache.capacity >= 700
    assert [held(cache, 0), held(cache, 1)] == tokens


def test_the_key_view_grows_in_buckets() -> None:
    cache = KVCache(SPEC, 1, 1000)
    views = []
    for _ in range(6):
        _, block = lay_out(cache, [[1] * 100])
        Marks.write(cache, block, np.ones((1, 100), dtype=np.int64))
        cache.commit(np.array([100]))
        views.append(block.view)
    assert views == [256, 256, 512, 512, 512, 768]


def test_a_window_counts_positions_not_columns() -> None:
    """Two siblings and a child, window 2: the child stands in column 4 at position 3, sees its
    parent (position 2) and itself, and the root (position 1) no more.

        columns     0  1(root)  2(n0)  3(n1)  4(n2, below n0)
        positions   0  1        2      2      3
    """
    cache = KVCache(SPEC, 1, 8)
    parents = np.array([[-1, -1, 0]])
    _, block = lay_out(cache, [[7, 8]], np.zeros_like(parents), parents)
    allowed = block.mask(2, torch.float64)[0, 0] == 0
    assert [torch.where(row)[0].tolist() for row in allowed] == [
        [0],
        [0, 1],
        [1, 2],
        [1, 3],
        [2, 4],
    ]


def test_levels_can_be_staged_one_by_one() -> None:
    """A drafter feeds its tree level by level; the path may then lie in several levels."""
    cache, _ = filled([[1], [2]])
    cache.commit(np.array([1, 1]))
    for level in range(3):
        block = cache.stage(np.full((2, 1), level), np.ones((2, 1, level + 1), dtype=bool))
        read = Marks.write(cache, block, np.array([[10 + level], [20 + level]]))
        assert visible(block, read, 0, 0) == {1, *range(10, 11 + level)}
        assert block.positions_BT.tolist() == [[1 + level]] * 2
    assert cache.staged == 3
    cache.commit(np.array([0, 0]), np.array([[0, 1, 2], [0, -2, -2]]), np.array([3, 1]))
    assert [held(cache, 0), held(cache, 1)] == [[1, 10, 11, 12], [2, 20]]


def test_the_drawing_of_repack() -> None:
    """a b c d e f, columns 0 2 3 5, settled 1 -> a is committed, c d f stay staged."""
    cache, _ = filled([[9, 9]])
    cache.commit(np.array([2]))
    chain = np.tril(np.ones((6, 6), dtype=bool))[None]
    block = cache.stage(np.arange(6)[None], chain)
    Marks.write(cache, block, np.array([[1, 2, 3, 4, 5, 6]]))
    cache.repack([0], [np.array([0, 2, 3, 5])], [1])
    assert held(cache, 0) == [9, 9, 1]
    assert cache.staged == 3
    see = np.array([[[True, False, True, True]]])  # c, f and itself
    block = cache.stage(np.array([[7]]), see)
    read = Marks.write(cache, block, np.array([[7]]))
    assert visible(block, read, 0, 0) == {9, 1, 3, 6, 7}
    # f stands at position 7 as before, c at 4; the new token at 10 sees five positions back
    near = block.mask(5, torch.float64)[0, 0, 0] == 0
    assert torch.where(near)[0].tolist() == [5, 6]


def test_repack_keeps_rows_and_columns_of_unequal_numbers() -> None:
    """Rows 2 and 0 go on, the first with one column left and the second with three."""
    cache, _ = filled([[1], [2, 2], [3, 3, 3]])
    cache.commit(np.array([1, 2, 3]))
    chain = np.broadcast_to(np.tril(np.ones((4, 4), dtype=bool)), (3, 4, 4))
    block = cache.stage(np.tile(np.arange(4), (3, 1)), chain)
    marks = np.array([[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]])
    Marks.write(cache, block, marks)
    cache.repack([2, 0], [np.array([0, 1, 3]), np.array([1, 2, 3])], [2, 0])
    assert [held(cache, 0), held(cache, 1)] == [[3, 3, 3, 31, 32], [1]]
    see = np.array([[[True, False, False, True]], [[True, True, False, True]]])
    block = cache.stage(np.array([[2], [4]]), see)
    read = Marks.write(cache, block, np.array([[35], [15]]))
    assert visible(block, read, 0, 0) == {3, 31, 32, 34, 35}
    assert visible(block, read, 1, 0) == {1, 12, 13, 15}
    assert block.positions_BT.tolist() == [[7], [5]]
