"""Figures per depth, against the same figures written with plain loops over places and depths."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small_chains import DEPTHS, B, H, Held, T, Unrolled, V, expected, made, same_text
from tests.small_laws import top
from tests.small_trainer import CONFIG, VOCAB, Bigram, make_trainer
from torch import Tensor

from draftsmith.core.types import (
    DraftPrediction,
    FullLogprobs,
    NarrowHead,
    TopLogprobs,
    TrajectoryBatch,
)
from draftsmith.distill.callbacks import Callback
from draftsmith.distill.distributed import Learner
from draftsmith.distill.evaluation import (
    FIGURES,
    AcceptanceEvaluation,
    ChainEvaluation,
    Chains,
    Evaluation,
    sums_of,
)
from draftsmith.distill.objectives import distillation
from draftsmith.distill.objectives.distillation import (
    LossTerms,
    gather,
    masks,
)
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.fspad import Fspad
from draftsmith.drafters.griffin import Griffin
from draftsmith.drafters.hass import Hass
from draftsmith.drafters.medusa import Medusa
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

LAWS = ["full", "top", "none"]
OUTSIDE = FIGURES.index("outside")


def held(laws: str) -> Held:
    return Held([made(laws, seed, rows=rows) for seed, rows in ((0, 3), (1, 3), (2, 1))])


@pytest.fixture(autouse=True)
def seven_places_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "FEWEST", 1)
    monkeypatch.setattr(distillation, "CACHED", 7 * V)


def chains(batches: Held, **changes: Any) -> ChainEvaluation:
    options: dict[str, Any] = {"batches": batches, "objective": Chains()}
    return ChainEvaluation(**(options | changes))


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(8, layers=8)


# --------------------------------------------------------------------------- the figures


@pytest.mark.parametrize("laws", LAWS)
def test_a_draft_vocabulary_is_measured_as_if_it_were_all_tokens(laws: str) -> None:
    """What it lacks is never drafted, and never accepted."""
    batch, generator = made(laws, 0, rows=3), torch.Generator().manual_seed(0)
    ids_D = torch.arange(0, V, 2)
    weight_HD = torch.randn(H, len(ids_D), generator=generator)

    def own(states: Tensor) -> Tensor:
        return states @ weight_HD

    def widened(states: Tensor) -> Tensor:
        logits = torch.full((*states.shape[:-1], V), -torch.inf)
        return logits.index_copy(-1, ids_D, own(states))

    seen: list[int] = []

    def wide_head(states: Tensor) -> Tensor:
        seen.append(len(states))
        return widened(states)

    both = Chains(), Chains()
    for step in range(DEPTHS):
        wide = DraftPrediction(
            hidden_BTH=torch.randn(*batch.tokens_BT.shape, H, generator=generator),
            mask_BT=torch.ones_like(batch.tokens_BT, dtype=torch.bool),
            ahead=2 + step,
        )
        narrow = replace(wide, narrow=NarrowHead(ids_D=ids_D, head=own))
        one = both[0].loss(wide, batch, widened)
        other = both[1].loss(narrow, batch, wide_head)
        # its own vocabulary is what the mass outside is of
        assert not one.weight[OUTSIDE] and bool(other.weight[OUTSIDE] > 0) == (laws != "none")
        same = [column for column in range(len(FIGURES)) if column != OUTSIDE]
        torch.testing.assert_close(one.total[same], other.total[same])
        assert torch.equal(one.weight[same], other.weight[same])
        assert step or one.total[FIGURES.index("survival")] > 0
    assert (seen == [1] * DEPTHS) == (laws != "full")  # it is asked for its size


@pytest.mark.parametrize("narrows", [False, True])
def test_laws_of_another_vocabulary_are_refused(narrows: bool) -> None:
    batch, ids_D = made("top", 0, rows=1), torch.arange(0, V, 2)
    prediction = DraftPrediction(
        hidden_BTH=torch.zeros(1, T, H), mask_BT=torch.ones(1, T, dtype=torch.bool), ahead=2
    )
    if narrows:
        head = NarrowHead(ids_D=ids_D, head=lambda states: states @ torch.ones(H, len(ids_D)))
        prediction = replace(prediction, narrow=head)
    assert isinstance(batch.laws, TopLogprobs)
    foreign = replace(batch.laws, ids_NK=batch.laws.ids_NK + V)
    empty = replace(batch.laws, log_p_NK=torch.full_like(batch.laws.log_p_NK, -torch.inf))
    for laws, said in ((foreign, "vocabulary"), (empty, "without any token"), (None, "no laws")):
        with pytest.raises(InputError, match=said):
            Chains().loss(prediction, replace(batch, laws=laws), lambda one: one @ torch.ones(H, V))


@pytest.mark.parametrize("known", [None, {0, 2}], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("laws", LAWS)
def test_figures_are_those_of_plain_loops(
    tmp_path: Path, laws: str, known: set[int] | None
) -> None:
    batches, drafter = held(laws), Unrolled(known=known)
    trainer = make_trainer(tmp_path, drafter=drafter, evaluation=chains(batches))
    found = trainer.evaluate()
    with torch.no_grad():
        wanted = expected(batches.batches, drafter.logits_at, begins=drafter.begins, known=known)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert ("outside_1" in found) == (known is not None and laws != "none")
    # so that no figure is right because nothing happens in it
    if laws != "none":
        assert 0 < found["survival_3"] < found["survival_2"] < found["survival_1"] < 1
        assert known is None or 0 < found["outside_1"] < 1 - found["acceptance_1"]
        assert found["survival_t1_3"] < found["survival_t1_2"] < found["survival_t1_1"]
        assert 0 < found["uncounted_t1_1"] < found["uncounted_t1_3"] < 1
    else:
        kept = ("survival_", "misaligned_", "tokens_per_step", "uncounted_")
        assert all(name.startswith(kept) for name in found)
        assert "tokens_per_step_t1" not in found and found["uncounted_t1_2"] == 1


@pytest.mark.parametrize("laws", ["full", "top"])
def test_no_drafter_is_accepted_more_than_the_mass_inside_its_vocabulary(laws: str) -> None:
    """One that says the target's law over its tokens is accepted just as often; of a law cut to its
    best tokens the rest counts as inside, which leaves the bound above that of the whole law."""
    batch, ids_D = made("full", 0, rows=3), torch.tensor([0, 2])
    whole = batch.laws
    assert isinstance(whole, FullLogprobs)
    prediction = DraftPrediction(
        hidden_BTH=whole.hidden_NH[batch.law_ahead(2).clamp(min=0)],
        mask_BT=torch.ones_like(batch.tokens_BT, dtype=torch.bool),
        ahead=2,
        narrow=NarrowHead(ids_D=ids_D, head=lambda states: whole.head(states)[..., ids_D]),
    )
    bound = 1 - measured(prediction, batch, whole.head)["outside"]
    if laws == "full":
        assert measured(prediction, batch, whole.head)["acceptance"] == pytest.approx(bound)
        assert 0.1 < bound < 0.9
        return
    cut = replace(batch, laws=top(whole.head(whole.hidden_NH).log_softmax(-1), V - 1))
    found = measured(prediction, cut, whole.head)
    assert found["acceptance"] < bound < 1 - found["outside"] < 1


def measured(prediction: DraftPrediction, batch: TrajectoryBatch, head: Any) -> dict[str, float]:
    """The means at the first depth; `head` is over all tokens."""
    assert prediction.narrow is not None
    ids_D = prediction.narrow.ids_D

    def widened(states: Tensor) -> Tensor:
        logits = head(states)
        return torch.full_like(logits, -torch.inf).index_copy(-1, ids_D, logits[..., ids_D])

    terms = Chains().loss(prediction, batch, widened)
    return dict(zip(FIGURES, (terms.total / terms.weight).tolist(), strict=True))


@pytest.mark.parametrize("draft_vocab", [0, 5])
@pytest.mark.parametrize("cls", [Eagle, Hass, Fspad, Griffin, Eagle3, Medusa])
def test_the_drafters_own_steps_are_measured(
    cls: type[Drafter], draft_vocab: int, target: HFTarget, tmp_path: Path
) -> None:
    options = {} if cls is Medusa else {"noise": 0.0, "seed": 1}
    drafter = cls(cls.Config(**options, draft_vocab=draft_vocab))
    drafter.bind(target)
    drafter.choose_vocabulary(torch.arange(8.0).remainder(3))
    known = drafter.draft_ids
    assert (known is None) == (draft_vocab == 0)
    size, depth = target.vocab_size, drafter.eval_steps or drafter.num_steps
    assert depth == (4 if cls is Medusa else 5)  # however many are learnt
    batches = []
    for seed in range(2):
        batch = replace(made("full", seed, rows=1, vocab=size), weights_BT=None)
        width = int(target.config.hidden_size) * (3 if cls is Eagle3 else 1)
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(1, T, width, generator=generator).to(target.dtype)
        batches.append(replace(batch, features_BTS=features))
    dense: dict[tuple[int, int], Tensor] = {}
    with torch.no_grad():
        for batch in batches:
            carry: Any = None
            for step in range(depth):
                prediction, carry = drafter(batch, carry)
                assert prediction.ahead == 2 + step
                head = prediction.head or drafter.head()
                dense[id(batch), step + 1] = head(prediction.hidden_BTH)

    def logits_at(batch: TrajectoryBatch, b: int, t: int, depth: int) -> Tensor:
        return dense[id(batch), depth][b, t]

    found = make_trainer(tmp_path, drafter=drafter, evaluation=chains(Held(batches))).evaluate()
    ids = None if known is None else known.tolist()
    wanted = expected(batches, logits_at, lambda t: True, depth, ids)
    assert found == pytest.approx(wanted, rel=1e-5)


def test_a_survival_is_that_of_the_drafters_own_chain(tmp_path: Path) -> None:
    """Fed with its own best tokens, as in decoding, a drafter agrees with the text as far."""
    batches, drafter = held("none"), Unrolled()
    agreed: dict[int, list[tuple[bool, float]]] = defaultdict(list)
    for batch in batches.batches:
        assert batch.features_BTS is not None and batch.weights_BT is not None
        for b, t in itertools.product(range(len(batch.tokens_BT)), range(T - 1)):
            state = drafter.fed(batch.features_BTS[b, t], int(batch.tokens_BT[b, t + 1]))
            accepted = True
            for depth in range(1, DEPTHS + 1):
                at = t + 1 + depth
                if not (drafter.begins(t) and at < T and same_text(batch, b, t, at)):
                    break
                draft = int((drafter.heads[depth - 1] @ state).argmax())
                accepted = accepted and draft == int(batch.tokens_BT[b, at])
                agreed[depth].append((accepted, float(batch.weights_BT[b, at])))
                state = drafter.fed(state, draft)
    found = make_trainer(tmp_path, drafter=drafter, evaluation=chains(batches)).evaluate()
    for depth, pairs in agreed.items():
        wanted = sum(yes * weight for yes, weight in pairs) / sum(weight for _, weight in pairs)
        assert found[f"survival_{depth}"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("laws", ["full", "top"])
def test_survival_in_drawn_texts_is_exactly_that_of_drawn_chains(tmp_path: Path, laws: str) -> None:
    """All texts of three tokens, each as heavy as it is probable: their mean is the expectation."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(V, V, V, generator=generator, dtype=torch.float64).log_softmax(-1)
    begin, drafter = (0, 1), Unrolled()
    drafter.begins = lambda t: t == 0
    features = torch.randn(H, generator=generator, dtype=torch.float64)
    texts = [(*begin, *tail) for tail in itertools.product(range(V), repeat=DEPTHS)]
    log_p = torch.stack([table[x[i - 2], x[i - 1]] for x in texts for i in range(2, 2 + DEPTHS)])
    tokens = torch.tensor(texts)
    drawn = torch.zeros_like(tokens, dtype=torch.bool)
    drawn[:, 2:] = True
    own = log_p.gather(1, tokens[drawn][:, None]).view(len(texts), DEPTHS)
    batch = TrajectoryBatch(
        tokens_BT=tokens,
        loss_mask_BT=drawn,
        laws=FullLogprobs(hidden_NH=log_p, head=lambda x: x) if laws == "full" else top(log_p, V),
        law_row_BT=torch.full_like(tokens, -1).masked_scatter(drawn, torch.arange(len(log_p))),
        weights_BT=own.sum(1).exp()[:, None].expand(tokens.shape),
        features_BTS=features.expand(*tokens.shape, H),
    )

    def survives(text: tuple[int, ...], state: Tensor, heads: list[Tensor]) -> float:
        """Probability that one drawn draft of each head is accepted after the other."""
        if not heads:
            return 1.0
        state = drafter.fed(state, text[-1])
        q = (heads[0] @ state).softmax(-1).tolist()
        p = table[text[-2], text[-1]].exp().tolist()
        below = [survives((*text, x), state, heads[1:]) for x in range(V)]
        return sum(q[x] * min(1.0, p[x] / q[x]) * below[x] for x in range(V))

    values = make_trainer(tmp_path, drafter=drafter, evaluation=chains(Held([batch]))).evaluate()
    wanted = {
        f"survival_t1_{depth}": survives(begin, features, list(drafter.heads)[:depth])
        for depth in range(1, DEPTHS + 1)
    }
    assert {name: values[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    assert values["tokens_per_step_t1"] == pytest.approx(1 + sum(wanted.values()), rel=1e-6)
    assert 0.02 < wanted["survival_t1_3"] < wanted["survival_t1_1"] < 0.98


class Agreement:
    """Whether both prefer the same token, over places with logprobs of the teacher."""

    def loss(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Any) -> LossTerms:
        taught_BT, _ = masks(prediction, batch, None)
        places = gather(prediction, batch, taught_BT)
        laws = places.laws()
        assert isinstance(laws, TopLogprobs)
        best_N1 = laws.ids_NK.gather(-1, laws.log_p_NK.argmax(-1, keepdim=True))
        same_N = best_N1[:, 0] == head(places.hidden_NH).argmax(-1)
        return LossTerms(total=(same_N * places.weights_N).sum(), weight=places.weights_N.sum())


def test_acceptance_at_a_depth_is_that_of_the_objective(tmp_path: Path) -> None:
    """In one step the drafter's later masks leave nothing out."""
    batches, drafter = held("top"), Unrolled()
    drafter.num_steps = 1
    values: dict[str, float] = {}
    for evaluation in (
        AcceptanceEvaluation(batches=batches, name="overlap"),
        Evaluation(batches=batches, objective=Agreement(), name="agreement"),
        chains(batches),
    ):
        values |= make_trainer(tmp_path, drafter=drafter, evaluation=evaluation).evaluate()
    assert values["acceptance_1"] == pytest.approx(values["overlap"], rel=1e-6)
    assert values["accuracy_1"] == pytest.approx(values["agreement"], rel=1e-6)
    assert "survival_2" not in values and "misaligned_1" not in values
    assert values["tokens_per_step"] == 1 + values["survival_1"]


# --------------------------------------------------------------------------- batches and processes


def forward_of(drafter: Drafter) -> Callable[..., dict[str, Any]]:
    learner = Learner(drafter)

    @torch.no_grad()
    def forward(batch: TrajectoryBatch, carry: Any, objective: Any) -> dict[str, Any]:
        return learner(batch, carry, objective)

    return forward


@pytest.mark.parametrize("every", [2, 3, 4])
def test_processes_in_turn_give_the_sums_of_one(every: int) -> None:
    batches, forward = held("top"), forward_of(Unrolled(known={0, 2}))
    alone = sums_of(chains(batches), forward, 3, DEPTHS, (0, 1))
    assert alone.shape == (3, DEPTHS, 2, len(FIGURES)) and bool((alone[:, 0, 1, :6] > 0).all())
    together = sum(
        sums_of(chains(batches), forward, 3, DEPTHS, (process, every)) for process in range(every)
    )
    assert isinstance(together, Tensor) and torch.equal(together, alone)


@pytest.mark.parametrize("steps", range(1, DEPTHS + 1))
def test_a_batch_that_was_left_halfway_does_not_reach_into_the_next(steps: int) -> None:
    batches, forward = held("full"), forward_of(Unrolled())
    evaluation = chains(batches)
    before = sums_of(evaluation, forward, 1, steps, (0, 1))
    again = sums_of(evaluation, forward, 3, DEPTHS, (0, 1))
    assert torch.equal(before[0], again[0, :steps])
    assert torch.equal(again, sums_of(chains(batches), forward, 3, DEPTHS, (0, 1)))


def test_texts_that_are_too_short_for_a_depth_add_nothing(tmp_path: Path) -> None:
    tokens = made("none", 0).tokens_BT[:, :4]
    batch = TrajectoryBatch(
        tokens_BT=tokens,
        loss_mask_BT=torch.ones_like(tokens, dtype=torch.bool),
        weights_BT=torch.rand(B, 4, generator=torch.Generator().manual_seed(0)),
        features_BTS=torch.zeros(B, 4, H, dtype=torch.float64),
    )
    evaluation = chains(Held([batch]))
    values = make_trainer(tmp_path, drafter=Unrolled(), evaluation=evaluation).evaluate()
    assert {name for name in values if name.endswith("_3")} == set()
    both = values["survival_1"] + values["survival_2"]
    assert values["tokens_per_step"] == pytest.approx(1 + both)
    # chains hang below place 0 alone: place 1 is none of the drafter's, behind it nothing is left
    sums = sums_of(evaluation, forward_of(Unrolled()), 1, DEPTHS, (0, 1))
    assert batch.weights_BT is not None
    counted = float(sums[0, 0, 1, FIGURES.index("survival")])
    assert counted == pytest.approx(float(batch.weights_BT[:, 2].sum()), rel=1e-6)


# --------------------------------------------------------------------------- choosing by them


class Recorder(Callback):
    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[int, float] = {}

    def on_evaluate(self, run: Any, values: dict[str, float]) -> None:
        self.values[run.step] = values[self.name]


@pytest.mark.parametrize("name", ["tokens_per_step", "tokens_per_step_t1"])
@pytest.mark.every(2)
def test_the_weights_with_most_tokens_per_step_are_kept(tmp_path: Path, name: str) -> None:
    batches = Held([made("full", seed, vocab=VOCAB) for seed in range(2)])
    recorder = Recorder(name)
    report = make_trainer(
        tmp_path,
        drafter=Bigram(dropout=0, num_steps=3),
        config=replace(CONFIG, eval_every=1, learning_rate=0.5),
        evaluation=chains(batches, name=name, chooses=True),
        callbacks=[recorder],
    ).train()
    assert len(set(recorder.values.values())) > 2
    best = max(recorder.values, key=lambda step: recorder.values[step])  # of equal ones the first
    assert report.best is not None
    assert (report.best.step, report.best.value) == (best, recorder.values[best])
    assert 1 < best < CONFIG.steps
