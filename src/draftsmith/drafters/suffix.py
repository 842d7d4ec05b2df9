"""`suffix`: draft what most often followed the longest end of the text that stood somewhere before.

Source: Oliaro et al., "SuffixDecoding" (2024, arXiv 2411.04975). Two collections are looked at: the
row's own text, and the texts of past requests if the caller keeps some (`memory`, `corpus`).

    text     . . . a b c d e . . a b c d f . . x b c d e . . a b c d
                        `-- next: e          `-- f            `-+-' suffix
    longest match   "a b c d", two places      e: 1/2, f: 1/2; the later wins among equals

From the places of the longest match the draft goes on with the token that follows at most of them,
and then looks at those places alone. The share of places that is left estimates how probable the
draft still is: it ends where that falls below `min_probability`, or where it has `factor` times the
tokens of the match. So a chance match of two tokens drafts little, and a passage that repeats
itself drafts much.

Places are found by the last `min_match` tokens, and only the latest MOST_PLACES of them in each
collection are looked at, so a step costs about the same however long the texts are: of a run that
is frequent, a longer match may stand further back. Nothing here depends on the noise of the
verifier: proposals are opaque, and exact.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.core.config import MOST_NODES
from draftsmith.core.law import Noise
from draftsmith.core.rows import until_end
from draftsmith.core.sampling import Sampler
from draftsmith.core.trees import stack_drafts
from draftsmith.core.types import DraftTree, TreeShape
from draftsmith.drafters.base import Accepted, RowStates, TargetView, at_least
from draftsmith.drafters.memory import Remembering
from draftsmith.drafters.vocabulary import vocabulary_sha256
from draftsmith.errors import InputError
from draftsmith.provenance import read_json, refuse_device, write_text_atomic

MOST_PLACES = 256
"""Places of the shortest match that are looked at, the latest ones: so many in the row's own text,
and so many in past texts."""

MOST_MEMORY = 100_000_000
"""Tokens, of some hundred bytes each."""

Place = tuple[list[int], int]
"""(a text, place of the token that follows a match in it)."""


class OwnText:
    """The tokens of one row, and the places behind each run of `n` of them that hold a token."""

    __slots__ = ("_ends", "_n", "tokens")

    def __init__(self, n: int, tokens: Sequence[int]) -> None:
        self._n = n
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self.tokens: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text."""
        before, text, n = len(self.tokens), self.tokens, self._n
        text.extend(tokens)
        for end in range(max(before, n), len(text)):
            self._ends.setdefault(tuple(text[end - n : end]), []).append(end)

    def places(self, run: tuple[int, ...]) -> Iterator[Place]:
        """Behind this run, the latest first."""
        return ((self.tokens, end) for end in reversed(self._ends.get(run, ())))


