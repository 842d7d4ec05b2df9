"""The verifier: which drafted tokens are accepted, and which token follows them.

A rule goes down each row's tree from the root. At a node it asks for the target's law there and
chooses a child to descend to, or a token of the target's own to stop with:

    root --p0--> n0 --p1--> n2 --p2--> stop        path n0 n2, next token from the law at n2
         `-> n1                                     (three laws were looked at, not one per node)

Two lossless rules cover everything; `core/block_rule.py` and `core/traversal_rule.py` accept more
of chains and trees that were drawn:

* `Match` draws x from p and descends while some child holds x. Exact for any proposal, and the text
  is the very text that plain decoding gives for the same seed.
* `Rejection` uses q and accepts more when children were really drawn from it: child by child,
  accept with min(1, p(x)/q(x)), else continue with norm(max(p - q, 0)) (Leviathan et al. 2023;
  for several children SpecInfer, Miao et al. 2024). Children drawn without replacement count
  by their conditional q; opaque children by a point mass.

Lossy rules are in `core/lossy_rules.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from draftsmith.core.law import Law, Noise, Purpose
from draftsmith.core.sampling import History, Sampler
from draftsmith.core.trees import history_at, padded_rows
from draftsmith.core.types import PADDING, ROOT, DraftTree, Proposal, Verdict
from draftsmith.errors import LossyRule, UnsupportedProposal


class NodeLaw(Protocol):
    """What rules read of R laws; `Law` documents each method."""

    def prob(self, tokens_R: Tensor) -> Tensor: ...
    def entropy(self) -> Tensor: ...
    def gap(self, tokens_R: Tensor) -> Tensor: ...
    def mode(self) -> NodeLaw: ...
    def draw(self, noise: Noise, rows: np.ndarray, depth: int, purpose: Purpose) -> Tensor: ...
    def take(self, rows: np.ndarray) -> NodeLaw: ...
    def without(self, tokens_R: Tensor) -> NodeLaw: ...
    def residual(self, q: Law) -> NodeLaw: ...
    def excess(self, q: Law, share_R: Tensor) -> tuple[NodeLaw, Tensor]: ...
    @property
    def vocab_size(self) -> int: ...


class LawSource(Protocol):
    """The target's laws, made when they are asked for: a walk visits few of the tree's nodes."""

    def at(self, rows: np.ndarray, nodes: np.ndarray) -> NodeLaw:
        """[R] laws of the token after node `nodes[r]` of batch row `rows[r]` (-1: the root)."""
        ...


@dataclass(frozen=True, slots=True)
class TreeLaws:
    """Laws from one forward's logits, each with the history of its own path."""

    logits_BNV: Tensor
    """[B, 1 + N, V]; column 0 is the root."""
    sampler: Sampler
    histories: Sequence[History]
    """Known tokens per row, up to and including the root."""
    tokens_BN: np.ndarray
    parents_BN: np.ndarray

    def at(self, rows: np.ndarray, nodes: np.ndarray) -> Law:
        if len(rows) == 1:  # a view; fancy indexing would copy
            picked = self.logits_BNV[int(rows[0]), int(nodes[0]) + 1][None]
        else:
            picked = self.logits_BNV[torch.from_numpy(rows), torch.from_numpy(nodes + 1)]
        if not self.sampler.needs_history:
            return self.sampler.law(picked)
        paths = [
            history_at(self.histories[b], self.tokens_BN[b], self.parents_BN[b], n)
            for b, n in zip(rows.tolist(), nodes.tolist(), strict=True)
        ]
        return self.sampler.law(picked, paths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Where R rows of a walk stand: the law there, and the children below it."""

    law: NodeLaw
    rows: np.ndarray
    children: list[list[int]]
    """Per row: candidate nodes in proposal order."""
    depth: int
    """Depth of the children minus 1; 0 at the root."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Children:
    """The candidates below P nodes, up to S each, where the laws are."""

    tokens_PS: Tensor
    there_PS: Tensor
    """False: there are not so many."""
    q: Law | None
    """[P] laws that the children of each were drawn from; None: they are opaque."""
    distinct: bool
    """They were drawn without replacement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifierInputs:
    """What a rule reads of the laws of P nodes if its walk visits them."""

    last: Law
    """What the last token is drawn from if no child stays."""
    score_PS: Tensor | None = None
    """What decides whether each child stays: the probability of that, or its gap to the best."""
    entropy_P: Tensor | None = None


class Rule(Protocol):
    """Decides which path of a tree stays."""

    name: ClassVar[str]
    lossy: ClassVar[bool]
    needs_q: ClassVar[bool]
    """Reads the law that sampled children were drawn from."""
    proposals: ClassVar[frozenset[Proposal]]
    """The kinds of proposal for which the rule keeps its promise."""

    def walk(
        self, tree: DraftTree, laws: LawSource, noise: Noise
    ) -> tuple[list[list[int]], np.ndarray]:
        """Per row the nodes that stay, from the root down, and [B] the target's token behind."""
        ...

    @property
    def precompute(self) -> Callable[[Law, Callable[[], Children]], VerifierInputs] | None:
        """Compute all that `walk` can read, without a transfer to the host; None: what it reads
        is not known before it walks, and a device is waited for at every node."""
        ...


ALL = frozenset(Proposal)


class Descent(abc.ABC):
    """A rule that decides node by node, as deep as it gets."""

    def walk(
        self, tree: DraftTree, laws: LawSource, noise: Noise
    ) -> tuple[list[list[int]], np.ndarray]:
        known = candidates(tree)
        at = np.full(tree.num_rows, ROOT, dtype=np.int64)
        paths: list[list[int]] = [[] for _ in range(tree.num_rows)]
        next_token = np.zeros(tree.num_rows, dtype=np.int64)
        rows = np.arange(tree.num_rows)
        depth = 0
        while len(rows):
            node = Node(
                law=laws.at(rows, at[rows]),
                rows=rows,
                children=[known[b].children.get(int(at[b]), []) for b in rows],
                depth=depth,
            )
            child, token = self.step(tree, node, noise)
            going = child != ROOT
            next_token[rows[~going]] = token[~going]
            rows, child = rows[going], child[going]
            at[rows] = child
            for b, kid in zip(rows, child, strict=True):
                paths[b].append(int(kid))
            depth += 1
        return paths, next_token

    @abc.abstractmethod
    def step(self, tree: DraftTree, node: Node, noise: Noise) -> tuple[np.ndarray, np.ndarray]:
        """([R] child or -1, [R] token with which rows of child -1 end)."""


@dataclass(frozen=True, slots=True)
class Match(Descent):
    """Draw from p; go on while a child holds the token drawn."""

    name: ClassVar[str] = "match"
    lossy: ClassVar[bool] = False
    needs_q: ClassVar[bool] = False
    proposals: ClassVar[frozenset[Proposal]] = ALL

    def step(self, tree: DraftTree, node: Node, noise: Noise) -> tuple[np.ndarray, np.ndarray]:
        drawn = node.law.draw(noise, node.rows, node.depth, Purpose.TARGET).cpu().numpy()
        return holding(tree, node, drawn), drawn

    def precompute(self, law: Law, children: Callable[[], Children]) -> VerifierInputs:
        return VerifierInputs(last=law)


@dataclass(frozen=True, slots=True)
class Rejection(Descent):
    """Accept children against q, one after the other; the residual law has the last word."""

    name: ClassVar[str] = "rejection"
    lossy: ClassVar[bool] = False
    needs_q: ClassVar[bool] = True
    proposals: ClassVar[frozenset[Proposal]] = ALL

    def step(self, tree: DraftTree, node: Node, noise: Noise) -> tuple[np.ndarray, np.ndarray]:
        tokens = tree.tokens_BN.numpy()
        child = np.full(len(node.rows), ROOT, dtype=np.int64)
        last = np.zeros(len(node.rows), dtype=np.int64)
        law, alive = node.law, np.arange(len(node.rows))
        sibling = 0
        while True:
            more = np.array([sibling < len(node.children[r]) for r in alive], dtype=bool)
            if not more.all():  # no child left: the residual decides
                done = alive[~more]
                final = law if not more.any() else law.take(np.flatnonzero(~more))
                drawn = final.draw(noise, node.rows[done], node.depth, Purpose.TARGET)
                last[done] = drawn.cpu().numpy()
                if not more.any():
                    return child, last
                law, alive = law.take(np.flatnonzero(more)), alive[more]
            kids = np.array([node.children[r][sibling] for r in alive])
            rows = node.rows[alive]
            drafted = torch.from_numpy(tokens[rows, kids])
            q = None
            if tree.proposal is not Proposal.OPAQUE:  # a point mass: `without` takes it away, too
                drawn_RS = np.array([node.children[r][: sibling + 1] for r in alive])
                q = drawn_from(tree, rows, drawn_RS, law.vocab_size)
            prob = law.prob(drafted)
            if q is not None:
                prob = prob / q.prob(drafted).to(prob)
            ok = noise.accept(prob, rows, node.depth, sibling)
            child[alive[ok]] = kids[ok]
            if ok.all():
                return child, last
            rest = np.flatnonzero(~ok)
            left = law if len(rest) == len(alive) else law.take(rest)
            if q is None:
                law = left.without(drafted[torch.from_numpy(rest)])
            else:
                law = left.residual(q if len(rest) == len(alive) else q.take(rest))
            alive = alive[rest]
            sibling += 1

    def precompute(self, law: Law, children: Callable[[], Children]) -> VerifierInputs:
        """Every child's p / q as if none before it had stayed."""
        below, scores = children(), []
        q = below.q
        for tokens_P, there_P in zip(below.tokens_PS.T, below.there_PS.T, strict=True):
            prob_P = law.prob(tokens_P)
            scores.append(prob_P if q is None else prob_P / q.prob(tokens_P).to(prob_P))
            left = law.without(tokens_P) if q is None else law.residual(q)
            law = left.where(there_P, law)
            if q is not None and below.distinct:
                q = q.without(tokens_P)
        return VerifierInputs(last=law, score_PS=torch.stack(scores, dim=1))


def drawn_from(tree: DraftTree, rows: np.ndarray, siblings_RS: np.ndarray, vocab_size: int) -> Law:
    """[R] the laws that the last of these siblings, in the order of their draws, was drawn from: of
    an opaque one, a point mass."""
    *earlier, last = siblings_RS.T
    if tree.proposal is Proposal.OPAQUE:
        return Law.point(tree.tokens_BN[rows, last], vocab_size)
    assert tree.q is not None and tree.q_rows_BN is not None
    q = tree.q.take(tree.q_rows_BN.numpy()[rows, last])
    if tree.proposal is Proposal.WITHOUT_REPLACEMENT:
        for nodes in earlier:
            q = q.without(tree.tokens_BN[rows, nodes])
    return q


def holding(tree: DraftTree, node: Node, wanted: np.ndarray) -> np.ndarray:
    """[R] the first child that holds the wanted token; -1: none does."""
    tokens = tree.tokens_BN.numpy()
    child = np.full(len(node.rows), ROOT, dtype=np.int64)
    for r, kids in enumerate(node.children):
        for kid in kids:
            if tokens[node.rows[r], kid] == wanted[r]:
                child[r] = kid
                break
    return child


def lossy_sentence(rule: str) -> str:
    """The sentence that every report of a lossy run carries."""
    return f"rule {rule} is lossy: the output law is not the target's"


def check_rule(rule: Rule, tree: DraftTree, *, allow_lossy: bool = False) -> None:
    """Refuse a rule that changes the law unasked, or that is not lossless for this proposal.

    Raises:
        LossyRule: the rule is lossy and `allow_lossy` is False.
        UnsupportedProposal: wrong kind of proposal, or a sampled one that brings no q.
    """
    if rule.lossy and not allow_lossy:
        raise LossyRule(
            f"Rule {rule.name!r} changes the output law; pass allow_lossy=True to use it."
        )
    if tree.proposal not in rule.proposals:
        raise UnsupportedProposal(
            f"Rule {rule.name!r} is not lossless for {tree.proposal.value} proposals."
        )
    sampled = tree.proposal is not Proposal.OPAQUE
    if rule.needs_q and sampled and (tree.q is None or tree.q_rows_BN is None):
        raise UnsupportedProposal(
            f"Rule {rule.name!r} needs the law these children were drawn from, but the tree says "
            f"{tree.proposal.value} and gives no q."
        )


def verify(
    tree: DraftTree, laws: LawSource, rule: Rule, noise: Noise, *, allow_lossy: bool = False
) -> Verdict:
    """Decide how far each row's draft stands. Pure: no state, and noise only from its keys.

    Args:
        tree: tokens and parents on the CPU.
        laws: the target's laws at the root and the nodes.
        rule: how to go on from a node.
        noise: of this step, behind the rows' roots.

    Returns:
        Verdict with the accepted path and one token of the target's own per row.

    Raises:
        LossyRule, UnsupportedProposal: see `check_rule`.
    """
    check_rule(rule, tree, allow_lossy=allow_lossy)
    return walked(tree, laws, rule, noise)


def walked(tree: DraftTree, laws: LawSource, rule: Rule, noise: Noise) -> Verdict:
    """As `verify`, for a rule and a tree that were checked."""
    paths, next_token = rule.walk(tree, laws, noise)
    return make_verdict(paths, next_token)


def make_verdict(paths: Sequence[Sequence[int]], next_token: ArrayLike) -> Verdict:
    """The verdict that these nodes are accepted, row by row, and these tokens follow them."""
    return Verdict(
        path_BD=torch.from_numpy(padded_rows(paths, PADDING)),
        num_accepted_B=torch.tensor([len(path) for path in paths], dtype=torch.long),
        next_token_B=torch.from_numpy(np.asarray(next_token, dtype=np.int64)),
    )


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may be accepted of one row's tree. Rows share it: it is not to be changed."""

    children: dict[int, list[int]]
    """Node (or -1, the root) -> its children, in proposal order."""
    height: dict[int, int]
    """Node with children -> how many levels of them lie below it."""

    def offered_depth(self, path: Sequence[int]) -> int:
        """Depth of the best path: what was accepted, and the deepest candidate below its end."""
        return len(path) + self.height.get(path[-1] if path else ROOT, 0)


def candidates(tree: DraftTree) -> list[Candidates]:
    """Return the candidates of each row. Shapes recur from step to step and row to row,
    so they are remembered."""
    if tree.num_nodes == 0:
        return [_row_candidates(b"")] * tree.num_rows
    parents_BN = tree.parents_BN.to(torch.int64)  # whose bytes are read again
    if tree.candidate_BN is not None:
        parents_BN = parents_BN.masked_fill(~tree.candidate_BN, PADDING)
    return [_row_candidates(row.tobytes()) for row in np.ascontiguousarray(parents_BN.numpy())]


@lru_cache(maxsize=512)
def _row_candidates(parents_bytes: bytes) -> Candidates:
    children: dict[int, list[int]] = {}
    parents = np.frombuffer(parents_bytes, dtype=np.int64).tolist()
    for node, parent in enumerate(parents):
        if parent != PADDING:
            children.setdefault(parent, []).append(node)
    height: dict[int, int] = {}
    for node, parent in reversed([*enumerate(parents)]):  # children stand behind their parents
        if parent != PADDING:
            height[parent] = max(height.get(parent, 0), 1 + height.get(node, 0))
    return Candidates(children, height)
