"""The controller of the draft length never changes what is said: it goes by the past of a row, and
may stop drafting and begin again in the middle of a text."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import LengthPolicy, RowStats, StepCount, TargetOutput, TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.errors import BackendError
from draftsmith.plan import length_policy
from draftsmith.plan.length_policy import (
    AdaptiveLength,
    CostAware,
    Experience,
    Learning,
    StepCosts,
)
from draftsmith.targets.base import Target
from draftsmith.targets.toy import TabularTarget

from .cases import CASES, LOSSLESS_RULES, Case, by_case_in_brief
from .checking import check, models, support
from .oracle import joint_law
from .test_greedy import LENGTHS, NUM_NEW, TEXT_CASES, predictions_for, prompts_of, run
from .test_greedy import models as transformers
from .toys import SETTINGS, dense, sparse

SWITCHING = CostAware(
    costs=StepCosts(target_D=(1.0, 1.4, 1.7), draft_D=(0.0, 0.0, 0.0), in_vain=1.0)
)
"""Two tokens at first; none behind a rejection; two again behind an acceptance."""


class EachByItself(LengthPolicy):
    """No depth for a batch: enumeration decodes the branches of one text side by side, and these
    are no neighbours, but what else might have happened."""

    def __init__(self, policy: CostAware) -> None:
        self.length, self.rest, self._longest = policy.length, policy.rest, policy.max_length
        self.keeps = policy.keeps

    @property
    def max_length(self) -> int:
        return self._longest


def test_the_policy_of_these_tests_switches_drafting_off_and_on() -> None:
    target = dense(0)
    drafter = Independent(Independent.Config(), model=dense(1))
    drafter.bind(target)
    options = DecodeOptions(
        sampler=Sampler(temperature=1.0),
        max_new_tokens=200,
        shape=TreeShape.chain(2),
        policy=SWITCHING,
    )
    steps = list(decode(target, drafter, [(3,)], options))
    depths = [step.offered_depth[0] for step in steps[:-2]]
    assert depths[0] == 2
    assert {0, 2} <= set(depths)
    first_idle = depths.index(0)
    assert max(depths[first_idle:]) > 0


@pytest.mark.parametrize("rule", LOSSLESS_RULES)
@by_case_in_brief(CASES)
def test_emitted_law_with_a_controller(case: Case, rule: str) -> None:
    target, draft_model = models(case)
    policy = EachByItself(SWITCHING)
    options = DecodeOptions(sampler=SETTINGS["cool"], max_new_tokens=3, rule=rule, policy=policy)
    check(case, target, draft_model, options)


def test_the_law_of_rows_that_decide_together() -> None:
    """How deep the first row drafts at its second step is also the other's doing."""
    target, drafter = sparse(2, 0), Independent(Independent.Config(), model=sparse(2, 1))
    drafter.bind(target)
    sampler, prompts, seeds = Sampler(temperature=1.0), [[3], [1, 2, 5]], 800
    seen: list[Counter[tuple[int, ...]]] = [Counter() for _ in prompts]
    depths: Counter[int] = Counter()
    for seed in range(seeds):
        options = DecodeOptions(
            sampler=sampler,
            max_new_tokens=4,
            shape=TreeShape.chain(2),
            rule="rejection",
            policy=SWITCHING,
            seed=seed,
        )
        steps = list(decode(target, drafter, prompts, options))
        for b, texts in enumerate(seen):
            texts[tuple(token for step in steps for token in step.emitted[b])] += 1
        if not steps[0].accepted[0]:  # alone it would draft equally deep after each
            depths[steps[1].offered_depth[0]] += 1
    assert len(depths) > 1 and min(depths.values()) > 40, depths
    for prompt, texts in zip(prompts, seen, strict=True):
        law = joint_law(target, sampler, prompt, 4)
        assert set(texts) <= set(law)
        expected = [seeds * law[text] for text in law]
        assert chisquare([texts[text] for text in law], expected).pvalue > 1e-4


CHAINS = [
    case
    for case in CASES
    if case.label in ("prompt_lookup", "independent-chain", "independent-chain-confident")
]
ratio = st.floats(0.2, 3.0)


