"""Greedy text in float32 over many prompts: plain decoding's, but for near-ties.

Prompts come from a random walk of the target itself and from noise, so that drafts are accepted and
rejected at every depth. A difference is allowed only where the target's two best logits are closer
than 1e-3, and at most once in 10,000 tokens (about one in 100,000 is to be expected).

Effect and power: a fault that changes one prompt's text in 42 is found in 126 prompts (16,128
tokens) with probability 1 - (1 - 1/42)^126 = 0.95 per kind of drafter, and one that strikes one
token in 5,300 likewise. Rows that decode alone are compared on the first 64 tokens behind 8 prompts
(512 tokens): a fault that strikes one token in 171 is found with the same probability. The cases of
a kind, which run the same code, share its prompts.
A right decoder fails by near-ties alone: the seeds are fixed, so it passes always or never.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from draftsmith.bench.run import find_divergence
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.drafters.none import NoDrafter
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

from .cases import CASES, DRAFTERS, Case
from .test_greedy import run
from .test_real_text import trained

VOCAB = 64
NUM_PROMPTS = 126
NEW_TOKENS = 128
ALONE = (8, 64)
"""Prompts that are decoded alone, and tokens of each."""


SHAPED = [c for c in CASES if not c.tabular_only and (c.draws or not c.other_shape)]
"""Drafts that are drawn have the case's shape, others the drafter's own."""


def share(case: Case, cases: Sequence[Case], count: int) -> range:
    """Which of so many prompts are for this case: those of its kind have all of them together."""
    same = [one for one in cases if one.kind == case.kind]
    return range(same.index(case), count, len(same))


def make_prompts(count: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 40, (count,), generator=draw).tolist()
    return [torch.randint(0, VOCAB, (n,), generator=draw).tolist() for n in lengths]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(VOCAB, dtype=torch.float32)


@pytest.fixture(scope="module")
def plain(target: HFTarget) -> list[tuple[int, ...]]:
    options = DecodeOptions(max_new_tokens=NEW_TOKENS)
    made = generate(target, NoDrafter(), make_prompts(NUM_PROMPTS), options, batch_size=NUM_PROMPTS)
    return [one.token_ids for one in made]


@pytest.mark.full
@pytest.mark.parametrize("batch_size", [1, NUM_PROMPTS])
@pytest.mark.parametrize("case", SHAPED, ids=str)
def test_greedy_text_of_many_prompts_is_plain_text(
    case: Case, batch_size: int, target: HFTarget, plain: list[tuple[int, ...]]
) -> None:
    count, tokens = ALONE if batch_size == 1 else (NUM_PROMPTS, NEW_TOKENS)
    mine = share(case, SHAPED, count)
    prompts = [one for i, one in enumerate(make_prompts(NUM_PROMPTS)) if i in mine]
    drafter = case.build(tiny_target(VOCAB, seed=1, dtype=torch.float32))
    drafter.bind(target)
    # half of the predictions are right for a while, the others are another prompt's
    predictions = [plain[i if place % 2 else i - 1] for place, i in enumerate(mine)]
    made = generate(
        target,
        drafter,
        prompts,
        DecodeOptions(max_new_tokens=tokens, shape=case.shape if case.draws else None),
        batch_size=batch_size,
        predictions=predictions if case.uses_predictions else (),
    )
    different = 0
    for prompt, i, one in zip(prompts, mine, made, strict=True):
        expected = plain[i]
        found = find_divergence(target, prompt, expected[:tokens], one.token_ids, Sampler())
        if found is not None:
            different += 1
            assert found.gap < 1e-3, (
                f"{case} leaves plain decoding behind {prompt[-5:]} at token {found.at}, where the "
                f"target was sure by {found.gap:.4f}: no near-tie"
            )
    assert different <= 1e-4 * len(mine) * tokens
    if case.uses_predictions:
        assert sum(one.metrics.accepted for one in made) > len(mine)


@pytest.fixture(scope="module")
def stories() -> tuple[HFTarget, HFTarget, list[list[int]], list[list[int]]]:
    """A trained target and draft model in float64, prompts cut out of the target's own text, and
    the texts of plain decoding."""
    target, draft, golden = trained()
    wide, small = (
        HFTarget(copy.deepcopy(one.model).double(), one.tokenizer, end_ids=frozenset())
        for one in (target, draft)
    )
    ids = golden["greedy_ids"]
    prompts = [ids[3 * i : 3 * i + 1 + (i * 7) % 40] for i in range(60)]
    texts, _, _ = run(wide, NoDrafter(), prompts, STORY)
    return wide, small, prompts, texts


DRAFTING = [c for c in DRAFTERS if c.drafts and not c.tabular_only]
STORY = DecodeOptions(max_new_tokens=NEW_TOKENS, shape=TreeShape.chain(5))


@pytest.mark.full
@pytest.mark.parametrize("case", DRAFTING, ids=str)
def test_texts_of_a_trained_model_equal_plain_decoding(
    case: Case, stories: tuple[HFTarget, HFTarget, list[list[int]], list[list[int]]]
) -> None:
    """float64, 128 tokens each, in ragged batches. Of what a model has learnt more drafts are
    accepted than of what one says at random. A fault that strikes one token in 2,500 is found in
    the 60 texts of a kind (7,680 tokens) with probability 0.95, rarer ones by the test above."""
    target, draft, prompts, plain = stories
    mine = share(case, DRAFTING, len(prompts))
    expected = [plain[i] for i in mine]
    predictions = expected if case.uses_predictions else ()
    texts, _, _ = run(target, case.build(draft), [prompts[i] for i in mine], STORY, predictions)
    assert texts == expected
