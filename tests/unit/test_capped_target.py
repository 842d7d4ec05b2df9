"""A capped target speaks as one of which the end of the head was cut off."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftsmith.distill.trajectories.collect import TransformersBackend
from draftsmith.distill.trajectories.types import CollectRequest, CollectSettings, Forcing
from draftsmith.errors import InputError
from draftsmith.targets.base import VocabLimitedTarget
from draftsmith.targets.toy import TabularTarget

KNOWN = 5


@pytest.mark.parametrize("forcing", ["greedy", "sample", "beam"])
def test_texts_and_laws_are_those_over_the_tokens_that_are_left(forcing: Forcing) -> None:
    whole = TabularTarget(8, seed=3)
    settings = CollectSettings(
        forcing=forcing,
        samples=40 if forcing == "sample" else 1,
        beams=4 if forcing == "beam" else 1,
        max_new_tokens=6,
        top_k=None,
    )
    requests = [CollectRequest(prompt_id=str(first), prompt=(first, 1)) for first in range(KNOWN)]
    found = TransformersBackend(VocabLimitedTarget(whole, KNOWN)).collect(requests, settings)
    assert {token for one in found for token in one.tokens} <= set(range(KNOWN))
    for one in found:
        assert one.top is not None and len(one.tokens) == 6
        for place in range(6):
            said = whole.logits_after([*one.prompt, *one.tokens[:place]])
            wanted = torch.log_softmax(said[:KNOWN], -1).numpy()
            np.testing.assert_allclose(one.top.log_p_NK[place], wanted, atol=1e-6)
    uncapped = TransformersBackend(whole).collect(requests, settings)
    assert max(token for one in uncapped for token in one.tokens) >= KNOWN


@pytest.mark.parametrize("size", [-3, 0, 9])
def test_a_cap_that_is_none_is_refused(size: int) -> None:
    with pytest.raises(InputError, match=rf"tabular has 8 tokens.*to {size}\b"):
        VocabLimitedTarget(TabularTarget(8), size)
