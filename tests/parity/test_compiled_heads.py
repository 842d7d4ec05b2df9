"""Medusa's heads in the compiled engine against the same heads in PyTorch."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.drafted_texts import drafted_texts
from torch import Tensor

from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import DraftTree, TreeShape
from draftsmith.drafters import medusa
from draftsmith.drafters.base import TextState
from draftsmith.drafters.hidden import compiled as in_engine
from draftsmith.drafters.medusa import HeadEngine, Heads, Medusa
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.tree_growth import ChildSelection, grow
from draftsmith.errors import UnsupportedModel
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.native.bindings import compiler
from draftsmith.targets.native.weights import GROUP, quantise_int4, quantise_int8, wide_group
from draftsmith.targets.toy import tiny_target

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

V, H, HEADS = 96, 128, 4
FORMS = ("auto", "bf16", "w8a8", "int8", "int4")
SHAPES = {
    "chain": TreeShape.chain(HEADS),
    "tree": TreeShape(widths=(3, 2, 1)),
    "paths": TreeShape(paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    "dynamic": TreeShape(widths=(4, 4, 4, 4), keep=20),
}


@lru_cache(maxsize=8)
def target_of(*, compiles: bool = True, weights: str = "auto", max_length: int = 512) -> HFTarget:
    """Shared by the tests: none changes it."""
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    model = tiny_target(V, seed=3, hidden=H, dtype=dtype, max_length=max_length).model
    return HFTarget(model, weights=weights, compile=compiles, end_ids=frozenset())


def made(target: HFTarget, **options: Any) -> Medusa:
    """With random weights of a size at which every part matters."""
    drafter = Medusa(Medusa.Config(**{"heads": HEADS, **options}))
    drafter.bind(target)
    drafter.choose_vocabulary(torch.arange(V, dtype=torch.float32).remainder(37))
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for one in drafter.network.parameters():
            one.add_(torch.randn(one.shape, generator=draw) * 0.1)
    return drafter.eval()


def features(rows: int) -> Tensor:
    return torch.randn(rows, H, generator=torch.Generator().manual_seed(rows))


@torch.inference_mode()
def twin(network: Heads, feature_BH: Tensor) -> Tensor:
    """[B, K, Vd] by PyTorch."""
    heads = range(len(network))
    logits = [network.own_logits(k, network.states(k, feature_BH)) for k in heads]
    return torch.stack(logits, dim=1)


def as_stored(weight_RK: Tensor, form: str) -> Tensor:
    """The weights that a format keeps."""
    if form == "bf16":
        return weight_RK.bfloat16().float()
    if form == "int4":
        return quantise_int4(weight_RK).whole()
    if form in ("int8", "w8a8"):
        group = GROUP if form == "int8" else wide_group(weight_RK.shape[1])
        numbers, scale = quantise_int8(weight_RK, group)
        return (numbers.unflatten(1, (-1, group)) * scale[..., None]).flatten(1)
    return weight_RK


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options", [{"layers": n} for n in range(4)] + [{"draft_vocab": 40}], ids=str
)
def test_heads_are_what_the_network_computes(options: dict[str, Any], form: str) -> None:
    """From one row to more than pass together; integer formats round the states, too."""
    drafter = made(target_of(), weights=form, **options)
    engine = drafter._engine()
    assert isinstance(engine, HeadEngine)
    with torch.no_grad():
        for stage in drafter.network.stages():
            for linear in stage:
                linear.weight.copy_(as_stored(linear.weight, form))
    for rows in (1, 2, 5, 16, 37):
        theirs, ours = engine.logits(features(rows)), twin(drafter.network, features(rows))
        assert theirs.shape == ours.shape == (rows, HEADS, options.get("draft_vocab", V))
        off = float((theirs - ours).square().mean().sqrt() / ours.std())
        assert off < (1e-5 if form in ("auto", "bf16") else 0.03), off


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_is_the_same_bit_for_bit_beside_others(
    form: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made(target_of(), weights=form, layers=2)._engine()
    every = features(21)
    expected = torch.cat([engine.logits(one[None]) for one in every])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(engine.logits(every), expected)
    assert torch.equal(engine.logits(every[4:7]), expected[4:7])


def drafted(
    drafter: Medusa, shape: TreeShape, depth_B: list[int], sampler: Sampler, *, in_engine: bool
) -> DraftTree:
    rows = len(depth_B)
    engine = drafter._engine() if in_engine else None
    reader = medusa._HeadReader(drafter.network, features(rows), engine)
    texts = TextState(known=[[1, 2, 3]] * rows, num_prompt=[3] * rows)
    how = ChildSelection("greedy", sampler, Noise(0, range(rows), [3] * rows), texts)
    with torch.inference_mode():
        return grow(reader, shape, np.array(depth_B), how)


@pytest.mark.parametrize("options", [{}, {"draft_vocab": 40}, {"layers": 3}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "sampler", [Sampler(), Sampler(repetition_penalty=1.3)], ids=["", "penalty"]
)
def test_drafts_are_those_of_the_network(
    options: dict[str, Any], shape: str, sampler: Sampler
) -> None:
    """The same trees, for rows that may draft to unlike depths."""
    drafter = made(target_of(), **options)
    one, other = (
        drafted(drafter, SHAPES[shape], [4, 1, 0, 3], sampler, in_engine=way)
        for way in (True, False)
    )
    assert torch.equal(one.parents_BN, other.parents_BN)
    there = one.parents_BN != -2
    assert there.any() and torch.equal(one.tokens_BN[there], other.tokens_BN[there])
    assert len(one.tokens_BN[there].unique()) > 3, "one token all over shows little"


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_is_what_levels_give(form: str) -> None:
    drafter = made(target_of(), weights=form, draft_vocab=40)
    reader = medusa._HeadReader(drafter.network, features(3), drafter._engine())
    chain = reader.chain(np.array([4, 2, 4]), None, 0.0)
    assert chain is not None and chain.count_B.tolist() == [4, 2, 4]
    levels = [reader.root()]
    levels += [reader.level(torch.zeros(3, 1), torch.empty(0), torch.empty(0))[:, 0] for _ in "abc"]
    best = torch.stack([one.argmax(-1) for one in levels], dim=1)
    assert torch.equal(chain.tokens_BN, reader.columns.tokens(best))


@pytest.mark.every(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_drafts_change_no_text(form: str, shape: str, temperature: float) -> None:
    """A ragged batch, target and heads in one format; heads that begin as the target's own."""
    target = target_of(weights=form)
    plain, _ = drafted_texts(target, NoDrafter(), temperature, SHAPES[shape])
    drafter = Medusa(Medusa.Config(weights=form))
    found, accepted = drafted_texts(target, drafter, temperature, SHAPES[shape])
    assert isinstance(drafter._engine(), HeadEngine)
    assert found == plain and (accepted > 0 or temperature > 0)


