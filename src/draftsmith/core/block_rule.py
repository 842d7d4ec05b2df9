"""`block`: block verification (Sun et al. 2024, arXiv 2403.10444), which judges a chain as a whole.

For a chain x_1 .. x_n whose tokens were drawn from q, with p the target's processed law behind the
tokens before it:

    r_0 = 1,  r_i = min(1, r_{i-1} p(x_i) / q(x_i))
    Z_i = sum over x of max(r_i p(x) - q(x), 0)            laws of the token behind x_i
    h_i = Z_i / (Z_i + 1 - r_i) for i < n,  h_n = r_n

    accept the largest i with u_i <= h_i, however the shorter ones fared
    then draw from norm(max(r_i p - q, 0)), behind the whole chain from p

         x_1   x_2   x_3
    u<=h no    yes   no        token-wise rejection stops at x_1; here x_1 and x_2 are accepted

The law of the text is the target's (their Theorem 1), and the i-th token is accepted with
probability E[r_i], where token-wise rejection has E[prod_j min(1, p(x_j) / q(x_j))], which is never
more: r_i >= r_{i-1} min(1, p(x_i) / q(x_i)). For an opaque chain q is a point mass: then both
accept as much.

Tokens that are not accepted have been looked at, so the noise of a place must be another one at the
next step. Here the lane is the depth; drafters draw a node with its number as the lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.law import Law, Noise, Purpose
from draftsmith.core.types import ROOT, DraftTree, Proposal
from draftsmith.core.verify import ALL, LawSource, NodeLaw, candidates, drawn_from
from draftsmith.errors import UnsupportedProposal


@dataclass(frozen=True, slots=True)
class Block:
    """Accept the longest beginning of a chain that the target's mass allows, all tokens at once."""

    name: ClassVar[str] = "block"
    lossy: ClassVar[bool] = False
    needs_q: ClassVar[bool] = True
    proposals: ClassVar[frozenset[Proposal]] = ALL
    precompute: ClassVar[None] = None
    """What it draws from behind a node depends on all nodes above."""

    def walk(
        self, tree: DraftTree, laws: LawSource, noise: Noise
    ) -> tuple[list[list[int]], np.ndarray]:
        """
        Raises:
            UnsupportedProposal: a node with two children.
        """
        chains = [chain_of(row.children) for row in candidates(tree)]
        accepted_B = np.zeros(len(chains), dtype=np.int64)
        ends: list[tuple[int, np.ndarray, NodeLaw]] = []
        """(depth, rows, laws of what follows there if their drafts are accepted so far)"""

        def judge(depth: int, rows: np.ndarray, stays_R: Tensor) -> np.ndarray:
            # the place of the next step's draft may be this one's: a lane for each depth
            stays = noise.accept(stays_R, rows, depth - 1, lane=depth - 1)
            accepted_B[rows[stays]] = depth
            return np.flatnonzero(stays)

        rows, share_R = np.arange(len(chains)), torch.ones(len(chains), dtype=torch.float64)
        depth = 0
        while len(rows):
            more_R = np.array([len(chains[b]) > depth for b in rows])
            end, on = np.flatnonzero(~more_R), np.flatnonzero(more_R)
            if len(end) and depth > 0:
                end = end[judge(depth, rows[end], share_R[end])]
            if len(end):
                ends.append((depth, rows[end], laws.at(rows[end], _at(chains, rows[end], depth))))
            rows, share_R = rows[on], share_R[on]
            if len(rows):
                p = laws.at(rows, _at(chains, rows, depth))
                nodes = np.array([chains[b][depth] for b in rows])
                drafted = tree.tokens_BN[rows, nodes]
                q = drawn_from(tree, rows, nodes[:, None], p.vocab_size)
                after, stays_R = rest_of(p, q, share_R)
                ends.append((depth, rows, after))
                if depth > 0:
                    judge(depth, rows, stays_R)
                share_R = share_of_draft(p, q, drafted, share_R)
                # nothing stays behind a token that the target never says
                some = np.flatnonzero(share_R.numpy() > 0)
                rows, share_R = rows[some], share_R[some]
            depth += 1
        next_token_B = np.zeros(len(chains), dtype=np.int64)
        for depth, rows, after in ends:
            mine = np.flatnonzero(accepted_B[rows] == depth)
            if len(mine):
                drawn = after.take(mine).draw(noise, rows[mine], depth, Purpose.TARGET)
                next_token_B[rows[mine]] = drawn.cpu().numpy()
        return [chain[:n] for chain, n in zip(chains, accepted_B, strict=True)], next_token_B


def _at(chains: list[list[int]], rows: np.ndarray, depth: int) -> np.ndarray:
    """[R] the nodes at this depth of the rows' chains; the root at depth 0."""
    return np.array([chains[b][depth - 1] if depth else ROOT for b in rows], dtype=np.int64)


def chain_of(children: dict[int, list[int]]) -> list[int]:
    """The nodes of a row's chain, from the root down.

    Args:
        children: of each node, and of the root.

    Raises:
        UnsupportedProposal: a node with two children.
    """
    chain: list[int] = []
    node = ROOT
    while node in children:
        if len(children[node]) > 1:
            raise UnsupportedProposal(
                "Rule 'block' verifies chains, and this draft branches: use --rule traversal, or "
                "give --draft-length in place of a tree (--drafter-option KIND.length=N for a "
                "drafter behind the first that A+B joins)."
            )
        (node,) = children[node]
        chain.append(node)
    return chain


def share_of_draft(p: NodeLaw, q: Law, drafted_R: Tensor, share_R: Tensor) -> Tensor:
    """[R] the share of p's law behind these drafts from q, below nodes with these shares."""
    # p may be on a device and q on the host
    ratio_R = p.prob(drafted_R).double().cpu() / q.prob(drafted_R).double().cpu()
    return (share_R * ratio_R).clamp(max=1.0)


def rest_of(p: NodeLaw, q: Law, share_R: Tensor) -> tuple[NodeLaw, Tensor]:
    """What is left of a share of p behind a refused draft from q: (norm(max(share p - q, 0)), its
    own share [R])."""
    after, mass_R = p.excess(q, share_R)
    left_R = mass_R + 1 - share_R
    return after, torch.where(left_R > 0, mass_R / left_R, 1.0)
