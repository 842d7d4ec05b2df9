"""What is measured while training goes on, and the weights of the best measurement.

    checkpoints/step-00000200/      the newest ones: what an interrupted run continues from
    checkpoints/best/step-00000150/ the weights of the best evaluation so far, with its value

A better one is written beside the kept one, made visible in one rename, and only then the other is
removed: at every moment there is one. After a kill between the two there are both; the better
value counts.

F figures, S steps, N places, B rows, T time, V vocabulary, K kept tokens, C cells (K or V).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.core.types import (
    DraftPrediction,
    NarrowHead,
    TrajectoryBatch,
)
from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.batches import EvaluationSource
from draftsmith.distill.objectives import divergence as div
from draftsmith.distill.objectives.distillation import (
    Acceptance,
    Head,
    LossPositions,
    LossTerms,
    Objective,
    gather,
    head_beside,
    logprobs,
    masks,
    mass_outside,
    wide,
)

Forward = Callable[[TrajectoryBatch, Any, Objective], dict[str, Any]]
"""A batch, what the steps before it carry, and an objective: `distributed.Learner.forward`."""


WHILE_TRAINING = 16
"""How many batches an evaluation that does not choose looks at before the end of training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A figure: the mean of `objective` over all that it counts in `batches`."""

    batches: EvaluationSource
    objective: Objective
    name: str = "loss"
    """What the figure is called in reports."""
    better: Literal["smaller", "larger"] = "smaller"
    chooses: bool = False
    """The weights with the best value of this figure are kept. It then always sees all batches."""

    num_sums: ClassVar[int] = 1
    """How many totals and weights the objective gives per step of the drafter; subclasses report
    several figures from them."""

    @property
    def sign(self) -> int:
        """Times a value: the smallest is the best."""
        return 1 if self.better == "smaller" else -1

    @property
    def figure(self) -> str:
        """By what it chooses."""
        return f"{self.better} {self.name}"

    def num_batches(self, final: bool) -> int:
        """How many batches this evaluation takes."""
        whole = self.batches.num_batches
        return whole if final or self.chooses else min(whole, WHILE_TRAINING)

    def report(self, totals_SF: Tensor, weights_SF: Tensor) -> dict[str, float]:
        """What sums over all batches come to (S steps of the drafter, F sums of each), and how many
        tokens were counted; no figure when there was none."""
        total, weight = float(totals_SF.sum()), float(weights_SF.sum())
        return {**({self.name: total / weight} if weight > 0 else {}), "tokens": weight}


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceEvaluation(Evaluation):
    """Both figures of `Acceptance`: `acceptance`, which chooses if the evaluation does, and
    `outside` of a drafter that lacks some tokens."""

    objective: Objective = field(default_factory=Acceptance)
    name: str = "acceptance"
    better: Literal["smaller", "larger"] = "larger"

    num_sums: ClassVar[int] = 2

    def report(self, totals_SF: Tensor, weights_SF: Tensor) -> dict[str, float]:
        totals, weights = totals_SF.sum(0).tolist(), weights_SF.sum(0).tolist()
        sums = zip((self.name, "outside"), totals, weights, strict=True)
        means = {name: total / weight for name, total, weight in sums if weight > 0}
        return means | {"tokens": weights[0]}


def sums_of(
    evaluation: Evaluation,
    forward: Forward,
    num_batches: int,
    num_steps: int,
    turns: tuple[int, int],
) -> Tensor:
    """[N, S, 2, F]: totals and weights of each step in this process's batches, 0 in the rows of the
    others' (N batches, S steps, F sums).

    `turns`: number of this process, and of how many. They take turns, and all call the model as
    often (sharded weights need all of them). Summed over processes and then over rows, the result
    is the same for any number of processes:

        5 batches, 2 processes     0: batches 0 2 4     1: batches 1 3 (4 again, not counted)
    """
    first, every = turns
    shape = (num_batches, num_steps, 2, evaluation.num_sums)
    sums_NS2F = torch.zeros(shape, dtype=torch.float64)
    for start in range(0, num_batches, every):
        index = min(start + first, num_batches - 1)
        batch = evaluation.batches.batch(index)
        carry: Any = None
        for step in range(num_steps):
            out = forward(batch, carry, evaluation.objective)
            carry = out["carry"]
            sums = torch.stack([out["total"], out["weight"]]).double()
            sums_NS2F = sums_NS2F.to(sums.device)  # and stays there: nothing waits for the device
            if start + first < num_batches:
                sums_NS2F[index, step] = sums.view(2, evaluation.num_sums)
    return sums_NS2F


# --------------------------------------------------------------------------- the best weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best evaluation so far, as the state of its checkpoint says."""

    step: int
    value: float
    values: dict[str, float]
    """All figures of that evaluation."""
    path: Path = field(compare=False)
    """A checkpoint of weights alone."""


