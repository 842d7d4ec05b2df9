"""Several drafters at once. Where a chain is asked for, a row has the draft of the first that has
one; a tree is filled by all that are needed.

    --drafter suffix+hass:PATH         text      a b c d e . . a b c | x y z
                                       suffix    has a match: d e    | has none
       chain                           hass      is not asked        | drafts
       tree of depth 2                 hass      is not asked        | drafts the tree
       tree of depth 4                 hass      drafts the tree     | drafts the tree
                                                 as well: d e is short

A tree asked for says how deep a row drafts and how many nodes it has room for. Drafters that take
trees draft that very tree, others chains, those behind the first no deeper than their own shapes.
One after the other they add to the row's tree (`drafters.merging`), until it has a path of full
depth that is `SURE`: a cheap drafter that is sure saves asking the next one.

All see every accepted token, so any of them can go on at any step. Whose draft a token was is its
origin: of the first drafter the origins that it gives itself (0, unless it says otherwise), of the
k-th after it k + 1. A token that several drafted is of the first of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from draftsmith.config import require
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.trees import as_opaque, rows_of
from draftsmith.core.types import PADDING, DraftTree, Proposal, RequestBatch, Signals, TreeShape
from draftsmith.drafters.base import Accepted, Drafter, DraftState, TargetView
from draftsmith.drafters.config import check_sources
from draftsmith.drafters.merging import FilledTree, add_draft, stacked


@dataclass(slots=True)
class _State(DraftState):
    parts: list[DraftState]

    def take(self, rows: Sequence[int]) -> _State:
        return _State([part.take(rows) for part in self.parts])

    def rewind(self, tokens: Sequence[Sequence[int]]) -> _State:
        return _State([part.rewind(tokens) for part in self.parts])


class Cascade(Drafter):
    """Drafts with the first of several drafters that has a draft for a row, or fills its tree with
    the drafts of several.

    Which drafter a row has is its own affair, and so is how its draft is verified: chains that were
    drawn, by what they were drawn from. Draws are opaque in a filled tree, and where a part
    repeats outputs: which of the parts drafts then depends on the verifier's own noise.
    """

    takes_trees = True

    def __init__(self, parts: Sequence[Drafter], names: Sequence[str] | None = None) -> None:
        """
        Args:
            names: of the parts, as counts by source call them; None: those of their classes.

        Raises:
            InputError: fewer than two drafters, one of them twice, one that drafts nothing or reads
                probes of its own at every step, or two that read hidden states.
        """
        super().__init__()
        names = [type(part).__name__ for part in parts] if names is None else names
        # a cascade within one would have its origins counted as one drafter's
        named = [
            (name, one)
            for part, outer in zip(parts, names, strict=True)
            for name, one in zip(part.sources[1:] or (outer,), part.parts, strict=True)
        ]
        parts = [one for _, one in named]
        require(len(parts) > 1, "a cascade needs two drafters or more")
        check_sources("a cascade", [(name, _identity(one)) for name, one in named])
        self.sources = _by_origin([name for name, _ in named])
        for part in parts:
            name, shape = type(part).__name__, part.default_shape
            require(part.longest != 0, f"{name} drafts nothing: leave it out of the cascade")
            require(
                part.max_nodes(shape) <= shape.num_nodes,
                f"{name} drafts from what it reads at every step, and in a cascade others draft at "
                "some of them: use it alone",
            )
            part.rates_nodes = True
        self._parts = tuple(parts)
        self.default_shape = parts[0].default_shape
        self.reads_predictions = any(part.reads_predictions for part in parts)
        self._check_signals()

    @property
    def repeats_outputs(self) -> bool:
        return any(part.repeats_outputs for part in self.parts)

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
        """
        Raises:
            InputError: a tree that does not branch at the root: cut to one token it is a chain,
                and what is drafted then depends on how deep the other rows draft.
        """
        if shape.is_chain:
            return max(part.max_nodes(own) for part, own in self._shapes(shape))
        require(
            not shape.clip(1).is_chain,
            "a cascade fills trees that branch at the root: ask for a tree whose root has two "
            "children or more, such as --draft-tree 2,1,1",
        )
        return shape.num_nodes

    def widest(self, shape: TreeShape) -> int:
        if shape.is_chain:
            return max(part.widest(own) for part, own in self._shapes(shape))
        return shape.num_nodes  # equal siblings become one, with the children of all

    def longest_draw(self, shape: TreeShape) -> int:
        return max(part.longest_draw(own) for part, own in self._shapes(shape))

    def _shapes(self, shape: TreeShape) -> list[tuple[Drafter, TreeShape]]:
        """The parts, each with the shape that it drafts where `shape` is asked for."""
        return [(part, self._shape_of(part, shape)) for part in self.parts]

    def _shape_of(self, part: Drafter, shape: TreeShape) -> TreeShape:
        """Drafters behind the first draft no deeper than their own shapes: beside a chain just
        these, in a tree that tree or a chain."""
        first = part is self.parts[0]
        if shape.is_chain:
            return shape if first else part.default_shape.clip(shape.depth)
        own = shape if part.takes_trees else TreeShape.chain(shape.depth)
        return own if first else own.clip(part.default_shape.depth)

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

        def drafted(number: int, left_B: np.ndarray) -> DraftTree:
            """By one of the parts, in the rows that are left."""
            part = self.parts[number]
            fitting = self._shape_of(part, shape).clip(int(left_B.max()))
            fit_B = np.minimum(left_B, fitting.depth)
            return part.propose(state.parts[number], fitting, fit_B, sampler, noise)

        return (self._first if shape.is_chain else self._filled)(drafted, shape, depth_B)

    def _first(self, drafted: Drafts, shape: TreeShape, depth_B: np.ndarray) -> DraftTree:
        """Each row's draft is that of the first part that has one."""
        tree = DraftTree.empty(len(depth_B))
        left_B = depth_B
        for number, (part, own) in enumerate(self._shapes(shape)):
            if not left_B.any():
                break
            found = drafted(number, left_B)
            if own.is_chain and found.q is not None and not self.repeats_outputs:
                found = replace(found, proposal=Proposal.SAMPLED)  # a chain has no siblings
            else:
                found = as_opaque(found)
            tree = rows_of(tree, _named(found, number), left_B > 0)
            if part is not self.parts[-1]:  # whose draft may stay on the device
                left_B = np.where((found.parents_BN != PADDING).any(1).cpu().numpy(), 0, left_B)
        return tree

    def _filled(self, drafted: Drafts, shape: TreeShape, depth_B: np.ndarray) -> DraftTree:
        """Each row's tree is filled by the parts, one after the other, until it is sure of a
        path. What a row has room for goes by its own depth, as if it were alone."""
        trees = [
            FilledTree(depth=depth, most=shape.clip(depth).num_nodes) for depth in depth_B.tolist()
        ]
        for number in range(len(self.parts)):
            sure_B = np.array([tree.is_sure for tree in trees])
            left_B = np.where(sure_B, 0, depth_B)
            if not left_B.any():
                break
            add_draft(trees, drafted(number, left_B), number)
        return stacked(trees)

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


def _identity(part: Drafter) -> Hashable:
    """What tells a drafter from others: its class and, where it has a model, which one, however its
    folder is written."""
    source = getattr(part.config, "source", None)
    if source == "":
        return type(part), part
    if isinstance(source, str | os.PathLike):
        with suppress(ValueError):  # a name that no file system has
            source = os.path.realpath(source)
    return type(part), source


def _by_origin(names: Sequence[str]) -> tuple[str, ...]:
    """The name behind each origin, see above; the second of one name has a number."""
    own = [
        f"{name} {count}" if (count := names[: at + 1].count(name)) > 1 else name
        for at, name in enumerate(names)
    ]
    return (own[0], *own)


Drafts = Callable[[int, np.ndarray], DraftTree]
"""The draft of the part of this number, where so many tokens are wanted of each row."""


def _named(tree: DraftTree, number: int) -> DraftTree:
    """The draft of part `number`."""
    origin_BN = tree.origin_BN
    if number or origin_BN is None:
        origin_BN = torch.full(tuple(tree.parents_BN.shape), number + 1 if number else 0)
    return replace(tree, origin_BN=origin_BN, prob_BN=None)
