"""`lookahead`: the target guesses far ahead in parallel, and its guesses become drafts.

Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
2024, arXiv 2402.02057, and the authors' `lade`. No drafter model: spare compute of the target's own
forward runs a Jacobi iteration on a window of N - 1 rows and W columns behind the root; each column
yields an N-gram per step for a pool, and pool entries that begin with the root are verified.

The window is a tree of probes, so its ancestors give the published mask and positions:

    W = 3 columns, N = 4                 position    p    p+1  p+2  p+3  p+4
                                         row 0      root  w01  w02
    root --- w01 --- w02                 row 1            w10  w11  w12
     |        |       |                  row 2                 w20  w21  w22
    w10      w11     w12                 argmax                     y0   y1   y2
     |        |       |
    w20      w21     w22                 node of (row r, column c):  r * W + c - 1
     y0       y1      y2                 its logits:                 r * W + c
                                         N-grams: root w10 w20 y0, w01 w11 w21 y1, ...

Then every row moves up (row 1 becomes row 0, y the last row) and the new root takes first place;
with `shift=accepted` columns that the text has passed leave on the left, random ones come on the
right. The window begins as row 0 alone, N - 2 columns wider, of which each step uses up one (the
published `lead` is -1 here: its row 0 does not count the root).

Two things differ from `lade`: a fully matched guess is followed by the target's bonus token, so a
step gives up to N tokens, not N - 1; and guesses share prefixes (opaque children may be merged).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from draftsmith.core.config import MOST_NODES
from draftsmith.core.law import Noise, Purpose
from draftsmith.core.sampling import Sampler
from draftsmith.core.trees import stack_drafts
from draftsmith.core.types import PADDING, ROOT, DraftTree, RequestBatch, TreeShape
from draftsmith.drafters.base import Accepted, Drafter, RowStates
from draftsmith.errors import InputError


@lru_cache(maxsize=256)
def window_parents(num_rows: int, width: int) -> tuple[int, ...]:
    """Parents of the window's nodes, see the module's drawing: to the left in row 0, else above."""
    return tuple(
        node - 1 if node < width - 1 else node - width for node in range(num_rows * width - 1)
    )


class Pool:
    """First token -> the continuations seen behind it, least recently seen first, at most `cap`."""

    __slots__ = ("_cap", "_grams")

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._grams: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, first: int, gram: tuple[int, ...]) -> None:
        grams = self._grams.setdefault(first, {})
        grams.pop(gram, None)
        grams[gram] = None
        if 0 <= self._cap < len(grams):
            del grams[next(iter(grams))]

    def behind(self, first: int) -> list[tuple[int, ...]]:
        """Most recently seen first."""
        return list(reversed(self._grams.get(first, {})))


def trie(guesses: Iterable[Sequence[int]], depth: int, base: int) -> tuple[list[int], list[int]]:
    """(tokens, parents) of the guesses below the root, cut to `depth`; nodes count from `base`."""
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}
    for guess in guesses:
        parent = ROOT
        for token in guess[:depth]:
            node = nodes.setdefault((parent, token), base + len(tokens))
            if node == base + len(tokens):
                tokens.append(token)
                parents.append(parent)
            parent = node
    return tokens, parents


@dataclass(slots=True)
class _Row:
    """One row's text, window and pool."""

    config: Lookahead.Config
    tokens: list[int] = field(default_factory=list)
    pool: Pool = field(init=False)
    window: list[list[int]] = field(default_factory=lambda: [[]])
    """Rows of equal width; short ones are filled at the next `propose`, where there is noise."""
    learned: int = 0
    """Tokens of the text whose n-grams are in the pool."""
    staged: bool = False
    """The window, as it is, is in the tree that the target looks at."""

    def __post_init__(self) -> None:
        self.pool = Pool(self.config.guesses)

    def grown(self, tokens: Sequence[int]) -> _Row:
        """The row with more text; n-grams of the text that are complete now may join the pool."""
        self.tokens.extend(tokens)
        last = len(self.tokens) - self.config.ngram
        if self.config.seed_from_prompt:
            for start in range(self.learned, last + 1):
                first, *gram = self.tokens[start : start + self.config.ngram]
                self.pool.add(first, tuple(gram))
        self.learned = max(self.learned, last + 1)
        return self

    def stage(self, noise: Noise, b: int) -> list[int]:
        """Complete the window with random tokens of the text; its nodes' tokens."""
        window, width = self.window, self.config.window + self.config.ngram - 1 - len(self.window)
        window[0][:1] = self.tokens[-1:]  # the root is row 0, column 0
        missing = width * len(window) - sum(map(len, window))
        if missing:
            lanes = np.arange(missing)
            u = noise.uniform(np.full(missing, b), 0, Purpose.DRAFTER_STATE, lanes)
            drawn = [self.tokens[i] for i in (u * len(self.tokens)).astype(np.int64).tolist()]
            for row in window:
                while len(row) < width:
                    row.append(drawn.pop())
        self.staged = True
        return [token for row in window for token in row][1:]

    def move(self, best: list[int], count: int) -> None:
        """`best`: the target's tokens behind the last window row; the text grew by `count`."""
        passed = count if self.config.shift == "accepted" else 1
        rows = [*self.window, best]
        if len(rows) < self.config.ngram:  # warm-up: one row more, and no row moves up
            self.window = [row[passed:] for row in rows]
            return
        for first, *gram in zip(*rows, strict=True):
            self.pool.add(first, tuple(gram))
        self.window = [row[passed - 1 :] for row in rows[1:]]

    def rewound(self, tokens: Sequence[int]) -> _Row:
        """The row with this text. Text that is taken back may be sampled again with the same
        noise, and drafts must not depend on that noise: then nothing learned is kept."""
        known = len(self.tokens)
        if list(tokens[:known]) != self.tokens:
            return _Row(config=self.config).grown(tokens)
        return self.grown(tokens[known:])


