"""The chunked objective equals its dense twin in value and gradient, imitates the right law at the
right place, and never makes all logits."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.small_laws import CASES, TAILS, top
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dense_objectives import dense_distillation
from draftsmith.core.types import DraftPrediction, FullLogprobs, TopLogprobs, TrajectoryBatch
from draftsmith.distill.objectives import distillation
from draftsmith.distill.objectives.distillation import (
    Acceptance,
    CrossEntropy,
    Distillation,
    LossTerms,
    Objective,
)
from draftsmith.distill.objectives.divergence import DIVERGENCES, Reading, Tail
from draftsmith.errors import InputError

B, T, H, V, K = 3, 9, 6, 23, 5
Compute = Callable[[DraftPrediction, TrajectoryBatch, Callable[[Tensor], Tensor]], LossTerms]


class Setup:
    """Random states and weights of student and teacher; about half of the places have a law."""

    def __init__(self, dtype: torch.dtype = torch.float64, vocab: int = V) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.hidden = randn(B, T, H).requires_grad_()
        self.weight = randn(vocab, H).requires_grad_()
        self.teacher_weight = randn(vocab, H).requires_grad_()
        self.teacher_hidden = randn(B * T, H)
        self.log_p = torch.log_softmax(self.teacher_hidden @ self.teacher_weight.T, -1).detach()
        order = torch.randperm(B * T, generator=generator).view(B, T)
        chosen = torch.rand(B, T, generator=generator)
        self.mask = torch.ones(B, T, dtype=torch.bool)
        self.mask[1, :2] = False
        self.batch = TrajectoryBatch(
            tokens_BT=torch.randint(0, vocab, (B, T), generator=generator),
            loss_mask_BT=torch.rand(B, T, generator=generator) > 0.2,
            law_row_BT=order.where(chosen > 0.4, -1),
            weights_BT=torch.rand(B, T, generator=generator) + 0.1,
        )

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T

    def full(self) -> FullLogprobs:
        return FullLogprobs(hidden_NH=self.teacher_hidden, head=lambda h: h @ self.teacher_weight.T)

    def top(self, k: int = K) -> TopLogprobs:
        laws = top(self.log_p, k)
        if k < self.log_p.shape[1]:  # a place that kept fewer tokens than others
            laws.ids_NK[4, -1], laws.log_p_NK[4, -1] = 0, -math.inf
        return laws

    def prediction(self, ahead: int = 1) -> DraftPrediction:
        return DraftPrediction(hidden_BTH=self.hidden, mask_BT=self.mask, ahead=ahead)

    def run(
        self, compute: Compute, laws: TopLogprobs | FullLogprobs, ahead: int = 1
    ) -> list[Tensor]:
        """Value, weight, and the gradients in the states and the head's weight."""
        for leaf in (self.hidden, self.weight, self.teacher_weight):
            leaf.grad = None
        torch.manual_seed(0)  # for the reading that draws
        terms = compute(self.prediction(ahead), replace(self.batch, laws=laws), self.head)
        terms.total.backward()
        assert self.teacher_weight.grad is None, "the teacher learns"
        assert self.hidden.grad is not None and self.weight.grad is not None
        return [terms.total.detach(), terms.weight, self.hidden.grad, self.weight.grad]


def dense(objective: Distillation) -> Compute:
    return partial(dense_distillation, objective)


def assert_same(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-9) -> None:
    for one, other in zip(got, expected, strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance * scale, check_dtype=False
        )


def chosen(name: str, reading: Reading, **more: Any) -> Distillation:
    """An objective with the options that its divergence has."""
    if "reading" in DIVERGENCES[name].options:
        more["reading"] = reading
    if "beta" in DIVERGENCES[name].options:
        more.setdefault("beta", 0.3)
    return Distillation(objective=name, **more)


# --------------------------------------------------------------------------- the twin


@pytest.mark.parametrize(
    ("tail", "temperature"),
    [(tail, 1.0) for tail in (*TAILS, "whole")]
    + [(tail, 0.6) for tail in ("renormalise", "floor", "whole")],
)
@pytest.mark.parametrize(("name", "reading"), CASES)
@pytest.mark.every(4)
def test_chunks_give_the_value_and_gradient_of_the_dense_twin(
    name: str, reading: Reading, tail: Tail, temperature: float
) -> None:
    setup = Setup()
    options: dict[str, Any] = {} if tail == "whole" else {"tail": tail}
    laws = setup.full() if tail == "whole" else setup.top()
    objective = chosen(name, reading, teacher_temperature=temperature, **options)
    expected = setup.run(dense(objective), laws, ahead=2)
    for cells in (1, 4 * V + 3, 10**6):  # one place at a time, four, all
        got = setup.run(replace(objective, cells=cells).loss, laws, ahead=2)
        assert_same(got, expected)
    assert expected[2].any()


