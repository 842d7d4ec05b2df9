"""Logits become laws as transformers' processors would make them; what is wrong is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from draftsmith.core.sampling import History, Sampler, largest
from draftsmith.errors import BackendError, InputError

SETTINGS = {
    "plain": Sampler(temperature=1.0),
    "cool": Sampler(temperature=0.6),
    "hot": Sampler(temperature=2.5),
    "top_k_1": Sampler(temperature=1.0, top_k=1),
    "top_k_5": Sampler(temperature=1.0, top_k=5),
    "top_k_all": Sampler(temperature=1.0, top_k=10_000),
    "top_p": Sampler(temperature=1.0, top_p=0.8973),
    "top_p_small": Sampler(temperature=1.0, top_p=1e-6),
    "min_p": Sampler(temperature=1.0, min_p=0.05),
    "min_p_one": Sampler(temperature=1.0, min_p=1.0),
    "k_and_p": Sampler(temperature=0.8, top_k=20, top_p=0.7031),
    "k_and_min": Sampler(temperature=1.3, top_k=20, min_p=0.1),
    "p_and_min": Sampler(temperature=1.0, top_p=0.9471, min_p=0.02),
    "all": Sampler(temperature=0.7, top_k=40, top_p=0.8973, min_p=0.05),
}
"""Nuclei that are no multiple of a flat row's probability: at such an edge rounding decides."""
by_setting = pytest.mark.parametrize("sampler", SETTINGS.values(), ids=SETTINGS)


def random_logits(vocab: int, rows: int = 6, seed: int = 0) -> torch.Tensor:
    """From nearly flat to very peaked rows."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-1, 1.2, rows)[:, None]
    return torch.randn((rows, vocab), generator=generator) * scale


def tied(logits: torch.Tensor) -> torch.Tensor:
    """On a grid, as half precision leaves them: many tokens share a value."""
    return (logits * 2).round() / 2


def by_transformers(sampler: Sampler, logits: torch.Tensor) -> torch.Tensor:
    warped = logits
    for step in sampler.processors():
        warped = step(None, warped)
    return warped.softmax(-1)


@pytest.mark.parametrize("vocab", [50, 5_000])
@by_setting
def test_laws_are_those_of_transformers_processors(sampler: Sampler, vocab: int) -> None:
    logits = random_logits(vocab)
    found = sampler.law(logits).probs()
    torch.testing.assert_close(found, by_transformers(sampler, logits), atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(found.sum(-1), torch.ones(len(logits)))


@pytest.mark.parametrize("vocab", [50, 5_000])
@by_setting
def test_laws_of_tied_logits_are_transformers_up_to_which_of_the_tied_stay(
    sampler: Sampler, vocab: int
) -> None:
    """A nucleus that ends among equals keeps as many of them as transformers does (the lowest ids
    here, the highest there); top-k keeps all that tie with the k-th, as there. In float64: float32
    sums from the other end may keep one token more in a flat nucleus of thousands."""
    logits = tied(random_logits(vocab)).double()
    found, wanted = sampler.law(logits).probs(), by_transformers(sampler, logits)
    torch.testing.assert_close(
        found.sort(dim=-1).values, wanted.sort(dim=-1).values, atol=2e-6, rtol=1e-4
    )
    if sampler.top_p == 1:
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("vocab", [1, 2, 8, 50, 512])
def test_a_nucleus_cut_in_all_rows_at_once_is_the_one_cut_row_by_row(
    vocab: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: the same weights of the same tokens, hence the same draws."""
    logits = torch.cat([random_logits(vocab), tied(random_logits(vocab)), torch.zeros(1, vocab)])
    sampler = Sampler(temperature=1.0, top_p=top_p, min_p=0.01)
    together = sampler.law(logits)
    monkeypatch.setattr("draftsmith.core.sampling.SMALL_VOCABULARY", 0)
    one_by_one = sampler.law(logits)
    assert torch.equal(together.probs_RK, one_by_one.probs_RK)
    assert together.ids_RK is not None and one_by_one.ids_RK is not None
    assert torch.equal(together.ids_RK, one_by_one.ids_RK)


