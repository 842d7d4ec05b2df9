"""What trees are grown from: the `Reader` of a draft model, and that of a language model over its
own cache, whose tokens may be other than the target's.

cache columns   [ ... known tokens ... root | n0 n1 | n2 n3 ... ]
                  committed                   staged, in the order in which they were fed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draftsmith.cache import KVCache, lay_out
from draftsmith.targets._base import Target, feed_beginning, stay_inside
from draftsmith.types import Signals


class Reader(Protocol):
    """A draft model that reads a tree, one level after the other, behind what it knows."""

    def root(self) -> Tensor:
        """[B, V] logits over the target's vocabulary, behind the last known token."""
        ...

    def level(self, tokens_BF: Tensor, see_BFC: Tensor, above_BF: Tensor) -> Tensor:
        """[B, F, V] logits behind F nodes of the next depth.

        Args:
            see_BFC: which of the C nodes fed so far, these F at the end, each of them sees.
            above_BF: each one's parent among the nodes of the level before (0: the root).
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabularies:
    """How the draft model's ids and the target's correspond."""

    size: int
    """Of the target's vocabulary."""
    to_draft: Callable[[Tensor], Tensor]
    """Target ids -> ids that the draft model is fed."""
    to_target: Callable[[Tensor], Tensor]
    """Draft logits [R, Vd] -> logits [R, size], -inf where the draft model has no token."""


class ModelReader:
    """Reads with a language model. Afterwards the known tokens are committed, all nodes staged."""

    def __init__(
        self,
        model: Target,
        cache: KVCache,
        known: Sequence[Sequence[int]],
        vocabularies: Vocabularies,
    ) -> None:
        self._model, self._cache, self._known = model, cache, known
        self._vocabularies = vocabularies
        self._depth = 0

    def root(self) -> Tensor:
        """Feed and commit what the cache lacks of the known tokens."""
        pending = [
            self._vocabularies.to_draft(torch.tensor(row[int(have) :], dtype=torch.long)).tolist()
            for row, have in zip(self._known, self._cache.lengths_B, strict=True)
        ]
        pending = feed_beginning(self._model, self._cache, pending)
        fed, block = lay_out(self._cache, pending)
        stay_inside(self._model, block)
        logits_BNV = self._model.forward(torch.from_numpy(fed), block, 1, Signals()).logits_BNV
        self._cache.commit(np.array([len(row) for row in pending]))
        return self._vocabularies.to_target(logits_BNV[:, -1])

    def level(self, tokens_BF: Tensor, see_BFC: Tensor, above_BF: Tensor) -> Tensor:
        """See `Reader`; the parents' states are in the cache, so `above_BF` is not needed."""
        depth_BF = np.full(tokens_BF.shape, self._depth, dtype=np.int64)
        self._depth += 1
        block = self._cache.stage(depth_BF, see_BFC)
        stay_inside(self._model, block)
        fed = self._vocabularies.to_draft(tokens_BF)
        count = tokens_BF.shape[1]
        logits_BFV = self._model.forward(fed, block, count, Signals()).logits_BNV
        rows = self._vocabularies.to_target(logits_BFV.reshape(-1, logits_BFV.shape[-1]))
        return rows.reshape(*tokens_BF.shape, -1)
