"""What each treatment of a truncated teacher means, and numbers that hurt."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.small_laws import (
    CASES,
    PLACES,
    PROPER,
    TAILS,
    TAUGHT,
    VOCAB,
    law,
    logits,
    nats,
    top,
    truncated,
    with_gradient,
)
from torch import Tensor

from draftsmith.core.types import TopLogprobs
from draftsmith.distill.objectives import divergence as div
from draftsmith.distill.objectives.divergence import Reading, Tail, TokenBins
from draftsmith.errors import InputError


@pytest.mark.parametrize(("name", "reading"), CASES)
@pytest.mark.parametrize("tail", TAILS)
def test_keeping_every_token_is_the_whole_law(name: str, tail: Tail, reading: Reading) -> None:
    log_p, student = law(0), logits(1)
    log_p[0, :2] -= 30  # below any floor
    log_p = torch.log_softmax(log_p, -1)
    laws = top(log_p, VOCAB)
    whole = with_gradient(lambda z: nats(name, div.whole_cells(log_p, z), reading), student)
    kept = with_gradient(
        lambda z: nats(name, truncated(name, laws, z, tail, floor=1e-6), reading), student
    )
    for one, other in zip(kept, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", TAUGHT)
def test_a_bucket_is_the_divergence_of_coarser_laws(name: str) -> None:
    log_p, student = law(0), logits(1)
    laws = top(log_p, 4)
    p, q = log_p.exp(), torch.softmax(student, -1)

    def coarse(values: Tensor) -> Tensor:
        inside = values.gather(-1, laws.ids_NK)
        return torch.cat([inside, values.sum(-1, keepdim=True) - inside.sum(-1, keepdim=True)], -1)

    expected = nats(name, TokenBins(log_p_NC=coarse(p).log(), log_q_NC=coarse(q).log()))
    torch.testing.assert_close(nats(name, truncated(name, laws, student, "bucket")), expected)


@pytest.mark.parametrize("name", PROPER)
def test_a_bucket_is_a_lower_bound(name: str) -> None:
    log_p, student = law(0, 50), logits(1, 50)
    true = nats(name, div.whole_cells(log_p, student))
    bounds = [nats(name, truncated(name, top(log_p, k), student, "bucket")) for k in (2, 5, 9)]
    for low, high in zip(bounds, [*bounds[1:], true], strict=True):
        assert (low <= high + 1e-12).all()
    assert (bounds[0] < true - 1e-3).any()


def test_renormalised_values_are_the_sparse_formulas() -> None:
    log_p, student = law(0), logits(1)
    laws = top(log_p, 4)
    hat = torch.softmax(laws.log_p_NK, -1)
    q = torch.softmax(student, -1).gather(-1, laws.ids_NK)
    rho, m = 1 - q.sum(-1), (hat + q) / 2
    q_hat = q / q.sum(-1, keepdim=True)
    expected = {
        "kl": (hat * (hat / q).log()).sum(-1),
        "rkl": (q_hat * (q_hat / hat).log()).sum(-1),
        "jsd": ((hat * (hat / m).log() + q * (q / m).log()).sum(-1) + rho * math.log(2)) / 2,
        "hellinger": 1 - (hat * q).sqrt().sum(-1),
        "tvd": ((hat - q).abs().sum(-1) + rho) / 2,
        "lk": -torch.minimum(hat, q).sum(-1).log(),
    }
    for name, value in expected.items():
        got = nats(name, truncated(name, laws, student, "renormalise"))
        torch.testing.assert_close(got, value, msg=lambda text, name=name: f"{name}: {text}")


def test_a_floor_charges_its_logarithm_per_unit_of_mass_outside() -> None:
    """rkl of p with every entry raised to the floor, up to the constant that makes p sum to 1."""
    log_p, student, floor = law(0), logits(1), 1e-3
    laws = top(log_p, 4)
    hat = torch.zeros(PLACES, VOCAB, dtype=torch.float64)
    hat.scatter_(-1, laws.ids_NK, torch.softmax(laws.log_p_NK, -1))
    q = torch.softmax(student, -1)
    raised = hat.clamp(min=floor)
    charged = (q * q.log()).sum(-1) - (q * raised.log()).sum(-1)
    got = nats("rkl", truncated("rkl", laws, student, "floor", floor=floor))
    torch.testing.assert_close(got, charged + raised.sum(-1).log())


@pytest.mark.parametrize(("name", "reading"), CASES)
@pytest.mark.parametrize("tail", TAILS)
def test_empty_cells_of_a_law_change_nothing(name: str, tail: Tail, reading: Reading) -> None:
    """Token 0 stands in for `nothing`: once it is kept as well, once it lies outside."""
    log_p = law(0, 2)
    log_p[0, 0], log_p[1, 0] = 3.0, -9.0
    log_p = torch.log_softmax(log_p, -1)
    laws = top(log_p, 4)
    assert (laws.ids_NK[0] == 0).any() and not (laws.ids_NK[1] == 0).any()
    padded = TopLogprobs(
        ids_NK=torch.cat([laws.ids_NK, torch.zeros(2, 3, dtype=torch.long)], -1),
        log_p_NK=torch.nn.functional.pad(laws.log_p_NK, (0, 3), value=-math.inf),
    )
    plain, filled = (
        with_gradient(
            lambda z, which=which: nats(name, truncated(name, which, z, tail, floor=1e-4), reading),
            logits(1, 2),
        )
        for which in (laws, padded)
    )
    for one, other in zip(filled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def descend(
    loss: Callable[[Tensor], Tensor], student: Tensor, outside: Tensor, steps: int = 1200
) -> tuple[float, float]:
    """Mass outside the kept tokens, before and after gradient descent on one place's logits."""
    student = student.clone().requires_grad_()
    optimizer = torch.optim.Adam([student], lr=0.05)
    before = torch.softmax(student.detach(), -1)[0, outside].sum().item()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(student).sum().backward()
        optimizer.step()
    return before, torch.softmax(student.detach(), -1)[0, outside].sum().item()