@pytest.mark.parametrize("tail", [*TAILS, "whole"])
@pytest.mark.parametrize(("name", "reading"), CASES)
def test_below_a_frozen_head_states_learn_as_below_one_that_learns(
    name: str, reading: Reading, tail: Tail
) -> None:
    """Their gradient is computed with the loss, so also of a loss that is scaled afterwards."""
    setup = Setup()
    options: dict[str, Any] = {"cells": 4 * V} | ({} if tail == "whole" else {"tail": tail})
    laws = setup.full() if tail == "whole" else setup.top()
    objective = chosen(name, reading, teacher_temperature=1.0, **options)
    value, _, learning, _ = setup.run(objective.loss, laws)
    setup.weight.requires_grad_(False)
    setup.hidden.grad = None
    torch.manual_seed(0)
    total = objective.loss(setup.prediction(), replace(setup.batch, laws=laws), setup.head).total
    (total * 3).backward()
    assert setup.hidden.grad is not None and setup.hidden.grad.any()
    torch.testing.assert_close(total.detach(), value)
    torch.testing.assert_close(setup.hidden.grad, 3 * learning)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("name", "reading"), CASES)
def test_keeping_every_token_is_the_whole_law(name: str, reading: Reading, tail: Tail) -> None:
    setup = Setup()
    objective = chosen(name, reading, tail=tail)
    whole = setup.run(objective.loss, setup.full())
    # Ids ascend, so that the reading that draws meets the cells in the same order.
    assert_same(setup.run(objective.loss, setup.top(V)), whole)


@pytest.mark.parametrize("name", [name for name, reading in CASES if reading == "exact"])
def test_a_whole_law_may_stand_in_any_order(name: str) -> None:
    setup = Setup()
    objective, laws = chosen(name, "exact"), setup.top(V)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(1))
    mixed = TopLogprobs(ids_NK=laws.ids_NK[:, order], log_p_NK=laws.log_p_NK[:, order])
    assert not torch.equal(mixed.ids_NK, laws.ids_NK)
    assert_same(setup.run(objective.loss, mixed), setup.run(objective.loss, laws))


def test_sft_and_places_without_a_law_learn_tokens_as_cross_entropy_does() -> None:
    setup = Setup()
    setup.batch = replace(setup.batch, weights_BT=None)
    plain = setup.run(CrossEntropy().loss, setup.top())
    # CrossEntropy works in float32.
    assert_same(setup.run(Distillation(objective="sft").loss, setup.top()), plain, 1e-6)
    setup.batch = replace(setup.batch, law_row_BT=None)
    assert_same(setup.run(Distillation(objective="rkl").loss, setup.top()), plain, 1e-6)


@pytest.mark.parametrize("teacher_of", [Setup.top, Setup.full])
def test_half_precision_states_are_compared_in_float32(teacher_of: Callable[..., Any]) -> None:
    half = Setup(torch.bfloat16)
    teacher = teacher_of(half)
    got = half.run(Distillation(objective="rkl", cells=4 * V).loss, teacher)
    # The same logits: those that the head rounded to bfloat16, taken from there on in float64.
    wide = half.run(
        lambda prediction, batch, head: dense_distillation(
            Distillation(objective="rkl"), prediction, batch, lambda h: head(h).double()
        ),
        teacher,
    )
    assert got[0].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), wide[0], rtol=1e-5, atol=0)
    assert_same(got[2:], wide[2:], tolerance=2e-2)  # sums of gradients in bfloat16


