"""Trajectories -> blocks to learn from. A document is never cut: its laws hold only behind its own
prompt.

    documents     p p y y #      p y y y #       p p p y y    (the last one was cut short: no end)
    block of 12   p p y y # # p y y y # #        p p p y y # . . . . . .
    counts        0 0 1 1 1 0 0 1 1 1 1 0        0 0 0 1 1 0 0 ...        answers only
    law row       - - 0 1 2 - - 3 4 5 6 -        - - - 7 8 - - ...        of the token there
    document      0 0 0 0 0 0 1 1 1 1 1 1        0 0 0 0 0 0 1 ...
    features      f f f f f . f f f f f .        f f f f f . . ...        where there are any

Behind every document stands an end token that does not count. What a block has left over is
padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.distill.stored_features import StoredFeatures
from draftsmith.distill.stored_laws import StoredLaws
from draftsmith.distill.trajectory import TopK, Trajectory
from draftsmith.errors import InputError
from draftsmith.types import TopLaws, TrajectoryBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighted:
    """A trajectory and how much each of its tokens counts."""

    trajectory: Trajectory
    weight: float = 1.0
    laws: StoredLaws | None = None
    """Those of a trajectory that does not carry them itself."""
    features: StoredFeatures | None = None
    """Likewise: hidden signals."""

    def top(self) -> TopK | None:
        """The laws, wherever they are."""
        return self.trajectory.top if self.laws is None else self.laws.read()

    @property
    def has_features(self) -> bool:
        """Whether hidden signals are anywhere."""
        return self.features is not None or self.trajectory.features is not None

    def states(self, places: int) -> Tensor:
        """[places, S] float32: hidden signals of the first places, wherever they are."""
        if self.features is not None:
            return self.features.read(places)
        own_TS = self.trajectory.features
        assert own_TS is not None, "ask has_features first"
        return torch.from_numpy(own_TS[:places])

    def without_laws(self) -> Weighted:
        """The same text, to be learnt as a text."""
        return replace(self, trajectory=replace(self.trajectory, top=None), laws=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Documents that are learnt from side by side."""

    documents: tuple[Weighted, ...]


def fit(document: Trajectory, length: int) -> int:
    """Places that a document takes in a block of this length, the separator included."""
    return min(len(document.prompt) + len(document.tokens) + 1, length)


OPEN = 32
"""Blocks that are filled at the same time: the more, the less padding."""


def fits(document: Trajectory, length: int) -> bool:
    """Whether a block of this length holds all of it."""
    return len(document.prompt) + len(document.tokens) <= length


def pack(documents: Sequence[Weighted], length: int, *, one_per_block: bool = False) -> list[Block]:
    """Blocks of whole documents, each in the fullest open block with room for it; one longer than a
    block loses its end.

    Raises:
        InputError: no document's answer begins inside a block.
    """
    usable = [d for d in documents if d.trajectory.tokens and len(d.trajectory.prompt) < length]
    if not usable:
        raise InputError(
            f"none of {len(documents)} trajectories has an answer that begins within a block of "
            f"{length} tokens; give a larger --block-length or other prompts"
        )
    if one_per_block:
        return [Block(documents=(document,)) for document in usable]
    full: list[_Open] = []
    unfilled: list[_Open] = []
    for document in usable:
        size = fit(document.trajectory, length)
        fitting = [block for block in unfilled if block.room >= size]
        if fitting:
            block = min(fitting, key=_room)
        else:
            if len(unfilled) == OPEN:
                full.append(min(unfilled, key=_room))
                unfilled.remove(full[-1])
            block = _Open(room=length)
            unfilled.append(block)
        block.documents.append(document)
        block.room -= size
    return [Block(documents=tuple(block.documents)) for block in (*full, *unfilled)]


@dataclass(kw_only=True, slots=True, eq=False)
class _Open:
    """A block that may still take documents."""

    room: int
    documents: list[Weighted] = field(default_factory=list)


def _room(block: _Open) -> int:
    return block.room


