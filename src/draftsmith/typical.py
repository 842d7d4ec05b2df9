"""`typical`: Medusa's acceptance, which changes the law (arXiv 2401.10774, section 2.3.1).

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
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from draftsmith.errors import InputError
from draftsmith.law import Law, Noise, Purpose
from draftsmith.types import ROOT, DraftTree, Proposal
from draftsmith.verify import ALL, Children, Foreseen, LawSource, candidate_children


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
        children = candidate_children(tree)
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

    def foresee(self, law: Law, children: Callable[[], Children]) -> Foreseen:
        tokens_PS = children().tokens_PS
        return Foreseen(
            last=law,
            prob_PS=torch.stack([law.prob(tokens_P) for tokens_P in tokens_PS.T], dim=1),
            entropy_P=law.entropy(),
        )
