"""Block verification: its law by enumeration, how much it accepts, and what it must not be."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.core.block_rule import Block
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.law import Law, Noise
from draftsmith.core.types import PADDING, DraftTree, Proposal, TreeShape
from draftsmith.core.verify import Rejection, Rule, verify
from draftsmith.errors import UnsupportedProposal
from draftsmith.targets.toy import TabularTarget

from . import mutants
from .cases import CASES, CHAIN, TREE, Case
from .checking import check, models
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


@pytest.mark.parametrize("setting", ["greedy", "cool", "top_k", "counts"])
@pytest.mark.parametrize("case", CHAINS, ids=str)
def test_emitted_law_is_the_targets_law(case: Case, setting: str) -> None:
    target, draft_model = models(case)
    found = check(case, target, draft_model, options(setting))
    if setting == "cool":
        assert 0 < found.accepted < found.offered


LONG_CHAIN = Case(kind="reference", label="sampled", build=Sampled, shape=LONG, draws=True)


def alike(keep: int) -> tuple[TabularTarget, TabularTarget]:
    """Target and draft model that know the same tokens behind a text, and weigh them otherwise: so
    all shares lie between 0 and 1."""
    target, draft = sparse(keep, 0), sparse(keep, 0)
    draw = torch.Generator().manual_seed(9)
    draft.table_CV = draft.table_CV + torch.randn(draft.table_CV.shape, generator=draw)
    return target, draft


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


WRONG = {
    "the residual of a token alone": ("p.excess(q, share_R)", "p.excess(q, share_R * 0 + 1)"),
    "an end at the first refusal": (
        "accepted_B[rows[stays]] = depth",
        "accepted_B[rows[stays & (accepted_B[rows] == depth - 1)]] = depth",
    ),
    "noise that the next step sees again": ("lane=depth - 1", "lane=0"),
    "what is left is not weighed": ("mass_R / left_R", "share_R"),
    "a share above one": ("(share_R * ratio_R).clamp(max=1.0)", "(share_R * ratio_R)"),
    "the last token's own chance": (
        "judge(depth, rows[end], share_R[end]",
        "judge(depth, rows[end], share_R[end] * 0.9",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rules_are_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.break_source(monkeypatch, Block, "walk", *WRONG[wrong])
    with pytest.raises(AssertionError, match="does not emit the target's law"):
        check(LONG_CHAIN, *alike(2), options("cool", 4), PROMPTS)


# --------------------------------------------------------------------------- what is accepted

V = 3


class Answers:
    """Noise that says yes and no as it is told, and notes how probable that was."""

    def __init__(self, answers: list[bool]) -> None:
        self.answers, self.probability = list(answers), 1.0

    def accept(self, prob_R: Tensor, rows: np.ndarray, depth: int, lane: int) -> np.ndarray:
        yes = self.answers.pop(0)
        chance = min(float(prob_R[0]), 1.0)
        self.probability *= chance if yes else 1 - chance
        return np.array([yes])

    def categorical(self, weights_RK: Tensor, *_: Any) -> Tensor:
        return torch.zeros(1, dtype=torch.long)


class Laws:
    """The target's laws behind the beginnings of one chain."""

    def __init__(self, laws: dict[tuple[int, ...], Tensor], chain: tuple[int, ...]) -> None:
        self.laws, self.chain = laws, chain

    def at(self, rows: np.ndarray, nodes: np.ndarray) -> Law:
        return Law(self.laws[self.chain[: int(nodes[0]) + 1]][None], V)


def random_laws(seed: int, length: int, sharp: float) -> dict[tuple[int, ...], Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        path: (sharp * torch.randn(V, generator=draw, dtype=torch.float64)).softmax(-1)
        for depth in range(length + 1)
        for path in itertools.product(range(V), repeat=depth)
    }


def chain_tree(chain: tuple[int, ...], q: dict[tuple[int, ...], Tensor]) -> DraftTree:
    laws = torch.stack([q[chain[:i]] for i in range(len(chain))])
    return DraftTree(
        tokens_BN=torch.tensor([chain]),
        parents_BN=torch.arange(-1, len(chain) - 1)[None],
        proposal=Proposal.SAMPLED,
        q=Law(laws, V),
        q_rows_BN=torch.arange(len(chain))[None],
    )


def expected_accepted(rule: Rule, p: Any, q: Any, length: int) -> float:
    """Over all drafts and all answers."""
    total = 0.0
    for chain in itertools.product(range(V), repeat=length):
        drafted = float(np.prod([q[chain[:i]][chain[i]].item() for i in range(length)]))
        for answers in itertools.product([True, False], repeat=length):
            noise: Any = Answers(list(answers))
            verdict = verify(chain_tree(chain, q), Laws(p, chain), rule, noise)
            unasked = 0.5 ** len(noise.answers)  # each is seen once for either answer
            total += drafted * noise.probability * unasked * int(verdict.num_accepted_B[0])
    return total


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
    block = expected_accepted(Block(), p, q, length)
    rejection = expected_accepted(Rejection(), p, q, length)
    assert block == pytest.approx(by_formula(p, q, length, block=True), rel=1e-9)
    assert rejection == pytest.approx(by_formula(p, q, length, block=False), rel=1e-9)
    assert block > rejection


def test_a_chain_of_one_is_judged_as_token_by_token() -> None:
    p, q = random_laws(1, 1, 1.0), random_laws(2, 1, 1.0)
    block, rejection = (expected_accepted(rule, p, q, 1) for rule in (Block(), Rejection()))
    assert block == pytest.approx(rejection, rel=1e-12)


def test_equal_laws_accept_everything() -> None:
    """Nothing is left of p - q, so that the formula divides 0 by 0."""
    p = random_laws(3, 3, 1.0)
    assert expected_accepted(Block(), p, p, 3) == pytest.approx(3, rel=1e-12)


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
        trees = [chain_tree(chains[b], q) for b in which]
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
