"""The short walks decide what the rules decide, and their draws are those of the laws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.unit.test_verify import DRAWING, V, one_row, told
from torch import Tensor

from draftsmith.core.block_rule import Block
from draftsmith.core.law import Law, Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.short_walks import short_walk, walk_highest
from draftsmith.core.types import PADDING, DraftTree, Proposal, Verdict
from draftsmith.core.verify import Match, Rejection, Rule, TreeLaws, verify
from draftsmith.errors import BackendError
from draftsmith.targets.native.bindings import compiler, library
from draftsmith.targets.native.engine import LogitDraws

RULES = pytest.mark.parametrize("rule", [Match(), Rejection(), Block()], ids=lambda rule: rule.name)
SIZES = [6, 100, 256, 1000]
"""Vocabularies: within a lane, no multiple of a lane, one block of sums, several."""


@pytest.fixture(scope="module")
def draws() -> LogitDraws:
    if compiler() is None:
        pytest.skip("no C++ compiler")
    return LogitDraws(library())


def laws_of(tree: DraftTree, logits_BNV: Tensor, sampler: Sampler) -> TreeLaws:
    return TreeLaws(
        logits_BNV=logits_BNV,
        sampler=sampler,
        histories=[],
        tokens_BN=tree.tokens_BN.numpy(),
        parents_BN=tree.parents_BN.numpy(),
    )


def assert_equal(found: Verdict | None, expected: Verdict) -> None:
    assert found is not None
    assert torch.equal(found.path_BD, expected.path_BD)
    assert torch.equal(found.num_accepted_B, expected.num_accepted_B)
    assert torch.equal(found.next_token_B, expected.next_token_B)
    assert found.next_token_B.dtype == expected.next_token_B.dtype


def two_rows(rng: np.random.Generator, vocab: int, *, chains: bool) -> DraftTree:
    """Trees with padding, probes and equal siblings."""
    rows, nodes = 2, 9
    parents = np.array([[rng.integers(-1, n) for n in range(nodes)] for _ in range(rows)])
    if chains:
        parents[:] = np.arange(-1, nodes - 1)
    parents[1, 7:] = PADDING
    return DraftTree(
        tokens_BN=torch.from_numpy(rng.integers(0, vocab, (rows, nodes))),
        parents_BN=torch.from_numpy(parents),
        proposal=Proposal.OPAQUE,
        candidate_BN=None if chains else torch.from_numpy(rng.random((rows, nodes)) < 0.9),
    )


# ---------------------------------------------------------------------- temperature 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@RULES
@pytest.mark.parametrize("seed", range(20))
def test_at_temperature_0_the_short_walk_is_that_of_the_rule(
    seed: int, rule: Rule, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    tree = two_rows(rng, 3, chains=isinstance(rule, Block))
    logits_BNV = torch.from_numpy(rng.integers(0, 3, (2, 10, V))).to(dtype)  # with equal ones
    expected = verify(tree, laws_of(tree, logits_BNV, Sampler()), rule, Noise(0, [0, 1], [4, 4]))
    assert_equal(walk_highest(tree, logits_BNV), expected)


@pytest.mark.parametrize("proposal", [Proposal.SAMPLED, Proposal.WITHOUT_REPLACEMENT])
@pytest.mark.parametrize("seed", range(20))
def test_the_short_walk_is_that_of_rejection_whatever_children_were_drawn_from(
    seed: int, proposal: Proposal
) -> None:
    rng = np.random.default_rng(seed)
    parents, tokens = [-1, -1, 0, 0, 1, 2], []
    for siblings in (2, 2, 1, 1):
        replace = proposal is Proposal.SAMPLED
        tokens += rng.choice(V, siblings, replace=replace).tolist()
    q = Law(torch.from_numpy(rng.dirichlet(np.ones(V), 4)), V)
    tree = one_row(tokens, parents, proposal, q, [0, 0, 1, 1, 2, 3])
    logits_BNV = torch.from_numpy(rng.integers(0, 3, (1, 7, V))).float()
    laws = laws_of(tree, logits_BNV, Sampler())
    expected = verify(tree, laws, Rejection(), Noise(0, [0], [4]))
    assert told(walk_highest(tree, logits_BNV)) == told(expected)


def test_the_short_walk_refuses_what_is_no_number_where_it_comes_by() -> None:
    logits_BNV = torch.zeros(1, 4, V)
    logits_BNV[0, 0, 1], logits_BNV[0, 1] = 1.0, torch.nan  # the root goes to node 1
    assert told(walk_highest(one_row(*DRAWING), logits_BNV)) == ([1], 0)
    logits_BNV[0, 2, 0] = torch.nan
    with pytest.raises(BackendError, match="NaN"):
        walk_highest(one_row(*DRAWING), logits_BNV)


@pytest.mark.parametrize(
    ("sampler", "highest", "alone"),
    [
        (Sampler(), True, False),
        (Sampler(top_k=2, top_p=0.5, min_p=0.1), True, False),
        (Sampler(temperature=0.5), False, True),
        (Sampler(temperature=0.5, top_k=2), False, False),
        (Sampler(temperature=0.5, top_p=0.5), False, False),
        (Sampler(temperature=0.5, min_p=0.1), False, False),
        (Sampler(logit_bias=((1, 2.0),)), False, False),
        (Sampler(temperature=1.0, logit_bias=((1, 2.0),)), False, False),
        (Sampler(repetition_penalty=1.2), False, False),
        (Sampler(temperature=1.0, presence_penalty=1.0), False, False),
        (Sampler(frequency_penalty=1.0), False, False),
    ],
)
def test_the_short_walks_are_for_logits_as_they_stand(
    sampler: Sampler, highest: bool, alone: bool
) -> None:
    assert (sampler.takes_highest, sampler.reads_logits_alone) == (highest, alone)


# ---------------------------------------------------------------------- draws


def softmax(logits_V: Tensor, temperature: float) -> np.ndarray:
    law: np.ndarray = (logits_V.double() / temperature).softmax(-1).numpy()
    return law


def assert_inverts(tokens: Sequence[int], numbers: Sequence[float], law: np.ndarray) -> None:
    """Each token is the one left of which this share of the law lies, up to rounding."""
    after = law.cumsum()
    for token, u in zip(tokens, numbers, strict=True):
        assert law[token] > 0
        assert after[token] - law[token] - 1e-6 <= u <= after[token] + 1e-6


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("size", SIZES)
def test_a_draw_inverts_the_law(draws: LogitDraws, size: int, temperature: float) -> None:
    torch.manual_seed(size)
    logits_V = 4 * torch.randn(size)
    logits_V[size // 2] = -torch.inf  # a forbidden token
    law = softmax(logits_V, temperature)
    assert law[size // 2] == 0
    numbers = [0.0, *np.linspace(0, 1, 997, endpoint=False), 1 - 2**-52]
    tokens = [draws.draw(logits_V, temperature, float(u)) for u in numbers]
    assert None not in tokens
    assert_inverts([int(token) for token in tokens if token is not None], numbers, law)
    likely = law > 0.01
    assert likely.sum() == len(np.intersect1d(tokens, np.flatnonzero(likely)))


@pytest.mark.parametrize("size", SIZES)
def test_a_draw_at_either_end_is_of_no_forbidden_token(draws: LogitDraws, size: int) -> None:
    logits_V = torch.zeros(size)
    logits_V[0] = logits_V[-1] = -torch.inf
    assert draws.draw(logits_V, 1.0, 0.0) == 1
    assert draws.draw(logits_V, 1.0, 1 - 2**-52) == size - 2


@pytest.mark.parametrize("size", [4, 512])
def test_a_number_on_an_edge_draws_the_token_behind_it(draws: LogitDraws, size: int) -> None:
    """Weights are equal, so their sums are exact: between two tokens, and between two blocks."""
    assert draws.draw(torch.zeros(size), 1.0, 0.5) == size // 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cut", [True, False])
def test_a_rejection_accepts_p_over_q_and_draws_from_what_is_left(
    draws: LogitDraws, size: int, cut: bool
) -> None:
    torch.manual_seed(size)
    logits_V, q_V = 2 * torch.randn(size), torch.rand(size)
    ids = torch.arange(0, size, 2) if cut else None
    q = (q_V if ids is None else q_V[ids]) / (q_V.sum() if ids is None else q_V[ids].sum())
    whole = np.zeros(size)
    whole[slice(None) if ids is None else ids.numpy()] = q.numpy()
    p = softmax(logits_V, 0.8)
    left = np.maximum(p - whole, 0)
    for token in (0, size // 2 // 2 * 2, (size - 1) // 2 * 2):
        edge = p[token] / whole[token]
        for u in (edge * 0.999, edge * 1.001):
            found = draws.reject(logits_V, 0.8, token, (q, ids), (u, 0.5))
            assert found is not None and found[0] == (u < edge)
    unlikely = int(np.argmin(p / np.maximum(whole, 1e-9)))
    numbers = np.linspace(0, 1, 499, endpoint=False).tolist()
    found = [draws.reject(logits_V, 0.8, unlikely, (q, ids), (1 - 2**-52, u)) for u in numbers]
    assert all(one is not None and not one[0] for one in found)
    assert_inverts([one[1] for one in found if one is not None], numbers, left / left.sum())


@pytest.mark.parametrize(
    ("ids", "q"),
    [
        ([1, 3, 0, 0, 0], [0.4, 0.6, 0.0, 0.0, 0.0]),  # filled up behind, as `Law.cat` does
        ([0, 0, 1, 3, 4], [0.0, 0.5, 0.1, 0.1, 0.3]),  # filled up, then sorted, as a nucleus is
        ([4, 0, 3, 1, 2], [0.5, 0.1, 0.3, 0.05, 0.05]),
    ],
)
def test_a_rejection_reads_q_in_whatever_order_a_law_keeps_it(
    draws: LogitDraws, ids: list[int], q: list[float]
) -> None:
    kept = Law(torch.tensor([q]), 6, torch.tensor([ids]))
    dense_V = kept.probs()[0]
    p_V = torch.tensor([0.2, 0.1, 0.3, 0.1, 0.2, 0.1])
    for token in dense_V.nonzero()[:, 0].tolist():
        for u in np.linspace(0, 1, 50, endpoint=False).tolist():
            found = draws.reject(p_V.log(), 1.0, token, kept.row(0), (u, 0.37))
            assert found == draws.reject(p_V.log(), 1.0, token, (dense_V, None), (u, 0.37))


def test_where_nothing_is_left_the_law_stays(draws: LogitDraws) -> None:
    """p = q: a rejection has probability 0, up to rounding."""
    logits_V = torch.zeros(4)
    q = torch.full((4,), 0.25)
    found = [draws.reject(logits_V, 1.0, 2, (q, None), (1.0, u)) for u in (0.0, 0.3, 0.99)]
    assert found == [(False, 0), (False, 1), (False, 3)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bad", ["one NaN", "all -inf", "one inf"])
def test_a_draw_refuses_what_is_no_law(draws: LogitDraws, size: int, bad: str) -> None:
    logits_V = torch.randn(size)
    if bad == "all -inf":
        logits_V[:] = -torch.inf
    else:
        logits_V[size - 1] = torch.nan if bad == "one NaN" else torch.inf
    q = (torch.full((size,), 1 / size), None)
    assert draws.draw(logits_V, 1.0, 0.5) is None
    assert draws.reject(logits_V, 1.0, 0, q, (0.5, 0.5)) is None
    tree, logits_BNV = one_row([1], [-1]), logits_V.expand(1, 2, -1)
    with pytest.raises(BackendError, match="NaN"):
        short_walk(tree, logits_BNV, HOT, Match(), Noise(0, [0], [4]), draws)


# ---------------------------------------------------------------------- temperature above 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(20))
def test_a_drawn_walk_is_that_of_match(draws: LogitDraws, seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    tree = two_rows(rng, 3, chains=False)
    logits_BNV = torch.from_numpy(rng.normal(0, 1, (2, 10, size))).float()
    logits_BNV[..., :3] += 6  # the drafted tokens are likely
    sampler, noise = Sampler(temperature=0.8), Noise(seed, [0, 1], [4, 9])
    expected = verify(tree, laws_of(tree, logits_BNV, sampler), Match(), noise)
    assert_equal(short_walk(tree, logits_BNV, sampler, Match(), noise, draws), expected)


def drawn_chains(rng: np.random.Generator, size: int, known: int) -> tuple[DraftTree, Tensor]:
    """Chains of nine and of seven tokens that were drawn from laws of the first `known` tokens, and
    logits that are near to those: many are accepted."""
    tree = two_rows(rng, known, chains=True)
    probs = torch.from_numpy(rng.dirichlet(np.ones(known), 18)).float()
    ids = torch.arange(known).expand(18, -1) if known < size else None
    drawn = [int(rng.choice(known, p=row / row.sum())) for row in probs.double().numpy()]
    tree = DraftTree(
        tokens_BN=torch.tensor(drawn).view(2, 9),
        parents_BN=tree.parents_BN,
        proposal=Proposal.SAMPLED,
        q=Law(probs, size, ids),
        q_rows_BN=torch.arange(18).view(2, 9),
    )
    own = torch.full((2, 10, size), -6.0)
    own[:, :9, :known] = probs.view(2, 9, known).log()
    return tree, own + torch.from_numpy(rng.normal(0, 0.3, own.shape)).float()


@pytest.mark.parametrize("rule", [Rejection(), Block()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(20))
def test_a_walk_along_drawn_chains_is_that_of_the_rule(
    draws: LogitDraws, seed: int, size: int, cut: bool, rule: Rule
) -> None:
    rng = np.random.default_rng(seed)
    tree, logits_BNV = drawn_chains(rng, size, size // 2 if cut else size)
    if seed % 4 == 0:  # a token that the target never says, with others behind it
        logits_BNV[0, 4, tree.tokens_BN[0, 4]] = -torch.inf
    sampler, noise = Sampler(temperature=1.0), Noise(seed, [0, 1], [4, 9])
    expected = verify(tree, laws_of(tree, logits_BNV, sampler), rule, noise)
    assert_equal(short_walk(tree, logits_BNV, sampler, rule, noise, draws), expected)


def test_a_chain_from_the_targets_own_laws_is_accepted_whole(draws: LogitDraws) -> None:
    """Nothing is left of p - q, so that the chance divides 0 by 0."""
    tree, _ = drawn_chains(np.random.default_rng(0), 6, 6)
    assert tree.q is not None
    own = F.pad(tree.q.probs_RK.view(2, 9, 6).log(), (0, 0, 0, 1))
    found = short_walk(tree, own, HOT, Block(), Noise(0, [0, 1], [4, 9]), draws)
    assert found is not None
    assert found.num_accepted_B.tolist() == [9, 7]


def test_a_chain_whose_first_token_is_never_said_ends_at_the_root(draws: LogitDraws) -> None:
    tree, logits_BNV = drawn_chains(np.random.default_rng(1), 6, 6)
    logits_BNV[0, 0, tree.tokens_BN[0, 0]] = -torch.inf
    logits_BNV[0, 2:] = torch.nan  # laws behind it are not asked for
    found = short_walk(tree, logits_BNV, HOT, Block(), Noise(0, [0, 1], [4, 9]), draws)
    assert found is not None
    assert found.num_accepted_B[0] == 0
    assert found.next_token_B[0] != tree.tokens_BN[0, 0]


@pytest.mark.parametrize("cut", [True, False])
def test_a_token_that_neither_law_has_is_refused(draws: LogitDraws, cut: bool) -> None:
    """p / q is 0 / 0, of a drafter whose q is not what it drew from."""
    vocab, known = 6, 4
    probs = torch.tensor([[0.6, 0.4, 0.0, 0.0]])
    if not cut:
        probs = F.pad(probs, (0, vocab - known))
    tree = DraftTree(
        tokens_BN=torch.tensor([[5]]),
        parents_BN=torch.tensor([[-1]]),
        proposal=Proposal.SAMPLED,
        q=Law(probs, vocab, torch.arange(known)[None] if cut else None),
        q_rows_BN=torch.tensor([[0]]),
    )
    logits_BNV = torch.zeros(1, 2, vocab)
    logits_BNV[:, :, 5] = -torch.inf
    for seed in range(20):
        noise = Noise(seed, [0], [4])
        found = short_walk(tree, logits_BNV, HOT, Block(), noise, draws)
        assert found is not None
        assert found.num_accepted_B.tolist() == [0]
        assert found.next_token_B.tolist() != [5]


def test_a_judged_chain_refuses_what_is_no_number(draws: LogitDraws) -> None:
    tree, logits_BNV = drawn_chains(np.random.default_rng(1), 6, 6)
    logits_BNV[1, 0, 3] = torch.nan
    with pytest.raises(BackendError, match="NaN"):
        short_walk(tree, logits_BNV, HOT, Block(), Noise(0, [0, 1], [4, 9]), draws)


class Derived(Match):
    """Might decide otherwise."""


SIBLINGS = one_row([3, 1], [-1, -1], Proposal.SAMPLED, Law(torch.ones(1, V) / V, V), [0, 0])
ALONE = one_row([3], [-1], Proposal.SAMPLED, Law(torch.ones(1, V) / V, V), [0])
HOT, COLD = Sampler(temperature=1.0), Sampler()


@pytest.mark.parametrize(
    ("tree", "rule", "sampler", "dtype", "known"),
    [
        (one_row(*DRAWING), Match(), HOT, torch.float32, True),
        (one_row(*DRAWING), Derived(), HOT, torch.float32, False),
        (one_row(*DRAWING), Derived(), COLD, torch.float32, False),
        (one_row(*DRAWING), Match(), HOT, torch.float64, False),
        (one_row(*DRAWING), Match(), Sampler(temperature=1.0, top_k=3), torch.float32, False),
        (one_row(*DRAWING), Rejection(), HOT, torch.float32, False),  # of no q
        (SIBLINGS, Rejection(), HOT, torch.float32, False),
        (SIBLINGS, Block(), HOT, torch.float32, False),  # its own walk says what is wrong
        (SIBLINGS, Block(), COLD, torch.float32, False),
        (ALONE, Block(), HOT, torch.float32, True),
        (ALONE, Block(), COLD, torch.float32, True),
        (ALONE, Block(), HOT, torch.float64, False),
        (SIBLINGS, Match(), HOT, torch.float32, True),
        (SIBLINGS, Rejection(), COLD, torch.float32, True),
    ],
)
def test_which_cases_are_short(
    draws: LogitDraws,
    tree: DraftTree,
    rule: Rule,
    sampler: Sampler,
    dtype: torch.dtype,
    known: bool,
) -> None:
    logits_BNV = torch.zeros(1, 1 + tree.num_nodes, V, dtype=dtype)
    noise = Noise(0, [0], [4])
    assert (short_walk(tree, logits_BNV, sampler, rule, noise, draws) is not None) == known


def test_without_an_engine_only_temperature_0_is_short() -> None:
    logits_BNV, noise = torch.zeros(1, 4, V), Noise(0, [0], [4])
    tree = one_row(*DRAWING)
    assert short_walk(tree, logits_BNV, HOT, Match(), noise, None) is None
    assert short_walk(tree, logits_BNV, COLD, Match(), noise, None) is not None
