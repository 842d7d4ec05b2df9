"""Growing a draft tree, level by level, from what a `Reader` says.

    fed in    first: what the model does not       then the nodes that have children, one level
              know yet, up to the root             per forward, each seeing its ancestors

A tree of fixed shape is grown here: its nodes do not depend on the model, and their order is the
shape's (level by level, siblings adjacent). One that follows the model is grown in `_dynamic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from draftsmith.drafters._dynamic import grow_dynamic
from draftsmith.drafters._reader import Reader
from draftsmith.law import Law, Noise, Purpose
from draftsmith.sampler import History, Sampler
from draftsmith.transfer import to_device
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
        self, tokens_BN: Tensor, parents_N: np.ndarray, nodes: np.ndarray
    ) -> list[History]:
        """The tokens before the law behind each node, row by row; none if nobody reads them."""
        if not self.sampler.needs_history:
            return []
        drafted_BN = tokens_BN.cpu().numpy()
        return [
            history_at(
                History(tokens=self.known[b], num_prompt=self.num_prompt[b]),
                drafted_BN[b],
                parents_N,
                n,
            )
            for b in range(len(self.known))
            for n in nodes.tolist()
        ]


def grow(reader: Reader, shape: TreeShape, how: Draw) -> DraftTree:
    """Draft a tree; its numbers stay where the reader's logits are.

    A shape that follows the model takes its top tokens, whatever `how` says; so does every tree at
    temperature 0, where a law is one token and draws would leave its siblings nothing.
    """
    if how.sampler.temperature == 0 and not shape.is_chain:
        how = replace(how, choice="greedy")
    return grow_dynamic(reader, shape) if shape.is_dynamic else _grow_fixed(reader, shape, how)


def _grow_fixed(reader: Reader, shape: TreeShape, how: Draw) -> DraftTree:
    num_rows, template = len(how.known), np.array(shape_parents(shape), dtype=np.int64)
    num_nodes = len(template)
    see_NN = sees(template[None])[0]
    q_rows = np.zeros((num_rows, num_nodes + 1), dtype=np.int64)
    fed = np.full(num_nodes, -1, dtype=np.int64)
    laws: list[Law] = []
    order: list[int] = []
    before = np.array([ROOT])
    logits_BFV = reader.root()[:, None]
    device = logits_BFV.device
    # one column more: children that a ragged level does not have are written there
    tokens_BN = torch.zeros((num_rows, num_nodes + 1), dtype=torch.long, device=device)
    spent_BN = torch.zeros_like(tokens_BN, dtype=torch.bool)
    for depth, level in enumerate(levels(shape)):
        if depth > 0:
            nodes = level.frontier_F
            above = np.searchsorted(before, template[nodes])  # nodes ascend within a level
            fed[nodes] = len(order) + np.arange(len(nodes))
            order += nodes.tolist()
            logits_BFV = reader.level(
                tokens_BN[:, to_device(nodes, device)],
                torch.from_numpy(see_NN[nodes][:, order]).expand(num_rows, -1, -1),
                torch.from_numpy(above).expand(num_rows, -1),
            )
        before = level.frontier_F
        scores_RV = logits_BFV.reshape(-1, logits_BFV.shape[-1])
        kids_FW = to_device(level.kids_FW, device)
        before_R = how.histories(tokens_BN, template, level.frontier_F)
        if how.choice == "greedy":
            scores_RV = how.sampler.penalised(scores_RV, before_R)
            drawn_RW = scores_RV.topk(kids_FW.shape[1], dim=-1).indices
        else:
            law = _law(how, scores_RV, before_R)
            rows = np.repeat(np.arange(num_rows), len(level.frontier_F))
            kids = np.tile(level.kids_FW, (num_rows, 1))
            first = sum(part.num_rows for part in laws)
            q_rows[rows[:, None], kids] = (first + np.arange(len(rows)))[:, None]
            laws.append(law)
            drawn_RW, spent_RW = _draw(law, how, rows, depth, kids)
            spent_BN[:, kids_FW] = spent_RW.view(num_rows, *kids_FW.shape)
        tokens_BN[:, kids_FW] = drawn_RW.view(num_rows, *kids_FW.shape)
    parents_BN = torch.from_numpy(template).repeat(num_rows, 1)
    if how.choice == "without_replacement":
        parents_BN = _without_spent(parents_BN, spent_BN[:, :num_nodes], see_NN)
    return DraftTree(
        tokens_BN=tokens_BN[:, :num_nodes].contiguous(),
        parents_BN=parents_BN,
        proposal=PROPOSALS[how.choice],
        q=Law.cat(laws) if laws else None,
        q_rows_BN=torch.from_numpy(q_rows[:, :num_nodes].copy()) if laws else None,
        fed_BN=torch.from_numpy(fed).repeat(num_rows, 1),
    )


def _law(how: Draw, scores_RV: Tensor, histories: Sequence[History]) -> Law:
    if scores_RV.device.type == "cpu":
        return how.sampler.law(scores_RV, histories)
    # nobody waits for the device here: whoever verifies the draft looks at its laws
    return how.sampler.law(scores_RV, histories, check=lambda top_R: None)


def _draw(
    law: Law, how: Draw, rows: np.ndarray, depth: int, kids: np.ndarray
) -> tuple[Tensor, Tensor]:
    """(tokens, spent) [R, width]; spent: the support was used up, there is no such child."""
    drawn: list[Tensor] = []
    spent: list[Tensor] = []
    left = law
    for k in range(kids.shape[1]):
        token_R = left.draw(how.noise, rows, depth, Purpose.DRAFT, kids[:, k])
        spent_R = torch.zeros_like(token_R, dtype=torch.bool)
        if how.choice == "without_replacement":
            for earlier_R in drawn:
                spent_R |= earlier_R == token_R
            left = left.without(token_R)
        drawn.append(token_R)
        spent.append(spent_R)
    return torch.stack(drawn, dim=1), torch.stack(spent, dim=1)


def _without_spent(parents_BN: Tensor, spent_BN: Tensor, see_NN: np.ndarray) -> Tensor:
    """Children that there are none of, and all below them, are padding."""
    device = spent_BN.device
    sees_NN = to_device(see_NN.astype(np.float32), device)
    gone_BN = spent_BN.float() @ sees_NN.T > 0
    return to_device(parents_BN, device).masked_fill(gone_BN, PADDING)
