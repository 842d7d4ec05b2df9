"""Forwards as graphs: a stand-in for CUDA's replays what was captured, with the numbers that lie in
the places then; decoding must not tell them from forwards that are computed as always."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from tests.tiny_models import tiny_model

from draftsmith.core.cache import Block, lay_out
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Signals, TargetOutput, TreeShape
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.hass import Hass
from draftsmith.drafters.lookahead import Lookahead
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.targets import graphs
from draftsmith.targets.graphs import Capture, Graphs, Replay
from draftsmith.targets.hf import HFTarget


class Replays:
    """Stands for CUDA: a replay computes with the tensors of the capture and nothing else."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, run: Callable[[], TargetOutput]) -> tuple[Replay, TargetOutput]:
        self.captured += 1
        out = run()
        out.logits_BNV.fill_(torch.nan)  # a capture computes nothing

        def replay() -> None:
            self.replayed += 1
            again = run()
            out.logits_BNV.copy_(again.logits_BNV)
            if out.signals_BTS is not None:
                assert again.signals_BTS is not None
                out.signals_BTS.copy_(again.signals_BTS)

        return replay, out


def with_graphs(target: HFTarget, capture: Capture) -> HFTarget:
    target._graphs = Graphs(target._forward, target._windows, target.dtype, capture)
    return target


@pytest.fixture(autouse=True)
def at_the_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "REPEATS", 1)


@pytest.fixture
def pair() -> tuple[HFTarget, HFTarget, Replays]:
    replays = Replays()
    model = tiny_model().double()
    return HFTarget(model), with_graphs(HFTarget(model), replays), replays


PROMPTS = [list(range(5, 17)) * 3, [7, 8, 9, 7, 8, 9, 7]]


@pytest.mark.every(4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [TreeShape.chain(3), TreeShape(widths=(2, 2, 1))])
@pytest.mark.parametrize("kind", [NoDrafter, PromptLookup, Lookahead, Hass])
def test_decoding_is_the_same(
    pair: tuple[HFTarget, HFTarget, Replays],
    kind: type[Drafter],
    shape: TreeShape,
    temperature: float,
) -> None:
    plain, graphed, replays = pair
    texts = []
    for target in (plain, graphed):
        drafter = kind()
        drafter.bind(target)
        options = DecodeOptions(
            sampler=Sampler(temperature=temperature),
            max_new_tokens=24,
            shape=shape if kind is Hass else None,
            seed=3,
            static_shapes=True,
            ignore_end=True,
        )
        texts.append([one.token_ids for one in generate(target, drafter, PROMPTS, options)])
    assert texts[0] == texts[1]
    assert replays.replayed > replays.captured > 0


def test_logits_and_signals_are_equal_bit_for_bit(
    pair: tuple[HFTarget, HFTarget, Replays],
) -> None:
    plain, graphed, replays = pair
    signals = Signals(last_hidden=True, layers=(0,))
    caches = [target.new_cache(2, 64) for target in (plain, graphed)]
    for pending in ([[1, 2, 3], [4, 5]], [[6], [7]], [[8], [9]], [[10], [11]], [[12], [13]]):
        outs = []
        for target, cache in zip((plain, graphed), caches, strict=True):
            tokens, block = lay_out(cache, pending)
            out = target.forward(torch.from_numpy(tokens), block, 1, signals)
            outs.append(out)
            cache.commit(block.pending_B)
        assert torch.equal(outs[0].logits_BNV, outs[1].logits_BNV)
        assert outs[0].signals_BTS is not None and outs[1].signals_BTS is not None
        assert torch.equal(outs[0].signals_BTS, outs[1].signals_BTS)
    assert (replays.captured, replays.replayed) == (1, 3)  # the first of its shape as always


