"""Beam search: the one loop beside `decode`, because here the rows of a prompt compete.

The beams of a prompt are a tree below it, and the cache holds this tree as staged columns: a beam
sees the columns of its ancestors. Re-ordering beams copies nothing, and the prompt's keys exist
once, however wide the search is.

    step               1     2     3
    staged columns     0 1   2 3   4 5        prompt | a b | c d | e f
    tokens             a b   c d   e f
    parent column      . .   0 0   2 3        a -+- c --- e
    seen by f          0       3     5           `- d --- f        b died out

Columns that nobody sees any more are thrown out now and then, and what all beams share (here
column 0) is committed.

The rules, as in transformers with `early_stopping="never"` (which computes in float32):

* a step takes the best candidates (beam, token) of a prompt; those that end the text count only if
  they are among the first `width`; the first `width` others live on;
* at the length limit all of the first `width` are taken as they are;
* a prompt is done when no live beam can still beat the worst of `width` finished ones;
* texts are compared by score / length ** penalty, end token counted; of equal ones the better
  parent, then the higher logit, then the lower token id comes first;
* a search of width 1 is over at its first end, so that it is greedy decoding under every penalty.

Shape letters: B prompts, N beams (live, or filled up), C staged columns, K top-k, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.core.cache import lay_out
from draftsmith.core.types import Signals
from draftsmith.distill.trajectories.teacher import TeacherCost, log_mass, stable_top
from draftsmith.distill.trajectories.types import TopK
from draftsmith.errors import InputError
from draftsmith.targets.base import Target, feed_beginning

SLACK = 64
"""Dead columns that are put up with before the living ones are moved together."""
FIRST_WIDTH = 4
"""`auto` begins with no more beams than these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """A continuation that the search found."""

    tokens: tuple[int, ...]
    """Ending with an end token, or as long as allowed."""
    score: float
    """Sum of log p, nats."""
    top: TopK | None = None
    """The laws along it, when they were asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Beam:
    """A beginning of a continuation."""

    score: float = 0.0
    tokens: tuple[int, ...] = ()
    laws: tuple[tuple[TopK, int], ...] = ()
    """The law that each token was chosen from: a row of its step's."""
    parent: int = 0
    """Place of the beam it grew from, one step ago."""


@dataclass(slots=True)
class _Search:
    """The search below one prompt."""

    place: int
    num_prompt: int
    limit: int
    """Most tokens of a continuation."""
    width: int
    penalty: float
    live: list[_Beam] = field(default_factory=lambda: [_Beam()])
    """Best first."""
    finished: list[tuple[float, _Beam]] = field(default_factory=list)
    """(score under the penalty, beam), best first, at most `width`."""

    @property
    def length(self) -> int:
        return len(self.live[0].tokens)

    def step(
        self,
        log_p_NM: NDArray[np.float64],
        ids_NM: NDArray[np.int64],
        laws: TopK | None,
        first: int,
        end_ids: frozenset[int],
    ) -> None:
        """Choose among the best M tokens of each live beam (M > width, or the vocabulary); their
        laws begin at row `first`."""
        scores = (np.array([beam.score for beam in self.live])[:, None] + log_p_NM).reshape(-1)
        order = np.argsort(-scores, kind="stable")  # stable: better parent, then higher logit
        old, self.live = self.live, []
        ended: list[_Beam] = []
        full = len(old[0].tokens) + 1 == self.limit
        for rank, at in enumerate(order.tolist()):
            if scores[at] == -math.inf or (rank >= self.width and len(self.live) == self.width):
                break
            parent, token = at // log_p_NM.shape[1], int(ids_NM.reshape(-1)[at])
            beam = _Beam(
                score=float(scores[at]),
                tokens=(*old[parent].tokens, token),
                laws=(*old[parent].laws, (laws, first + parent)) if laws is not None else (),
                parent=parent,
            )
            if token not in end_ids and not full:
                if len(self.live) < self.width:
                    self.live.append(beam)
            elif rank < self.width:
                ended.append(beam)
        self.finished += [(_compared(b.score, len(b.tokens), self.penalty), b) for b in ended]
        self.finished.sort(key=lambda pair: -pair[0])
        del self.finished[self.width :]

    @property
    def done(self) -> bool:
        """Nothing that lives can still enter the finished ones."""
        if not self.live or (self.width == 1 and self.finished):
            return True
        # a sum of logs can only fall: at best it stays and its length is the most favourable one
        length = self.limit if self.penalty > 0 else self.length + 1
        best = _compared(self.live[0].score, length, self.penalty)
        return len(self.finished) == self.width and best <= self.finished[-1][0]


