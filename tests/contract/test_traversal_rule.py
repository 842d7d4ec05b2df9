"""Traversal verification: its law by enumeration, how much it accepts, and what it must not be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.core import block_rule, traversal_rule, verify
from draftsmith.core.block_rule import Block
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.law import Law, Noise
from draftsmith.core.traversal_rule import Traversal
from draftsmith.core.types import PADDING, DraftTree, Proposal, TreeShape
from draftsmith.core.verify import Rejection

from . import mutants
from .cases import CASES, Case
from .checking import check, models
from .judging import BehindNodes, alike, drafted_tree, expected_accepted, paths_of, random_laws
from .reference_drafters import Sampled, WithoutReplacement
from .toys import PROMPTS, SETTINGS, sparse

WIDE = TreeShape(widths=(2, 1))
DEEP = TreeShape(widths=(2, 1, 1))
BUSHY = TreeShape(widths=(1, 2))
SAMPLED = Case(kind="reference", label="sampled", build=Sampled, shape=DEEP, draws=True)
DISTINCT = Case(
    kind="reference", label="distinct", build=WithoutReplacement, shape=BUSHY, draws=True
)
TREES = [case for case in CASES if not case.shape.is_chain and not case.tabular_only]


def options(setting: str, tokens: int = 3) -> DecodeOptions:
    return DecodeOptions(sampler=SETTINGS[setting], max_new_tokens=tokens, rule="traversal")


@pytest.mark.parametrize("setting", ["greedy", "cool", "counts"])
@pytest.mark.parametrize("case", TREES, ids=str)
@pytest.mark.every(3)
def test_emitted_law_is_the_targets_law(case: Case, setting: str) -> None:
    target, draft_model = models(case)
    found = check(case, target, draft_model, options(setting))
    if setting == "cool":
        assert 0 < found.accepted < found.offered


@pytest.mark.parametrize("case", [SAMPLED, DISTINCT], ids=str)
def test_emitted_law_of_trees_with_several_leaves(case: Case) -> None:
    """A share below one reaches siblings, below the root and deeper."""
    for setting in ("cool", "plain"):
        found = check(case, *alike(2), options(setting), PROMPTS)
        assert 0 < found.accepted < found.offered


def test_emitted_law_with_an_end_token() -> None:
    target = sparse(2, 0, end_ids=frozenset({5}))
    check(DISTINCT, target, sparse(2, 1), options("plain"), PROMPTS)


UPDATE = "above.law, above.share_R = rest_of(above.law, place.q, above.share_R)"
WRONG: dict[str, tuple[Any, str, str, str]] = {
    "siblings see the law of the first": (
        *(traversal_rule, "_traverse", UPDATE),
        "_, above.share_R = rest_of(above.law, place.q, above.share_R)",
    ),
    "a node keeps its share when a child is gone": (
        *(traversal_rule, "_traverse", UPDATE),
        "above.law, _ = rest_of(above.law, place.q, above.share_R)",
    ),
    "a child's share leaves out the node's": (
        *(block_rule, "share_of_draft"),
        *("(share_R * ratio_R)", "ratio_R"),
    ),
    "the noise of siblings is one": (
        *(traversal_rule, "_traverse"),
        *("lane = depth * MOST_NODES + place.node", "lane = depth * MOST_NODES"),
    ),
    "noise that the next step sees again": (
        *(traversal_rule, "_traverse"),
        *("lane = depth * MOST_NODES + place.node", "lane = place.node % 2"),
    ),
    "siblings are drawn independently": (
        *(verify, "drawn_from"),
        *("for nodes in earlier", "for nodes in earlier[:0]"),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rules_are_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.break_source(monkeypatch, *WRONG[wrong], also=(traversal_rule,))

    def both() -> None:
        for case in (SAMPLED, DISTINCT):
            check(case, *alike(2), options("cool"), PROMPTS)

    with pytest.raises(AssertionError, match=r"does not emit the target's law|was drawn twice"):
        both()


# --------------------------------------------------------------------------- what is accepted


@pytest.mark.parametrize("sharp", [0.3, 3.0])
@pytest.mark.parametrize("seed", range(2))
def test_a_chain_is_judged_as_by_block(seed: int, sharp: float) -> None:
    chain = TreeShape.chain(3)
    p, q = random_laws(seed, 3, sharp), random_laws(100 + seed, 3, sharp)
    block, traversal = (expected_accepted(rule, p, q, chain) for rule in (Block(), Traversal()))
    assert traversal == pytest.approx(block, rel=1e-12)


@pytest.mark.parametrize("proposal", [Proposal.SAMPLED, Proposal.WITHOUT_REPLACEMENT])
@pytest.mark.parametrize("shape", [WIDE, BUSHY, TreeShape(widths=(2, 2))], ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.every(5)
def test_never_fewer_are_accepted_than_token_by_token(
    seed: int, shape: TreeShape, proposal: Proposal
) -> None:
    """In trees whose nodes of one depth have as many descendants."""
    vocab = 2 if shape.num_nodes > 4 else 3
    p, q = random_laws(seed, 2, 1.0, vocab), random_laws(100 + seed, 2, 1.0, vocab)
    traversal, rejection = (
        expected_accepted(rule, p, q, shape, proposal) for rule in (Traversal(), Rejection())
    )
    assert traversal >= rejection - 1e-12
    if vocab == 3 and shape is WIDE:
        assert traversal > rejection


def test_fewer_may_be_accepted_where_a_first_child_ends() -> None:
    """What it takes of the first child's law is missing at the second, which has descendants."""
    shape = TreeShape(paths=((0,), (0, 0), (0, 1), (0, 1, 0), (0, 1, 0, 0)))
    p, q = random_laws(4, 4, 1.0, 2), random_laws(104, 4, 1.0, 2)
    traversal, rejection = (
        expected_accepted(rule, p, q, shape) for rule in (Traversal(), Rejection())
    )
    assert traversal < rejection - 0.01


