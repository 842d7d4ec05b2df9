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
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.types import PADDING, ROOT, DraftTree, TreeShape


@lru_cache(maxsize=256)
def shape_parents(shape: TreeShape) -> tuple[int, ...]:
    """Parents of a full tree of this shape, level by level (siblings adjacent, in order)."""
    parents: list[int] = []
    level = [ROOT]
    for width in shape.widths:
        start = len(parents)
        for node in level:
            parents.extend([node] * width)
        level = list(range(start, len(parents)))
    return tuple(parents)


def depths(parents_BN: np.ndarray) -> np.ndarray:
    """[B, N]: 1 for children of the root, 0 for padding."""
    out = np.zeros_like(parents_BN)
    rows = np.arange(parents_BN.shape[0])
    for n in range(parents_BN.shape[1]):
        parent = parents_BN[:, n]
        above = np.where(parent >= 0, out[rows, np.maximum(parent, 0)], 0)
        out[:, n] = np.where(parent == PADDING, 0, above + 1)
    return out


def sees(parents_BN: np.ndarray) -> np.ndarray:
    """[B, N, N] bool: node n sees node m when m is n or an ancestor of n. Padding sees itself."""
    num_rows, num_nodes = parents_BN.shape
    out = np.zeros((num_rows, num_nodes, num_nodes), dtype=bool)
    rows = np.arange(num_rows)
    for n in range(num_nodes):
        parent = parents_BN[:, n]
        out[:, n] = out[rows, np.maximum(parent, 0)] & (parent >= 0)[:, None]
        out[:, n, n] = True
    return out


@lru_cache(maxsize=256)
def chain_geometry(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """(depths [1, N], sees [1, N, N]) of a chain: asked for at every step, so kept."""
    parents = np.arange(-1, num_nodes - 1)[None]
    return depths(parents), sees(parents)


def geometry(parents_BN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(depths, sees) of a batch of trees; plain chains come from a cache."""
    num_rows, num_nodes = parents_BN.shape
    if (parents_BN == np.arange(-1, num_nodes - 1)).all():
        depth, see = chain_geometry(num_nodes)
        return np.broadcast_to(depth, (num_rows, num_nodes)), np.broadcast_to(
            see, (num_rows, num_nodes, num_nodes)
        )
    return depths(parents_BN), sees(parents_BN)


def limit_depth(
    tree: DraftTree, depth_B: np.ndarray, probe_depth_B: np.ndarray | None = None
) -> DraftTree:
    """The tree with nodes deeper than each row allows turned into padding.

    The cut looks at depth alone, which was known before drawing, so it keeps sampled laws exact.
    Probes are never accepted, so they may have a limit of their own: the target's context.
    """
    parents = tree.parents_BN.numpy()
    limit = depth_B[:, None]
    if tree.candidate_BN is not None and probe_depth_B is not None:
        limit = np.where(tree.candidate_BN.numpy(), limit, probe_depth_B[:, None])
    too_deep = depths(parents) > limit
    if not too_deep.any():
        return tree
    cut = np.where(too_deep, PADDING, parents)
    return dataclasses.replace(tree, parents_BN=torch.from_numpy(cut))


def pad_nodes(tree: DraftTree, num_nodes: int) -> DraftTree:
    """The tree filled up with padding to a fixed number of nodes, so that shapes stay the same."""
    missing = num_nodes - tree.num_nodes
    if missing <= 0:
        return tree

    def fill(values: Tensor | None, value: int) -> Tensor | None:
        return None if values is None else F.pad(values, (0, missing), value=value)

    return DraftTree(
        tokens_BN=F.pad(tree.tokens_BN, (0, missing)),
        parents_BN=F.pad(tree.parents_BN, (0, missing), value=PADDING),
        proposal=tree.proposal,
        q=tree.q,
        q_rows_BN=fill(tree.q_rows_BN, 0),
        candidate_BN=fill(tree.candidate_BN, 0),
        origin_BN=fill(tree.origin_BN, 0),
    )


def stack_chains(
    chains: list[list[int]], origins: list[list[int]] | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ragged chains -> (tokens_BN, parents_BN, origin_BN), padded on the right."""
    width = max((len(chain) for chain in chains), default=0)
    tokens = np.zeros((len(chains), width), dtype=np.int64)
    parents = np.full((len(chains), width), PADDING, dtype=np.int64)
    origin = np.zeros((len(chains), width), dtype=np.int64)
    for b, chain in enumerate(chains):
        tokens[b, : len(chain)] = chain
        parents[b, : len(chain)] = np.arange(-1, len(chain) - 1)
        if origins is not None:
            origin[b, : len(chain)] = origins[b]
    return (
        torch.from_numpy(tokens),
        torch.from_numpy(parents),
        None if origins is None else torch.from_numpy(origin),
    )
