"""`none`: no drafts. Autoregressive decoding is the same loop with an empty tree."""

from __future__ import annotations

import numpy as np

from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import DraftTree, RequestBatch, TreeShape
from draftsmith.drafters.base import Accepted, Drafter, TextState


class NoDrafter(Drafter):
    """Proposes nothing."""

    default_shape = TreeShape()
    longest = 0
    draws = False

    def start(self, request: RequestBatch) -> TextState:
        return TextState(known=[[] for _ in request.tokens], num_prompt=[0] * len(request.tokens))

    def propose(
        self,
        state: TextState,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        return DraftTree.empty(len(state.known))

    def advance(self, state: TextState, accepted: Accepted) -> TextState:
        return state


DRAFTER = NoDrafter
