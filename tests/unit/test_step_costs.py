"""What steps cost by the length of their draft: measured for any drafter, within any context."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from draftsmith.bench import costs as bench_costs
from draftsmith.bench.costs import (
    Cost,
    CostTable,
    StepCost,
    Workload,
    arms_by_depth,
    clipped_arms,
    cost_file,
    doubling,
    measure,
    probed_arms,
    step_costs,
)
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import Recorder
from draftsmith.core.types import TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.lookahead import Lookahead
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.drafters.suffix import Suffix
from draftsmith.errors import InputError
from draftsmith.plan.length_policy import AdaptiveLength, StepCosts
from draftsmith.targets.toy import TabularTarget, tiny_target

TARGET = TabularTarget(8)
PROMPTS = [(1, 2, 3, 4), (5, 6, 7), (1, 1, 2, 2, 3)]


def arm(name: str, length: int) -> Arm:
    model = TabularTarget(8, seed=1)
    drafter = {
        "independent": lambda: Independent(Independent.Config(), model=model),
        "prompt_lookup": PromptLookup,
        "lookahead": Lookahead,
    }[name]()
    drafter.bind(TARGET)
    return Arm(name=name, drafter=drafter, shape=TreeShape.chain(length))


def workload(**other: object) -> Workload:
    return dataclasses.replace(Workload(prompts=PROMPTS, max_new_tokens=32), **other)


def test_lengths_double_and_end_with_the_longest() -> None:
    assert doubling(16) == (1, 2, 4, 8, 16)
    assert doubling(11) == (1, 2, 4, 8, 11)
    assert doubling(1) == (1,)


def test_an_arm_with_a_policy_is_timed_with_short_and_long_chains() -> None:
    plain = arm("independent", 15)
    assert probed_arms(plain) == (plain,)
    adaptive = dataclasses.replace(plain, policy=AdaptiveLength(longest=15))
    assert [one.used_shape.depth for one in probed_arms(adaptive)] == [1, 3, 15]
    assert all(one.policy is None for one in probed_arms(adaptive))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["independent", "prompt_lookup", "lookahead"])
def test_every_length_has_a_cost(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which each forward of a model takes a second, and nothing else any time."""
    seconds = 0.0
    forward = TabularTarget.forward

    def timed(self: TabularTarget, *given: Any) -> Any:
        nonlocal seconds
        seconds += 1.0
        return forward(self, *given)

    monkeypatch.setattr(TabularTarget, "forward", timed)
    monkeypatch.setattr(bench_costs, "now", lambda device: seconds)
    monkeypatch.setattr(bench_costs, "make_recorder", lambda device: Recorder(lambda: seconds))
    costs = measure(TARGET, arm(name, 4), Sampler(temperature=1.0), workload(rows=rows))
    drafts = range(5) if name == "independent" else [0] * 5  # forwards of the draft model
    assert costs.draft_D == tuple(drafts)
    assert [costs.seconds(n) for n in range(5)] == [1 + n for n in drafts]


