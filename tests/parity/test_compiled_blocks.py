"""Blocks of drafts in the compiled engine against the same network in PyTorch."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import pytest
import torch
from tests import features
from tests.drafted_texts import drafted_texts
from tests.parity.test_compiled_drafters import LevelByLevel, assert_same_draws
from tests.parity.test_compiled_heads import FORMS, as_stored, target_of
from torch import Tensor, nn

from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import PADDING, DraftTree, TreeShape
from draftsmith.drafters.base import TextState
from draftsmith.drafters.hidden import compiled as in_engine
from draftsmith.drafters.hidden.blocks import BlockDrafter, BlockReader
from draftsmith.drafters.hidden.drafter import layer_spec, new_state
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.p_eagle import PEagle, PEagleEngine, PEagleReader
from draftsmith.drafters.parallel import Parallel, ParallelEngine, ParallelReader
from draftsmith.drafters.tree_growth import ChildSelection, grow
from draftsmith.errors import InputError, UnsupportedModel
from draftsmith.targets import base
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.native.bindings import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

V, BLOCK = 96, 6
LENGTHS = (9, 4, 6)
KINDS: dict[str, tuple[type[BlockDrafter], dict[str, Any]]] = {
    "two layers": (Parallel, {}),
    "one layer": (Parallel, {"layers": 1}),
    "three layers": (Parallel, {"layers": 3, "block": 3}),
    "no Markov term": (Parallel, {"markov": 0}),
    "states of three layers": (Parallel, {"states": "layers"}),
    "40 tokens": (Parallel, {"draft_vocab": 40}),
    "P-EAGLE": (PEagle, {}),
    "P-EAGLE, one layer, 40 tokens": (PEagle, {"layers": 1, "draft_vocab": 40}),
    "P-EAGLE, three layers": (PEagle, {"layers": 3, "block": 3}),
}
READERS: dict[type[BlockDrafter], tuple[type[BlockReader[Any]], type[Any]]] = {
    Parallel: (ParallelReader, ParallelEngine),
    PEagle: (PEagleReader, PEagleEngine),
}
SHAPES = {
    "chain": TreeShape.chain(BLOCK - 1),
    "tree": TreeShape(widths=(3, 2, 1)),
    "dynamic": TreeShape(widths=(4, 4, 4), keep=12),
}


def made(target: HFTarget, kind: str = "two layers", **options: Any) -> BlockDrafter:
    """With random weights of a size at which every part of the network matters."""
    cls, given = KINDS[kind]
    markov = {"markov": 32} if cls is Parallel else {}
    drafter = cls(cls.Config(**{"block": BLOCK, **markov, **given, **options}))
    drafter.bind(target)
    drafter.choose_vocabulary(torch.arange(V, dtype=torch.float32).remainder(37))
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for one in drafter.network.parameters():
            one.add_(torch.randn(one.shape, generator=draw) * (0.1 if one.dim() > 1 else 0.3))
    return drafter.eval()


def reader_of(
    drafter: BlockDrafter, *, in_engine: bool, lengths: tuple[int, ...] = LENGTHS
) -> BlockReader[Any]:
    """Behind ragged texts whose states were drawn, each by itself."""
    target = drafter.target
    assert isinstance(target, HFTarget)
    engine = drafter._engine() if in_engine else None
    reader, runner = READERS[type(drafter)]
    assert isinstance(engine, runner) == in_engine
    spec = layer_spec(drafter.layer, target) if engine is None else engine.spec
    width = drafter._signal_width()
    draws = [np.random.default_rng(n) for n in lengths]
    known = [one.integers(V, size=n).tolist() for one, n in zip(draws, lengths, strict=True)]
    state = new_state(known, target, spec, width, 32)
    some = [
        one.normal(size=(n - 1, width)).astype(np.float32)
        for one, n in zip(draws, lengths, strict=True)
    ]
    features.keep(state.features, [torch.from_numpy(one) for one in some])
    return reader(drafter.network, target, state, drafter.num_steps, engine)


@torch.inference_mode()
def read(reader: BlockReader[Any], levels: int) -> list[Tensor]:
    """Logits of the root and of levels of two nodes, given tokens of their own."""
    rows = len(reader._state.known)
    out = [reader.root()[:, None].expand(-1, 2, -1)]
    for level in range(levels):
        tokens = torch.arange(2 * rows).view(rows, 2) + 7 * level
        laws = reader.level(tokens, torch.empty(0), torch.empty(0))
        out.append(laws.expand(-1, 2, -1))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_what_the_network_computes(kind: str) -> None:
    """Ragged rows; float32 on both sides."""
    drafter = made(target_of(), kind)
    levels = drafter.num_steps - 1
    theirs = read(reader_of(drafter, in_engine=True), levels)
    ours = read(reader_of(drafter, in_engine=False), levels)
    for one, other in zip(theirs, ours, strict=True):
        assert one.shape == other.shape and one.shape[-1] == (drafter.config.draft_vocab or V)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.std()))
    assert not torch.isclose(theirs[0], theirs[1]).all()


@pytest.mark.parametrize("kind", ["two layers", "P-EAGLE"])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_in_every_format_are_near(form: str, kind: str) -> None:
    """To the network with the weights that a format keeps: what is left is the rounding of states,
    and of keys and values to 16 bits."""
    drafter = made(target_of(), kind, weights=form)
    theirs = read(reader_of(drafter, in_engine=True), BLOCK - 2)
    with torch.no_grad():
        for module in drafter.network.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(as_stored(module.weight, form))
    ours = read(reader_of(drafter, in_engine=False), BLOCK - 2)
    for one, other in zip(theirs, ours, strict=True):
        off = float((one - other).square().mean().sqrt() / other.std())
        assert off < {"auto": 1e-4, "bf16": 0.02}.get(form, 0.06), off


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["40 tokens", "P-EAGLE, one layer, 40 tokens"])
def test_a_row_is_the_same_bit_for_bit_beside_others(
    form: str, threads: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than pass a layer together, of unlike lengths."""
    drafter = made(target_of(), kind, weights=form)
    lengths = tuple(2 + n % 13 for n in range(20))
    alone = [read(reader_of(drafter, in_engine=True, lengths=(n,)), 0)[0] for n in lengths]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    together = read(reader_of(drafter, in_engine=True, lengths=lengths), 0)[0]
    assert torch.equal(together, torch.cat(alone))


