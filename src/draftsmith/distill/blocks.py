"""Documents -> blocks of equal length: EOS after each document, shuffled, joined, cut. No padding.

    documents      aaa bb cccc          (order of the epoch: b a c)
    stream         b b # a a a # c c c c #        # is the end token
    blocks of 4    bb#a aa#c ccc#                 a tail shorter than a block is left out
    order          2 0 1                          shuffled again: a batch is not one file's

Everything is computed from (seed, epoch): there is no state to save, so resuming is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from draftsmith.errors import InputError
from draftsmith.types import TrajectoryBatch

Tokens = NDArray[np.int32]


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
