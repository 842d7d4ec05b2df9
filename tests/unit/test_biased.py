"""Verification that leans towards the draft: against its definition, and against imitations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.core.law import Law, Noise
from draftsmith.core.lossy_rules import BiasedDraw, BiasedGreedy, biased_rule
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import ALIGNED, ROOT, DraftTree, Proposal
from draftsmith.core.verify import Match, Rule, verify
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prediction import PredictionDrafter
from draftsmith.errors import InputError, LossyRule
from draftsmith.targets.toy import TabularTarget

LEANING = st.floats(0.001, 1.0)


class Laws:
    """One law for every node and the root."""

    def __init__(self, probs_NV: np.ndarray) -> None:
        self.probs_NV = probs_NV

    def at(self, rows: np.ndarray, nodes: np.ndarray) -> Law:
        return Law(torch.from_numpy(self.probs_NV[nodes + 1]), self.probs_NV.shape[1])


def chain(tokens: Sequence[int], origin: int | None = ALIGNED) -> DraftTree:
    length = len(tokens)
    return DraftTree(
        tokens_BN=torch.tensor([list(tokens)]),
        parents_BN=torch.arange(-1, length - 1)[None],
        proposal=Proposal.OPAQUE,
        origin_BN=None if origin is None else torch.full((1, length), origin),
    )


def judged(probs_NV: np.ndarray, tree: DraftTree, rule: Rule, seed: int = 0) -> tuple[int, int]:
    """(tokens that stay, the token behind them)."""
    verdict = verify(tree, Laws(probs_NV), rule, Noise(seed, [0], [1]), allow_lossy=True)
    return int(verdict.num_accepted_B[0]), int(verdict.next_token_B[0])


def stays(probs: Sequence[float], draft: int, bias: float) -> bool:
    kept, _ = judged(np.array([probs, probs]), chain([draft]), BiasedGreedy(bias))
    return kept == 1


# --------------------------------------------------------------------------- greedy


@given(
    weights=st.lists(st.integers(0, 50), min_size=2, max_size=6).filter(any),
    draft=st.integers(0, 5),
    bias=st.fractions(Fraction(1, 1000), Fraction(499, 1000)),
)
def test_the_draft_stays_where_it_is_the_best_of_the_biased_law(
    weights: list[int], draft: int, bias: Fraction
) -> None:
    draft %= len(weights)
    p = [Fraction(weight, sum(weights)) for weight in weights]
    leaning = [(1 - bias) * each + (bias if v == draft else 0) for v, each in enumerate(p)]
    best = max(leaning[v] for v in range(len(p)) if v != draft)
    if abs(leaning[draft] - best) > Fraction(1, 10**9):  # ties: see the vectors
        assert stays([float(each) for each in p], draft, float(bias)) == (leaning[draft] >= best)


@pytest.mark.parametrize(
    ("best", "drafted", "bias", "kept"),
    [
        (0.4, 0.2, 0.2, True),
        (0.26, 0.0, 0.2, False),
        (0.25, 0.0, 0.2, True),  # a tie, which is the draft's
        (0.5, 0.375, 0.1, False),
        (1.0, 0.0, 0.49, False),
        (1.0, 0.0, 0.5, True),
        (1.0, 0.0, 1.0, True),
    ],
)
def test_vectors(best: float, drafted: float, bias: float, kept: bool) -> None:
    others = [(1 - best - drafted) / 8] * 8
    assert stays([best, drafted, *others], 1, bias) == kept


def test_neither_a_ratio_nor_a_bonus_on_the_logit_is_the_rule() -> None:
    """Both are found in public code under the same name."""
    bias = 0.2
    gap = bias / (1 - bias)
    probs = [0.4, 0.2, *[0.05] * 8]
    assert stays(probs, 1, bias)
    assert probs[1] / probs[0] < 1 - gap  # the ratio would refuse
    sure = [0.99, 0.01]
    assert not stays(sure, 1, bias)
    assert math.log(sure[1]) + 25 * bias > math.log(sure[0])  # the bonus would accept


@given(
    seed=st.integers(0, 10**6),
    biases=st.tuples(LEANING, LEANING).map(sorted),
)
def test_more_bias_keeps_no_less_of_a_draft(seed: int, biases: list[float]) -> None:
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(7, 0.3), size=9)
    draft = chain(rng.integers(0, 7, 8).tolist())
    less, more = (judged(probs, draft, BiasedGreedy(bias))[0] for bias in biases)
    assert less <= more


def test_behind_a_whole_draft_and_at_a_divergence_stands_the_most_probable_token() -> None:
    probs = np.array([[0.5, 0.4, 0.1], [0.1, 0.2, 0.7], [0.2, 0.7, 0.1]])
    assert judged(probs, chain([1, 2]), BiasedGreedy(0.2)) == (2, 1)
    assert judged(probs, chain([1, 0]), BiasedGreedy(0.2)) == (1, 2)
    assert judged(probs, chain([2, 0]), BiasedGreedy(0.2)) == (0, 0)


@pytest.mark.parametrize("rule", [BiasedGreedy(0.45), BiasedDraw(1.0)])
@pytest.mark.parametrize("origin", [1, 2, None])
def test_only_what_stands_where_it_stood_is_favoured(rule: Rule, origin: int | None) -> None:
    probs = (
        np.array([[1.0, 0.0], [1.0, 0.0]])
        if isinstance(rule, BiasedDraw)
        else np.array([[0.6, 0.4], [0.6, 0.4]])
    )
    assert judged(probs, chain([1]), rule)[0] == 1
    assert judged(probs, chain([1], origin), rule)[0] == 0
    assert judged(probs, chain([0], origin), rule)[0] == 1


# --------------------------------------------------------------------------- drawn


@pytest.mark.parametrize("bias", [0.1, 0.35, 0.8])
def test_drawn_tokens_follow_the_closed_form(bias: float) -> None:
    """The draft with (1 - beta) P(d) + beta, others with (1 - beta) P(v)."""
    p, draft, trials = np.array([0.5, 0.2, 0.3]), 1, 20_000
    drafts = DraftTree(
        tokens_BN=torch.full((trials, 1), draft),
        parents_BN=torch.full((trials, 1), ROOT),
        proposal=Proposal.OPAQUE,
        origin_BN=torch.full((trials, 1), ALIGNED),
    )
    laws, noise = Laws(np.stack([p, [1.0, 0, 0]])), Noise(0, range(trials), [1] * trials)
    verdict = verify(drafts, laws, BiasedDraw(bias), noise, allow_lossy=True)
    stayed = verdict.num_accepted_B.numpy() == 1
    kept = int(stayed.sum())
    counts = np.bincount(np.where(stayed, draft, verdict.next_token_B.numpy()), minlength=3)
    leaning = (1 - bias) * p + bias * (np.arange(3) == draft)
    assert kept == counts[draft]
    assert chisquare(counts, leaning * trials).pvalue > 1e-4


# --------------------------------------------------------------------------- options


@pytest.mark.parametrize("bias", [-0.1, 1.01, math.nan, math.inf])
def test_a_bias_out_of_range_is_refused(bias: float) -> None:
    for make in (BiasedGreedy, BiasedDraw, lambda value: biased_rule(value, Sampler())):
        with pytest.raises(InputError, match="between 0"):
            make(bias)


def test_without_a_bias_the_rule_is_lossless_and_the_sampler_its_own() -> None:
    for sampler in (Sampler(), Sampler(temperature=0.7, top_p=0.9)):
        assert biased_rule(0.0, sampler) == (Match(), sampler)
    rule, sampler = biased_rule(0.2, Sampler())
    assert rule.lossy and sampler == Sampler(temperature=1.0)
    drawing = Sampler(temperature=0.7, top_p=0.9)
    assert biased_rule(0.2, drawing) == (BiasedDraw(0.2), drawing)


def test_it_is_refused_unless_lossy_rules_are_allowed() -> None:
    with pytest.raises(LossyRule):
        verify(chain([1]), Laws(np.eye(2)), BiasedGreedy(0.2), Noise(0, [0], [1]))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_decoding_keeps_a_whole_prediction_from_half_on_and_nothing_is_biased_without_one(
    temperature: float,
) -> None:
    target = TabularTarget(8)
    rule, sampler = biased_rule(1.0, Sampler(temperature=temperature))
    options = DecodeOptions(sampler=sampler, rule=rule, max_new_tokens=8, allow_lossy=True)
    drafter = PredictionDrafter()
    drafter.bind(target)
    said = [5, 3, 5, 3, 1]
    (kept,) = generate(target, drafter, [[1, 2]], options, predictions=[said])
    assert list(kept.token_ids[: len(said)]) == said
    plain = DecodeOptions(sampler=Sampler(temperature=temperature), max_new_tokens=8)
    (free,) = generate(target, drafter, [[1, 2]], options, predictions=[[]])
    (alone,) = generate(target, NoDrafter(), [[1, 2]], plain)
    assert free.token_ids == alone.token_ids