def _compared(score: float, length: int, penalty: float) -> float:
    """What hypotheses are compared by."""
    return score / length**penalty


@torch.inference_mode()
def beam_search(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    width: int,
    max_new_tokens: int,
    length_penalty: float = 0.0,
    top_k: int = 0,
    cost: TeacherCost | None = None,
) -> list[list[Hypothesis]]:
    """The `width` best continuations of every prompt that the search finds, best first.

    Fewer than `width` only if the prompt has no more (of positive probability).

    Args:
        prompts: token ids, at least one each, with room for one more in the context.
        length_penalty: hypotheses are compared by score / length ** this.
        top_k: how many tokens of the laws along each hypothesis are kept; 0: no laws.
        cost: receives what was asked of the target.

    Raises:
        InputError: `width` or `max_new_tokens` below 1, `top_k` above the vocabulary, or a prompt
            that is empty or leaves no room.
    """
    if not prompts:
        return []
    if min(width, max_new_tokens) < 1:
        raise InputError(
            f"A beam search needs a width and max_new_tokens of at least 1, "
            f"got {width} and {max_new_tokens}."
        )
    if not 0 <= top_k <= target.vocab_size:
        raise InputError(f"top_k {top_k} is not between 0 and the vocabulary, {target.vocab_size}.")
    room = math.inf if target.max_length is None else target.max_length
    searches = [
        _Search(
            place=i,
            num_prompt=len(prompt),
            limit=int(min(max_new_tokens, room - len(prompt))),
            width=width,
            penalty=length_penalty,
        )
        for i, prompt in enumerate(prompts)
    ]
    bad = [s.place for s in searches if s.num_prompt < 1 or s.limit < 1]
    if bad:
        raise InputError(
            f"Prompt {bad[0]} is empty or leaves no room in the context of {target.max_length}."
        )
    run = _Run(target, [list(prompt) for prompt in prompts], searches, cost or TeacherCost())
    chosen = min(target.vocab_size, max(width + len(target.end_ids), top_k))
    alive = list(searches)
    logits_BNV = run.prompts()
    while alive:
        num, vocab = logits_BNV.shape[1:]
        wide_RV, total_R1 = log_mass(logits_BNV.reshape(-1, vocab))
        logits_RM, ids_RM = stable_top(wide_RV, chosen)
        log_p_RM, ids_RM = (logits_RM - total_R1).cpu(), ids_RM.cpu()
        laws = _kept(log_p_RM, ids_RM, top_k) if top_k else None
        # beyond width + ends no token of a beam can be chosen
        log_p = log_p_RM.double().numpy()[:, : width + len(target.end_ids)]
        ids = ids_RM.numpy()[:, : width + len(target.end_ids)]
        for b, search in enumerate(alive):
            rows = slice(b * num, b * num + len(search.live))
            search.step(log_p[rows], ids[rows], laws, b * num, target.end_ids)
        keep = [b for b, search in enumerate(alive) if not search.done]
        alive = [alive[b] for b in keep]
        if alive:
            logits_BNV = run.beams(alive, keep)
    return [
        [
            Hypothesis(
                tokens=beam.tokens,
                score=beam.score,
                top=TopK.cat([step.part(row, row + 1) for step, row in beam.laws])
                if top_k
                else None,
            )
            for _, beam in search.finished
        ]
        for search in searches
    ]


def _kept(log_p_RM: Tensor, ids_RM: Tensor, top_k: int) -> TopK:
    """The best K of a step's laws, which are sorted downwards, with ascending ids."""
    ids_RK, order_RK = ids_RM[:, :top_k].sort(dim=-1)
    log_p_RK = log_p_RM.gather(1, order_RK).float()
    return TopK(ids_NK=ids_RK.to(torch.int32).numpy(), log_p_NK=log_p_RK.numpy())


