"""Every drafter on transformers' code in half precision, by forwards of one fixed width: drafts
change no token. The reference is plain decoding of the same target, whose logits are shown to be
right in `tests/parity/test_fixed_width.py`.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from draftsmith.core.types import TreeShape
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

from .cases import Case
from .test_greedy import CONTEXT, V, by_case, by_shape, check_that_drafts_change_no_token

WIDTH = 16
"""Fewer tokens than a step of 8 rows feeds, so that pieces end inside a row. A width of 64, with
which attention takes four times as long, is kept in `tests/parity/test_fixed_width.py`."""
by_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@lru_cache(maxsize=2)
def fixed(dtype: torch.dtype) -> HFTarget:
    model = tiny_target(V, seed=2, hidden=128, dtype=dtype, max_length=CONTEXT).model
    return HFTarget(model, fixed_width=WIDTH, end_ids=frozenset())


@by_dtype
@pytest.mark.every(23)
@by_shape
@by_case
def test_drafts_change_no_token(case: Case, shape: TreeShape, dtype: torch.dtype) -> None:
    check_that_drafts_change_no_token(fixed(dtype), case, shape)
