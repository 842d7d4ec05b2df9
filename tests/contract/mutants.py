"""Deliberately broken decoders: mistakes that somebody's decoder has made or could make.

A source mutant replaces a piece of a function's text, compiles it in the function's own module and
puts it in place of the original; if the text is no longer there, the mutant must be rewritten
(`MutantGone`), so a mutant can never be killed by having become harmless.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.core.law import Law, Noise, Purpose
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import PADDING, ROOT, DraftTree, Proposal, TreeShape

from .enumeration import EnumeratingNoise, Key
from .reference_drafters import Known, Sampled, WithoutReplacement


class MutantGone(Exception):
    """The code that a mutant breaks has changed: write the mutant anew."""


def break_source(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    old: str,
    new: str,
    *,
    also: tuple[Any, ...] = (),
) -> None:
    """Replace `old` by `new` in `owner.name`, and in the modules that imported it: `also`."""
    raw = inspect.getattr_static(owner, name)
    function = raw.__func__ if isinstance(raw, staticmethod) else raw
    text = textwrap.dedent(inspect.getsource(function))
    if old not in text:
        raise MutantGone(f"{name} no longer holds {old!r}")
    names: dict[str, Any] = {}
    module = sys.modules[function.__module__]
    header = "from __future__ import annotations\n"
    exec(
        compile(header + text.replace(old, new), f"<mutant of {name}>", "exec"),
        module.__dict__,
        names,
    )
    for place in (owner, *also):
        patch.setattr(place, name, names[name])


# ---------------------------------------------------------------------- noise


class NoPurpose(EnumeratingNoise):
    """Drafter and verifier look at the same numbers."""

    def key(self, position: int, purpose: int, lane: int) -> Key:
        return position, int(Purpose.TARGET), lane


class NoLane(EnumeratingNoise):
    """Siblings are drawn and judged with one number."""

    def key(self, position: int, purpose: int, lane: int) -> Key:
        return position, purpose, 0


class NoPosition(EnumeratingNoise):
    """Every token is drawn with the numbers of the first."""

    def key(self, position: int, purpose: int, lane: int) -> Key:
        return 0, purpose, lane


# ---------------------------------------------------------------------- drafters


class RawQ(Sampled):
    """Draws from the processed law, reports the raw softmax (transformers #47932)."""

    def reported(
        self,
        law: Law,
        state: Known,
        tokens_BN: np.ndarray,
        parents: Sequence[int],
        node: int,
    ) -> Tensor:
        return self.law_below(state, Sampler(temperature=1.0), tokens_BN, parents, node).probs()


class Confident(Sampled):
    """Proposes the most probable token and reports it as drawn (litgpt, ReDrafter)."""

    def pick(
        self, law: Law, width: int, noise: Noise, rows: np.ndarray, depth: int, lane: int
    ) -> Tensor:
        return law.probs().argsort(dim=-1, descending=True, stable=True)[:, :width]


class Mislabelled(WithoutReplacement):
    """Draws without replacement and says i.i.d."""

    proposal = Proposal.SAMPLED


class MislabelledToo(Sampled):
    """Draws i.i.d. and says without replacement."""

    proposal = Proposal.WITHOUT_REPLACEMENT


class Trimmed(Sampled):
    """Sampled trees that are changed afterwards by looking at what was drawn."""

    def propose(
        self,
        state: Known,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        tree = super().propose(state, shape, depth_B, sampler, noise)
        assert tree.q is not None and tree.q_rows_BN is not None
        probs_BN = tree.q.probs()[tree.q_rows_BN].gather(2, tree.tokens_BN[:, :, None])[:, :, 0]
        return self.change(tree, probs_BN.numpy())

    def change(self, tree: DraftTree, probs_BN: np.ndarray) -> DraftTree:
        return without(tree, self.dropped(tree, probs_BN))

    def dropped(self, tree: DraftTree, probs_BN: np.ndarray) -> np.ndarray:
        """[B, N] bool."""
        raise NotImplementedError


def without(tree: DraftTree, dropped_BN: np.ndarray) -> DraftTree:
    """The tree without these nodes and all that hangs below them."""
    parents_BN = tree.parents_BN.numpy().copy()
    for n in range(parents_BN.shape[1]):
        above_B = parents_BN[:, n]
        orphan_B = (above_B >= 0) & (
            parents_BN[np.arange(len(above_B)), np.maximum(above_B, 0)] == PADDING
        )
        parents_BN[dropped_BN[:, n] | orphan_B, n] = PADDING
    return dataclasses.replace(tree, parents_BN=torch.from_numpy(parents_BN))


class LowConfidenceDropped(Trimmed):
    """Draws with a small q are taken back (the usual confidence threshold)."""

    def dropped(self, tree: DraftTree, probs_BN: np.ndarray) -> np.ndarray:
        return probs_BN < 0.4


class Pruned(Trimmed):
    """Only the more probable of two children is kept (EAGLE-2's re-ranking, on samples)."""

    def dropped(self, tree: DraftTree, probs_BN: np.ndarray) -> np.ndarray:
        out = np.zeros(probs_BN.shape, dtype=bool)
        out[:, 0] = probs_BN[:, 0] < probs_BN[:, 1]
        out[:, 1] = ~out[:, 0]
        return out


class Deduplicated(Trimmed):
    """A child that repeats its elder sibling is merged into it."""

    def dropped(self, tree: DraftTree, probs_BN: np.ndarray) -> np.ndarray:
        out = np.zeros(probs_BN.shape, dtype=bool)
        out[:, 1] = (tree.tokens_BN[:, 0] == tree.tokens_BN[:, 1]).numpy()
        return out


class Resorted(Trimmed):
    """Siblings are judged in the order of q instead of the order in which they were drawn.

    nodes 0 1 (children of the root) and 2 3 (their only children) change places:  0 <-> 1, 2 <-> 3
    """

    proposal = Proposal.SAMPLED

    def change(self, tree: DraftTree, probs_BN: np.ndarray) -> DraftTree:
        swap_B = torch.from_numpy(probs_BN[:, 0] < probs_BN[:, 1])
        num_nodes = tree.num_nodes
        order = torch.arange(num_nodes).view(-1, 2).flip(1).flatten()
        assert tree.q_rows_BN is not None
        return dataclasses.replace(
            tree,
            tokens_BN=torch.where(swap_B[:, None], tree.tokens_BN[:, order], tree.tokens_BN),
            q_rows_BN=torch.where(swap_B[:, None], tree.q_rows_BN[:, order], tree.q_rows_BN),
        )


class ResortedDistinct(Resorted):
    """The same with children drawn without replacement."""

    proposal = Proposal.WITHOUT_REPLACEMENT
    pick = WithoutReplacement.pick


class GrownWhereConfident(Trimmed):
    """The second level is drafted only below a confident first token. No mutant: whether a token is
    drafted may depend on the tokens above it, just not on itself."""

    def dropped(self, tree: DraftTree, probs_BN: np.ndarray) -> np.ndarray:
        out = np.zeros(probs_BN.shape, dtype=bool)
        parents = tree.parents_BN[0].tolist()
        for n, parent in enumerate(parents):
            if parent != ROOT:
                out[:, n] = probs_BN[:, parent] < 0.4
        return out