# --------------------------------------------------------------------------- places


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_place_imitates_the_law_of_the_token_that_it_predicts(ahead: int) -> None:
    """position       0    1    2    3
    law_row_BT        -    7    8    9         ahead 1: 0 1 2 learn 7 8 9;  ahead 2: 0 1 learn 8 9
    """
    setup = Setup()
    rows = torch.tensor([[-1, 7, 8, 9]])
    hidden = torch.zeros(1, 4, H, dtype=torch.float64)
    learnt = rows[0, ahead:]
    hidden[0, : 4 - ahead] = setup.teacher_hidden[learnt]
    batch = TrajectoryBatch(
        tokens_BT=torch.zeros(1, 4, dtype=torch.long),
        loss_mask_BT=torch.ones(1, 4, dtype=torch.bool),
        laws=setup.full(),
        law_row_BT=rows,
    )
    mask = torch.ones(1, 4, dtype=torch.bool)
    prediction = DraftPrediction(hidden_BTH=hidden, mask_BT=mask, ahead=ahead)
    objective = Distillation(objective="kl", cells=V)
    right = objective.loss(prediction, batch, lambda h: h @ setup.teacher_weight.T)
    assert right.weight == 4 - ahead
    assert abs(right.total.item()) < 1e-12
    shifted = replace(prediction, hidden_BTH=hidden.roll(1, dims=1))
    wrong = objective.loss(shifted, batch, lambda h: h @ setup.teacher_weight.T)
    assert wrong.total > 0.1


def test_weights_scale_places_and_are_summed() -> None:
    setup = Setup()
    objective = Distillation(objective="jsd", cells=2 * V)
    total, weight, hidden, _ = setup.run(objective.loss, setup.top())
    counted = setup.mask & setup.batch.mask_ahead(1)
    torch.testing.assert_close(weight, setup.batch.weights_ahead(1)[counted].sum())
    assert setup.batch.weights_BT is not None
    setup.batch = replace(setup.batch, weights_BT=2 * setup.batch.weights_BT)
    assert_same(setup.run(objective.loss, setup.top())[:3], [2 * total, 2 * weight, 2 * hidden])
    row, position = counted.nonzero()[0].tolist()
    alone = torch.zeros(B, T)
    alone[row, position + 1] = 3.0
    setup.batch = replace(setup.batch, weights_BT=alone)
    _, weight, hidden, _ = setup.run(objective.loss, setup.top())
    assert weight == 3.0
    assert hidden.abs().sum(-1).nonzero().tolist() == [[row, position]]


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_trajectories_that_share_a_weight_of_one_are_a_single_one(name: str) -> None:
    """N = 1 with weight 1 is no weight; four equal beams of weight 1/4 are one."""
    setup = Setup()
    setup.batch = replace(setup.batch, weights_BT=None)
    objective = Distillation(objective=name)
    single = setup.run(objective.loss, setup.top())
    setup.batch = replace(setup.batch, weights_BT=torch.ones(B, T))
    assert_same(setup.run(objective.loss, setup.top()), single, 1e-15)

    def repeated(values: Tensor | None) -> Tensor:
        assert values is not None
        return values.repeat(4, *[1] * (values.dim() - 1))

    four = replace(
        setup.batch,
        tokens_BT=repeated(setup.batch.tokens_BT),
        loss_mask_BT=repeated(setup.batch.loss_mask_BT),
        law_row_BT=repeated(setup.batch.law_row_BT),
        weights_BT=torch.full((4 * B, T), 0.25),
    )
    got = setup.run(
        lambda prediction, batch, head: objective.loss(
            replace(
                prediction,
                hidden_BTH=repeated(prediction.hidden_BTH),
                mask_BT=repeated(prediction.mask_BT),
            ),
            replace(four, laws=batch.laws),
            head,
        ),
        setup.top(),
    )
    assert_same(got, single, 1e-12)


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_nothing_counted_is_zero_with_a_zero_gradient(name: str) -> None:
    setup = Setup()
    setup.mask = torch.zeros(B, T, dtype=torch.bool)
    setup.hidden.data[0, 0, 0] = math.inf  # of no concern
    terms = Distillation(objective=name).loss(
        setup.prediction(), replace(setup.batch, laws=setup.top()), setup.head
    )
    terms.total.backward()
    assert terms.total == 0 and terms.weight == 0
    assert setup.hidden.grad is not None and not setup.hidden.grad.any()


# --------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """Watches the size of every tensor that an operation puts out, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        self.calls += 1
        return out


@pytest.mark.parametrize("tail", [*TAILS, "whole"])
@pytest.mark.parametrize(("name", "reading"), [*CASES, ("sft", "exact")])
def test_no_tensor_is_larger_than_the_budget(name: str, reading: Reading, tail: Tail) -> None:
    vocab, budget = 5000, 8 * 5000  # the head's weight and its gradient have 5000 H = 30,000
    setup = Setup(torch.float32, vocab)
    setup.batch = replace(setup.batch, loss_mask_BT=torch.ones(B, T, dtype=torch.bool))
    whole = tail == "whole"
    options: dict[str, Any] = {} if whole or name == "sft" else {"tail": tail}
    objective = chosen(name, reading, cells=budget, **options)
    batch = replace(setup.batch, laws=setup.full() if whole else setup.top())
    seen = []
    for compute in (objective.loss, dense(replace(objective, cells=1))):
        with Largest() as forward:
            terms = compute(setup.prediction(), batch, setup.head)
        with Largest() as backward:
            terms.total.backward()
        assert backward.calls > 10, "the backward pass was not watched"
        seen.append((forward.numel, backward.numel))
    all_logits = int((setup.mask & batch.mask_ahead(1)).sum()) * vocab
    assert max(seen[0]) <= budget < all_logits
    assert min(seen[1]) >= all_logits, "the dense twin would have been caught"


