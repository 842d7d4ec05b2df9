"""Mutants that break what is carried from step to step: caches, sessions, noise, drafter states.

Each must fail the test of the suite that is named beside it, which the intact code passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from draftsmith.core import decode
from draftsmith.core.cache import KVCache
from draftsmith.core.law import Noise
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.lookahead import _Row as LookaheadRow

from . import test_caches, test_rows, test_sessions
from .cases import CASES, Case
from .mutants import break_source

Patcher = Callable[[pytest.MonkeyPatch], None]


def case(label: str) -> Case:
    return next(case for case in CASES if case.label == label)


def noise_by_place(patch: pytest.MonkeyPatch) -> None:
    """A row's noise depends on where it stands in the batch."""
    intact = Noise.__init__

    def init(self: Noise, seed: int, request_ids: Sequence[int], roots: Sequence[int]) -> None:
        intact(self, seed, range(len(request_ids)), roots)

    patch.setattr(Noise, "__init__", init)


def source(owner: Any, name: str, old: str, new: str) -> Patcher:
    return lambda patch: break_source(patch, owner, name, old, new)


@dataclasses.dataclass(frozen=True)
class Mutant:
    breaks: Patcher
    check: Callable[[], None]


MUTANTS = {
    "noise is keyed by the place in the batch": Mutant(
        noise_by_place,
        lambda: test_rows.test_a_row_does_not_depend_on_its_neighbours(
            case("prompt_lookup"), test_rows.SAMPLERS["top_p"]
        ),
    ),
    "a row that stops keeps its last draft in the cache": Mutant(
        source(decode, "_emit", "path[: max(len(taken) - 1, 0)]", "path[: len(taken)]"),
        lambda: test_caches.test_a_stop_inside_a_block_leaves_the_cache_as_if_never_drafted(
            case("independent-greedy")
        ),
    ),
    "a row that stops keeps all that was accepted": Mutant(
        source(decode, "_emit", "path[: max(len(taken) - 1, 0)]", "path if taken else []"),
        lambda: test_caches.test_a_stop_inside_a_block_leaves_the_cache_as_if_never_drafted(
            case("independent-greedy")
        ),
    ),
    "the target's cache commits another path": Mutant(
        source(KVCache, "commit", "path = path_BD[b, :count]", "path = np.arange(count)"),
        lambda: test_caches.test_cache_equals_a_fresh_prefill_after_every_step(
            case("independent-greedy"), 0.0
        ),
    ),
    "the draft model's cache commits another path": Mutant(
        source(
            Independent,
            "advance",
            "state.cache.commit(np.zeros_like(num), columns_BD, num)",
            "state.cache.commit(np.zeros_like(num), np.zeros_like(columns_BD), num)",
        ),
        lambda: test_caches.test_drafts_depend_on_the_rows_tokens_alone(
            case("independent-tree"), 1.0
        ),
    ),
    "a session keeps what another prompt left": Mutant(
        lambda patch: patch.setattr(decode, "common_prefix", lambda a, b: min(len(a), len(b))),
        lambda: test_sessions.test_law_behind_a_prompt_that_changed(case("none"), "match"),
    ),
    "lookahead learns from text that was taken back": Mutant(
        source(
            LookaheadRow,
            "rewound",
            "return _Row(config=self.config).grown(tokens)",
            "self.tokens = list(tokens); return self",
        ),
        lambda: test_sessions.test_law_of_text_that_was_taken_back_and_redrawn(
            case("lookahead"), "rejection"
        ),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_state_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.check()
    mutant.breaks(monkeypatch)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        mutant.check()
    test_caches.prefilled.cache_clear()  # of what broken code computed
