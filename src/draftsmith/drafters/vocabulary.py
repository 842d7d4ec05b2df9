"""How a draft model's tokens are the target's: the same, padded at the end, or a subset.

Drafting with a model that has another tokenizer, through text.

    target tokens --decode--> text --encode--> draft tokens     what the draft model reads
    draft chain   --decode--> text --encode--> target tokens    what is proposed

Any text may be proposed, so the proposal is opaque and verification (by token match) stays exact
whatever the tokenizers do; only acceptance depends on how well their pieces meet. The idea is known
as universal assisted generation; the acceptance that scaling-law studies report for such pairs is
measured on re-tokenised text instead and is not the rate of a real decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.core.cache import KVCache
from draftsmith.core.law import Noise
from draftsmith.core.rows import common_prefix
from draftsmith.core.sampling import Sampler
from draftsmith.core.trees import stack_chains
from draftsmith.core.types import DraftTree, Proposal, TreeShape
from draftsmith.drafters.base import Accepted, DraftState, TargetView
from draftsmith.drafters.tree_growth import ChildSelection, ModelReader, Vocabularies, grow
from draftsmith.errors import BackendError
from draftsmith.targets.base import Target

SUBSET_FILE = "draft_vocab.safetensors"
"""File beside a draft model with a subset of the target's tokens."""


def same_tokens(draft: Any, target: Any) -> bool:
    """Whether equal ids mean equal tokens (padding at the end of either aside)."""
    if draft is None or target is None:
        return True  # token ids only: the caller says that they are the same
    ours, theirs = draft.get_vocab(), target.get_vocab()
    small, large = sorted((ours, theirs), key=len)
    return all(large.get(token) == i for token, i in small.items())


def padded(draft_size: int, target_size: int) -> Vocabularies:
    """One family, vocabularies padded differently: the common ids, no mass on the rest."""
    common = min(draft_size, target_size)

    def to_target(logits_RV: Tensor) -> Tensor:
        if draft_size == target_size:
            return logits_RV
        room = target_size - common
        return torch.nn.functional.pad(logits_RV[:, :common], (0, room), value=-torch.inf)

    def to_draft(ids: Tensor) -> Tensor:
        return ids.clamp(max=common - 1) if target_size > common else ids

    return Vocabularies(size=target_size, to_draft=to_draft, to_target=to_target)


@dataclass(frozen=True, slots=True)
class VocabularySubset:
    """The vocabulary of a draft model with a subset of the target's tokens."""

    d2t: Tensor
    """[Vd]: the target's id of each draft id."""
    unknown: int
    """Draft id that every other token is read as."""

    @classmethod
    def beside(cls, source: str) -> VocabularySubset | None:
        """Read the subset from the draft model's folder; None: its vocabulary is whole."""
        path = Path(source) / SUBSET_FILE
        if not source or not path.is_file():
            return None
        tensors = load_file(path)
        missing = {"d2t", "unknown"} - tensors.keys()
        if missing:
            raise BackendError(
                f"{path} holds no tensor {min(missing)!r}: train the draft model again."
            )
        return cls(tensors["d2t"].long(), int(tensors["unknown"]))

    def vocabularies(self, draft_size: int, target_size: int) -> Vocabularies:
        d2t, unknown = self.d2t, self.unknown
        fits = bool(((d2t >= 0) & (d2t < target_size)).all()) and 0 <= unknown < draft_size
        if len(d2t) != draft_size or not fits:
            raise BackendError(
                f"The draft model's vocabulary subset names {len(d2t)} of its {draft_size} ids and "
                f"target ids up to {int(d2t.max())}, but the target has {target_size}: it was made "
                "for another target."
            )
        t2d = torch.full((target_size,), unknown)
        t2d[d2t] = torch.arange(len(d2t))
        there = {t2d.device: (d2t, t2d)}  # uploaded once

        def tables(device: torch.device) -> tuple[Tensor, Tensor]:
            if device not in there:
                there[device] = d2t.to(device), t2d.to(device)
            return there[device]

        def to_target(logits_RV: Tensor) -> Tensor:
            wide = logits_RV.new_full((logits_RV.shape[0], target_size), -torch.inf)
            wide[:, tables(logits_RV.device)[0]] = logits_RV
            return wide

        def to_draft(ids: Tensor) -> Tensor:
            return tables(ids.device)[1][ids]

        return Vocabularies(size=target_size, to_draft=to_draft, to_target=to_target)


_TAIL = 16
"""Tokens of context that decide how the next piece of text is tokenized."""
_WINDOW = 400
"""Characters at the end of a text that are cut anew at each step; what lies before stays."""


@dataclass(slots=True)
class _Reading:
    """One row: the text so far, cut by the draft model's tokenizer."""

    known: list[int]
    """Target tokens."""
    text: str = ""
    ids: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    """Where in the text each of `ids` begins."""


