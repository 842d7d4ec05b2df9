"""Trees that follow what the draft model says, against growing them by hand, path by path."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from tests.draft_paths import Path, paths_of
from torch import Tensor

from draftsmith.core.types import PADDING, TreeShape
from draftsmith.drafters.columns import Columns
from draftsmith.drafters.tree_growth import grow_dynamic
from draftsmith.errors import InputError


class Table:
    """A reader whose law depends on the path alone; it checks what it is told about the tree."""

    def __init__(
        self, vocab: int, rows: int, seed: int, *, ties: bool = False, certain: bool = False
    ) -> None:
        self.vocab, self.rows, self.seed, self.ties = vocab, rows, seed, ties
        self.columns = Columns(vocab)
        self.certain = certain
        """One token has all the probability: a child's path is then as good as its parent's."""
        self.paths: list[list[Path]] = [[()] for _ in range(rows)]
        self.fed: list[list[Path]] = [[] for _ in range(rows)]

    def logits(self, row: int, path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, row, *path)) & 0x7FFFFFFF)
        drawn = 2 * torch.randn(self.vocab, generator=generator, dtype=torch.float64)
        if self.certain:
            drawn[drawn.argmax()] += 1e4
        return drawn.round() if self.ties else drawn

    def chain(self, depth_B: object, draws: object, confidence: float) -> None:
        return None

    def root(self) -> Tensor:
        return torch.stack([self.logits(b, ()) for b in range(self.rows)])

    def level(self, tokens_BF: Tensor, see_BFC: Tensor, above_BF: Tensor) -> Tensor:
        out = []
        for b in range(self.rows):
            parents = self.paths[b]
            own = [
                (*parents[int(above)], int(token))
                for token, above in zip(tokens_BF[b], above_BF[b], strict=True)
            ]
            self.fed[b] += own
            self.paths[b] = own
            for f, path in enumerate(own):
                seen = {self.fed[b][c] for c in see_BFC[b, f].nonzero()[:, 0].tolist()}
                assert seen == {path[: n + 1] for n in range(len(path))}, "ancestors and itself"
            out.append(torch.stack([self.logits(b, path) for path in own]))
        return torch.stack(out)


def by_hand(table: Table, row: int, shape: TreeShape) -> set[Path]:
    """EAGLE-2 in words: scores of paths, beams, a pool, the best of it."""

    def children(path: Path, score: float, count: int) -> list[tuple[float, Path]]:
        log_q = torch.log_softmax(table.logits(row, path), -1)
        best = torch.topk(log_q, count)
        return [
            (score + float(value), (*path, int(token)))
            for value, token in zip(best.values, best.indices, strict=True)
        ]

    pool = children((), 0.0, shape.widths[0])
    beams = list(pool)
    for width in shape.widths[1:]:
        grown = [child for score, path in beams for child in children(path, score, width)]
        pool += grown
        beams = sorted(grown, key=lambda item: -item[0])[:width]
    assert shape.keep is not None
    return {path for _, path in sorted(pool, key=lambda item: -item[0])[: shape.keep]}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("widths", [(3,), (3, 3), (4, 4, 4), (2, 5, 3)])
@pytest.mark.parametrize("keep", [1, 5, 9])
def test_the_best_paths_are_kept(seed: int, widths: tuple[int, ...], keep: int) -> None:
    shape = TreeShape(widths=widths, keep=keep)
    table = Table(vocab=11, rows=2, seed=seed)
    tree = grow_dynamic(table, shape, np.full(2, shape.depth))
    fresh = Table(vocab=11, rows=2, seed=seed)
    for row in range(2):
        found = paths_of(tree, row)
        assert len(set(found)) == len(found)
        assert set(found) == by_hand(fresh, row, shape)


@pytest.mark.parametrize("keep", [1, 5, 9])
def test_a_row_of_less_depth_has_the_tree_of_the_clipped_shape(keep: int) -> None:
    shape, depth_B = TreeShape(widths=(3, 3, 3), keep=keep), np.array([0, 1, 2, 3])
    tree = grow_dynamic(Table(vocab=11, rows=4, seed=0), shape, depth_B)
    fresh = Table(vocab=11, rows=4, seed=0)
    assert paths_of(tree, 0) == []
    for row, depth in enumerate(depth_B[1:], start=1):
        assert set(paths_of(tree, row)) == by_hand(fresh, row, shape.clip(int(depth)))


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("keep", [2, 7])
def test_equal_scores_leave_no_orphans(keep: int, *, certain: bool) -> None:
    """The first of equal nodes is kept, and a parent comes before its child."""
    for seed in range(20):
        table = Table(vocab=6, rows=1, seed=seed, ties=True, certain=certain)
        tree = grow_dynamic(table, TreeShape(widths=(3, 3, 3), keep=keep), np.array([3]))
        found = set(paths_of(tree, 0))
        assert len(found) == keep
        assert all(path[:-1] in found or len(path) == 1 for path in found)


def test_nodes_name_the_column_that_they_were_fed_in() -> None:
    table = Table(vocab=9, rows=2, seed=3)
    tree = grow_dynamic(table, TreeShape(widths=(3, 3, 3), keep=12), np.full(2, 3))
    assert tree.fed_BN is not None
    for row in range(2):
        for path, column in zip(paths_of(tree, row), tree.fed_BN[row].tolist(), strict=True):
            has_children = any(other[:-1] == path for other in paths_of(tree, row))
            assert column >= 0 or not has_children, "what has children was fed"
            if column >= 0:
                assert table.fed[row][column] == path


def test_tokens_that_the_draft_model_lacks_are_not_proposed() -> None:
    class Narrow(Table):
        def logits(self, row: int, path: Path) -> Tensor:
            out = super().logits(row, path)
            out[3:] = -math.inf
            return out

    tree = grow_dynamic(
        Narrow(vocab=8, rows=1, seed=0), TreeShape(widths=(5, 5), keep=20), np.array([2])
    )
    real = tree.parents_BN[0] != PADDING
    assert set(tree.tokens_BN[0][real].tolist()) <= {0, 1, 2}
    assert int(real.sum()) == 3 + 3 * 3


def test_a_shape_of_paths_has_the_nodes_that_it_names() -> None:
    from draftsmith.core.trees import levels, shape_parents

    shape = TreeShape(paths=((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0)))
    assert (shape.depth, shape.num_nodes, shape.is_chain) == (3, 7, False)
    assert shape_parents(shape) == (-1, -1, -1, 0, 0, 2, 3)
    first, second, third = levels(shape)
    assert first.kids_FW.tolist() == [[0, 1, 2]]
    assert second.frontier_F.tolist() == [0, 2] and second.kids_FW.tolist() == [[3, 4], [5, 7]]
    assert third.frontier_F.tolist() == [3] and third.kids_FW.tolist() == [[6]]
    assert shape.clip(1) == TreeShape(paths=((0,), (1,), (2,)))
    assert shape.clip(0).num_nodes == 0


def test_levels_of_a_regular_tree_are_its_depths() -> None:
    from draftsmith.core.trees import levels, shape_parents

    shape = TreeShape(widths=(2, 3, 1))
    parents = np.array(shape_parents(shape))
    for level in levels(shape):
        for node, kids in zip(level.frontier_F, level.kids_FW, strict=True):
            assert parents[kids].tolist() == [node] * len(kids)
    everyone = itertools.chain(*(level.kids_FW.ravel() for level in levels(shape)))
    assert sorted(everyone) == list(range(shape.num_nodes))


@pytest.mark.parametrize(
    "paths",
    [((0, 0),), ((0,), (0, 1)), ((0,), (0,)), ((1,),), ((0,), (0, 0), (1,)), ((-1,),), ((),)],
)
def test_paths_without_ancestors_or_elder_siblings_are_refused(paths: tuple[Path, ...]) -> None:
    with pytest.raises(ValueError, match="comes without"):
        TreeShape(paths=paths)


def test_an_endless_path_is_named_in_short() -> None:
    with pytest.raises(InputError, match=r"^the node \(0, .{1,60}\.\.\. comes without"):
        TreeShape(paths=((0,) * 4096,))


def test_a_shape_is_given_in_one_way() -> None:
    with pytest.raises(ValueError, match="either"):
        TreeShape(widths=(1,), paths=((0,),))
    with pytest.raises(ValueError, match="either"):
        TreeShape(keep=3)
    with pytest.raises(ValueError, match="at least 1"):
        TreeShape(widths=(2, 0))
