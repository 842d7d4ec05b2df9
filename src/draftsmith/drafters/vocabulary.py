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

import hashlib
import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.core.cache import Block, KVCache
from draftsmith.core.law import Noise
from draftsmith.core.rows import common_prefix
from draftsmith.core.sampling import Sampler
from draftsmith.core.trees import stack_drafts
from draftsmith.core.types import DraftTree, Signals, TargetOutput, TreeShape
from draftsmith.drafters.base import TargetView, TextState
from draftsmith.drafters.tree_growth import (
    ChildSelection,
    ModelReader,
    Vocabularies,
    grow,
    inside_context,
)
from draftsmith.errors import BackendError
from draftsmith.targets.base import Target
from draftsmith.targets.hf import load_tokenizer, loading

SUBSET_FILE = "draft_vocab.safetensors"
"""File beside a draft model with a subset of the target's tokens."""


def same_tokens(draft: Any, target: Any) -> bool:
    """Whether equal ids mean equal tokens (padding at the end of either aside)."""
    if draft is None or target is None:
        return True  # token ids only: the caller says that they are the same
    ours, theirs = draft.get_vocab(), target.get_vocab()
    small, large = sorted((ours, theirs), key=len)
    return all(large.get(token) == i for token, i in small.items())


def vocabulary_sha256(tokenizer: Any, ids: Collection[int] | None = None) -> str | None:
    """Digest of the tokens and their ids, or of the tokens with these ids alone; None: there is no
    tokenizer, or it does not list them."""
    get_vocab = getattr(tokenizer, "get_vocab", None)
    if get_vocab is None:
        return None
    tokens = sorted(get_vocab().items())
    if ids is not None:
        kept = frozenset(ids)
        tokens = [(token, i) for token, i in tokens if i in kept]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def padded(draft_size: int, target_size: int) -> Vocabularies:
    """One family, vocabularies padded differently: the common ids, no mass on the rest."""
    common = min(draft_size, target_size)

    def to_target(values: Tensor, missing: float) -> Tensor:
        if draft_size == target_size:
            return values
        room = target_size - common
        return torch.nn.functional.pad(values[..., :common], (0, room), value=missing)

    def to_draft(ids: Tensor) -> Tensor:
        return ids.clamp(max=common - 1) if target_size > common else ids

    return Vocabularies(size=target_size, to_draft=to_draft, to_target=to_target, known=common)