def find_best(folder: Path, evaluation: Evaluation) -> Best | None:
    """The best one in `folder`, of equal ones the earlier; BackendError names a damaged file."""
    found = []
    for path in checkpoints.complete(folder):
        state = checkpoints.read_state(path)
        value = state["value"]
        values = state.get("values", {evaluation.name: value})  # older runs kept the one figure
        found.append(Best(step=state["step"], value=value, values=values, path=path))
    return min(found, key=lambda best: (evaluation.sign * best.value, best.step), default=None)


def discard_others(folder: Path, evaluation: Evaluation, identity: dict[str, Any] | None) -> None:
    """Remove what another run, or a choice by another figure, has left in `folder`.

    `identity`: of the run that goes on; None: a run begins, and everything is of another one.
    """
    for path in checkpoints.complete(folder):
        state = {} if identity is None else checkpoints.read_state(path)
        if (state.get("identity"), state.get("figure")) != (identity, evaluation.figure):
            checkpoints.remove(path)


def is_better(best: Best | None, evaluation: Evaluation, *, step: int, value: float | None) -> bool:
    """Whether this value replaces the best: equal ones do not, nor a repetition of its own step."""
    if value is None or not math.isfinite(value):
        return False
    if best is None:
        return True
    return step != best.step and evaluation.sign * value < evaluation.sign * best.value


FIGURES = (
    "accuracy",
    "acceptance",
    "outside",
    "survival",
    "survival_t1",
    "uncounted_t1",
    "misaligned",
)
"""Kinds of sums of each depth, in their order."""
ChainFigure = Literal["tokens_per_step", "tokens_per_step_t1"]
TOKENS_PER_STEP: dict[ChainFigure, str] = {
    "tokens_per_step": "survival",
    "tokens_per_step_t1": "survival_t1",
}
"""Kinds of sums over all depths: the target's own token, and the sum of these survivals."""