_State = RowStates[_Row]


class Lookahead(Drafter):
    """Drafts from n-grams that the target's own Jacobi iteration produced."""

    draws = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """A step feeds up to (ngram - 1) * (window + guesses) tokens."""

        window: int = 7
        """W: columns of the window (the authors' setting for 7B models)."""
        ngram: int = 5
        """N: tokens per n-gram; drafts are one shorter."""
        guesses: int = 7
        """G: guesses per step, and kept per first token; -1: no limit."""
        seed_from_prompt: bool = True
        """Pool the n-grams of the text too (`lade`: POOL_FROM_PROMPT)."""
        shift: Literal["one", "accepted"] = "one"
        """How far the window moves: one place (`lade`: ALWAYS_FWD_ONE), or as far as the text. One
        keeps all columns: 2.20 against 1.89 tokens per step (stories260K, T = 0, no seeding)."""

        def __post_init__(self) -> None:
            if self.window < 1 or self.ngram < 2 or self.guesses < -1:
                given = f"window={self.window}, ngram={self.ngram}, guesses={self.guesses}"
                raise InputError(
                    f"lookahead needs window >= 1, ngram >= 2, guesses >= -1: {given}."
                )
            columns = self.window + (self.window if self.guesses < 0 else self.guesses)
            if (self.ngram - 1) * columns > MOST_NODES:
                raise InputError(
                    f"lookahead with window={self.window}, ngram={self.ngram}, "
                    f"guesses={self.guesses} feeds (ngram - 1) * (window + guesses) tokens in a "
                    f"step; at most {MOST_NODES} are allowed."
                )

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.default_shape = TreeShape.chain(self.config.ngram - 1)
        self.longest = self.config.ngram - 1

    def max_nodes(self, shape: TreeShape) -> int:
        """The window at its largest, and all guesses (without a limit: as many as columns)."""
        c = self.config
        window = max(rows * (c.window + c.ngram - 1 - rows) - 1 for rows in range(1, c.ngram))
        guesses = c.window if c.guesses < 0 else c.guesses
        return window + guesses * min(shape.depth, c.ngram - 1)

    def start(self, request: RequestBatch) -> _State:
        return _State([_Row(config=self.config).grown(tokens) for tokens in request.tokens])

    def propose(
        self,
        state: _State,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        depths = depth_B.tolist()
        probes = [row.stage(noise, b) if depths[b] else [] for b, row in enumerate(state.rows)]
        limit = self.config.window if self.config.guesses < 0 else self.config.guesses
        guesses = [
            trie(row.pool.behind(row.tokens[-1])[:limit], depth, len(window))
            for row, window, depth in zip(state.rows, probes, depths, strict=True)
        ]
        tree = stack_drafts(
            [window + tokens for window, (tokens, _) in zip(probes, guesses, strict=True)],
            [
                [*window_parents(len(row.window), len(row.window[0])), *parents] if depth else []
                for row, (_, parents), depth in zip(state.rows, guesses, depths, strict=True)
            ],
        )
        first_B1 = torch.tensor([[len(window)] for window in probes])
        return replace(tree, candidate_BN=torch.arange(tree.num_nodes) >= first_B1)

    def advance(self, state: _State, accepted: Accepted) -> _State:
        parents_BN = accepted.tree.parents_BN.numpy()
        best: dict[int, list[list[int]]] = {}
        for b, (row, new) in enumerate(zip(state.rows, accepted.emitted, strict=True)):
            staged, row.staged = row.staged, False
            if not new:
                continue
            row.grown(new)
            width, num_probes = len(row.window[0]), len(row.window) * len(row.window[0]) - 1
            # the last probe is the deepest and the engine cuts by depth: if it is there, all are
            here = parents_BN[b, :num_probes]
            if not staged or len(here) < num_probes or PADDING in here[-1:]:
                continue
            stage = len(row.window)
            if stage not in best:  # once for all rows at this stage
                logits_BCV = accepted.out.logits_BNV[:, num_probes + 1 - width : num_probes + 1]
                best[stage] = logits_BCV.max(-1).indices.tolist()  # argmax is slow in bfloat16
            row.move(best[stage][b], len(new))
        return state


DRAFTER = Lookahead
