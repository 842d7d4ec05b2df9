"""On a GPU: what is decoded is what a CPU decodes, with CUDA graphs and without. Skipped elsewhere.

Models are tiny and in float64, so that no order of sums decides a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.fspad import Fspad
from draftsmith.drafters.griffin import Griffin
from draftsmith.drafters.hass import Hass
from draftsmith.drafters.lookahead import Lookahead
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.p_eagle import PEagle
from draftsmith.drafters.parallel import Parallel
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.drafters.recycling import Recycling
from draftsmith.drafters.suffix import Suffix
from draftsmith.drafters.unrolled import Unrolled
from draftsmith.targets.hf import HFTarget
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = [list(range(5, 17)) * 3, [7, 8, 9, 7, 8, 9, 7], list(range(20, 30))]
HIDDEN = (Eagle, Hass, Fspad, Griffin, Unrolled, Eagle3, PEagle, Parallel)
KINDS = (NoDrafter, PromptLookup, Suffix, Lookahead, Recycling, Medusa, *HIDDEN)


def target(device: str, *, graphs: bool = False) -> HFTarget:
    return HFTarget(tiny_model().double().to(device), compile=graphs)


def texts(
    where: HFTarget, kind: type[Drafter], options: DecodeOptions, **config: object
) -> Sequence[Sequence[int]]:
    drafter = kind(kind.Config(**config)) if config else kind()
    drafter.bind(where)
    return [one.token_ids for one in generate(where, drafter, PROMPTS, options)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_decodes_what_a_cpu_decodes(kind: type[Drafter], temperature: float) -> None:
    options = DecodeOptions(
        sampler=Sampler(temperature=temperature), max_new_tokens=48, seed=5, ignore_end=True
    )
    here = texts(target("cpu"), kind, options)
    graphed = target("cuda", graphs=True)
    assert graphed.engine == "transformers, CUDA graphs"
    assert texts(target("cuda"), kind, options) == here
    assert texts(graphed, kind, options) == here
    assert graphed._graphs is not None and graphed._graphs._graphs, "none was captured"


@pytest.mark.parametrize("shape", [TreeShape.chain(4), TreeShape(widths=(3, 2, 1))])
@pytest.mark.parametrize("proposal", ["greedy", "sampled", "without_replacement"])
@pytest.mark.parametrize("kind", HIDDEN)
def test_every_proposal_and_shape(kind: type[Drafter], proposal: str, shape: TreeShape) -> None:
    if proposal == "sampled" and not shape.is_chain:
        pytest.skip("draws in a tree are without replacement")
    options = DecodeOptions(
        sampler=Sampler(temperature=0.8), max_new_tokens=32, seed=2, shape=shape, ignore_end=True
    )
    here = texts(target("cpu"), kind, options, proposal=proposal)
    assert texts(target("cuda", graphs=True), kind, options, proposal=proposal) == here


@pytest.mark.parametrize("kind", [PromptLookup, Hass])
def test_block_verification(kind: type[Drafter]) -> None:
    options = DecodeOptions(
        sampler=Sampler(temperature=1.0),
        max_new_tokens=32,
        seed=4,
        rule="block",
        shape=TreeShape.chain(4),
        ignore_end=True,
    )
    assert texts(target("cuda", graphs=True), kind, options) == texts(target("cpu"), kind, options)


def test_requests_one_after_the_other_take_the_same_graphs() -> None:
    where = target("cuda", graphs=True)
    options = DecodeOptions(max_new_tokens=48, ignore_end=True)
    first = texts(where, NoDrafter, options)
    assert texts(where, NoDrafter, options) == first  # its prompts' shapes come again, too
    assert where._graphs is not None
    count = len(where._graphs._graphs)
    assert count
    assert texts(where, NoDrafter, options) == first
    assert len(where._graphs._graphs) == count