def assemble(blocks: Sequence[Block], length: int, end_id: int) -> TrajectoryBatch:
    """The batch of these blocks, one row each, with the laws and features of their documents.

    Raises:
        InputError: features are there for some documents only, or differ in width.
        BackendError: what a store keeps cannot be read, or is not finite.
    """
    shape = (len(blocks), length)
    tokens = np.full(shape, end_id, np.int64)
    counts = np.zeros(shape, bool)
    owner = np.zeros(shape, np.int64)
    row = np.full(shape, -1, np.int64)
    weights = np.zeros(shape, np.float32)
    laws: list[TopK] = []
    num_laws = 0
    laid = list(_lay(blocks, length))
    for place in laid:
        b, at, stop, document = place.row, place.at, place.stop, place.document
        known = document.trajectory
        start = at + len(known.prompt)
        tokens[b, at:stop] = (*known.prompt, *known.tokens)[: stop - at]
        counts[b, start:stop] = True
        weights[b, start:stop] = document.weight
        top = document.top()
        if top is not None:
            row[b, start:stop] = num_laws + np.arange(stop - start)
            laws.append(top)
            num_laws += len(top)
        owner[b, at:] = place.number
        owner[b, at + fit(known, length) :] = place.number + 1
    return TrajectoryBatch(
        tokens_BT=torch.from_numpy(tokens),
        loss_mask_BT=torch.from_numpy(counts),
        documents_BT=torch.from_numpy(owner),
        laws=_stack(laws) if laws else None,
        law_row_BT=torch.from_numpy(row) if laws else None,
        weights_BT=torch.from_numpy(weights),
        features_BTS=_features(laid, shape),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a document stands in a batch."""

    document: Weighted
    row: int
    number: int
    """Of the document in its row."""
    at: int
    stop: int
    """Behind its last token that has room."""


def _lay(blocks: Sequence[Block], length: int) -> Iterator[_Place]:
    """Document behind document."""
    for row, block in enumerate(blocks):
        at = 0
        for number, document in enumerate(block.documents):
            known = document.trajectory
            stop = min(at + len(known.prompt) + len(known.tokens), length)
            yield _Place(document=document, row=row, number=number, at=at, stop=stop)
            at += fit(known, length)


def _features(laid: Sequence[_Place], shape: tuple[int, int]) -> Tensor | None:
    """[B, T, S]: hidden signals where a document stands, elsewhere 0; None: no document has any."""
    lacking = sum(not place.document.has_features for place in laid)
    if lacking == len(laid):
        return None
    if lacking:
        raise InputError(
            f"{lacking} of {len(laid)} trajectories of a batch have no hidden states, the others "
            "do: collect all of them with the same --features"
        )
    out_BTS: Tensor | None = None
    for place in laid:
        states_TS = place.document.states(place.stop - place.at)
        if out_BTS is None:
            out_BTS = torch.zeros(*shape, states_TS.shape[1])
        if states_TS.shape[1] != out_BTS.shape[2]:
            raise InputError(
                f"hidden states of width {states_TS.shape[1]} and {out_BTS.shape[2]} in one batch: "
                "they are of different targets, or collected with different --features"
            )
        out_BTS[place.row, place.at : place.stop] = states_TS
    return out_BTS


def _stack(laws: Sequence[TopK]) -> TopLaws:
    """One after the other; narrower ones are filled up with cells of probability 0."""
    width = max(law.ids_NK.shape[1] for law in laws)

    def wide(cells: NDArray[np.generic], fill: float) -> NDArray[np.generic]:
        room = width - cells.shape[1]
        return np.pad(cells, ((0, 0), (0, room)), constant_values=fill) if room else cells

    ids = np.concatenate([wide(law.ids_NK, 0) for law in laws])
    log_p = np.concatenate([wide(law.log_p_NK, -np.inf) for law in laws])
    sizes = {law.vocab_size for law in laws}
    return TopLaws(
        ids_NK=torch.from_numpy(ids.astype(np.int64)),
        log_p_NK=torch.from_numpy(log_p),
        vocab_size=sizes.pop() if len(sizes) == 1 else None,
    )
