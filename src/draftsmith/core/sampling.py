"""Samplers: logits -> `Law`, with the semantics of transformers' processors.

`Sampler.processors` is the readable twin.

Shape letters: R rows of laws, V vocabulary, K kept tokens, T time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from draftsmith.config import check_plain, require, require_kind, short
from draftsmith.core.config import SamplingParams, Warping, check_temperature
from draftsmith.core.law import Law
from draftsmith.core.transfer import to_device
from draftsmith.errors import BackendError, InputError

if TYPE_CHECKING:
    from transformers import LogitsProcessorList


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The tokens that stand before a law: prompt, generated, and the drafted path to its node."""

    tokens: Sequence[int]
    num_prompt: int


def require_finite(top_R: Tensor) -> None:
    """
    Raises:
        BackendError: the highest score of some law is NaN or infinite.
    """
    if not all(map(math.isfinite, top_R.tolist())):
        raise BackendError(
            "The model's logits hold NaN or no finite value: its weights or dtype are broken "
            "(try --dtype float32)."
        )


def largest(scores_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The highest score of each row and its column, the lowest of equal ones; NaN counts as the
    largest. On a CPU by numpy, which is ten times as fast as torch for a few long rows."""
    if scores_RV.device.type != "cpu":
        top_R, column_R = scores_RV.max(-1)
        return top_R, column_R
    known_RV = scores_RV.detach().numpy()
    column_R = known_RV.argmax(-1)
    top_R = known_RV[np.arange(len(column_R)), column_R]
    return torch.from_numpy(top_R), torch.from_numpy(column_R)


def widened(scores_RV: Tensor) -> Tensor:
    """The scores in the arithmetic of laws: float32, or float64 if they are."""
    return scores_RV if scores_RV.dtype == torch.float64 else scores_RV.float()


_TIES = 64
"""How many scores beyond the k-th are looked at for ties before everything is sorted."""


SMALL_VOCABULARY = 512
"""Vocabularies up to this size are sorted whole where a nucleus is cut."""


def highest(scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores of each row, downwards, and their columns; of equal ones (half precision
    has many) the lowest columns first, whatever the sort of the device prefers.

    As many more columns follow as hold all that tie with the k-th.
    """
    vocab = scores_RV.shape[1]
    values_RK, ids_RK = scores_RV.topk(min(k + _TIES, vocab), dim=-1)
    if values_RK.shape[1] < vocab and bool((values_RK[:, -1] == values_RK[:, k - 1]).any()):
        return scores_RV.sort(dim=-1, descending=True, stable=True)
    ids_RK, order_RK = ids_RK.sort(dim=-1)
    values_RK, order_RK = values_RK.gather(1, order_RK).sort(dim=-1, descending=True, stable=True)
    return values_RK, ids_RK.gather(1, order_RK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler(Warping):
    """Logits -> Law. The order is transformers': bias, penalties, temperature, top-k, top-p, min-p.

    Presence and frequency penalties (transformers has none) count generated tokens only:
    logit -= presence * [count > 0] + frequency * count.
    """

    temperature: float = 0.0
    """0: all mass on the most probable token (lowest id on a tie)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token, amount added to its logit)."""

    def __post_init__(self) -> None:
        check_plain(self)
        check_temperature(self.temperature, "temperature")
        pairs = isinstance(self.logit_bias, tuple) and all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in self.logit_bias
        )
        require(
            pairs, f"logit_bias must be a tuple of (token, amount), got {short(self.logit_bias)}"
        )
        self.check_warping(self.logit_bias)

    @classmethod
    def from_params(cls, params: SamplingParams) -> Sampler:
        """The sampler that `params` describe."""
        require_kind("params", params, SamplingParams)
        biases = tuple((params.logit_bias or {}).items())
        return cls(temperature=params.temperature, logit_bias=biases, **params.warping())

    @property
    def needs_history(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def takes_highest(self) -> bool:
        """Whether every law is a point mass on the highest logit as it stands."""
        return self.temperature == 0 and not (self.needs_history or self.logit_bias)

    @property
    def reads_logits_alone(self) -> bool:
        """Whether every law is softmax(logits / T), T > 0, of the logits as they stand."""
        cuts = self.top_k != 0 or self.top_p != 1.0 or self.min_p != 0.0
        return self.temperature > 0 and not (cuts or self.needs_history or self.logit_bias)

    def law(
        self,
        logits_RV: Tensor,
        history: Sequence[History] = (),
        *,
        check: Callable[[Tensor], None] = require_finite,
    ) -> Law:
        """The law of the next token.

        Args:
            logits_RV: any float dtype; computed in float32, or float64 if they are.
            history: one per row; may be empty unless `needs_history`.
            check: gets [R], the highest scores. To look at them makes the host wait for a device;
                who will wait later anyway takes them along, and calls `require_finite` then.

        Raises:
            BackendError: a row holds NaN, or no finite logit at all.
        """
        vocab = logits_RV.shape[1]
        scores = self.penalised(logits_RV, history)
        if self.temperature == 0:
            top_R, token_R = largest(scores)
            check(top_R)
            return Law.point(token_R, vocab)
        top_R1 = scores.amax(-1, keepdim=True)
        check(top_R1[:, 0])
        if self.temperature != 1.0:  # the largest becomes 0, so that no temperature overflows
            scores = (scores - top_R1) / self.temperature
        if self.top_k == 0 and self.top_p == 1.0:
            return self._dense(scores, vocab)
        if scores.device.type != "cpu":
            return self._dense(self._cut(scores), vocab)
        values_RK, ids_RK, total_R1 = self._top_k(scores) if self.top_k else self._nucleus(scores)
        probs_RK = (values_RK - total_R1).exp()
        if self.top_p < 1.0:
            # sorted downwards: a token stays while the mass before it is below top_p
            before_RK = probs_RK.cumsum(-1) - probs_RK
            keep_RK = before_RK < self.top_p
            keep_RK[:, 0] = True
            probs_RK = probs_RK * keep_RK
        if self.min_p > 0:
            probs_RK = probs_RK * (probs_RK >= self.min_p * probs_RK[:, :1])
        width = int((probs_RK > 0).sum(-1).max())
        ids_RK, order_RK = ids_RK[:, :width].sort(dim=-1)
        return Law.from_weights(probs_RK[:, :width].gather(1, order_RK), vocab, ids_RK)

    def processors(self) -> LogitsProcessorList:
        """The same warping by transformers' own processors (temperature to min-p): the twin.

        One freedom is left: where tokens of equal logits straddle the edge of a nucleus, which of
        them stay is the sort's choice (ours: the lowest ids).
        """
        from transformers import LogitsProcessorList
        from transformers.generation import logits_process as hf

        steps: list[object] = []
        if self.temperature not in (0.0, 1.0):
            steps.append(hf.TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            steps.append(hf.TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            steps.append(hf.TopPLogitsWarper(self.top_p))
        if self.min_p > 0:
            steps.append(hf.MinPLogitsWarper(self.min_p))
        return LogitsProcessorList(steps)

    # ---------------------------------------------------------------- steps

    def penalised(self, logits_RV: Tensor, history: Sequence[History]) -> Tensor:
        """[R, V] float32 (float64 if they are): logits behind bias and penalties, before the
        temperature and all that cuts. `history` as in `law`."""
        wide = widened(logits_RV)
        if not (self.needs_history or self.logit_bias):
            return wide
        scores = wide.clone()
        for token, amount in self.logit_bias:
            if not 0 <= token < scores.shape[1]:
                raise InputError(
                    f"logit_bias names token {token}, but the vocabulary has {scores.shape[1]}."
                )
            scores[:, token] += amount
        forbidden = {token for token, amount in self.logit_bias if amount == -math.inf}
        require(len(forbidden) < scores.shape[1], "logit_bias forbids every token there is.")
        if self.repetition_penalty != 1.0:
            from transformers import RepetitionPenaltyLogitsProcessor

            penalise = RepetitionPenaltyLogitsProcessor(self.repetition_penalty)
            # rows differ in length; a row padded with its own first token penalises the same set
            width = max(len(row.tokens) for row in history)
            if width:
                ids_RT = torch.tensor(
                    [
                        [*row.tokens, *([row.tokens[0]] * (width - len(row.tokens)))]
                        for row in history
                    ]
                )
                scores = penalise(to_device(ids_RT, scores.device), scores)
        if self.presence_penalty or self.frequency_penalty:
            vocab = scores.shape[1]
            generated = [
                r * vocab + token
                for r, row in enumerate(history)
                for token in row.tokens[row.num_prompt :]
            ]
            drawn = torch.tensor(generated, dtype=torch.long)
            cells, counts = torch.unique(drawn, return_counts=True)
            cost = self.presence_penalty + self.frequency_penalty * counts.to(scores.dtype)
            cells, cost = to_device(cells, scores.device), to_device(cost, scores.device)
            scores[cells // vocab, cells % vocab] -= cost
        return scores

    def _dense(self, scores_RV: Tensor, vocab: int) -> Law:
        probs = scores_RV.softmax(-1)
        if self.min_p > 0:
            keep = probs >= self.min_p * probs.amax(-1, keepdim=True)
            return Law.from_weights(probs * keep, vocab)
        return Law(probs, vocab)

    def _cut(self, scores_RV: Tensor) -> Tensor:
        """-inf where top-k and top-p drop a token. The same laws as below by sorting everything:
        what is below asks how many tokens are left, which a device answers only when it is done."""
        if self.top_k:
            k = min(self.top_k, scores_RV.shape[1])
            least_R1 = scores_RV.topk(k, dim=-1).values[:, -1:]
            scores_RV = scores_RV.masked_fill(scores_RV < least_R1, -math.inf)
        if self.top_p == 1.0:
            return scores_RV
        sorted_RV, ids_RV = scores_RV.sort(dim=-1, descending=True, stable=True)
        probs_RV = sorted_RV.softmax(-1)
        drop_RV = probs_RV.cumsum(-1) - probs_RV >= self.top_p
        drop_RV[:, 0] = False
        return scores_RV.masked_fill(drop_RV.scatter(1, ids_RV, drop_RV), -math.inf)

    def _top_k(self, scores_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores sorted downwards, -inf where dropped; ids; and the log of the kept mass.

        Like transformers, all tokens that tie with the k-th stay (half precision ties often).
        """
        k = min(self.top_k, scores_RV.shape[1])
        # in one order of ties, or a nucleus would cut them otherwise than a neighbour's
        values_RK, ids_RK = highest(scores_RV, k)
        values_RK = values_RK.masked_fill(values_RK < values_RK[:, k - 1 : k], -math.inf)
        return values_RK, ids_RK, values_RK.logsumexp(-1, keepdim=True)

    def _nucleus(self, scores_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores that can be in the nucleus, sorted downwards; ids; and the log of all mass.

        A full sort of 32,000 scores costs as much as a small target's forward. Tokens less probable
        than (1 - top_p) / V together weigh less than 1 - top_p, so they lie in the tail that is cut
        off, and only the others are sorted. In a small vocabulary all rows are sorted at once.
        """
        num_rows, vocab = scores_RV.shape
        total_R1 = scores_RV.logsumexp(-1, keepdim=True)
        least_R1 = total_R1 + math.log((1 - self.top_p) / vocab) - 1e-3
        if vocab <= SMALL_VOCABULARY:
            values_RK, ids_RK = scores_RV.sort(dim=-1, descending=True, stable=True)
            stays_RK = values_RK >= least_R1
            width = int(stays_RK.sum(-1).max())
            values_RK = values_RK.where(stays_RK, -math.inf)[:, :width]
            return values_RK, ids_RK.where(stays_RK, 0)[:, :width], total_R1
        parts = []
        for r in range(num_rows):
            ids = (scores_RV[r] >= least_R1[r]).nonzero()[:, 0]
            values, order = scores_RV[r, ids].sort(descending=True, stable=True)
            parts.append((values, ids[order]))
        width = max(len(values) for values, _ in parts)
        values_RK = scores_RV.new_full((num_rows, width), -math.inf)
        ids_RK = torch.zeros((num_rows, width), dtype=torch.long, device=scores_RV.device)
        for r, (values, ids) in enumerate(parts):
            values_RK[r, : len(values)], ids_RK[r, : len(ids)] = values, ids
        return values_RK, ids_RK, total_R1
