"""Tabular targets and settings that keep exact enumeration small and still reach every corner."""

from __future__ import annotations

import copy

import torch

from draftsmith.core.sampling import Sampler
from draftsmith.targets.toy import TabularTarget

V = 8
NUM_NEW = 3
"""Tokens generated: one inside a draft, one behind it, and one that needs a second step."""

PROMPTS = ((3,), (1, 2, 5, 1, 2))
"""A ragged batch; the second one has something to look up."""
PREDICTIONS = ((2, 5, 1), (5, 1, 7))

SETTINGS = {
    "greedy": Sampler(),
    "greedy_penalised": Sampler(repetition_penalty=1.4, presence_penalty=0.6),
    "plain": Sampler(temperature=1.0),
    "cool": Sampler(temperature=0.6),
    "top_k": Sampler(temperature=1.0, top_k=2),
    "top_p": Sampler(temperature=0.9, top_p=0.7),
    "min_p": Sampler(temperature=1.0, min_p=0.2),
    "repetition": Sampler(temperature=1.0, repetition_penalty=1.6),
    "counts": Sampler(temperature=0.8, presence_penalty=0.7, frequency_penalty=0.4),
    "bias": Sampler(temperature=1.0, logit_bias=((2, 1.5), (5, -2.0))),
    "all": Sampler(
        temperature=0.7,
        top_k=5,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((1, 0.5),),
    ),
}


def dense(seed: int = 0, **options: object) -> TabularTarget:
    """All V tokens are possible everywhere."""
    return TabularTarget(V, seed=seed, **options)


def sparse(keep: int, seed: int = 0, **options: object) -> TabularTarget:
    """`keep` tokens are possible per context, others impossible: laws that overlap in part only,
    so that drafts may have no mass on the target's mode, and the reverse."""
    target = copy.copy(dense(seed, **options))
    generator = torch.Generator().manual_seed(1000 + seed)
    lottery_CV = torch.rand(target.table_CV.shape, generator=generator)
    last_C1 = lottery_CV.topk(keep, dim=-1).values[:, -1:]
    target.table_CV = target.table_CV.masked_fill(lottery_CV < last_C1, -torch.inf)
    return target