@pytest.mark.parametrize("vocab", [50, 5_000])
@by_setting
def test_a_law_does_not_depend_on_its_neighbours(sampler: Sampler, vocab: int) -> None:
    """Flat, peaked and tied rows together and alone. (float64 sums of other widths may differ in
    the last digit.)"""
    logits = torch.cat([tied(random_logits(vocab, seed=1)), random_logits(vocab, seed=2)]).double()
    together = sampler.law(logits).probs()
    for row in range(len(logits)):
        alone = sampler.law(logits[row : row + 1]).probs()[0]
        torch.testing.assert_close(alone, together[row], atol=1e-14, rtol=0)


@by_setting
def test_half_precision_logits_are_processed_in_float32(sampler: Sampler) -> None:
    logits = random_logits(500).bfloat16()
    law = sampler.law(logits)
    assert law.probs().dtype == torch.float32
    assert torch.equal(law.probs(), sampler.law(logits.float()).probs())


@by_setting
def test_float64_logits_give_float64_laws(sampler: Sampler) -> None:
    logits = random_logits(300).double()
    law = sampler.law(logits).probs()
    assert law.dtype == torch.float64
    torch.testing.assert_close(law.sum(-1), torch.ones(len(law)).double(), atol=1e-13, rtol=0)


@by_setting
def test_impossible_tokens_stay_impossible(sampler: Sampler) -> None:
    """Logits of -inf, also where fewer tokens are possible than top-k asks for."""
    logits = random_logits(60)
    logits[:, 3:] = -torch.inf
    law = sampler.law(logits).probs()
    assert (law[:, 3:] == 0).all()
    torch.testing.assert_close(law, by_transformers(sampler, logits), atol=2e-6, rtol=1e-4)


def test_temperature_zero_is_the_lowest_of_the_most_probable() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, -1.0, 5.0, 5.0]])
    law = Sampler().law(logits)
    assert law.probs().argmax(-1).tolist() == [1, 0]
    assert law.probs().sum().item() == 2.0


def test_small_temperatures_approach_the_point_mass() -> None:
    logits = random_logits(40, seed=3)
    near = Sampler(temperature=1e-4).law(logits.double()).probs()
    torch.testing.assert_close(near.float(), Sampler().law(logits).probs())


# ---------------------------------------------------------------------- history


def histories(rows: Sequence[Sequence[int]], num_prompt: int = 1) -> list[History]:
    return [History(tokens=row, num_prompt=num_prompt) for row in rows]


RAGGED = [[3], [1, 2, 1, 1, 7, 2], [0, 5, 5], [4, 4, 4, 4], [9, 8, 7, 6, 5, 4, 3], [2, 2]]


@pytest.mark.parametrize("penalty", [0.7, 1.2, 3.0])
def test_repetition_penalty_is_that_of_transformers_on_ragged_histories(penalty: float) -> None:
    logits = random_logits(10)
    found = Sampler(temperature=1.0, repetition_penalty=penalty).law(logits, histories(RAGGED))
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for row, tokens in enumerate(RAGGED):
        wanted = processor(torch.tensor([tokens]), logits[row : row + 1].clone()).softmax(-1)[0]
        torch.testing.assert_close(found.probs()[row], wanted)


def test_logit_bias_is_that_of_transformers() -> None:
    logits = random_logits(10)
    bias = ((2, 1.5), (7, -4.0), (0, 0.25))
    wanted = SequenceBiasLogitsProcessor(sequence_bias=[[[t], b] for t, b in bias])(
        torch.zeros((len(logits), 1), dtype=torch.long), logits.clone()
    )
    found = Sampler(temperature=1.0, logit_bias=bias).law(logits).probs()
    torch.testing.assert_close(found, wanted.softmax(-1))


