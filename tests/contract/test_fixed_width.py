"""Every drafter on transformers' code in half precision, by forwards of one fixed width: drafts
change no token. The reference is plain decoding of the same target, whose logits are shown to be
right in `tests/parity/test_fixed_width.py`.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from draftsmith.core.decode import DecodeOptions
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.drafters.none import NoDrafter
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

from .cases import Case
from .test_greedy import (
    CONTEXT,
    LENGTHS,
    NUM_NEW,
    V,
    by_case,
    by_shape,
    disturbed,
    predictions_for,
    prompts_of,
    run,
)

WIDTH = 64
by_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@lru_cache(maxsize=2)
def fixed(dtype: torch.dtype) -> HFTarget:
    model = tiny_target(V, seed=2, hidden=128, dtype=dtype, max_length=CONTEXT).model
    return HFTarget(model, fixed_width=WIDTH, end_ids=frozenset())


@lru_cache(maxsize=4)
def plain_texts(dtype: torch.dtype, temperature: float) -> list[list[int]]:
    options = DecodeOptions(sampler=Sampler(temperature=temperature), max_new_tokens=NUM_NEW)
    texts, _, _ = run(fixed(dtype), NoDrafter(), prompts_of(LENGTHS), options)
    return texts


@by_dtype
@pytest.mark.every(4)
@by_shape
@by_case
def test_drafts_change_no_token(case: Case, shape: TreeShape, dtype: torch.dtype) -> None:
    """A ragged batch of 8: greedy with the rule that is chosen, drawn with `match`."""
    target = fixed(dtype)
    draft = disturbed(target, 0.005)
    for temperature, rule in ((0.0, "auto"), (1.0, "match")):
        expected = plain_texts(dtype, temperature)
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
