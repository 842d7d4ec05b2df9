"""Sessions keep the law: text that grows call by call, and text that is taken back and redrawn.

The second is what live revision does. The same seed then meets the same positions again, so what a
drafter learned from text that no longer stands is correlated with the noise that judges its drafts.
Enumeration sees that, because a key that is used again continues from the range it was left with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.sampling import Sampler
from draftsmith.drafters.base import Drafter
from draftsmith.targets.toy import TabularTarget

from .cases import CHAIN, DRAFTERS, LOSSLESS_RULES, Case, by_case_in_brief
from .checking import ROUNDING
from .enumeration import Explored, Path, explore
from .oracle import joint_law, story, total_variation
from .toys import PREDICTIONS, PROMPTS, sparse

SAMPLER = Sampler(temperature=1.0)

by_case = by_case_in_brief(DRAFTERS)
by_rule = pytest.mark.parametrize("rule", LOSSLESS_RULES)


def follow_turns(
    target: TabularTarget,
    drafter: Drafter,
    rule: str,
    turns: Sequence[Callable[[Path, list[int]], list[int]]],
    num_new: Sequence[int],
    *,
    with_predictions: bool,
    keep_all: bool = False,
) -> Callable[[list[Path], Explored], None]:
    """For `explore`: one `decode()` per turn in one session. A turn makes the prompt from the text
    so far; a path's tokens are what the last turn emitted, or all turns with `keep_all`."""
    drafter.bind(target)

    def follow(paths: list[Path], found: Explored) -> None:
        session = Session()
        texts: list[list[int]] = [[] for _ in paths]
        predictions = [PREDICTIONS[path.group] for path in paths] if with_predictions else []
        for turn, count in zip(turns, num_new, strict=True):
            texts = [turn(path, text) for path, text in zip(paths, texts, strict=True)]
            for path in paths:
                path.tokens = path.tokens if keep_all else []
                path.used = set()
            options = DecodeOptions(sampler=SAMPLER, max_new_tokens=count, rule=rule, shape=CHAIN)
            for step in decode(
                target,
                drafter,
                texts,
                options,
                request_ids=[0] * len(paths),
                predictions=predictions,
                session=session,
            ):
                found.accepted += sum(step.accepted)
                found.offered += sum(step.offered_depth)
                for path, emitted in zip(paths, step.emitted, strict=True):
                    path.tokens.extend(emitted)
            texts = [
                [*text, *path.tokens[-count:]] for path, text in zip(paths, texts, strict=True)
            ]

    return follow


def compare(
    case: Case, target: TabularTarget, prompts: Sequence[Sequence[int]], count: int, found: Explored
) -> None:
    for prompt, law in zip(prompts, found.laws, strict=True):
        expected = joint_law(target, SAMPLER, prompt, count)
        assert total_variation(expected, law) < ROUNDING, f"{case}:\n{story(expected, law)}"


@by_rule
@by_case
def test_law_of_a_text_that_grows_call_by_call(case: Case, rule: str) -> None:
    """Two tokens, then two more behind them: one joint law, as if there had been one call."""
    target = sparse(2, 0)
    follow = follow_turns(
        target,
        case.build(sparse(2, 1)),
        rule,
        [lambda path, _: list(PROMPTS[path.group]), lambda path, text: text],
        [2, 2],
        with_predictions=case.uses_predictions,
        keep_all=True,
    )
    compare(case, target, PROMPTS, 4, explore(PROMPTS, 4, follow))


@by_rule
@by_case
def test_law_of_text_that_was_taken_back_and_redrawn(case: Case, rule: str) -> None:
    target = sparse(3, 0)
    follow = follow_turns(
        target,
        case.build(sparse(3, 1)),
        rule,
        [lambda path, _: list(PROMPTS[path.group])] * 2,
        [2, 2],
        with_predictions=case.uses_predictions,
    )
    compare(case, target, PROMPTS, 2, explore(PROMPTS, 2, follow))


@pytest.mark.every(2)
@by_rule
@by_case
def test_law_behind_a_prompt_that_changed(case: Case, rule: str) -> None:
    """The last token but one is another in the second call; same positions, same seed."""
    target = sparse(3, 0)
    prompts = [(4, 3), PROMPTS[1]]
    edited = [(*prompt[:-2], 6, prompt[-1]) for prompt in prompts]
    follow = follow_turns(
        target,
        case.build(sparse(3, 1)),
        rule,
        [lambda path, _: list(prompts[path.group]), lambda path, _: list(edited[path.group])],
        [2, 2],
        with_predictions=case.uses_predictions,
    )
    compare(case, target, edited, 2, explore(edited, 2, follow))
