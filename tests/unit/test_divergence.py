"""Divergences of whole laws: definitions, gradients, and the readings of TVD++."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.small_laws import (
    CASES,
    PLACES,
    PROPER,
    READINGS,
    TAILS,
    TAUGHT,
    VOCAB,
    knobs_for,
    law,
    logits,
    nats,
    top,
    truncated,
    with_gradient,
)
from torch import Tensor

from draftsmith.distill.objectives import divergence as div
from draftsmith.distill.objectives.divergence import (
    DIVERGENCES,
    Knobs,
    Reading,
    Rewards,
    Tail,
    TokenBins,
)
from draftsmith.errors import InputError

# --------------------------------------------------------------------------- definitions


def by_hand(name: str, p: list[float], q: list[float]) -> float:
    """The formulas as the papers print them, one cell after another; 0 log 0 = 0."""

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    m = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    overlap = sum(min(x, y) for x, y in zip(p, q, strict=True))
    return {
        "kl": lambda: kl(p, q),
        "rkl": lambda: kl(q, p),
        "jsd": lambda: kl(p, m) / 2 + kl(q, m) / 2,
        "hellinger": lambda: sum((x**0.5 - y**0.5) ** 2 for x, y in zip(p, q, strict=True)) / 2,
        "tvd": lambda: 1 - overlap,
        "lk": lambda: -math.log(overlap),
    }[name]()


@pytest.mark.parametrize("name", PROPER)
def test_values_are_those_of_the_printed_formulas(name: str) -> None:
    log_p, log_q = law(0), law(1)
    log_p[0, 3] = log_q[0, 3] = -math.inf  # a cell that neither law uses
    log_p, log_q = torch.log_softmax(log_p, -1), torch.log_softmax(log_q, -1)
    values = nats(name, TokenBins(log_p_NC=log_p, log_q_NC=log_q))
    for place in range(PLACES):
        expected = by_hand(name, log_p[place].exp().tolist(), log_q[place].exp().tolist())
        assert values[place].item() == pytest.approx(expected, rel=1e-12)


def test_the_record_of_every_name_bears_it_and_sft_reads_tokens_alone() -> None:
    assert sorted(DIVERGENCES) == sorted("sft kl rkl jsd hellinger tvd tvdpp lk".split())
    assert all(name == record.name for name, record in DIVERGENCES.items())
    log_q, tokens = law(1), torch.tensor([0, 3, 11, 5, 5])
    point = TokenBins(
        log_p_NC=torch.zeros(PLACES, 1, dtype=torch.float64),
        log_q_NC=log_q.gather(-1, tokens[:, None]),
    )
    expected = torch.stack([-log_q[place, token] for place, token in enumerate(tokens)])
    torch.testing.assert_close(nats("sft", point), expected)


def test_total_variation_is_what_is_not_accepted() -> None:
    log_p, log_q = law(0), law(1)
    overlap = div.acceptance(log_p, log_q)
    torch.testing.assert_close(div.total_variation(log_p, log_q), 1 - overlap)
    torch.testing.assert_close(div.lk(log_p, log_q), -overlap.log())


@pytest.mark.parametrize("name", PROPER)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    log_p = law(0)

    def value(student: Tensor) -> Tensor:
        return nats(name, div.whole_cells(log_p, student))

    assert torch.autograd.gradcheck(value, logits(1).requires_grad_())


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", PROPER)
def test_gradients_of_truncated_laws_are_those_of_finite_differences(name: str, tail: Tail) -> None:
    laws = top(law(0), 4)

    def value(student: Tensor) -> Tensor:
        return nats(name, truncated(name, laws, student, tail, floor=1e-3))

    assert torch.autograd.gradcheck(value, logits(1).requires_grad_())


@pytest.mark.parametrize("name", TAUGHT)
def test_a_student_that_is_the_teacher_stays_where_it_is(name: str) -> None:
    teacher = logits(0)
    log_p = torch.log_softmax(teacher, -1)
    values, gradient = with_gradient(lambda z: nats(name, div.whole_cells(log_p, z)), teacher)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-14)
    torch.testing.assert_close(values, torch.zeros_like(values), rtol=0, atol=1e-14)


def test_hard_labels_pull_even_a_student_that_is_the_teacher() -> None:
    def value(student: Tensor) -> Tensor:  # token 0 is each place's label
        label = torch.zeros(PLACES, 1, dtype=torch.float64)
        log_q = torch.log_softmax(student, -1)[:, :1]
        return nats("sft", TokenBins(log_p_NC=label, log_q_NC=log_q))

    _, gradient = with_gradient(value, logits(0))
    assert (gradient[:, 0] < -0.01).all()


# --------------------------------------------------------------------------- JSD


def test_jensen_shannon_lies_between_zero_and_the_logarithm_of_two() -> None:
    near, far = law(0), law(1)
    values = div.jensen_shannon(near, far)
    assert (values > 0).all() and (values < math.log(2)).all()
    torch.testing.assert_close(values, div.jensen_shannon(far, near))
    apart = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(
        div.jensen_shannon(apart[:1], apart[1:]), torch.tensor([math.log(2)], dtype=torch.float64)
    )


def test_the_mixture_is_one_of_laws_not_of_logits() -> None:
    log_p, log_q = law(0), law(1)
    mixed = torch.log_softmax((log_p + log_q) / 2, -1)
    wrong = (div.forward_kl(log_p, mixed) + div.forward_kl(log_q, mixed)) / 2
    assert (wrong - div.jensen_shannon(log_p, log_q)).abs().min() > 1e-3


def test_the_slope_of_jensen_shannon_at_its_ends_is_the_kl_and_the_value_is_zero() -> None:
    log_p, log_q = law(0), law(1)
    for beta in (1e-4, 1e-6):
        low = div.jensen_shannon(log_p, log_q, beta)
        high = div.jensen_shannon(log_p, log_q, 1 - beta)
        assert low.max() < 10 * beta and high.max() < 10 * beta
        # The next term of the expansion is of the order of beta x the chi-square divergence.
        torch.testing.assert_close(
            low / beta, div.forward_kl(log_p, log_q), rtol=1e3 * beta, atol=0
        )
        torch.testing.assert_close(
            high / beta, div.reverse_kl(log_p, log_q), rtol=1e3 * beta, atol=0
        )


def test_beta_zero_and_one_are_the_two_kls() -> None:
    log_p, log_q = law(0), law(1)
    assert torch.equal(div.jensen_shannon(log_p, log_q, 0.0), div.forward_kl(log_p, log_q))
    assert torch.equal(div.jensen_shannon(log_p, log_q, 1.0), div.reverse_kl(log_p, log_q))
    assert div.divergence_named("jsd", 0.0).name == "kl"
    assert div.divergence_named("jsd", 1.0).name == "rkl"
    assert div.divergence_named("jsd", 0.3).name == "jsd"
    assert div.divergence_named("tvd", 1.0).name == "tvd"


def test_beta_weighs_the_teacher_in_mixture_and_sum() -> None:
    log_p, log_q, beta = law(0), law(1), 0.3
    p, q = log_p.exp(), log_q.exp()
    m = beta * p + (1 - beta) * q
    expected = beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)
    torch.testing.assert_close(div.jensen_shannon(log_p, log_q, beta), expected)


# --------------------------------------------------------------------------- TVD++

ONE = torch.ones((), dtype=torch.float64)


def test_rewards_that_are_not_normalised_give_the_gradient_of_total_variation() -> None:
    log_p = law(0)
    raw = Knobs(rewards=Rewards(mean=0 * ONE, deviation=ONE))
    _, plus = with_gradient(lambda z: div.tvdpp(div.whole_cells(log_p, z), raw), logits(1))
    _, plain = with_gradient(lambda z: nats("tvd", div.whole_cells(log_p, z)), logits(1))
    torch.testing.assert_close(plus, plain, rtol=1e-12, atol=1e-14)


def test_the_exact_reading_times_the_deviation_is_total_variation() -> None:
    log_p, student = law(0), logits(1)
    rewards = knobs_for(div.whole_cells(log_p, student)).rewards
    assert rewards is not None
    _, plus = with_gradient(lambda z: nats("tvdpp", div.whole_cells(log_p, z)), student)
    _, plain = with_gradient(lambda z: nats("tvd", div.whole_cells(log_p, z)), student)
    torch.testing.assert_close(plus * rewards.deviation, plain, rtol=1e-12, atol=1e-14)


def test_the_uniform_reading_is_another_direction() -> None:
    log_p, student = law(0), logits(1)
    _, plain = with_gradient(lambda z: nats("tvd", div.whole_cells(log_p, z)), student)
    _, other = with_gradient(lambda z: nats("tvdpp", div.whole_cells(log_p, z), "uniform"), student)
    assert torch.cosine_similarity(plain.flatten(), other.flatten(), dim=0) < 0.99


def test_the_uniform_reading_is_the_mean_over_all_cells() -> None:
    cells = TokenBins(log_p_NC=law(0), log_q_NC=law(1))
    rewarded = (cells.log_p_NC > cells.log_q_NC).double()
    advantage = (rewarded - rewarded.mean()) / rewarded.std(correction=0)
    expected = -(advantage * cells.log_q_NC).mean()
    torch.testing.assert_close(nats("tvdpp", cells, "uniform").mean(), expected)


@pytest.mark.parametrize(("name", "reading"), CASES)
def test_a_step_down_moves_mass_towards_the_token_that_is_drafted_too_rarely(
    name: str, reading: Reading
) -> None:
    # the third place has reward 0 throughout, so that what is drawn does not always have reward 1
    log_p = torch.tensor([[0.8, 0.2], [0.3, 0.7], [0.5, 0.5]], dtype=torch.float64).log()
    student = torch.zeros(3, 2, dtype=torch.float64)
    _, gradient = with_gradient(lambda z: nats(name, div.whole_cells(log_p, z), reading), student)
    after = torch.softmax(student - 0.1 * gradient, -1)
    assert after[0, 0] > 0.5 and after[1, 1] > 0.5


def test_statistics_pool_places_and_cells_and_survive_equal_rewards() -> None:
    log_p, log_q = law(0), law(1)
    rewards = Rewards.of(div.count_rewards(TokenBins(log_p_NC=log_p, log_q_NC=log_q)))
    pooled = (log_p > log_q).double()
    torch.testing.assert_close(rewards.mean, pooled.mean())
    torch.testing.assert_close(rewards.deviation, pooled.std(correction=0))
    for reading in READINGS:
        _, gradient = with_gradient(
            lambda z, r=reading: nats("tvdpp", div.whole_cells(torch.log_softmax(z, -1), z), r),
            logits(1),
        )
        assert not gradient.any()


def test_no_gradient_flows_through_rewards_or_weights() -> None:
    """In the exact reading d/dz_v = -q_v (A_v - sum_u q_u A_u), the score function's own form."""
    log_p, student = law(0), logits(1)
    cells = div.whole_cells(log_p, student)
    knobs = knobs_for(cells)
    assert knobs.rewards is not None
    advantage, q = knobs.rewards.advantage(cells), torch.softmax(student, -1)
    _, gradient = with_gradient(lambda z: div.tvdpp(div.whole_cells(log_p, z), knobs), student)
    expected = -q * (advantage - (q * advantage).sum(-1, keepdim=True))
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_sampled_gradients_average_to_the_exact_one() -> None:
    """The mean of n draws differs from the expectation by at most 5 standard errors, which are
    known exactly: for each of the 12 entries a false alarm has probability 6e-7."""
    draws = 40_000
    log_p, student = law(0, 1), logits(1, 1)
    cells = div.whole_cells(log_p, student)
    knobs = knobs_for(cells)
    assert knobs.rewards is not None
    _, exact = with_gradient(lambda z: div.tvdpp(div.whole_cells(log_p, z), knobs), student)
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(draws, generator=generator, dtype=torch.float64)
    sampled = replace(knobs, reading="sampled", uniform_N=uniform)

    def mean_of_draws(z: Tensor) -> Tensor:
        log_q = torch.log_softmax(z, -1).expand(draws, -1)
        return (
            div.tvdpp(TokenBins(log_p_NC=log_p.expand(draws, -1), log_q_NC=log_q), sampled) / draws
        )

    _, mean = with_gradient(mean_of_draws, student)
    q, advantage = torch.softmax(student, -1)[0], knobs.rewards.advantage(cells)[0]
    per_draw = -advantage[:, None] * (torch.eye(VOCAB, dtype=torch.float64) - q)  # one row a token
    variance = (q[:, None] * per_draw.square()).sum(0) - exact[0].square()
    assert ((mean - exact)[0].abs() <= 5 * (variance / draws).sqrt()).all()
    assert variance.max() > 0


