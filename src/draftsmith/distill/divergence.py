"""How far the student's law q is from the teacher's law p, at each of N places.

N places, C cells, V vocabulary. Laws are natural log-probabilities in float32 or
wider; what is returned is [N], differentiable in log q: nats, or (tvd, hellinger) a number in
[0, 1]. A cell without probability in either law (-inf in both) counts nothing.

A cell is a vocabulary entry, or several of them taken together (see `truncation`).

Sources: DistillSpec (2310.08461), DistillBeam (OpenReview Kf5I0OrZrr, eq. 1-6), TVD++
(2403.00858, Lemma 1 and eq. 1), LK losses (2602.23881).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from draftsmith.errors import InputError, nearest

Reading = Literal["exact", "sampled", "uniform"]
"""How the expectation of TVD++ is taken; the paper leaves it open."""

LOWEST = -1e30
"""Stands for log 0 where -inf would make gradients undefined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """Two laws over the same cells."""

    log_p_NC: Tensor
    """No gradient."""
    log_q_NC: Tensor
    letters_NC: Tensor | None = None
    """False where a cell holds nothing at all (neither law could use it); None: all True."""


def whole_cells(log_p_NV: Tensor, logits_NV: Tensor) -> Cells:
    """The teacher's whole law beside the student's."""
    return Cells(log_p_NC=log_p_NV, log_q_NC=torch.log_softmax(logits_NV, dim=-1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """Mean and deviation of r = 1{p > q} over all places and all cells of a batch."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, counts: Tensor) -> Rewards:
        """From a sum of `count_rewards`."""
        mean = counts[0] / counts[1].clamp(min=1)
        return cls(mean=mean, deviation=(mean * (1 - mean)).sqrt())

    def advantage(self, cells: Cells) -> Tensor:
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
    """tvdpp, `sampled`: a uniform number in [0, 1) per place."""


# --------------------------------------------------------------------------- divergences


def sft(log_q_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """-log q(token): the forward KL from a point mass."""
    return -log_q_NV.gather(-1, tokens_N[:, None])[:, 0]


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


def top_cross_entropy(cells: Cells, top: int) -> Tensor:
    """-sum p log q over the teacher's `top` best tokens, p not renormalised (HASS, 2408.15766)."""
    log_p_NC = cells.log_p_NC
    if cells.letters_NC is not None:
        log_p_NC = log_p_NC.masked_fill(~cells.letters_NC, -math.inf)
    best_NK, places_NK = log_p_NC.topk(min(top, log_p_NC.shape[-1]), dim=-1)
    return -_expected(best_NK.exp(), cells.log_q_NC.gather(-1, places_NK))


def tvdpp(cells: Cells, knobs: Knobs) -> Tensor:
    """-E[A log q] with A = (r - mean) / deviation, r = 1{p > q}: to be descended, its value says
    nothing. The sign is that of Lemma 1 (the paper's eq. 1 as printed drives q away from p).

    exact     the sum over cells weighted by q (held constant): the gradient of tvd / deviation
    sampled   one token drawn from q per place: the same on average
    uniform   the mean over cells: another direction, not proportional to tvd's
    """
    assert knobs.rewards is not None, "tvdpp needs the rewards of the batch"
    return READINGS[knobs.reading](cells, knobs.rewards.advantage(cells), knobs.uniform_N)


def count_rewards(cells: Cells) -> Tensor:
    """[2] float64: how many cells have r = 1, and how many cells there are."""
    rewarded = cells.log_p_NC > cells.log_q_NC
    letters = torch.ones_like(rewarded) if cells.letters_NC is None else cells.letters_NC
    return torch.stack([rewarded.sum(), letters.sum()]).double()


def _expected(weight_NC: Tensor, nats_NC: Tensor) -> Tensor:
    """sum weight * nats, where no weight means nothing whatever the nats are (0 log 0 = 0)."""
    return (weight_NC * nats_NC.masked_fill(weight_NC == 0, 0.0)).sum(-1)


def _exact(cells: Cells, advantage_NC: Tensor, uniform_N: Tensor | None) -> Tensor:
    return -_expected(cells.log_q_NC.detach().exp() * advantage_NC, cells.log_q_NC)


def _sampled(cells: Cells, advantage_NC: Tensor, uniform_N: Tensor | None) -> Tensor:
    assert uniform_N is not None, "the reading `sampled` needs a uniform number per place"
    #  q       .2 .3 .0 .5
    #  below   .2 .5 .5 1.       u = .4 -> 1: the first cell whose sum exceeds u, never one of q = 0
    below_NC = cells.log_q_NC.detach().exp().cumsum(-1)
    wanted_N1 = uniform_N[:, None].to(below_NC.dtype) * below_NC[:, -1:]
    drawn_N1 = torch.searchsorted(below_NC, wanted_N1, right=True).clamp(max=below_NC.shape[1] - 1)
    return -(advantage_NC.gather(-1, drawn_N1) * cells.log_q_NC.gather(-1, drawn_N1))[:, 0]


def _uniform(cells: Cells, advantage_NC: Tensor, uniform_N: Tensor | None) -> Tensor:
    log_q_NC, letters = cells.log_q_NC, cells.letters_NC
    # A cell that the student cannot use (log q = -inf) has no slope to follow.
    usable_NC = log_q_NC > -math.inf if letters is None else letters & (log_q_NC > -math.inf)
    number = log_q_NC.shape[1] if letters is None else letters.sum(-1)
    return -(advantage_NC * log_q_NC.masked_fill(~usable_NC, 0.0)).sum(-1) / number


READINGS: dict[Reading, Callable[[Cells, Tensor, Tensor | None], Tensor]] = {
    "exact": _exact,
    "sampled": _sampled,
    "uniform": _uniform,
}


# --------------------------------------------------------------------------- the table

_LAW_OPTIONS = ("temperature", "tail", "floor")


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """A divergence by name."""

    name: str
    formula: str
    nats: Callable[[Cells, Knobs], Tensor] = field(repr=False)
    """[N]."""
    hard: bool = False
    """Reads the token (a point mass as p), not the teacher's law."""
    on_support: bool = False
    """Infinite where p = 0 < q: `renormalise` then means q renormalised on the kept tokens, too."""
    pools_cells: bool = False
    """Reads statistics of every vocabulary entry: what lies outside may not be summed up first."""
    options: tuple[str, ...] = _LAW_OPTIONS
    """Which options of an objective matter to it."""


def _of(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Cells, Knobs], Tensor]:
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


def divergence_named(name: str, beta: float = 0.5) -> Divergence:
    """The record of that name; jsd at beta 0 and 1 is kl and rkl. InputError if there is none."""
    if name not in DIVERGENCES:
        raise InputError(f"there is no --objective {name!r}{nearest(name, DIVERGENCES)}")
    ends = {0.0: "kl", 1.0: "rkl"}
    return DIVERGENCES[ends.get(beta, name) if name == "jsd" else name]