def test_equal_laws_accept_the_first_path() -> None:
    """Nothing is left of p - q, so that the formula divides 0 by 0."""
    p = random_laws(3, 3, 1.0, 2)
    assert expected_accepted(Traversal(), p, p, DEEP) == pytest.approx(3, rel=1e-12)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Trees of 4, 0 and 3 nodes in one batch, and each by itself."""
    p, q = random_laws(7, 2, 1.0), random_laws(8, 2, 1.0)
    tokens, cut = [(0, 1, 2, 0), (2, 2, 0, 1), (1, 0, 1, 1)], [4, 0, 3]
    trees = [drafted_tree(WIDE, some, q) for some in tokens]
    parents = trees[0].parents_BN[0].tolist()
    for tree, length in zip(trees, cut, strict=True):
        tree.parents_BN[0, length:] = PADDING

    class Some:
        def __init__(self, which: list[int]) -> None:
            self.each = [BehindNodes(p, paths_of(parents, tokens[b])) for b in which]

        def at(self, rows: np.ndarray, nodes: np.ndarray) -> Any:
            (row,) = rows
            return self.each[row].at(rows, nodes)

    def verdicts(which: list[int], seed: int) -> list[tuple[int, int]]:
        some = [trees[b] for b in which]
        tree = DraftTree(
            tokens_BN=torch.cat([one.tokens_BN for one in some]),
            parents_BN=torch.cat([one.parents_BN for one in some]),
            proposal=Proposal.SAMPLED,
            q=Law.cat([one.q for one in some if one.q is not None]),
            q_rows_BN=torch.arange(4 * len(which)).view(-1, 4),
        )
        noise = Noise(seed, [10 + b for b in which], [7] * len(which))
        found = verify.verify(tree, Some(which), Traversal(), noise)
        return list(zip(found.num_accepted_B.tolist(), found.next_token_B.tolist(), strict=True))

    seen = set()
    for seed in range(30):
        together = verdicts([0, 1, 2], seed)
        assert together == [verdicts([b], seed)[0] for b in range(3)]
        seen.add(tuple(accepted for accepted, _ in together))
    assert len(seen) > 1