class Chains:
    """Sums of each of `FIGURES` at the depth of one prediction: how far chains of drafts would get,
    for drafters that learn several steps. No gradient.

    A chain hangs below every position at once, as in training: step d of the drafter is draft d of
    all of them, each behind the text's own tokens. The last row shows where decoding would have fed
    another token.

    place             0      1      2      3        text: a b c d e f; depth d drafts t + 1 + d
    draft 1           c      d      x      f
    draft 2           d      z      f      .        . the document has ended
    survival_1        1      1      0      1
    survival_2        1      0      0      .        nothing below a draft that failed survives
    misaligned_2      0      0      1      .        below place 2 the text feeds e, decoding x

    While a chain survives, its tokens are the text's: a survival is measured on what the drafter
    would have seen. All positions count alike, whereas a decoding step begins only where the one
    before ended: `tokens_per_step` is a mean over positions, close to that over steps.

    accuracy       the drafter's best token is the target's
    acceptance     sum_v min(p, q) at temperature 1; where the target kept only its best tokens, the
                   sum over these, a lower bound
    outside        with a draft vocabulary: sum of p over the tokens that it lacks, so acceptance is
                   at most 1 - outside. Where the target kept only its best tokens, the sum over
                   these: the rest counts as inside, and 1 - outside is a bound all the same
    survival       temperature 0: drafts 1 .. d are all the text's tokens. Exact for greedy texts
    survival_t1    temperature 1: the product over the chain of min(1, q(x) / p(x)), see below
    uncounted_t1   share of chains that `survival_t1` leaves out: p of one of their tokens is not
                   known, because there is no law or the token was not kept
    misaligned     (from depth 2 on) the drafter's best token at the depth before is not the text's:
                   decoding feeds the draft where training fed the text. That is the token
                   misalignment of GRIFFIN (arXiv 2502.11018). Its loss mask is milder: the text's
                   token has to be among the best 3

    In texts drawn from the target at temperature 1 the mean of `survival_t1` is the probability
    that a drawn chain survives. With p and q the laws behind the tokens before,

        E_{x~p} prod min(1, q/p)  =  sum_x prod p min(1, q/p)  =  sum_x prod min(p, q)
        P(a chain x~q survives)   =  sum_x prod q min(1, p/q)  =  sum_x prod min(p, q)

    Chains that are left out make it the mean over the others.

    Accuracy, acceptance and outside count all places whose token counts and has a law; the other
    figures those where all tokens of the chain count. Of a drafter's own masks only the first is
    looked at: later ones say what is learnt (GRIFFIN's leave out chains that went wrong), and a
    chain that went wrong has not survived. A place weighs as much as the batch says of the token at
    depth d.

    The chains of a batch are remembered from one step to the next. A prediction that does not look
    one place further than the last one begins another batch.
    """

    def __init__(self) -> None:
        self._chain: _Chain | None = None

    @torch.no_grad()
    def loss(self, prediction: DraftPrediction, batch: TrajectoryBatch, head: Head) -> LossTerms:
        """[F] each: sums of weight x figure over the places that count, and of their weights."""
        above = self._chain
        if above is None or prediction.ahead != above.ahead + 1:
            above = _Chain.before(prediction)
        prediction = replace(prediction, mask_BT=above.begun_BT)
        taught_BT, plain_BT = masks(prediction, batch, None)
        seen_BT6 = above.share_BT.new_zeros(*taught_BT.shape, 6)
        taught, plain = (gather(prediction, batch, mask) for mask in (taught_BT, plain_BT))
        own = prediction.narrow
        head, vocab, narrow = head_beside(taught, prediction, batch, head)
        for mask_BT, places, look in (
            (taught_BT, taught, partial(_beside_law, own=own)),
            (plain_BT, plain, _beside_token),
        ):
            parts = places.split(None, vocab)
            seen = [look(part, wide(head(part.hidden_NH)), narrow) for part in parts]
            if seen:
                seen_BT6[mask_BT] = torch.cat(seen)
        hit_BT, known_BT, share_BT, same_BT, overlap_BT, outside_BT = seen_BT6.unbind(-1)
        now = self._chain = _Chain(
            depth=above.depth + 1,
            ahead=prediction.ahead,
            begun_BT=above.begun_BT,
            whole_BT=above.whole_BT & (taught_BT | plain_BT),
            drafted_BT=above.drafted_BT & hit_BT.bool(),
            share_BT=above.share_BT * share_BT,
            known_BT=above.known_BT & known_BT.bool(),
            hit_BT=hit_BT.bool(),
        )
        weights_BT = batch.weights_ahead(prediction.ahead)
        # at depth 1 decoding, too, feeds a token of the target's own
        fed_draft_BT = now.whole_BT & (now.depth > 1)
        bounded_BT = torch.zeros_like(taught_BT) if own is None else taught_BT
        sums = {
            "accuracy": _sums(same_BT, taught_BT, weights_BT),
            "acceptance": _sums(overlap_BT, taught_BT, weights_BT),
            "outside": _sums(outside_BT, bounded_BT, weights_BT),
            "survival": _sums(now.drafted_BT, now.whole_BT, weights_BT),
            "survival_t1": _sums(now.share_BT, now.whole_BT & now.known_BT, weights_BT),
            "uncounted_t1": _sums(~now.known_BT, now.whole_BT, weights_BT),
            "misaligned": _sums(~above.hit_BT, fed_draft_BT, weights_BT),
        }
        total_F, weight_F = torch.stack([sums[name] for name in FIGURES], dim=1).unbind(0)
        return LossTerms(total=total_F, weight=weight_F)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainEvaluation(Evaluation):
    """All figures of `Chains`; one name per figure and depth, `survival_1` and so on.

    tokens_per_step, tokens_per_step_t1     1 + survival_1 + survival_2 + ..., at both temperatures;
                                            depths that no text reaches add nothing

    `name`: which of these two chooses, if the evaluation does.
    """

    objective: Objective = field(default_factory=Chains)
    name: ChainFigure = "tokens_per_step"
    better: Literal["smaller", "larger"] = "larger"

    num_sums: ClassVar[int] = len(FIGURES)

    def report(self, totals_SF: Tensor, weights_SF: Tensor) -> dict[str, float]:
        means = {}
        for column, figure in enumerate(FIGURES):
            sums_S2 = torch.stack([totals_SF[:, column], weights_SF[:, column]], dim=1)
            depths = enumerate(sums_S2.tolist(), start=1)
            means[figure] = {depth: total / weight for depth, (total, weight) in depths if weight}
        values: dict[str, float] = {
            name: 1 + sum(means[survival].values())
            for name, survival in TOKENS_PER_STEP.items()
            if means[survival]
        }
        for figure, by_depth in means.items():
            values |= {f"{figure}_{depth}": mean for depth, mean in by_depth.items()}
        return values