def test_a_shape_is_captured_once_it_came_often(
    pair: tuple[HFTarget, HFTarget, Replays], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, graphed, replays = pair
    monkeypatch.setattr(graphs, "REPEATS", 3)
    cache = graphed.new_cache(1, 64)
    counts = []
    for token in range(3, 9):
        tokens, block = lay_out(cache, [[token]])
        graphed.forward(torch.from_numpy(tokens), block, 1, Signals())
        cache.commit(block.pending_B)
        counts.append((replays.captured, replays.replayed))
    assert counts == [(0, 0), (0, 0), (0, 0), (1, 1), (1, 2), (1, 3)]


def test_results_outlive_the_next_replay(pair: tuple[HFTarget, HFTarget, Replays]) -> None:
    _, graphed, _ = pair
    cache = graphed.new_cache(1, 64)
    outs = []
    for token in (3, 4, 5, 6):
        tokens, block = lay_out(cache, [[token]])
        outs.append(graphed.forward(torch.from_numpy(tokens), block, 1, Signals()).logits_BNV)
        cache.commit(block.pending_B)
    assert not torch.equal(outs[2], outs[3])


def test_a_cache_elsewhere_is_another_shape(pair: tuple[HFTarget, HFTarget, Replays]) -> None:
    plain, graphed, replays = pair
    for target in (plain, graphed):
        first, second = target.new_cache(1, 64), target.new_cache(1, 64)
        for cache, token in ((first, 3), (second, 4), (first, 5), (second, 6), (first, 7)):
            tokens, block = lay_out(cache, [[token]])
            out = target.forward(torch.from_numpy(tokens), block, 1, Signals())
            cache.commit(block.pending_B)
        if target is plain:
            wanted = out.logits_BNV
    assert torch.equal(out.logits_BNV, wanted)
    assert replays.captured == 2


def test_what_a_graph_reads_is_kept_as_long_as_the_graph() -> None:
    """CUDA keeps nothing that lay there before the capture."""
    target = HFTarget(tiny_model().double())
    read: list[weakref.ref[torch.Tensor]] = []

    def forward(tokens: torch.Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        if isinstance(block.positions_BT, torch.Tensor):  # a capture
            assert block._index is not None
            inputs = (tokens, block.positions_BT, *block._index, *block._masks.values())
            read.extend(map(weakref.ref, inputs))
        return target._forward(tokens, block, keep, signals)

    made = Graphs(forward, target._windows, target.dtype, lambda run: (lambda: None, run()))
    cache = target.new_cache(1, 64)
    for token in (3, 4):
        tokens, block = lay_out(cache, [[token]])
        made.forward(torch.from_numpy(tokens), block, 1, Signals())
        cache.commit(block.pending_B)
    del tokens, block
    gc.collect()
    assert len(read) == 5
    assert all(one() is not None for one in read)


def test_few_graphs_are_kept(
    pair: tuple[HFTarget, HFTarget, Replays], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, graphed, replays = pair
    monkeypatch.setattr(graphs, "MOST", 1)
    cache = graphed.new_cache(1, 64)
    for width in (1, 2, 1, 2, 1, 2):
        tokens, block = lay_out(cache, [[5] * width])
        graphed.forward(torch.from_numpy(tokens), block, 1, Signals())
        cache.commit(block.pending_B)
    assert replays.captured == 4  # the one kept is always of the other width


def test_a_model_that_cannot_be_captured_runs_as_always_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried = []

    def refuse(run: Callable[[], TargetOutput]) -> tuple[Replay, TargetOutput]:
        tried.append(run)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = tiny_model().double()
    plain, graphed = HFTarget(model), with_graphs(HFTarget(model), refuse)
    options = DecodeOptions(max_new_tokens=12)
    with caplog.at_level(logging.WARNING):
        texts = [
            [one.token_ids for one in generate(target, PromptLookup(), PROMPTS, options)]
            for target in (plain, graphed)
        ]
    assert texts[0] == texts[1]
    assert len(tried) == 1
    said = [one.getMessage() for one in caplog.records if "CUDA graphs" in one.getMessage()]
    assert said == [
        "forwards are not captured as CUDA graphs: operation not permitted when stream is capturing"
    ]
    assert graphed.engine == "transformers"


def test_wide_forwards_are_computed_as_always(pair: tuple[HFTarget, HFTarget, Replays]) -> None:
    _, graphed, replays = pair
    cache = graphed.new_cache(1, 400)
    for _ in range(3):
        tokens, block = lay_out(cache, [[5] * (graphs.WIDEST + 1)])
        graphed.forward(torch.from_numpy(tokens), block, 1, Signals())
        cache.commit(block.pending_B)
    assert replays.captured == 0
