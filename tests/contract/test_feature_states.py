"""Drafters over hidden states carry from step to step what a text that begins there would give
them: the features of the accepted path, and the keys of settled pairs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from draftsmith.decode import DecodeOptions, decode
from draftsmith.drafters._base import Accepted, Drafter, DraftState
from draftsmith.drafters._lookup import make_drafter
from draftsmith.law import Noise
from draftsmith.sampler import Sampler
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target
from draftsmith.types import DraftTree, RequestBatch, TreeShape

KINDS = ("eagle", "eagle3", "fspad", "griffin", "hass", "medusa")
FEW = 12
"""Tokens that there are: drafts with random weights are accepted now and then."""
PROMPTS = ([1, 5, 2], [7, 7, 3, 0, 9, 11, 4], [8, 2, 2, 10, 6])
COUNT, DEPTH = 20, 3
Text = tuple[int, ...]
Path = tuple[int, ...]


def paths_of(tree: DraftTree, row: int) -> list[Path]:
    """Of all drafted nodes, as the drafter ordered them."""
    out: list[Path] = []
    for token, parent in zip(tree.tokens_BN[row], tree.parents_BN[row], strict=True):
        if int(parent) >= -1:
            above = out[int(parent)] if int(parent) >= 0 else ()
            out.append((*above, int(token)))
    return out


class Heard(Drafter):
    """Passes everything on, and keeps what was proposed behind which text."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__()
        self.inner, self.signals = inner, inner.signals
        self.proposed: dict[Text, list[Path]] = {}

    def bind(self, target: HFTarget) -> None:
        self.inner.bind(target)
        self.signals = self.inner.signals

    def start(self, request: RequestBatch) -> DraftState:
        return self.inner.start(request)

    def propose(
        self, state: DraftState, shape: TreeShape, sampler: Sampler, noise: Noise
    ) -> DraftTree:
        tree = self.inner.propose(state, shape, sampler, noise)
        for row, known in enumerate(state.known):  # type: ignore[attr-defined]
            self.proposed[tuple(known)] = paths_of(tree, row)
        return tree

    def advance(self, state: DraftState, accepted: Accepted) -> DraftState:
        return self.inner.advance(state, accepted)


def drafts(
    target: HFTarget, kind: str, prompts: Sequence[Sequence[int]], shape: TreeShape, count: int
) -> tuple[dict[Text, list[Path]], int]:
    """What is proposed behind every text at temperature 0, and how many drafts were accepted."""
    torch.manual_seed(0)
    drafter = Heard(make_drafter(kind))
    drafter.bind(target)
    options = DecodeOptions(max_new_tokens=count, shape=shape)
    accepted = sum(sum(step.accepted) for step in decode(target, drafter, prompts, options))
    return drafter.proposed, accepted


@pytest.mark.parametrize(
    "shape",
    [TreeShape.chain(3), TreeShape(widths=(4, 3)), TreeShape(widths=(5, 5, 5), keep=20)],
    ids=["chain", "tree", "dynamic"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_that_of_a_text_which_begins_there(kind: str, shape: TreeShape) -> None:
    target = tiny_target(FEW, layers=8)
    proposed, accepted = drafts(target, kind, PROMPTS, shape, COUNT)
    assert accepted > (0 if shape.is_chain else 5)
    compared = 0
    for text, paths in proposed.items():
        (prompt,) = (one for one in PROMPTS if text[: len(one)] == tuple(one))
        new = len(text) - len(prompt)
        if not paths or not new or COUNT - new <= DEPTH:  # at the end there is room for less
            continue
        # its last token comes again, as the target's own of a step without a draft
        afresh, _ = drafts(target, kind, [text[:-1]], shape, COUNT - new + 1)
        assert afresh[text] == paths
        compared += 1
    assert compared > 6