count = st.floats(0.0, 50.0)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(CHAINS),
    st.tuples(ratio, ratio, ratio, ratio, ratio),
    st.tuples(count, count, count, count, count).map(sorted),
    st.floats(-5.0, 5.0),
    st.booleans(),
)
def test_emitted_law_whatever_steps_cost_and_other_rows_met(
    case: Case, costs: tuple[float, ...], met: list[float], lead: float, short: bool
) -> None:
    """Four tokens, with any costs and any past: each makes another rule of when to draft how
    deep. `short`: rows rest for a step, and hold a decision from their first one on, where a draft
    ended before the depth that was chosen."""
    keep = min(support(case), 2)
    ended, asked_on, hit, found, asked = met
    policy = CostAware(
        costs=StepCosts(target_D=(1.0, *costs[:2]), draft_D=(0.0, *costs[2:4]), in_vain=costs[4]),
        past=Experience(
            asked=asked,
            asked_on=asked_on,
            ended=ended,
            asked_on_kept=asked_on,
            ended_kept=ended / 2,
            tried_D=(found, hit),
            kept_D=(hit, 0.0),
            lead=lead,
        ),
    )
    options = DecodeOptions(
        sampler=Sampler(temperature=1.0),
        max_new_tokens=4,
        rule="rejection",
        policy=EachByItself(policy),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, steps in {
            "_REST": 1,
            "_LONGER": 0.0,
            "_ENDED": 4,
            "_HELD": 1,
            "_YOUNG": 0,
        }.items():
            if short:
                patch.setattr(length_policy, name, steps)
        check(case, sparse(keep, 0), sparse(keep, 1), options)


def test_what_ends_the_first_step_is_not_hidden() -> None:
    class Broken(TabularTarget):
        def forward(self, *args: object, **kwargs: object) -> TargetOutput:
            raise BackendError("no memory")

    target, drafter = Broken(8), PromptLookup()
    drafter.bind(target)
    options = DecodeOptions(shape=TreeShape.chain(2), policy=Learning(SWITCHING))
    with pytest.raises(BackendError, match="no memory"):
        next(decode(target, drafter, [[1, 2, 1, 2]], options))


@by_case_in_brief(TEXT_CASES)
def test_greedy_text_with_a_controller_is_plain_text(case: Case) -> None:
    """A ragged batch, in which each row has a length of its own at every step."""
    m = transformers()
    prompts = prompts_of(LENGTHS)
    expected = [m.reference.text(prompt, NUM_NEW) for prompt in prompts]
    lengths = range(6)
    policy = CostAware(
        costs=StepCosts(
            target_D=tuple(1.0 + 0.05 * n for n in lengths),
            draft_D=tuple(0.15 * n for n in lengths),
            in_vain=1.0,
        )
    )
    options = DecodeOptions(max_new_tokens=NUM_NEW, shape=TreeShape.chain(5), policy=policy)
    predictions = predictions_for(case, expected)
    texts, _, _ = run(m.target, case.build(m.related), prompts, options, predictions)
    assert texts == expected


def lengths_of(
    target: Target,
    prompts: list[list[int]],
    ids: list[int],
    policy: LengthPolicy,
    drafter: Drafter,
) -> list[list[int]]:
    """Depths that each row was offered, step by step."""
    drafter.bind(target)
    options = DecodeOptions(
        sampler=Sampler(temperature=1.0),
        max_new_tokens=40,
        shape=TreeShape.chain(2),
        policy=policy,
    )
    out: list[list[int]] = [[] for _ in prompts]
    for step in decode(target, drafter, prompts, options, request_ids=ids):
        for b, depth in enumerate(step.offered_depth):
            if step.active[b]:
                out[b].append(depth)
    return out


PROMPTS = [[1, 2, 5, 1, 2], [3, 3, 3], [7, 4, 7, 4]]


def test_lengths_that_adapt_to_a_row_do_not_depend_on_its_neighbours() -> None:
    def lengths(prompts: list[list[int]], ids: list[int]) -> list[list[int]]:
        policy = AdaptiveLength(first=1, longest=2)
        return lengths_of(dense(0), prompts, ids, policy, PromptLookup())

    together = lengths(PROMPTS, [0, 1, 2])
    assert together == [lengths([prompt], [b])[0] for b, prompt in enumerate(PROMPTS)]
    assert len({tuple(one) for one in together}) > 1


def test_rows_of_a_batch_draft_together_where_costs_decide() -> None:
    """All as deep, or none, until the first is near its end; alone they would differ."""
    target = dense(0)
    model = Independent(Independent.Config(), model=dense(1))
    together = lengths_of(target, PROMPTS, [0, 1, 2], SWITCHING, model)
    shortest = min(map(len, together)) - 2
    steps = [set(depths) for depths in zip(*together, strict=False)][:shortest]
    assert all(len(depths) == 1 for depths in steps)
    assert len(set.union(*steps)) > 1
    alone = [lengths_of(target, [one], [b], SWITCHING, model)[0] for b, one in enumerate(PROMPTS)]
    assert len({tuple(one[:shortest]) for one in alone}) > 1


class Watching(LengthPolicy):
    """Two tokens at every second step, and what it was told."""

    max_length = 2

    def __init__(self) -> None:
        self.told: list[RowStats] = []

    def length(self, stats: RowStats) -> int:
        self.told.append(stats)
        return 2 * (stats.steps % 2)


@pytest.mark.parametrize("there", [True, False])
def test_a_policy_is_told_what_was_asked_for_and_what_was_there(there: bool) -> None:
    model = Independent(Independent.Config(), model=dense(1))
    drafter = model if there else NoDrafter()
    drafter.bind(dense(0))
    policy = Watching()
    options = DecodeOptions(max_new_tokens=30, shape=TreeShape.chain(2), policy=policy)
    list(decode(dense(0), drafter, [[3]], options))
    first, second, third, *_ = policy.told
    assert (first.asked, second.asked, third.asked) == (0.0, 0.0, 1.0)
    assert third.found == (1.0 if there else 0.0)
    assert policy.told[-1].asked > third.asked


def test_a_controller_and_static_shapes() -> None:
    case = next(case for case in CHAINS if case.label == "independent-chain")
    target, draft_model = models(case)
    options = DecodeOptions(
        sampler=SETTINGS["min_p"],
        max_new_tokens=3,
        rule="rejection",
        policy=EachByItself(SWITCHING),
    )
    check(case, target, draft_model, dataclasses.replace(options, static_shapes=True))


def test_what_rows_met_is_learnt_when_all_of_them_have_ended() -> None:
    """What rows of a batch met is known to the next batch."""
    target = dense(0)
    drafter = PromptLookup()
    drafter.bind(target)
    learning = Learning(SWITCHING)
    options = DecodeOptions(
        sampler=Sampler(temperature=1.0),
        max_new_tokens=20,
        shape=TreeShape.chain(2),
        policy=learning,
    )
    found = hit = 0
    for step in decode(target, drafter, [[1, 2, 5, 1, 2], [7, 4, 7, 4]], options):
        assert learning.policy is SWITCHING
        found += sum(depth > 0 for depth in step.offered_depth)
        hit += sum(count > 0 for count in step.accepted)
    learnt = learning.policy.past
    assert learnt.found > 0
    learnt_hits = learnt.kept_D[0]
    assert learnt.asked >= learnt.found >= learnt_hits
    # the older of two rows has faded once
    assert 0.9 * found <= learnt.found <= found
    assert 0.9 * hit <= learnt_hits <= hit


def one_step(accepted: int) -> StepCount:
    return StepCount(asked=1, offered=1, accepted=accepted)


@pytest.mark.full
def test_the_law_of_a_text_behind_a_text() -> None:
    """What the first text met decides whether the second is drafted at all; its draws are others,
    since its request is another one."""
    target, drafter = dense(0), Independent(Independent.Config(), model=dense(1))
    drafter.bind(target)
    seeds, sampler = 3000, Sampler(temperature=1.0)
    law = joint_law(target, sampler, (3,), 1)
    expected = seeds * np.array([law.get((token,), 0.0) for token in range(target.vocab_size)])
    met = Experience(asked=6.0, tried_D=(6.0,), kept_D=(3.0,))

    def policy(cost: float) -> CostAware:
        costs = StepCosts(target_D=(1.0, cost), draft_D=(0.0, 0.0), in_vain=1.0)
        return CostAware(costs=costs, past=met)

    fresh, hit, miss = policy(1.5), [one_step(accepted=1)], [one_step(accepted=0)]
    first, better, worse = (
        next(one.rates(RowStats())) for one in (fresh, fresh.after(hit), fresh.after(miss))
    )
    flips = policy(1.0 + (worse + min(first, better)) / 2)  # between what both promise
    assert flips.after(hit).length(RowStats()) == 1
    assert flips.after(miss).length(RowStats()) == 0
    seen, drafted = np.zeros(target.vocab_size), 0
    for seed in range(seeds):
        learning = Learning(flips)
        options = DecodeOptions(
            sampler=sampler,
            max_new_tokens=2,
            shape=TreeShape.chain(1),
            rule="rejection",
            policy=learning,
            seed=seed,
        )
        for request_id in (0, 1):
            steps = list(decode(target, drafter, [[3]], options, request_ids=[request_id]))
        seen[steps[0].emitted[0][0]] += 1
        drafted += steps[0].offered_depth[0]
    assert 0.1 * seeds < drafted < 0.9 * seeds
    kept = expected > 0
    assert chisquare(seen[kept], expected[kept] * (seen.sum() / expected.sum())).pvalue > 1e-4


def test_decoding_that_is_given_up_is_learnt_from_too() -> None:
    target = dense(0)
    drafter = PromptLookup()
    drafter.bind(target)
    learning = Learning(SWITCHING)
    options = DecodeOptions(max_new_tokens=20, shape=TreeShape.chain(2), policy=learning)
    steps = decode(target, drafter, [[1, 2, 5, 1, 2]], options)
    next(steps)
    next(steps)
    steps.close()
    assert learning.policy.past.asked > 0