def test_the_reading_draws_is_equation_one_with_the_sign_of_lemma_one() -> None:
    """Four places of three tokens: draws b, a, a, b with rewards 1, 1, 0, 1, counted by hand."""
    p = [[0.1, 0.6, 0.3], [0.7, 0.2, 0.1], [0.2, 0.5, 0.3], [0.3, 0.4, 0.3]]
    q = [[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.4, 0.25, 0.35], [0.45, 0.35, 0.2]]
    uniform = torch.tensor([0.6, 0.1, 0.2, 0.5], dtype=torch.float64)
    tokens, rewards = [1, 0, 0, 1], [1.0, 1.0, 0.0, 1.0]
    mean, deviation = 3 / 4, 3**0.5 / 4  # of these four; of all twelve cells both are 1/2
    advantages = [(r - mean) / deviation for r in rewards]
    log_p = torch.tensor(p, dtype=torch.float64).log()
    student = torch.tensor(q, dtype=torch.float64).log()

    def values_of(z: Tensor) -> Tensor:
        cells = div.whole_cells(log_p, z)
        counted = div.count_rewards(cells, div.drawn(cells.log_q_NC, uniform))
        knobs = Knobs(reading="draws", rewards=Rewards.of(counted), uniform_N=uniform)
        return div.tvdpp(cells, knobs)

    values, gradient = with_gradient(values_of, student)
    for place, (token, advantage) in enumerate(zip(tokens, advantages, strict=True)):
        assert values[place].item() == pytest.approx(-advantage * math.log(q[place][token]))
        for v in range(3):  # of -A log softmax(z)[token]: -A ([v is the token] - q_v)
            expected = -advantage * ((v == token) - q[place][v])
            assert gradient[place, v].item() == pytest.approx(expected, abs=1e-12)
    other = Rewards.of(div.count_rewards(div.whole_cells(log_p, student)))
    assert (other.mean, other.deviation) == (0.5, 0.5)


def test_draws_follow_the_law_and_never_hit_a_cell_without_mass() -> None:
    q = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64).expand(4, -1)
    cells = TokenBins(log_p_NC=q.log(), log_q_NC=q.log().requires_grad_())
    uniform = torch.tensor([0.0, 0.25, 0.7499, 1 - 1e-12], dtype=torch.float64)
    raw = Rewards(mean=-ONE, deviation=ONE)  # so that the advantage is 1 and the loss -log q(x)
    loss = div.tvdpp(cells, Knobs(reading="sampled", rewards=raw, uniform_N=uniform))
    (gradient,) = torch.autograd.grad(loss.sum(), cells.log_q_NC)
    assert (gradient != 0).nonzero()[:, 1].tolist() == [1, 3, 3, 4]


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"--objective.*'helinger'.*mean.*'hellinger'"):
        div.divergence_named("helinger")
