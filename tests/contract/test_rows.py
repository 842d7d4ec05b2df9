"""A row's text is its own: not its neighbours', not the batch's, not the run's. And `match` gives
the very text of plain decoding, at every temperature."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.targets.base import Target
from draftsmith.targets.toy import TabularTarget

from .cases import CASES, LOSSLESS_RULES, TREE, Case, by_case_in_brief
from .test_greedy import models as transformers
from .test_greedy import prompts_of
from .toys import dense

SAMPLERS = {
    "top_p": Sampler(temperature=1.0, top_p=0.8),
    "top_k_top_p": Sampler(temperature=1.0, top_k=5, top_p=0.7),
    "penalised": Sampler(
        temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.4, min_p=0.05
    ),
}
NUM_NEW = 10
PROMPTS = [
    [3],
    [1, 2, 5, 1, 2],
    [7, 7],
    [0, 1, 2, 3],
    [6, 4, 2, 6, 4, 2, 6],
    [5],
    [2, 5],
    [1, 1, 1],
]

by_case = by_case_in_brief(CASES)
by_rule = pytest.mark.parametrize("rule", LOSSLESS_RULES)
by_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


def rounded(seed: int, **options: object) -> TabularTarget:
    """Logits on a coarse grid, as in half precision: ties everywhere, also at every cut."""
    target = copy.copy(dense(seed, **options))
    target.table_CV = (target.table_CV * 2).round() / 2
    return target


def texts_of(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    ids: Sequence[int],
    predictions: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    drafter.bind(target)
    texts: list[list[int]] = [[] for _ in prompts]
    for step in decode(target, drafter, prompts, options, request_ids=ids, predictions=predictions):
        for text, new in zip(texts, step.emitted, strict=True):
            text.extend(new)
    return texts


def predicted(case: Case, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[2, 5, 1, 7, 2, 5] for _ in prompts] if case.uses_predictions else []


def check_neighbours(
    case: Case,
    target: Target,
    draft: Target,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
) -> None:
    """The rows together, in another order, and each alone."""
    ids = list(range(100, 100 + len(prompts)))
    guesses = predicted(case, prompts)
    together = texts_of(target, case.build(draft), prompts, options, ids, guesses)
    turned = texts_of(target, case.build(draft), prompts[::-1], options, ids[::-1], guesses[::-1])
    assert together == turned[::-1], f"{case}: the order of the rows changes their texts"
    for b, prompt in enumerate(prompts):
        (alone,) = texts_of(
            target, case.build(draft), [prompt], options, [ids[b]], guesses[b : b + 1]
        )
        assert alone == together[b], f"{case}: row {b} says {together[b]} in company, alone {alone}"


@by_sampler
@by_case
def test_a_row_does_not_depend_on_its_neighbours(case: Case, sampler: Sampler) -> None:
    """With rejection; what `match` says is compared with plain decoding below."""
    options = DecodeOptions(
        sampler=sampler, max_new_tokens=NUM_NEW, rule="rejection", shape=TREE, seed=5
    )
    target = rounded(0, end_ids=frozenset({4}))
    check_neighbours(case, target, rounded(1), PROMPTS, options)


@by_case_in_brief(case for case in CASES if not case.tabular_only)
def test_a_row_of_a_transformer_does_not_depend_on_its_neighbours(case: Case) -> None:
    """float64; batch shapes change logits by rounding only, far below what could move a draw."""
    m = transformers()
    options = DecodeOptions(
        sampler=Sampler(temperature=0.8, top_p=0.9), max_new_tokens=12, seed=6, shape=TREE
    )
    check_neighbours(case, m.target, m.related, prompts_of((1, 4, 9, 30)), options)


@by_sampler
@by_case
def test_match_gives_the_very_text_of_plain_decoding(case: Case, sampler: Sampler) -> None:
    plain = next(case for case in CASES if case.kind == "none")
    options = DecodeOptions(
        sampler=sampler, max_new_tokens=NUM_NEW, rule="match", shape=TREE, seed=3
    )
    target, ids = rounded(0), range(len(PROMPTS))
    expected = texts_of(target, plain.build(rounded(1)), PROMPTS, options, ids)
    drafted = texts_of(
        target, case.build(rounded(1)), PROMPTS, options, ids, predicted(case, PROMPTS)
    )
    assert drafted == expected


@pytest.mark.full
@by_case
def test_one_seed_gives_one_text_in_20_runs(case: Case) -> None:
    options = DecodeOptions(
        sampler=SAMPLERS["top_p"], max_new_tokens=6, rule="rejection", shape=TREE, seed=8
    )
    target, drafter, guesses = dense(0), case.build(dense(1)), predicted(case, PROMPTS)
    runs = {
        str(texts_of(target, drafter, PROMPTS, options, range(len(PROMPTS)), guesses))
        for _ in range(20)
    }
    assert len(runs) == 1


@by_rule
@by_case
def test_seeds_and_requests_give_different_texts(case: Case, rule: str) -> None:
    """Eight equal prompts of 20 tokens, under two seeds: two equal texts out of 16 would have a
    probability below 1e-6 (120 pairs, each token is the most probable one with less than 0.8
    on average, and a text is followed only while it agrees)."""
    target, drafter = dense(0), case.build(dense(1))
    texts = []
    for seed in (0, 1):
        options = DecodeOptions(
            sampler=Sampler(temperature=1.5),
            max_new_tokens=20,
            rule=rule,
            shape=TreeShape.chain(2),
            seed=seed,
        )
        prompts = [[3]] * 8
        texts += texts_of(target, drafter, prompts, options, range(8), predicted(case, prompts))
    assert len(set(map(tuple, texts))) == 16
