"""Drafters over hidden states carry from step to step what a text that begins there would give
them: the features of the accepted path, and the keys of settled pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import DraftTree, TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import make_drafter
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target
from tests.draft_paths import Path, paths_of

from .following import Following

KINDS = ("eagle", "eagle3", "fspad", "griffin", "hass", "medusa", "p_eagle", "parallel", "unrolled")
OPTIONS = {"parallel": ["seed=1"]}
"""First weights of which the target accepts drafts."""
FEW = 12
"""Tokens that there are: drafts with random weights are accepted now and then."""
PROMPTS = ([1, 5, 2], [7, 7, 3, 0, 9, 11, 4], [8, 2, 2, 10, 6])
COUNT, DEPTH = 20, 3


class Heard(Following):
    """Keeps what was proposed behind which text."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.proposed: dict[tuple[int, ...], list[Path]] = {}

    def look(
        self,
        tree: DraftTree,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> None:
        for row, known in enumerate(self.known):
            self.proposed[tuple(known)] = paths_of(tree, row)


def drafts(
    target: HFTarget,
    kind: str,
    prompts: Sequence[Sequence[int]],
    shape: TreeShape,
    count: int,
    until: tuple[int, ...] = (),
) -> tuple[dict[tuple[int, ...], list[Path]], int]:
    """What is proposed behind every text at temperature 0, up to this one, and how many drafts were
    accepted."""
    torch.manual_seed(0)
    drafter = Heard(make_drafter(kind, OPTIONS.get(kind, ())))
    drafter.bind(target)
    options = DecodeOptions(max_new_tokens=count, shape=shape)
    accepted = 0
    for step in decode(target, drafter, prompts, options):
        accepted += sum(step.accepted)
        if until in drafter.proposed:
            break
    return drafter.proposed, accepted


@pytest.mark.parametrize(
    "shape",
    [TreeShape.chain(3), TreeShape(widths=(4, 3)), TreeShape(widths=(5, 5, 5), keep=20)],
    ids=["chain", "tree", "dynamic"],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(4)
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
        afresh, _ = drafts(target, kind, [text[:-1]], shape, COUNT - new + 1, until=text)
        assert afresh[text] == paths
        compared += 1
    assert compared > 6
