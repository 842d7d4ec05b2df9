"""A row's text is its own: not its neighbours', not the batch's, not the run's. And `match` gives
the very text of plain decoding, at every temperature."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import DecodeStep, TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.plan.length_policy import AdaptiveLength
from draftsmith.targets.base import Target
from draftsmith.targets.toy import TabularTarget

from .cases import DRAFTERS, LOSSLESS_RULES, TREE, Case, by_case_in_brief
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

by_case = by_case_in_brief(DRAFTERS)
by_rule = pytest.mark.parametrize("rule", LOSSLESS_RULES)
by_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


def rounded(seed: int, **options: object) -> TabularTarget:
    """Logits on a coarse grid, as in half precision: ties everywhere, also at every cut."""
    target = copy.copy(dense(seed, **options))
    target.table_CV = (target.table_CV * 2).round() / 2
    return target


Story = list[tuple[Any, ...]]
"""What a row had to do with each step: tokens, how many were drafted, what was proposed, ..."""


def stories_of(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    ids: Sequence[int],
    predictions: Sequence[Sequence[int]] = (),
    session: Session | None = None,
) -> list[Story]:
    drafter.bind(target)
    steps = decode(
        target,
        drafter,
        prompts,
        options,
        request_ids=ids,
        predictions=predictions,
        session=session,
    )
    return told(steps, len(prompts))


def told(steps: Iterable[DecodeStep], num_rows: int) -> list[Story]:
    stories: list[Story] = [[] for _ in range(num_rows)]
    for step in steps:
        for b in range(num_rows):
            if step.active[b]:
                stories[b].append(
                    (
                        step.emitted[b],
                        step.accepted[b],
                        step.offered_depth[b],
                        step.proposed[b],
                        step.origins[b],
                        step.finish[b],
                    )
                )
    return stories


def text_of(story: Story) -> list[int]:
    return [token for emitted, *_ in story for token in emitted]


def texts_of(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    ids: Sequence[int],
    predictions: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    return [
        text_of(story) for story in stories_of(target, drafter, prompts, options, ids, predictions)
    ]


def predicted(case: Case, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Every second row expects nothing."""
    if not case.uses_predictions:
        return []
    return [[] if b % 2 else [2, 5, 1, 7, 2, 5] for b in range(len(prompts))]


def check_neighbours(
    case: Case,
    target: Target,
    draft: Target,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
) -> None:
    """The rows together, in another order, and each alone: not only the texts are equal, but what
    was drafted at every step."""
    ids = list(range(100, 100 + len(prompts)))
    guesses, drafter = predicted(case, prompts), case.build(draft)
    together = stories_of(target, drafter, prompts, options, ids, guesses)
    turned = stories_of(target, drafter, prompts[::-1], options, ids[::-1], guesses[::-1])
    assert together == turned[::-1], f"{case}: the order of the rows changes their texts"
    for b, prompt in enumerate(prompts):
        (alone,) = stories_of(target, drafter, [prompt], options, [ids[b]], guesses[b : b + 1])
        assert alone == together[b], f"{case}: row {b} says {together[b]} in company, alone {alone}"


@pytest.mark.every(3)
@by_sampler
@by_case
def test_a_row_does_not_depend_on_its_neighbours(case: Case, sampler: Sampler) -> None:
    """With rejection; what `match` says is compared with plain decoding below."""
    options = DecodeOptions(
        sampler=sampler, max_new_tokens=NUM_NEW, rule="rejection", shape=TREE, seed=5
    )
    target = rounded(0, end_ids=frozenset({4}))
    check_neighbours(case, target, rounded(1), PROMPTS, options)


@by_case_in_brief(case for case in DRAFTERS if not case.tabular_only)
def test_a_row_of_a_transformer_does_not_depend_on_its_neighbours(case: Case) -> None:
    """float64; batch shapes change logits by rounding only, far below what could move a draw."""
    m = transformers()
    options = DecodeOptions(
        sampler=Sampler(temperature=0.8, top_p=0.9), max_new_tokens=12, seed=6, shape=TREE
    )
    check_neighbours(case, m.target, m.related, prompts_of((1, 4, 9, 30)), options)


