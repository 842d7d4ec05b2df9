"""Batches of training as functions of the step: documents or trajectories, packed into blocks.

There is no state to save: everything is computed from (seed, epoch), so that a resumed run sees
what an uninterrupted one would have seen.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import count
from queue import Empty, Queue
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.core.types import FullLogprobs, Signals, TopLogprobs, TrajectoryBatch
from draftsmith.distill.tokenizer_training import Tokens
from draftsmith.distill.trajectories.readers import StoredText
from draftsmith.distill.trajectories.teacher import LOGITS_AT_ONCE, log_mass, stable_top
from draftsmith.distill.trajectories.types import TopK, Trajectory
from draftsmith.drafters.independent import causal_forward
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget, causal_head


class BatchSource(Protocol):
    """What a trainer learns from: the batch of a step is a function of the step's number."""

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        """Part `part` of `parts` of the batch of optimiser step `step`."""


@runtime_checkable
class EvaluationSource(BatchSource, Protocol):
    """Held-out batches."""

    @property
    def num_batches(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """One source, and another from step `second_from` on: short blocks first, say, then long ones.

    step             0 1 2 3 4 5
    second_from 4    first 0 1 2 3, then second 0 1
    """

    first: BatchSource
    second: BatchSource
    second_from: int

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
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
    of the following steps, in order. Any other request (a resumed run, an evaluation) is answered
    directly. It is a thread and no worker process: arrow, numpy and torch release the interpreter
    where it counts, and nothing is forked that holds devices or locks.

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

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
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


def close(source: BatchSource) -> None:
    """End the threads that assemble the batches of a source, or of those that it is made of."""
    if isinstance(source, Prefetched):
        source.close()
    elif isinstance(source, InLoop | FromStates):
        close(source.source)
    elif isinstance(source, TextRows):
        close(source.first)
        close(source.text)


class _Run:
    """A thread that assembles the batches of all steps from `first` on, in order."""

    def __init__(self, source: BatchSource, first: int, mine: tuple[int, ...], parts: int) -> None:
        self._ready: Queue[tuple[Any, Any]] = Queue(maxsize=AHEAD * len(mine))
        self._stopped = threading.Event()
        keys = ((step, part, parts) for step in count(first) for part in mine)
        arguments = (source, keys, self._ready, self._stopped)
        threads, alone = torch.get_num_threads(), threading.Event()

        def work() -> None:
            # Without threads of its own: where OpenMP has more threads than there are cores, all
            # of them sleep between operations, and a step takes 1.3 times as long (libgomp).
            torch.set_num_threads(1)
            torch.get_num_threads()  # the first call in a thread adopts the number of all
            alone.set()
            _assemble(*arguments)

        self._thread = threading.Thread(target=work, name="batches", daemon=True)
        self._thread.start()
        alone.wait()
        torch.set_num_threads(threads)  # the number is the thread's own, but new ones inherit it

    def take(self, *key: int) -> TrajectoryBatch | None:
        """The next batch if it is that of `key`, else None."""
        found, value = self._ready.get()
        if isinstance(value, BaseException):
            raise value
        return value if found == key else None

    def stop(self) -> None:
        """End the thread, and wait for it: sources are not read by two at a time."""
        self._stopped.set()
        with suppress(Empty):  # a thread that waits for room finds it
            while True:
                self._ready.get_nowait()
        if threading.current_thread() is not self._thread:  # which may collect garbage, too
            self._thread.join()


def _assemble(
    source: BatchSource,
    keys: Iterator[tuple[int, int, int]],
    ready: Queue[tuple[Any, Any]],
    stopped: threading.Event,
) -> None:
    """What the thread does: fill the queue until it is stopped or a batch cannot be assembled."""
    try:
        for key in keys:
            ready.put((key, source.batch(*key)))
            if stopped.is_set():  # `stop` has made room for one batch more
                return
    except BaseException as error:
        ready.put((None, error))


def blocks_per_step(batch_tokens: int, length: int, flag: str = "--block-length") -> int:
    """How many blocks of this length a batch has. Raises InputError where they do not fill it."""
    if length < 2 or batch_tokens < length or batch_tokens % length:
        raise InputError(f"--batch-tokens {batch_tokens} must be a multiple of {flag} {length}")
    return batch_tokens // length


class PackedBlocks:
    """Packed blocks of tokenised documents, in an order keyed by (seed, epoch). No padding.

    documents      aaa bb cccc          (order of the epoch: b a c)
    stream         b b # a a a # c c c c #        # is the end token
    blocks of 4    bb#a aa#c ccc#                 what is shorter than a block is left out
    order          2 0 1                          shuffled again: a batch is not one file's

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
        self.blocks_per_step = blocks_per_step(batch_tokens, length)
        self.documents = documents
        self.length = length
        self.end_id = end_id
        self.seed = seed
        self.attend_across = attend_across
        self.stand_in = stand_in
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

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingExample:
    """A trajectory and how much each of its tokens counts."""

    trajectory: Trajectory | StoredText
    weight: float = 1.0
    mixed_logprobs: Callable[[], TopK] | None = None
    """Computes logprobs to learn in place of the trajectory's own, when a batch asks for them."""

    def top(self) -> TopK | None:
        """The teacher's logprobs. Raises BackendError when a store is damaged."""
        return self.trajectory.top if self.mixed_logprobs is None else self.mixed_logprobs()

    def without_logprobs(self) -> TrainingExample:
        """The same text, to be learnt as a text."""
        return replace(self, trajectory=self.trajectory.without_logprobs(), mixed_logprobs=None)


Block = tuple[TrainingExample, ...]
"""Documents that stand side by side in one row of a batch."""


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
        return [(document,) for document in usable]
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
    return [tuple(inside) for inside in (*full, *(block[2] for block in unfilled))]


def assemble(blocks: Sequence[Block], length: int, end_id: int) -> TrajectoryBatch:
    """The batch of these blocks, one row each, with the logprobs and features of their documents.

    A document is never cut between prompt and answer: its logprobs hold only behind its prompt.

    documents     p p y y #      p y y y #       p p p y y    (the last one was cut short: no end)
    block of 12   p p y y # # p y y y # #        p p p y y # . . . . . .
    counts        0 0 1 1 1 0 0 1 1 1 1 0        0 0 0 1 1 0 0 ...        answers only
    law row       - - 0 1 2 - - 3 4 5 6 -        - - - 7 8 - - ...        of the token there
    document      0 0 0 0 0 0 1 1 1 1 1 1        0 0 0 0 0 0 1 ...
    features      f f f f f . f f f f f .        f f f f f . . ...        where there are any

    Behind every document stands an end token that does not count. What a block has left over is
    padding.

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
        for number, document in enumerate(block):
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


def _stack(laws: Sequence[TopK]) -> TopLogprobs:
    """One after the other; narrower ones are filled up with cells of probability 0."""
    width = max(law.ids_NK.shape[1] for law in laws)

    def wide(cells: NDArray[np.generic], fill: float) -> NDArray[np.generic]:
        room = width - cells.shape[1]
        return np.pad(cells, ((0, 0), (0, room)), constant_values=fill) if room else cells

    ids = np.concatenate([wide(law.ids_NK, 0) for law in laws])
    log_p = np.concatenate([wide(law.log_p_NK, -np.inf) for law in laws])
    sizes = {law.vocab_size for law in laws}
    whole = bool((log_p.max(axis=1) > -np.inf).all())
    return TopLogprobs(
        ids_NK=torch.from_numpy(ids.astype(np.int64)),
        log_p_NK=torch.from_numpy(log_p),
        vocab_size=sizes.pop() if len(sizes) == 1 else None,
        highest=int(ids.max()) if whole else None,
    )


# --------------------------------------------------------------------------- trajectories


class TrajectoryBlocks:
    """Blocks of whole documents: packed once and shuffled for every epoch, in orders keyed by the
    seed; or, to evaluate, each once and as they come.

    Args:
        batch_blocks: blocks of one optimiser step, over all processes.
        seed: None: blocks in order, and no more after the last.
        one_per_block: documents do not share blocks.

    Raises:
        InputError: no token of the documents counts.
    """

    def __init__(
        self,
        documents: Sequence[TrainingExample],
        *,
        end_id: int,
        length: int,
        batch_blocks: int,
        seed: int | None,
        one_per_block: bool = False,
    ) -> None:
        if seed is not None:
            documents = [documents[i] for i in keyed_rng(seed, 0).permutation(len(documents))]
        self.blocks = pack(documents, length, one_per_block=one_per_block)
        self.end_id, self.length, self.seed = end_id, length, seed
        self.batch_blocks = batch_blocks
        self._epoch, self._order = -1, np.arange(len(self.blocks))

    @property
    def num_batches(self) -> int:
        """Batches of one epoch; the last may be smaller (for evaluation)."""
        return -(-len(self.blocks) // self.batch_blocks)

    @property
    def steps_per_epoch(self) -> float:
        return len(self.blocks) / self.batch_blocks

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        """Rows `part, part + parts, ...` of the step's blocks; InputError if there are none."""
        rows = range(step * self.batch_blocks, (step + 1) * self.batch_blocks)
        if self.seed is None:
            rows = rows[: max(0, len(self.blocks) - rows.start)]
        chosen = [self._block(row) for row in rows[part::parts]]
        if not chosen:
            raise InputError(f"{self.batch_blocks} blocks per batch do not fill {parts} parts")
        return assemble(chosen, self.length, self.end_id)

    def _block(self, index: int) -> Block:
        epoch, place = divmod(index, len(self.blocks))
        if epoch != self._epoch and self.seed is not None:
            self._order = keyed_rng(self.seed, 1 + epoch).permutation(len(self.blocks))
        self._epoch = epoch
        return self.blocks[self._order[place]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRows:
    """A source with rows of plain text below its own, in which every token is learnt. Where the
    drafter reads hidden signals, a teacher computes those of both: `InLoop` around this."""

    first: BatchSource
    text: BatchSource

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        """Part `part` of both: of `first` only what it needs (a row may cost a generation).

        rows of 3 parts    first 0 3 | 1 4 | 2      text 2 | 1 | 0 3      later parts have fewer
        """
        ours = self.first.batch(step, part, parts)
        text = self.text.batch(step, 0, 1)  # all: blocks cost nothing, and may not fill the parts
        return _below(ours, text, torch.arange(len(text.tokens_BT))[parts - 1 - part :: parts])


@dataclass(frozen=True, kw_only=True, slots=True)
class InLoop:
    """Batches of another source with a teacher's whole laws and hidden signals."""

    source: BatchSource
    """An `EvaluationSource` for evaluating."""
    teacher: HFTarget
    signals: Signals = field(default_factory=Signals)
    top_k: int = 0
    """Logprobs are cut to so many tokens; 0: they are whole."""
    known: int | None = None
    """Entries of its head that the drafter's has, too: others are not cut to. None: all."""

    @property
    def num_batches(self) -> int:
        assert isinstance(self.source, EvaluationSource)
        return self.source.num_batches

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        """The source's batch; every counted token has a law."""
        batch = taught(self.source.batch(step, part, parts), self.teacher, self.signals)
        return cut_to(batch, self.top_k, self.known)


@dataclass(frozen=True, kw_only=True, slots=True)
class FromStates:
    """Batches of another source, whose hidden states after the final norm the target's head turns
    into whole logprobs: what the released trainings of EAGLE, HASS, FSPAD and GRIFFIN do."""

    source: BatchSource
    """An `EvaluationSource` for evaluating."""
    head: Callable[[Tensor], Tensor]
    """[.., H] -> logits [.., V]."""
    width: int
    """H: of the last of the states that are stored side by side."""
    top_k: int = 0
    """As `InLoop` has it."""

    @property
    def num_batches(self) -> int:
        assert isinstance(self.source, EvaluationSource)
        return self.source.num_batches

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        """The source's batch; every counted token has a law."""
        batch = self.source.batch(step, part, parts)
        assert batch.features_BTS is not None, "states are checked before they are learnt from"
        batch = with_laws(batch, batch.features_BTS[..., -self.width :], self.head)
        return cut_to(batch, self.top_k)


def taught(batch: TrajectoryBatch, teacher: HFTarget, signals: Signals) -> TrajectoryBatch:
    """The batch with whole laws and, where `signals` asks for any, hidden signals as decoding gives
    them (in float32), by one forward of the teacher over the same blocks.

    Raises:
        InputError: the teacher has no such signals.
    """
    device = teacher.device
    with torch.no_grad(), teacher.native() as model, teacher.capture(signals) as captured:
        fed = replace(
            batch,
            tokens_BT=batch.tokens_BT.to(device),
            documents_BT=None if batch.documents_BT is None else batch.documents_BT.to(device),
        )
        hidden_BTH = causal_forward(model, fed).hidden_BTH
    signals_BTS = captured.signals_BTS
    features_BTS = batch.features_BTS if signals_BTS is None else signals_BTS.float()
    batch = with_laws(batch, hidden_BTH, causal_head(teacher.model))
    return replace(batch, features_BTS=features_BTS)


def with_laws(
    batch: TrajectoryBatch, hidden_BTH: Tensor, head: Callable[[Tensor], Tensor]
) -> TrajectoryBatch:
    """The batch with the whole logprobs that the head makes of the target's states."""
    wanted_BT = batch.mask_ahead(1)
    row_BT = torch.full_like(batch.tokens_BT, -1)
    # logprobs of position t + 1 are computed at position t
    row_BT[:, 1:][wanted_BT[:, :-1]] = torch.arange(int(wanted_BT.sum()))
    laws = FullLogprobs(hidden_NH=hidden_BTH[wanted_BT.to(hidden_BTH.device)], head=head)
    return replace(batch, laws=laws, law_row_BT=row_BT)


def cut_to(batch: TrajectoryBatch, top_k: int, known: int | None = None) -> TrajectoryBatch:
    """The batch with the best so many logprobs of each position, as a store keeps them; 0: all.
    `known`: over the first so many entries of the head, renormalised (see `over_both`)."""
    laws = batch.laws
    if not top_k or not isinstance(laws, FullLogprobs):
        return batch
    ids, log_p = [], []
    with torch.no_grad():
        vocab = laws.head(laws.hidden_NH[:1])[:, :known].shape[-1]
        for part_NH in laws.hidden_NH.split(max(1, LOGITS_AT_ONCE // vocab)):
            wide_NV, total_N1 = log_mass(laws.head(part_NH)[:, :known])
            ids_NK = stable_top(wide_NV, top_k)[1].sort(dim=-1).values
            ids.append(ids_NK)
            log_p.append(wide_NV.gather(1, ids_NK) - total_N1)
    kept = TopLogprobs(ids_NK=torch.cat(ids), log_p_NK=torch.cat(log_p), vocab_size=vocab)
    return replace(batch, laws=kept)


def _below(ours: TrajectoryBatch, text: TrajectoryBatch, rows: Tensor) -> TrajectoryBatch:
    """These rows of text below ours; they have no logprobs and count fully.

    Raises:
        InputError: ours have features, the text has none.
    """
    if (ours.features_BTS is None) != (text.features_BTS is None):
        raise InputError(
            "rows of plain text have no hidden states, the trajectories beside them do: let a "
            "target in memory compute those of both"
        )

    def joined(name: str, fill: float) -> Tensor | None:
        left, right = getattr(ours, name), getattr(text, name)
        if left is None and right is None:
            return None
        if left is None:
            left = torch.full(ours.tokens_BT.shape, fill)
        if right is None:
            right = torch.full(text.tokens_BT.shape, fill, dtype=left.dtype)
        return torch.cat([left, right[rows].to(left.dtype)])

    text = replace(text, law_row_BT=None, weights_BT=None)
    fills = {"law_row_BT": -1, "weights_BT": 1.0}
    names = {one.name for one in fields(ours)} - {"laws"}
    both: dict[str, Any] = {name: joined(name, fills.get(name, 0)) for name in names}
    return replace(ours, **both)


def keyed_rng(*key: int) -> np.random.Generator:
    """A generator whose draws depend on these numbers alone."""
    return np.random.Generator(np.random.PCG64([value % 2**63 for value in key]))
