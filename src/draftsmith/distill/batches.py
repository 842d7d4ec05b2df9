"""Documents -> blocks of equal length: EOS after each document, shuffled, joined, cut. No padding.

    documents      aaa bb cccc          (order of the epoch: b a c)
    stream         b b # a a a # c c c c #        # is the end token
    blocks of 4    bb#a aa#c ccc#                 a tail shorter than a block is left out
    order          2 0 1                          shuffled again: a batch is not one file's

Everything is computed from (seed, epoch): there is no state to save, so resuming is exact.

Trajectories -> blocks to learn from. A document is never cut: its laws hold only behind its own
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

import threading
import weakref
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from queue import Full, Queue
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from draftsmith.core.types import TopLaws, TrajectoryBatch
from draftsmith.distill.tokenizer_training import Tokens
from draftsmith.distill.trajectories.readers import StoredText
from draftsmith.distill.trajectories.types import TopK, Trajectory
from draftsmith.errors import InputError


class BatchSource(Protocol):
    """What a trainer learns from: the batch of a step is a function of the step's number."""

    def batch(self, step: int, part: int, parts: int) -> TrajectoryBatch:
        """Part `part` of `parts` of the batch of optimiser step `step`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """One source, and another from step `second_from` on: short blocks first, say, then long ones.

    step             0 1 2 3 4 5
    second_from 4    first 0 1 2 3, then second 0 1
    """

    first: BatchSource
    second: BatchSource
    second_from: int

    def batch(self, step: int, part: int, parts: int) -> TrajectoryBatch:
        """The batch of the phase that the step lies in."""
        if step < self.second_from:
            return self.first.batch(step, part, parts)
        return self.second.batch(step - self.second_from, part, parts)


AHEAD = 2
"""Optimiser steps that are assembled in advance."""


class Prefetched:
    """A source whose coming batches are assembled by a thread while the device works.

    step             0        1        2       3
    asked for        parts    parts    parts   ..
    assembled        when     while    while 1 ..       the parts of step 1 are those of step 0
                     asked    0 runs   runs

    The first step shows which parts this process asks for; the thread then assembles the same parts
    of the following steps, in order, through a DataLoader. Any other request (a resumed run, an
    evaluation) is answered directly. A thread in place of a worker process: arrow, numpy and torch
    release the interpreter where it counts, and nothing is forked that holds devices or locks.

    Args:
        source: its batches must depend on (step, part, parts) alone.
    """

    def __init__(self, source: BatchSource) -> None:
        self.source = source
        self.second_from: int | None = getattr(source, "second_from", None)
        """As `Phases` has it."""
        self._asked: tuple[int, int, list[int]] = (-1, 0, [])
        """Step, number of parts, and the parts that this process asked for in that step."""
        self._run: _Run | None = None

    def batch(self, step: int, part: int, parts: int) -> TrajectoryBatch:
        """The source's batch. Raises what the source raises, at the batch that raised it."""
        last, number, asked = self._asked
        if (step, parts) == (last, number) and part not in asked:
            asked.append(part)
        else:
            if (step, parts) != (last + 1, number):
                self.close()
            elif self._run is None:
                self._run = _Run(self.source, step, tuple(asked), parts)
                weakref.finalize(self, self._run.stop)
            self._asked = (step, parts, [part])
        if self._run is not None:
            try:
                found = self._run.take(step, part, parts)
            except BaseException:
                self.close()  # the thread has ended: nothing more will come from it
                raise
            if found is not None:
                return found
            self.close()
        return self.source.batch(step, part, parts)

    def close(self) -> None:
        """End the thread; a later request may start another."""
        if self._run is not None:
            self._run.stop()
            self._run = None


