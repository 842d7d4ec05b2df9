"""A drafter that passes everything on and knows the text of every row."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import DraftTree, RequestBatch, TreeShape
from draftsmith.drafters.base import Accepted, Drafter, DraftState, TargetView


class Following(Drafter):
    """Subclasses look at what is proposed behind `known`."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__()
        self.inner = inner
        self.known: list[list[int]] = []
        self.default_shape = inner.default_shape

    def bind(self, target: TargetView) -> None:
        self.inner.bind(target)
        self.signals = self.inner.signals

    def start(self, request: RequestBatch) -> DraftState:
        self.known = [list(row) for row in request.tokens]
        return _Kept(self, self.inner.start(request))

    def propose(
        self,
        state: DraftState,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        assert isinstance(state, _Kept)
        tree = self.inner.propose(state.inner, shape, depth_B, sampler, noise)
        self.look(tree, shape, depth_B, sampler, noise)
        return tree

    @abc.abstractmethod
    def look(
        self,
        tree: DraftTree,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> None:
        """At what was proposed behind `known`."""

    def advance(self, state: DraftState, accepted: Accepted) -> DraftState:
        assert isinstance(state, _Kept)
        for row, new in zip(self.known, accepted.emitted, strict=True):
            row.extend(new)
        return _Kept(self, self.inner.advance(state.inner, accepted))


class _Kept(DraftState):
    def __init__(self, owner: Following, inner: DraftState) -> None:
        self.owner, self.inner = owner, inner

    def take(self, rows: Sequence[int]) -> _Kept:
        self.owner.known = [self.owner.known[b] for b in rows]
        return _Kept(self.owner, self.inner.take(rows))

    def rewind(self, tokens: Sequence[Sequence[int]]) -> _Kept:
        self.owner.known = [list(row) for row in tokens]
        return _Kept(self.owner, self.inner.rewind(tokens))
