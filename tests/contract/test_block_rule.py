"""Block verification: its law by enumeration, how much it accepts, and what it must not be."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from block_rule import accepted as counted
from draftsmith.core import block_rule
from draftsmith.core.block_rule import Block
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.law import Law, Noise
from draftsmith.core.types import PADDING, DraftTree, Proposal, TreeShape
from draftsmith.core.verify import Rejection, verify
from draftsmith.errors import UnsupportedProposal

from . import mutants
from .cases import CASES, CHAIN, TREE, Case
from .checking import check, models
from .judging import V, alike, drafted_tree, expected_accepted, random_laws
from .reference_drafters import Greedy, Sampled
from .toys import PROMPTS, SETTINGS, sparse

LONG = TreeShape.chain(3)
CHAINS = [
    *(
        case
        for case in CASES
        if case.shape.is_chain and case.drafts and not case.tabular_only
        if case.kind != "lookahead"  # whose candidates branch
    ),
    Case(kind="reference", label="sampled", build=Sampled, shape=CHAIN, draws=True),
    Case(kind="reference", label="greedy", build=Greedy, shape=CHAIN),
]


def options(setting: str, tokens: int = 3) -> DecodeOptions:
    return DecodeOptions(sampler=SETTINGS[setting], max_new_tokens=tokens, rule="block")


@pytest.mark.every(4)
@pytest.mark.parametrize("setting", ["greedy", "cool", "top_k", "counts"])
@pytest.mark.parametrize("case", CHAINS, ids=str)
def test_emitted_law_is_the_targets_law(case: Case, setting: str) -> None:
    target, draft_model = models(case)
    found = check(case, target, draft_model, options(setting))
    if setting == "cool":
        assert 0 < found.accepted < found.offered


LONG_CHAIN = Case(kind="reference", label="sampled", build=Sampled, shape=LONG, draws=True)


@pytest.mark.parametrize(("keep", "tokens"), [(2, 4), (3, 3)])
def test_emitted_law_of_longer_chains(keep: int, tokens: int) -> None:
    """The first of three drafts may be refused and the others accepted; rows near their end draft
    less than their neighbours."""
    for setting in ("cool", "plain"):
        found = check(LONG_CHAIN, *alike(keep), options(setting, tokens), PROMPTS)
        assert 0 < found.accepted < found.offered


def test_emitted_law_with_an_end_token() -> None:
    target = sparse(3, 0, end_ids=frozenset({5}))
    check(LONG_CHAIN, target, sparse(3, 1), options("plain"), PROMPTS)


WRONG: dict[str, tuple[Any, str, str, str]] = {
    "the residual of a token alone": (
        *(block_rule, "rest_of"),
        *("p.excess(q, share_R)", "p.excess(q, share_R * 0 + 1)"),
    ),
    "an end at the first refusal": (
        *(Block, "walk", "accepted_B[rows[stays]] = depth"),
        "accepted_B[rows[stays & (accepted_B[rows] == depth - 1)]] = depth",
    ),
    "noise that the next step sees again": (Block, "walk", "lane=depth - 1", "lane=0"),
    "what is left is not weighed": (block_rule, "rest_of", "mass_R / left_R", "share_R"),
    "a share above one": (
        *(block_rule, "share_of_draft"),
        *("(share_R * ratio_R).clamp(max=1.0)", "(share_R * ratio_R)"),
    ),
    "the last token's own chance": (
        *(Block, "walk", "judge(depth, rows[end], share_R[end]"),
        "judge(depth, rows[end], share_R[end] * 0.9",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rules_are_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.break_source(monkeypatch, *WRONG[wrong])
    with pytest.raises(AssertionError, match="does not emit the target's law"):
        check(LONG_CHAIN, *alike(2), options("cool", 4), PROMPTS)


# --------------------------------------------------------------------------- what is accepted


def by_formula(p: Any, q: Any, length: int, *, block: bool) -> float:
    """Sum over i of E[r_i]; token by token, of E[prod min(1, p / q)]."""
    total = 0.0
    for depth in range(1, length + 1):
        for chain in itertools.product(range(V), repeat=depth):
            drafted, share = 1.0, 1.0
            for i, token in enumerate(chain):
                p_x, q_x = p[chain[:i]][token].item(), q[chain[:i]][token].item()
                drafted *= q_x
                share = min(1.0, share * p_x / q_x) if block else share * min(1.0, p_x / q_x)
            total += drafted * share
    return total


@pytest.mark.parametrize("sharp", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_never_fewer_are_accepted_than_token_by_token(seed: int, sharp: float) -> None:
    """Both are what the formulas say; the gain is real somewhere in the chain."""
    length = 3
    p, q = random_laws(seed, length, sharp), random_laws(100 + seed, length, sharp)
    block = expected_accepted(Block(), p, q, LONG)
    rejection = expected_accepted(Rejection(), p, q, LONG)
    assert block == pytest.approx(by_formula(p, q, length, block=True), rel=1e-9)
    assert rejection == pytest.approx(by_formula(p, q, length, block=False), rel=1e-9)
    assert block > rejection


@pytest.mark.parametrize("seed", range(3))
def test_the_record_counts_what_the_rules_accept(seed: int) -> None:
    """Averaged over all chains, and on each of them never fewer by `block`."""
    length = 3
    p, q = random_laws(seed, length, 1.0), random_laws(100 + seed, length, 1.0)
    total = np.zeros(2)
    for chain in itertools.product(range(V), repeat=length):
        before = [chain[:i] for i in range(length)]
        p_NV, q_NV = (torch.stack([laws[path] for path in before]) for laws in (p, q))
        drafted = q_NV.gather(1, torch.tensor(chain)[:, None]).prod().item()
        rejection, block = counted(p_NV, q_NV, torch.tensor(chain))
        total += [drafted * sum(rejection), drafted * sum(block)]
        # a token's own chance is in the mean over its draw, so each is above rejection's
        assert all(b >= a - 1e-15 for a, b in zip(rejection, block, strict=True))
    exact = [expected_accepted(rule, p, q, LONG) for rule in (Rejection(), Block())]
    assert total == pytest.approx(exact, rel=1e-9)


def test_a_chain_of_one_is_judged_as_token_by_token() -> None:
    p, q = random_laws(1, 1, 1.0), random_laws(2, 1, 1.0)
    block, rejection = (
        expected_accepted(rule, p, q, TreeShape.chain(1)) for rule in (Block(), Rejection())
    )
    assert block == pytest.approx(rejection, rel=1e-12)


def test_equal_laws_accept_everything() -> None:
    """Nothing is left of p - q, so that the formula divides 0 by 0."""
    p = random_laws(3, 3, 1.0)
    assert expected_accepted(Block(), p, p, LONG) == pytest.approx(3, rel=1e-12)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Chains of 3, 0 and 2 in one batch, and each by itself."""
    length = 3
    p, q = random_laws(5, length, 1.0), random_laws(6, length, 1.0)
    chains = [(0, 1, 2), (2, 2, 0), (1, 0, 1)]
    lengths = [3, 0, 2]

    class Some:
        def __init__(self, which: list[int]) -> None:
            self.which = which

        def at(self, rows: np.ndarray, nodes: np.ndarray) -> Law:
            paths = [
                chains[self.which[b]][: n + 1] for b, n in zip(rows, nodes.tolist(), strict=True)
            ]
            return Law(torch.stack([p[path] for path in paths]), V)

    def verdicts(which: list[int], seed: int) -> list[tuple[int, int]]:
        trees = [drafted_tree(LONG, chains[b], q) for b in which]
        parents = torch.cat([tree.parents_BN for tree in trees])
        for row, b in enumerate(which):
            parents[row, lengths[b] :] = PADDING
        tree = DraftTree(
            tokens_BN=torch.cat([tree.tokens_BN for tree in trees]),
            parents_BN=parents,
            proposal=Proposal.SAMPLED,
            q=Law.cat([tree.q for tree in trees if tree.q is not None]),
            q_rows_BN=torch.arange(3 * len(which)).view(-1, 3),
        )
        noise = Noise(seed, [10 + b for b in which], [7] * len(which))
        verdict = verify(tree, Some(which), Block(), noise)
        found = zip(verdict.num_accepted_B.tolist(), verdict.next_token_B.tolist(), strict=True)
        return list(found)

    seen = set()
    for seed in range(30):
        together = verdicts([0, 1, 2], seed)
        assert together == [verdicts([b], seed)[0] for b in range(3)]
        seen.add(together[0][0])
    assert len(seen) > 1


def test_drafts_that_branch_are_refused() -> None:
    case = Case(kind="reference", label="sampled", build=Sampled, shape=TREE, draws=True)
    with pytest.raises(UnsupportedProposal, match="this draft branches"):
        check(case, sparse(2, 0), sparse(2, 1), options("plain"), PROMPTS)