def test_presence_and_frequency_count_generated_tokens_by_hand() -> None:
    """Tokens 1 (once) and 2 (three times) were generated; 0 stands in the prompt alone."""
    history = [History(tokens=[0, 0, 2, 1, 2, 2], num_prompt=2)]
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    sampler = Sampler(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    weights = [math.exp(x) for x in (1.0, 1 - 0.5 - 0.25, 1 - 0.5 - 3 * 0.25, 1.0)]
    wanted = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    torch.testing.assert_close(sampler.law(logits, history).probs(), wanted, atol=1e-14, rtol=0)


def test_penalties_keep_float64() -> None:
    """0.1 is no float32 number: rounding it there would be off by 1e-9."""
    history = [History(tokens=[0, 1], num_prompt=1)]
    sampler = Sampler(temperature=1.0, presence_penalty=0.1, frequency_penalty=0.3)
    law = sampler.law(torch.zeros((1, 3), dtype=torch.float64), history).probs()[0]
    assert abs(float(law[0] / law[1]) - math.exp(0.4)) < 1e-14


def test_penalties_come_before_temperature() -> None:
    history = [History(tokens=[0, 1], num_prompt=1)]
    sampler = Sampler(temperature=0.5, presence_penalty=1.0)
    law = sampler.law(torch.zeros((1, 3), dtype=torch.float64), history).probs()[0]
    assert abs(float(law[0] / law[1]) - math.exp(2.0)) < 1e-12


def test_the_given_logits_are_not_changed() -> None:
    logits = random_logits(10)
    before = logits.clone()
    Sampler(
        temperature=0.5,
        top_k=3,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias=((1, 1.0),),
    ).law(logits, histories(RAGGED))
    assert torch.equal(logits, before)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(2, 40),
    st.integers(0, 50),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.05, 5.0),
    st.integers(0, 1000),
)
def test_any_setting_gives_a_law_that_holds_the_most_probable_token(
    vocab: int, top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    logits = random_logits(vocab, rows=3, seed=seed).double()
    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    law = sampler.law(logits).probs()
    assert (law >= 0).all()
    torch.testing.assert_close(law.sum(-1), torch.ones(3).double(), atol=1e-12, rtol=0)
    assert (law.gather(1, logits.argmax(-1, keepdim=True)) > 0).all()


# ---------------------------------------------------------------------- refusals

BAD = {
    "temperature": [-0.1, math.nan, math.inf],
    "top_k": [-1],
    "top_p": [0.0, -0.5, 1.5, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0.0, -1.0, math.nan, math.inf],
    "presence_penalty": [math.nan, math.inf],
    "frequency_penalty": [math.nan, -math.inf],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_a_bad_parameter_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InputError, match=name):
        Sampler(**{name: value})


@pytest.mark.parametrize("token", [-1, 10, 32_000])
def test_a_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InputError, match=f"token {token}"):
        Sampler(temperature=1.0, logit_bias=((token, 1.0),)).law(random_logits(10))


@pytest.mark.parametrize("amount", [math.nan, math.inf])
def test_a_bias_that_is_no_number_is_refused(amount: float) -> None:
    with pytest.raises(InputError, match="logit_bias"):
        Sampler(temperature=1.0, logit_bias=((1, amount),))


@pytest.mark.parametrize("sampler", [Sampler(), *SETTINGS.values()], ids=["greedy", *SETTINGS])
@pytest.mark.parametrize("broken", ["one NaN", "all NaN", "all -inf", "+inf"])
def test_broken_logits_are_the_models_fault(sampler: Sampler, broken: str) -> None:
    logits = random_logits(30)
    if broken == "one NaN":
        logits[2, 4] = math.nan
    elif broken == "all NaN":
        logits[1] = math.nan
    elif broken == "all -inf":
        logits[3] = -math.inf
    else:
        logits[0, 0] = math.inf
    with pytest.raises(BackendError, match="logits"):
        sampler.law(logits)


def test_the_oracle_of_the_contract_suite_agrees_with_transformers() -> None:
    """Two independent ways of arithmetic: the suite's `exact_law`, and the processors."""
    from tests.contract.oracle import exact_law

    logits = random_logits(30).double()
    for sampler in SETTINGS.values():
        wanted = by_transformers(sampler, logits)
        for row in range(len(logits)):
            found = exact_law(logits[row].numpy(), sampler, [], 0)
            np.testing.assert_allclose(found, wanted[row].numpy(), atol=1e-12)


def test_the_largest_is_torchs_the_first_of_equal_ones_and_nan_before_all() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.randint(-4, 5, (50, 300), generator=draw).float()
    scores[3, 200], scores[4, 17], scores[5] = math.nan, math.inf, -math.inf
    top, column = largest(scores)
    expected, _ = scores.max(-1)
    assert torch.equal(top.nan_to_num(99.0), expected.nan_to_num(99.0))
    firsts = [next(i for i, x in enumerate(row) if x == max(row)) for row in scores.tolist()]
    firsts[3] = 200
    assert column.tolist() == firsts
