"""Laws draw what they report; noise is keyed, uniform and independent.

Statistical tests use fixed seeds; their docstrings give the probability that a correct
implementation had failed for the seed chosen.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from draftsmith.core.law import Law, Noise, Purpose
from draftsmith.core.sampling import Sampler

V = 12
ROWS = np.arange(3)


def some_law(seed: int, rows: int = 3, *, holes: bool = False) -> Law:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand((rows, V), generator=generator, dtype=torch.float64)
    if holes:
        weights[:, seed % V] = 0
        weights[:, (seed + 5) % V] = 0
    return Law.from_weights(weights, V)


def sparse_form(law: Law) -> Law:
    """The same law as a list of all tokens (ids in order)."""
    ids = torch.arange(V).expand(law.num_rows, -1).clone()
    return Law(law.probs(), V, ids)


# ---------------------------------------------------------------------- laws


def test_a_point_mass_draws_its_token_and_reports_probability_one() -> None:
    law = Law.point(torch.tensor([4, 0, 11]), V)
    drawn = law.draw(Noise(0, [0, 1, 2], [5, 5, 5]), ROWS, 0, Purpose.TARGET)
    assert drawn.tolist() == [4, 0, 11]
    assert law.prob(drawn).tolist() == [1.0, 1.0, 1.0]
    assert law.prob(torch.tensor([5, 5, 5])).tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(law.probs(), torch.eye(V)[[4, 0, 11]])


def test_both_forms_of_a_law_say_and_draw_the_same() -> None:
    dense = some_law(1, holes=True)
    sparse, noise = sparse_form(dense), Noise(3, [7, 8, 9], [1, 2, 3])
    other = some_law(2)
    tokens = torch.tensor([1, 6, 2])
    torch.testing.assert_close(sparse.probs(), dense.probs())
    torch.testing.assert_close(sparse.prob(tokens), dense.prob(tokens))
    torch.testing.assert_close(sparse.without(tokens).probs(), dense.without(tokens).probs())
    for q in (other, sparse_form(other)):
        torch.testing.assert_close(sparse.residual(q).probs(), dense.residual(other).probs())
    for lane in range(50):
        assert torch.equal(
            dense.draw(noise, ROWS, 0, Purpose.DRAFT, lane),
            sparse.draw(noise, ROWS, 0, Purpose.DRAFT, lane),
        )


def test_a_token_outside_the_support_has_probability_zero() -> None:
    law = some_law(1, holes=True)
    tokens = torch.tensor([1, 3, 4])  # token 1 is a hole
    assert (law.prob(tokens) > 0).tolist() == [False, True, True]


def test_take_picks_rows_in_order_and_again() -> None:
    law = some_law(4)
    for form in (law, sparse_form(law)):
        assert torch.equal(form.take([2, 0, 0]).probs(), law.probs()[[2, 0, 0]])
        assert torch.equal(form.take(np.array([1])).probs(), law.probs()[[1]])


def test_cat_joins_laws_of_any_form_and_width() -> None:
    dense, point = some_law(5, 2), Law.point(torch.tensor([3, 9]), V)
    narrow = Law(torch.tensor([[0.25, 0.75]]), V, torch.tensor([[2, 8]]))
    for parts in ([dense, point], [point, narrow], [narrow, dense, point], [point]):
        joined = Law.cat(parts)
        wanted = torch.cat([part.probs().double() for part in parts])
        torch.testing.assert_close(joined.probs().double(), wanted)


def test_frequencies_of_draws_are_the_law() -> None:
    """200,000 draws, chi-square with 11 degrees of freedom: a right sampler fails with 1e-6."""
    law, trials = some_law(6, 1), 200_000
    noise = Noise(1, range(trials), [3] * trials)
    wide = Law(law.probs().expand(trials, -1), V)
    drawn = wide.draw(noise, np.arange(trials), 0, Purpose.TARGET)
    seen = torch.bincount(drawn, minlength=V).numpy()
    assert stats.chisquare(seen, law.probs()[0].numpy() * trials).pvalue > 1e-6


def test_a_draw_never_takes_a_token_without_mass() -> None:
    """Also at the ends of the CDF, u = 0 and just below 1, and with mass on the last token only."""

    class Extreme(Noise):
        def uniform(self, rows: object, *rest: object, **names: object) -> np.ndarray:
            return np.array([0.0, 1 - 2.0**-52, 0.5])

    weights = torch.zeros((3, V))
    weights[:, [3, 7]] = torch.tensor([1e-30, 1.0])
    noise = Extreme(0, [0, 1, 2], [0, 0, 0])
    for scale in (1.0, 1e-20, 1e20):
        drawn = noise.categorical(weights * scale, ROWS, 0, Purpose.TARGET)
        assert set(drawn.tolist()) <= {3, 7}
    last = torch.zeros((3, V))
    last[:, V - 1] = 0.3
    assert noise.categorical(last, ROWS, 0, Purpose.TARGET).tolist() == [V - 1] * 3


# ---------------------------------------------------------------------- residual and without


def test_residual_by_hand() -> None:
    p = Law(torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64), 3)
    q = Law(torch.tensor([[0.2, 0.7, 0.1]], dtype=torch.float64), 3)
    torch.testing.assert_close(
        p.residual(q).probs(), torch.tensor([[0.75, 0.0, 0.25]], dtype=torch.float64)
    )


def test_residual_of_equal_laws_stays_the_law() -> None:
    p = some_law(7)
    torch.testing.assert_close(p.residual(p).probs(), p.probs())


def test_residual_of_disjoint_laws_is_the_law() -> None:
    p = Law(torch.tensor([[0.5, 0.5, 0.0, 0.0]]), 4)
    q = Law(torch.tensor([[0.0, 0.0, 0.1, 0.9]]), 4)
    torch.testing.assert_close(p.residual(q).probs(), p.probs())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000), st.booleans())
def test_accepting_and_the_residual_make_up_the_law(one: int, other: int, holes: bool) -> None:
    """sum_x q(x) [accept(x) at x] + P(reject) residual = p, for any p and q."""
    p, q = some_law(one, holes=holes).probs(), some_law(other).probs()
    accepted = torch.minimum(p, q)
    left = Law(p, V).residual(Law(q, V)).probs()
    made = accepted + (1 - accepted.sum(-1, keepdim=True)) * left
    torch.testing.assert_close(made, p, atol=1e-12, rtol=0)


def test_without_gives_the_law_of_the_others() -> None:
    law = Law(torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64), 3)
    torch.testing.assert_close(
        law.without(torch.tensor([0])).probs(),
        torch.tensor([[0.0, 0.6, 0.4]], dtype=torch.float64),
    )


def test_without_the_only_token_stays_as_it_is() -> None:
    law = Law.point(torch.tensor([2]), 5)
    assert torch.equal(law.without(torch.tensor([2])).probs(), law.probs())
    assert torch.equal(law.without(torch.tensor([1])).probs(), law.probs())


def test_laws_are_not_changed_by_what_is_derived_from_them() -> None:
    p, q = some_law(8), some_law(9)
    before = p.probs().clone(), q.probs().clone()
    p.residual(q)
    p.without(torch.tensor([1, 2, 3]))
    p.take([0])
    assert torch.equal(p.probs(), before[0])
    assert torch.equal(q.probs(), before[1])


# ---------------------------------------------------------------------- noise

MANY = 50_000


def numbers(
    *,
    seed: int = 0,
    root: int = 10,
    depth: int = 0,
    purpose: Purpose = Purpose.TARGET,
    lane: int = 0,
) -> np.ndarray:
    """One number for each of many requests."""
    noise = Noise(seed, range(MANY), [root] * MANY)
    return noise.uniform(np.arange(MANY), depth, purpose, lane)


STREAMS = {
    "another purpose": {"purpose": Purpose.DRAFT},
    "acceptance": {"purpose": Purpose.ACCEPT},
    "another lane": {"lane": 1},
    "a distant lane": {"lane": 255},
    "the next position": {"depth": 1},
    "256 positions on": {"root": 266},
    "another seed": {"seed": 1},
}


def test_noise_is_uniform_along_every_key() -> None:
    """Kolmogorov-Smirnov over 50,000 requests, positions, lanes and seeds: a uniform source fails
    one of the four with probability 4e-6."""
    index = np.arange(MANY)
    one = Noise(0, [5], [0])
    along_lanes = one.uniform(np.zeros(MANY, dtype=np.int64), 3, Purpose.DRAFT, index)
    along_positions = Noise(0, [5] * MANY, index).uniform(index, 0, Purpose.TARGET)
    along_seeds = np.concatenate(
        [Noise(s, [1], [2]).uniform(ROWS[:1], 0, Purpose.ACCEPT) for s in range(2_000)]
    )
    for sample in (numbers(), along_lanes, along_positions, along_seeds):
        assert sample.min() >= 0 and sample.max() < 1
        assert stats.kstest(sample, "uniform").pvalue > 1e-6


@pytest.mark.parametrize("stream", STREAMS)
def test_streams_do_not_correlate(stream: str) -> None:
    """Correlation of 50,000 pairs, and a 16 x 16 table of them: independent streams fail one of the
    two with probability 2e-6."""
    one, other = numbers(), numbers(**STREAMS[stream])
    assert abs(np.corrcoef(one, other)[0, 1]) < 4.9 / math.sqrt(MANY)  # two-sided 1e-6
    table = np.histogram2d(one, other, bins=16)[0]
    assert stats.chisquare(table.ravel()).pvalue > 1e-6


@pytest.mark.parametrize("distance", [1, 2, 64, 4096])
def test_neighbouring_requests_do_not_correlate(distance: int) -> None:
    """The same two tests between requests; probability of failure 2e-6."""
    sample = numbers()
    one, other = sample[:-distance], sample[distance:]
    assert abs(np.corrcoef(one, other)[0, 1]) < 4.9 / math.sqrt(len(one))
    table = np.histogram2d(one, other, bins=16)[0]
    assert stats.chisquare(table.ravel()).pvalue > 1e-6


def test_few_numbers_are_those_of_many() -> None:
    """They are made one by one."""
    every = np.arange(MANY)
    draw = np.random.default_rng(1)
    words = (draw.integers(-(2**63), 2**63 - 1, MANY, endpoint=True) for _ in range(2))
    ids, lanes = (one.tolist() for one in words)
    noise = Noise(-7, ids, draw.integers(0, 1 << 40, MANY))
    depth = draw.integers(0, 64, MANY)
    for lane in (0, np.int64(5), np.array([7]), np.array(lanes)):
        many = noise.uniform(every, depth, Purpose.ACCEPT, lane)
        for some in (every[:1], every[7:20], every[-3:], every[:0]):
            own = lane[some] if np.size(lane) > 1 else lane
            few = noise.uniform(some, depth[some], Purpose.ACCEPT, own)
            assert few.dtype == many.dtype and np.array_equal(few, many[some])


def test_noise_depends_on_its_key_alone() -> None:
    """Not on the batch, its order, the root (only on root + depth), or on what was drawn before."""
    noise = Noise(9, [4, 5, 6], [10, 20, 30])
    first = noise.uniform(ROWS, 2, Purpose.TARGET, 1)
    noise.uniform(ROWS, 7, Purpose.DRAFT)
    assert (noise.uniform(ROWS, 2, Purpose.TARGET, 1) == first).all()
    alone = Noise(9, [5], [20]).uniform(ROWS[:1], 2, Purpose.TARGET, 1)
    turned = Noise(9, [6, 5, 4], [30, 20, 10]).uniform(ROWS, 2, Purpose.TARGET, 1)
    moved = noise.at([12, 22, 32]).uniform(ROWS, 0, Purpose.TARGET, 1)
    taken = noise.take([1, 0]).uniform(ROWS[:2], 2, Purpose.TARGET, 1)
    assert alone[0] == first[1]
    assert (turned == first[::-1]).all()
    assert (moved == first).all()
    assert (taken == first[[1, 0]]).all()


def test_lanes_may_differ_by_row() -> None:
    noise = Noise(0, [1, 2, 3], [4, 4, 4])
    mixed = noise.uniform(ROWS, 0, Purpose.DRAFT, np.array([5, 0, 9]))
    for row, lane in enumerate([5, 0, 9]):
        assert mixed[row] == noise.uniform(ROWS, 0, Purpose.DRAFT, lane)[row]


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= Noise(seed, [0], [1]).uniform(ROWS[:1], 0, Purpose.TARGET)[0] < 1


def test_acceptance_happens_with_the_given_probability() -> None:
    """Binomial, 50,000 trials each: fails with probability 4e-6 over the four probabilities; 0, 1
    and more than 1 are exact."""
    noise, rows = Noise(2, range(MANY), [1] * MANY), np.arange(MANY)
    for lane, prob in enumerate([0.1, 0.5, 0.9, 0.999]):
        yes = noise.accept(torch.full((MANY,), prob), rows, 0, lane)
        assert stats.binomtest(int(yes.sum()), MANY, prob).pvalue > 1e-6
    assert not noise.accept(torch.zeros(MANY), rows, 0).any()
    assert noise.accept(torch.ones(MANY), rows, 0).all()
    assert noise.accept(torch.full((MANY,), 3.0), rows, 0).all()


def test_equal_laws_and_noise_give_equal_draws_in_any_batch() -> None:
    """A draw inverts the CDF row by row: neighbours that keep more tokens change nothing."""
    logits = torch.randn((3, 40), generator=torch.Generator().manual_seed(0))
    logits[1] = 0.0  # all tie: keeps all 40 where the others keep 5
    sampler, noise = Sampler(temperature=1.0, top_k=5), Noise(0, [1, 2, 3], [1, 1, 1])
    for depth in range(100):
        together = sampler.law(logits).draw(noise, ROWS, depth, Purpose.TARGET)
        for row in range(3):
            alone = sampler.law(logits[row : row + 1])
            drawn = alone.draw(noise, ROWS[row : row + 1], depth, Purpose.TARGET)
            assert drawn[0] == together[row]