@pytest.mark.parametrize(("learns", "kept"), [(False, True), (True, True), (True, False)])
def test_logits_are_not_kept_and_made_again_below_a_large_head_alone(
    learns: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "LARGEST_KEPT", V * H * 8 - (not kept))
    setup, sizes, alive = Setup(), list[int](), list[weakref.ref[Tensor]]()
    setup.weight.requires_grad_(learns)

    def head(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        logits = setup.head(hidden)
        alive.append(weakref.ref(logits))
        return logits

    batch = replace(setup.batch, laws=setup.top())
    terms = Distillation(objective="kl", cells=4 * V).loss(setup.prediction(), batch, head)
    places = int((setup.mask & batch.mask_ahead(1)).sum())
    assert not any(one() is not None for one in alive)
    terms.total.backward()
    again = 1 if kept else 2
    assert sum(sizes) == again * places + 1  # one more, to see how large the vocabulary is
    assert max(sizes) <= 4


@pytest.mark.parametrize("learns", ["all", "states", "head", "nothing"])
def test_what_learns_of_a_head_of_several_weights_learns(learns: str) -> None:
    """One weight stands twice in it, one is frozen, two have the same gradient, one acts on some
    states alone; the loss is scaled afterwards."""
    setup = Setup()
    frozen = torch.randn(V, dtype=torch.float64)
    inner, change, first, second, some = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((H, H), (V, H), (V,), (V,), (V, H))
    )

    def head(hidden: Tensor) -> Tensor:
        bent = hidden + torch.tanh(hidden @ inner) @ inner.T
        logits = bent @ (setup.weight + change).T + (first + second) + first.sum() + frozen
        routed = hidden.detach()[..., :1] > 1
        return logits + (hidden * routed) @ some.T if routed.any() else logits

    setup.hidden.requires_grad_(learns in ("all", "states"))
    weights = (setup.weight, inner, change, first, second, some)
    for weight in weights:
        weight.requires_grad_(learns in ("all", "head"))
    batch, found = replace(setup.batch, laws=setup.top()), []
    objective = Distillation(objective="jsd", cells=4 * V)
    for compute in (objective.loss, dense(objective)):
        total = compute(setup.prediction(), batch, head).total
        leaves = [one for one in (setup.hidden, *weights) if one.requires_grad]
        assert total.requires_grad == bool(leaves)
        slopes = torch.autograd.grad(3 * total, leaves) if leaves else ()
        found.append([total.detach(), *slopes])
    assert_same(*found)


