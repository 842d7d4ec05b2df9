"""Every drafter on the compiled engine: in no format of weights do drafts change a token.

The reference is plain decoding of the same target. That its logits are right is shown in
`tests/parity/test_compiled_engine.py`.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from draftsmith.core.types import TreeShape
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.native.bindings import compiler
from draftsmith.targets.toy import tiny_target

from .cases import Case
from .test_greedy import CONTEXT, V, by_case, by_shape, check_that_drafts_change_no_token

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

FORMS = ("bfloat16", "int4", "float32", "w8a8")


@lru_cache(maxsize=len(FORMS))
def compiled(form: str) -> HFTarget:
    """Four heads of 32: the narrowest that the engine takes."""
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    model = tiny_target(V, seed=2, hidden=128, dtype=dtype, max_length=CONTEXT).model
    weights = form if form in ("int4", "w8a8") else "auto"
    target = HFTarget(model, weights=weights, compile=True, end_ids=frozenset())
    assert target.engine.endswith(f"{form} weights)")
    return target


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.every(6)
@by_shape
@by_case
def test_drafts_change_no_token(case: Case, shape: TreeShape, form: str) -> None:
    check_that_drafts_change_no_token(compiled(form), case, shape)