FLOOR = 1e-4


@pytest.mark.full
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", PROPER)
def test_descent_leaves_outside_what_the_teacher_has_there(name: str, tail: Tail) -> None:
    log_p = law(0, 1)
    laws = top(log_p, 4)
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[laws.ids_NK[0]] = False
    student = logits(1, 1, scale=0.3)
    before, after = descend(
        lambda z: nats(name, truncated(name, laws, z, tail, floor=FLOOR)), student, outside
    )
    floors = 8 * FLOOR / (1 + 8 * FLOOR)
    wanted = {
        "bucket": log_p.exp()[0, outside].sum().item(),
        "renormalise": before if name == "rkl" else 0.0,  # rkl: nothing pulls it in, or pushes
        "floor": floors,
    }[tail]
    assert before > 0.5
    # What is left is a descent cut short, and the zigzag of tvd and lk about their kink.
    assert after == pytest.approx(wanted, abs=0.005)


def test_the_unnormalised_reverse_kl_would_push_mass_out() -> None:
    """What ours must not do, and proof that the descent above can see it: 1 - 1/e ends outside."""
    laws = top(law(0, 1), 4)
    hat = torch.log_softmax(laws.log_p_NK, -1)
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[laws.ids_NK[0]] = False

    def ignore(z: Tensor) -> Tensor:
        log_q = torch.log_softmax(z, -1).gather(-1, laws.ids_NK)
        return (log_q.exp() * (log_q - hat)).sum(-1)

    student = torch.zeros(1, VOCAB, dtype=torch.float64)
    student[0, laws.ids_NK[0]] = 5.0
    before, after = descend(ignore, student, outside)
    assert before < 0.02
    assert after == pytest.approx(1 - 1 / math.e, abs=0.01)


@pytest.mark.parametrize("name", PROPER)
@pytest.mark.parametrize("tail", TAILS)
def test_no_tail_pushes_mass_out_of_a_support_that_is_learnt(name: str, tail: Tail) -> None:
    """q is p on the kept tokens but for a factor: only the mass inside can be wrong. The slope of
    raising all kept logits at once is downhill where q has more outside than p, as far as a
    divergence cares."""
    log_p = law(0, 1)
    laws = top(log_p, 4)
    for extra in (0.5, 2.0, 6.0):
        student = log_p.clone()
        student[0, laws.ids_NK[0]] -= extra
        _, gradient = with_gradient(
            lambda z: nats(name, truncated(name, laws, z, tail, floor=FLOOR)), student
        )
        slope = gradient[0, laws.ids_NK[0]].sum().item()
        if (name, tail) == ("rkl", "renormalise"):
            assert abs(slope) < 1e-12
        else:
            assert slope < -1e-6


# --------------------------------------------------------------------------- temperature


def test_kept_tokens_are_tempered_as_the_whole_law_is() -> None:
    log_p, student = law(0), logits(1)
    laws = top(log_p, 4)
    for temperature in (0.7, 2.0):
        hot = torch.log_softmax(log_p / temperature, -1).gather(-1, laws.ids_NK)
        expected = nats("kl", truncated("kl", replace(laws, log_p_NK=hot), student, "renormalise"))
        cells = truncated("kl", laws, student, "renormalise", temperature=temperature)
        torch.testing.assert_close(nats("kl", cells), expected)