@torch.inference_mode()
def token_by_token(reader: BlockReader[Any], steps: int) -> Tensor:
    chain = [reader.columns.tokens(reader.root().argmax(-1))]
    for _ in range(1, steps):
        laws = reader.level(chain[-1][:, None], torch.empty(0), torch.empty(0))
        chain.append(reader.columns.tokens(laws[:, 0].argmax(-1)))
    return torch.stack(chain, 1)


def best_chain(reader: BlockReader[Any], *depths: int) -> Tensor:
    found = reader.chain(np.array(depths), None, 0.0)
    assert found is not None and found.law_BND is None
    tokens: Tensor = found.tokens_BN
    return tokens


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_is_one_call(kind: str, form: str) -> None:
    """The same tokens as level by level in the same engine, in every format; of a part of a block,
    too."""
    drafter = made(target_of(), kind, weights=form)
    steps = drafter.num_steps
    chain = best_chain(reader_of(drafter, in_engine=True), steps, 1, steps)
    assert torch.equal(chain, token_by_token(reader_of(drafter, in_engine=True), steps))
    assert len(chain.unique()) > 3, "one token all over shows little"
    two = best_chain(reader_of(drafter, in_engine=True), 2, 1, 2)
    assert torch.equal(two, chain[:, :2])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_of_equally_probable_tokens_the_first_is_drafted(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of each pair are looked at by two threads, but for one."""
    drafter = made(target_of(), "P-EAGLE")
    with torch.no_grad():
        head = drafter.network.lm_head.weight
        head[V // 2 :] = head[: V // 2]
    steps = drafter.num_steps
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    chain = best_chain(reader_of(drafter, in_engine=True), steps, steps, steps)
    assert torch.equal(chain, token_by_token(reader_of(drafter, in_engine=True), steps))
    assert chain.max() < V // 2 and len(chain.unique()) > 3


def drawn(reader: Any, temperature: float, seed: int, confidence: float = 0.0) -> DraftTree:
    """A chain of five; the second row may draft three."""
    how = ChildSelection(
        "sampled",
        Sampler(temperature=temperature),
        Noise(seed, range(3), LENGTHS),
        TextState(known=[[1] * n for n in LENGTHS], num_prompt=list(LENGTHS)),
        confidence,
    )
    with torch.inference_mode():
        return grow(reader, TreeShape.chain(5), np.array([5, 3, 5]), how)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 20.0])
@pytest.mark.parametrize(
    "kind", ["two layers", "no Markov term", "40 tokens", "P-EAGLE, one layer, 40 tokens"]
)
def test_a_chain_of_draws_is_one_call(kind: str, temperature: float) -> None:
    """From the same laws with the noise that draws level by level have."""
    drafter = made(target_of(), kind)
    seen = set()
    for seed in range(5):
        one = drawn(reader_of(drafter, in_engine=True), temperature, seed)
        other = LevelByLevel(reader_of(drafter, in_engine=True))
        assert_same_draws(one, drawn(other, temperature, seed))
        seen.add(tuple(one.tokens_BN.flatten().tolist()))
    assert temperature <= 1 or len(seen) > 1, "the seed decides nothing"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["40 tokens", "P-EAGLE, one layer, 40 tokens"])
def test_a_doubtful_chain_ends_where_it_does_level_by_level(temperature: float, kind: str) -> None:
    drafter = made(target_of(), kind)
    lengths = set()
    small = [10 ** (-n / 4) for n in range(1, 30)]
    for confidence in (*small, *(1 - one for one in small)):
        one = drawn(reader_of(drafter, in_engine=True), temperature, 3, confidence)
        levels = LevelByLevel(reader_of(drafter, in_engine=True))
        same = drawn(levels, temperature, 3, confidence)
        there = one.parents_BN != PADDING
        assert torch.equal(one.parents_BN, same.parents_BN)
        assert torch.equal(one.tokens_BN[there], same.tokens_BN[there])
        lengths.add(tuple(there.sum(1).tolist()))
    assert len(lengths) > 2 and any(len(set(some)) > 1 for some in lengths)


@pytest.mark.parametrize("kind", ["two layers", "states of three layers", "P-EAGLE"])
def test_a_long_prompts_pairs_are_kept_in_pieces(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what one piece gives, whatever the lengths of the rows."""
    drafter = made(target_of(), kind)
    lengths = (30, 4, 11)
    expected = read(reader_of(drafter, in_engine=True, lengths=lengths), 2)
    chain = best_chain(reader_of(drafter, in_engine=True, lengths=lengths), 5, 5, 5)
    monkeypatch.setattr(base, "CHUNK", 5)
    pieces = reader_of(drafter, in_engine=True, lengths=lengths)
    for one, other in zip(read(pieces, 2), expected, strict=True):
        assert torch.equal(one, other)
    assert pieces._state.cache.lengths_B.tolist() == [29, 3, 10]
    again = reader_of(drafter, in_engine=True, lengths=lengths)
    assert torch.equal(best_chain(again, 5, 5, 5), chain)


@pytest.mark.parametrize("kind", ["two layers", "P-EAGLE"])
def test_a_block_behind_nothing_new_begins_as_the_last_pair(kind: str) -> None:
    drafter = made(target_of(), kind)
    reader = reader_of(drafter, in_engine=True)
    first = read(reader, 1)
    reader._state.cache.rollback()
    reader._depth = 0
    for one, other in zip(read(reader, 1), first, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["40 tokens", "P-EAGLE, one layer, 40 tokens"])
def test_a_row_without_pairs_leaves_the_others_as_they_are(kind: str) -> None:
    """A session may have rewound it to its beginning."""
    drafter = made(target_of(), kind)

    def chain(*lengths: int) -> Tensor:
        reader = reader_of(drafter, in_engine=True, lengths=lengths)
        return best_chain(reader, *(5 if n > 1 else 0 for n in lengths))

    assert torch.equal(chain(9, 6, 1)[:2], chain(9, 6))
    assert torch.equal(chain(1, 9)[1:], chain(9))


@pytest.mark.parametrize("kind", ["two layers", "P-EAGLE"])
def test_positions_stop_at_the_end_of_the_context(kind: str) -> None:
    """As in PyTorch."""
    drafter = made(target_of(max_length=10), kind)
    theirs = read(reader_of(drafter, in_engine=True), 3)
    ours = read(reader_of(drafter, in_engine=False), 3)
    beyond = read(reader_of(made(target_of(), kind), in_engine=True), 3)
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)
    assert not all(
        torch.allclose(one[0], other[0], atol=1e-3)
        for one, other in zip(theirs, beyond, strict=True)
    )


