"""Notes the teacher's laws while text is decoded, so that no second forward is needed for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.distill.teacher import Laws, read_laws
from draftsmith.drafters._base import Accepted, Drafter, DraftState
from draftsmith.law import Noise
from draftsmith.sampler import Sampler
from draftsmith.types import DraftTree, RequestBatch, TreeShape


@dataclass(frozen=True, slots=True)
class _Noted(DraftState):
    inner: DraftState
    rows: tuple[int, ...]
    """Row of the request batch."""

    def take(self, rows: Sequence[int]) -> _Noted:
        return _Noted(self.inner.take(rows), tuple(self.rows[row] for row in rows))

    def rewind(self, tokens: Sequence[Sequence[int]]) -> _Noted:
        return _Noted(self.inner.rewind(tokens), self.rows)


class Notes(Drafter):
    """A drafter as it is, that notes which law every emitted token was taken from.

    tree        root -+- n0 --- n2       accepted n0 n2, then the teacher's own token y2
                      `- n1
    logits row  0        1  2   3        y0 = n0 from row 0, y1 = n2 from row 1, y2 from row 3
    """

    def __init__(self, inner: Drafter, top_k: int | None, num_rows: int) -> None:
        super().__init__()
        self.inner, self.top_k = inner, top_k
        self.laws: list[list[Laws]] = [[] for _ in range(num_rows)]
        # an instance's own: what this drafter reads is what the inner one reads
        self.signals = inner.signals
        self.default_shape = inner.default_shape

    def max_nodes(self, shape: TreeShape) -> int:
        return self.inner.max_nodes(shape)

    def start(self, request: RequestBatch) -> _Noted:
        return _Noted(self.inner.start(request), tuple(range(len(request.tokens))))

    def propose(
        self, state: DraftState, shape: TreeShape, sampler: Sampler, noise: Noise
    ) -> DraftTree:
        return self.inner.propose(_noted(state).inner, shape, sampler, noise)

    def advance(self, state: DraftState, accepted: Accepted) -> _Noted:
        noted, at = _noted(state), []
        for b, tokens in enumerate(accepted.emitted):
            path = accepted.verdict.path_BD[b, : max(len(tokens) - 1, 0)].tolist()
            at += [(b, node) for node in [0, *(1 + n for n in path)][: len(tokens)]]
        emitted = [token for tokens in accepted.emitted for token in tokens]
        rows, nodes = zip(*at, strict=True)
        laws = read_laws(accepted.out.logits_BNV[list(rows), list(nodes)], emitted, self.top_k)
        first = 0
        for b, tokens in enumerate(accepted.emitted):
            if tokens:
                self.laws[noted.rows[b]].append(laws.part(first, first + len(tokens)))
            first += len(tokens)
        return _Noted(self.inner.advance(noted.inner, accepted), noted.rows)


def _noted(state: DraftState) -> _Noted:
    assert isinstance(state, _Noted), "a state that this drafter started"
    return state