@dataclass(frozen=True, slots=True)
class VocabularySubset:
    """The vocabulary of a draft model with a subset of the target's tokens."""

    d2t: Tensor
    """[Vd]: the target's id of each draft id."""
    unknown: int
    """Draft id that every other token is read as."""
    tokens_sha256: str | None = None
    """Digest of the tokens that `d2t` names, in the target's tokenizer; None: files of earlier
    versions have none."""
    file: Path = Path(SUBSET_FILE)

    @classmethod
    def beside(cls, source: str) -> VocabularySubset | None:
        """Read the subset from the draft model's folder; None: its vocabulary is whole."""
        path = Path(source) / SUBSET_FILE
        if not source or not path.is_file():
            return None
        what = f"the draft model's vocabulary in {path}"
        with loading(what), safe_open(path, framework="pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            digest = (file.metadata() or {}).get("tokens_sha256")
        missing = {"d2t", "unknown"} - tensors.keys()
        if missing:
            raise BackendError(
                f"{path} holds no tensor {min(missing)!r}: train the draft model again."
            )
        d2t, unknown = tensors["d2t"], tensors["unknown"]
        kinds = {d2t.dtype, unknown.dtype} <= {torch.int16, torch.int32, torch.int64}
        if not kinds or d2t.dim() != 1 or not len(d2t) or unknown.numel() != 1:
            raise BackendError(
                f"{path} holds no vocabulary: d2t is a list of token ids and unknown is one id. "
                "Train the draft model again."
            )
        if len(d2t.unique()) < len(d2t):  # two cells of a law would be one token's
            raise BackendError(
                f"{path} names a token of the target twice: it is damaged, train the draft model "
                "again."
            )
        if int(d2t.min()) < 0 or not 0 <= int(unknown) < len(d2t):
            raise BackendError(
                f"{path} holds ids that no token has: it is damaged, train the draft model again."
            )
        return cls(d2t.long(), int(unknown), digest, path)

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write it beside the draft model. `tokenizer`: the target's, whose tokens are named.

        d2t, int64 [Vd]         the target's id of each of the model's ids
        unknown, int64 [1]      the model's id that every other token is read as
        tokens_sha256           metadata: see the field
        """
        digest = vocabulary_sha256(tokenizer, self.d2t.tolist())
        tensors = {"d2t": self.d2t, "unknown": torch.tensor([self.unknown])}
        metadata = None if digest is None else {"tokens_sha256": digest}
        save_file(tensors, folder / SUBSET_FILE, metadata=metadata)

    def check_tokens(self, tokenizer: Any) -> None:
        """Refuse the target of this tokenizer where it has other tokens under the ids that are
        named. What a file without a digest names is looked up in the tokenizer beside it; where
        there is none that can be read, nothing is known and nothing refused.

        Raises:
            BackendError: it has.
        """
        ids, known = self.d2t.tolist(), self.tokens_sha256
        if known is None:
            with suppress(BackendError):
                known = vocabulary_sha256(load_tokenizer(str(self.file.parent)), ids)
        given = vocabulary_sha256(tokenizer, ids)
        if known is not None and given is not None and known != given:
            raise BackendError(
                f"{self.file} names tokens of another target: in this target's tokenizer their ids "
                f"are other tokens; {_OTHER_TARGET}."
            )

    def vocabularies(self, draft_size: int, target_size: int) -> Vocabularies:
        """The maps between a draft model of this size and a target of that size.

        Raises:
            BackendError: the file is not of this draft model, or not of this target.
        """
        d2t, unknown, highest = self.d2t, self.unknown, int(self.d2t.max())
        if len(d2t) != draft_size:
            raise BackendError(
                f"{self.file} names {len(d2t)} tokens, but the draft model beside it has "
                f"{draft_size}: it is of another draft model; put the one back that this model was "
                "saved with, or train the draft model again."
            )
        if highest >= target_size:
            raise BackendError(
                f"{self.file} names token {highest}, but the target has {target_size} tokens: it "
                f"was made for another target; {_OTHER_TARGET}."
            )
        t2d = torch.full((target_size,), unknown)
        t2d[d2t] = torch.arange(len(d2t))
        there = {t2d.device: (d2t, t2d)}  # uploaded once

        def tables(device: torch.device) -> tuple[Tensor, Tensor]:
            if device not in there:
                there[device] = d2t.to(device), t2d.to(device)
            return there[device]

        def to_target(values: Tensor, missing: float) -> Tensor:
            wide = values.new_full((*values.shape[:-1], target_size), missing)
            return wide.index_copy_(-1, tables(values.device)[0], values)

        def to_draft(ids: Tensor) -> Tensor:
            return tables(ids.device)[1][ids]

        return Vocabularies(
            size=target_size,
            to_draft=to_draft,
            to_target=to_target,
            known=draft_size,
            target_ids=lambda ids: tables(ids.device)[0][ids],
            ids_on=(lambda device: tables(device)[0]) if bool((d2t.diff() > 0).all()) else None,
        )


_OTHER_TARGET = (
    "give the target that the draft model was made for, or make one for this target (draftsmith "
    "pretrain --tokenizer TARGET --vocab-subset N)"
)


class OverTargetTokens:
    """A draft model with a subset of the target's tokens as a model over all of them, of which the
    others have no probability."""

    def __init__(self, draft: Target, vocabularies: Vocabularies, tokenizer: Any) -> None:
        """`draft`: its `end_ids` are ids of its own. `tokenizer`: the target's."""
        self._draft, self._ids = draft, vocabularies
        self.name, self.tokenizer, self.vocab_size = draft.name, tokenizer, vocabularies.size
        ends = torch.tensor(sorted(draft.end_ids), dtype=torch.long)
        self.end_ids = frozenset(vocabularies.target_ids(ends).tolist())
        self.max_length, self.device, self.dtype = draft.max_length, draft.device, draft.dtype

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        return self._draft.new_cache(num_rows, capacity)

    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        out = self._draft.forward(self._ids.to_draft(tokens_BT), block, keep, signals)
        return replace(out, logits_BNV=self._ids.to_target(out.logits_BNV, -torch.inf))


_TAIL = 16
"""Tokens of context that decide how the next piece of text is tokenized."""
_WINDOW = 400
"""Characters at the end of a text that are cut anew at each step; what lies before stays."""


@dataclass(slots=True)
class _Reading:
    """One row's text so far, cut by the draft model's tokenizer."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Where in the text each of `ids` begins."""


@dataclass
class ReencodedState(TextState):
    """The draft model's cache, and how it reads the target's tokens of each row."""

    cache: KVCache
    readings: list[_Reading] = field(init=False)
    fed: list[list[int]] = field(init=False)
    """Draft tokens that the cache holds."""

    def __post_init__(self) -> None:
        self.readings = [_Reading() for _ in self.known]
        self.fed = [[] for _ in self.known]

    def take(self, rows: Sequence[int]) -> Self:
        self.cache.take(rows)
        self.readings = [self.readings[b] for b in rows]
        self.fed = [self.fed[b] for b in rows]
        return super().take(rows)

    def rewind(self, tokens: Sequence[Sequence[int]]) -> Self:
        self.readings = [_Reading() for _ in tokens]
        return super().rewind(tokens)


def reencoded_tree(
    draft: Target,
    target: TargetView,
    state: ReencodedState,
    shape: TreeShape,
    depth_B: np.ndarray,
    sampler: Sampler,
    noise: Noise,
) -> DraftTree:
    """A chain of target tokens that spell the draft model's continuation."""
    if not depth_B.any():
        return DraftTree.empty(len(state.known))
    keep = []
    for known, row, fed in zip(state.known, state.readings, state.fed, strict=True):
        _read(row, known, target.tokenizer, draft)
        keep.append(min(common_prefix(row.ids, fed), len(row.ids) - 1))
    texts = [row.ids for row in state.readings]
    reads_B = inside_context(depth_B, texts, draft)
    if not reads_B.any():
        return DraftTree.empty(len(state.known))
    state.cache.rewind(keep)
    grown = grow(
        ModelReader(draft, state.cache, texts, padded(draft.vocab_size, draft.vocab_size)),
        TreeShape.chain(int(reads_B.max())),
        reads_B,
        # kept when the target's own draw equals it: the likeliest serves best
        ChildSelection("greedy", sampler, noise, TextState(texts, list(map(len, texts)))),
    )
    state.cache.rollback()
    state.fed = texts
    chains = []
    drafts = grown.tokens_BN.tolist()
    for b, known in enumerate(state.known):
        text = _spelled(texts[b], drafts[b][: reads_B[b]], draft)
        chain = _as_target_tokens(known, text, target.tokenizer)[: depth_B[b]]
        chains.append(list(takewhile(lambda i: i < target.vocab_size, chain)))
    return stack_drafts(chains)


def _read(row: _Reading, known: Sequence[int], target_tokenizer: Any, draft: Target) -> None:
    """Bring text, ids and starts up to date with the known target tokens."""
    text = target_tokenizer.decode(known, skip_special_tokens=True)
    # keep the old cut up to a boundary well before the end, and cut anew behind it
    kept = 0
    limit = min(len(row.text), len(text)) - _WINDOW
    if limit > 0 and text[:limit] == row.text[:limit]:
        kept = int(np.searchsorted(np.asarray(row.starts), limit, side="left"))
        while kept > 0 and not text[row.starts[kept - 1]].isspace():
            kept -= 1
        kept = max(kept - 1, 0)
    begin = row.starts[kept] if kept else 0
    cut = draft.tokenizer(text[begin:], add_special_tokens=kept == 0, return_offsets_mapping=True)
    starts = [begin + start for start, _ in cut["offset_mapping"]]
    # a tokenizer may have added tokens that its model never learnt
    row.ids = [*row.ids[:kept], *(min(i, draft.vocab_size - 1) for i in cut["input_ids"])]
    row.starts = [*row.starts[:kept], *starts]
    row.text = text
    if not row.ids:  # an empty text: the draft model still needs something to read
        row.ids, row.starts = [draft.tokenizer.eos_token_id or 0], [0]


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
