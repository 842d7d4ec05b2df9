"""Verification rules that change the output distribution: `typical` and `biased`.

`typical` is Medusa's acceptance (arXiv 2401.10774, section 2.3.1).

A drafted token x stays when the target does not find it unlikely,

    p(x) > min(epsilon, alpha * exp(-H(p)))        H: entropy of p in nats

with p the processed law behind its parent. No draw takes part, so a draft that the target would say
one time in ten can stay every time: texts are more probable and less diverse than the target's.

The longest path whose tokens all stay is taken, of equally long ones the most probable, then the
first. The token behind it is drawn from p, so where nothing is drafted this is the target's law.
(The released code takes the most probable token there, or draws from p cut at the same threshold,
and adds 1e-5 inside the logarithm of H.)

Temperature 0: p is a point mass, H is 0, and what stays is the greedy text, as in the released
code.

`biased` leans towards the draft (self-speculative biased decoding, SSBD, arXiv 2509.21740, section
3.2). A caption that is translated again drafts with its own last output. A drafted token d is
verified by the law

    P'(v) = (1 - beta) P(v) + beta [v = d]

Greedily, d stays if it is the most probable token of P', v* being the best other one:

    (1 - beta) P(d) + beta >= (1 - beta) P(v*)    <=>    P(v*) - P(d) <= beta / (1 - beta)

    beta     0     0.05    0.1     0.2    0.3     0.4     0.5 ..
    gap      0     0.053   0.111   0.25   0.429   0.667   1: everything stays

Ties go to the draft (for beta > 0). Drawn, d stays with probability (1 - beta) P(d) + beta, and
else the token is drawn from P without d: with probability beta the draft is copied, else it is
verified as an opaque draft is.

The bias applies to nodes whose `origin` is `ALIGNED`, which stand where they stood before. Tokens
that were found again behind a divergence, other drafters' tokens, and the token behind a draft that
stays whole follow P.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from draftsmith.core.config import check_bias
from draftsmith.core.law import Law, Noise, Purpose
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import ALIGNED, ROOT, DraftTree, Proposal
from draftsmith.core.verify import (
    ALL,
    Children,
    Descent,
    LawSource,
    Match,
    Node,
    Rule,
    VerifierInputs,
    candidates,
    holding,
)
from draftsmith.errors import InputError


@dataclass(frozen=True, slots=True)
class _Path:
    """Nodes of a row that stay so far."""

    row: int
    nodes: tuple[int, ...] = ()
    log_likelihood: float = 0.0

    @property
    def end(self) -> int:
        return self.nodes[-1] if self.nodes else ROOT


@dataclass(frozen=True, slots=True)
class Typical:
    """Keep what the target does not find unlikely."""

    epsilon: float = 0.09
    """Tokens more probable than this always stay (Medusa: `posterior_threshold`)."""
    alpha: float = 0.3
    """The threshold falls with the entropy from here on (Medusa: `posterior_alpha`)."""
    name: ClassVar[str] = "typical"
    lossy: ClassVar[bool] = True
    needs_q: ClassVar[bool] = False
    proposals: ClassVar[frozenset[Proposal]] = ALL

    def __post_init__(self) -> None:
        if not (0 <= self.epsilon <= 1 and 0 <= self.alpha < math.inf):
            raise InputError(
                "typical acceptance needs epsilon between 0 and 1 and a finite alpha of at least "
                f"0, got epsilon={self.epsilon}, alpha={self.alpha}."
            )

    def walk(
        self, tree: DraftTree, laws: LawSource, noise: Noise
    ) -> tuple[list[list[int]], np.ndarray]:
        children = [row.children for row in candidates(tree)]
        reached = [_Path(b) for b in range(tree.num_rows)]
        best = list(reached)
        while reached:
            for path in reversed(reached):  # of equal ones the first is seen last
                old = best[path.row]
                longer = len(path.nodes) > len(old.nodes)
                if longer or path.log_likelihood >= old.log_likelihood:
                    best[path.row] = path
            reached = self._staying(tree, laws, children, reached)
        next_token = np.zeros(tree.num_rows, dtype=np.int64)
        for depth in {len(path.nodes) for path in best}:
            rows = np.array([path.row for path in best if len(path.nodes) == depth])
            law = laws.at(rows, np.array([best[b].end for b in rows]))
            next_token[rows] = law.draw(noise, rows, depth, Purpose.TARGET).cpu().numpy()
        return [list(path.nodes) for path in best], next_token

    def _staying(
        self,
        tree: DraftTree,
        laws: LawSource,
        children: list[dict[int, list[int]]],
        paths: list[_Path],
    ) -> list[_Path]:
        """The paths one node longer whose last token stays too, in order."""
        paths = [path for path in paths if children[path.row].get(path.end)]
        if not paths:
            return []
        rows = np.array([path.row for path in paths])
        law = laws.at(rows, np.array([path.end for path in paths]))
        entropy_R = law.entropy().double().cpu().numpy()
        threshold_R = np.minimum(self.epsilon, self.alpha * np.exp(-entropy_R))
        above, kids = np.array(
            [(r, kid) for r, path in enumerate(paths) for kid in children[path.row][path.end]]
        ).T
        tokens = tree.tokens_BN[torch.from_numpy(rows[above]), torch.from_numpy(kids)]
        prob = law.take(above).prob(tokens).double().cpu().numpy()
        return [
            _Path(
                row=paths[r].row,
                nodes=(*paths[r].nodes, int(kid)),
                log_likelihood=paths[r].log_likelihood + math.log(p),
            )
            for r, kid, p in zip(above, kids, prob, strict=True)
            if p > threshold_R[r]
        ]

    def precompute(self, law: Law, children: Callable[[], Children]) -> VerifierInputs:
        tokens_PS = children().tokens_PS
        return VerifierInputs(
            last=law,
            score_PS=torch.stack([law.prob(tokens_P) for tokens_P in tokens_PS.T], dim=1),
            entropy_P=law.entropy(),
        )


def biased_rule(bias: float, sampler: Sampler) -> tuple[Rule, Sampler]:
    """The rule for this bias, and the sampler that makes the laws it reads.

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

    def precompute(self, law: Law, children: Callable[[], Children]) -> VerifierInputs:
        tokens_PS = children().tokens_PS
        gaps = [law.gap(tokens_P) for tokens_P in tokens_PS.T]
        return VerifierInputs(last=law.mode(), score_PS=torch.stack(gaps, dim=1))


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

    def precompute(self, law: Law, children: Callable[[], Children]) -> VerifierInputs:
        return VerifierInputs(last=law)


def _aligned(tree: DraftTree, node: Node) -> list[int]:
    """Per row the first child that stands where it stood; -1: none."""
    if tree.origin_BN is None:
        return [ROOT] * len(node.rows)
    origin = tree.origin_BN.numpy()
    return [
        kids[0] if kids and origin[row, kids[0]] == ALIGNED else ROOT
        for row, kids in zip(node.rows, node.children, strict=True)
    ]
