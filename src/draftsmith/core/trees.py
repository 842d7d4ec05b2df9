"""Shapes, ancestor masks and depths of draft trees. Pure index arithmetic on the host.

nodes     0   1   2   3         root -+- 0 --- 2        depth   1 1 2 2
parents  -1  -1   0   1               `- 1 --- 3

sees_NN   node 2 sees 0 and 2:   [1 . . .]
          (ancestors and self)   [. 1 . .]
                                 [1 . 1 .]
                                 [. 1 . 1]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.core.law import Law
from draftsmith.core.sampling import History
from draftsmith.core.transfer import to_device, to_host
from draftsmith.core.types import PADDING, ROOT, DraftTree, Proposal, TreeShape


@lru_cache(maxsize=256)
def shape_parents(shape: TreeShape) -> tuple[int, ...]:
    """Parents of a full tree of this shape, level by level (siblings adjacent, in order)."""
    if shape.paths:
        ordered = sorted(shape.paths, key=lambda path: (len(path), path))
        place = {(): ROOT} | {path: n for n, path in enumerate(ordered)}
        return tuple(place[path[:-1]] for path in ordered)
    parents: list[int] = []
    level = [ROOT]
    for width in shape.widths:
        start = len(parents)
        for node in level:
            parents.extend([node] * width)
        level = list(range(start, len(parents)))
    return tuple(parents)


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """One depth of a tree of fixed shape: F parents, up to W children each.

    parents   -1  -1  0  0  1        frontier  0  1
    nodes      0   1  2  3  4        kids      2  3        N (here 5) where there is no child
                                               4  5
    """

    frontier_F: np.ndarray
    """Nodes of the depth before that have children (ROOT for the first)."""
    kids_FW: np.ndarray


@lru_cache(maxsize=256)
def levels(shape: TreeShape) -> tuple[Level, ...]:
    """The depths of a tree of fixed shape, from the root down."""
    parents = shape_parents(shape)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    out: list[Level] = []
    frontier = [ROOT]
    while any(node in children for node in frontier):
        frontier = [node for node in frontier if node in children]
        width = max(len(children[node]) for node in frontier)
        kids = np.full((len(frontier), width), len(parents), dtype=np.int64)
        for row, node in enumerate(frontier):
            kids[row, : len(children[node])] = children[node]
        out.append(Level(np.array(frontier), kids))
        frontier = [node for own in frontier for node in children[own]]
    return tuple(out)


def depths(parents_BN: np.ndarray) -> np.ndarray:
    """[B, N]: 1 for children of the root, 0 for padding."""
    return geometry(parents_BN)[0]


def sees(parents_BN: np.ndarray) -> np.ndarray:
    """[B, N, N] bool: node n sees node m when m is n or an ancestor of n. Padding sees itself."""
    return geometry(parents_BN)[1]


@overload
def geometry(parents_BN: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def geometry(parents_BN: Tensor) -> tuple[Tensor, Tensor]: ...
def geometry(
    parents_BN: np.ndarray | Tensor,
) -> tuple[np.ndarray, np.ndarray] | tuple[Tensor, Tensor]:
    """(depths, sees), both read-only. Shapes recur from step to step, so rows are remembered; for
    parents that only a device knows, it finds them there."""
    if isinstance(parents_BN, Tensor):
        return _geometry_there(parents_BN)
    rows = [_row_geometry(row.tobytes()) for row in np.ascontiguousarray(parents_BN)]
    if len(rows) == 1:
        return rows[0][0][None], rows[0][1][None]
    return np.stack([depth for depth, _ in rows]), np.stack([see for _, see in rows])


def _geometry_there(parents_BN: Tensor) -> tuple[Tensor, Tensor]:
    """By squaring the relation "is or has as its parent": paths of 1, 2, 4, ... steps."""
    nodes_N = torch.arange(parents_BN.shape[1], device=parents_BN.device)
    see_BNN = (parents_BN[:, :, None] == nodes_N) | (nodes_N[:, None] == nodes_N)
    for _ in range(max(len(nodes_N) - 1, 0).bit_length()):
        see_BNN = see_BNN.float() @ see_BNN.float() > 0
    depth_BN = see_BNN.sum(-1).masked_fill(parents_BN == PADDING, 0)
    return depth_BN, see_BNN


@lru_cache(maxsize=512)
def _row_geometry(parents_bytes: bytes) -> tuple[np.ndarray, np.ndarray]:
    parents: list[int] = np.frombuffer(parents_bytes, dtype=np.int64).tolist()
    depth: list[int] = []
    see = np.eye(len(parents), dtype=bool)
    for n, parent in enumerate(parents):
        depth.append(0 if parent == PADDING else 1 if parent == ROOT else depth[parent] + 1)
        if parent >= 0:
            see[n] |= see[parent]
    out = np.array(depth, dtype=np.int64)
    out.flags.writeable = see.flags.writeable = False
    return out, see


def limit_depth(
    tree: DraftTree, depth_B: np.ndarray, probe_depth_B: np.ndarray | None = None
) -> DraftTree:
    """The tree with nodes deeper than each row allows turned into padding.

    The cut looks at depth alone, which was known before drawing, so it keeps sampled laws exact.
    Probes are never accepted, so they may have a limit of their own: the target's context.
    """
    if tree.candidate_BN is None and tree.num_nodes <= min(depth_B.tolist(), default=0):
        return tree  # no node is deeper than there are nodes
    parents_BN, limit_BN = tree.parents_BN, depth_B[:, None]
    if tree.candidate_BN is not None and probe_depth_B is not None:
        limit_BN = np.where(tree.candidate_BN.numpy(), limit_BN, probe_depth_B[:, None])
    if parents_BN.device.type == "cpu":
        found_BN = depths(parents_BN.numpy()) > limit_BN
        if not found_BN.any():
            return tree
        too_deep_BN = torch.from_numpy(found_BN)
    else:
        too_deep_BN = geometry(parents_BN)[0] > to_device(limit_BN, parents_BN.device)
    return dataclasses.replace(tree, parents_BN=parents_BN.masked_fill(too_deep_BN, PADDING))


_NODE_FIELDS = {
    "tokens_BN": 0,
    "parents_BN": PADDING,
    "q_rows_BN": 0,
    "candidate_BN": 0,
    "origin_BN": 0,
    "fed_BN": -1,
    "prob_BN": 0,
}
"""What a tree holds node by node, and what stands there in padding."""


def on_host(tree: DraftTree, *more: Tensor) -> tuple[DraftTree, list[np.ndarray]]:
    """The tree with its numbers on the host, and `more` numbers from the device with them.

    Its law `q` stays where it is.
    """
    there = {
        name: values
        for name in _NODE_FIELDS
        if (values := getattr(tree, name)) is not None and values.device.type != "cpu"
    }
    if not there and not more:
        return tree, []
    came = to_host(*there.values(), *more)
    here: dict[str, Any] = {
        name: torch.from_numpy(values).to(there[name].dtype)
        for name, values in zip(there, came, strict=False)
    }
    return dataclasses.replace(tree, **here), came[len(there) :]


def pad_nodes(tree: DraftTree, num_nodes: int) -> DraftTree:
    """The tree filled up with padding to a fixed number of nodes, so that shapes stay the same."""
    missing = num_nodes - tree.num_nodes
    if missing <= 0:
        return tree
    filled: dict[str, Any] = {
        name: F.pad(values, (0, missing), value=padding)
        for name, padding in _NODE_FIELDS.items()
        if (values := getattr(tree, name)) is not None
    }
    return dataclasses.replace(tree, **filled)


def rows_of(first: DraftTree, second: DraftTree, choose_B: np.ndarray) -> DraftTree:
    """One tree with the rows of `second` where they are chosen, and those of `first`. Rows that are
    drawn are i.i.d. draws; beside others that are opaque, `opaque_B` tells them apart."""
    if choose_B.all():
        return second
    if first.q is not None and second.q_rows_BN is not None:
        second = dataclasses.replace(second, q_rows_BN=second.q_rows_BN + first.q.num_rows)
    device, count = second.parents_BN.device, max(first.num_nodes, second.num_nodes)
    choose_B1 = to_device(choose_B, device)[:, None]
    trees = pad_nodes(first, count), pad_nodes(second, count)
    chosen: dict[str, Any] = {}
    for name, padding in _NODE_FIELDS.items():
        parts = [getattr(tree, name) for tree in trees]
        if any(part is not None for part in parts):
            # without a note all nodes are candidates
            none: Any = True if name == "candidate_BN" else padding
            mine, theirs = (
                torch.full(tuple(tree.parents_BN.shape), none, device=device)
                if one is None
                else to_device(one, device)
                for tree, one in zip(trees, parts, strict=True)
            )
            chosen[name] = torch.where(choose_B1, theirs, mine)
    laws = [tree.q for tree in trees if tree.q is not None]
    opaque_B = np.where(choose_B, _opaque_rows(second), _opaque_rows(first))
    return DraftTree(
        proposal=Proposal.OPAQUE if opaque_B.all() else Proposal.SAMPLED,
        q=Law.cat(laws) if laws else None,
        opaque_B=opaque_B if opaque_B.any() and not opaque_B.all() else None,
        **chosen,
    )


def _opaque_rows(tree: DraftTree) -> np.ndarray:
    if tree.opaque_B is not None:
        return tree.opaque_B
    return np.full(tree.num_rows, tree.proposal is Proposal.OPAQUE)


def alike(tree: DraftTree) -> list[tuple[slice, DraftTree]]:
    """A tree of two kinds in runs of neighbouring rows that are of one, with where they stand."""
    assert tree.opaque_B is not None
    runs, start = [], 0
    for opaque, rows in groupby(tree.opaque_B.tolist()):
        some = slice(start, start + len(list(rows)))
        start = some.stop
        own: dict[str, Any] = {
            name: values[some]
            for name in _NODE_FIELDS
            if (values := getattr(tree, name)) is not None
        }
        run = dataclasses.replace(tree, opaque_B=None, **own)
        runs.append((some, as_opaque(run) if opaque else run))
    return runs


def as_opaque(tree: DraftTree) -> DraftTree:
    """The tree, whatever it was drawn from."""
    none: dict[str, Any] = {"q": None, "q_rows_BN": None, "opaque_B": None}
    return dataclasses.replace(tree, proposal=Proposal.OPAQUE, **none)


def history_at(known: History, tokens_N: np.ndarray, parents_N: np.ndarray, node: int) -> History:
    """The tokens before the law behind a node: the row's own, and the path down to it."""
    tail: list[int] = []
    while node != ROOT:
        tail.append(int(tokens_N[node]))
        node = int(parents_N[node])
    return History(tokens=[*known.tokens, *reversed(tail)], num_prompt=known.num_prompt)


def padded_rows(
    rows: Sequence[Sequence[float]], padding: int, dtype: type = np.int64
) -> np.ndarray:
    """Ragged rows as one array, filled up on the right."""
    width = max(map(len, rows), default=0)
    filled = [[*row, *[padding] * (width - len(row))] for row in rows]
    return np.array(filled, dtype=dtype).reshape(len(rows), width)


def stack_drafts(
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]] | None = None,
    origins: Sequence[Sequence[int]] | None = None,
    probs: Sequence[Sequence[float]] | None = None,
) -> DraftTree:
    """Each row's draft as an opaque tree, padded on the right. `parents` None: they are chains."""
    if parents is None:
        parents = [range(-1, len(chain) - 1) for chain in tokens]
    return DraftTree(
        tokens_BN=torch.from_numpy(padded_rows(tokens, 0)),
        parents_BN=torch.from_numpy(padded_rows(parents, PADDING)),
        proposal=Proposal.OPAQUE,
        origin_BN=None if origins is None else torch.from_numpy(padded_rows(origins, 0)),
        prob_BN=None if probs is None else torch.from_numpy(padded_rows(probs, 0, np.float64)),
    )