@dataclass(slots=True)
class ReencodedState(DraftState):
    """The draft model's cache, and per row the target's tokens with the draft model's reading."""

    cache: KVCache
    rows: list[_Reading]
    fed: list[list[int]]
    """Draft tokens that the cache holds."""

    @property
    def known(self) -> list[tuple[int, ...]]:
        """The texts as the draft model reads them."""
        return [row.ids for row in self.rows]

    @property
    def num_prompt(self) -> list[int]:
        return [len(row.ids) for row in self.rows]

    @classmethod
    def begin(cls, cache: KVCache, known: Sequence[Sequence[int]]) -> ReencodedState:
        rows = [_Reading(known=list(row)) for row in known]
        return cls(cache=cache, rows=rows, fed=[[] for _ in rows])

    def take(self, rows: Sequence[int]) -> ReencodedState:
        self.cache.take(rows)
        return ReencodedState(
            cache=self.cache,
            rows=[self.rows[b] for b in rows],
            fed=[self.fed[b] for b in rows],
        )

    def rewind(self, tokens: Sequence[Sequence[int]]) -> ReencodedState:
        rows = [_Reading(known=list(row)) for row in tokens]
        return ReencodedState(cache=self.cache, rows=rows, fed=self.fed)

    def advance(self, accepted: Accepted) -> ReencodedState:
        for row, new in zip(self.rows, accepted.emitted, strict=True):
            row.known.extend(new)
        return self


def reencoded_tree(
    draft: Target,
    target: TargetView,
    state: ReencodedState,
    shape: TreeShape,
    sampler: Sampler,
    noise: Noise,
) -> DraftTree:
    """A chain of target tokens that spell the draft model's continuation."""
    keep = []
    for row, fed in zip(state.rows, state.fed, strict=True):
        _read(row, target.tokenizer, draft.tokenizer)
        keep.append(min(common_prefix(row.ids, fed), len(row.ids) - 1))
    state.cache.rewind(keep)
    same = Vocabularies(
        size=draft.vocab_size, to_draft=lambda ids: ids, to_target=lambda logits: logits
    )
    grown = grow(
        ModelReader(draft, state.cache, state.known, same),
        TreeShape.chain(shape.depth),
        # kept when the target's own draw equals it: the likeliest serves best
        ChildSelection("greedy", sampler, noise, state),
    )
    state.cache.rollback()
    state.fed = [list(row.ids) for row in state.rows]
    chains = []
    for row, drafted in zip(state.rows, grown.tokens_BN.tolist(), strict=True):
        outgrown = draft.max_length is not None and len(row.ids) + shape.depth > draft.max_length
        text = "" if outgrown else _spelled(row.ids, drafted, draft)
        chains.append(_as_target_tokens(row.known, text, target.tokenizer)[: shape.depth])
    tokens, parents, _ = stack_chains(chains)
    return DraftTree(tokens_BN=tokens, parents_BN=parents, proposal=Proposal.OPAQUE)


def _read(row: _Reading, target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Bring text, ids and starts up to date with the known target tokens."""
    text = target_tokenizer.decode(row.known, skip_special_tokens=True)
    # keep the old cut up to a boundary well before the end, and cut anew behind it
    kept = 0
    limit = min(len(row.text), len(text)) - _WINDOW
    if limit > 0 and text[:limit] == row.text[:limit]:
        kept = int(np.searchsorted(np.asarray(row.starts), limit, side="left"))
        while kept > 0 and not text[row.starts[kept - 1]].isspace():
            kept -= 1
        kept = max(kept - 1, 0)
    begin = row.starts[kept] if kept else 0
    cut = draft_tokenizer(text[begin:], add_special_tokens=kept == 0, return_offsets_mapping=True)
    starts = [begin + start for start, _ in cut["offset_mapping"]]
    row.ids = (*row.ids[:kept], *cut["input_ids"])
    row.starts = (*row.starts[:kept], *starts)
    row.text = text
    if not row.ids:  # an empty text: the draft model still needs something to read
        row.ids, row.starts = (draft_tokenizer.eos_token_id or 0,), (0,)


def _spelled(context: Sequence[int], drafted: Sequence[int], draft: Target) -> str:
    """The text that the drafted tokens add behind their context."""
    ends = [i for i, token in enumerate(drafted) if token in draft.end_ids]
    drafted = drafted[: ends[0]] if ends else drafted
    tail = list(context[-_TAIL:])
    before = draft.tokenizer.decode(tail, skip_special_tokens=True)
    after = draft.tokenizer.decode([*tail, *drafted], skip_special_tokens=True)
    if not after.startswith(before):
        return ""
    added: str = after[len(before) :].rstrip("\ufffd")  # an unfinished character
    return added


def _as_target_tokens(known: Sequence[int], text: str, tokenizer: Any) -> list[int]:
    """The text as target tokens, cut in the context of what stands before it."""
    if not text:
        return []
    before = tokenizer.decode(known[-_TAIL:], skip_special_tokens=True)
    cut = tokenizer(before + text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in cut["offset_mapping"]]
    if len(before) in starts:
        first = starts.index(len(before))
        return list(cut["input_ids"][first:])
    # a piece straddles the edge, which the target's own tokens do not: cut the new text alone
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
