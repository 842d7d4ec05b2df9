"""Several drafters at once: where one has no draft, the next one drafts.

    --drafter suffix+hass:PATH         text      a b c d e . . a b c | x y z
                                       suffix    has a match: d e    | has none
                                       hass      is not asked        | drafts

All see every accepted token, so any of them can go on at any step. Whose draft a token was is its
origin: of the first drafter the origins that it gives itself (0, unless it says otherwise), of the
k-th after it k + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from draftsmith.config import require
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.trees import rows_of
from draftsmith.core.types import PADDING, DraftTree, Proposal, RequestBatch, Signals, TreeShape
from draftsmith.drafters.base import Accepted, Drafter, DraftState, TargetView


@dataclass(slots=True)
class _State(DraftState):
    parts: list[DraftState]

    def take(self, rows: Sequence[int]) -> _State:
        return _State([part.take(rows) for part in self.parts])

    def rewind(self, tokens: Sequence[Sequence[int]]) -> _State:
        return _State([part.rewind(tokens) for part in self.parts])


class Cascade(Drafter):
    """Drafts with the first of several drafters that has a draft for a row.

    A step has one tree of one kind, and which drafter a row has is its own affair: so draws are
    opaque, too, and their q is not used.
    """

    def __init__(self, parts: Sequence[Drafter]) -> None:
        """
        Raises:
            InputError: fewer than two drafters, one that drafts nothing or reads probes of its own
                at every step, or two that read hidden states.
        """
        super().__init__()
        # a cascade within one would have its origins counted as one drafter's
        parts = [one for part in parts for one in part.parts]
        require(len(parts) > 1, "a cascade needs two drafters or more")
        for part in parts:
            name, shape = type(part).__name__, part.default_shape
            require(part.longest != 0, f"{name} drafts nothing: leave it out of the cascade")
            require(
                part.max_nodes(shape) <= shape.num_nodes,
                f"{name} drafts from what it reads at every step, and in a cascade others draft at "
                "some of them: use it alone",
            )
        self._parts = tuple(parts)
        self.default_shape = parts[0].default_shape
        self.reads_predictions = any(part.reads_predictions for part in parts)
        self._check_signals()

    @property
    def wants_threads(self) -> bool:
        return any(part.wants_threads for part in self.parts)

    def _check_signals(self) -> None:
        reading = [part for part in self.parts if part.signals != Signals()]
        names = " and ".join(type(part).__name__ for part in reading)
        require(len(reading) < 2, f"{names} read hidden states: a cascade may hold one that does")
        self.signals = reading[0].signals if reading else Signals()

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self._parts

    def bind(self, target: TargetView) -> None:
        for part in self.parts:
            part.bind(target)
        self._check_signals()

    @property
    def bound_to(self) -> TargetView | None:
        bound = (part.bound_to for part in self.parts)
        return next((target for target in bound if target is not None), None)

    def max_nodes(self, shape: TreeShape) -> int:
        return max(part.max_nodes(own) for part, own in self._shapes(shape))

    def widest(self, shape: TreeShape) -> int:
        return max(part.widest(own) for part, own in self._shapes(shape))

    def _shapes(self, shape: TreeShape) -> list[tuple[Drafter, TreeShape]]:
        """The parts, each with the shape that it drafts where `shape` is asked for."""
        first, *others = self.parts
        return [(first, shape), *((part, _own(part, shape.depth)) for part in others)]

    def start(self, request: RequestBatch) -> _State:
        return _State([part.start(request) for part in self.parts])

    def resume(self, state: DraftState, request: RequestBatch) -> _State:
        assert isinstance(state, _State)
        return _State([p.resume(s, request) for p, s in zip(self.parts, state.parts, strict=True)])

    def propose(
        self,
        state: DraftState,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        assert isinstance(state, _State)
        tree = DraftTree.empty(len(depth_B))
        left_B = depth_B
        for number, (part, own) in enumerate(zip(self.parts, state.parts, strict=True)):
            if not left_B.any():
                break
            deepest = int(left_B.max())
            fitting = _own(part, deepest) if number else shape.clip(deepest)
            found = part.propose(own, fitting, np.minimum(left_B, fitting.depth), sampler, noise)
            tree = rows_of(tree, _opaque(found, number), left_B > 0)
            if part is not self.parts[-1]:  # whose draft may stay on the device
                left_B = np.where((found.parents_BN != PADDING).any(1).cpu().numpy(), 0, left_B)
        return tree

    def advance(self, state: DraftState, accepted: Accepted) -> _State:
        assert isinstance(state, _State)
        origin_BN = accepted.tree.origin_BN
        after = []
        for number, (part, own) in enumerate(zip(self.parts, state.parts, strict=True)):
            seen = accepted
            if origin_BN is not None and accepted.tree.fed_BN is not None:
                # notes on nodes are for the drafter whose nodes they are
                theirs_BN = origin_BN != number + 1 if number else origin_BN > 1
                mine_BN = accepted.tree.fed_BN.masked_fill(theirs_BN, -1)
                seen = replace(accepted, tree=replace(accepted.tree, fed_BN=mine_BN))
            after.append(part.advance(own, seen))
        return _State(after)


def _opaque(tree: DraftTree, number: int) -> DraftTree:
    """The draft of part `number`, whatever it was drawn from."""
    origin_BN = tree.origin_BN
    if number or origin_BN is None:
        origin_BN = torch.full(tuple(tree.parents_BN.shape), number + 1 if number else 0)
    return replace(tree, proposal=Proposal.OPAQUE, q=None, q_rows_BN=None, origin_BN=origin_BN)


def _own(part: Drafter, depth: int) -> TreeShape:
    """Drafters behind the first keep their shapes, no deeper than is asked."""
    return part.default_shape.clip(depth)
