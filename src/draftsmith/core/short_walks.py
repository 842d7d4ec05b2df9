"""What `match`, `rejection` and `block` decide where every law is softmax(logits / T), in a
fraction of the time of the rules' own walks (`core/verify.py`), which make laws and arrays.

    T = 0    a law is its highest logit                   `walk_highest`, all three
    T > 0    a law is a row of logits that is drawn from  `walk_drawn`, match in any tree
                                                          `walk_rejecting`, rejection in a chain
                                                          `walk_judging`, block

Each reads the noise that the rule reads, under the same keys. A draw inverts the same cumulative
sum, but the weights are computed elsewhere (`DrawsFromLogits`) and round otherwise: decisions are
equal but for uniform numbers within some 1e-7 of an edge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.block_rule import Block, chain_of
from draftsmith.core.law import Noise, Purpose
from draftsmith.core.sampling import Sampler, require_finite, widened
from draftsmith.core.types import ROOT, DraftTree, Proposal, Verdict
from draftsmith.core.verify import Match, Rejection, Rule, candidates, make_verdict


class DrawsFromLogits(Protocol):
    """Draws from softmax(logits / temperature) for one row of float32 logits on the CPU."""

    def draw(self, logits_V: Tensor, temperature: float, u: float) -> int | None:
        """The token left of which a share u of the law lies; None: a logit is NaN, or none is
        finite."""
        ...

    def reject(
        self,
        logits_V: Tensor,
        temperature: float,
        token: int,
        q: tuple[Tensor, Tensor | None],
        u: tuple[float, float],
    ) -> tuple[bool, int] | None:
        """(True, token): it stays, as u[0] is below p / q; (False, t): t is what u[1] draws from
        norm(max(p - q, 0)). q: [K] probabilities of [K] ids, as a `Law` keeps them. None: see
        `draw`."""
        ...

    def judge_chain(
        self,
        logits: Sequence[Tensor],
        temperature: float,
        tokens: Sequence[int],
        q: Sequence[tuple[Tensor, Tensor | None]],
        u: Sequence[float],
        next_u: Sequence[float],
    ) -> tuple[int, int] | None:
        """(n, t) by `core/block_rule.py`: of a chain of tokens, each drawn from its q, the first n
        stay, as u[n - 1] is below the chance of this, and t is what next_u[n] draws behind them.
        None: see `draw`.

        Args:
            logits: [V] behind the tokens before each, and behind the whole chain.
            q: as in `reject`, for each token.
            u: a number for each token.
            next_u: a number for each row of logits.
        """
        ...


def short_walk(
    tree: DraftTree,
    logits_BNV: Tensor,
    sampler: Sampler,
    rule: Rule,
    noise: Noise,
    draws: DrawsFromLogits | None,
) -> Verdict | None:
    """The verdict of a rule that was checked; None: this case needs the rule's own walk.

    Args:
        tree: tokens and parents on the CPU.
        logits_BNV: [B, 1 + N, V] on the CPU; column 0 is the root.
        draws: of the engine that computed the logits; None: there is none.

    Raises:
        BackendError: logits that the walk came by are NaN.
    """
    # these alone: a class that is derived from them may decide otherwise
    if type(rule) not in (Match, Rejection, Block):
        return None
    branches = type(rule) is not Match and not _is_chains(tree)
    if branches and type(rule) is Block:
        return None  # its own walk says why it refuses the tree
    if sampler.takes_highest:
        return walk_highest(tree, logits_BNV)
    if draws is None or not sampler.reads_logits_alone or logits_BNV.dtype != torch.float32:
        return None
    if type(rule) is Match:
        return walk_drawn(tree, logits_BNV, sampler.temperature, noise, draws)
    if branches or tree.proposal is Proposal.OPAQUE:
        return None
    walk = walk_judging if type(rule) is Block else walk_rejecting
    return walk(tree, logits_BNV, sampler.temperature, noise, draws)


def walk_highest(tree: DraftTree, logits_BNV: Tensor) -> Verdict:
    """Go on while a child holds the highest logit's token."""

    def next_token(row: int, node: int, depth: int) -> int:
        logits_V = widened(logits_BNV[row, node + 1]).detach()
        token = int(logits_V.numpy().argmax())  # the lowest of equal ones; NaN is the largest
        require_finite(logits_V[token : token + 1])
        return token

    return _matched(tree, next_token)


