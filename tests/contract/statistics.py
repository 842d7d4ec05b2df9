"""Chi-square tests of what `decode()` emits with its real noise.

The limit is df + 6 sqrt(2 df), about six standard deviations. By the chi-square tail a right law
exceeds it with probability 6e-5 at 10 degrees of freedom, 3e-5 at 15, 5e-7 at 100, 1e-7 at 255.
Seeds are fixed, so a run that passes once passes always.

Power: a wrong law q adds N sum (q - p)^2 / p to the statistic of N trials. At 511 degrees of
freedom 24,576 trials find a law for which that sum is 0.011 with probability 0.95; 40,960 trials
with a limit of ten standard deviations would find one of 0.010.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.law import Noise, Purpose
from draftsmith.core.sampling import Sampler
from draftsmith.core.trees import depths, shape_parents
from draftsmith.core.types import DraftTree, Proposal, TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.targets.toy import TabularTarget

from .reference_drafters import Known, Sampled

FEWEST = 5.0
"""Bins in which fewer trials are expected are merged."""


def chi_square(observed_K: np.ndarray, probs_K: np.ndarray) -> tuple[float, int]:
    """(statistic, degrees of freedom); rare bins are merged into one."""
    expected_K = probs_K * observed_K.sum()
    rare_K = expected_K < FEWEST
    seen = [*observed_K[~rare_K], observed_K[rare_K].sum()]
    wanted = [*expected_K[~rare_K], expected_K[rare_K].sum()]
    if wanted[-1] < FEWEST:  # still rare: into the last common bin
        seen[-2:], wanted[-2:] = [sum(seen[-2:])], [sum(wanted[-2:])]
    statistic = sum((s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True) if w > 0)
    return float(statistic), len(wanted) - 1


def assert_law(observed_K: np.ndarray, probs_K: np.ndarray, what: str) -> None:
    """The counts fit the law, within six standard deviations of the statistic."""
    impossible = int(observed_K[probs_K == 0].sum())
    assert not impossible, f"{what}: {impossible} tokens that the target never says"
    statistic, df = chi_square(observed_K, probs_K)
    limit = df + 6 * np.sqrt(2 * df)
    assert statistic < limit, (
        f"{what}: chi-square {statistic:.0f} at {df} degrees of freedom "
        f"(limit {limit:.0f}, {int(observed_K.sum())} trials)"
    )


def emitted(
    target: TabularTarget,
    drafter: Drafter,
    options: DecodeOptions,
    num_trials: int,
    *,
    batch: int,
    prompt: Sequence[int] = (0,),
) -> tuple[np.ndarray, float]:
    """([trials, tokens], share of offered drafts accepted); the request ids are the trials."""
    drafter.bind(target)
    out = np.zeros((num_trials, options.max_new_tokens), dtype=np.int64)
    accepted = offered = 0
    for first in range(0, num_trials, batch):
        ids = range(first, min(first + batch, num_trials))
        rows: list[list[int]] = [[] for _ in ids]
        for step in decode(target, drafter, [list(prompt)] * len(ids), options, request_ids=ids):
            accepted += sum(step.accepted)
            offered += sum(step.offered_depth)
            for row, tokens in zip(rows, step.emitted, strict=True):
                row.extend(tokens)
        out[first : first + len(rows)] = rows
    return out, accepted / max(offered, 1)


class FastSampled(Sampled):
    """`Sampled` over a table without context (order 0): one law for all rows, depths and steps."""

    def propose(
        self,
        state: Known,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        assert self.model.order == 0 and not sampler.needs_history
        num_rows, rows = len(state.tokens), np.arange(len(state.tokens))
        law = sampler.law(self.model.table_CV[:1])
        wide = law.take(np.zeros(num_rows, dtype=np.int64))
        parents = np.array(shape_parents(shape), dtype=np.int64)
        drawn = [
            wide.draw(noise, rows, int(depth) - 1, Purpose.DRAFT, node)
            for node, depth in enumerate(depths(parents[None])[0])
        ]
        return DraftTree(
            tokens_BN=torch.stack(drawn, 1),
            parents_BN=torch.from_numpy(parents).expand(num_rows, -1).clone(),
            proposal=Proposal.SAMPLED,
            q=law,
            q_rows_BN=torch.zeros((num_rows, len(parents)), dtype=torch.long),
        )


class Plain(TabularTarget):
    """A law without context, in float32 if wanted: one row for the whole batch, so that a large
    vocabulary and many trials stay cheap."""

    def __init__(
        self, vocab_size: int, *, seed: int, negated: bool = False, wide: bool = True
    ) -> None:
        super().__init__(vocab_size, order=0, seed=seed, negated=negated)
        if not wide:
            self.table_CV = self.table_CV.float()
