"""The walk down a tree: which path stands, which token follows, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch

from draftsmith.core.law import Law, Noise, Purpose, Rows
from draftsmith.core.sampling import History, Sampler
from draftsmith.core.types import DraftTree, Proposal, Verdict
from draftsmith.core.verify import (
    Descent,
    Match,
    Node,
    Rejection,
    TreeLaws,
    candidates,
    verify,
)
from draftsmith.core.verify_step import make_rule, verify_rows, verify_step
from draftsmith.errors import InputError, LossyRule, UnsupportedProposal

V = 6


class Scripted(Noise):
    """Uniform numbers by (depth, purpose, lane); what is not listed must not be asked for, but for
    the token behind the first (its law is a point mass here)."""

    def __init__(self, numbers: dict[tuple[int, Purpose, int], float], rows: int = 1) -> None:
        super().__init__(0, range(rows), [4] * rows)
        self.numbers = {(1, Purpose.TARGET, 0): 0.5, **numbers}
        self.asked: list[tuple[int, Purpose, int]] = []

    def uniform(self, rows: Rows, depth: int, purpose: Purpose, lane: int | Rows = 0) -> np.ndarray:
        assert isinstance(lane, int)
        self.asked.append((depth, purpose, lane))
        return np.full(len(rows), self.numbers[depth, purpose, lane])


class Fixed:
    """A law per node of one row; counts how many were looked at."""

    def __init__(self, laws: dict[int, Sequence[float]]) -> None:
        self.laws, self.looked_at = laws, 0

    def at(self, rows: np.ndarray, nodes: np.ndarray) -> Law:
        self.looked_at += len(rows)
        return Law(torch.tensor([self.laws[int(n)] for n in nodes], dtype=torch.float64), V)


def one_row(
    tokens: Sequence[int],
    parents: Sequence[int],
    proposal: Proposal = Proposal.OPAQUE,
    q: Law | None = None,
    q_rows: Sequence[int] | None = None,
    candidate: Sequence[bool] | None = None,
) -> DraftTree:
    return DraftTree(
        tokens_BN=torch.tensor([list(tokens)]),
        parents_BN=torch.tensor([list(parents)]),
        proposal=proposal,
        q=q,
        q_rows_BN=None if q_rows is None else torch.tensor([list(q_rows)]),
        candidate_BN=None if candidate is None else torch.tensor([list(candidate)]),
    )


def told(verdict: Verdict) -> tuple[list[int], int]:
    count = int(verdict.num_accepted_B[0])
    return verdict.path_BD[0, :count].tolist(), int(verdict.next_token_B[0])


def point(token: int) -> list[float]:
    return [float(t == token) for t in range(V)]


ACCEPT, TARGET = Purpose.ACCEPT, Purpose.TARGET
DRAWING = ([3, 1, 2], [-1, -1, 0])
"""root --p0--> n0 --p1--> n2         n0 holds 3, n1 holds 1, n2 holds 2
        `-> n1
"""


# ---------------------------------------------------------------------- greedy


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=lambda rule: rule.name)
def test_the_modules_drawing(rule: Match | Rejection) -> None:
    laws = Fixed({-1: point(3), 0: point(2), 2: point(5)})
    noise = Noise(0, [0], [4])
    assert told(verify(one_row(*DRAWING), laws, rule, noise)) == ([0, 2], 5)
    assert laws.looked_at == 3


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=lambda rule: rule.name)
def test_a_wrong_draft_is_corrected_where_it_goes_wrong(rule: Match | Rejection) -> None:
    noise = Noise(0, [0], [4])
    laws = Fixed({-1: point(3), 0: point(4)})
    assert told(verify(one_row(*DRAWING), laws, rule, noise)) == ([0], 4)
    assert told(verify(one_row(*DRAWING), Fixed({-1: point(0)}), rule, noise)) == ([], 0)
    second = Fixed({-1: point(1), 1: point(2)})
    assert told(verify(one_row(*DRAWING), second, rule, noise)) == ([1], 2)


def test_at_temperature_0_too_sampled_children_need_their_law() -> None:
    tree = one_row(*DRAWING, Proposal.SAMPLED)
    with pytest.raises(UnsupportedProposal, match="needs the law"):
        verify_step(
            tree, torch.zeros(1, 4, V), Sampler(), [], Rejection(), Noise(0, [0], [4]), widest=2
        )


def test_an_empty_tree_gives_one_token_of_the_targets() -> None:
    verdict = verify(DraftTree.empty(1), Fixed({-1: point(2)}), Match(), Noise(0, [0], [4]))
    assert told(verdict) == ([], 2)
    assert verdict.path_BD.shape == (1, 0)


def test_probes_are_never_accepted() -> None:
    tree = one_row([3, 3], [-1, -1], candidate=[False, True])
    laws = Fixed({-1: point(3), 1: point(0)})
    assert told(verify(tree, laws, Match(), Noise(0, [0], [4]))) == ([1], 0)
    probe_only = one_row([3, 2], [-1, 0], candidate=[False, True])
    assert told(verify(probe_only, laws, Match(), Noise(0, [0], [4]))) == ([], 3)


def test_padding_is_never_accepted() -> None:
    tree = one_row([3, 3], [-2, -1])
    laws = Fixed({-1: point(3), 1: point(0)})
    assert told(verify(tree, laws, Rejection(), Noise(0, [0], [4]))) == ([1], 0)


def test_rows_walk_on_their_own() -> None:
    """Three rows of different depth; the verdict is padded on the right."""

    class PerRow:
        def at(self, rows: np.ndarray, nodes: np.ndarray) -> Law:
            wanted = {0: {-1: 3, 0: 2, 1: 5}, 1: {-1: 0}, 2: {-1: 3, 0: 4}}
            tokens = [wanted[int(b)][int(n)] for b, n in zip(rows, nodes, strict=True)]
            return Law.point(torch.tensor(tokens), V)

    tree = DraftTree(
        tokens_BN=torch.tensor([[3, 2]] * 3),
        parents_BN=torch.tensor([[-1, 0]] * 3),
        proposal=Proposal.OPAQUE,
    )
    verdict = verify(tree, PerRow(), Match(), Noise(0, [0, 1, 2], [4, 4, 4]))
    assert verdict.num_accepted_B.tolist() == [2, 0, 1]
    assert verdict.path_BD.tolist() == [[0, 1], [-2, -2], [0, -2]]
    assert verdict.next_token_B.tolist() == [5, 0, 4]


# ---------------------------------------------------------------------- sampled, by hand

P = [0.5, 0.3, 0.2, 0.0, 0.0, 0.0]
Q = [0.2, 0.2, 0.6, 0.0, 0.0, 0.0]


def sampled(tokens: Sequence[int], proposal: Proposal = Proposal.SAMPLED) -> DraftTree:
    """Children of the root, all drawn from Q."""
    q = Law(torch.tensor([Q], dtype=torch.float64), V)
    return one_row(tokens, [-1] * len(tokens), proposal, q, [0] * len(tokens))


def test_a_draft_is_accepted_below_p_over_q() -> None:
    """Token 2: p/q = 1/3. Token 0: p > q, always."""
    laws = Fixed({-1: P, 0: point(5)})
    yes = Scripted({(0, ACCEPT, 0): 0.333})
    assert told(verify(sampled([2]), laws, Rejection(), yes)) == ([0], 5)
    no = Scripted({(0, ACCEPT, 0): 0.334, (0, TARGET, 0): 0.74})
    # residual: max(p - q, 0) = .3 .1 0 -> .75 .25
    assert told(verify(sampled([2]), laws, Rejection(), no)) == ([], 0)
    no = Scripted({(0, ACCEPT, 0): 0.334, (0, TARGET, 0): 0.76})
    assert told(verify(sampled([2]), laws, Rejection(), no)) == ([], 1)
    sure = Scripted({(0, ACCEPT, 0): 0.9999})
    assert told(verify(sampled([0]), laws, Rejection(), sure)) == ([0], 5)


def test_the_second_sibling_is_judged_by_the_residual() -> None:
    """After token 2 was rejected p' = .75 .25 0; a sibling 1 with q = .2 is taken for sure, another
    2 never, and then p'' = norm(max(p' - q, 0)) = .55 .05 -> .917 .083."""
    laws = Fixed({-1: P, 1: point(5)})
    numbers = {(0, ACCEPT, 0): 0.5, (0, ACCEPT, 1): 0.999}
    assert told(verify(sampled([2, 1]), laws, Rejection(), Scripted(numbers))) == ([1], 5)
    for u, token in ((0.91, 0), (0.92, 1)):
        noise = Scripted({(0, ACCEPT, 0): 0.5, (0, ACCEPT, 1): 0.0, (0, TARGET, 0): u})
        assert told(verify(sampled([2, 2]), laws, Rejection(), noise)) == ([], token)


def test_siblings_without_replacement_are_judged_by_their_conditional_q() -> None:
    """After token 2, q' = .5 .5 0: a sibling 1 has p'/q' = .25/.5."""
    laws, kind = Fixed({-1: P, 1: point(5)}), Proposal.WITHOUT_REPLACEMENT
    yes = Scripted({(0, ACCEPT, 0): 0.5, (0, ACCEPT, 1): 0.49})
    assert told(verify(sampled([2, 1], kind), laws, Rejection(), yes)) == ([1], 5)
    # rejected: max(p' - q', 0) = .25 0 -> token 0 for sure
    no = Scripted({(0, ACCEPT, 0): 0.5, (0, ACCEPT, 1): 0.51, (0, TARGET, 0): 0.99})
    assert told(verify(sampled([2, 1], kind), laws, Rejection(), no)) == ([], 0)


def test_opaque_children_are_accepted_with_p_and_then_excluded() -> None:
    """Token 0 with .5, then token 1 with .3/.5, then the rest: token 2."""
    laws = Fixed({-1: P, 0: point(5), 1: point(4)})
    tree = one_row([0, 1], [-1, -1])
    first = Scripted({(0, ACCEPT, 0): 0.49})
    assert told(verify(tree, laws, Rejection(), first)) == ([0], 5)
    second = Scripted({(0, ACCEPT, 0): 0.51, (0, ACCEPT, 1): 0.59})
    assert told(verify(tree, laws, Rejection(), second)) == ([1], 4)
    neither = Scripted({(0, ACCEPT, 0): 0.51, (0, ACCEPT, 1): 0.61, (0, TARGET, 0): 0.5})
    assert told(verify(tree, laws, Rejection(), neither)) == ([], 2)


def test_a_draft_that_the_target_never_says_is_rejected() -> None:
    """Also at u = 0, and when q says that it had no mass either (0/0)."""
    laws = Fixed({-1: P})
    noise = Scripted({(0, ACCEPT, 0): 0.0, (0, TARGET, 0): 0.1})
    assert told(verify(one_row([4], [-1]), laws, Rejection(), noise)) == ([], 0)
    assert told(verify(sampled([4]), laws, Rejection(), noise)) == ([], 0)


def test_match_draws_once_per_depth_and_never_accepts_by_chance() -> None:
    laws = Fixed({-1: P, 0: P})
    noise = Scripted({(0, TARGET, 0): 0.6, (1, TARGET, 0): 0.1})
    assert told(verify(one_row([1, 2], [-1, -1]), laws, Match(), noise)) == ([0], 0)
    assert noise.asked == [(0, TARGET, 0), (1, TARGET, 0)]


# ---------------------------------------------------------------------- laws of nodes


def test_each_node_has_the_history_of_its_own_path() -> None:
    """root -+- 0 --- 2      a penalty on what was said: node 2 has seen 3 and 2, node 1 only 1."""
    logits = torch.zeros((1, 4, V), dtype=torch.float64)
    laws = TreeLaws(
        logits_BNV=logits,
        sampler=Sampler(temperature=1.0, presence_penalty=50.0),
        histories=[History(tokens=[0, 4], num_prompt=1)],
        tokens_BN=np.array([[3, 1, 2]]),
        parents_BN=np.array([[-1, -1, 0]]),
    )
    said = {-1: {4}, 0: {4, 3}, 1: {4, 1}, 2: {4, 3, 2}}
    for node, tokens in said.items():
        probs = laws.at(np.array([0]), np.array([node])).probs()[0]
        assert {t for t in range(V) if probs[t] < 1e-9} == tokens


def test_laws_of_several_rows_and_nodes_are_picked_together() -> None:
    logits = torch.randn((2, 3, V), generator=torch.Generator().manual_seed(0))
    laws = TreeLaws(
        logits_BNV=logits,
        sampler=Sampler(temperature=1.0),
        histories=[],
        tokens_BN=np.zeros((2, 2), dtype=np.int64),
        parents_BN=np.full((2, 2), -1),
    )
    found = laws.at(np.array([1, 0]), np.array([-1, 1])).probs()
    torch.testing.assert_close(found, torch.stack([logits[1, 0], logits[0, 2]]).softmax(-1))


# ---------------------------------------------------------------------- refusals and counts


def test_auto_uses_q_where_there_is_one() -> None:
    assert isinstance(make_rule("auto", Proposal.OPAQUE), Match)
    assert isinstance(make_rule("auto", Proposal.SAMPLED), Rejection)
    assert isinstance(make_rule("auto", Proposal.WITHOUT_REPLACEMENT), Rejection)
    assert isinstance(make_rule("match", Proposal.SAMPLED), Match)


DEEP = Sampler(temperature=1.0)
ORDERED: dict[str, tuple[Proposal, list[int], list[int], Sampler, int, int, str]] = {
    "a drawn chain": (Proposal.SAMPLED, [-1, 0, 1], [0, 1, 2], DEEP, 1, 3, "block"),
    "where draws are short": (Proposal.SAMPLED, [-1, 0, 1], [0, 1, 2], DEEP, 1, 2, "rejection"),
    "one that excludes siblings": (
        *(Proposal.WITHOUT_REPLACEMENT, [-1, 0, 1], [0, 1, 2]),
        *(DEEP, 1, 3, "block"),
    ),
    "a drawn tree": (Proposal.SAMPLED, [-1, 0, 0], [0, 1, 1], DEEP, 2, 3, "rejection"),
    "the chain of a row beside trees": (
        *(Proposal.SAMPLED, [-1, 0, 1], [0, 1, 2]),
        *(DEEP, 2, 3, "rejection"),
    ),
    "cut laws": (
        *(Proposal.SAMPLED, [-1, 0, 1], [0, 1, 2]),
        *(Sampler(temperature=1.0, top_k=5), 1, 3, "rejection"),
    ),
    "top tokens": (Proposal.OPAQUE, [-1, 0, 1], [0, 1, 2], DEEP, 1, 3, "match"),
}


@pytest.mark.parametrize("case", ORDERED)
def test_auto_takes_block_where_a_chain_was_drawn(case: str) -> None:
    """Over many seeds, and not by accident: the other rules say otherwise for some of them."""
    proposal, parents, q_rows, sampler, widest, longest, expected = ORDERED[case]
    draw = torch.Generator().manual_seed(1)
    logits_BNV = torch.randn((1, 4, V), generator=draw)
    q = Law(torch.randn((3, V), generator=draw).softmax(-1), V)

    def decided(rule: str, seed: int) -> tuple[list[int], int]:
        tokens = torch.multinomial(q.probs_RK[q_rows], 1, generator=draw.manual_seed(seed))
        tree = one_row(tokens[:, 0].tolist(), parents, proposal, q, q_rows)
        noise = Noise(seed, [0], [4])
        _, verdict = verify_rows(
            tree, logits_BNV, sampler, [], rule, noise, widest=widest, longest_draw=longest
        )
        return told(verdict)

    seeds = range(300)
    found = {
        rule: [decided(rule, seed) for seed in seeds]
        for rule in ("auto", "match", "rejection", "block")
        if rule != "block" or parents == [-1, 0, 1]
    }
    auto = found.pop("auto")
    # of opaque chains rejection and block accept the same
    assert [rule for rule, own in found.items() if own == auto] == [expected]


def test_an_unknown_rule_is_refused_and_the_nearest_named() -> None:
    with pytest.raises(InputError, match="rejection"):
        make_rule("rejecton", Proposal.SAMPLED)


@pytest.mark.parametrize("kind", [Proposal.SAMPLED, Proposal.WITHOUT_REPLACEMENT])
def test_rejection_refuses_sampled_children_without_their_law(kind: Proposal) -> None:
    tree = one_row([1], [-1], kind)
    with pytest.raises(UnsupportedProposal, match="needs the law"):
        verify(tree, Fixed({-1: P}), Rejection(), Noise(0, [0], [4]))


class Coin(Descent):
    """A rule that changes the law, and is made for opaque proposals."""

    name: ClassVar[str] = "coin"
    lossy: ClassVar[bool] = True
    needs_q: ClassVar[bool] = False
    proposals: ClassVar[frozenset[Proposal]] = frozenset({Proposal.OPAQUE})

    def step(self, tree: DraftTree, node: Node, noise: Noise) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(node.rows), -1), np.zeros(len(node.rows), dtype=np.int64)


def test_a_lossy_rule_needs_leave() -> None:
    tree, laws, noise = one_row([1], [-1]), Fixed({-1: P}), Noise(0, [0], [4])
    with pytest.raises(LossyRule, match="allow_lossy"):
        verify(tree, laws, Coin(), noise)
    assert told(verify(tree, laws, Coin(), noise, allow_lossy=True)) == ([], 0)


def test_a_rule_refuses_proposals_that_it_is_not_made_for() -> None:
    with pytest.raises(UnsupportedProposal, match="sampled"):
        verify(sampled([1]), Fixed({-1: P}), Coin(), Noise(0, [0], [4]), allow_lossy=True)


def test_children_are_listed_in_proposal_order() -> None:
    tree = one_row([1, 2, 3, 4, 5], [-1, -2, -1, 0, -1], candidate=[True, True, True, True, False])
    assert [row.children for row in candidates(tree)] == [{-1: [0, 2], 0: [3]}]


def test_offered_depth_is_that_of_the_best_path() -> None:
    """root -+- 0 --- 1 --- 2       accepted 0: two more stood below; accepted 3: nothing did."""
    (row,) = candidates(one_row([1, 2, 3, 4], [-1, 0, 1, -1]))
    assert row.offered_depth([]) == 3
    assert row.offered_depth([0]) == 3
    assert row.offered_depth([3]) == 1
    assert candidates(DraftTree.empty(1))[0].offered_depth([]) == 0


def test_parents_of_any_whole_type_give_the_same_candidates() -> None:
    tree = one_row([1, 2, 3, 4], [-1, 0, 1, 2])
    narrow = dataclasses.replace(tree, parents_BN=tree.parents_BN.to(torch.int32))
    assert candidates(narrow) == candidates(tree)