def test_a_bucket_has_no_meaning_at_another_temperature() -> None:
    with pytest.raises(InputError, match=r"temperature 1, not 0.7.*renormalise"):
        truncated("kl", top(law(0), 4), logits(1), "bucket", temperature=0.7)


# --------------------------------------------------------------------------- numbers that hurt


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("name", TAUGHT)
def test_a_law_that_sums_to_more_than_one_by_rounding_stays_finite(name: str, tail: Tail) -> None:
    log_p = torch.tensor([[0.7, 0.3]]).log() + 1e-6
    laws = TopLogprobs(ids_NK=torch.tensor([[2, 5]]), log_p_NK=log_p)
    student = logits(1, 1).float()
    values, gradient = with_gradient(lambda z: nats(name, truncated(name, laws, z, tail)), student)
    assert torch.isfinite(values).all() and torch.isfinite(gradient).all()


@pytest.mark.parametrize(("name", "reading"), CASES)
@pytest.mark.parametrize("tail", TAILS)
def test_saturated_students_keep_finite_gradients(name: str, tail: Tail, reading: Reading) -> None:
    laws = top(law(0).float(), 4)
    laws = replace(laws, log_p_NK=laws.log_p_NK.float())
    student = logits(1).float() * 200
    values, gradient = with_gradient(
        lambda z: nats(name, truncated(name, laws, z, tail), reading), student
    )
    assert torch.isfinite(values).all() and torch.isfinite(gradient).all()


def test_a_tiny_mass_outside_keeps_its_digits() -> None:
    """q(rest) of 1e-12 is nothing beside 1 in float32; the pull towards p(rest) must survive."""
    laws = TopLogprobs(ids_NK=torch.tensor([[0, 1]]), log_p_NK=torch.tensor([[0.6, 0.3]]).log())
    student = torch.full((1, VOCAB), -28.0)
    student[0, :2] = torch.tensor([0.6, 0.4]).log()
    results = []
    for dtype in (torch.float32, torch.float64):
        results.append(
            with_gradient(
                lambda z: nats("kl", truncated("kl", laws, z, "bucket")), student.to(dtype)
            )
        )
    (value, gradient), (true_value, true_gradient) = results
    torch.testing.assert_close(value.double(), true_value, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-5, atol=1e-7)
    assert true_gradient[0, 2:].sum() == pytest.approx(-0.1, rel=1e-5)


@pytest.mark.parametrize(("name", "reading"), [case for case in CASES if case[0] != "kl"])
@pytest.mark.parametrize("tail", TAILS)
def test_tokens_that_the_student_cannot_produce_leave_gradients_finite(
    name: str, tail: Tail, reading: Reading
) -> None:
    """A head over part of the vocabulary gives -inf elsewhere: outside the kept tokens, and in."""
    laws = top(law(0), 4)
    student = logits(1)
    student[0, :6] = -math.inf
    student[1, laws.ids_NK[1, 1:]] = -math.inf
    student[2] = student[2].where(
        torch.zeros(VOCAB).scatter(0, laws.ids_NK[2], 1).bool(), -math.inf
    )
    _, gradient = with_gradient(
        lambda z: nats(name, truncated(name, laws, z, tail), reading), student
    )
    assert torch.isfinite(gradient).all()


def test_forward_kl_is_infinite_where_the_student_cannot_follow() -> None:
    student = logits(1)
    student[0, 3] = -math.inf
    values = nats("kl", div.whole_cells(law(0), student))
    assert values[0] == math.inf and torch.isfinite(values[1:]).all()
    assert nats("rkl", div.whole_cells(torch.log_softmax(student, -1), logits(2)))[0] == math.inf
    laws = top(law(0), 4)
    kept = torch.zeros(PLACES, VOCAB).scatter(-1, laws.ids_NK, 1).bool()
    nothing_outside = logits(1).where(kept, -math.inf)
    assert (nats("kl", truncated("kl", laws, nothing_outside, "bucket")) == math.inf).all()
    assert (nats("kl", truncated("kl", laws, nothing_outside, "renormalise")) < math.inf).all()


def test_floors_that_outweigh_the_law_are_refused() -> None:
    with pytest.raises(InputError, match=r"floor 0.1 times 12"):
        truncated("kl", top(law(0), 4), logits(1), "floor", floor=0.1)