class PastTexts:
    """Texts of past requests; the oldest leave where they would be more than `memory` tokens."""

    def __init__(self, n: int, memory: int) -> None:
        self.memory, self.size = memory, 0
        self._n = n
        self._texts: deque[list[int]] = deque()
        self._places: dict[tuple[int, ...], list[Place]] = {}
        self.tokenizer: Any = None
        """Whose token ids these are; None: it is not known."""

    def _runs(self, text: list[int]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Each run of the text, and the place behind it."""
        return ((tuple(text[end - self._n : end]), end) for end in range(self._n, len(text)))

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a text: of one that is longer than the memory, its end."""
        text = list(tokens[max(len(tokens) - self.memory, 0) :])
        if len(text) <= self._n:
            return
        while self.size + len(text) > self.memory:
            self._forget_oldest()
        self._texts.append(text)
        self.size += len(text)
        for run, end in self._runs(text):
            self._places.setdefault(run, []).append((text, end))

    def _forget_oldest(self) -> None:
        text = self._texts.popleft()
        self.size -= len(text)
        for run, _ in self._runs(text):
            places = self._places[run]
            del places[0]  # its places came first
            if not places:
                del self._places[run]

    def places(self, run: tuple[int, ...]) -> Iterator[Place]:
        """Behind this run, the latest first."""
        return reversed(self._places.get(run, ()))

    def save(self, path: Path) -> None:
        """Write the texts as JSON, `{"texts": [token ids, ...], "vocabulary_sha256": ...}`, the
        oldest first."""
        digest = vocabulary_sha256(self.tokenizer)
        content = {"texts": list(self._texts), "vocabulary_sha256": digest}
        write_text_atomic(path, json.dumps(content) + "\n")


def continuation(
    known: Sequence[int], past: PastTexts, own: OwnText, config: Suffix.Config, most: int
) -> tuple[list[int], list[float]]:
    """What to draft behind `known`, the tokens of `own`: no more than `most`; may be empty. And the
    share of the places left at which each of these tokens follows."""
    length = config.min_match
    run = tuple(known[-length:])
    # each by itself: a run that is frequent in the own text would hide all past texts
    found = [one for texts in (own, past) for one in islice(texts.places(run), MOST_PLACES)]
    while found and length < min(config.max_match, len(known)):
        wanted, back = known[-length - 1], length + 1
        longer = [at for at in found if at[1] >= back and at[0][at[1] - back] == wanted]
        if not longer:
            break
        found, length = longer, back
    most = min(most, max(int(config.factor * length), 1))
    drafted: list[int] = []
    shares: list[float] = []
    share = 1.0
    while found and len(drafted) < most:
        following = Counter(text[place] for text, place in found)
        token, count = following.most_common(1)[0]  # of equals the first counted, the latest
        share *= count / len(found)
        if share < config.min_probability:
            break
        drafted.append(token)
        shares.append(count / len(found))
        found = [
            (text, place + 1)
            for text, place in found
            if text[place] == token and place + 1 < len(text)
        ]
    return drafted, shares


class Row:
    """One row's text, and how much of it is its prompt."""

    __slots__ = ("__weakref__", "_config", "num_prompt", "text")

    def __init__(self, config: Suffix.Config, tokens: Sequence[int]) -> None:
        self._config = config
        self.text = OwnText(config.min_match, tokens)
        self.num_prompt = len(tokens)

    def rewound(self, tokens: Sequence[int]) -> Row:
        """The row with exactly this text: this one where it only grows."""
        known = self.text.tokens
        if list(tokens[: len(known)]) != known:
            return Row(self._config, tokens)
        self.text.extend(tokens[len(known) :])
        return self


_State = RowStates[Row]


class Suffix(Remembering[Row]):
    """Drafts from the row's own text and, if `memory` says so, from those of past requests.

    A request's output is remembered once its rows are gone, when the next request begins or goes
    on. What is drafted depends on what is remembered; the law of outputs does not, and under the
    rule `match` neither does any output. Under other rules it is another draw from that law, as
    long as no request of the same seed and id is remembered: that one's random numbers come back.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        min_match: int = 2
        """Shortest match that is continued."""
        max_match: int = 24
        """Longest match that is looked for: of longer ones the places are as good."""
        factor: float = 1.0
        """A draft has at most this many times the tokens of its match."""
        min_probability: float = 0.1
        """It ends where the counts take it for less probable than this."""
        length: int = 24
        """Most tokens per draft, unless the caller gives a shape of its own."""
        memory: int = 0
        """Tokens of past outputs that are remembered from request to request; 0: none."""
        corpus: str = ""
        """A UTF-8 text that the memory begins with."""
        saved: str = ""
        """A file of `Suffix.past.save`, which the memory begins with."""

        def __post_init__(self) -> None:
            at_least(1, min_match=self.min_match, length=self.length, most=MOST_NODES)
            at_least(self.min_match, max_match=self.max_match, most=MOST_NODES)
            at_least(0, factor=self.factor, most=MOST_NODES)
            at_least(0, min_probability=self.min_probability, most=1)
            at_least(0, memory=self.memory, most=MOST_MEMORY)
            for name in ("corpus", "saved"):
                if getattr(self, name) and not self.memory:
                    raise InputError(
                        f"drafter option {name} fills a memory that is 0 tokens large: give "
                        "--drafter-option memory=TOKENS too."
                    )

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.default_shape = TreeShape.chain(self.config.length)
        self.past = PastTexts(self.config.min_match, self.config.memory)
        """Texts of past requests."""
        self._end_ids: frozenset[int] = frozenset()

    def bind(self, target: TargetView) -> None:
        """Fill the memory, the first time.

        Raises:
            InputError: `corpus` or `saved` cannot be read, or holds too many tokens or such that
                the target lacks; or texts of a target with another vocabulary are remembered, or
                `saved`.
        """
        if self._bound is None:
            found: list[list[int]] = []
            for name, read in (("corpus", _corpus), ("saved", _saved)):
                source = getattr(self.config, name)
                texts = read(Path(source), target) if source else []
                found += texts
                size = sum(map(len, found))
                if size > self.config.memory:
                    raise InputError(
                        f"drafter option {name}: {source} has {size:,} tokens, more than "
                        f"memory={self.config.memory}: raise it, or give less text."
                    )
            for text in found:
                self.past.add(text)
            self.past.tokenizer = target.tokenizer
        super().bind(target)
        self._end_ids = target.end_ids

    def begin(self, tokens: Sequence[int]) -> Row:
        return Row(self.config, tokens)

    def take_over(self, row: Row) -> Callable[[], None]:
        """Its output, with as much before it as a match may need."""
        text, begin = row.text.tokens, max(row.num_prompt - self.config.max_match, 0)
        return lambda: self.past.add(text[begin:])

    def propose(
        self,
        state: _State,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        chains, probs = [], []
        for row, depth in zip(state.rows, depth_B.tolist(), strict=True):
            own = row.text
            drafted, shares = continuation(own.tokens, self.past, own, self.config, depth)
            chains.append(until_end(drafted, self._end_ids))
            probs.append(shares[: len(chains[-1])])
        return stack_drafts(chains, probs=probs)

    def advance(self, state: _State, accepted: Accepted) -> _State:
        for row, new in zip(state.rows, accepted.emitted, strict=True):
            row.text.extend(new)
        return state


def _corpus(path: Path, target: TargetView) -> list[list[int]]:
    """A text as the target's tokens."""
    if target.tokenizer is None:
        raise InputError(f"drafter option corpus: the target has no tokenizer for {path}.")
    try:
        refuse_device(path)
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError, InputError) as error:
        raise InputError(f"drafter option corpus: {path} cannot be read: {error}") from error
    ids = list(target.tokenizer.encode(text, add_special_tokens=False))
    if max(ids, default=0) >= target.vocab_size:
        raise InputError(
            f"drafter option corpus: the target's tokenizer gives token {max(ids)} for {path}, "
            f"outside the vocabulary of {target.vocab_size}: tokenizer and model do not belong "
            "together."
        )
    return [ids]


def _saved(path: Path, target: TargetView) -> list[list[int]]:
    """What `PastTexts.save` wrote."""
    found = read_json(path, "memory of past texts")
    texts = found.get("texts") if isinstance(found, dict) else None
    if not isinstance(texts, list):
        raise InputError(f"drafter option saved: {path} holds no list `texts`.")
    theirs, ours = found.get("vocabulary_sha256"), vocabulary_sha256(target.tokenizer)
    if None not in (theirs, ours) and theirs != ours:  # files of earlier versions do not say
        raise InputError(
            f"drafter option saved: {path} holds token ids of another tokenizer ({theirs!s:.12}) "
            f"than this target's ({ours:.12}): give the target that they were saved with, or "
            "another file."
        )
    for number, text in enumerate(texts):
        whole = isinstance(text, list) and all(type(token) is int for token in text)
        if not whole or not all(0 <= token < target.vocab_size for token in text):
            raise InputError(
                f"drafter option saved: {path}, text {number}: not a list of token ids of this "
                f"target (0 to {target.vocab_size - 1})."
            )
    return texts


DRAFTER = Suffix
