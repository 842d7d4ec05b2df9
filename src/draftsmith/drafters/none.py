"""`none`: no drafts. Autoregressive decoding is the same loop with an empty tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import DraftTree, RequestBatch, TreeShape
from draftsmith.drafters.base import Accepted, Drafter, DraftState


@dataclass(frozen=True, slots=True)
class _Rows(DraftState):
    count: int

    def take(self, rows: Sequence[int]) -> _Rows:
        return _Rows(len(rows))

    def rewind(self, tokens: Sequence[Sequence[int]]) -> _Rows:
        return _Rows(len(tokens))


class NoDrafter(Drafter):
    """Proposes nothing."""

    default_shape = TreeShape()
    longest = 0

    def start(self, request: RequestBatch) -> _Rows:
        return _Rows(len(request.tokens))

    def propose(self, state: _Rows, shape: TreeShape, sampler: Sampler, noise: Noise) -> DraftTree:
        return DraftTree.empty(state.count)

    def advance(self, state: _Rows, accepted: Accepted) -> _Rows:
        return state


DRAFTER = NoDrafter
