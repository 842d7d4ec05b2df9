"""Drafts of several drafters in one tree, row by row: what `Cascade` fills trees with.

    first     root -+- a --- b       second    root -+- a --- d       together    a 0.9, the first's
              0.9   0.5                        0.6   0.3              (four       b 0.45
                                                     `- c             nodes)      c 0.2
                                                        0.2                       d 0.18

A path that several propose is one path, whose nodes are of the first that did. A node's value is
how probable its path is by the drafter that thinks most of it: the tokens that verifying it may
gain, at a price that is the same for all nodes. Where the tree has no room for all, those of most
value stay, of equals the earlier ones; a node is worth no more than its parent, which stays, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftsmith.core.trees import on_host, padded_rows, stack_drafts
from draftsmith.core.types import ROOT, DraftTree

SURE = 0.5
"""A tree with a path of full depth that is at least so probable is not added to: it promises most
of what it can give, and drafts cost time."""
_USUAL = 0.8
"""How probable the best child is of a drafter that does not say; each further one is so probable
where those before it are wrong."""


@dataclass(slots=True)
class FilledTree:
    """The tree of one row while drafters fill it."""

    depth: int
    """How deep the row may draft."""
    most: int
    """Nodes that the tree has room for."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    """The notes of each node's drafter. One whose path begins with nodes of others has none: its
    drafter takes up notes from the root on."""
    values: list[float] = field(default_factory=list)
    _depths: list[int] = field(default_factory=list)
    _drafters: list[int] = field(default_factory=list)
    _places: dict[tuple[int, int], int] = field(default_factory=dict)
    """(parent, token) -> node."""

    @property
    def is_sure(self) -> bool:
        """Whether a path of full depth is probable."""
        return any(
            depth == self.depth and value >= SURE
            for depth, value in zip(self._depths, self.values, strict=True)
        )

    def add(
        self,
        drafter: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        probs: Sequence[float],
        origins: Sequence[int],
        fed: Sequence[int],
    ) -> None:
        """Add the draft of the `drafter`-th; padding and what is too deep are left out.

        Args:
            probs: of each node behind its parent.
        """
        places: dict[int, int] = {ROOT: ROOT}  # node of the draft -> of this tree
        worth: dict[int, float] = {ROOT: 1.0}  # by this drafter alone
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent not in places:  # it is padding, or below what is left out
                continue
            above = places[parent]
            depth = 1 if above == ROOT else self._depths[above] + 1
            if depth > self.depth:
                continue
            prob = min(probs[node], 1.0) if probs[node] == probs[node] else 0.0  # NaN: says nothing
            worth[node] = worth[parent] * prob
            place = self._places.setdefault((above, token), len(self.tokens))
            places[node] = place
            if place < len(self.tokens):
                self.values[place] = max(self.values[place], worth[node])
                continue
            noted = above == ROOT or (self._drafters[above] == drafter and self.fed[above] >= 0)
            self.tokens.append(token)
            self.parents.append(above)
            self.origins.append(origins[node])
            self.fed.append(fed[node] if noted else -1)
            self.values.append(worth[node])
            self._depths.append(depth)
            self._drafters.append(drafter)

    def best(self) -> list[int]:
        """The nodes that stay, those of most value first; parents come before children."""
        order = sorted(range(len(self.tokens)), key=lambda node: -self.values[node])
        return order[: self.most]


def add_draft(trees: Sequence[FilledTree], draft: DraftTree, drafter: int) -> None:
    """Add each row's draft to its tree. The origin of its tokens: see `drafters.cascade`."""
    prob_BN = _probabilities(draft)
    draft, found = on_host(replace(draft, prob_BN=None), *([] if prob_BN is None else [prob_BN]))
    parents_BN = draft.parents_BN.tolist()
    probs_BN = found[0].tolist() if found else [_by_rank(parents) for parents in parents_BN]
    origin, shape = drafter + 1 if drafter else 0, draft.parents_BN.shape
    keeps_origin = drafter == 0 and draft.origin_BN is not None
    origin_BN = draft.origin_BN if keeps_origin else torch.full(shape, origin)
    fed_BN = torch.full(shape, -1) if draft.fed_BN is None else draft.fed_BN
    assert origin_BN is not None
    columns = (draft.tokens_BN.tolist(), parents_BN, probs_BN, origin_BN.tolist(), fed_BN.tolist())
    for tree, *row in zip(trees, *columns, strict=True):
        tree.add(drafter, *row)


def stacked(trees: Sequence[FilledTree]) -> DraftTree:
    """The best nodes of each row as an opaque tree."""
    kept = [tree.best() for tree in trees]
    place = [{ROOT: ROOT} | {old: new for new, old in enumerate(nodes)} for nodes in kept]
    rows = list(zip(trees, kept, strict=True))
    out = stack_drafts(
        [[tree.tokens[n] for n in nodes] for tree, nodes in rows],
        [
            [own[tree.parents[n]] for n in nodes]
            for (tree, nodes), own in zip(rows, place, strict=True)
        ],
        [[tree.origins[n] for n in nodes] for tree, nodes in rows],
    )
    notes = padded_rows([[tree.fed[n] for n in nodes] for tree, nodes in rows], -1)
    return replace(out, fed_BN=torch.from_numpy(notes))


def _probabilities(draft: DraftTree) -> Tensor | None:
    """[B, N] how probable the drafter holds each node to be behind its parent; None: unknown."""
    if draft.prob_BN is not None or draft.q is None:
        return draft.prob_BN
    assert draft.q_rows_BN is not None
    prob = draft.q.take(draft.q_rows_BN.flatten()).prob(draft.tokens_BN.flatten())
    return prob.view(draft.tokens_BN.shape)


def _by_rank(parents: Sequence[int]) -> list[float]:
    """Probabilities by the order of siblings, of nodes that come without."""
    seen: dict[int, int] = {}
    out = []
    for parent in parents:
        rank = seen[parent] = seen.get(parent, -1) + 1
        out.append(_USUAL * (1.0 - _USUAL) ** rank)
    return out