def walk_drawn(
    tree: DraftTree, logits_BNV: Tensor, temperature: float, noise: Noise, draws: DrawsFromLogits
) -> Verdict:
    """Go on while a child holds the token that is drawn from the law."""
    u_BD = _numbers(tree, noise, Purpose.TARGET)

    def next_token(row: int, node: int, depth: int) -> int:
        logits_V = logits_BNV[row, node + 1]
        return _known(draws.draw(logits_V, temperature, u_BD[row][depth]), logits_V)

    return _matched(tree, next_token)


def walk_rejecting(
    tree: DraftTree, logits_BNV: Tensor, temperature: float, noise: Noise, draws: DrawsFromLogits
) -> Verdict:
    """Accept the tokens of chains against what they were drawn from, until one is refused."""
    assert tree.q is not None and tree.q_rows_BN is not None
    tokens, q_rows = tree.tokens_BN.tolist(), tree.q_rows_BN.tolist()
    u_BD, accept_BD = (_numbers(tree, noise, one) for one in (Purpose.TARGET, Purpose.ACCEPT))
    paths: list[list[int]] = []
    last: list[int] = []
    for b, known in enumerate(candidates(tree)):
        node = ROOT
        path: list[int] = []
        while True:
            logits_V, u = logits_BNV[b, node + 1], u_BD[b][len(path)]
            child = next(iter(known.children.get(node, ())), None)
            if child is None:
                last.append(_known(draws.draw(logits_V, temperature, u), logits_V))
                break
            q, both = tree.q.row(q_rows[b][child]), (accept_BD[b][len(path)], u)
            found = draws.reject(logits_V, temperature, tokens[b][child], q, both)
            stays, token = (False, _known(None, logits_V)) if found is None else found
            if not stays:
                last.append(token)
                break
            node = child
            path.append(child)
        paths.append(path)
    return make_verdict(paths, last)


def walk_judging(
    tree: DraftTree, logits_BNV: Tensor, temperature: float, noise: Noise, draws: DrawsFromLogits
) -> Verdict:
    """Accept the longest beginning of each chain that the target's mass allows."""
    assert tree.q is not None and tree.q_rows_BN is not None
    tokens, q_rows = tree.tokens_BN.tolist(), tree.q_rows_BN.tolist()
    u_BD = _numbers(tree, noise, Purpose.TARGET)
    accept_BD = _numbers(tree, noise, Purpose.ACCEPT, lane_is_depth=True)
    paths: list[list[int]] = []
    last: list[int] = []
    for b, known in enumerate(candidates(tree)):
        chain = chain_of(known.children)
        rows = [logits_BNV[b, node + 1] for node in (ROOT, *chain)]
        found = draws.judge_chain(
            rows,
            temperature,
            [tokens[b][node] for node in chain],
            [tree.q.row(q_rows[b][node]) for node in chain],
            accept_BD[b][: len(chain)],
            u_BD[b][: len(rows)],
        )
        if found is None:
            require_finite(torch.stack([one.amax() for one in rows]))
        assert found is not None
        stays, token = found
        paths.append(chain[:stays])
        last.append(token)
    return make_verdict(paths, last)


def _matched(tree: DraftTree, next_token: Callable[[int, int, int], int]) -> Verdict:
    """Go on while a child holds what is next: of (row, node, depth)."""
    tokens = tree.tokens_BN.tolist()
    paths: list[list[int]] = []
    last: list[int] = []
    for b, known in enumerate(candidates(tree)):
        node: int | None = ROOT
        path: list[int] = []
        while node is not None:
            token = next_token(b, node, len(path))
            children: Sequence[int] = known.children.get(node, ())
            node = next((kid for kid in children if tokens[b][kid] == token), None)
            if node is not None:
                path.append(node)
        paths.append(path)
        last.append(token)
    return make_verdict(paths, last)


def _numbers(
    tree: DraftTree, noise: Noise, purpose: Purpose, *, lane_is_depth: bool = False
) -> list[list[float]]:
    """The uniform numbers of each row, by depth."""
    rows, deep = tree.num_rows, tree.num_nodes + 1
    depth = np.tile(np.arange(deep), rows)
    lane = depth if lane_is_depth else 0
    found = noise.uniform(np.repeat(np.arange(rows), deep), depth, purpose, lane)
    numbers: list[list[float]] = found.reshape(rows, deep).tolist()
    return numbers


def _known(token: int | None, logits_V: Tensor) -> int:
    if token is None:
        require_finite(logits_V.amax()[None])
    assert token is not None
    return token


def _is_chains(tree: DraftTree) -> bool:
    return all(len(kids) < 2 for row in candidates(tree) for kids in row.children.values())
