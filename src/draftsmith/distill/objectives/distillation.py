"""What a drafter is trained for and measured by: the next token, the target's probabilities, or its
hidden states too.

    position       0      1      2      3
    law_ahead(1)   5      -      6      .     row of the next token's logprobs: - none, . no token
    masks          law    token  law    .     what is learnt there, if it counts
    loss           D(5)   -lq    D(6)   .     D: a divergence, -lq: -log q(next token)

No [B, T, V] tensor exists, neither of the drafter nor of the target: heads run on some hundred or
thousand positions at a time. Gradients of the states, and those of a head that learns itself, are
computed while their logits are at hand: only a very large head runs again in the backward pass.

A target and a draft model with one tokenizer may have heads of different sizes, by rows of padding
behind the tokens (Qwen2.5: 152,064 and 151,936). Whole distributions are learnt and measured over
the entries that both have, each renormalised; no draft can be of the target's other ones.

B rows, T time, N places, K kept tokens, C cells (see `divergence.py`), V vocabulary, H hidden, D
tokens of a drafter with a vocabulary of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from draftsmith.config import require
from draftsmith.core.types import (
    DraftPrediction,
    FullLogprobs,
    NarrowHead,
    TeacherLogprobs,
    TopLogprobs,
    TrajectoryBatch,
)
from draftsmith.distill.config import DivergenceConfig
from draftsmith.distill.objectives import divergence as div
from draftsmith.distill.objectives.divergence import (
    Divergence,
    Knobs,
    Rewards,
    TokenBins,
    truncated_cells,
)
from draftsmith.errors import InputError, nearest

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """A loss before it is averaged: sums, so that uneven parts combine exactly."""

    total: Tensor
    """Sum over counted positions, in nats, differentiable."""
    weight: Tensor
    """How much was counted (positions), no gradient."""


class Objective(Protocol):
    """Compares a drafter's prediction with what the batch says."""

    def loss(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head) -> LossTerms:
        """Summed loss of one prediction and its weight."""


Nats = Callable[[Tensor], Tensor]
"""A sum over places, of their states."""


def probe(head: Head, hidden_NH: Tensor) -> tuple[int, int]:
    """V, and bytes of the head's weights that learn (0 under `no_grad`), from the logits of the
    first place."""
    logits_1V = head(hidden_NH[:1].detach())
    return logits_1V.shape[-1], sum(leaf.nbytes for leaf in _leaves(logits_1V))


