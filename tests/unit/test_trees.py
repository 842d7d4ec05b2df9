"""Shapes, masks and depths of trees, by the drawings of the module and by brute force."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.core.trees import (
    depths,
    geometry,
    limit_depth,
    pad_nodes,
    sees,
    shape_parents,
    stack_drafts,
)
from draftsmith.core.types import PADDING, ROOT, DraftTree, Proposal, TreeShape

DRAWN = np.array([[-1, -1, 0, 1]])
"""nodes     0   1   2   3         root -+- 0 --- 2        depth   1 1 2 2
   parents  -1  -1   0   1               `- 1 --- 3
"""


@st.composite
def random_parents(draw: st.DrawFn) -> list[int]:
    """Parents that precede their children; padding has no children."""
    parents: list[int] = []
    for n in range(draw(st.integers(0, 9))):
        real = [m for m in range(n) if parents[m] != PADDING]
        parents.append(draw(st.sampled_from([PADDING, ROOT, *real])))
    return parents


def path_to(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors, from the top."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def tree_of(parents_BN: np.ndarray, candidate_BN: np.ndarray | None = None) -> DraftTree:
    return DraftTree(
        tokens_BN=torch.arange(parents_BN.size).view(parents_BN.shape),
        parents_BN=torch.from_numpy(parents_BN),
        proposal=Proposal.OPAQUE,
        candidate_BN=None if candidate_BN is None else torch.from_numpy(candidate_BN),
        origin_BN=torch.ones(parents_BN.shape, dtype=torch.long),
    )


def test_the_modules_drawing() -> None:
    assert depths(DRAWN).tolist() == [[1, 1, 2, 2]]
    assert sees(DRAWN)[0].astype(int).tolist() == [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [1, 0, 1, 0],
        [0, 1, 0, 1],
    ]


@settings(max_examples=200, deadline=None)
@given(random_parents())
def test_a_node_sees_itself_and_its_ancestors_and_nothing_else(parents: list[int]) -> None:
    found, depth = (
        sees(np.array([parents], dtype=np.int64))[0],
        depths(np.array([parents], dtype=np.int64))[0],
    )
    for n, parent in enumerate(parents):
        path = path_to(parents, n)
        assert np.flatnonzero(found[n]).tolist() == sorted(path)
        assert depth[n] == (0 if parent == PADDING else len(path))


def test_rows_of_a_batch_have_their_own_geometry() -> None:
    rows = [[-1, 0, 1], [-1, -1, 0], [-1, PADDING, PADDING]]
    depth, see = geometry(np.array(rows))
    for b, row in enumerate(rows):
        alone_depth, alone_see = geometry(np.array([row]))
        assert (depth[b] == alone_depth[0]).all()
        assert (see[b] == alone_see[0]).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3), max_size=4))
def test_a_full_tree_has_its_widths_and_siblings_are_adjacent(widths: list[int]) -> None:
    shape = TreeShape(widths=tuple(widths))
    parents = shape_parents(shape)
    assert len(parents) == shape.num_nodes
    assert list(parents) == sorted(parents)
    depth = depths(np.array([parents], dtype=np.int64))[0]
    assert list(depth) == sorted(depth)
    for node in range(-1, len(parents)):
        below = depth[node] if node >= 0 else 0
        children = sum(parent == node for parent in parents)
        assert children == (widths[below] if below < len(widths) else 0)


def test_a_chain_is_a_tree_of_single_children() -> None:
    assert shape_parents(TreeShape.chain(4)) == (-1, 0, 1, 2)
    assert TreeShape.chain(4).is_chain and TreeShape.chain(4).num_nodes == 4
    assert not TreeShape(widths=(2, 1)).is_chain
    assert TreeShape(widths=(3, 2, 1)).clip(2) == TreeShape(widths=(3, 2))
    assert TreeShape(widths=(3, 2)).clip(-1) == TreeShape()


def test_limiting_the_depth_pads_deeper_nodes_row_by_row() -> None:
    tree = tree_of(np.array([[-1, -1, 0, 1, 2]] * 4))
    cut = limit_depth(tree, np.array([3, 2, 1, 0]))
    assert cut.parents_BN.tolist() == [
        [-1, -1, 0, 1, 2],
        [-1, -1, 0, 1, -2],
        [-1, -1, -2, -2, -2],
        [-2, -2, -2, -2, -2],
    ]
    assert torch.equal(cut.tokens_BN, tree.tokens_BN)
    assert tree.parents_BN[3, 0] == -1, "the given tree was changed"


def test_probes_have_a_limit_of_their_own() -> None:
    """node 0 and 2 are probes one below the other, 1 and 3 candidates."""
    candidate = np.array([[False, True, False, True]])
    cut = limit_depth(tree_of(DRAWN, candidate), np.array([1]), np.array([2]))
    assert cut.parents_BN.tolist() == [[-1, -1, 0, PADDING]]
    cut = limit_depth(tree_of(DRAWN, candidate), np.array([2]), np.array([0]))
    assert cut.parents_BN.tolist() == [[PADDING, -1, PADDING, 1]]


def test_padding_fills_every_field() -> None:
    tree = tree_of(DRAWN, np.ones((1, 4), dtype=bool))
    wide = pad_nodes(tree, 6)
    assert wide.num_nodes == 6
    assert wide.parents_BN.tolist() == [[-1, -1, 0, 1, PADDING, PADDING]]
    for values in (wide.tokens_BN, wide.candidate_BN, wide.origin_BN):
        assert values is not None and values.shape == (1, 6)
    assert pad_nodes(tree, 4) is tree and pad_nodes(tree, 2) is tree


def test_ragged_chains_are_padded_on_the_right() -> None:
    tree = stack_drafts([[5, 6], [], [7, 8, 9]], origins=[[0, 1], [], [2, 2, 2]])
    tokens, parents, origin = tree.tokens_BN, tree.parents_BN, tree.origin_BN
    assert tokens.tolist() == [[5, 6, 0], [0, 0, 0], [7, 8, 9]]
    assert parents.tolist() == [[-1, 0, -2], [-2, -2, -2], [-1, 0, 1]]
    assert origin is not None and origin.tolist() == [[0, 1, 0], [0, 0, 0], [2, 2, 2]]
    tree = stack_drafts([[], []])
    assert tree.tokens_BN.shape == tree.parents_BN.shape == (2, 0) and tree.origin_BN is None


def test_an_empty_tree_has_no_nodes() -> None:
    tree = DraftTree.empty(3)
    assert (tree.num_rows, tree.num_nodes) == (3, 0)
    depth, see = geometry(tree.parents_BN.numpy())
    assert depth.shape == (3, 0) and see.shape == (3, 0, 0)
