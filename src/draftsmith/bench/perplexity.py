"""The perplexity of a model on documents: exp of its loss in nats per token.

Every document is cut by the model's own tokenizer (with the begin token that it puts, if it puts
one) and ends after `LONGEST` tokens, as in "Speculative Decoding Scaling Laws". Its first token has
nothing before it and is not predicted:

    ids        b  t1  t2  t3
    read       b  t1  t2
    predicted     t1  t2  t3

Every predicted token counts the same. Models with other tokenizers predict other tokens: their
perplexities on one text are not on one scale.

Shape letters: T tokens of a piece, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.bench.metrics import ratio
from draftsmith.core.cache import KVCache, lay_out
from draftsmith.core.types import Signals
from draftsmith.errors import InputError
from draftsmith.targets.base import CHUNK, Target

LONGEST = 2048
"""Tokens of a document that are read."""
_LOGITS = 1 << 24
"""Numbers that stand in memory at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """The perplexity of a model on documents."""

    value: float
    moe: float | None
    """Half the 95 % interval, over documents (first order); None: there was one only."""
    loss: float
    """Nats per token."""
    tokens: int
    """Predicted ones."""
    documents: int
    cut: int
    """Documents that were longer than what is read."""
    unread: int
    """Their tokens behind that."""
    longest: int
    """Tokens of a document that were read at most."""


def perplexity(
    model: Target, documents: Iterable[str], *, longest: int = LONGEST, piece: int | None = None
) -> Perplexity:
    """Read all documents.

    Args:
        longest: tokens of a document to read; less where the model's context is shorter.
        piece: tokens per forward; None: as many as memory for their logits is worth.

    Raises:
        InputError: no document has two tokens, or the tokenizer is another model's.
    """
    longest = min(longest, model.max_length or longest)
    cache = model.new_cache(1, longest)
    parts: list[tuple[float, float]] = []
    cut = unread = 0
    for document in documents:
        ids = _token_ids(model, document)
        cut += len(ids) > longest
        unread += max(len(ids) - longest, 0)
        ids = ids[:longest]
        if len(ids) > 1:
            parts.append((_loss(model, cache, ids, piece), len(ids) - 1))
    if not parts:
        raise InputError(
            f"there is nothing to measure the perplexity of {model.name} on: no document has two "
            "tokens"
        )
    loss = ratio(parts)
    value = math.exp(loss.value) if loss.value < 700 else math.inf
    return Perplexity(
        value=value,
        moe=None if loss.moe is None else value * loss.moe,
        loss=loss.value,
        tokens=int(sum(number for _, number in parts)),
        documents=len(parts),
        cut=cut,
        unread=unread,
        longest=longest,
    )


def read_along(
    model: Target, cache: KVCache, ids: Sequence[int], piece: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first, logits_TV) by piece: row t holds the logits behind `ids[first + t]`.

    The logits of a long text over a large vocabulary would fill gigabytes: each piece is dropped
    before the next. What the cache held before is forgotten.
    """
    size = piece or max(1, min(CHUNK, _LOGITS // model.vocab_size))
    cache.rewind([0])
    for first in range(0, len(ids), size):
        part = list(ids[first : first + size])
        tokens_BT, block = lay_out(cache, [part])
        out = model.forward(torch.from_numpy(tokens_BT), block, len(part), Signals())
        cache.commit(np.array([len(part)]))
        yield first, out.logits_BNV[0]


@torch.inference_mode()
def _loss(model: Target, cache: KVCache, ids: Sequence[int], piece: int | None) -> float:
    """Return the nats of all tokens but the first."""
    total = 0.0
    for first, logits_TV in read_along(model, cache, ids[:-1], piece):
        wide_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
        next_T = torch.tensor(ids[first + 1 : first + 1 + len(wide_TV)], device=wide_TV.device)
        nats_T = torch.nn.functional.cross_entropy(wide_TV, next_T, reduction="none")
        total += float(nats_T.double().sum())
    return total


def _token_ids(model: Target, document: str) -> list[int]:
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer to read text with")
    ids: list[int] = model.tokenizer(document, verbose=False)["input_ids"]
    if max(ids, default=0) >= model.vocab_size:
        raise InputError(
            f"the tokenizer of {model.name} gives token {max(ids)}, outside the vocabulary of "
            f"{model.vocab_size}: tokenizer and model do not belong together"
        )
    return ids