def test_a_head_that_computes_in_float32_is_differentiated_in_float32() -> None:
    """Trainings run below autocast; a backward pass does not."""
    setup, found = Setup(torch.float32), []

    def head(hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return setup.head(hidden)

    batch, objective = replace(setup.batch, laws=setup.top()), Distillation(objective="kl")
    for compute in (objective.loss, dense(objective)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = compute(setup.prediction(), batch, head).total
        found.append([*torch.autograd.grad(total, (setup.hidden, setup.weight))])
    assert_same(*found, tolerance=1e-5)


# --------------------------------------------------------------------------- acceptance


def accept(setup: Setup, laws: TopLogprobs | FullLogprobs) -> LossTerms:
    batch = replace(setup.batch, laws=laws)
    with pytest.MonkeyPatch.context() as patch:  # four places at a time
        patch.setattr(distillation, "FEWEST", 1)
        patch.setattr(distillation, "CACHED", 4 * V)
        terms = Acceptance().loss(setup.prediction(), batch, setup.head)
    assert terms.weight[1] == 0, "the student lacks no token"
    return LossTerms(total=terms.total[0], weight=terms.weight[0])


def test_acceptance_is_the_overlap_of_both_laws() -> None:
    setup = Setup()
    terms = accept(setup, setup.full())
    assert not terms.total.requires_grad
    counted = setup.mask & setup.batch.mask_ahead(1) & (setup.batch.law_ahead(1) >= 0)
    expected, weight = 0.0, 0.0
    for b, t in counted.nonzero().tolist():
        scores = setup.log_p[setup.batch.law_ahead(1)[b, t]], setup.head(setup.hidden[b, t])
        p, q = (torch.softmax(score, -1) for score in scores)
        expected += (torch.minimum(p, q).sum() * setup.batch.weights_ahead(1)[b, t]).item()
        weight += setup.batch.weights_ahead(1)[b, t].item()
    assert terms.total.item() == pytest.approx(expected, rel=1e-12)
    assert terms.weight.item() == pytest.approx(weight, rel=1e-6)
    kept = accept(setup, setup.top(V))
    torch.testing.assert_close(kept.total, terms.total, rtol=1e-12, atol=0)


def test_a_student_that_is_the_teacher_is_accepted() -> None:
    setup = Setup()
    setup.batch = replace(setup.batch, law_row_BT=torch.arange(B * T).view(B, T).roll(1, 1))
    setup.hidden.data, setup.weight.data = setup.teacher_hidden.view(B, T, H), setup.teacher_weight
    terms = accept(setup, setup.full())
    torch.testing.assert_close(terms.total.float(), terms.weight)


def test_acceptance_of_truncated_laws_is_a_lower_bound_that_closes() -> None:
    setup = Setup()
    setup.weight.data = setup.teacher_weight.data + 0.3 * setup.weight.data
    true = accept(setup, setup.full()).total
    bounds = [accept(setup, setup.top(k)).total for k in (2, 5, 12, V - 1)]
    assert all(low <= high for low, high in zip(bounds, [*bounds[1:], true], strict=True))
    assert bounds[0] < 0.999 * true and bounds[-1] > 0.95 * true


def test_the_lower_bound_is_attained_by_a_flat_teacher() -> None:
    """Each of K kept tokens has 1 / V; a student that drafts no others."""
    setup = Setup()
    flat = TopLogprobs(
        ids_NK=torch.arange(K).expand(B * T, K),
        log_p_NK=torch.full((B * T, K), -math.log(V), dtype=torch.float64),
    )
    setup.weight.data.zero_()
    setup.weight.data[:K, 0] = 1000.0
    setup.hidden.data[..., 0] = 1.0
    terms = accept(setup, flat)
    torch.testing.assert_close(terms.total, terms.weight.double() * K / V)


def test_acceptance_and_total_variation_sum_to_the_weight() -> None:
    setup = Setup()
    taught = setup.batch.law_ahead(0) >= 0
    setup.batch = replace(setup.batch, loss_mask_BT=setup.batch.loss_mask_BT & taught)
    distance = setup.run(Distillation(objective="tvd").loss, setup.full())
    overlap = accept(setup, setup.full())
    torch.testing.assert_close(distance[0] + overlap.total, overlap.weight.double())


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "tvpp"}, "no --objective 'tvpp'; did you mean 'tvdpp'"),
        (
            {"objective": "kl", "teacher_temperature": 0.0},
            "--teacher-temp.* above 0.*--objective sft",
        ),
        ({"objective": "jsd", "beta": 1.5}, "--beta must lie between 0 and 1"),
        ({"objective": "kl", "cells": 0}, "cells and top are at least 1"),
        ({"objective": "kl", "tail": "nonsense"}, "there is no --tail 'nonsense'"),
        ({"objective": "tvdpp", "reading": "exat"}, "no --reading 'exat'; did you mean 'exact'"),
        (
            {"objective": "kl", "beta": 0.3},
            "--beta 0.3 means nothing to --objective kl, only",
        ),
        (
            {"objective": "sft", "teacher_temperature": 0.5},
            "--teacher-temperature 0.5 means",
        ),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Distillation(**options)


@pytest.mark.parametrize("objective", [Distillation(objective="kl"), Acceptance()])
def test_laws_that_cannot_be_the_students_are_refused(objective: Objective) -> None:
    setup = Setup()
    foreign = replace(setup.top(), ids_NK=setup.top().ids_NK + V - 3)
    empty = replace(setup.top(), log_p_NK=torch.full((B * T, K), -math.inf))
    for laws, message in (
        (foreign, f"the student's vocabulary has {V}"),
        (empty, "logprobs without any token"),
        (None, "carries no laws"),
    ):
        with pytest.raises(InputError, match=message):
            objective.loss(setup.prediction(), replace(setup.batch, laws=laws), setup.head)
