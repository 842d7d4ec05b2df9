"""`FallbackDrafter`: another drafter drafts where a prediction offers no draft.

    prediction   a b c d e f        output   a b X . . .
                                              `+' |  `--- the second drafter's
                                       aligned    the divergence

Both see every accepted token, so either can go on at any step. A step has one tree: while any row
follows its prediction, rows that have none get no draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import DraftTree, RequestBatch, TreeShape
from draftsmith.drafters.base import Accepted, Drafter, DraftState, TargetView
from draftsmith.drafters.prediction import PredictionDrafter

OTHER = 2
"""Origin of the second drafter's nodes."""


@dataclass(slots=True)
class _State(DraftState):
    first: DraftState
    second: DraftState

    def take(self, rows: Sequence[int]) -> _State:
        return _State(self.first.take(rows), self.second.take(rows))

    def rewind(self, tokens: Sequence[Sequence[int]]) -> _State:
        return _State(self.first.rewind(tokens), self.second.rewind(tokens))


class FallbackDrafter(Drafter):
    """A prediction first, then `second`."""

    reads_predictions = True

    def __init__(self, first: PredictionDrafter, second: Drafter) -> None:
        super().__init__()
        self.first: Drafter = first
        self.second = second
        self.signals = second.signals
        self.default_shape = first.default_shape

    def bind(self, target: TargetView) -> None:
        self.first.bind(target)
        self.second.bind(target)
        self.signals = self.second.signals

    def max_nodes(self, shape: TreeShape) -> int:
        return max(self.first.max_nodes(shape), self.second.max_nodes(self._own(shape)))

    def _own(self, shape: TreeShape) -> TreeShape:
        """The second drafter keeps its shape, no deeper than is asked."""
        return self.second.default_shape.clip(shape.depth)

    def start(self, request: RequestBatch) -> _State:
        return _State(self.first.start(request), self.second.start(request))

    def resume(self, state: DraftState, request: RequestBatch) -> _State:
        assert isinstance(state, _State)
        return _State(
            self.first.resume(state.first, request), self.second.resume(state.second, request)
        )

    def propose(
        self, state: DraftState, shape: TreeShape, sampler: Sampler, noise: Noise
    ) -> DraftTree:
        assert isinstance(state, _State)
        tree = self.first.propose(state.first, shape, sampler, noise)
        if tree.num_nodes:
            return tree
        tree = self.second.propose(state.second, self._own(shape), sampler, noise)
        origin_BN = torch.full(tuple(tree.parents_BN.shape), OTHER)
        return dataclasses.replace(tree, origin_BN=origin_BN)

    def advance(self, state: DraftState, accepted: Accepted) -> _State:
        assert isinstance(state, _State)
        return _State(
            self.first.advance(state.first, accepted), self.second.advance(state.second, accepted)
        )
