"""The typed data that crosses module boundaries: frozen, keyword-only, slotted. No nn, no I/O.

Shape letters: B rows, N tree nodes, P pending tokens, D path depth, T time, V vocabulary,
H hidden, K top-k. A suffix names the axes: `tokens_BN` is [B, N].

A step feeds the pending tokens (known, but not in the cache yet) and the tree in one forward.
The last pending token is the root; tree nodes are the drafted tokens below it:

    pending_BP            tree nodes 0..N-1           parents_BN
    [... known  root]     root -+- n0 --- n2          n0: -1 (the root)   n1: -1
                                `- n1                 n2: 0               padding: -2

A node's position is the root's position plus its depth; node n sees all that is in the cache,
all pending tokens, its ancestors and itself.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from draftsmith.core.config import TreeShape as TreeShape

if TYPE_CHECKING:
    import numpy as np

    from draftsmith.core.law import Law

ROOT = -1
ALIGNED = 0
"""An origin, see `DraftTree`."""
PADDING = -2


class Proposal(enum.Enum):
    """How the children of a node arose: it decides which verification is lossless."""

    SAMPLED = "sampled"
    """i.i.d. draws from q. Node order is draw order, duplicates are kept, nothing is dropped."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Successive draws from q renormalised. Siblings stay in draw order, never re-ranked."""
    OPAQUE = "opaque"
    """Any choice that is independent of the verifier's noise (top-k, n-grams, old outputs)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """Which target outputs a drafter reads beyond tokens; the engine computes no others."""

    last_hidden: bool = False
    """The state after the final norm, [.., H]."""
    layers: tuple[int, ...] = ()
    """Outputs of these decoder layers (0-based), concatenated: [.., len(layers) * H]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftTree:
    """What a drafter proposes below the root. Parents precede children; see the drawing above.

    Its numbers stand on the host, or, where a model drafted them on a device, still there: looking
    at them would make the host wait. `Drafter.advance` gets them on the host.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    proposal: Proposal
    q: Law | None = None
    """For sampled proposals: the laws that children were drawn from, one row per parent."""
    q_rows_BN: Tensor | None = None
    """Row of `q` that node n was drawn from (siblings share one)."""
    opaque_B: np.ndarray | None = None
    """Rows whose nodes are opaque, whatever `proposal` says of the others. None: all are alike."""
    candidate_BN: Tensor | None = None
    """False: a probe whose logits the drafter wants and that is never accepted. None: all True."""
    origin_BN: Tensor | None = None
    """Which source proposed the node (small integers, meaning is the drafter's). None: all 0.
    `ALIGNED`: a token that is expected at exactly this position."""
    fed_BN: Tensor | None = None
    """A note of the drafter's to itself: which of the tokens that it fed its own model the node was
    (-1: none). None: not wanted."""
    prob_BN: Tensor | None = None
    """How probable the drafter holds each node to be behind its parent. None: as `q` says, or it
    does not know. No verification reads it: it ranks the nodes of several drafters."""

    @property
    def num_rows(self) -> int:
        return self.tokens_BN.shape[0]

    @property
    def num_nodes(self) -> int:
        return self.tokens_BN.shape[1]

    @classmethod
    def empty(cls, num_rows: int) -> DraftTree:
        none = torch.empty((num_rows, 0), dtype=torch.long)
        return cls(tokens_BN=none, parents_BN=none, proposal=Proposal.OPAQUE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the verifier decided: the accepted path, and one token of the target's own."""

    path_BD: Tensor
    """Accepted node ids in order, padded with -2, on the CPU."""
    num_accepted_B: Tensor
    next_token_B: Tensor
    """The correction or bonus token: it becomes the next root."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetOutput:
    """One target forward over `pending + tree`; node axis 0 is the root, axis 1 + n is node n."""

    logits_BNV: Tensor
    """[B, 1 + N, V]."""
    signals_BTS: Tensor | None = None
    """Signals of pending and tree tokens, [B, P + N, S], or None when none were asked for. In
    float32 from the compiled engine, otherwise as the target computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStep:
    """What one target forward gave, per row of the request batch (rows that are done: empty)."""

    emitted: tuple[tuple[int, ...], ...]
    """New tokens, cut at the first stop: accepted drafts first, then the target's own token."""
    accepted: tuple[int, ...]
    """How many of `emitted` were drafted."""
    offered_depth: tuple[int, ...]
    """Depth of candidates on the best path: what was accepted, and the deepest below its end (a
    chain: its length)."""
    proposed: tuple[int, ...]
    """Candidate nodes in the tree (probes and padding do not count)."""
    origins: tuple[tuple[int, ...], ...]
    """Origin of each accepted token."""
    finish: tuple[str | None, ...]
    """None while running, else `stop` (end token or stop string), `length` or `context`."""
    prefill: bool
    """The forward carried a prompt: its cost is not a decoding step's."""
    active: tuple[bool, ...] = ()
    """Which rows took part in this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStats:
    """What a length policy may read: the past of one row, never the coming noise."""

    steps: int = 0
    offered: int = 0
    accepted: int = 0
    last_offered: int = 0
    last_accepted: int = 0
    misses: int = 0
    """Drafts since one had a token accepted."""
    idle: int = 0
    """Steps that were not to draft, since a draft last had no token accepted."""
    asked: float = 0.0
    """Steps that were to draft. This and the counts below: old ones count less."""
    found: float = 0.0
    """Those of them that had something to draft."""
    asked_on: float = 0.0
    """Places behind a draft's first token at which it was to go on."""
    ended: float = 0.0
    """Those at which it had nothing more to draft, or was not sure enough."""
    asked_on_kept: float = 0.0
    """Those behind tokens that were accepted."""
    ended_kept: float = 0.0
    """Those at which it ended."""
    tried_D: tuple[float, ...] = ()
    """Drafts with a token at depth d and all before it accepted."""
    kept_D: tuple[float, ...] = ()
    """Those of them whose token there was accepted too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCount:
    """What one step did for one row. Of a tree, its depth counts, and that of the accepted path: it
    offers as many tokens as were asked for, and a path to a leaf above that depth missed there."""

    asked: int
    """How deep it was to draft."""
    offered: int
    """How deep it did."""
    accepted: int

    def ends(self) -> tuple[int, int, int, int]:
        """What this step adds to `asked_on`, `ended`, `asked_on_kept` and `ended_kept` of
        `RowStats`.

        Where a draft ended may depend on tokens that were drawn behind the refused one. No later
        draft meets those draws again: they are keyed by position and node (`Purpose.DRAFT`), and a
        position is another node behind another root.
        """
        asked, offered, accepted = self.asked, self.offered, self.accepted
        if not offered or asked < 2:
            return 0, 0, 0, 0
        ended = offered < asked
        return (
            min(offered, asked - 1),
            ended,
            min(accepted, asked - 1),
            ended and accepted == offered,
        )


@runtime_checkable
class LengthPolicy(Protocol):
    """Chooses how deep to draft for a row from its past, or for a batch from that of its rows.
    Never changes the law."""

    def length(self, stats: RowStats) -> int: ...

    def together(self, stats: Sequence[RowStats]) -> int | None:
        """One depth for all rows of a batch, two or more; None: each row's is its own `length`.
        None, unless redefined."""
        return None

    def keeps(self, steps: int, last: StepCount) -> bool:
        """Whether a row drafts as deep as in its last step, after so many steps, so that its
        statistics need not be counted up. Rows that decide together keep their depth where all
        do. False, unless redefined."""
        return False

    def rest(self, pause: int) -> int:
        """Say after how many steps the policy is asked again about a row that drafts nothing now.
        `pause`: for how many it has not, this one included. 1, unless redefined."""
        return 1

    def learn(self, rows: Sequence[Sequence[StepCount]]) -> None:
        """Take note of all steps of rows whose decoding has ended. Nothing, unless redefined."""
        return

    @property
    def max_length(self) -> int: ...


# --------------------------------------------------------------------------- training


@dataclass(frozen=True, kw_only=True, slots=True)
class TopLogprobs:
    """The teacher's most probable tokens at N positions: true probabilities at temperature 1, not
    renormalised, so that they sum to less than 1 by what lies outside."""

    ids_NK: Tensor
    log_p_NK: Tensor
    """-inf in cells that hold nothing (then the id is 0)."""
    vocab_size: int | None = None
    """Entries of the teacher's head, from which these are; None: not known."""
    highest: int | None = None
    """The highest id, once it is known that no cell is empty. None: not checked; the check waits
    for the device."""

    def __len__(self) -> int:
        return len(self.ids_NK)

    def take(self, rows_N: Tensor) -> TopLogprobs:
        """The laws at these positions (indices or a mask)."""
        return replace(self, ids_NK=self.ids_NK[rows_N], log_p_NK=self.log_p_NK[rows_N])


@dataclass(frozen=True, kw_only=True, slots=True)
class FullLogprobs:
    """The teacher's whole laws at N positions, as states and the head that turns them into logits:
    the laws of a few positions at a time are made when they are needed."""

    hidden_NH: Tensor
    head: Callable[[Tensor], Tensor]
    """[.., H] -> logits [.., V]."""

    def __len__(self) -> int:
        return len(self.hidden_NH)

    def take(self, rows_N: Tensor) -> FullLogprobs:
        """The laws at these positions (indices or a mask)."""
        return FullLogprobs(hidden_NH=self.hidden_NH[rows_N], head=self.head)


TeacherLogprobs = TopLogprobs | FullLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryBatch:
    """Token sequences to learn from. It owns every index shift:

    position           0    1    2    3
    tokens_BT          a    b    c    d
    tokens_ahead(1)    b    c    d    .      what position t predicts one step ahead
    mask_ahead(1)      1    1    1    0      1 where that prediction exists and counts
    law_row_BT         -    5    6    -      row of `laws` that *predicts the token* here; -1: none
    law_ahead(1)       5    6    -    -      row of the law that position t is to imitate
    """

    tokens_BT: Tensor
    loss_mask_BT: Tensor
    """True where a token counts as something to be predicted (position of the *token*)."""
    documents_BT: Tensor | None = None
    """Document number inside the packed block; None: attention may cross documents."""
    laws: TeacherLogprobs | None = None
    """The teacher's distributions, position after position."""
    law_row_BT: Tensor | None = None
    """Row of `laws` that the token at this position was drawn from; -1: no law, learn the token."""
    weights_BT: Tensor | None = None
    """How much a token counts (position of the *token*); None: every one as much as another."""
    features_BTS: Tensor | None = None
    """Hidden signals of the target at each position; None: not collected."""

    @property
    def positions_BT(self) -> Tensor:
        """Position inside its document; a document that begins before the block restarts at 0."""
        index_BT = torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device)
        index_BT = index_BT.expand_as(self.tokens_BT)
        if self.documents_BT is None:
            return index_BT
        begins_BT = torch.ones_like(self.documents_BT, dtype=torch.bool)
        begins_BT[:, 1:] = self.documents_BT[:, 1:] != self.documents_BT[:, :-1]
        return index_BT - torch.where(begins_BT, index_BT, 0).cummax(dim=1).values

    def tokens_ahead(self, k: int) -> Tensor:
        """[B, T]: the token k positions to the right of each position (0 past the end)."""
        return _shifted(self.tokens_BT, k)

    def features_ahead(self, k: int) -> Tensor:
        """[B, T, S]: the target's signals k positions to the right (0 past the end)."""
        assert self.features_BTS is not None, "collect them with the trajectories"
        return _shifted(self.features_BTS, k)

    def law_ahead(self, k: int) -> Tensor:
        """[B, T]: row of `laws` for the token k positions to the right; -1 where there is none."""
        if self.law_row_BT is None:
            return torch.full_like(self.tokens_BT, -1)
        return _shifted(self.law_row_BT, k, past_end=-1)

    def weights_ahead(self, k: int) -> Tensor:
        """[B, T] float32: weight of the token k positions to the right (0 past the end)."""
        known = torch.ones_like(self.tokens_BT) if self.weights_BT is None else self.weights_BT
        return _shifted(known.float(), k)

    def mask_ahead(self, k: int) -> Tensor:
        """[B, T] bool: `tokens_ahead(k)` exists, counts and lies in the same document."""
        counts_BT = _shifted(self.loss_mask_BT.bool(), k)
        if self.documents_BT is None:
            return counts_BT
        return counts_BT & (_shifted(self.documents_BT, k) == self.documents_BT)