def _leaves(made: Tensor) -> Iterator[Tensor]:
    """What learns of all that a tensor was made from, each once."""
    seen, ahead = set[Any](), [made.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        ahead += [further for further, _ in node.next_functions]


class _WithSlopes(torch.autograd.Function):
    """A number that has known derivatives by some tensors, beside those it has already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *tensors_and_slopes: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors_and_slopes[len(tensors_and_slopes) // 2 :])
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        slopes = [slope * grad for slope in ctx.saved_tensors]
        return grad, *slopes, *(None for _ in slopes)


LARGEST_KEPT = 1 << 28
"""Bytes of a head that learns up to which its gradient is kept: one for each step of a roll-out."""


def without_logits(
    parts: Iterable[tuple[Nats, Tensor]], zero: Tensor, *, learning_bytes: int
) -> Tensor:
    """`zero` and the sum of nats(states [N, H]) over all parts; no logits are kept for the backward
    pass.

    Gradients of the states, and of the head's weights that learn, are computed here: two products
    with the head, three where it learns. The latter's are summed up over the parts, and kept until
    the backward pass. Larger heads run once more there instead. Hooks on a weight see its gradient
    more than once.
    """
    total, sums = zero, dict[Tensor, Tensor]()
    for nats, hidden_NH in parts:
        if learning_bytes > LARGEST_KEPT:
            total = total + checkpoint(nats, hidden_NH, use_reentrant=False)
            continue
        own_NH = hidden_NH.detach().requires_grad_(hidden_NH.requires_grad)
        value = nats(own_NH)
        if not value.requires_grad:
            total = total + value
            continue
        tensors = list(_leaves(value))  # another place may use other weights
        with torch.autocast(value.device.type, enabled=False):  # as in a backward pass
            slopes = torch.autograd.grad(value, tensors)
        total = total + value.detach()
        for tensor, slope in zip(tensors, slopes, strict=True):
            if tensor is own_NH:
                total = _WithSlopes.apply(total, hidden_NH, slope)
            elif tensor in sums:
                sums[tensor] += slope
            else:  # copied, because several weights may have one gradient
                sums[tensor] = slope.clone()
    return _WithSlopes.apply(total, *sums, *sums.values()) if sums else total


CACHED = 1 << 19
"""Logits of which a core's cache still holds the few tensors that a loss makes."""
FEWEST = 64
"""Positions at a time; with fewer, reading the head's weights costs more than the logits."""
WIDEST = 256
"""Head for which that is so."""


def cached_places(vocab: int, width: int, device: torch.device) -> int | None:
    """For how many places at a time logits stay in a CPU's cache; None: for none.

    A loss reads and writes its logits a dozen times, which is up to three times as fast there. But
    each part reads the [vocab, width] head again, and adds up a gradient of that size.
    """
    if device.type != "cpu" or width > WIDEST or FEWEST * vocab > 2 * CACHED:
        return None
    return max(FEWEST, CACHED // vocab)


CELLS = 1 << 24
"""Positions times vocabulary at a time on a GPU: 64 MiB in float32."""
CPU_CELLS, CPU_FEWEST = 1 << 22, 128
"""The same on a CPU where no cache holds them, and so many positions at least. glibc gives blocks
above 32 MiB back at once, and the next one comes page by page: below a frozen head of 8,192 or
49,152 tokens a loss takes 1.2 to 1.4 times as long in blocks of 64 MiB. Below one that learns its
gradient is summed up once a block: these sizes are within 4 % of the best there."""
POSITIONS = 2048
"""Positions at a time of a next-token loss on a GPU."""


def places_at_once(vocab: int, width: int, device: torch.device) -> int:
    """For how many places at a time logits are computed."""
    if device.type != "cpu":
        return max(1, CELLS // vocab)
    return cached_places(vocab, width, device) or max(CPU_FEWEST, CPU_CELLS // vocab)


class CrossEntropy:
    """Next-token loss: -log q(token that is `ahead` places to the right), in nats."""

    def loss(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head) -> LossTerms:
        """Sum over positions that the prediction's and the batch's masks both count."""
        counted_BT = prediction.mask_BT.bool() & batch.mask_ahead(prediction.ahead)
        hidden_NH = prediction.hidden_BTH[counted_BT]
        wanted_N = batch.tokens_ahead(prediction.ahead)[counted_BT]
        weight = counted_BT.sum().float()
        if not len(wanted_N):
            return LossTerms(total=_nothing(prediction, head).float(), weight=weight)
        vocab, learning_bytes = probe(head, hidden_NH)
        chunk = POSITIONS
        if hidden_NH.device.type == "cpu":
            chunk = places_at_once(vocab, hidden_NH.shape[-1], hidden_NH.device)
        parts = (
            (partial(_summed, head, wanted), hidden)
            for hidden, wanted in zip(hidden_NH.split(chunk), wanted_N.split(chunk), strict=True)
        )
        zero = prediction.hidden_BTH[:0].sum().float()
        total = without_logits(parts, zero, learning_bytes=learning_bytes)
        return LossTerms(total=total, weight=weight)


def _nothing(prediction: DraftPrediction, head: Head) -> Tensor:
    """The loss of a part in which nothing counts: 0, with a gradient of 0 for all that learns, the
    head, too. Replicated weights (DDP) wait for one of each."""
    return head(prediction.hidden_BTH[:0]).sum()


def _summed(head: Head, wanted_N: Tensor, hidden_NH: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden_NH).float(), wanted_N, reduction="sum")


# --------------------------------------------------------------------------- places and teachers


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPositions:
    """What is known of N places that count."""

    hidden_NH: Tensor
    tokens_N: Tensor
    rows_N: Tensor
    """Row of `all_laws`; -1: none."""
    weights_N: Tensor
    uniform_N: Tensor
    """A number in [0, 1), for objectives that draw."""
    all_laws: TeacherLogprobs | None

    def __len__(self) -> int:
        return len(self.tokens_N)

    def laws(self) -> TeacherLogprobs:
        """The laws of these places."""
        assert self.all_laws is not None
        return self.all_laws.take(self.rows_N)

    def split(self, cells: int | None, vocab: int) -> Iterator[LossPositions]:
        """Parts of at most `cells` logits, one place at least. None: of `places_at_once`."""
        width = self.hidden_NH.shape[-1]
        if isinstance(self.all_laws, FullLogprobs):
            width = max(width, self.all_laws.hidden_NH.shape[-1])
        fitting = places_at_once(vocab, width, self.hidden_NH.device)
        size = max(1, cells // vocab) if cells else fitting
        names = ("hidden_NH", "tokens_N", "rows_N", "weights_N", "uniform_N")
        # one split of the states, whose gradient is one tensor: each slice would make a whole one
        for part in zip(*(getattr(self, name).split(size) for name in names), strict=True):
            if len(part[0]):
                yield replace(self, **dict(zip(names, part, strict=True)))


def masks(
    prediction: DraftPrediction, batch: TrajectoryBatch, record: Divergence | None
) -> tuple[Tensor, Tensor]:
    """[B, T] each: counted places that learn a law, and those that learn their token."""
    counted_BT = prediction.mask_BT.bool() & batch.mask_ahead(prediction.ahead)
    has_law_BT = batch.law_ahead(prediction.ahead) >= 0
    if record is not None and record.hard:
        has_law_BT = torch.zeros_like(has_law_BT)
    return counted_BT & has_law_BT, counted_BT & ~has_law_BT


def gather(
    prediction: DraftPrediction, batch: TrajectoryBatch, mask_BT: Tensor, *, draws: bool = False
) -> LossPositions:
    """What is known of the places of a mask. `draws`: a number in [0, 1) for each, too."""
    at = mask_BT.nonzero(as_tuple=True)  # the device is waited for here, and only here
    weights_N = batch.weights_ahead(prediction.ahead)[at]
    return LossPositions(
        hidden_NH=prediction.hidden_BTH[at],
        tokens_N=batch.tokens_ahead(prediction.ahead)[at],
        rows_N=batch.law_ahead(prediction.ahead)[at],
        weights_N=weights_N,
        uniform_N=torch.rand_like(weights_N) if draws else torch.zeros_like(weights_N),
        all_laws=batch.laws,
    )


def check_laws(places: LossPositions, vocab: int) -> None:
    """InputError when truncated laws cannot be those of this student's vocabulary."""
    if not len(places) or isinstance(places.all_laws, FullLogprobs):
        return
    if places.all_laws is None:
        raise InputError("the batch names rows of laws but carries no laws; read them with it")
    highest = places.all_laws.highest
    if highest is not None and highest < vocab:
        return
    laws = places.all_laws.take(places.rows_N)
    if int(laws.ids_NK.max()) >= vocab:
        empty_NK = laws.log_p_NK == -math.inf
        highest = int(laws.ids_NK.masked_fill(_whole(laws) | empty_NK, 0).max())
        if highest >= vocab:
            raise InputError(
                f"logprobs hold token {highest}, the student's vocabulary has {vocab}; "
                "distil a student with the teacher's tokenizer"
            )
    if not bool((laws.log_p_NK.amax(-1) > -math.inf).all()):
        raise InputError("logprobs without any token; collect the trajectories again")


def over_both(laws: TeacherLogprobs, logits_NV: Tensor) -> tuple[Tensor | TopLogprobs, Tensor]:
    """The teacher's logits (no gradient) or kept logprobs, and the student's logits, over the
    entries that both heads have.

    Kept logprobs of a whole law are renormalised. Laws of the best tokens alone stay as they are:
    what lies outside of these is no single entry to them.
    """
    vocab = logits_NV.shape[-1]
    if isinstance(laws, FullLogprobs):
        with torch.no_grad():
            teacher_NV = laws.head(laws.hidden_NH).to(logits_NV.dtype)
        size = min(teacher_NV.shape[-1], vocab)
        return teacher_NV[:, :size], logits_NV[:, :size]
    whole = laws.vocab_size
    if whole is None or whole == vocab or laws.ids_NK.shape[-1] < whole:
        return laws, logits_NV
    if whole < vocab:
        return laws, logits_NV[:, :whole]
    inside_NK = laws.ids_NK < vocab
    log_p_NK = laws.log_p_NK.masked_fill(~inside_NK, -math.inf)
    log_p_NK = log_p_NK.log_softmax(-1).where(_whole(laws), log_p_NK)
    there_K = inside_NK.any(0)  # where ids stand in order, just the student's
    inside = TopLogprobs(
        ids_NK=laws.ids_NK.where(inside_NK, 0)[:, there_K],
        log_p_NK=log_p_NK[:, there_K],
        vocab_size=vocab,
    )
    return inside, logits_NV


def logprobs(
    laws: TeacherLogprobs, logits_NV: Tensor, narrow: NarrowHead | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """log p and log q at temperature 1, [N, C] each, of the tokens that the teacher kept; their
    ids, None where these are all in order; and the student's logits over what both heads have.

    `narrow`: the student's head, where it is one over some tokens and logprobs were kept.
    """
    if narrow is not None:
        assert isinstance(laws, TopLogprobs)
        own_NK = narrow.columns(laws.ids_NK)
        log_q_NK = logits_NV.log_softmax(-1).gather(-1, own_NK.clamp(min=0))
        log_q_NK = log_q_NK.masked_fill(own_NK < 0, -math.inf)
        return laws.log_p_NK.to(log_q_NK.dtype), log_q_NK, laws.ids_NK.long(), logits_NV
    kept, logits_NV = over_both(laws, logits_NV)
    log_q_NV = logits_NV.log_softmax(-1)
    if isinstance(kept, Tensor):
        return kept.log_softmax(-1), log_q_NV, None, logits_NV
    ids_NK = kept.ids_NK.long()
    return kept.log_p_NK.to(log_q_NV.dtype), log_q_NV.gather(-1, ids_NK), ids_NK, logits_NV


def head_beside(
    places: LossPositions, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head
) -> tuple[Head, int, NarrowHead | None]:
    """What a drafter is measured with beside the laws of `places`: a head, how many logits it
    gives, and the tokens of these where they are the drafter's own alone.

    That is so beside kept tokens of a head as large as the drafter's, or of one whose size is not
    known: its own columns are looked up. Beside others it says all tokens. InputError: see
    `check_laws`.
    """
    vocab, _ = probe(head, prediction.hidden_BTH[0])
    check_laws(places, vocab)
    laws, narrow = batch.laws, prediction.narrow
    if narrow is None or isinstance(laws, FullLogprobs):
        return head, vocab, None
    if laws is not None and laws.vocab_size not in (None, vocab):
        return head, vocab, None
    return narrow.head, len(narrow.ids_D), narrow


def mass_outside(log_p_NC: Tensor, ids_NC: Tensor | None, own: NarrowHead | None) -> Tensor:
    """[N]: the sum of p over the tokens that a drafter with this head lacks; None: it lacks none.
    Laws that were cut do not tell all of it.

    `ids_NC`: of the cells' tokens; None: all in order.
    """
    if own is None:
        return torch.zeros_like(log_p_NC[:, 0])
    if ids_NC is None:
        ids_NC = torch.arange(log_p_NC.shape[1], device=log_p_NC.device)
    return log_p_NC.exp().masked_fill(own.columns(ids_NC) >= 0, 0).sum(-1)


def _whole(laws: TopLogprobs) -> Tensor:
    """[N, 1]: laws of every entry of the teacher's head. A batch may hold others beside them."""
    kept_N1 = (laws.log_p_NK > -math.inf).sum(-1, keepdim=True)
    return kept_N1 == (math.inf if laws.vocab_size is None else laws.vocab_size)


def wide(values: Tensor) -> Tensor:
    """At least float32."""
    return values if values.dtype == torch.float64 else values.float()


@dataclass(frozen=True, kw_only=True)
class Distillation(DivergenceConfig):
    """A divergence of the student's law from the teacher's, in nats per place.

    The teacher's logprobs come at temperature 1; the student stays at 1, where it drafts. Positions
    whose token has no law learn the token (as sft): the plain text of a mixed batch does. A student
    with some of the target's tokens learns over these (see `narrowed`).
    Raises InputError for unknown names, for options that mean nothing to the divergence, and for
    laws over another vocabulary than the student's.
    """

    rewards: Rewards | None = None
    """tvdpp: statistics of all places that are learnt together; None: of those of one call."""
    counting: bool = False
    """The loss and its weight are the two sums that these statistics are made of."""
    top_weight: float = 0.0
    """Beside the divergence: so much of -sum p log q over the teacher's `top` best tokens."""
    top: int = 10
    cells: int | None = None
    """Positions times vocabulary that exist at a time (one place at least); None: those of
    `places_at_once`."""

    def __post_init__(self) -> None:
        self.validate()
        good = (self.cells is None or self.cells >= 1) and self.top >= 1
        require(good, "cells and top are at least 1")
        require(0 <= self.top_weight < math.inf, "--top-weight is 0 or more and finite")
        for name, kind in (("tail", div.Tail), ("reading", div.Reading)):
            known, given = get_args(kind), getattr(self, name)
            require(given in known, f"there is no --{name} {given!r}{nearest(str(given), known)}")
        record = div.divergence_named(self.objective)
        for option in ("teacher_temperature", "tail", "beta", "reading"):
            given = getattr(self, option)
            other = [name for name, one in div.DIVERGENCES.items() if option in one.options]
            require(
                option in record.options or given == getattr(type(self), option),
                f"--{option.replace('_', '-')} {given} means nothing to --objective "
                f"{record.name}, only to {', '.join(other)}: leave it out",
            )

    @property
    def record(self) -> Divergence:
        """The divergence that `objective` and `beta` mean."""
        return div.divergence_named(self.objective, self.beta)

    @property
    def pools(self) -> bool:
        """Whether rewards are normalised over all places that are learnt together."""
        return self.record.pools_cells

    def given(self, counts: Tensor) -> Distillation:
        """With the sums of all parts of a step, each from a pass that is `counting`."""
        return replace(self, rewards=Rewards.of(counts))

    def loss(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head) -> LossTerms:
        """Sum of weight x nats over the counted places, and the sum of their weights."""
        prediction, batch = narrowed(prediction, batch, hard=self.record.hard)
        head = head if prediction.narrow is None else prediction.narrow.head
        taught_BT, plain_BT = masks(prediction, batch, self.record)
        draws = self.pools and self.reading in div.DRAWING
        taught = gather(prediction, batch, taught_BT, draws=draws)
        plain = gather(prediction, batch, plain_BT)
        vocab, learning_bytes = probe(head, prediction.hidden_BTH[0])
        check_laws(taught, vocab)
        rewards = self.rewards
        if rewards is None and self.pools:
            counts = torch.zeros(2, dtype=torch.float64, device=taught.hidden_NH.device)
            with torch.no_grad():  # a pass of its own, before any loss
                for part in taught.split(self.cells, vocab):
                    cells = self._cells(head, part)
                    own = self.reading == "draws"
                    drawn_N1 = div.drawn(cells.log_q_NC, part.uniform_N) if own else None
                    counts += div.count_rewards(cells, drawn_N1)
            if self.counting:
                return LossTerms(total=counts[0], weight=counts[1])
            rewards = Rewards.of(counts)

        def taught_nats(head: Head, part: LossPositions) -> Tensor:
            knobs = Knobs(
                beta=self.beta, reading=self.reading, rewards=rewards, uniform_N=part.uniform_N
            )
            cells = self._cells(head, part)
            nats_N = self.record.nats(cells, knobs)
            if self.top_weight:
                nats_N = nats_N + self.top_weight * div.top_cross_entropy(cells, self.top)
            return _weighed(part, nats_N)

        parts = (
            (partial(_of_states, nats, head, part), part.hidden_NH)
            for nats, places in ((taught_nats, taught), (_plain_nats, plain))
            for part in places.split(self.cells, vocab)
        )
        counted = len(taught) + len(plain) > 0
        zero = prediction.hidden_BTH[:0].sum() if counted else _nothing(prediction, head)
        total = without_logits(parts, wide(zero), learning_bytes=learning_bytes)
        return LossTerms(total=total, weight=taught.weights_N.sum() + plain.weights_N.sum())

    def _cells(self, head: Head, places: LossPositions) -> TokenBins:
        laws, logits_NV = over_both(places.laws(), wide(head(places.hidden_NH)))
        if isinstance(laws, Tensor):
            log_p_NV = torch.log_softmax(laws / self.teacher_temperature, dim=-1)
            return div.whole_cells(log_p_NV, logits_NV)
        return truncated_cells(
            laws,
            logits_NV,
            tail=self.tail,
            divergence=self.record,
            temperature=self.teacher_temperature,
        )


class Acceptance:
    """Sums of two figures over places: the expected acceptance of the student's drafts, sum_v
    min(p, q) at temperature 1, and the target's mass on tokens that the student lacks (see
    `mass_outside`). No gradient.

    Both are exact for whole laws and where all tokens were kept; otherwise lower bounds, sums over
    the kept tokens. Tokens that the student does not know are never drafted: they add nothing to
    the acceptance, which is at most 1 - outside. Positions without a law do not count.
    """

    @torch.no_grad()
    def loss(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head) -> LossTerms:
        """[2] each: sums of weight x figure over places with a law, and of their weights; the
        second is 0 for a student with all tokens."""
        places = gather(prediction, batch, masks(prediction, batch, None)[0])
        own = prediction.narrow
        head, vocab, narrow = head_beside(places, prediction, batch, head)
        total_2 = wide(prediction.hidden_BTH.new_zeros(2))
        for part in places.split(None, vocab):
            logits_NV = wide(head(part.hidden_NH))
            log_p_NC, log_q_NC, ids_NC, _ = logprobs(part.laws(), logits_NV, narrow)
            figures = div.acceptance(log_p_NC, log_q_NC), mass_outside(log_p_NC, ids_NC, own)
            total_2 = total_2 + torch.stack([_weighed(part, figure_N) for figure_N in figures])
        weight = places.weights_N.sum()
        bounded = torch.zeros_like(weight) if own is None else weight
        return LossTerms(total=total_2, weight=torch.stack([weight, bounded]))


class Confidence:
    """Cross-entropy of a drafter's confidence head (`DraftPrediction.confidence_BT`) with the
    expected acceptance, which has no gradient, in nats.

    That is sum_v min(p, q) over the drafter's tokens: p outside of them, which no draft can be,
    adds nothing. See `Acceptance` for laws that were cut, and places without one.
    """

    def loss(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head) -> LossTerms:
        """Sum of weight x nats over places with a law, and the sum of their weights."""
        assert prediction.confidence_BT is not None
        taught_BT = masks(prediction, batch, None)[0]
        places = gather(prediction, batch, taught_BT)
        logits_N = wide(prediction.confidence_BT[taught_BT])
        with torch.no_grad():
            head, vocab, narrow = head_beside(places, prediction, batch, head)
            accepted = [
                div.acceptance(*logprobs(part.laws(), wide(head(part.hidden_NH)), narrow)[:2])
                for part in places.split(None, vocab)
            ]
            accepted_N = torch.cat([logits_N.new_zeros(0), *accepted]).clamp(0, 1)
        nats_N = F.binary_cross_entropy_with_logits(logits_N, accepted_N, reduction="none")
        return LossTerms(total=_weighed(places, nats_N), weight=places.weights_N.sum())


def _of_states(
    nats: Callable[[Head, LossPositions], Tensor],
    head: Head,
    places: LossPositions,
    hidden_NH: Tensor,
) -> Tensor:
    return nats(head, replace(places, hidden_NH=hidden_NH))


def _plain_nats(head: Head, places: LossPositions) -> Tensor:
    logits_NV = wide(head(places.hidden_NH))
    return _weighed(places, F.cross_entropy(logits_NV, places.tokens_N, reduction="none"))


def _weighed(places: LossPositions, nats_N: Tensor) -> Tensor:
    return (nats_N * places.weights_N.to(nats_N.dtype)).sum()


# --------------------------------------------------------------------------- hidden states


def narrowed(
    prediction: DraftPrediction, batch: TrajectoryBatch, *, hard: bool
) -> tuple[DraftPrediction, TrajectoryBatch]:
    """Both over the drafter's own, smaller vocabulary (EAGLE-3, arXiv 2503.01840); nothing changes
    for a drafter that knows all tokens.

    target's ids      0  1  2  3  4  5  6  7
    drafter's ids     .  0  .  1  .  2  .  .      ids_D = [1, 3, 5]
    teacher           p(1), p(3), p(5), divided by their sum
    counts            where the target's most probable token is one of these; where the position
                      learns its token (no logprobs, or a hard objective), where that one is
    """
    narrow = prediction.narrow
    if narrow is None:
        return prediction, batch
    known_BT = narrow.columns(batch.tokens_ahead(prediction.ahead)) >= 0
    row_BT = batch.law_ahead(prediction.ahead)
    if batch.laws is not None and len(batch.laws) and not hard:
        best_N = _known_best(batch.laws, narrow.ids_D)
        known_BT = torch.where(row_BT >= 0, best_N[row_BT.clamp(min=0)], known_BT)
    inside = replace(
        batch,
        tokens_BT=narrow.columns(batch.tokens_BT).clamp(min=0),
        laws=None if batch.laws is None else _cut(batch.laws, narrow),
    )
    return replace(prediction, mask_BT=prediction.mask_BT.bool() & known_BT), inside


def _known_best(laws: TeacherLogprobs, ids_D: Tensor) -> Tensor:
    """[N]: whether the drafter knows the target's most probable token."""
    if isinstance(laws, TopLogprobs):
        best_N1 = laws.ids_NK.gather(-1, laws.log_p_NK.argmax(-1, keepdim=True))
        return torch.isin(best_N1[:, 0].long(), ids_D)
    with torch.no_grad():
        vocab, _ = probe(laws.head, laws.hidden_NH)
        size = places_at_once(vocab, laws.hidden_NH.shape[-1], laws.hidden_NH.device)
        best_N = [laws.head(part_NH).argmax(-1) for part_NH in laws.hidden_NH.split(size)]
    return torch.isin(torch.cat(best_N), ids_D)


def _cut(laws: TeacherLogprobs, narrow: NarrowHead) -> TeacherLogprobs:
    """Laws over the drafter's tokens. What a cut law does not say is taken to lie inside, unless it
    says all that is inside."""
    ids_D = narrow.ids_D
    if isinstance(laws, FullLogprobs):
        return replace(laws, head=lambda hidden: laws.head(hidden)[..., ids_D])
    used_NK = laws.log_p_NK > -math.inf
    own_NK = narrow.columns(laws.ids_NK)
    outside_NK = used_NK & (own_NK < 0)
    kept_NK = used_NK & ~outside_NK
    p_NK = laws.log_p_NK.exp()
    all_N1 = kept_NK.sum(-1, keepdim=True) == len(ids_D)
    inside_N1, outside_N1 = ((p_NK * one).sum(-1, keepdim=True) for one in (kept_NK, outside_NK))
    left_N1 = inside_N1.where(all_N1, 1 - outside_N1).clamp(min=torch.finfo(p_NK.dtype).tiny)
    return TopLogprobs(
        ids_NK=own_NK.where(kept_NK, 0),
        log_p_NK=(laws.log_p_NK - left_N1.log()).masked_fill(~kept_NK, -math.inf).clamp(max=0.0),
        highest=None if laws.highest is None else len(ids_D) - 1,
    )


@dataclass(frozen=True, kw_only=True)
class Imitation:
    """token_weight x divergence + top_weight x top term + feature_weight x distance of states.

    position           t
    prediction         states that predict x_{t+a}, and states like f_{t+a-1}      a: `ahead`
    token term         any divergence from the distribution of x_{t+a}: what `Distillation` can be
    top term           -sum p log q over its best tokens (HASS)
    feature term       smooth L1 between the state and f_{t+a-1}, mean over its width

    Each step of a roll-out is a mean over the positions that it counts, as in the released code:
    where GRIFFIN's mask leaves few chains, these few count as much as all did in the first step. So
    two parts of a batch, accumulated or in two processes, are two means, and with that mask not the
    mean of the whole. `mean_over` "all" is 1/T sum m_t loss_t, as GRIFFIN's paper prints it.
    """

    token: Distillation
    token_weight: float = 0.1
    feature_weight: float = 1.0
    top_weight: float = 0.0
    mean_over: Literal["counted", "all"] = "counted"
    """all: the sum of a step is divided by the positions of answers, counted or not."""
    confidence_weight: float = 0.1
    """Weight of the mean that a confidence head learns by; nothing else learns by it."""

    def __post_init__(self) -> None:
        good = min(self.token_weight, self.feature_weight, self.top_weight) >= 0
        require(good, "the weights of the token, top and feature terms are 0 or more")
        good = max(self.token_weight, self.feature_weight) > 0
        require(
            good, "--token-weight and --feature-weight cannot both be 0: nothing would be learnt"
        )
        good = self.token_weight > 0 or not self.top_weight
        require(good, "the top term belongs to the token term: give --token-weight, too")

    def loss(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head) -> LossTerms:
        """Sums over counted places; drafters without states to imitate have no feature term."""
        token = self.token
        if self.top_weight:
            token = replace(token, top_weight=self.top_weight / self.token_weight)
        terms = token.loss(prediction, batch, head)
        total = self.token_weight * terms.total
        if prediction.feature_BTH is not None and self.feature_weight:
            total = total + self.feature_weight * _distance(prediction, batch)
        weight = batch.weights_ahead(prediction.ahead)[batch.mask_ahead(prediction.ahead)].sum()
        if self.mean_over == "counted":  # what is left of the sum counts as much as all would
            total = total * (weight / terms.weight.clamp(min=1e-5))
        if prediction.confidence_BT is not None:
            confidence = Confidence().loss(prediction, batch, head)
            mean = confidence.total / confidence.weight.clamp(min=1e-5)
            total = total + self.confidence_weight * weight * mean
        return LossTerms(total=total, weight=weight)


def _distance(prediction: DraftPrediction, batch: TrajectoryBatch) -> Tensor:
    assert prediction.feature_BTH is not None
    counted_BT = prediction.mask_BT.bool() & batch.mask_ahead(prediction.ahead)
    at = counted_BT.nonzero(as_tuple=True)
    own = prediction.feature_BTH[at]
    wanted = batch.features_ahead(prediction.ahead - 1)[at]
    wide = torch.promote_types(own.dtype, torch.float32)
    apart_N = F.smooth_l1_loss(own.to(wide), wanted.to(wide), reduction="none").mean(-1)
    weights_N = batch.weights_ahead(prediction.ahead)[at]
    return (apart_N * weights_N.to(wide)).sum()
