"""Long prompts are fed in pieces, and nobody can tell."""

from __future__ import annotations

import pytest

from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.none import NoDrafter
from draftsmith.targets import base
from draftsmith.targets.toy import TabularTarget, tiny_target


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_prompts_fed_in_pieces_give_the_same_text(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[t % 8 for t in range(n)] for n in (1, 5, 13, 30)]
    options = DecodeOptions(max_new_tokens=12)
    for make in (lambda: TabularTarget(8), lambda: tiny_target(8)):
        target = make()
        drafter = Independent(Independent.Config(), model=make())
        drafter.bind(target)
        whole = generate(target, NoDrafter(), prompts, options)
        monkeypatch.setattr(base, "CHUNK", chunk)
        for batch_size in (1, 4):
            plain = generate(target, NoDrafter(), prompts, options, batch_size=batch_size)
            drafted = generate(target, drafter, prompts, options, batch_size=batch_size)
            assert [one.token_ids for one in plain] == [one.token_ids for one in whole]
            assert [one.token_ids for one in drafted] == [one.token_ids for one in whole]
            assert all(one.metrics.acceptance_rate == 1.0 for one in drafted)
        monkeypatch.undo()
