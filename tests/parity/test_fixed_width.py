"""Forwards of one fixed shape: a token's logits are equal bit for bit, whatever is fed beside it.

Broken variants (a piece that is not padded, keys that stay in scattered columns) must be seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
)

from draftsmith import Generator
from draftsmith.core.cache import Block, lay_out
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.types import Signals, TargetOutput, TreeShape
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.errors import InputError, UnsupportedModel
from draftsmith.targets import hf
from draftsmith.targets.fixed import KEYS, FixedWidth, gives_equal_bits
from draftsmith.targets.hf import HFTarget, load_target

SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mistral, a window of 7": MistralConfig(**SIZES, sliding_window=7),
    "phi3": Phi3Config(**SIZES),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TEXT = [(7 * i * i + 3 * i + 1) % 200 for i in range(60)]
ALL = Signals(layers=(0, 1), last_hidden=True)


@lru_cache(maxsize=4)
def target_of(name: str, dtype: torch.dtype, width: int | None = 8) -> HFTarget:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return HFTarget(model, fixed_width=width, end_ids=frozenset())


def in_pieces(target: HFTarget, sizes: Sequence[int], text: Sequence[int] = TEXT) -> list[Tensor]:
    """Logits and states behind every token of one text that is fed so."""
    cache, at, out = target.new_cache(1, len(text)), 0, []
    for size in sizes:
        tokens, block = lay_out(cache, [text[at : at + size]])
        out.append(target.forward(torch.from_numpy(tokens), block, size, ALL))
        cache.commit(np.array([size]))
        at += size
    states = [one.signals_BTS for one in out]
    return [
        torch.cat([one.logits_BNV[0] for one in out]),
        torch.cat([one[0] for one in states if one is not None]),
    ]


def in_company(target: HFTarget, text: Sequence[int] = TEXT) -> list[Tensor]:
    """The same, fed as row 1 of a ragged batch of 3 which has come to unequal lengths."""
    rows = [list(text[5:40]), list(text), [9, 9, 9]]
    cache = target.new_cache(3, len(text))
    logits, states = [], []
    for start, stop in itertools.pairwise((0, 13, 14, 45, 60)):
        fed = [row[start:stop] for row in rows]
        tokens, block = lay_out(cache, fed)
        width = tokens.shape[1]
        out = target.forward(torch.from_numpy(tokens), block, width, ALL)
        cache.commit(np.array([len(one) for one in fed]))
        assert out.signals_BTS is not None
        logits.append(out.logits_BNV[1, width - len(fed[1]) :])
        states.append(out.signals_BTS[1, width - len(fed[1]) :])
    return [torch.cat(logits), torch.cat(states)]


def through_trees(
    target: HFTarget, text: Sequence[int] = TEXT, wide: int = 2, on_device: bool = False
) -> list[Tensor]:
    """The same, fed as paths through trees: each token is the last of `wide` siblings. `on_device`:
    trees are tensors, as those that only a GPU knows."""
    cache = target.new_cache(1, len(text))
    tokens, block = lay_out(cache, [text[:1]])
    first = target.forward(torch.from_numpy(tokens), block, 1, ALL)
    assert first.signals_BTS is not None
    logits, states = [first.logits_BNV[0]], [first.signals_BTS[0]]
    cache.commit(np.array([1]))
    at = 1
    while at < len(text):
        path = text[at : at + 5]
        nodes = [(token + other) % 200 for token in path[1:] for other in range(wide - 1, -1, -1)]
        parents = [wide * depth - 1 for depth in range(len(path) - 1) for _ in range(wide)]
        tree: Any = [np.array([given], dtype=np.int64) for given in (nodes, parents)]
        tokens, block = lay_out(
            cache, [path[:1]], *(map(torch.from_numpy, tree) if on_device else tree)
        )
        assert isinstance(block.see_BTC, Tensor) == on_device
        out = target.forward(torch.as_tensor(tokens), block, 1 + len(nodes), ALL)
        assert out.signals_BTS is not None
        logits.append(out.logits_BNV[0, ::wide])
        states.append(out.signals_BTS[0, ::wide])
        taken = np.arange(wide - 1, len(nodes), wide)
        cache.commit(np.array([1]), taken[None], np.array([len(taken)]))
        at += len(path)
    return [torch.cat(logits), torch.cat(states)]


FEEDS: dict[str, Callable[[HFTarget], list[Tensor]]] = {
    "all at once": partial(in_pieces, sizes=[60]),
    "in pieces of 8": partial(in_pieces, sizes=[8] * 7 + [4]),
    "in unequal pieces": partial(in_pieces, sizes=[3, 1, 17, 2, 1, 30, 6]),
    "in company": in_company,
    "through trees": through_trees,
    "through wide trees": partial(through_trees, wide=4, on_device=True),
}


def differing(target: HFTarget) -> list[str]:
    """The feeds that give other bits than one token at a time."""
    plain = in_pieces(target, [1] * 60)
    return [
        name
        for name, feed in FEEDS.items()
        if not all(torch.equal(a, b) for a, b in zip(feed(target), plain, strict=True))
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_are_those_of_one_token_at_a_time(name: str, dtype: torch.dtype) -> None:
    assert differing(target_of(name, dtype)) == []


@pytest.mark.parametrize("width", [1, 2, 5, 16, 64])
def test_any_width_is_kept(width: int) -> None:
    target = target_of("llama", torch.float16, width)
    assert target.exact and target.engine == f"transformers, fixed width {width}"
    assert differing(target) == []


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_longer_cache_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    """All at once, every token attends over 768 columns; in pieces, over 256 at first."""
    target = target_of(name, dtype)
    text = [(11 * i * i + 5 * i + 2) % 200 for i in range(600)]
    together = in_pieces(target, [600], text)
    for one, other in zip(together, in_pieces(target, [7] * 85 + [5], text), strict=True):
        assert torch.equal(one, other)


def test_logits_are_those_of_the_model() -> None:
    fixed = target_of("llama", torch.float64)
    usual = target_of("llama", torch.float64, None)
    for feed in FEEDS.values():
        for own, plain in zip(feed(fixed), feed(usual), strict=True):
            torch.testing.assert_close(own, plain)


# ------------------------------------------------------------------------- broken variants


def test_without_it_bits_differ() -> None:
    """Or the tests above would show nothing here."""
    assert "all at once" in differing(target_of("llama", torch.float32, None))
    assert "all at once" in differing(target_of("llama", torch.float16, None))


def broken(target: HFTarget, forward: Callable[..., TargetOutput]) -> HFTarget:
    """The same model, its pieces run by `forward`."""
    out = HFTarget(target.model, end_ids=frozenset())
    out._fixed = FixedWidth(partial(forward, out._forward), 8, whole=False)
    return out


def unpadded(
    forward: Callable[..., TargetOutput], tokens: Tensor, block: Block, *rest: Any
) -> TargetOutput:
    """Leaves the padding out."""
    count = sum(len(branch.tokens) for branch in block.branches)
    positions, slots = np.asarray(block.positions_BT), np.asarray(block.slots_BT)
    rows, columns = block.index(tokens.device)
    fewer = replace(
        block,
        positions_BT=positions[:, :count],
        slots_BT=slots[:, :count],
        branches=tuple(replace(one, last_T=one.last_T[:count]) for one in block.branches),
        _index=(rows[:, :count], columns[:, :count]),
    )
    return forward(tokens[:, :count], fewer, min(rest[0], count), *rest[1:])


def scattered(
    forward: Callable[..., TargetOutput], tokens: Tensor, block: Block, *rest: Any
) -> TargetOutput:
    """Leaves keys in the columns where a tree has put them, and masks the others."""
    for branch in block.branches:
        if branch.order_S is not None:
            mask_TS = branch.mask(None, block.view, torch.zeros((), dtype=torch.float32))[0, 0]
            back = torch.full_like(mask_TS, torch.finfo(torch.float32).min)
            end = int(branch.last_T.max()) + 1
            back[:, branch.order_S[:end]] = mask_TS[:, :end]
            branch._masks[None, torch.float32] = back[None, None]
    kept = tuple(replace(one, order_S=None) for one in block.branches)
    return forward(tokens, replace(block, branches=kept), *rest)


def test_a_forward_that_is_not_padded_is_seen() -> None:
    sound = target_of("llama", torch.float32)
    assert not gives_equal_bits(broken(sound, unpadded), TEXT[:8], 8)
    assert "in unequal pieces" in differing(broken(sound, unpadded))


def test_keys_out_of_order_are_seen() -> None:
    sound = target_of("llama", torch.float32)
    assert differing(broken(sound, scattered)) == ["through trees", "through wide trees"]
    assert not gives_equal_bits(broken(sound, scattered), TEXT[: hf._LEAST_TRIED], 8)


# ------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("length", [5, 12])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_drafts_change_no_token(dtype: torch.dtype, length: int) -> None:
    """Steps of twelve drafts go in two pieces."""
    target = target_of("llama", dtype)
    prompts = [TEXT[:9], TEXT[20:50], [3]]

    def texts(drafter: Any) -> list[list[int]]:
        drafter.bind(target)
        options = DecodeOptions(max_new_tokens=40, shape=TreeShape.chain(length))
        out: list[list[int]] = [[] for _ in prompts]
        for step in decode(target, drafter, prompts, options):
            for b, emitted in enumerate(step.emitted):
                out[b] += emitted
        return out

    assert texts(PromptLookup(PromptLookup.Config(length=length))) == texts(NoDrafter())


# ------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("width", [0, -1, 4097, 10**30, True, "8", 8.0])
def test_a_width_is_a_number_of_tokens(width: Any) -> None:
    for load in (load_target, Generator):
        with pytest.raises(InputError, match=r"fixed.width must be"):
            load("models/mini-code/target", fixed_width=width)


def test_a_model_of_experts_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=4))
    with pytest.raises(UnsupportedModel, match="its experts multiply as many tokens"):
        HFTarget(model, fixed_width=8)


def test_attention_that_is_written_out_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(Gemma2Config(**SIZES, sliding_window=7))
    with pytest.raises(UnsupportedModel, match="soft-caps or sinks"):
        HFTarget(model, fixed_width=8)
    with pytest.raises(InputError, match="leave out --attn-implementation eager"):
        HFTarget(
            target_of("llama", torch.float32).model, attn_implementation="eager", fixed_width=8
        )


def test_a_model_that_does_not_keep_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FixedWidth):
        def __init__(self, forward: Any, width: int, *, whole: bool) -> None:
            super().__init__(partial(unpadded, forward), width, whole=whole)

    monkeypatch.setattr(hf, "FixedWidth", Broken)

    def refused(dtype: torch.dtype) -> bool:
        try:
            HFTarget(target_of("llama", dtype, None).model, fixed_width=8, check=False)
        except UnsupportedModel as error:
            assert "cannot keep --fixed-width 8 here" in str(error)
            return True
        return False

    # in which formats a width changes sums, is the processor's
    assert any(map(refused, DTYPES))


def test_attention_sees_whole_pieces_of_keys() -> None:
    """On some processors a piece that is not whole is summed in another order when more keys follow
    it."""
    target = target_of("llama", torch.float32)
    cache = target.new_cache(1, 10)
    for end in (10, 520, 1030):
        _, block = lay_out(cache, [[1] * (end - int(cache.lengths_B[0]))])
        assert block.view == cache.capacity == KEYS * -(-end // KEYS)
        cache.commit(block.pending_B)
    assert target_of("llama", torch.float32, None).new_cache(1, 10).capacity < KEYS