def follow(drafter: Parallel, target: HFTarget, written: list[list[int]]) -> None:
    """Let its Markov term know which token came behind which in these texts."""
    drafter.bind(target)
    behind = {one: other for text in written for one, other in itertools.pairwise(text)}
    wanted = torch.zeros(len(behind), V)
    wanted[range(len(behind)), list(behind.values())] = 100
    with torch.no_grad():
        embedded = target.embed(torch.tensor(list(behind))).float()
        left, size, right = torch.linalg.svd(torch.linalg.pinv(embedded) @ wanted)
        rank = drafter.network.rank
        drafter.network.markov_in.weight.copy_((left[:, :rank] * size[:rank]).T)
        drafter.network.markov_out.weight.copy_(right[:rank].T)


@pytest.mark.every(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_drafts_change_no_text(form: str, shape: str, temperature: float) -> None:
    """Target and blocks in one format, and some of their drafts stay. Draws, too, but for a shape
    that follows the laws."""
    target = target_of(weights=form)
    plain, _ = drafted_texts(target, NoDrafter(), temperature, SHAPES[shape])
    for proposal in ("greedy", "sampled"):
        drafter = Parallel(Parallel.Config(block=BLOCK, markov=32, weights=form, proposal=proposal))
        follow(drafter, target, plain)
        found, accepted = drafted_texts(target, drafter, temperature, SHAPES[shape])
        assert isinstance(drafter._engine(), ParallelEngine)
        assert found == plain and accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_unknown_places_change_no_text(shape: str, temperature: float) -> None:
    target = target_of(weights="int8")
    plain, _ = drafted_texts(target, NoDrafter(), temperature, SHAPES[shape])
    for proposal in ("greedy", "sampled"):
        drafter = made(target, "P-EAGLE", proposal=proposal)
        found, _ = drafted_texts(target, drafter, temperature, SHAPES[shape])
        assert isinstance(drafter._engine(), PEagleEngine)
        assert found == plain


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"markov": 3}, "its Markov term is 3 wide, no multiple of 16"),
        ({"block": 70}, "its blocks have 69 drafts, more than 64"),
        (
            {"confidence_head": True, "confidence": 0.5},
            "its confidence head, which ends its drafts, is not written there",
        ),
    ],
)
def test_what_does_not_fit_is_run_by_pytorch_which_is_said_once(
    options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = target_of()
    in_engine._say.cache_clear()
    plain, _ = drafted_texts(target, NoDrafter(), 0.0, SHAPES["chain"])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            drafter = made(target, **options)
            assert drafted_texts(target, drafter, 0.0, SHAPES["chain"])[0] == plain
            assert drafter._engine() is None
    said = [one.getMessage() for one in caplog.records if "compiled" in one.getMessage()]
    assert said == [f"the drafter is not compiled, PyTorch runs it: {why}"]
    with pytest.raises(UnsupportedModel, match=r"weights=bf16: .*since its"):
        made(target, weights="bf16", **options)._engine()


def test_a_confidence_head_that_ends_no_draft_leaves_the_network_in_the_engine() -> None:
    drafter = made(target_of(), confidence_head=True)
    assert isinstance(drafter._engine(), ParallelEngine)


def test_a_token_that_there_is_not_is_refused() -> None:
    reader = reader_of(made(target_of()), in_engine=True)
    with torch.inference_mode():
        reader.root()
        with pytest.raises(InputError, match="reach from 96 to 96"):
            reader.level(torch.full((3, 1), V), torch.empty(0), torch.empty(0))


def test_no_text_holds_the_number_of_the_unknown_token() -> None:
    """The engine reads the number V as the unknown token. A text that holds it is refused, like one
    that holds any other number beyond the vocabulary."""
    reader = reader_of(made(target_of(), "P-EAGLE"), in_engine=True)
    reader._state.known[0][-1] = V
    with torch.inference_mode(), pytest.raises(InputError, match="to 96, and this model knows"):
        reader.root()


def test_weights_that_change_are_taken_over() -> None:
    drafter = made(target_of())
    first = drafter._engine()
    assert drafter._engine() is first
    with torch.no_grad():
        drafter.network.markov_out.weight.mul_(-1)
    assert drafter._engine() is not first
    theirs = read(reader_of(drafter, in_engine=True), 1)
    ours = read(reader_of(drafter, in_engine=False), 1)
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)