class _Steps(IterableDataset[tuple[tuple[int, int, int], TrajectoryBatch]]):
    """The batches of all steps from `first` on, with what they are the batch of."""

    def __init__(self, source: BatchSource, first: int, mine: tuple[int, ...], parts: int) -> None:
        self.source, self.first, self.mine, self.parts = source, first, mine, parts

    def __iter__(self) -> Iterator[tuple[tuple[int, int, int], TrajectoryBatch]]:
        for step in count(self.first):
            for part in self.mine:
                key = (step, part, self.parts)
                yield key, self.source.batch(*key)


class _Run:
    """A thread that assembles the batches of `_Steps` in order."""

    def __init__(self, source: BatchSource, first: int, mine: tuple[int, ...], parts: int) -> None:
        self._ready: Queue[tuple[Any, Any]] = Queue(maxsize=AHEAD * len(mine))
        self._stopped = threading.Event()
        steps = _Steps(source, first, mine, parts)
        arguments = (steps, self._ready, self._stopped)
        self._thread = threading.Thread(
            target=_assemble, args=arguments, name="batches", daemon=True
        )
        self._thread.start()

    def take(self, *key: int) -> TrajectoryBatch | None:
        """The next batch if it is that of `key`, else None."""
        found, value = self._ready.get()
        if isinstance(value, BaseException):
            raise value
        return value if found == key else None

    def stop(self) -> None:
        """End the thread, and wait for it: sources are not read by two at a time."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:  # which may collect garbage, too
            self._thread.join()


def _assemble(steps: _Steps, ready: Queue[tuple[Any, Any]], stopped: threading.Event) -> None:
    """What the thread does: fill the queue until it is stopped or a batch cannot be assembled."""

    def put(item: tuple[Any, Any]) -> None:
        while not stopped.is_set():
            with suppress(Full):
                return ready.put(item, timeout=0.05)

    try:
        # a generator of its own: noise of the training is drawn from the global one
        loader = DataLoader(
            steps, batch_size=None, collate_fn=lambda item: item, generator=torch.Generator()
        )
        for item in loader:
            put(item)
            if stopped.is_set():
                return
    except BaseException as error:
        put((None, error))


class PackedBlocks:
    """Packed blocks of tokenised documents, in an order keyed by (seed, epoch).

    `documents`: token ids without the end token. `batch_tokens`: tokens of one optimiser step over
    all processes, a multiple of `length`. `attend_across`: False records
    document numbers, so that attention stays inside a document. A negative id is a token outside
    a reduced vocabulary: it is fed as `stand_in` and does not count as something to predict.
    Raises InputError when the text is shorter than one block or the length does not divide a batch.
    """

    def __init__(
        self,
        documents: Sequence[Tokens],
        *,
        end_id: int,
        length: int,
        batch_tokens: int,
        seed: int,
        attend_across: bool = True,
        stand_in: int = 0,
    ) -> None:
        if length < 2 or batch_tokens < length or batch_tokens % length:
            raise InputError(
                f"--batch-tokens {batch_tokens} must be a multiple of the block length {length}"
            )
        self.documents = documents
        self.length = length
        self.end_id = end_id
        self.seed = seed
        self.attend_across = attend_across
        self.stand_in = stand_in
        self.blocks_per_step = batch_tokens // length
        self.num_tokens = sum(len(document) + 1 for document in documents)
        self.num_blocks = self.num_tokens // length
        if self.num_blocks == 0:
            raise InputError(
                f"the text has {self.num_tokens} tokens, fewer than one block of {length}; "
                "give more text or a smaller --block-length"
            )
        self._epoch = -1
        self._stream: Tokens = np.empty(0, np.int32)
        self._owner: Tokens = np.empty(0, np.int32)
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def steps_per_epoch(self) -> float:
        return self.num_blocks / self.blocks_per_step

    def batch(self, step: int, part: int, parts: int) -> TrajectoryBatch:
        """Rows `part, part + parts, ...` of the step's blocks; InputError if there are none."""
        first = step * self.blocks_per_step
        blocks = [self._block(first + row) for row in range(self.blocks_per_step)[part::parts]]
        if not blocks:
            raise InputError(f"{self.blocks_per_step} blocks per batch do not fill {parts} parts")
        tokens_BT = torch.from_numpy(np.stack([tokens for tokens, _ in blocks]).astype(np.int64))
        documents_BT = None
        if not self.attend_across:
            owners = np.stack([owner for _, owner in blocks])
            begins = np.diff(owners, axis=1, prepend=owners[:, :1]) != 0
            documents_BT = torch.from_numpy(begins.cumsum(axis=1))  # numbers inside the block
        known_BT = tokens_BT >= 0
        return TrajectoryBatch(
            tokens_BT=tokens_BT.where(known_BT, torch.tensor(self.stand_in)),
            loss_mask_BT=known_BT,
            documents_BT=documents_BT,
        )

    def _block(self, index: int) -> tuple[Tokens, Tokens]:
        """Tokens and document numbers of the index-th block since the beginning of training."""
        epoch, place = divmod(index, self.num_blocks)
        if epoch != self._epoch:
            self._shuffle(epoch)
        start = int(self._order[place]) * self.length
        cut = slice(start, start + self.length)
        return self._stream[cut], self._owner[cut]

    def _shuffle(self, epoch: int) -> None:
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
        stream = np.empty(self.num_tokens, np.int32)
        owner = np.empty(self.num_tokens, np.int32)
        at = 0
        for number in rng.permutation(len(self.documents)):
            document = self.documents[number]
            end = at + len(document)
            stream[at:end] = document
            stream[end] = self.end_id
            owner[at : end + 1] = number
            at = end + 1
        self._stream, self._owner, self._epoch = stream, owner, epoch
        self._order = rng.permutation(self.num_blocks)


