"""A drafter of chains that is small enough for loops, texts for it, and its figures by loops."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.core.types import (
    DraftPrediction,
    FullLogprobs,
    NarrowHead,
    TopLogprobs,
    TrajectoryBatch,
)
from draftsmith.drafters.base import Drafter
from tests.small_laws import top

B, T, V, H, K, DEPTHS = 3, 40, 3, 6, 2, 3
LogitsAt = Callable[[TrajectoryBatch, int, int, int], Tensor]


class Unrolled(Drafter):
    """Chains over a recurrent state that begins as the feature; heads and weights of its own per
    step, and masks that leave out more and more chains, as some drafters have them.

    `known`: the tokens that it may draft; None: all.
    """

    trains = True
    start = propose = advance = None

    def __init__(self, vocab: int = V, known: Collection[int] | None = None) -> None:
        super().__init__()
        self.known = None if known is None else torch.tensor(sorted(known))
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.embedding, self.mix = normal(vocab, H), normal(H, H)
        self.heads = nn.ParameterList(normal(vocab, H) for _ in range(DEPTHS))
        self.num_steps = DEPTHS
        self.begins: Callable[[int], bool] = lambda t: t % 4 != 1

    def forward(self, batch: TrajectoryBatch, carry: Any) -> tuple[DraftPrediction, Any]:
        assert batch.features_BTS is not None
        step, state = (0, batch.features_BTS) if carry is None else carry
        state = torch.tanh(state @ self.mix + self.embedding[batch.tokens_ahead(1 + step)])
        places = range(batch.tokens_BT.shape[1])
        counts = torch.tensor([self.begins(t) and (step == 0 or t % 2 == 0) for t in places])
        prediction = DraftPrediction(
            hidden_BTH=state,
            mask_BT=counts.expand_as(batch.tokens_BT),
            ahead=2 + step,
            weight=0.5**step,
            head=None if step == 0 else lambda hidden: self.logits(step, hidden),
        )
        if self.known is not None:
            own = NarrowHead(
                ids_D=self.known, head=lambda hidden: hidden @ self.heads[step][self.known].T
            )
            prediction = replace(prediction, narrow=own)
        return prediction, (step + 1, state)

    def head(self) -> Callable[[Tensor], Tensor]:
        return lambda hidden: self.logits(0, hidden)

    def logits(self, step: int, hidden: Tensor) -> Tensor:
        logits = hidden @ self.heads[step].T
        if self.known is None:
            return logits
        lacked = torch.ones(logits.shape[-1], dtype=torch.bool).index_fill(0, self.known, False)
        return logits.masked_fill(lacked, -math.inf)

    def logits_at(self, batch: TrajectoryBatch, b: int, t: int, depth: int) -> Tensor:
        """[V]: what draft `depth` of the chain below place t is drawn by, token after token."""
        assert batch.features_BTS is not None
        state = batch.features_BTS[b, t]
        for i in range(depth):
            state = self.fed(state, int(batch.tokens_BT[b, t + 1 + i]))
        return self.logits(depth - 1, state)

    def fed(self, state: Tensor, token: int) -> Tensor:
        return torch.tanh(self.embedding[token] + state @ self.mix)


def made(laws: str, seed: int, *, rows: int = B, vocab: int = V) -> TrajectoryBatch:
    """Several documents side by side, some tokens that do not count, some that have no law."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (rows, T), generator=generator)
    ends = torch.rand(rows, T, generator=generator) < 0.1
    row = torch.randperm(rows * T, generator=generator).view(rows, T)
    batch = TrajectoryBatch(
        tokens_BT=tokens,
        loss_mask_BT=torch.rand(rows, T, generator=generator) < 0.85,
        documents_BT=ends.long().cumsum(1),
        weights_BT=torch.rand(rows, T, generator=generator) + 0.1,
        features_BTS=torch.randn(rows, T, H, generator=generator, dtype=torch.float64),
    )
    if laws == "none":
        return batch
    hidden = torch.randn(rows * T, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, H, generator=generator, dtype=torch.float64)
    known = torch.rand(rows, T, generator=generator) < 0.9
    kept: TopLogprobs | FullLogprobs = FullLogprobs(
        hidden_NH=hidden, head=lambda states: states @ weight.T
    )
    if laws == "top":
        kept = top(torch.log_softmax(hidden @ weight.T, -1), K)
        kept.ids_NK[::5, -1], kept.log_p_NK[::5, -1] = 0, -math.inf  # some kept fewer
    return replace(batch, laws=kept, law_row_BT=row.where(known, -1))