SHAPES = {
    "chain": TreeShape.chain(5),
    "tree": TreeShape(widths=(2, 2, 1)),
    "dynamic": TreeShape(widths=(3, 3, 3, 3), keep=6),
}
RAGGED = [PROMPTS[0], [*PROMPTS[4], *PROMPTS[1]], [*PROMPTS[4], *PROMPTS[3], *PROMPTS[1]]]
"""1, 12 and 16 tokens: one has all of its room left where another has next to none."""
DRAFTED = (
    (SHAPES["chain"], None, 1.0),
    (SHAPES["chain"], AdaptiveLength(first=2, longest=5), 0.0),
    (SHAPES["tree"], None, 1.0),
    (SHAPES["dynamic"], None, 1.0),
    (SHAPES["dynamic"], None, 0.0),
)
"""What a row has room for does not depend on the temperature, so each shape has few."""


def check_edge(case: Case, target: Target, draft: Target, drafted: Sequence[Any] = DRAFTED) -> None:
    """A row with little room drafts less deep than its neighbours, and ends before them."""
    branches = case.build(draft).takes_trees or case.kind == "reference"
    for shape, policy, temperature in drafted:
        if shape.is_chain or branches:
            options = DecodeOptions(
                sampler=Sampler(temperature=temperature),
                max_new_tokens=NUM_NEW,
                rule="rejection",
                shape=shape,
                policy=policy,
                seed=4,
            )
            check_neighbours(case, target, draft, RAGGED, options)


@by_case
def test_a_row_near_an_edge_does_not_depend_on_its_neighbours(case: Case) -> None:
    """End tokens with some of the ways to draft: with the others below, and with fixed trees
    above."""
    check_edge(case, dense(0, end_ids=frozenset({4})), dense(1), DRAFTED[1::2])
    check_edge(case, dense(0, max_length=22), dense(1))


@pytest.mark.full
@by_case
def test_a_row_that_ends_early_does_not_depend_on_its_neighbours(case: Case) -> None:
    check_edge(case, dense(0, end_ids=frozenset({4})), dense(1), DRAFTED[::2])


@by_case_in_brief(case for case in DRAFTERS if case.asks_model)
def test_a_row_near_the_end_of_the_draft_models_context(case: Case) -> None:
    check_edge(case, dense(0), dense(1, max_length=18))


@by_case
def test_a_row_of_a_session_does_not_depend_on_its_neighbours(case: Case) -> None:
    """One row goes on with its text, one takes some of it back, one begins another text: what is
    kept of the text before differs from row to row."""
    target, expected = dense(0), predicted(case, RAGGED)
    options = DecodeOptions(
        sampler=Sampler(temperature=1.0), max_new_tokens=NUM_NEW, rule="rejection", shape=TREE
    )

    def two_turns(rows: Sequence[int]) -> list[Story]:
        drafter, session = case.build(dense(1)), Session()
        prompts, guesses = [RAGGED[b] for b in rows], [expected[b] for b in rows if expected]
        stories = stories_of(target, drafter, prompts, options, rows, guesses, session)
        again = []
        for b, prompt, story in zip(rows, prompts, stories, strict=True):
            whole = [*prompt, *text_of(story)]
            again.append([whole, whole[:-6], [0, 6, 5]][b])
        other = dataclasses.replace(options, seed=1)
        return stories_of(target, drafter, again, other, rows, session=session)

    together = two_turns(range(3))
    assert together == [two_turns([b])[0] for b in range(3)]


@by_case
def test_texts_that_are_decoded_in_turns_do_not_depend_on_each_other(case: Case) -> None:
    """Two batches with samplers, rules and shapes of their own, a step of each in turn, by one
    drafter."""
    target, drafter = dense(0), case.build(dense(1))
    both = (
        DecodeOptions(sampler=SAMPLERS["penalised"], rule="match", shape=SHAPES["chain"], seed=1),
        DecodeOptions(sampler=SAMPLERS["top_p"], rule="rejection", shape=TREE, seed=2),
    )
    both = tuple(dataclasses.replace(options, max_new_tokens=NUM_NEW) for options in both)
    guesses = predicted(case, RAGGED)
    alone = [stories_of(target, drafter, RAGGED, one, range(3), guesses) for one in both]
    running = [decode(target, drafter, RAGGED, one, predictions=guesses) for one in both]
    pairs = list(itertools.zip_longest(*running))
    for mine, wanted in zip(zip(*pairs, strict=True), alone, strict=True):
        assert told([step for step in mine if step is not None], len(RAGGED)) == wanted


@pytest.mark.every(3)
@by_sampler
@by_case
def test_match_gives_the_very_text_of_plain_decoding(case: Case, sampler: Sampler) -> None:
    plain = next(case for case in DRAFTERS if case.kind == "none")
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


@pytest.mark.every(2)
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
