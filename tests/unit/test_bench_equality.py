"""FirstDivergence and floor: planted differences are found, with their places and gaps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.bench import run as bench_run
from draftsmith.core.cache import Block
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Signals, TargetOutput
from draftsmith.drafters.none import NoDrafter
from draftsmith.targets.toy import TabularTarget, tiny_target

PROMPT = (3, 1, 4)
GREEDY = Sampler()


class Wobbly(TabularTarget):
    """A target whose last-but-one logit wins whenever a forward is fed two tokens or more and the
    top two are near: rounding that depends on the width, exaggerated."""

    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        out = super().forward(tokens_BT, block, keep, signals)
        if keep < 2:
            return out
        logits = out.logits_BNV.clone()
        top = logits.topk(2, dim=-1)
        near = top.values[..., 0] - top.values[..., 1] < 0.3
        swapped = logits.scatter(-1, top.indices, top.values.flip(-1))
        return TargetOutput(logits_BNV=torch.where(near[..., None], swapped, logits))


def plain_text(target: TabularTarget, length: int = 40) -> tuple[int, ...]:
    options = DecodeOptions(max_new_tokens=length)
    (made,) = generate(target, NoDrafter(), [PROMPT], options)
    return made.token_ids


def test_equal_texts_do_not_diverge() -> None:
    target = TabularTarget(8)
    text = plain_text(target)
    assert bench_run.find_divergence(target, PROMPT, text, text, GREEDY) is None


def test_a_planted_divergence_is_found_with_the_gap_of_the_table() -> None:
    target = TabularTarget(8)
    text = plain_text(target)
    other = (*text[:7], (text[7] + 1) % 8, *text[8:])
    found = bench_run.find_divergence(target, PROMPT, text, other, GREEDY)
    assert found is not None
    top = target.logits_after([*PROMPT, *text[:7]]).topk(2).values
    assert found.at == 7
    assert found.gap == pytest.approx(float(top[0] - top[1]))
    assert found.bound == 1e-9  # float64


def test_a_text_that_ends_early_diverges_where_it_ends() -> None:
    target = TabularTarget(8)
    text = plain_text(target)
    found = bench_run.find_divergence(target, PROMPT, text, text[:5], GREEDY)
    assert found is not None
    assert found.at == 5
    assert bench_run.first_difference([], [1]) == 0
    assert bench_run.first_difference([1, 2], [1, 2]) is None


def test_the_gap_is_that_of_scores_after_penalties() -> None:
    target = TabularTarget(8)
    text = plain_text(target)
    sampler = Sampler(presence_penalty=0.7)
    choice = bench_run.choice_after(target, PROMPT, text[:6], sampler)
    scores = target.logits_after([*PROMPT, *text[:6]]).clone()
    scores[list(set(text[:6]))] -= 0.7
    top = scores.topk(2)
    assert choice.token == int(top.indices[0])
    assert choice.gap == pytest.approx(float(top.values[0] - top.values[1]))


def test_an_exact_target_has_no_floor() -> None:
    target = TabularTarget(8)
    found = bench_run.numerical_floor(target, PROMPT, plain_text(target), GREEDY, (2, 3, 7))
    assert found.flips == 0
    assert found.largest_gap is None
    assert found.tokens == 3 * 39  # the first token came from the prompt's forward


def test_flips_of_a_wobbly_target_are_counted_once_per_chunk_size() -> None:
    target = Wobbly(8)
    text = plain_text(target, 200)
    gaps = []
    for i in range(1, len(text)):
        top = target.logits_after([*PROMPT, *text[:i]]).topk(2).values
        gaps.append(float(top[0] - top[1]))
    first = next(i for i, gap in enumerate(gaps) if gap < 0.3)
    found = bench_run.numerical_floor(target, PROMPT, text, GREEDY, (4, 4))
    assert found.flips == 2
    assert found.tokens == 2 * (first + 1)
    assert found.largest_gap == pytest.approx(gaps[first])


def test_the_floor_of_a_transformer_in_float64_is_zero() -> None:
    target = tiny_target(64)
    options = DecodeOptions(max_new_tokens=30)
    (made,) = generate(target, NoDrafter(), [PROMPT], options)
    assert bench_run.numerical_floor(target, PROMPT, made.token_ids, GREEDY, (5, 8)).flips == 0


def test_bounds_of_near_ties() -> None:
    assert bench_run.near_tie_bound(torch.float32, 17.0) == 1e-3
    # bfloat16 has 8 significant bits: at 17 the last place is worth 1/8
    assert bench_run.near_tie_bound(torch.bfloat16, 17.0) == 1.0
    assert bench_run.near_tie_bound(torch.bfloat16, -17.0) == 1.0
    assert bench_run.near_tie_bound(torch.float16, 1.0) == 8 / 1024
    assert bench_run.near_tie_bound(torch.bfloat16, 0.0) > 0
