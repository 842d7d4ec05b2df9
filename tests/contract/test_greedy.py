"""At temperature 0 every drafter gives the text of plain decoding, token for token, in float64.

The reference is no loop of ours: the transformers model with its own eager attention (which rounds
the softmax to float32, far below the gaps met here), run over the whole text anew for every token,
without any cache.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

from .cases import DRAFTERS, Case, by_case_in_brief
from .oracle import exact_law

V, NUM_NEW, CONTEXT = 64, 32, 96
GREEDY = Sampler()
SHAPES = (TreeShape.chain(5), TreeShape(widths=(3, 2, 1)))
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34)
"""Prompt lengths of the ragged batch."""

TEXT_CASES = [case for case in DRAFTERS if not case.tabular_only]
by_case = by_case_in_brief(TEXT_CASES)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.widths))


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(V, (n,), generator=generator).tolist() for n in lengths]


def disturbed(target: HFTarget, noise: float) -> HFTarget:
    """A draft model that knows the target partly: the same weights with this much noise."""
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn(
            parameter.shape, generator=generator, dtype=parameter.dtype
        )
    return HFTarget(model, end_ids=target.end_ids)


class Reference:
    """Greedy text by transformers alone: eager attention, no cache, the whole text at each step."""

    def __init__(self, target: HFTarget) -> None:
        self._model = copy.deepcopy(target.model)
        self._model.config._attn_implementation = "eager"
        self._texts: dict[tuple[tuple[int, ...], Sampler], list[int]] = {}

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[V], behind these tokens."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([list(tokens)])).logits[0, -1]
        return logits

    def text(self, prompt: Sequence[int], count: int, sampler: Sampler = GREEDY) -> list[int]:
        """`count` tokens (fewer at the context's end); end tokens are ignored."""
        text = self._texts.setdefault((tuple(prompt), sampler), [])
        count = min(count, CONTEXT - len(prompt))
        while len(text) < count:
            known = [*prompt, *text]
            law = exact_law(self.logits(known).double().numpy(), sampler, known, len(prompt))
            text.append(int(law.argmax()))
        return text[:count]


@dataclass(frozen=True, kw_only=True)
class Models:
    target: HFTarget
    related: HFTarget
    """A draft model that is often right."""
    unrelated: HFTarget
    """One with random weights of its own."""
    reference: Reference


@lru_cache(maxsize=2)
def models(dtype: torch.dtype = torch.float64) -> Models:
    target = tiny_target(V, seed=2, dtype=dtype, max_length=CONTEXT)
    return Models(
        target=target,
        related=disturbed(target, 0.02),
        unrelated=tiny_target(V, seed=9, layers=1, dtype=dtype),
        reference=Reference(target),
    )


def run(
    target: HFTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    predictions: Sequence[Sequence[int]] = (),
) -> tuple[list[list[int]], list[str | None], int]:
    """(texts, reasons to finish, accepted drafts)."""
    drafter.bind(target)
    texts: list[list[int]] = [[] for _ in prompts]
    reasons: list[str | None] = [None] * len(prompts)
    accepted = 0
    for step in decode(target, drafter, prompts, options, predictions=predictions):
        accepted += sum(step.accepted)
        for b, (new, reason) in enumerate(zip(step.emitted, step.finish, strict=True)):
            texts[b].extend(new)
            reasons[b] = reason or reasons[b]
    return texts, reasons, accepted


def predictions_for(case: Case, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What is expected: the true text with every seventh token wrong and every tenth left out."""
    if not case.uses_predictions:
        return []
    changed = [[(t + (i % 7 == 6)) % V for i, t in enumerate(text)] for text in texts]
    return [[t for i, t in enumerate(text) if i % 10 != 9] for text in changed]


def check_that_drafts_change_no_token(target: HFTarget, case: Case, shape: TreeShape) -> None:
    """A ragged batch of 8 against plain decoding of the same target: greedy with the rule that is
    chosen, drawn with `match`."""
    draft = nearby(target)
    for temperature, rule in ((0.0, "auto"), (1.0, "match")):
        expected = plain_texts(target, temperature)
        options = DecodeOptions(
            sampler=Sampler(temperature=temperature),
            max_new_tokens=NUM_NEW,
            shape=shape,
            rule=rule,
        )
        texts, _, accepted = run(
            target,
            case.build(draft),
            prompts_of(LENGTHS),
            options,
            predictions_for(case, expected),
        )
        assert texts == expected, temperature
        if case.drafts and temperature == 0:
            assert accepted > 0, f"{case} never had a draft accepted: nothing was tested"


@lru_cache(maxsize=2)
def nearby(target: HFTarget) -> HFTarget:
    """One draft model for all drafters on this target."""
    return disturbed(target, 0.005)


@lru_cache(maxsize=8)
def plain_texts(target: HFTarget, temperature: float) -> list[list[int]]:
    options = DecodeOptions(sampler=Sampler(temperature=temperature), max_new_tokens=NUM_NEW)
    texts, _, _ = run(target, NoDrafter(), prompts_of(LENGTHS), options)
    return texts


@pytest.mark.every(2)
@by_shape
@by_case
def test_greedy_text_is_plain_text(case: Case, shape: TreeShape) -> None:
    """A ragged batch of 8; a draft model is often right."""
    check_plain_text(case, shape, models().related)


independent = pytest.mark.parametrize(
    "case", [case for case in TEXT_CASES if case.kind == "independent"], ids=str
)


@by_shape
@independent
@pytest.mark.every(3)
def test_greedy_text_is_plain_text_with_random_weights(case: Case, shape: TreeShape) -> None:
    """The same with a draft model that knows nothing of the target."""
    check_plain_text(case, shape, models().unrelated)


@by_shape
@independent
@pytest.mark.every(3)
def test_greedy_text_is_plain_text_with_the_target_as_draft(case: Case, shape: TreeShape) -> None:
    check_plain_text(case, shape, models().target)


def check_plain_text(case: Case, shape: TreeShape, draft: HFTarget) -> None:
    m = models()
    prompts = prompts_of(LENGTHS)
    expected = [m.reference.text(prompt, NUM_NEW) for prompt in prompts]
    texts, reasons, accepted = run(
        m.target,
        case.build(draft),
        prompts,
        DecodeOptions(max_new_tokens=NUM_NEW, shape=shape),
        predictions_for(case, expected),
    )
    assert texts == expected
    assert reasons == ["length"] * len(prompts)
    if case.drafts and draft is not m.unrelated:
        assert accepted > 0, f"{case} never had a draft accepted: nothing was tested"


@pytest.mark.every(4)
@pytest.mark.parametrize("rule", ["match", "rejection"])
@by_shape
@by_case
def test_greedy_text_alone_and_with_either_rule(case: Case, shape: TreeShape, rule: str) -> None:
    """A batch of one, whose keys go into a second piece of the cache (see `conftest.py`); where a
    draft model is asked, one that is often right and one that is not."""
    m = models()
    (prompt,) = prompts_of([22])
    expected = [m.reference.text(prompt, 16)]
    options = DecodeOptions(max_new_tokens=16, shape=shape, rule=rule)
    for draft in [m.related, m.unrelated] if case.kind == "independent" else [m.related]:
        texts, _, _ = run(
            m.target, case.build(draft), [prompt], options, predictions_for(case, expected)
        )
        assert texts == expected


@lru_cache(maxsize=1)
def ending(ends: frozenset[int]) -> tuple[HFTarget, HFTarget]:
    """Target and draft model with these end tokens."""
    m = models()
    target, draft = (
        HFTarget(copy.deepcopy(one.model), end_ids=ends) for one in (m.target, m.related)
    )
    return target, draft


@by_case
def test_end_tokens_end_the_text_inside_a_block(case: Case) -> None:
    """Three tokens of each row's text are declared end tokens, so rows end in different steps."""
    m = models()
    prompts = prompts_of(LENGTHS)
    whole = [m.reference.text(prompt, 20) for prompt in prompts]
    ends = frozenset({whole[0][9], whole[3][14], whole[6][4]})
    first = [next((i for i, t in enumerate(text) if t in ends), None) for text in whole]
    expected = [t if i is None else t[: i + 1] for t, i in zip(whole, first, strict=True)]
    target, draft = ending(ends)
    texts, reasons, _ = run(
        target,
        case.build(draft),
        prompts,
        DecodeOptions(max_new_tokens=20, shape=SHAPES[0]),
        predictions_for(case, whole),
    )
    assert texts == expected
    assert reasons == ["length" if i is None else "stop" for i in first]


@by_case
def test_any_maximum_length_cuts_the_same_text(case: Case) -> None:
    """1 to 9 tokens with blocks of up to 6: the limit falls on every place of a block."""
    m = models()
    prompts = prompts_of((1, 6))
    whole = [m.reference.text(prompt, 9) for prompt in prompts]
    for count in range(1, 10):
        texts, _, _ = run(
            m.target,
            case.build(m.related),
            prompts,
            DecodeOptions(max_new_tokens=count, shape=SHAPES[0]),
            predictions_for(case, whole),
        )
        assert texts == [text[:count] for text in whole], f"max_new_tokens={count}"


@by_case
def test_text_ends_where_the_context_ends(case: Case) -> None:
    """Prompts of 60 tokens, of 90, and at the limit: 95 of 96, which leaves one token."""
    m = models()
    prompts = prompts_of((60, 90, CONTEXT - 1))
    expected = [m.reference.text(prompt, CONTEXT) for prompt in prompts]
    assert [len(text) for text in expected] == [36, 6, 1]
    texts, reasons, _ = run(
        m.target,
        case.build(m.related),
        prompts,
        DecodeOptions(max_new_tokens=200, shape=SHAPES[0]),
        predictions_for(case, expected),
    )
    assert texts == expected
    assert reasons == ["context"] * 3


@by_case
def test_a_prompt_that_fills_the_context_is_refused(case: Case) -> None:
    m = models()
    drafter = case.build(m.related)
    with pytest.raises(InputError, match="context of 96"):
        run(m.target, drafter, prompts_of((3, CONTEXT)), DecodeOptions())


@by_case
def test_greedy_text_with_penalties_and_bias(case: Case) -> None:
    """Every law has the history of its own path; the reference does its own arithmetic."""
    m = models()
    sampler = Sampler(
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((5, 2.0), (9, -3.0)),
    )
    prompts = prompts_of(LENGTHS[1::2])
    expected = [m.reference.text(prompt, 20, sampler) for prompt in prompts]
    texts, _, _ = run(
        m.target,
        case.build(m.related),
        prompts,
        DecodeOptions(sampler=sampler, max_new_tokens=20, shape=SHAPES[1]),
        predictions_for(case, expected),
    )
    assert texts == expected


@by_case
def test_float32_text_differs_at_near_ties_only(case: Case) -> None:
    """float32 rounds differently for other batch shapes: a first difference is allowed where the
    target's two largest logits are less than 1e-3 apart, and nowhere else."""
    m = models(torch.float32)
    prompts = prompts_of(LENGTHS)
    expected = [m.reference.text(prompt, NUM_NEW) for prompt in prompts]
    texts, _, _ = run(
        m.target,
        case.build(m.related),
        prompts,
        DecodeOptions(max_new_tokens=NUM_NEW, shape=SHAPES[1]),
        predictions_for(case, expected),
    )
    for prompt, text, wanted in zip(prompts, texts, expected, strict=True):
        assert len(text) == len(wanted)
        same = next((i for i in range(len(text)) if text[i] != wanted[i]), None)
        if same is not None:
            top = m.reference.logits([*prompt, *wanted[:same]]).topk(2).values
            gap = float(top[0] - top[1])
            assert gap < 1e-3, f"{case} differs at token {same}, where the gap is {gap:.2g}"
