"""How many tokens a rule accepts of drafts, exactly: over all drafts and all that noise may say."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.law import Law
from draftsmith.core.trees import shape_parents
from draftsmith.core.types import DraftTree, Proposal, TreeShape
from draftsmith.core.verify import Rule, verify
from draftsmith.targets.toy import TabularTarget

from .toys import sparse

V = 3
Laws = Mapping[tuple[int, ...], Tensor]
"""By the tokens before."""


def alike(keep: int) -> tuple[TabularTarget, TabularTarget]:
    """Target and draft model that know the same tokens behind a text, and weigh them otherwise: so
    all shares lie between 0 and 1."""
    target, draft = sparse(keep, 0), sparse(keep, 0)
    draw = torch.Generator().manual_seed(9)
    draft.table_CV = draft.table_CV + torch.randn(draft.table_CV.shape, generator=draw)
    return target, draft


def random_laws(seed: int, length: int, sharp: float, vocab: int = V) -> dict[Any, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        path: (sharp * torch.randn(vocab, generator=draw, dtype=torch.float64)).softmax(-1)
        for depth in range(length + 1)
        for path in itertools.product(range(vocab), repeat=depth)
    }


class Answers:
    """Noise that says yes and no as it is told, and yes from then on; it notes what it said and how
    probable that was."""

    def __init__(self, answers: list[bool]) -> None:
        self.told, self.said, self.probability = answers, list[bool](), 1.0

    def accept(self, prob_R: Tensor, rows: np.ndarray, depth: int, lane: int) -> np.ndarray:
        yes = self.told[len(self.said)] if len(self.said) < len(self.told) else True
        self.said.append(yes)
        chance = min(float(prob_R[0]), 1.0)
        self.probability *= chance if yes else 1 - chance
        return np.array([yes])

    def categorical(self, weights_RK: Tensor, *_: Any) -> Tensor:
        return torch.zeros(1, dtype=torch.long)


class BehindNodes:
    """The target's laws behind the root and the nodes of one tree."""

    def __init__(self, p: Laws, paths: list[tuple[int, ...]]) -> None:
        self.p, self.paths = p, paths

    def at(self, rows: np.ndarray, nodes: np.ndarray) -> Law:
        law = self.p[() if nodes[0] < 0 else self.paths[int(nodes[0])]]
        return Law(law[None], len(law))


def paths_of(parents: list[int], tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(parents, tokens, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def drafted_tree(
    shape: TreeShape,
    tokens: tuple[int, ...],
    q: Laws,
    proposal: Proposal = Proposal.SAMPLED,
) -> DraftTree:
    parents = list(shape_parents(shape))
    laws = torch.stack([q[path[:-1]] for path in paths_of(parents, tokens)])
    return DraftTree(
        tokens_BN=torch.tensor([tokens]),
        parents_BN=torch.tensor([parents]),
        proposal=proposal,
        q=Law(laws, laws.shape[1]),
        q_rows_BN=torch.arange(len(tokens))[None],
    )


def probability(tree: DraftTree) -> float:
    """The probability of these tokens, given the shape."""
    assert tree.q is not None
    distinct = tree.proposal is Proposal.WITHOUT_REPLACEMENT
    drawn: dict[int, list[int]] = {}
    total = 1.0
    for node, parent in enumerate(tree.parents_BN[0].tolist()):
        law, token = tree.q.probs_RK[node].clone(), int(tree.tokens_BN[0, node])
        if distinct:
            law[drawn.get(parent, [])] = 0.0
            law /= law.sum()
        total *= float(law[token])
        drawn.setdefault(parent, []).append(token)
    return total


def expected_accepted(
    rule: Rule, p: Laws, q: Laws, shape: TreeShape, proposal: Proposal = Proposal.SAMPLED
) -> float:
    """Over all drafts and all answers."""
    parents, vocab, total = list(shape_parents(shape)), len(p[()]), 0.0
    for tokens in itertools.product(range(vocab), repeat=len(parents)):
        tree = drafted_tree(shape, tokens, q, proposal)
        drafted = probability(tree)
        if drafted == 0:
            continue
        laws = BehindNodes(p, paths_of(parents, tokens))
        todo: list[list[bool]] = [[]]  # only answers that are asked for: most questions are not
        while todo:
            answers = todo.pop()
            noise = Answers(answers)
            verdict = verify(tree, laws, rule, cast("Any", noise))
            total += drafted * noise.probability * int(verdict.num_accepted_B[0])
            for asked in range(len(answers), len(noise.said)):
                todo.append([*noise.said[:asked], False])
    return total
