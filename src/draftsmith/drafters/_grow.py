"""Growing a draft tree, level by level, from what a `Reader` says.

    fed in    first: what the model does not       then the nodes that have children, one level
              know yet, up to the root             per forward, each seeing its ancestors

A tree of fixed shape is grown here: its nodes do not depend on the model, and their order is the
shape's (level by level, siblings adjacent). One that follows the model is grown in `_dynamic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from draftsmith.drafters._dynamic import grow_dynamic
from draftsmith.drafters._reader import Reader
from draftsmith.law import Law, Noise, Purpose
from draftsmith.sampler import History, Sampler
from draftsmith.trees import history_at, levels, sees, shape_parents
from draftsmith.types import PADDING, ROOT, DraftTree, Proposal, TreeShape

Choice = Literal["sampled", "without_replacement", "greedy"]
PROPOSALS: dict[Choice, Proposal] = {
    "sampled": Proposal.SAMPLED,
    "without_replacement": Proposal.WITHOUT_REPLACEMENT,
    "greedy": Proposal.OPAQUE,
}


class Texts(Protocol):
    """What a drafter's state knows: the tokens of each row, and how many of them are its prompt."""

    known: list[list[int]]
    num_prompt: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """How children are chosen."""

    choice: Choice
    sampler: Sampler
    noise: Noise
    known: Sequence[Sequence[int]]
    """Tokens of each row."""
    num_prompt: Sequence[int]

    @classmethod
    def behind(cls, texts: Texts, choice: Choice, sampler: Sampler, noise: Noise) -> Draw:
        """How to choose children behind the known tokens of a state."""
        return cls(
            choice=choice,
            sampler=sampler,
            noise=noise,
            known=texts.known,
            num_prompt=texts.num_prompt,
        )

    def histories(
        self, tokens_BN: np.ndarray, parents_N: np.ndarray, nodes: np.ndarray
    ) -> list[History]:
        """The tokens before the law behind each node, row by row; none if nobody reads them."""
        if not self.sampler.needs_history:
            return []
        return [
            history_at(
                History(tokens=self.known[b], num_prompt=self.num_prompt[b]),
                tokens_BN[b],
                parents_N,
                n,
            )
            for b in range(len(self.known))
            for n in nodes.tolist()
        ]


def grow(reader: Reader, shape: TreeShape, how: Draw) -> tuple[DraftTree, np.ndarray]:
    """Draft a tree; also, per node, its number among those fed (or -1).

    A shape that follows the model takes its top tokens, whatever `how` says.
    """
    return grow_dynamic(reader, shape) if shape.is_dynamic else _grow_fixed(reader, shape, how)


def _grow_fixed(reader: Reader, shape: TreeShape, how: Draw) -> tuple[DraftTree, np.ndarray]:
    num_rows, template = len(how.known), np.array(shape_parents(shape), dtype=np.int64)
    num_nodes = len(template)
    # one column more: children that a ragged level does not have are written there
    tokens = np.zeros((num_rows, num_nodes + 1), dtype=np.int64)
    parents = np.broadcast_to(np.append(template, ROOT), tokens.shape).copy()
    q_rows = np.zeros_like(tokens)
    laws: list[Law] = []
    fed = np.full(num_nodes + 1, -1, dtype=np.int64)
    order: list[int] = []
    see_NN = sees(template[None])[0]
    before = np.array([ROOT])
    plan = levels(shape)
    for depth, level in enumerate(plan):
        if depth == 0:
            logits_BFV = reader.root()[:, None]
        else:
            nodes = level.frontier_F
            above = np.searchsorted(before, template[nodes])  # nodes ascend within a level
            fed[nodes] = len(order) + np.arange(len(nodes))
            order += nodes.tolist()
            logits_BFV = reader.level(
                torch.from_numpy(tokens[:, nodes]),
                torch.from_numpy(see_NN[nodes][:, order]).expand(num_rows, -1, -1),
                torch.from_numpy(above).expand(num_rows, -1),
            )
        before = level.frontier_F
        scores_RV = logits_BFV.reshape(-1, logits_BFV.shape[-1])
        rows = np.repeat(np.arange(num_rows), len(level.frontier_F))
        kids = np.tile(level.kids_FW, (num_rows, 1))
        width = kids.shape[1]
        if how.choice == "greedy":
            drawn = scores_RV.topk(width, dim=-1).indices.cpu().numpy()
        else:
            law = how.sampler.law(scores_RV, how.histories(tokens, template, level.frontier_F))
            first = sum(part.num_rows for part in laws)
            q_rows[rows[:, None], kids] = (first + np.arange(len(rows)))[:, None]
            laws.append(law)
            drawn, spent = _draw(law, how, rows, depth, kids)
            parents[rows[:, None], kids] = np.where(spent, PADDING, parents[rows[:, None], kids])
        tokens[rows[:, None], kids] = drawn
    parents = parents[:, :num_nodes]
    if how.choice == "without_replacement":
        _drop_orphans(parents)
    tree = DraftTree(
        tokens_BN=torch.from_numpy(tokens[:, :num_nodes].copy()),
        parents_BN=torch.from_numpy(parents.copy()),
        proposal=PROPOSALS[how.choice],
        q=Law.cat(laws) if laws else None,
        q_rows_BN=torch.from_numpy(q_rows[:, :num_nodes].copy()) if laws else None,
    )
    return tree, np.broadcast_to(fed[:num_nodes], (num_rows, num_nodes))


def _draw(
    law: Law, how: Draw, rows: np.ndarray, depth: int, kids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, spent) [R, width]; spent: the support was used up, there is no such child."""
    drawn = np.zeros(kids.shape, dtype=np.int64)
    spent = np.zeros(kids.shape, dtype=bool)
    left = law
    for k in range(kids.shape[1]):
        token = left.draw(how.noise, rows, depth, Purpose.DRAFT, kids[:, k])
        drawn[:, k] = token.cpu().numpy()
        if how.choice == "without_replacement":
            spent[:, k] = (drawn[:, :k] == drawn[:, k : k + 1]).any(1)
            left = left.without(token)
    return drawn, spent


def _drop_orphans(parents: np.ndarray) -> None:
    """Children of padding are padding."""
    rows = np.arange(len(parents))
    for n in range(parents.shape[1]):
        above = parents[:, n]
        gone = (above >= 0) & (parents[rows, np.maximum(above, 0)] == PADDING)
        parents[gone, n] = PADDING