@pytest.mark.parametrize("rows", [1, 3])
def test_costs_of_a_batch_are_those_of_so_many_rows(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: set[int] = set()
    forward = TabularTarget.forward

    def noted(self: TabularTarget, tokens_BT: Any, *rest: Any) -> Any:
        fed.add(len(tokens_BT))
        return forward(self, tokens_BT, *rest)

    monkeypatch.setattr(TabularTarget, "forward", noted)
    measure(TARGET, arm("prompt_lookup", 4), Sampler(temperature=1.0), workload(rows=rows))
    assert fed == {rows}


def test_between_measured_lengths_costs_are_linear() -> None:
    widths = {0: 1, 1: 2, 2: 3, 4: 5}
    table = CostTable(
        context=9,
        rounds=3,
        target=tuple(Cost(width=w, seconds=float(w)) for w in widths.values()),
        draft=(),
    )
    steps = [
        [StepCost(width=w, seconds=0.5 * n, other=0.2 + 0.1 * n)] * 3 for n, w in widths.items()
    ]
    found = step_costs(table, arms_by_depth(arm("prompt_lookup", 4)), steps)
    assert found.target_D == (1, 2, 3, 4, 5)
    assert found.draft_D == (0, 0.5, 1, 1.5, 2)
    assert found.other_D == pytest.approx((0.2, 0.3, 0.4, 0.5, 0.6))
    assert found.in_vain == 1 + 0.5 + 0.2
    assert found.seconds(3) == pytest.approx(4 + 1.5 + 0.5)


def test_between_measured_depths_a_tree_costs_what_its_nodes_do() -> None:
    tree = dataclasses.replace(arm("independent", 1), shape=TreeShape(widths=(2,) * 7))
    arms = arms_by_depth(tree)
    assert [one.used_shape.num_nodes for one in arms] == [0, 2, 6, 30, 254]
    widths = [1 + one.used_shape.num_nodes for one in arms]
    table = CostTable(
        context=9,
        rounds=1,
        target=tuple(Cost(width=w, seconds=float(w)) for w in widths),
        draft=(),
    )
    found = step_costs(table, arms, [[StepCost(width=w, seconds=0.0)] for w in widths])
    assert found.target_D == (1, 3, 7, 15, 31, 63, 127, 255)


def test_kept_costs_are_of_one_shape_and_one_cascade() -> None:
    def path(drafter: Drafter, *widths: int) -> Path:
        drafter.bind(TARGET)
        one = Arm(name="x", drafter=drafter, shape=TreeShape(widths=widths))
        return cost_file(TARGET, one, Sampler(), workload()).path

    model = TabularTarget(8, seed=1)

    def draft() -> Independent:
        return Independent(Independent.Config(), model=model)

    assert path(draft(), 2, 1) == path(draft(), 2, 1)
    cascades = [Cascade([first, draft()]) for first in (PromptLookup(), Suffix())]
    paths = [path(draft(), 2, 1), path(draft(), 3, 1), *(path(one, 1) for one in cascades)]
    assert len(set(paths)) == 4


def test_steps_in_which_nothing_was_found_say_nothing_of_a_whole_draft() -> None:
    table = CostTable(
        context=9,
        rounds=5,
        target=tuple(Cost(width=w, seconds=float(w)) for w in (1, 3, 30)),
        draft=(),
    )
    idle = [StepCost(width=1, seconds=0.1)]
    vain, whole = [StepCost(width=1, seconds=0.1)] * 4, [StepCost(width=3, seconds=0.7)]
    arms = clipped_arms(arm("prompt_lookup", 2), (0, 2))
    found = step_costs(table, arms, [idle, vain + whole])
    assert (found.target_D[2], found.draft_D[2]) == (3.0, 0.7)
    assert step_costs(table, arms, [idle, vain]).target_D[2] == 3.0


def test_what_else_the_target_is_asked_counts_also_in_vain() -> None:
    table = CostTable(
        context=9,
        rounds=1,
        target=tuple(Cost(width=w, seconds=float(w)) for w in (1, 28, 42)),
        draft=(),
    )
    steps = [[StepCost(width=1, seconds=0.0)], [StepCost(width=42, seconds=1.0)]]
    found = step_costs(table, clipped_arms(arm("lookahead", 2), (0, 2)), steps)
    assert found.target_D == (1.0, 21.5, 42.0)
    assert found.in_vain == 28.0 + 0.5  # its window of 27, without a guess


def test_contexts_of_like_length_share_a_bucket() -> None:
    def bucket(length: int, new: int) -> int:
        return Workload(prompts=[(1,) * length], max_new_tokens=new).bucket

    assert bucket(4, 8) == bucket(200, 64) == bucket(256, 1) == 256
    assert bucket(257, 1) == bucket(200, 128) == 512
    assert bucket(3000, 0) == 4096
    assert Workload(prompts=[(1, 2, 3)], max_new_tokens=4).text(1000) == (1, 2, 3) * 64
    assert Workload(prompts=[(1, 2, 3)], max_new_tokens=4).text(5) == (1, 2, 3, 1, 2)


def test_a_short_context_is_used_as_far_as_it_goes_and_then_refused() -> None:
    def costs(positions: int) -> StepCosts:
        target = tiny_target(64, max_length=positions)
        drafter = PromptLookup()
        drafter.bind(target)
        short = Arm(name="x", drafter=drafter, shape=TreeShape.chain(4))
        return measure(target, short, Sampler(), workload())

    assert costs(24).longest == 4
    with pytest.raises(InputError, match=r"10 positions.*drafts of 4\b"):
        costs(10)


def test_chains_of_no_token_never_ask_the_drafter() -> None:
    (idle,) = clipped_arms(arm("independent", 4), (0,))
    assert idle.used_shape.depth == 0
