"""Counting along recorded texts gives what decoding by the target gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from draftsmith.core.config import TreeShape
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.generation import generate
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import DecodeStep, Signals
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.registry import make_drafter
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target
from recorded import Recorded, states_along

VOCAB = 12
LENGTH = 40
PROMPTS = ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3])
TREE = TreeShape(widths=(4, 4, 4), keep=9)
CASES = {
    "prompt_lookup": TreeShape.chain(6),
    "suffix": TreeShape.chain(6),
    "medusa": TreeShape(widths=(4, 4, 4), keep=20),
    **dict.fromkeys(("eagle", "hass", "fspad", "griffin", "unrolled", "eagle3"), TREE),
    **dict.fromkeys(("p_eagle", "parallel"), TREE),
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    """It ends most texts by itself."""
    target = tiny_target(VOCAB, layers=8)
    target.end_ids = frozenset({0})
    return target


def drafter_of(kind: str, target: HFTarget) -> Drafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        drafter = make_drafter(kind)
        drafter.bind(target)
    return drafter


def kept(steps: Sequence[DecodeStep]) -> list[object]:
    return [(step.emitted, step.accepted, step.offered_depth, step.proposed) for step in steps]


@pytest.mark.parametrize(
    ("kind", "shape", "heat"),
    [
        *((kind, shape, heat) for kind, shape in CASES.items() for heat in (0.0, 1.0)),
        ("eagle", TreeShape(widths=(3, 2, 1)), 0.0),  # at temperature 1 its children are drawn
        ("hass", TreeShape.chain(4), 0.0),
    ],
)
def test_every_step_is_that_of_the_target(
    kind: str, shape: TreeShape, heat: float, target: HFTarget
) -> None:
    drafter = drafter_of(kind, target)
    options = DecodeOptions(
        sampler=Sampler(temperature=heat), max_new_tokens=LENGTH, shape=shape, seed=3
    )
    decoded = list(decode(target, drafter, PROMPTS, options))
    plain = generate(target, NoDrafter(), PROMPTS, options, batch_size=3)
    texts = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, plain, strict=True)]
    assert len({len(one.token_ids) for one in plain}) == 3, "rows end at different steps"
    signals = drafter.signals
    recorded = Recorded(
        vocab_size=VOCAB,
        texts=texts,
        end_ids=target.end_ids,
        signals=signals,
        states=[states_along(target, text, signals) for text in texts]
        if signals != Signals()
        else (),
    )
    greedy = DecodeOptions(max_new_tokens=LENGTH, shape=shape)
    along = list(decode(recorded.rows([0, 1, 2]), drafter, PROMPTS, greedy))
    assert kept(along) == kept(decoded)
    assert sum(sum(step.accepted) for step in along), "nothing was accepted: nothing was compared"
    some = list(decode(recorded.rows([2, 0]), drafter, [PROMPTS[2], PROMPTS[0]], greedy))
    assert [sum(step.accepted[0] for step in some)] == [sum(step.accepted[2] for step in along)]


def test_states_that_were_not_recorded_are_refused() -> None:
    recorded = Recorded(vocab_size=VOCAB, texts=[[1, 2, 3]])
    target = tiny_target(VOCAB, layers=8)
    with pytest.raises(ValueError, match="the states that were recorded"):
        list(decode(recorded.rows([0]), drafter_of("eagle", target), [[1]], DecodeOptions()))
