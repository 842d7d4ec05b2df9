"""Long prompts are fed in pieces, and nobody can tell."""

from __future__ import annotations

import pytest

from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.core.types import TreeShape
from draftsmith.drafters.eagle import Eagle
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


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_a_drafter_reads_the_states_of_all_pieces(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged rows: what is drafted and accepted is what it is with whole prompts."""
    prompts = [[t % 8 for t in range(n)] for n in (1, 5, 13, 30)]
    options = DecodeOptions(max_new_tokens=12, shape=TreeShape.chain(3))
    target = tiny_target(8)
    drafter = Eagle(Eagle.Config(seed=2))
    drafter.bind(target)
    whole = generate(target, drafter, prompts, options)
    assert sum(one.metrics.accepted for one in whole) > 0, "nothing would be compared"
    monkeypatch.setattr(base, "CHUNK", chunk)
    for batch_size in (1, 4):
        pieces = generate(target, drafter, prompts, options, batch_size=batch_size)
        assert [one.token_ids for one in pieces] == [one.token_ids for one in whole]
        assert [one.metrics for one in pieces] == [one.metrics for one in whole]
