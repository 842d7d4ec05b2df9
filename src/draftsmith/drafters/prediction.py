"""`prediction`: draft from a continuation that is expected ("predicted outputs").

An edited file, a re-translated caption, a corrected answer: most of the text is known beforehand.
While the output follows the prediction, the draft is what comes next in it. After a divergence it
is found again by n-gram, as in llama.cpp's pull request #12127 and speculative re-translation
(`origin` `ALIGNED`: from the start, 1: found again).

    prediction   a b c d e f g             output   a b X d
                     ^                              `+'   |
                     low: a b was used, c was not    |    "d" is found behind low: draft e f g
                                                 aligned
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draftsmith.core.config import MOST_NODES
from draftsmith.core.law import Noise
from draftsmith.core.rows import until_end
from draftsmith.core.sampling import Sampler
from draftsmith.core.trees import stack_drafts
from draftsmith.core.types import ALIGNED, DraftTree, RequestBatch, TreeShape
from draftsmith.drafters.base import Accepted, Drafter, DraftState, RowStates, TargetView, at_least
from draftsmith.errors import InputError

RESYNCED = 1


@dataclass(slots=True)
class _Row:
    """One row's prediction and the place in it."""

    config: PredictionDrafter.Config
    tokens: list[int]
    """The known text."""
    base: int
    """Where the prediction begins in the text."""
    prediction: list[int]
    place: int | None = 0
    """Index of the predicted token that comes next; None: lost."""
    low: int = 0
    """Everything before it has been used. A place that was found again counts only once the output
    has followed it, so a chance match far ahead does not use up what lies between."""
    origin: int = ALIGNED
    _starts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """n-gram of the prediction -> where it stands, ascending; made at the first divergence."""

    def take_in(self, new: Sequence[int]) -> None:
        """The output goes on with these tokens."""
        for token in new:
            self.tokens.append(token)
            if self.next_tokens(1) == [token]:
                assert self.place is not None
                self.place = self.low = self.place + 1
                continue
            self.origin = RESYNCED
            self.place = self._found() if self.config.resync else None

    def _found(self) -> int | None:
        """Behind the nearest unused n-gram that ends the text; longer n-grams first."""
        if self.low >= len(self.prediction):
            return None
        longest, text = self.config.max_ngram, self.tokens
        if not self._starts:
            for n in range(self.config.min_ngram, longest + 1):
                for start in range(len(self.prediction) - n + 1):
                    ngram = tuple(self.prediction[start : start + n])
                    self._starts.setdefault(ngram, []).append(start)
        for n in range(min(longest, len(text)), self.config.min_ngram - 1, -1):
            starts = self._starts.get(tuple(text[-n:]), [])
            nearest = bisect_left(starts, self.low)
            if nearest < len(starts):
                return starts[nearest] + n
        return None

    def next_tokens(self, count: int) -> list[int]:
        return [] if self.place is None else self.prediction[self.place : self.place + count]

    def rewound(self, tokens: Sequence[int]) -> _Row:
        """The row with this text: the prediction is followed anew from where it begins."""
        kept = self.tokens[: self.base] == list(tokens[: self.base])
        row = _Row(
            config=self.config,
            tokens=list(tokens[: self.base]),
            base=self.base,
            prediction=self.prediction if kept else [],
            _starts=self._starts if kept else {},
        )
        row.take_in(tokens[self.base :])
        return row


_State = RowStates[_Row]


class PredictionDrafter(Drafter):
    """Drafts from `RequestBatch.predictions`; rows without one decode plainly.

    OPAQUE, hence lossless, as long as the prediction does not depend on the verifier's noise. One
    that was *sampled* with the same seed and request id does; the rule `match` (which `auto` takes
    for opaque proposals) is exact even then, the others want another seed.
    """

    draws = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        length: int = 16
        """Tokens per draft, unless the caller gives a shape of its own."""
        resync: bool = True
        """Look for the place again after a divergence."""
        max_ngram: int = 3
        """Longest n-gram by which it is found again."""
        min_ngram: int = 1
        """Shortest one; 2 waits for one more token and is right more often."""

        def __post_init__(self) -> None:
            if not 1 <= self.min_ngram <= self.max_ngram:
                raise InputError(
                    "prediction needs 1 <= min_ngram <= max_ngram, got "
                    f"min_ngram={self.min_ngram}, max_ngram={self.max_ngram}."
                )
            at_least(1, length=self.length, most=MOST_NODES)

    config: Config
    reads_predictions = True
    repeats_outputs = True

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.default_shape = TreeShape.chain(self.config.length)
        self._end_ids: frozenset[int] = frozenset()

    def bind(self, target: TargetView) -> None:
        self._end_ids = target.end_ids

    def start(self, request: RequestBatch) -> _State:
        predictions = request.predictions or [()] * len(request.tokens)
        return _State(
            [
                _Row(
                    config=self.config,
                    tokens=list(tokens),
                    base=len(tokens),
                    prediction=list(prediction),
                )
                for tokens, prediction in zip(request.tokens, predictions, strict=True)
            ]
        )

    def resume(self, state: DraftState, request: RequestBatch) -> DraftState:
        """A request that brings predictions starts them at its own end; else the old ones go on."""
        return self.start(request) if request.predictions else state.rewind(request.tokens)

    def propose(
        self,
        state: _State,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        chains = [
            until_end(row.next_tokens(depth), self._end_ids)
            for row, depth in zip(state.rows, depth_B.tolist(), strict=True)
        ]
        origins = [[row.origin] * len(chain) for row, chain in zip(state.rows, chains, strict=True)]
        return stack_drafts(chains, origins=origins)

    def advance(self, state: _State, accepted: Accepted) -> _State:
        for row, new in zip(state.rows, accepted.emitted, strict=True):
            row.take_in(new)
        return state


DRAFTER = PredictionDrafter
