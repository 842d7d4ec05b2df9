"""How far the student's law q is from the teacher's law p, at each of N places.

N places, C cells, V vocabulary. Laws are natural log-probabilities in float32 or
wider; what is returned is [N], differentiable in log q: nats, or (tvd, hellinger) a number in
[0, 1]. A cell without probability in either law (-inf in both) counts nothing.

A cell is a vocabulary entry, or several of them taken together (see `truncated_cells`).

Sources: DistillSpec (2310.08461), DistillBeam (OpenReview Kf5I0OrZrr, eq. 1-6), TVD++
(2403.00858, Lemma 1 and eq. 1), LK losses (2602.23881).

A truncated teacher beside a student: laws over cells, for any divergence.

N places, C cells, K kept tokens, V vocabulary. A cell is a vocabulary entry, or all that lies
outside the tokens that a truncated teacher kept:

    whole law      v0  v1  v2  v3  v4  v5
    kept, K = 2        v1          v4          true p, not renormalised
    bucket             v1          v4  rest    rest = 1 - kept, in p and in q: V is now K + 1 cells
    renormalise        v1          v4  rest    p of the kept sums to 1; p(rest) = 0, q(rest) = rho
    floor          v0  v1  v2  v3  v4  v5      as renormalise, each raised to the floor, sum 1

Sources: DistillBeam (OpenReview Kf5I0OrZrr, eq. 9: renormalised); bucket and floor are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from draftsmith.core.types import TopLogprobs
from draftsmith.errors import InputError, nearest
from draftsmith.plugins import OBJECTIVES, load_plugin, plugin_names, wrong_plugin

Reading = Literal["exact", "sampled", "draws", "uniform"]
"""How the expectation of TVD++ is taken; the paper leaves it open."""

DRAWING: tuple[Reading, ...] = ("sampled", "draws")
"""Those that draw a token at each place."""

LOWEST = -1e30
"""Stands for log 0 where -inf would make gradients undefined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBins:
    """Two laws over the same cells."""

    log_p_NC: Tensor
    """No gradient."""
    log_q_NC: Tensor
    valid_NC: Tensor | None = None
    """False where a cell holds nothing at all (neither law could use it); None: all True."""

    def valid(self) -> Tensor:
        """[N, C] bool: the cells that hold something."""
        every = torch.ones_like(self.log_q_NC, dtype=torch.bool)
        return every if self.valid_NC is None else self.valid_NC