def law_at(batch: TrajectoryBatch, b: int, t: int) -> dict[int, float] | None:
    """Probability of each kept token at t, None without a law."""
    row = -1 if batch.law_row_BT is None else int(batch.law_row_BT[b, t])
    if row < 0:
        return None
    if isinstance(batch.laws, FullLogprobs):
        return dict(enumerate(batch.laws.head(batch.laws.hidden_NH[row]).softmax(-1).tolist()))
    assert batch.laws is not None
    pairs = zip(batch.laws.ids_NK[row].tolist(), batch.laws.log_p_NK[row].tolist(), strict=True)
    return {token: math.exp(log_p) for token, log_p in pairs if log_p > -math.inf}


def expected(
    batches: list[TrajectoryBatch],
    logits_at: LogitsAt,
    begins: Callable[[int], bool],
    depths: int = DEPTHS,
    known: Collection[int] | None = None,
) -> dict[str, float]:
    """Every figure as its definition reads. `known`: the draft vocabulary; None: all tokens."""
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)  # (value, weight)
    for batch, depth in itertools.product(batches, range(1, depths + 1)):
        rows, length = batch.tokens_BT.shape
        for b, t in itertools.product(range(rows), range(length)):
            where = [t + 1 + d for d in range(1, depth + 1)]
            counts = [at < length and same_text(batch, b, t, at) for at in where]
            if not (begins(t) and counts[-1]):
                continue
            weight = 1.0 if batch.weights_BT is None else float(batch.weights_BT[b, where[-1]])
            laws = [law_at(batch, b, at) if at < length else None for at in where]
            texts = [int(batch.tokens_BT[b, at]) for at in where]
            logits = [logits_at(batch, b, t, d) for d in range(1, depth + 1)]
            drafts = [int(one.argmax()) for one in logits]
            q = [one.softmax(-1).tolist() for one in logits]

            def add(figure: str, value: float, weight: float = weight, depth: int = depth) -> None:
                seen[f"{figure}_{depth}"].append((value, weight))

            law = laws[-1]
            if law is not None:
                add("accuracy", drafts[-1] == max(law, key=lambda token: law[token]))
                add("acceptance", sum(min(p, q[-1][token]) for token, p in law.items()))
                if known is not None:
                    add("outside", sum(p for token, p in law.items() if token not in known))
            if not all(counts):
                continue
            add("survival", drafts == texts)
            share, counted = 1.0, True
            for law, text, q_V in zip(laws, texts, q, strict=True):
                counted = counted and law is not None and text in law
                share *= min(1.0, q_V[text] / law[text]) if counted else 0.0
            if counted:
                add("survival_t1", share)
            add("uncounted_t1", not counted)
            if depth > 1:
                add("misaligned", drafts[-2] != texts[-2])
    means = {
        name: sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
        for name, pairs in seen.items()
    }
    for name, survival in (("tokens_per_step", "survival"), ("tokens_per_step_t1", "survival_t1")):
        found = [means[f"{survival}_{d}"] for d in range(1, 9) if f"{survival}_{d}" in means]
        if found:
            means[name] = 1 + sum(found)
    return means


def same_text(batch: TrajectoryBatch, b: int, t: int, at: int) -> bool:
    """The token at `at` counts, and is of the document of t."""
    documents = batch.documents_BT
    return bool(batch.loss_mask_BT[b, at]) and (
        documents is None or bool(documents[b, at] == documents[b, t])
    )


@dataclass
class Held:
    """These batches."""

    batches: list[TrajectoryBatch]

    @property
    def num_batches(self) -> int:
        return len(self.batches)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> TrajectoryBatch:
        return self.batches[step]
