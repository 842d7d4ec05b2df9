"""Drafters for the suite: every proposal kind and tree shape, from a tabular law, in plain view.

They are no features: they reach the corners of the contract (sampled trees, children without
replacement, probes, ragged trees) before a drafter of the package does, and mutants break them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.law import Law, Noise, Purpose
from draftsmith.core.sampling import History, Sampler
from draftsmith.core.trees import shape_parents
from draftsmith.core.types import (
    PADDING,
    ROOT,
    DraftTree,
    Proposal,
    RequestBatch,
    TreeShape,
)
from draftsmith.drafters.base import Accepted, Drafter, DraftState
from draftsmith.targets.toy import TabularTarget


@dataclass(frozen=True, slots=True)
class Known(DraftState):
    """All that these drafters remember: each row's tokens."""

    tokens: list[list[int]]
    num_prompt: list[int]

    def take(self, rows: Sequence[int]) -> Known:
        return Known([self.tokens[r] for r in rows], [self.num_prompt[r] for r in rows])

    def rewind(self, tokens: Sequence[Sequence[int]]) -> Known:
        return Known([list(row) for row in tokens], [len(row) for row in tokens])


class ReferenceDrafter(Drafter):
    """Drafts from a tabular law q of its own, level by level."""

    proposal = Proposal.SAMPLED

    def __init__(self, model: TabularTarget) -> None:
        super().__init__()
        self.model = model

    def start(self, request: RequestBatch) -> Known:
        return Known([list(row) for row in request.tokens], [len(row) for row in request.tokens])

    def advance(self, state: Known, accepted: Accepted) -> Known:
        longer = [[*known, *new] for known, new in zip(state.tokens, accepted.emitted, strict=True)]
        return Known(longer, state.num_prompt)

    def propose(
        self,
        state: Known,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        """Children of a node are adjacent and in draw order:

        root -+- 0 --- 2      q row 0: below the root   (nodes 0, 1)
              `- 1 --- 3      q row 1: below node 0     (node 2), row 2: below node 1 (node 3)
        """
        num_rows, parents = len(state.tokens), shape_parents(shape)
        tokens_BN = np.zeros((num_rows, len(parents)), dtype=np.int64)
        q_rows_BN = np.zeros_like(tokens_BN)
        laws: list[Tensor] = []
        rows = np.arange(num_rows)
        level, depth, node = [ROOT], 0, 0
        for width in shape.widths:
            below = []
            for parent in level:
                law = self.law_below(state, sampler, tokens_BN, parents, parent)
                laws.append(self.reported(law, state, tokens_BN, parents, parent))
                q_rows_BN[:, node : node + width] = ((len(laws) - 1) * num_rows + rows)[:, None]
                children = self.pick(law, width, noise, rows, depth, node)
                tokens_BN[:, node : node + width] = children.numpy()
                below += range(node, node + width)
                node += width
            level, depth = below, depth + 1
        sampled = self.proposal is not Proposal.OPAQUE
        return DraftTree(
            tokens_BN=torch.from_numpy(tokens_BN),
            parents_BN=torch.tensor(parents).expand(num_rows, -1).clone(),
            proposal=self.proposal,
            q=Law(torch.cat(laws), self.model.vocab_size) if sampled else None,
            q_rows_BN=torch.from_numpy(q_rows_BN) if sampled else None,
        )

    def law_below(
        self,
        state: Known,
        sampler: Sampler,
        tokens_BN: np.ndarray,
        parents: Sequence[int],
        node: int,
    ) -> Law:
        """q below one node, in every row, with the history of the row's own path."""
        path: list[int] = []
        while node != ROOT:
            path.insert(0, node)
            node = parents[node]
        contexts = [[*known, *tokens_BN[b, path].tolist()] for b, known in enumerate(state.tokens)]
        logits_BV = torch.stack([self.model.logits_after(tokens) for tokens in contexts])
        histories = [
            History(tokens=tokens, num_prompt=num)
            for tokens, num in zip(contexts, state.num_prompt, strict=True)
        ]
        return sampler.law(logits_BV, histories)

    def reported(
        self,
        law: Law,
        state: Known,
        tokens_BN: np.ndarray,
        parents: Sequence[int],
        node: int,
    ) -> Tensor:
        """[B, V]: what the tree says the children were drawn from. (A seam for mutants.)"""
        return law.probs()

    def pick(
        self, law: Law, width: int, noise: Noise, rows: np.ndarray, depth: int, lane: int
    ) -> Tensor:
        """[B, width] tokens; the noise of the first of them is on this lane."""
        drawn = [law.draw(noise, rows, depth, Purpose.DRAFT, lane + w) for w in range(width)]
        return torch.stack(drawn, 1)


class Sampled(ReferenceDrafter):
    """i.i.d. children."""


class WithoutReplacement(ReferenceDrafter):
    """Siblings differ: each is drawn from what its elder siblings left."""

    proposal = Proposal.WITHOUT_REPLACEMENT

    def pick(
        self, law: Law, width: int, noise: Noise, rows: np.ndarray, depth: int, lane: int
    ) -> Tensor:
        drawn: list[Tensor] = []
        for w in range(width):
            drawn.append(law.draw(noise, rows, depth, Purpose.DRAFT, lane + w))
            law = law.without(drawn[-1])
        return torch.stack(drawn, 1)


class Greedy(ReferenceDrafter):
    """The most probable children: no draws, no q."""

    proposal = Proposal.OPAQUE

    def pick(
        self, law: Law, width: int, noise: Noise, rows: np.ndarray, depth: int, lane: int
    ) -> Tensor:
        return law.probs().argsort(dim=-1, descending=True, stable=True)[:, :width]


class Whimsical(Greedy):
    """Opaque children by private dice: unequal trees per row, duplicates, probes, padding."""

    def propose(
        self,
        state: Known,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        num_nodes, num_rows = shape.num_nodes + 2, len(state.tokens)
        most_B = np.array([shape.clip(depth).num_nodes + 2 for depth in depth_B.tolist()])
        rows, vocab = np.arange(num_rows), self.model.vocab_size
        tokens_BN = np.zeros((num_rows, num_nodes), dtype=np.int64)
        parents_BN = np.full((num_rows, num_nodes), PADDING, dtype=np.int64)
        candidate_BN = np.ones((num_rows, num_nodes), dtype=bool)
        depth_BN = np.zeros((num_rows, num_nodes), dtype=np.int64)
        for n in range(num_nodes):
            dice = [noise.uniform(rows, 0, Purpose.DRAFTER_STATE, 4 * n + i) for i in range(4)]
            tokens_BN[:, n] = (dice[0] * vocab).astype(np.int64)
            parent_B = (dice[1] * (n + 1)).astype(np.int64) - 1
            above = np.where(parent_B >= 0, depth_BN[rows, np.maximum(parent_B, 0)], 0)
            hangs = (parent_B == ROOT) | (parents_BN[rows, np.maximum(parent_B, 0)] != PADDING)
            real = hangs & (above < depth_B) & (n < most_B) & (dice[2] < 0.85)
            parents_BN[:, n] = np.where(real, parent_B, PADDING)
            depth_BN[:, n] = np.where(real, above + 1, 0)
            candidate_BN[:, n] = dice[3] < 0.85
        return DraftTree(
            tokens_BN=torch.from_numpy(tokens_BN),
            parents_BN=torch.from_numpy(parents_BN),
            proposal=Proposal.OPAQUE,
            candidate_BN=torch.from_numpy(candidate_BN),
        )