def test_heads_have_no_more_bits_than_their_target() -> None:
    for weights, expected in (("auto", "float32"), ("w8a8", "int4"), ("bf16", "int8")):
        assert made(target_of(weights=weights))._engine().form == expected


def test_weights_that_change_are_taken_over() -> None:
    drafter = made(target_of())
    first = drafter._engine()
    assert drafter._engine() is first
    with torch.no_grad():
        drafter.network[1][-1].weight.mul_(-1)
    second = drafter._engine()
    before, after = first.logits(features(2)), second.logits(features(2))
    assert torch.equal(after[:, 0], before[:, 0]) and torch.equal(after[:, 1], -before[:, 1])


def test_a_format_that_nothing_computes_in_is_refused() -> None:
    drafter = made(target_of(compiles=False), weights="int4")
    with pytest.raises(UnsupportedModel, match=r"weights=int4: .*the target does not run there"):
        drafter._engine()


def test_heads_without_room_are_run_by_pytorch_which_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = made(target_of())
    monkeypatch.setattr(in_engine, "too_large", lambda network, form: "there is no room")
    in_engine._say.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert drafter._engine() is None
        with torch.no_grad():
            drafter.network[0][-1].weight.mul_(-1)
        assert drafter._engine() is None
    said = [one.getMessage() for one in caplog.records]
    assert said == ["the drafter is not compiled, PyTorch runs it: there is no room"]


def test_heads_in_half_precision_read_what_the_engine_wrote_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = target_of(weights="bf16")
    assert target.engine is not None and target.dtype == torch.bfloat16
    monkeypatch.setattr(in_engine, "too_large", lambda network, form: "there is no room")
    drafter = made(target)
    plain, _ = drafted_texts(target, NoDrafter(), 0.0, SHAPES["chain"])
    found, _ = drafted_texts(target, drafter, 0.0, SHAPES["chain"])
    assert drafter._engine() is None and found == plain