def _shifted(values_BT: Tensor, k: int, *, past_end: int = 0) -> Tensor:
    """What stands k positions to the right of each position."""
    out = torch.full_like(values_BT, past_end)
    out[:, : max(out.shape[1] - k, 0)] = values_BT[:, k:]
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowHead:
    """A head over some of the target's tokens."""

    ids_D: Tensor
    """[D]: the target's ids of its columns, upwards."""
    head: Callable[[Tensor], Tensor]
    """[.., H] -> logits [.., D]."""

    def columns(self, tokens: Tensor) -> Tensor:
        """The columns of these tokens; -1 for those that it does not know."""
        ids_D = self.ids_D
        at = torch.searchsorted(ids_D, tokens.to(ids_D.dtype)).clamp(max=len(ids_D) - 1)
        return at.where(ids_D[at] == tokens, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftPrediction:
    """A drafter's training output: states, no logits. The objective applies the head in chunks."""

    hidden_BTH: Tensor
    mask_BT: Tensor
    """True where this prediction counts, before the batch's own mask."""
    ahead: int
    """How many positions ahead each state predicts."""
    feature_BTH: Tensor | None = None
    """States that shall equal the target's features one position before what is predicted."""
    weight: float = 1.0
    """How much this step counts beside the others (EAGLE-3 and Medusa: 0.8 ** step)."""
    head: Callable[[Tensor], Tensor] | None = None
    """What turns these states into logits; None: the drafter's own `head()`. It is called on some
    places at a time, and is differentiated there: each call computes from its weights anew."""
    narrow: NarrowHead | None = None
    """The head of a drafter with a reduced vocabulary; None: its vocabulary is whole."""
    confidence_BT: Tensor | None = None
    """Logits of how probable it is that a draft from each state is accepted, by a head that learns
    nothing else; None: the drafter has none (`Drafter.learns_acceptance` is then False)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestBatch:
    """The input of a drafter when rows begin: their tokens, and how to draw."""

    tokens: Sequence[Sequence[int]]
    """The known tokens of each row (prompt, or the whole context of a continued session)."""
    request_ids: tuple[int, ...]
    max_new_tokens: int
    predictions: Sequence[Sequence[int]] = field(default_factory=tuple)
    """An expected continuation per row, for drafters that use one; empty: none given."""