def whole_cells(log_p_NV: Tensor, logits_NV: Tensor) -> TokenBins:
    """The teacher's whole law beside the student's."""
    return TokenBins(log_p_NC=log_p_NV, log_q_NC=torch.log_softmax(logits_NV, dim=-1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """Mean and deviation of r = 1{p > q} over all places of a batch: all cells, or those drawn."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, counts: Tensor) -> Rewards:
        """From a sum of `count_rewards`."""
        mean = counts[0] / counts[1].clamp(min=1)
        return cls(mean=mean, deviation=(mean * (1 - mean)).sqrt())

    def advantage(self, cells: TokenBins) -> Tensor:
        """(r - mean) / deviation, no gradient; 0 where all rewards are equal."""
        with torch.no_grad():
            reward = (cells.log_p_NC > cells.log_q_NC).to(cells.log_q_NC.dtype)
            flat = self.deviation == 0
            scale = torch.where(flat, 0.0, 1 / torch.where(flat, 1.0, self.deviation))
            return reward.sub_(self.mean.to(reward.dtype)).mul_(scale.to(reward.dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """What some divergences need beyond the two laws."""

    beta: float = 0.5
    """jsd: the teacher's share of the mixture."""
    reading: Reading = "exact"
    """tvdpp."""
    rewards: Rewards | None = None
    """tvdpp: the statistics of the batch."""
    uniform_N: Tensor | None = None
    """tvdpp, where it draws: a uniform number in [0, 1) per place."""


# --------------------------------------------------------------------------- divergences


def forward_kl(log_p_NC: Tensor, log_q_NC: Tensor) -> Tensor:
    """sum p log(p / q)."""
    return _expected(log_p_NC.exp(), log_p_NC - log_q_NC)


def reverse_kl(log_p_NC: Tensor, log_q_NC: Tensor) -> Tensor:
    """sum q log(q / p); infinite where q has mass and p has none."""
    return _expected(log_q_NC.exp(), log_q_NC - log_p_NC)


def jensen_shannon(log_p_NC: Tensor, log_q_NC: Tensor, beta: float = 0.5) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, mixed as laws.

    It falls to 0 at both ends; its slope there is the KL, and beta 0 and 1 mean just that: KL(p||q)
    and KL(q||p) (as TRL's GKDTrainer does). The scale of the loss therefore jumps at the ends.
    """
    if beta == 0:
        return forward_kl(log_p_NC, log_q_NC)
    if beta == 1:
        return reverse_kl(log_p_NC, log_q_NC)
    log_p_NC, log_q_NC = log_p_NC.clamp(min=LOWEST), log_q_NC.clamp(min=LOWEST)
    log_m_NC = torch.logaddexp(log_p_NC + math.log(beta), log_q_NC + math.log1p(-beta))
    from_p_N = (log_p_NC.exp() * (log_p_NC - log_m_NC)).sum(-1)
    from_q_N = (log_q_NC.exp() * (log_q_NC - log_m_NC)).sum(-1)
    return beta * from_p_N + (1 - beta) * from_q_N


def hellinger(log_p_NC: Tensor, log_q_NC: Tensor) -> Tensor:
    """1/2 sum (sqrt p - sqrt q)^2: the squared distance."""
    return ((log_p_NC / 2).exp() - (log_q_NC / 2).exp()).square().sum(-1) / 2


def total_variation(log_p_NC: Tensor, log_q_NC: Tensor) -> Tensor:
    """1/2 sum |p - q| = 1 - acceptance."""
    return (log_p_NC.exp() - log_q_NC.exp()).abs().sum(-1) / 2


def acceptance(log_p_NC: Tensor, log_q_NC: Tensor) -> Tensor:
    """sum min(p, q): probability that a token drawn from q is accepted."""
    return torch.minimum(log_p_NC, log_q_NC).exp().sum(-1)


def lk(log_p_NC: Tensor, log_q_NC: Tensor) -> Tensor:
    """-log acceptance; infinite where p and q share no token."""
    return -torch.minimum(log_p_NC, log_q_NC).logsumexp(-1)


def top_cross_entropy(cells: TokenBins, top: int) -> Tensor:
    """-sum p log q over the teacher's `top` best tokens, p not renormalised (HASS, 2408.15766)."""
    log_p_NC = cells.log_p_NC
    if cells.valid_NC is not None:
        log_p_NC = log_p_NC.masked_fill(~cells.valid_NC, -math.inf)
    best_NK, places_NK = log_p_NC.topk(min(top, log_p_NC.shape[-1]), dim=-1)
    return -_expected(best_NK.exp(), cells.log_q_NC.gather(-1, places_NK))


def tvdpp(cells: TokenBins, knobs: Knobs) -> Tensor:
    """-E[A log q] with A = (r - mean) / deviation, r = 1{p > q}: to be descended, its value says
    nothing. The sign is that of Lemma 1 (the paper's eq. 1 as printed drives q away from p).

    exact     the sum over cells weighted by q (held constant): the gradient of tvd / deviation
    sampled   one token drawn from q per place: the same on average
    draws     as sampled, but mean and deviation are those of the n rewards that were drawn, as in
              eq. 1 (of `exact` and `sampled` they are those of all places and cells)
    uniform   the mean over cells: another direction, not proportional to tvd's
    """
    assert knobs.rewards is not None, "tvdpp needs the rewards of the batch"
    advantage_NC, log_q_NC = knobs.rewards.advantage(cells), cells.log_q_NC
    if knobs.reading == "exact":
        return -_expected(log_q_NC.detach().exp() * advantage_NC, log_q_NC)
    if knobs.reading in DRAWING:
        assert knobs.uniform_N is not None, f"reading {knobs.reading}: a uniform number per place"
        drawn_N1 = drawn(log_q_NC, knobs.uniform_N)
        return -(advantage_NC.gather(-1, drawn_N1) * log_q_NC.gather(-1, drawn_N1))[:, 0]
    # A cell that the student cannot use (log q = -inf) has no slope to follow.
    usable_NC = cells.valid() & (log_q_NC > -math.inf)
    number = log_q_NC.shape[1] if cells.valid_NC is None else cells.valid_NC.sum(-1)
    return -(advantage_NC * log_q_NC.masked_fill(~usable_NC, 0.0)).sum(-1) / number


@torch.no_grad()
def drawn(log_q_NC: Tensor, uniform_N: Tensor) -> Tensor:
    """[N, 1]: the cell that each number in [0, 1) draws from q.

    q       .2 .3 .0 .5
    below   .2 .5 .5 1.     u = .4 -> 1: the first cell whose sum exceeds u, and never q = 0
    """
    below_NC = log_q_NC.exp().cumsum(-1)
    wanted_N1 = uniform_N[:, None].to(below_NC.dtype) * below_NC[:, -1:]
    drawn_N1 = torch.searchsorted(below_NC, wanted_N1, right=True)
    return drawn_N1.clamp(max=below_NC.shape[1] - 1)


def count_rewards(cells: TokenBins, drawn_N1: Tensor | None = None) -> Tensor:
    """[2] float64: how many cells have r = 1, and how many cells there are; of the drawn ones, or
    of all."""
    rewarded_NC = cells.log_p_NC > cells.log_q_NC
    valid_NC = cells.valid()
    if drawn_N1 is not None:
        rewarded_NC, valid_NC = rewarded_NC.gather(-1, drawn_N1), valid_NC.gather(-1, drawn_N1)
    return torch.stack([rewarded_NC.sum(), valid_NC.sum()]).double()


def _expected(weight_NC: Tensor, nats_NC: Tensor) -> Tensor:
    """sum weight * nats, where no weight means nothing whatever the nats are (0 log 0 = 0)."""
    return (weight_NC * nats_NC.masked_fill(weight_NC == 0, 0.0)).sum(-1)


# --------------------------------------------------------------------------- the table

_LAW_OPTIONS = ("teacher_temperature", "tail")


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """A divergence by name."""

    name: str
    formula: str
    nats: Callable[[TokenBins, Knobs], Tensor] = field(repr=False)
    """[N]."""
    hard: bool = False
    """Reads the token (a point mass as p), not the teacher's law."""
    on_support: bool = False
    """Infinite where p = 0 < q: `renormalise` then means q renormalised on the kept tokens, too."""
    pools_cells: bool = False
    """Reads statistics of every vocabulary entry: what lies outside may not be summed up first."""
    options: tuple[str, ...] = _LAW_OPTIONS
    """Which options of an objective matter to it."""


def _of(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[TokenBins, Knobs], Tensor]:
    return lambda cells, knobs: function(cells.log_p_NC, cells.log_q_NC)


DIVERGENCES: dict[str, Divergence] = {
    record.name: record
    for record in (
        Divergence(
            name="sft", formula="-log q(token)", nats=_of(forward_kl), hard=True, options=()
        ),
        Divergence(name="kl", formula="sum p log(p / q)", nats=_of(forward_kl)),
        Divergence(name="rkl", formula="sum q log(q / p)", nats=_of(reverse_kl), on_support=True),
        Divergence(
            name="jsd",
            formula="beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q",
            nats=lambda cells, knobs: jensen_shannon(cells.log_p_NC, cells.log_q_NC, knobs.beta),
            options=(*_LAW_OPTIONS, "beta"),
        ),
        Divergence(name="hellinger", formula="1/2 sum (sqrt p - sqrt q)^2", nats=_of(hellinger)),
        Divergence(name="tvd", formula="1/2 sum |p - q|", nats=_of(total_variation)),
        Divergence(
            name="tvdpp",
            formula="-E[A log q], A = (1{p > q} - mean) / deviation",
            nats=tvdpp,
            pools_cells=True,
            options=(*_LAW_OPTIONS, "reading"),
        ),
        Divergence(name="lk", formula="-log sum min(p, q)", nats=_of(lk)),
    )
}


@cache
def _known_or_installed(name: str) -> Divergence:
    found = load_plugin(OBJECTIVES, name, DIVERGENCES)
    if found is None and name in DIVERGENCES:
        return DIVERGENCES[name]
    if found is None:
        known = [*DIVERGENCES, *plugin_names(OBJECTIVES)]
        raise InputError(f"there is no --objective {name!r}{nearest(name, known)}")
    if not isinstance(found, Divergence) or found.name != name:
        raise wrong_plugin(OBJECTIVES, name, f"a Divergence with the name {name!r}")
    return found


def divergence_named(name: str, beta: float = 0.5) -> Divergence:
    """The record of that name; jsd at beta 0 and 1 is kl and rkl. InputError if there is none."""
    known = _known_or_installed(name)
    ends = {0.0: "kl", 1.0: "rkl"}
    return DIVERGENCES[ends[beta]] if name == "jsd" and beta in ends else known


Tail = Literal["bucket", "renormalise", "floor"]
"""What a truncated teacher is taken to say outside the tokens it kept."""

FLOOR = 1e-8
"""Tail `floor`: least probability of a vocabulary entry."""
REST = 2.0**-23
"""Least teacher mass outside the kept tokens: laws come in float32, less would be rounding."""


def truncated_cells(
    laws: TopLogprobs,
    logits_NV: Tensor,
    *,
    tail: Tail,
    divergence: Divergence,
    temperature: float = 1.0,
    floor: float = FLOOR,
) -> TokenBins:
    """A truncated teacher, tempered, beside the student.

    The kept tokens at another temperature are exact up to a factor, so that `renormalise` and
    `floor` need nothing more. The mass outside is known at temperature 1 only: InputError for a
    `bucket` at another one. Where nothing lies outside (K = V) all three are the whole law.
    """
    vocab = logits_NV.shape[1]
    whole = laws.ids_NK.shape[1] >= vocab
    if tail == "bucket" and temperature != 1 and not whole:
        raise InputError(
            f"--tail bucket needs temperature 1, not {temperature:g}: a truncated teacher's mass "
            "outside its kept tokens is known at temperature 1 only; use --tail renormalise or "
            "floor, or whole laws"
        )
    log_p_NK = laws.log_p_NK.to(logits_NV.dtype) / temperature
    used_NK = log_p_NK > -math.inf
    if log_p_NK.shape == logits_NV.shape and bool(used_NK.all()):
        # In the order of the vocabulary the student's side needs no gather, the dear part.
        nothing_NV = torch.full_like(log_p_NK, -math.inf)
        log_p_NV = nothing_NV.scatter_(1, laws.ids_NK.long(), log_p_NK)
        return whole_cells(torch.log_softmax(log_p_NV, dim=-1), logits_NV)
    # An empty cell has id 0, which may be a token that was kept or not: point it elsewhere.
    best_N1 = log_p_NK.argmax(-1, keepdim=True)
    ids_NK = torch.where(used_NK, laws.ids_NK, laws.ids_NK.gather(-1, best_N1)).long()
    all_N1 = used_NK.sum(-1, keepdim=True) >= vocab  # nothing lies outside
    if whole and temperature != 1:  # it is only to be normalised again
        tail = "renormalise"
    if tail == "floor" and floor * vocab >= 1:
        raise InputError(
            f"floor {floor:g} times {vocab} vocabulary entries is more probability than the "
            "teacher's law has; choose a smaller floor"
        )
    if tail == "floor" or (tail == "renormalise" and divergence.pools_cells):
        lowest = math.log(floor) if tail == "floor" else -math.inf
        lowest_N1 = log_p_NK.new_full(all_N1.shape, lowest).masked_fill(all_N1, -math.inf)
        log_p_NK = torch.log_softmax(log_p_NK, dim=-1)
        # Empty cells point at the most probable token: they must carry its probability.
        log_p_NK = torch.where(used_NK, log_p_NK, log_p_NK.amax(-1, keepdim=True))
        log_p_NV = lowest_N1.expand_as(logits_NV).contiguous()
        log_p_NV = log_p_NV.scatter_(-1, ids_NK, torch.maximum(log_p_NK, lowest_N1))
        return whole_cells(torch.log_softmax(log_p_NV, dim=-1), logits_NV)
    inside_NK = logits_NV.gather(-1, ids_NK).masked_fill(~used_NK, -math.inf)
    rest_N1 = torch.full_like(log_p_NK[:, :1], -math.inf)
    if tail == "bucket":
        rest_N1 = (1 - log_p_NK.exp().sum(-1, keepdim=True)).clamp(min=REST).log()
        rest_N1 = rest_N1.masked_fill(all_N1, -math.inf)
    else:
        log_p_NK = torch.log_softmax(log_p_NK, dim=-1)
        if divergence.on_support:
            log_q_NK = torch.log_softmax(inside_NK, dim=-1)
            return TokenBins(log_p_NC=log_p_NK, log_q_NC=log_q_NK, valid_NC=used_NK)
    # The last of K + 1 cells is all that was not kept. One pass over the vocabulary:
    #   logits      a  b  c  d  e        kept: b d
    #   outside     a  .  c  .  e   ->   their log-sum-exp: q(rest) keeps its digits however small
    inside_N1 = _log_sum(inside_NK.clamp(min=LOWEST))
    outside_N1 = _log_sum(logits_NV.scatter(-1, ids_NK, LOWEST))
    log_q_NC = torch.cat([inside_NK, outside_N1], dim=-1) - torch.logaddexp(inside_N1, outside_N1)
    return TokenBins(
        log_p_NC=torch.cat([log_p_NK, rest_N1], dim=-1),
        log_q_NC=log_q_NC,
        valid_NC=torch.cat([used_NK, ~all_N1], dim=-1),
    )


def _log_sum(nats_NC: Tensor) -> Tensor:
    """[N, 1]: log of the sum of exp; -inf, without a gradient, where all of them are `LOWEST`."""
    total_N1 = nats_NC.logsumexp(-1, keepdim=True)
    return total_N1.masked_fill(total_N1 < LOWEST / 2, -math.inf)