# --------------------------------------------------------------------------- one depth


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chain:
    """The chains of one batch down to one depth."""

    depth: int
    ahead: int
    begun_BT: Tensor
    """Where the drafter's first prediction counts."""
    whole_BT: Tensor
    """All tokens so far count and are of one document."""
    drafted_BT: Tensor
    """All of them were the drafter's best."""
    share_BT: Tensor
    """Product of min(1, q / p) over them."""
    known_BT: Tensor
    """p of each of them is known."""
    hit_BT: Tensor
    """The last of them was the drafter's best."""

    @classmethod
    def before(cls, prediction: DraftPrediction) -> _Chain:
        """Without a draft: what the first prediction of a batch goes on from."""
        begun_BT = prediction.mask_BT.bool()
        all_BT = torch.ones_like(begun_BT)
        return cls(
            depth=0,
            ahead=prediction.ahead - 1,
            begun_BT=begun_BT,
            share_BT=wide(torch.ones_like(begun_BT, dtype=prediction.hidden_BTH.dtype)),
            **dict.fromkeys(("whole_BT", "drafted_BT", "known_BT", "hit_BT"), all_BT),
        )


# Both: (places, the drafter's logits there, the head that gave them if it is one over some tokens)
# -> [N, 6]: the drafter's best token is the text's; p(x) is known; min(1, q(x) / p(x)); the best
# token is the target's; sum_v min(p, q); the sum of p over tokens that the drafter does not know.


def _beside_law(
    places: LossPositions,
    logits_NV: Tensor,
    narrow: NarrowHead | None,
    own: NarrowHead | None,
) -> Tensor:
    """`own`: the head over the drafter's tokens, also where the logits are over all."""
    log_p_NC, log_q_NC, ids_NC, logits_NV = logprobs(places.laws(), logits_NV, narrow)
    choice_N, best_N1 = _best(logits_NV, narrow), log_p_NC.argmax(-1, keepdim=True)
    outside_N = mass_outside(log_p_NC, ids_NC, own)
    at_N1, own_NC = places.tokens_N[:, None], log_p_NC
    if ids_NC is not None:  # an empty cell has id 0, too
        own_NC = log_p_NC.masked_fill(ids_NC != at_N1, -math.inf)
        at_N1, best_N1 = own_NC.argmax(-1, keepdim=True), ids_NC.gather(-1, best_N1)
    log_p_N, log_q_N = (one.gather(-1, at_N1)[:, 0] for one in (own_NC, log_q_NC))
    columns = [
        choice_N == places.tokens_N,
        log_p_N > -math.inf,
        (log_q_N - log_p_N).clamp(max=0).exp(),
        choice_N == best_N1[:, 0],
        div.acceptance(log_p_NC, log_q_NC),
        outside_N,
    ]
    return torch.stack([column.to(logits_NV.dtype) for column in columns], dim=1)


def _beside_token(places: LossPositions, logits_NV: Tensor, narrow: NarrowHead | None) -> Tensor:
    hit_N1 = (_best(logits_NV, narrow) == places.tokens_N)[:, None]
    return F.pad(hit_N1.to(logits_NV.dtype), (0, 5))


def _best(logits_NV: Tensor, narrow: NarrowHead | None) -> Tensor:
    """[N]: the most probable token."""
    best_N = logits_NV.argmax(-1)
    return best_N if narrow is None else narrow.ids_D[best_N]


def _sums(figure_BT: Tensor, counted_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """[2]: total and weight, in float64 because counts are exact then."""
    weights_N = weights_BT[counted_BT].double()
    return torch.stack([(figure_BT[counted_BT].double() * weights_N).sum(), weights_N.sum()])
