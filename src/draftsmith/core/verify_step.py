"""One step's verdict, by the rule's name, wherever the laws are.

On a CPU a rule makes the laws of the nodes that it visits, which are few. On a device every read of
a number makes the host wait until all work is done; so what the rule *can* read is computed for all
nodes, and reaches the host together with the tree, in one transfer:

    device   logits -> laws of root and nodes -> what each would draw, and its children's scores
    host     one transfer; then the very walk that a CPU does, which only looks up

Penalties want each node's history, hence the tokens of the tree on the host: with them the tree
comes first, and the walk makes laws as on a CPU. So it is with a rule that can compute nothing
before it walks (`block`, `traversal`).

Shape letters: P places (root and nodes of all rows, row by row), S siblings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.core.block_rule import Block
from draftsmith.core.law import Law, Noise, Purpose
from draftsmith.core.sampling import History, Sampler, require_finite
from draftsmith.core.short_walks import DrawsFromLogits, short_walk
from draftsmith.core.transfer import to_device
from draftsmith.core.traversal_rule import Traversal
from draftsmith.core.trees import alike, as_opaque, depths, geometry, on_host
from draftsmith.core.types import PADDING, DraftTree, Proposal, Verdict
from draftsmith.core.verify import (
    Children,
    Match,
    NodeLaw,
    Rejection,
    Rule,
    TreeLaws,
    VerifierInputs,
    candidates,
    check_rule,
    verify,
    walked,
)
from draftsmith.errors import InputError, nearest
from draftsmith.plugins import RULES, load_plugin, plugin_names, wrong_plugin

CELLS = 1 << 27
"""Numbers of laws that are made at once."""


def _typical() -> Rule:
    """Load the lossy rules only when one is named."""
    from draftsmith.core.lossy_rules import Typical

    return Typical()


_BUILT_IN: dict[str, Callable[[], Rule]] = {
    "match": Match,
    "rejection": Rejection,
    "block": Block,
    "traversal": Traversal,
    "typical": _typical,
}


def make_rule(rule: str | Rule, proposal: Proposal) -> Rule:
    """A rule by its name; `auto` is rejection where q is known, else match (see `_rule_for` for
    drawn chains).

    Raises:
        InputError: there is no such rule; the nearest known one is named.
        BackendError: a package offers the rule, and it cannot be imported.
    """
    if not isinstance(rule, str):
        return rule
    if rule == "auto":
        return Match() if proposal is Proposal.OPAQUE else Rejection()
    return _rule_class(rule)()


SHORTEST_JUDGED = 3
"""`auto` takes `block` for drawn chains that may have so many tokens. Of two it accepts 1 % more
tokens per step, and on a CPU that takes 3 % of a step of a model of 135 M parameters in 4 bits."""


def _rule_for(
    rule: str | Rule,
    tree: DraftTree,
    sampler: Sampler,
    widest: int,
    longest_draw: int,
    device: torch.device,
) -> Rule:
    """As `make_rule`, for drafts where no node has more children than `widest`, and no chain of
    draws more tokens than `longest_draw`.

    `auto` takes `block` for drawn chains, of which it never accepts fewer than rejection does:
    where laws are softmax(logits / T) on the host. Others (top-k, top-p, penalties) take longer to
    make than the gain is worth, as it reads those of all nodes, and a device would be waited for at
    every node. It asks what may be drafted, not what this step drafted: no row is judged by another
    rule because of its neighbours. Trees are left to rejection, too: `traversal` may accept fewer.
    """
    drawn_chains = tree.proposal is not Proposal.OPAQUE and widest <= 1
    pays = longest_draw >= SHORTEST_JUDGED and sampler.reads_logits_alone and device.type == "cpu"
    if rule == "auto" and drawn_chains and pays:
        return Block()
    return make_rule(rule, tree.proposal)


@cache
def _rule_class(rule: str) -> Callable[[], Rule]:
    found: Callable[[], Rule] | None = load_plugin(RULES, rule, ("auto", *_BUILT_IN))
    if found is None and rule in _BUILT_IN:
        return _BUILT_IN[rule]
    if found is None:
        known = [*_BUILT_IN, *plugin_names(RULES), "auto"]
        raise InputError(f"Unknown rule {rule!r}{nearest(rule, known)}.")
    parts = ("lossy", "needs_q", "proposals", "walk", "precompute")
    if not all(hasattr(found, part) for part in parts):
        raise wrong_plugin(RULES, rule, "a class of draftsmith.core.verify.Rule")
    return found


def verify_rows(
    tree: DraftTree,
    logits_BNV: Tensor,
    sampler: Sampler,
    histories: Sequence[History],
    rule: str | Rule,
    noise: Noise,
    *,
    widest: int,
    longest_draw: int,
    allow_lossy: bool = False,
    draws: DrawsFromLogits | None = None,
) -> tuple[DraftTree, Verdict]:
    """As `verify_step`, by the rule of this name. Where rows are of two kinds, each is judged as if
    it had no neighbours of the other one.

    Args:
        widest: no node has more children in any draft of this shape.
        longest_draw: no chain of draws has more tokens there.
    """

    judge = partial(
        verify_step, sampler=sampler, widest=widest, allow_lossy=allow_lossy, draws=draws
    )
    if tree.opaque_B is None:
        own = _rule_for(rule, tree, sampler, widest, longest_draw, logits_BNV.device)
        return judge(tree, logits_BNV, histories=histories, rule=own, noise=noise)
    tree, _ = on_host(tree)
    verdicts = [
        judge(
            run,
            logits_BNV[some],
            histories=histories[some],
            rule=_rule_for(rule, run, sampler, widest, longest_draw, logits_BNV.device),
            noise=noise.take(range(some.start, some.stop)),
        )[1]
        for some, run in alike(tree)
    ]
    deepest = max(one.path_BD.shape[1] for one in verdicts)
    paths = [F.pad(v.path_BD, (0, deepest - v.path_BD.shape[1]), value=PADDING) for v in verdicts]
    return tree, Verdict(
        path_BD=torch.cat(paths),
        num_accepted_B=torch.cat([one.num_accepted_B for one in verdicts]),
        next_token_B=torch.cat([one.next_token_B for one in verdicts]),
    )


def verify_step(
    tree: DraftTree,
    logits_BNV: Tensor,
    sampler: Sampler,
    histories: Sequence[History],
    rule: Rule,
    noise: Noise,
    *,
    widest: int,
    allow_lossy: bool = False,
    draws: DrawsFromLogits | None = None,
) -> tuple[DraftTree, Verdict]:
    """The verdict, and the tree with its numbers on the host.

    Args:
        logits_BNV: [B, 1 + N, V]; column 0 is the root.
        histories: known tokens per row, up to and including the root.
        widest: no node has more children, if only the device knows the tree.
        draws: of the engine that computed the logits, see `short_walk`.

    Raises:
        LossyRule, UnsupportedProposal: see `check_rule`.
        BackendError: logits that the walk came by are NaN.
    """
    here = logits_BNV.device.type == "cpu"
    if here or sampler.needs_history or rule.precompute is None:
        tree, _ = on_host(tree)
        if here:
            check_rule(rule, tree, allow_lossy=allow_lossy)
            verdict = short_walk(tree, logits_BNV, sampler, rule, noise, draws)
            if verdict is not None:
                return tree, verdict
        laws = TreeLaws(
            logits_BNV=logits_BNV,
            sampler=sampler,
            histories=histories,
            tokens_BN=tree.tokens_BN.numpy(),
            parents_BN=tree.parents_BN.numpy(),
        )
        return tree, verify(tree, laws, rule, noise, allow_lossy=allow_lossy)
    check_rule(rule, tree, allow_lossy=allow_lossy)
    tree, precomputed = _precompute(tree, logits_BNV, sampler, rule, noise, widest)
    # the scores of children contain q already, so the rule sees opaque children
    return tree, walked(as_opaque(tree), precomputed, rule, noise)


# --------------------------------------------------------------------------- on the device


def _precompute(
    tree: DraftTree, logits_BNV: Tensor, sampler: Sampler, rule: Rule, noise: Noise, widest: int
) -> tuple[DraftTree, _PrecomputedLaws]:
    device, places = logits_BNV.device, logits_BNV.shape[:2]
    logits_PV, u_P = logits_BNV.flatten(0, 1), _uniform(tree, noise, device).flatten()

    precompute, table = rule.precompute, cache(partial(_children, tree, widest, device))
    assert precompute is not None
    found: list[VerifierInputs] = []
    drawn: list[Tensor] = []
    top: list[Tensor] = []
    size = max(1, CELLS // logits_PV.shape[1])
    for start in range(0, len(logits_PV), size):
        some = slice(start, start + size)
        law = sampler.law(logits_PV[some], check=top.append)
        found.append(precompute(law, partial(_below, tree, table, some)))
        drawn.append(found[-1].last.draw_with(u_P[some]))
    numbers = {
        "drawn_BP": torch.cat(drawn).view(places),
        "top_BP": torch.cat(top).view(places),
    }
    scores = [part.score_PS for part in found if part.score_PS is not None]
    if scores:
        numbers["score_BPS"] = torch.cat(scores).view(*places, -1)
    entropy = [part.entropy_P for part in found if part.entropy_P is not None]
    if entropy:
        numbers["entropy_BP"] = torch.cat(entropy).view(places)
    drafted = [] if tree.q is None else [tree.q.probs_RK.sum(-1)]
    tree, came = on_host(tree, *numbers.values(), *drafted)
    if drafted:
        require_finite(torch.from_numpy(came.pop()))
    return tree, _PrecomputedLaws(
        tokens=tree.tokens_BN.tolist(),
        children=[row.children for row in candidates(tree)],
        **dict(zip(numbers, came, strict=True)),
    )


def _uniform(tree: DraftTree, noise: Noise, device: torch.device) -> Tensor:
    """[B, 1 + N]: what the last token is drawn with, should the walk end there."""
    rows, count = tree.num_rows, tree.num_nodes + 1
    depth = np.tile(np.arange(count), rows)
    u = noise.uniform(np.repeat(np.arange(rows), count), depth, Purpose.TARGET)
    if tree.parents_BN.device.type == "cpu":
        depth_BN = to_device(depths(tree.parents_BN.numpy()).copy(), device)
    else:
        depth_BN, _ = geometry(tree.parents_BN)
    return to_device(u.reshape(rows, count), device).gather(1, F.pad(depth_BN, (1, 0)))


def _children(tree: DraftTree, widest: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """([P, S] nodes below each place in proposal order, N where there are no more; [P] row)."""
    rows, count = tree.num_rows, tree.num_nodes
    if tree.parents_BN.device.type == "cpu":
        counts = [len(kids) for row in candidates(tree) for kids in row.children.values()]
        widest = max(counts, default=1)
    parents_BN = to_device(tree.parents_BN, device)
    if tree.candidate_BN is not None:
        parents_BN = parents_BN.masked_fill(~to_device(tree.candidate_BN, device), PADDING)
    nodes_N = torch.arange(count, device=device)
    siblings_BNN = parents_BN[:, :, None] == parents_BN[:, None, :]
    rank_BN = (siblings_BNN & (nodes_N[:, None] > nodes_N)).sum(-1)
    # padding goes to a cell of its own behind the others
    spare = (1 + count) * widest
    cell_BN = ((parents_BN + 1) * widest + rank_BN).masked_fill(parents_BN == PADDING, spare)
    table = torch.full((rows, spare + 1), count, device=device)
    table.scatter_(1, cell_BN, nodes_N.expand(rows, -1))
    row_BP = torch.arange(rows, device=device)[:, None].expand(-1, 1 + count)
    return table[:, :spare].reshape(-1, widest), row_BP.flatten()


def _below(tree: DraftTree, table: Callable[[], tuple[Tensor, Tensor]], some: slice) -> Children:
    kids_PS, row_P = (one[some] for one in table())
    device = kids_PS.device
    tokens_BN = F.pad(to_device(tree.tokens_BN, device), (0, 1))
    q = None
    if tree.proposal is not Proposal.OPAQUE:
        assert tree.q is not None and tree.q_rows_BN is not None
        q_rows_BN = F.pad(to_device(tree.q_rows_BN, device), (0, 1))
        q = tree.q.take(q_rows_BN[row_P, kids_PS[:, 0]])  # siblings share one
    return Children(
        tokens_PS=tokens_BN[row_P[:, None], kids_PS],
        there_PS=kids_PS < tree.num_nodes,
        q=q,
        distinct=tree.proposal is Proposal.WITHOUT_REPLACEMENT,
    )


# --------------------------------------------------------------------------- on the host


@dataclass(frozen=True, kw_only=True, slots=True)
class _PrecomputedLaws:
    """Answers for all nodes (a `LawSource`)."""

    tokens: list[list[int]]
    children: list[dict[int, list[int]]]
    drawn_BP: np.ndarray
    top_BP: np.ndarray
    score_BPS: np.ndarray | None = None
    entropy_BP: np.ndarray | None = None

    def at(self, rows: np.ndarray, nodes: np.ndarray) -> NodeLaw:
        require_finite(torch.from_numpy(self.top_BP[rows, nodes + 1]))
        return _PrecomputedNodeLaw(self, rows, nodes)


@dataclass(frozen=True, slots=True)
class _PrecomputedNodeLaw:
    """The laws of R nodes after `passed` of their children were rejected (a `NodeLaw`)."""

    laws: _PrecomputedLaws
    rows: np.ndarray
    nodes: np.ndarray
    passed: int = 0

    def score(self, tokens_R: Tensor) -> Tensor:
        """What the rule computed of each token: it reads probabilities or gaps, never both."""
        laws = self.laws
        assert laws.score_BPS is not None
        out = []
        for b, node, token in zip(self.rows, self.nodes, tokens_R.tolist(), strict=True):
            kids = laws.children[b][int(node)]
            place = next(
                s for s in range(self.passed, len(kids)) if laws.tokens[b][kids[s]] == token
            )
            out.append(laws.score_BPS[b, node + 1, place])
        return torch.tensor(out, dtype=torch.float64)

    prob = gap = score

    def entropy(self) -> Tensor:
        assert self.laws.entropy_BP is not None
        return torch.from_numpy(self.laws.entropy_BP[self.rows, self.nodes + 1])

    def mode(self) -> NodeLaw:
        return self  # a rule that asks for it draws from nothing else

    def draw(self, noise: Noise, rows: np.ndarray, depth: int, purpose: Purpose) -> Tensor:
        return torch.from_numpy(self.laws.drawn_BP[self.rows, self.nodes + 1])

    def take(self, rows: np.ndarray) -> NodeLaw:
        return dataclasses.replace(self, rows=self.rows[rows], nodes=self.nodes[rows])

    def without(self, tokens_R: Tensor) -> NodeLaw:
        return dataclasses.replace(self, passed=self.passed + 1)

    def residual(self, q: Law) -> NodeLaw:
        raise AssertionError("q is in the numbers already")

    def excess(self, q: Law, share_R: Tensor) -> tuple[NodeLaw, Tensor]:
        raise AssertionError("no rule that was precomputed asks for it")

    @property
    def vocab_size(self) -> int:
        raise AssertionError("no rule that was precomputed asks for it")
