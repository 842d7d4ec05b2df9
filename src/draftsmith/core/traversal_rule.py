"""`traversal`: traversal verification (Weng et al. 2025, arXiv 2505.12398) judges a tree from its
leaves to its root, as `block` judges a chain.

A row stands at a node with a share r of the target's law p behind it: r and p are 1 and the
target's own law at the root. The first child x that is left was drawn from q:

    down     the child's share is min(1, r p(x) / q(x)), and its law the target's behind it
    leaf     with no child left, the node is accepted with probability r, and all above it; the
             next token is drawn from p
    up       else it is gone: Z = sum over x of max(r p(x) - q(x), 0); the parent goes on with
             p <- norm(max(r p - q, 0)) and r <- Z / (Z + 1 - r)

           root          1, 2: down to the leaf a2, whose share is tested first
          /    \\         3: refused: a1 has a new share and a new law, and no child left: tested
        a1      b1      4: refused: the root's law changes, and b1 is next
        |               5: refused: the root's share is 1, so it is never refused
        a2

Whatever a node's children were, the node is accepted with the probability that its share said
before them, and what follows it has the target's law: of a child's mass r p, min(q, r p) comes
through it, and the share and law of "up" are the rest, divided by the probability that the child is
gone, 1 - r + Z. That holds for each child that was drawn, so the next one may be drawn from another
law because of it (without replacement). On a chain this is `block`.

Down to any depth, at least as many nodes of the first path are accepted as by `rejection`. Nodes
that come first are accepted more at the price of those behind them, so a tree whose first children
have few descendants may lose.

The noise of a node that was looked at must not come back at a later step, when its position lies
less deep: so the lane holds the depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.block_rule import rest_of, share_of_draft
from draftsmith.core.config import MOST_NODES
from draftsmith.core.law import Law, Noise, Purpose
from draftsmith.core.types import ROOT, DraftTree, Proposal
from draftsmith.core.verify import ALL, LawSource, NodeLaw, candidates, drawn_from


@dataclass(slots=True)
class _Place:
    """A node on the way from the root to where a row stands."""

    node: int
    law: NodeLaw
    share_R: Tensor
    """[1] float64."""
    q: Law | None = None
    """What it was drawn from; None: it is the root."""
    gone: int = 0
    """Children that were refused."""


@dataclass(frozen=True, slots=True)
class Traversal:
    """Accept the node of a tree that the target's mass allows, leaves before what is above them."""

    name: ClassVar[str] = "traversal"
    lossy: ClassVar[bool] = False
    needs_q: ClassVar[bool] = True
    proposals: ClassVar[frozenset[Proposal]] = ALL
    precompute: ClassVar[None] = None
    """What it draws from behind a node depends on all nodes above and before."""

    def walk(
        self, tree: DraftTree, laws: LawSource, noise: Noise
    ) -> tuple[list[list[int]], np.ndarray]:
        paths: list[list[int]] = []
        next_token_B = np.zeros(tree.num_rows, dtype=np.int64)
        for b, row in enumerate(candidates(tree)):
            rows = np.array([b])
            way = _traverse(tree, rows, row.children, laws, noise)
            drawn = way[-1].law.draw(noise, rows, len(way) - 1, Purpose.TARGET)
            paths.append([place.node for place in way[1:]])
            next_token_B[b] = int(drawn[0])
        return paths, next_token_B


def _traverse(
    tree: DraftTree, rows: np.ndarray, children: dict[int, list[int]], laws: LawSource, noise: Noise
) -> list[_Place]:
    """The accepted path of one row, the root included."""
    law = laws.at(rows, np.array([ROOT]))
    way = [_Place(node=ROOT, law=law, share_R=torch.ones(1, dtype=torch.float64))]
    while True:
        place = way[-1]
        siblings = children.get(place.node, [])[: place.gone + 1]
        if len(siblings) > place.gone:
            token = tree.tokens_BN[rows, siblings[-1:]]
            q = drawn_from(tree, rows, np.array([siblings]), place.law.vocab_size)
            share_R = share_of_draft(place.law, q, token, place.share_R)
            law = laws.at(rows, np.array(siblings[-1:]))
            way.append(_Place(node=siblings[-1], law=law, share_R=share_R, q=q))
            continue
        depth = len(way) - 2
        lane = depth * MOST_NODES + place.node
        if place.q is None or noise.accept(place.share_R, rows, depth, lane)[0]:
            return way
        way.pop()
        above = way[-1]
        above.law, above.share_R = rest_of(above.law, place.q, above.share_R)
        above.gone += 1
