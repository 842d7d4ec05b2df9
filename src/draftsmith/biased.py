"""`biased`: verification leans towards the draft (self-speculative biased decoding, SSBD, arXiv
2509.21740, section 3.2).

A caption that is translated again drafts with its own last output. The law that judges a drafted
token d is

    P'(v) = (1 - beta) P(v) + beta [v = d]

Greedily, d stays if it is the most probable token of P', v* being the best other one:

    (1 - beta) P(d) + beta >= (1 - beta) P(v*)    <=>    P(v*) - P(d) <= beta / (1 - beta)

    beta     0     0.05    0.1     0.2    0.3     0.4     0.5 ..
    gap      0     0.053   0.111   0.25   0.429   0.667   1: everything stays

Ties go to the draft (for beta > 0). Drawn, d stays with probability (1 - beta) P(d) + beta, and
else the token is drawn from P without d: with probability beta the draft is copied, else it is
judged as an opaque draft is.

Only what stands where it stood is judged so: nodes whose `origin` is `ALIGNED`. Tokens that were
found again behind a divergence, and other drafters' tokens, keep to P; so does the token behind a
draft that stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from draftsmith.bias import check_bias
from draftsmith.law import Law, Noise, Purpose
from draftsmith.sampler import Sampler
from draftsmith.types import ALIGNED, ROOT, DraftTree, Proposal
from draftsmith.verify import ALL, Children, Descent, Foreseen, Match, Node, Rule, holding


def biased_rule(bias: float, sampler: Sampler) -> tuple[Rule, Sampler]:
    """The rule for this bias, and the sampler whose laws it judges by.

    A greedy sampler's laws are points: the gap is one of the probabilities behind them, so these
    are made at temperature 1 and the rule takes the most probable token itself. Without a bias it
    is the lossless rule, and the sampler as it was.

    Raises:
        InputError: the bias does not lie between 0 and 1.
    """
    check_bias(bias)
    if bias == 0:
        return Match(), sampler
    if sampler.temperature > 0:
        return BiasedDraw(bias), sampler
    whole = replace(sampler, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    return BiasedGreedy(bias), whole


@dataclass(frozen=True, slots=True)
class _Biased(Descent):
    """What both have in common."""

    bias: float
    name: ClassVar[str] = "biased"
    lossy: ClassVar[bool] = True
    needs_q: ClassVar[bool] = False
    proposals: ClassVar[frozenset[Proposal]] = ALL

    def __post_init__(self) -> None:
        check_bias(self.bias)


@dataclass(frozen=True, slots=True)
class BiasedGreedy(_Biased):
    """Keep what is nearly as probable as the best; go on with the best."""

    @property
    def tolerance(self) -> float:
        """The largest gap that is kept; infinite where everything is."""
        return self.bias / (1 - self.bias) if self.bias < 0.5 else math.inf

    def step(self, tree: DraftTree, node: Node, noise: Noise) -> tuple[np.ndarray, np.ndarray]:
        best = node.law.mode().draw(noise, node.rows, node.depth, Purpose.TARGET).cpu().numpy()
        child = holding(tree, node, best)
        leaning = [r for r, kid in enumerate(_aligned(tree, node)) if kid != ROOT]
        if leaning:
            kids = np.array(_aligned(tree, node))[leaning]
            drafted = tree.tokens_BN[torch.from_numpy(node.rows[leaning]), torch.from_numpy(kids)]
            gap = node.law.take(np.array(leaning)).gap(drafted).double().cpu().numpy()
            near = gap <= self.tolerance
            child[np.array(leaning)[near]] = kids[near]
        return child, best

    def foresee(self, law: Law, children: Callable[[], Children]) -> Foreseen:
        tokens_PS = children().tokens_PS
        gaps = [law.gap(tokens_P) for tokens_P in tokens_PS.T]
        return Foreseen(last=law.mode(), prob_PS=torch.stack(gaps, dim=1))


@dataclass(frozen=True, slots=True)
class BiasedDraw(_Biased):
    """Copy the draft now and then; else draw from P, and go on while a child holds the token."""

    def step(self, tree: DraftTree, node: Node, noise: Noise) -> tuple[np.ndarray, np.ndarray]:
        drawn = node.law.draw(noise, node.rows, node.depth, Purpose.TARGET).cpu().numpy()
        child = holding(tree, node, drawn)
        kids = np.array(_aligned(tree, node))
        chance = torch.full((len(kids),), self.bias, dtype=torch.float64)
        copied = noise.accept(chance, node.rows, node.depth) & (kids != ROOT)
        child[copied] = kids[copied]
        return child, drawn

    def foresee(self, law: Law, children: Callable[[], Children]) -> Foreseen:
        return Foreseen(last=law)


def _aligned(tree: DraftTree, node: Node) -> list[int]:
    """Per row the first child that stands where it stood; -1: none."""
    if tree.origin_BN is None:
        return [ROOT] * len(node.rows)
    origin = tree.origin_BN.numpy()
    return [
        kids[0] if kids and origin[row, kids[0]] == ALIGNED else ROOT
        for row, kids in zip(node.rows, node.children, strict=True)
    ]
