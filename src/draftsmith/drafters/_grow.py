"""Growing a draft tree with a language model, level by level, over the model's own cache.

    cache columns   [ ... known tokens ... root | n0 n1 | n2 n3 ... ]
    fed in          first: what is not cached     then one level per forward, each node seeing
                    yet, up to the root           its ancestors; the deepest level is never fed

Node order is the shape's (level by level, siblings adjacent) and is also the order of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from draftsmith.cache import KVCache, lay_out
from draftsmith.law import History, Law, Noise, Purpose, Sampler
from draftsmith.targets._base import Target, feed_beginning, stay_inside
from draftsmith.trees import depths, geometry, history_at, shape_parents
from draftsmith.types import PADDING, DraftTree, Proposal, Signals, TreeShape

Choice = Literal["sampled", "without_replacement", "greedy"]
_NO_NODES = np.zeros((1, 0), dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabularies:
    """How the draft model's ids and the target's correspond."""

    size: int
    """Of the target's vocabulary."""
    to_draft: Callable[[np.ndarray], np.ndarray]
    """Target ids -> ids that the draft model is fed."""
    to_target: Callable[[Tensor], Tensor]
    """Draft logits [R, Vd] -> logits [R, size], -inf where the draft model has no token."""


def grow(
    model: Target,
    cache: KVCache,
    known: Sequence[Sequence[int]],
    num_prompt: Sequence[int],
    shape: TreeShape,
    choice: Choice,
    vocabularies: Vocabularies,
    sampler: Sampler,
    noise: Noise,
) -> DraftTree:
    """Draft a tree of this shape below the last known token of each row.

    The cache ends with the known tokens committed and all levels but the deepest staged.
    """
    num_rows = len(known)
    pending = [
        vocabularies.to_draft(np.asarray(row[int(cache.lengths_B[b]) :], dtype=np.int64)).tolist()
        for b, row in enumerate(known)
    ]
    pending = feed_beginning(model, cache, pending)
    empty = np.broadcast_to(_NO_NODES, (num_rows, 0))
    logits_R = _feed(model, cache, pending, empty, empty)[:, -1]
    cache.commit(np.array([len(row) for row in pending]))

    template = np.array(shape_parents(shape), dtype=np.int64)
    parents = np.broadcast_to(template, (num_rows, len(template))).copy()
    tokens = np.zeros_like(parents)
    laws: list[Law] = []
    q_rows = np.zeros_like(parents)
    level_of = depths(template[None])[0]
    frontier = np.array([-1])
    for depth, width in enumerate(shape.widths):
        # laws at the frontier, row-major: (row 0, frontier 0), (row 0, frontier 1), ...
        scores = vocabularies.to_target(logits_R)
        rows = np.repeat(np.arange(num_rows), len(frontier))
        at = np.tile(frontier, num_rows)
        nodes = np.flatnonzero(level_of == depth + 1)
        kids = nodes.reshape(len(frontier), width)[np.tile(np.arange(len(frontier)), num_rows)]
        if choice == "greedy":
            drawn = scores.topk(width, dim=-1).indices.cpu().numpy()
        else:
            history = (
                [
                    history_at(
                        History(tokens=known[b], num_prompt=num_prompt[b]), tokens[b], template, n
                    )
                    for b, n in zip(rows.tolist(), at.tolist(), strict=True)
                ]
                if sampler.needs_history
                else ()
            )
            law = sampler.law(scores, history)
            q_rows[rows[:, None], kids] = (
                sum(part.num_rows for part in laws) + np.arange(len(rows))
            )[:, None]
            laws.append(law)
            drawn, spent = _draw(law, choice, rows, depth, kids, noise)
            parents[rows[:, None], kids] = np.where(spent, PADDING, parents[rows[:, None], kids])
        tokens[rows[:, None], kids] = drawn
        frontier = nodes
        if depth + 1 < shape.depth:
            logits_R = _feed_level(model, cache, vocabularies, tokens, template, nodes)
    if choice == "without_replacement":
        _drop_orphans(parents)
    proposal = {
        "sampled": Proposal.SAMPLED,
        "without_replacement": Proposal.WITHOUT_REPLACEMENT,
        "greedy": Proposal.OPAQUE,
    }[choice]
    return DraftTree(
        tokens_BN=torch.from_numpy(tokens),
        parents_BN=torch.from_numpy(parents),
        proposal=proposal,
        q=Law.cat(laws) if laws else None,
        q_rows_BN=torch.from_numpy(q_rows) if laws else None,
    )


def _feed(
    model: Target,
    cache: KVCache,
    pending: Sequence[Sequence[int]],
    tokens_BN: np.ndarray,
    parents_BN: np.ndarray,
) -> Tensor:
    fed, block = lay_out(cache, pending, tokens_BN, parents_BN)
    stay_inside(model, block)
    return model.forward(torch.from_numpy(fed), block, 1, Signals()).logits_BNV


def _feed_level(
    model: Target,
    cache: KVCache,
    vocabularies: Vocabularies,
    tokens: np.ndarray,
    template: np.ndarray,
    nodes: np.ndarray,
) -> Tensor:
    """Logits [B * len(nodes), Vd] behind one level's nodes."""
    num_rows, upto = len(tokens), int(nodes[-1]) + 1
    depth, see = geometry(template[None, :upto])
    block = cache.stage(
        np.broadcast_to(depth[:, nodes] - 1, (num_rows, len(nodes))),
        np.broadcast_to(see[:, nodes], (num_rows, len(nodes), upto)),
    )
    stay_inside(model, block)
    fed = torch.from_numpy(vocabularies.to_draft(tokens[:, nodes]))
    out = model.forward(fed, block, len(nodes), Signals()).logits_BNV
    return out.reshape(-1, out.shape[-1])


def _draw(
    law: Law, choice: Choice, rows: np.ndarray, depth: int, kids: np.ndarray, noise: Noise
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, spent) [R, width]; spent: the support was used up, there is no such child."""
    drawn = np.zeros(kids.shape, dtype=np.int64)
    spent = np.zeros(kids.shape, dtype=bool)
    left = law
    for k in range(kids.shape[1]):
        token = left.draw(noise, rows, depth, Purpose.DRAFT, kids[:, k])
        drawn[:, k] = token.cpu().numpy()
        if choice == "without_replacement":
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
