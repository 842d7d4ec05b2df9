"""`recycling`: draft the tokens that the target thought probable when it last saw a token.

Source: Luo et al., "Turning Trash into Treasure" (2024, arXiv 2408.08696), Token Recycling. The
verifier computes logits at every token that it is fed, refused drafts too. The best of them, with
the token that they follow, fill a table of successors, from which a tree of fixed shape is read:

    table   a: b c d      shape ((0,), (1,), (0, 0))      a         a is the last known token;
            b: c a e                                     / |        the best successor of b is c
            c: a b d                                    b  c
                                                        |
                                                        c

The latest logits of a token replace earlier ones. A token that the target has not been fed yet is
followed by what followed it in the text, if it stood there. Without repetition in the text this
still drafts, which lookups do not. Nothing depends on the noise of the verifier: proposals are
opaque, and exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from draftsmith.core.config import MOST_NODES
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import to_host
from draftsmith.core.trees import stack_drafts
from draftsmith.core.types import PADDING, DraftTree, TreeShape
from draftsmith.drafters.base import Accepted, RowStates, at_least
from draftsmith.drafters.memory import Remembering

_MOST_SUCCESSORS = 64

Successors = dict[int, tuple[int, ...]]
"""Token -> those that follow it, the most probable first."""


class Row:
    """One row's text, and the successors that its forwards brought."""

    __slots__ = ("__weakref__", "seen", "table", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.table: Successors = {}
        """From logits."""
        self.seen: Successors = {}
        """From the text: the token that followed at the latest place."""
        self.tokens: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text."""
        before = self.tokens[-1:]
        self.tokens.extend(tokens)
        run = [*before, *tokens]
        self.seen |= {token: (after,) for token, after in pairwise(run)}

    def rewound(self, tokens: Sequence[int]) -> Row:
        """The row with exactly this text: this one where it only grows. Of another text nothing is
        kept, or drafts would depend on what was said before it."""
        known = len(self.tokens)
        if list(tokens[:known]) != self.tokens:
            return Row(tokens)
        self.extend(tokens[known:])
        return self


_State = RowStates[Row]


class Recycling(Remembering[Row]):
    """Drafts from a table of successors, a row's own or, with `memory`, also past requests'.

    A request's table is taken over once its rows are gone, when the next request begins or goes
    on. What is drafted depends on what is remembered; the law of outputs does not, and under the
    rule `match` neither does any output.
    """

    takes_trees = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        successors: int = 4
        """Kept of each token's logits."""
        length: int = 0
        """Chains of so many tokens, unless the caller gives a shape of its own; 0: a tree of twelve
        nodes."""
        memory: bool = False
        """Begin a request with the table of those before it: as many lists as the target has
        tokens, at most."""

        def __post_init__(self) -> None:
            at_least(1, successors=self.successors, most=_MOST_SUCCESSORS)
            at_least(0, length=self.length, most=MOST_NODES)

    config: Config
    default_shape = TreeShape(
        paths=tuple(
            tuple(map(int, path))
            for path in (
                *("0", "1", "2", "3"),
                *("00", "01", "02", "10", "20"),
                *("000", "001"),
                "0000",
            )
        )
    )

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        if self.config.length:
            self.default_shape = TreeShape.chain(self.config.length)
        self.past: Successors = {}
        """The table of past requests."""

    def begin(self, tokens: Sequence[int]) -> Row:
        return Row(tokens)

    def take_over(self, row: Row) -> Callable[[], None]:
        return partial(self.past.update, row.table)

    def propose(
        self,
        state: _State,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        drafts = [
            expanded(row.tokens[-1], (row.table, self.past, row.seen), shape, depth)
            for row, depth in zip(state.rows, depth_B.tolist(), strict=True)
        ]
        return stack_drafts([tokens for tokens, _ in drafts], [above for _, above in drafts])

    def advance(self, state: _State, accepted: Accepted) -> _State:
        tree, verdict, logits_BNV = accepted.tree, accepted.verdict, accepted.out.logits_BNV
        many = min(self.config.successors, logits_BNV.shape[-1])
        (best_BNK,) = to_host(logits_BNV.topk(many).indices)
        tokens_BN, real_BN = tree.tokens_BN.tolist(), (tree.parents_BN != PADDING).tolist()
        paths_BD, taken_B = verdict.path_BD.tolist(), verdict.num_accepted_B.tolist()
        for b, (row, pending) in enumerate(zip(state.rows, accepted.pending, strict=True)):
            if not pending:  # a row that was done before
                continue
            best_NK = best_BNK[b].tolist()
            tokens = [pending[-1], *tokens_BN[b]]
            refused = [1 + node for node, real in enumerate(real_BN[b]) if real]
            # the root and the accepted path saw the text as it became: they come last
            for place in (*refused, 0, *(1 + node for node in paths_BD[b][: taken_B[b]])):
                row.table[tokens[place]] = tuple(best_NK[place])
            row.extend(accepted.emitted[b])
        return state


def expanded(
    root: int, tables: Sequence[Successors], shape: TreeShape, depth: int
) -> tuple[list[int], list[int]]:
    """(tokens, parents) of the nodes of a shape, level by level, whose successors the first table
    that knows a token names. Parents count nodes, -1 is the root."""

    def successors(token: int) -> tuple[int, ...]:
        return next((table[token] for table in tables if token in table), ())

    tokens: list[int] = []
    parents: list[int] = []
    if shape.paths:
        numbers: dict[tuple[int, ...], int] = {(): -1}
        for path in shape.paths:
            above = numbers.get(path[:-1])
            if above is None or len(path) > depth:
                continue
            below = successors(root if above < 0 else tokens[above])
            if path[-1] < len(below):
                numbers[path] = len(tokens)
                tokens.append(below[path[-1]])
                parents.append(above)
        return tokens, parents
    most = shape.num_nodes
    level = [-1]
    for width in shape.widths[:depth]:
        after: list[int] = []
        for above in level:
            for token in successors(root if above < 0 else tokens[above])[:width]:
                if len(tokens) < most:
                    after.append(len(tokens))
                    tokens.append(token)
                    parents.append(above)
        level = after
    return tokens, parents


DRAFTER = Recycling