class _Run:
    """The forwards of a search, and who sees what in the cache."""

    def __init__(
        self,
        target: Target,
        prompts: list[list[int]],
        searches: Sequence[_Search],
        cost: TeacherCost,
    ) -> None:
        self._target, self._prompts, self._cost = target, prompts, cost
        longest = max(search.num_prompt + search.limit for search in searches)
        self._cache = target.new_cache(len(prompts), longest + SLACK + 4 * searches[0].width)
        self._seen_BNC = np.zeros((len(prompts), 1, 0), dtype=bool)
        """Staged columns on the path of each beam."""

    def prompts(self) -> Tensor:
        """Feed and commit the prompts; [B, 1, V] logits of the first token."""
        left = feed_beginning(self._target, self._cache, self._prompts)
        tokens_BT, block = lay_out(self._cache, left)
        out = self._target.forward(torch.from_numpy(tokens_BT), block, 1, Signals())
        self._cache.commit(np.array([len(row) for row in left]))
        self._cost.add(sum(map(len, self._prompts)))
        return out.logits_BNV

    def beams(self, searches: Sequence[_Search], rows: Sequence[int]) -> Tensor:
        """Feed the last token of every live beam; [B, N, V] logits behind them.

        `rows`: where these searches stood one step ago. Positions beyond a search's live beams
        repeat its first beam.
        """
        width = max(len(search.live) for search in searches)
        beams = [[*s.live, *[s.live[0]] * (width - len(s.live))] for s in searches]
        parents_BN = np.array([[beam.parent for beam in some] for some in beams])
        self._seen_BNC = self._seen_BNC[np.array(rows)[:, None], parents_BN]
        self._tidy(rows)
        tokens_BN = np.array([[beam.tokens[-1] for beam in some] for some in beams])
        position_B = np.array([s.num_prompt + s.length - 1 for s in searches])
        depth_BN = np.repeat((position_B - self._cache.lengths_B)[:, None], width, axis=1)
        itself = np.broadcast_to(np.eye(width, dtype=bool), (len(beams), width, width))
        self._seen_BNC = np.concatenate([self._seen_BNC, itself], axis=2)
        block = self._cache.stage(depth_BN, self._seen_BNC)
        out = self._target.forward(torch.from_numpy(tokens_BN), block, width, Signals())
        self._cost.add(sum(len(search.live) for search in searches))
        return out.logits_BNV

    def _tidy(self, rows: Sequence[int]) -> None:
        """Let finished prompts go; move the columns that are still seen together when too many are
        not, and commit those that all beams of a prompt see (they come first)."""
        columns = [np.flatnonzero(seen_NC.any(0)) for seen_NC in self._seen_BNC]
        settled = [int(seen_NC.all(0).sum()) for seen_NC in self._seen_BNC]
        needed = max(len(some) - count for some, count in zip(columns, settled, strict=True))
        same_rows = len(rows) == self._cache.num_rows
        if not self._cache.staged:
            if not same_rows:
                self._cache.take(rows)
            return
        if same_rows and self._cache.staged <= 2 * needed + SLACK:
            return
        self._cache.repack(rows, columns, settled)
        packed = np.zeros((len(columns), self._seen_BNC.shape[1], self._cache.staged), dtype=bool)
        for b, (some, count) in enumerate(zip(columns, settled, strict=True)):
            packed[b, :, : len(some) - count] = self._seen_BNC[b][:, some[count:]]
        self._seen_BNC = packed


# --------------------------------------------------------------------------- as many as pay


def worthwhile(scores: Sequence[float], mass_gain: float) -> int:
    """How many hypotheses to keep, best first: a further one while it adds at least `mass_gain`
    times the probability of those before.

    Args:
        scores: log-probabilities, nats.
    """
    # in logs, as long texts have probabilities that underflow
    least = math.log(mass_gain) if mass_gain > 0 else -math.inf
    mass = scores[0]
    for count, score in enumerate(scores[1:], start=1):
        if score < mass + least:
            return count
        mass = float(np.logaddexp(mass, score))
    return len(scores)


def auto_search(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_width: int,
    mass_gain: float,
    most_beams: int,
    **search: Any,
) -> list[list[Hypothesis]]:
    """Per prompt as many hypotheses as add probability (see `worthwhile`), best first.

    The width doubles (4, 8, 16 for a `max_width` of 16), and only for prompts whose last hypothesis
    was still worth keeping: a clear-cut prompt costs a narrow search, and none costs twice a full
    one (but for its own tokens, which every search reads).

    Args:
        most_beams: of a forward: so many prompts are searched at once that all their beams fit in
            (one at least).
        search: the other arguments of `beam_search`.
    """
    kept: list[list[Hypothesis]] = [[] for _ in prompts]
    open_places = list(range(len(prompts)))
    for width in _widths(max_width):
        wider = []
        at_once = max(1, most_beams // width)
        for start in range(0, len(open_places), at_once):
            places = open_places[start : start + at_once]
            found = beam_search(target, [prompts[i] for i in places], width=width, **search)
            for i, hypotheses in zip(places, found, strict=True):
                count = worthwhile([one.score for one in hypotheses], mass_gain)
                kept[i] = hypotheses[:count]
                if count == width:
                    wider.append(i)
        open_places = wider
    return kept


def first_width(max_width: int) -> int:
    """Return the width of the search that `auto_search` begins with."""
    return _widths(max_width)[0]


def _widths(max_width: int) -> list[int]:
    widths = [max_width]
    while widths[0] > FIRST_WIDTH:
        widths.insert(0, widths[0] // 2)
    return widths