class EvaluationBlocks:
    """Every token of held-out documents predicted exactly once, in blocks that overlap by one.

    stream      # a a a # b b #          an end token is put in front, so that `a` is predicted
    block 1     # a a a
    block 2           a # b b            its first token is context only
    block 3               b # .          padding does not count
    """

    def __init__(
        self,
        documents: Sequence[Tokens],
        *,
        end_id: int,
        length: int,
        batch_blocks: int,
        stand_in: int = 0,
    ) -> None:
        parts = [np.array([end_id], np.int32)]
        for document in documents:
            parts += [np.asarray(document, np.int32), np.array([end_id], np.int32)]
        self.stream = np.concatenate(parts)
        self.length = length
        self.batch_blocks = batch_blocks
        self.stand_in = stand_in
        self.num_blocks = -(-(len(self.stream) - 1) // (length - 1))

    @property
    def num_batches(self) -> int:
        return -(-self.num_blocks // self.batch_blocks)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        """The step-th batch; parts are for several processes."""
        first = step * self.batch_blocks
        blocks = range(first, min(first + self.batch_blocks, self.num_blocks))[part::parts]
        tokens = np.full((len(blocks), self.length), -1, np.int64)
        for row, block in enumerate(blocks):
            cut = self.stream[block * (self.length - 1) :][: self.length]
            tokens[row, : len(cut)] = cut
        known = tokens >= 0
        return TrajectoryBatch(
            tokens_BT=torch.from_numpy(np.where(known, tokens, self.stand_in)),
            loss_mask_BT=torch.from_numpy(known),
        )


class MixedLaws(Protocol):
    """Logprobs that are computed when a batch asks for them."""

    def read(self) -> TopK: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingExample:
    """A trajectory and how much each of its tokens counts."""

    trajectory: Trajectory | StoredText
    weight: float = 1.0
    laws: MixedLaws | None = None
    """Logprobs to learn in place of the trajectory's own."""

    def top(self) -> TopK | None:
        """The teacher's logprobs. Raises BackendError when a store is damaged."""
        return self.trajectory.top if self.laws is None else self.laws.read()

    def without_laws(self) -> TrainingExample:
        """The same text, to be learnt as a text."""
        return replace(self, trajectory=self.trajectory.without_logprobs(), laws=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Documents that are learnt from side by side."""

    documents: tuple[TrainingExample, ...]


def fit(document: Trajectory | StoredText, length: int) -> int:
    """Positions that a document takes in a block of this length, the separator included."""
    return min(document.prompt_length + document.answer_length + 1, length)


OPEN = 32
"""Blocks that are filled at the same time: the more, the less padding."""


def fits(document: Trajectory | StoredText, length: int) -> bool:
    """Whether a block of this length holds all of it."""
    return document.prompt_length + document.answer_length <= length


def pack(
    documents: Sequence[TrainingExample], length: int, *, one_per_block: bool = False
) -> list[Block]:
    """Blocks of whole documents, each in the fullest open block with room for it; one longer than a
    block loses its end.

    Raises:
        InputError: no document's answer begins inside a block.
    """
    usable = [
        d for d in documents if d.trajectory.answer_length and d.trajectory.prompt_length < length
    ]
    if not usable:
        raise InputError(
            f"none of {len(documents)} trajectories has an answer that begins within a block of "
            f"{length} tokens; give a larger --block-length or other prompts"
        )
    if one_per_block:
        return [Block(documents=(document,)) for document in usable]
    full: list[list[TrainingExample]] = []
    # (room, number of the first document, documents), ascending
    unfilled: list[tuple[int, int, list[TrainingExample]]] = []
    for number, document in enumerate(usable):
        size = fit(document.trajectory, length)
        at = bisect_left(unfilled, (size,))
        if at < len(unfilled):
            room, age, inside = unfilled.pop(at)
        else:
            if len(unfilled) == OPEN:
                full.append(unfilled.pop(0)[2])
            room, age, inside = length, number, []
        inside.append(document)
        insort(unfilled, (room - size, age, inside))
    unfilled.sort(key=lambda block: block[1])
    return [Block(documents=tuple(inside)) for inside in (*full, *(block[2] for block in unfilled))]


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
    tops: dict[tuple[int, int], TopK | None] = {}
    # in the order of the files: texts of one row group share its decoding, whatever the cache holds
    for place in sorted(laid, key=_stored_at):
        known = place.document.trajectory
        ids = np.concatenate([np.asarray(part, np.int64) for part in (known.prompt, known.tokens)])
        tokens[place.row, place.at : place.stop] = ids[: place.stop - place.at]
        tops[place.row, place.at] = place.document.top()
    for place in laid:
        b, at, stop, document = place.row, place.at, place.stop, place.document
        known = document.trajectory
        start = at + known.prompt_length
        counts[b, start:stop] = True
        weights[b, start:stop] = document.weight
        top = tops[b, at]
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

    document: TrainingExample
    row: int
    number: int
    """Index of the document in its row."""
    at: int
    stop: int
    """Behind its last token that has room."""


def _stored_at(place: _Place) -> tuple[str, int]:
    """File and row of a document; all documents in memory are at one place."""
    text = place.document.trajectory
    return (str(text.shard.path), text.row) if isinstance(text, StoredText) else ("", 0)


def _lay(blocks: Sequence[Block], length: int) -> Iterator[_Place]:
    """Document behind document."""
    for row, block in enumerate(blocks):
        at = 0
        for number, document in enumerate(block.documents):
            known = document.trajectory
            stop = min(at + known.prompt_length + known.answer_length, length)
            yield _Place(document=document, row=row, number=number, at=at, stop=stop)
            at += fit(known, length)


def _features(laid: Sequence[_Place], shape: tuple[int, int]) -> Tensor | None:
    """[B, T, S]: hidden signals where a document stands, elsewhere 0; None: no document has any."""
    lacking = sum(not place.document.trajectory.has_features for place in laid)
    if lacking == len(laid):
        return None
    if lacking:
        raise InputError(
            f"{lacking} of {len(laid)} trajectories of a batch have no hidden states, the others "
            "do: collect all of them with the same --features"
        )
    out_BTS: Tensor | None = None
    for place in laid:
        states_TS = place.document.trajectory.states(place.stop - place.at)
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
