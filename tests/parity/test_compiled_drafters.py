"""Drafters in the compiled engine: pairs against the network in PyTorch, and chains that are
drafted in one call against the same chains token by token."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from tests import features
from torch import Tensor

from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import PADDING, DraftTree, Proposal, RequestBatch, TreeShape
from draftsmith.drafters.base import TextState
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.eagle3 import Eagle3, Eagle3Network
from draftsmith.drafters.fspad import Fspad
from draftsmith.drafters.griffin import Griffin
from draftsmith.drafters.hass import Hass
from draftsmith.drafters.hidden.drafter import FeatureDrafter, PairReader, layer_spec, new_state
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.p_eagle import PEagle
from draftsmith.drafters.parallel import Parallel
from draftsmith.drafters.tree_growth import ChildSelection, ModelReader, grow
from draftsmith.drafters.unrolled import Unrolled
from draftsmith.drafters.vocabulary import VocabularySubset, padded
from draftsmith.errors import BackendError, InputError, UnsupportedModel
from draftsmith.targets import base
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.native.bindings import compiler
from draftsmith.targets.native.engine import engine_of
from draftsmith.targets.toy import tiny_target

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

V, H, CONTEXT = 96, 128, 64
LENGTHS = (9, 4, 6)
KINDS = {
    "eagle": (Eagle, {}),
    "hass": (Hass, {}),
    "fspad": (Fspad, {}),
    "griffin": (Griffin, {}),
    "griffin, plain fusion": (Griffin, {"guided_fusion": False}),
    "griffin, one state": (Griffin, {"enhanced_head": False}),
    "eagle, 40 tokens": (Eagle, {"draft_vocab": 40}),
    "griffin, 40 tokens": (Griffin, {"draft_vocab": 40}),
    "eagle3": (Eagle3, {}),
    "unrolled": (Unrolled, {}),
    "unrolled, plain fusion": (Unrolled, {"fusion": "plain"}),
    "eagle3, 40 tokens": (Eagle3, {"draft_vocab": 40}),
}


@lru_cache(maxsize=1)
def compiled() -> HFTarget:
    """Heads of 32: the narrowest that the engine takes. No test changes it, so all share one."""
    model = tiny_target(V, seed=3, hidden=H, dtype=torch.float32, max_length=CONTEXT).model
    return HFTarget(model, compile=True, end_ids=frozenset())


def made(kind: str, target: HFTarget, **options: Any) -> FeatureDrafter:
    """With random weights of a size at which every part of the network matters."""
    cls, given = KINDS[kind]
    drafter = cls(cls.Config(**given, **options))
    drafter.bind(target)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for one in drafter.network.parameters():
            one.add_(torch.randn(one.shape, generator=draw) * (0.1 if one.dim() > 1 else 0.3))
    counts = torch.arange(V, dtype=torch.float32).remainder(37)
    drafter.choose_vocabulary(counts)
    return drafter.eval()


def reader_of(
    drafter: FeatureDrafter,
    target: HFTarget,
    *,
    in_engine: bool,
    lengths: tuple[int, ...] = LENGTHS,
) -> PairReader:
    """Behind ragged texts whose features were drawn."""
    draw = np.random.default_rng(1)
    known = [draw.integers(V, size=n).tolist() for n in lengths]
    engine = drafter._engine() if in_engine else None
    assert (engine is None) != in_engine
    spec = layer_spec(drafter.layer, target) if engine is None else engine.spec
    width = drafter._signal_width()
    state = new_state(known, target, spec, width, 32)
    draws = [np.random.default_rng(n) for n in lengths]
    some = [
        one.normal(size=(n - 1, width)).astype(np.float32)
        for one, n in zip(draws, lengths, strict=True)
    ]
    features.keep(state.features, [torch.from_numpy(one) for one in some])
    return PairReader(drafter.network, target, state, engine)


@torch.inference_mode()
def read(reader: Any, levels: int) -> list[Tensor]:
    """Logits of the root and of levels of two nodes: the third below the first of the level."""
    rows = len(LENGTHS)
    out = [reader.root()]
    see = torch.zeros(rows, 0, 0, dtype=torch.bool)
    for level in range(levels):
        tokens = torch.arange(2 * rows).view(rows, 2) + 7 * level
        above = torch.zeros(rows, 2, dtype=torch.long)
        before = see[:, :1].expand(-1, 2, -1) if level else torch.zeros(rows, 2, 0)
        see = torch.cat([before.bool(), torch.eye(2, dtype=torch.bool).expand(rows, 2, 2)], 2)
        out.append(reader.level(tokens, see, above))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_what_the_network_computes(kind: str) -> None:
    """Ragged rows, then a tree of three levels; float32 on both sides, whose roundings such weights
    amplify from level to level."""
    target = compiled()
    drafter = made(kind, target)
    theirs = read(reader_of(drafter, target, in_engine=True), 3)
    ours = read(reader_of(drafter, target, in_engine=False), 3)
    for one, other in zip(theirs, ours, strict=True):
        assert one.shape == other.shape and one.shape[-1] == (drafter.config.draft_vocab or V)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.std()))


@torch.inference_mode()
def token_by_token(reader: Any, steps: int) -> Tensor:
    """[B, steps] the most probable token behind each."""
    rows = len(LENGTHS)
    chain = [reader.columns.tokens(reader.root().argmax(-1))]
    for depth in range(1, steps):
        see = torch.ones(rows, 1, depth, dtype=torch.bool)
        above = torch.zeros(rows, 1, dtype=torch.long)
        logits = reader.level(chain[-1][:, None], see, above)[:, 0]
        chain.append(reader.columns.tokens(logits.argmax(-1)))
    return torch.stack(chain, 1)


def best_chain(reader: Any, steps: int) -> Tensor:
    """As one call, of the most probable tokens."""
    rows = len(reader._state.known if isinstance(reader, PairReader) else reader._known)
    found = reader.chain(np.full(rows, steps), None, 0.0)
    assert found is not None and found.law_BND is None
    tokens: Tensor = found.tokens_BN
    return tokens


class LevelByLevel:
    """A reader that cannot draft a chain by itself."""

    def __init__(self, reader: Any) -> None:
        self.columns, self.root, self.level = reader.columns, reader.root, reader.level

    def chain(self, depth_B: object, draws: object, confidence: float) -> None:
        return None


def drawn(reader: Any, temperature: float, seed: int, confidence: float = 0.0) -> DraftTree:
    """A chain of five; the second row may draft three."""
    rows = len(LENGTHS)
    known = [[1] * n for n in LENGTHS]
    how = ChildSelection(
        "sampled",
        Sampler(temperature=temperature),
        Noise(seed, range(rows), LENGTHS),
        TextState(known=known, num_prompt=list(LENGTHS)),
        confidence,
    )
    with torch.inference_mode():
        return grow(reader, TreeShape.chain(5), np.array([5, 3, 5]), how)


def assert_same_draws(one: DraftTree, other: DraftTree) -> None:
    """The same tokens from the same laws."""
    for draft in (one, other):
        assert draft.proposal is Proposal.SAMPLED
    assert torch.equal(one.tokens_BN, other.tokens_BN)
    assert torch.equal(one.parents_BN, other.parents_BN)
    assert one.fed_BN is not None and other.fed_BN is not None
    assert torch.equal(one.fed_BN, other.fed_BN)
    laws = []
    for draft in (one, other):
        assert draft.q is not None and draft.q_rows_BN is not None
        laws.append(draft.q.take(draft.q_rows_BN.flatten()).probs())
    torch.testing.assert_close(laws[0], laws[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 20.0])
@pytest.mark.parametrize("kind", ["eagle", "griffin, 40 tokens", "eagle3, 40 tokens"])
def test_a_chain_of_draws_is_one_call(kind: str, temperature: float) -> None:
    """With the noise that draws level by level have, so that the text of a seed is the same."""
    target = compiled()
    drafter = made(kind, target)
    seen = set()
    for seed in range(5):
        one = drawn(reader_of(drafter, target, in_engine=True), temperature, seed)
        other = LevelByLevel(reader_of(drafter, target, in_engine=True))
        assert_same_draws(one, drawn(other, temperature, seed))
        seen.add(tuple(one.tokens_BN.flatten().tolist()))
    assert temperature <= 1 or len(seen) > 1, "the seed decides nothing"


@pytest.mark.parametrize("kind", ["griffin, 40 tokens", "a draft model", "its subset"])
@torch.inference_mode()
def test_draws_from_laws_that_are_no_numbers_are_refused(kind: str) -> None:
    target = compiled()
    if kind == "griffin, 40 tokens":
        reader: Any = reader_of(made(kind, target), target, in_engine=True)
        reader._state.features._stored()[:] = torch.nan
    else:
        ids = VocabularySubset(torch.arange(40) * 2 + 1, 3) if kind == "its subset" else None
        reader = draft_reader(target, ids)
        reader._cache.whole()[:] = torch.nan
        reader._cache.lengths_B += 1
    with pytest.raises(BackendError, match="NaN"):
        drawn(reader, 1.0, 0)


def lengths_of(draft: DraftTree) -> list[int]:
    found: list[int] = (draft.parents_BN != PADDING).sum(1).tolist()
    return found


def test_a_row_that_may_draft_nothing_lengthens_no_chain() -> None:
    target = compiled()
    for cut in (lambda reader: reader, LevelByLevel):
        reader = cut(reader_of(made("eagle", target), target, in_engine=True))
        how = ChildSelection(
            "greedy",
            Sampler(),
            Noise(1, range(3), LENGTHS),
            TextState(known=[[1] * n for n in LENGTHS], num_prompt=list(LENGTHS)),
            1.0,
        )
        with torch.inference_mode():
            draft = grow(reader, TreeShape.chain(5), np.array([0, 5, 0]), how)
        assert lengths_of(draft) == [0, 1, 0] and draft.num_nodes == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_doubtful_chains_change_no_text(temperature: float) -> None:
    """Chains that end in the engine, of a draft model and of a layer, in a ragged batch."""
    target = compiled()
    draft = HFTarget(tiny_target(V, seed=8, hidden=H, dtype=torch.float32).model, compile=True)
    prompts = [[1, 2, 3, 4, 5], [9, 8], [7] * 12]
    options = DecodeOptions(
        sampler=Sampler(temperature=temperature), max_new_tokens=24, rule="match", seed=5
    )

    def texts(drafter: Any) -> tuple[list[list[int]], set[int]]:
        drafter.bind(target)
        out: list[list[int]] = [[] for _ in prompts]
        offered = set()
        for step in decode(target, drafter, prompts, options):
            offered.update(step.offered_depth)
            for b, emitted in enumerate(step.emitted):
                out[b] += emitted
        return out, offered

    plain, _ = texts(NoDrafter())
    for drafter in (
        Independent(Independent.Config(length=5, confidence=0.003), model=draft),
        Eagle(Eagle.Config(length=5, confidence=0.003)),
    ):
        drafted, offered = texts(drafter)
        assert drafted == plain and len(offered) > 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["eagle", "griffin, 40 tokens", "a draft model", "its subset"])
def test_a_doubtful_chain_ends_where_it_does_level_by_level(kind: str, temperature: float) -> None:
    """Each row by its own laws; the draft is as deep as the deepest."""
    target = compiled()
    drafter = made(kind, target) if kind in KINDS else None

    def reader() -> Any:
        if drafter is None:
            ids = VocabularySubset(torch.arange(40) * 2 + 1, 3) if kind == "its subset" else None
            return draft_reader(target, ids)
        return reader_of(drafter, target, in_engine=True)

    lengths = set()
    small = [10 ** (-n / 4) for n in range(1, 30, 3)]
    for confidence in (*small, *(1 - one for one in small)):
        one = drawn(reader(), temperature, 3, confidence)
        same = drawn(LevelByLevel(reader()), temperature, 3, confidence)
        there = one.parents_BN != PADDING
        assert torch.equal(one.tokens_BN[there], same.tokens_BN[there])
        assert torch.equal(one.parents_BN, same.parents_BN)
        assert one.fed_BN is not None and same.fed_BN is not None
        assert torch.equal(one.fed_BN, same.fed_BN)
        lengths.add(tuple(there.sum(1).tolist()))
        assert one.num_nodes == max(lengths_of(one)), "nothing is drafted for nobody"
    assert len(lengths) > 2 and any(len(set(some)) > 1 for some in lengths)


@pytest.mark.parametrize("subset", [False, True])
def test_a_chain_of_draws_of_a_draft_model_is_one_call(subset: bool) -> None:
    target = compiled()
    ids = VocabularySubset(torch.arange(40) * 2 + 1, 3) if subset else None
    for seed in range(5):
        one = drawn(draft_reader(target, ids), 0.8, seed)
        assert_same_draws(one, drawn(LevelByLevel(draft_reader(target, ids)), 0.8, seed))


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_laws_that_are_cut_are_drawn_level_by_level(cut: dict[str, Any]) -> None:
    """The engine draws from whole laws alone, and then their tail would be drafted."""
    target = compiled()
    how = ChildSelection(
        "sampled",
        Sampler(temperature=0.8, **cut),
        Noise(1, range(3), LENGTHS),
        TextState(known=[[1] * n for n in LENGTHS], num_prompt=list(LENGTHS)),
    )
    with torch.inference_mode():
        tree = grow(draft_reader(target, None), TreeShape.chain(5), np.array([5] * 3), how)
    assert tree.q is not None
    assert ((tree.q.probs() > 0).sum(-1) < V).all()


@pytest.mark.parametrize("weights", ["auto", "int8", "int4", "w8a8", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_pairs_is_one_call(kind: str, weights: str) -> None:
    """The same tokens as level by level in the same engine, in every format."""
    target = compiled()
    drafter = made(kind, target, weights=weights)
    reader = reader_of(drafter, target, in_engine=True)
    chain = best_chain(reader, 5)
    assert torch.equal(chain, token_by_token(reader_of(drafter, target, in_engine=True), 5))
    assert len(chain.unique()) > 3, "one token all over shows little"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_of_equally_probable_tokens_the_first_is_drafted(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of each pair are looked at by two threads, but for one."""
    target = compiled()
    drafter = made("eagle3", target)
    with torch.no_grad():
        head = drafter.network.lm_head.weight
        head[V // 2 :] = head[: V // 2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    chain = best_chain(reader_of(drafter, target, in_engine=True), 5)
    assert torch.equal(chain, token_by_token(reader_of(drafter, target, in_engine=True), 5))
    assert chain.max() < V // 2 and len(chain.unique()) > 3


@pytest.mark.parametrize("kind", ["eagle", "griffin, 40 tokens", "eagle3"])
def test_a_long_prompts_pairs_are_read_in_pieces(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest row by itself first; what follows is bit for bit what one piece gives."""
    target = compiled()
    drafter = made(kind, target)
    whole = reader_of(drafter, target, in_engine=True, lengths=(30, 4, 11))
    expected = whole.root()
    monkeypatch.setattr(base, "CHUNK", 5)
    pieces = reader_of(drafter, target, in_engine=True, lengths=(30, 4, 11))
    tokens, features = pieces._pending()
    assert [len(row) for row in tokens] == [5, 3, 5] and features.shape[1] == 5
    assert pieces._state.cache.lengths_B.tolist() == [24, 0, 5]
    again = reader_of(drafter, target, in_engine=True, lengths=(30, 4, 11))
    assert torch.equal(again.root(), expected)
    assert torch.equal(best_chain(pieces, 4), best_chain(whole, 4))


def test_a_row_without_pairs_leaves_the_others_as_they_are() -> None:
    """A session may have rewound it to its beginning."""
    target = compiled()
    drafter = made("griffin, 40 tokens", target)

    def chain(*lengths: int) -> Tensor:
        return best_chain(reader_of(drafter, target, in_engine=True, lengths=lengths), 4)

    assert torch.equal(chain(9, 6, 1)[:2], chain(9, 6))
    some = reader_of(drafter, target, in_engine=True, lengths=(1, 9))
    best_chain(some, 4)
    assert some._state.cache.lengths_B.tolist() == [0, 8]


@lru_cache(maxsize=2)
def draft_model(size: int) -> HFTarget:
    """Shared as the target is: what a reader changes is a cache of its own."""
    model = tiny_target(size, seed=8, hidden=H, dtype=torch.float32, max_length=CONTEXT).model
    return HFTarget(model, compile=True, end_ids=frozenset())


def draft_reader(target: HFTarget, subset: VocabularySubset | None) -> ModelReader:
    size = V if subset is None else len(subset.d2t)
    draft = draft_model(size)
    ids = padded(size, V) if subset is None else subset.vocabularies(size, V)
    draw = np.random.default_rng(1)
    known = [draw.integers(V, size=n).tolist() for n in LENGTHS]
    return ModelReader(draft, draft.new_cache(len(known), 32), known, ids)


@pytest.mark.parametrize("subset", [None, VocabularySubset(torch.arange(40) * 2 + 1, 3)])
def test_a_chain_of_a_draft_model_is_one_call(subset: VocabularySubset | None) -> None:
    target = compiled()
    reader = draft_reader(target, subset)
    chain = best_chain(reader, 6)
    assert torch.equal(chain, token_by_token(draft_reader(target, subset), 6))


def test_a_chain_leaves_the_cache_as_levels_do() -> None:
    """All but the last node are staged, and an accepted path can be kept."""
    target = compiled()
    one, other = draft_reader(target, None), draft_reader(target, None)
    best_chain(one, 4)
    token_by_token(other, 4)
    for cache in (one._cache, other._cache):
        cache.commit(np.zeros(3, dtype=np.int64), np.array([[0, 1, 2]] * 3), np.array([3, 1, 0]))
    assert one._cache.lengths_B.tolist() == other._cache.lengths_B.tolist()
    for row in range(3):
        for a, b in zip(one._cache.contents(row), other._cache.contents(row), strict=True):
            assert torch.equal(a, b)


def test_a_chain_stops_at_the_end_of_the_context() -> None:
    """Positions beyond it stand still, as level by level."""
    target = compiled()
    model = tiny_target(V, seed=8, hidden=H, dtype=torch.float32, max_length=8).model
    draft = HFTarget(model, compile=True, end_ids=frozenset())
    known = [[1, 2, 3, 4, 5, 6]] * 3

    def reader() -> ModelReader:
        return ModelReader(draft, draft.new_cache(3, 32), known, padded(V, V))

    assert torch.equal(best_chain(reader(), 6), token_by_token(reader(), 6))
    assert target.vocab_size == V


def test_weights_that_change_are_taken_over() -> None:
    """A drafter that goes on learning drafts with its new weights."""
    target = compiled()
    drafter = made("eagle", target)
    first = drafter._engine()
    assert drafter._engine() is first
    with torch.no_grad():
        drafter.network.fc.weight.mul_(-1)
    assert drafter._engine() is not first
    theirs = read(reader_of(drafter, target, in_engine=True), 1)
    ours = read(reader_of(drafter, target, in_engine=False), 1)
    torch.testing.assert_close(theirs[1], ours[1], rtol=1e-3, atol=1e-3)


def test_a_drafter_may_be_bound_in_inference_mode() -> None:
    target = compiled()
    with torch.inference_mode():
        drafter = made("eagle, 40 tokens", target)
        best_chain(reader_of(drafter, target, in_engine=True), 2)


def test_a_vocabulary_that_changes_is_taken_over() -> None:
    target = compiled()
    drafter = made("eagle, 40 tokens", target)
    drafter._engine()
    drafter.choose_vocabulary(torch.arange(V, dtype=torch.float32))
    engine = drafter._engine()
    assert engine is not None and engine.token_of_D is not None
    assert engine.token_of_D.tolist() == list(range(V - 40, V))


@pytest.mark.parametrize(
    ("compiles", "why"),
    [(False, "the target does not run there"), (True, "its kind of network")],
)
def test_a_format_that_nothing_computes_in_is_refused(
    compiles: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Eagle3Network, "compilable", lambda network: None)
    model = tiny_target(V, seed=3, hidden=H, dtype=torch.float32, max_length=CONTEXT).model
    target = HFTarget(model, compile=compiles, end_ids=frozenset())
    drafter = Eagle3(Eagle3.Config(weights="int4"))
    drafter.bind(target)
    with pytest.raises(UnsupportedModel, match=f"weights=int4: .*{why}"):
        drafter._engine()
    with pytest.raises(InputError, match="weights must be one of auto, bf16"):
        Eagle3.Config(weights="int5")


@pytest.mark.parametrize(
    ("weights", "draws"),
    [("int4", 2), ("int8", 2), ("w8a8", 2), ("bf16", 3), ("auto", 2), (None, 2)],
)
@pytest.mark.parametrize("instructions", ["avx512-vnni", "avx2"])
def test_how_many_tokens_auto_draws_goes_by_what_computes_the_target(
    weights: str | None, draws: int, instructions: str
) -> None:
    """`auto` is float32 here; None: PyTorch runs it."""
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    model = tiny_target(V, seed=3, hidden=H, dtype=dtype, max_length=CONTEXT).model
    given = {"compile": False} if weights is None else {"compile": True, "weights": weights}
    target = HFTarget(model, end_ids=frozenset(), **given)
    if engine := engine_of(target):
        engine.instructions = instructions
    assert (engine is None) == (weights is None)
    draws = 2 if instructions == "avx2" else draws
    chain, found = TreeShape.chain(6), {}
    for length in ("auto", 1, 0):
        drafter = made("eagle", target, proposal="sampled", confidence=1.0, draw_length=length)
        options = DecodeOptions(
            sampler=Sampler(temperature=1.0), shape=chain, max_new_tokens=12, ignore_end=True
        )
        steps = list(decode(target, drafter, [[1, 2, 3]], options))
        # before its first forward there is nothing to draft from, and the last steps want less
        (found[length],) = {step.offered_depth[0] for step in steps[1:3]}
        assert drafter.longest_draw(chain) == (length if length == 1 else draws if length else 6)
    assert found == {"auto": draws, 1: 1, 0: 1}, "without a length confidence ends them"


@pytest.mark.parametrize("kind", ["eagle", "draft model", "medusa", "p_eagle", "parallel"])
def test_rows_of_a_session_that_end_early_leave_the_others_drafts_as_they_are(kind: str) -> None:
    """They are fed nothing from then on."""
    target = compiled()
    makes: dict[str, Callable[[], Any]] = {
        "eagle": lambda: made("eagle", target),
        "draft model": lambda: Independent(Independent.Config(), model=target),
        "medusa": Medusa,
        "p_eagle": PEagle,
        "parallel": lambda: Parallel(Parallel.Config(markov=32)),
    }
    drafter = makes[kind]()
    drafter.bind(target)
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    options = DecodeOptions(max_new_tokens=20, shape=TreeShape.chain(4))
    (first,) = [
        step.emitted for step in itertools.islice(decode(target, drafter, prompts, options), 1)
    ]
    options = replace(options, stop_token_ids=(first[0][0],))

    def steps(session: Session | None) -> list[Any]:
        found = decode(target, drafter, prompts, options, session=session)
        return [(one.emitted, one.accepted) for one in found]

    alone = steps(None)
    assert len(alone) > 2 and not alone[-1][0][0], "the first row ends before the others"
    assert steps(Session()) == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_drafts_its_chain_in_one_call(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best tokens, or draws, which bring their laws."""
    target = compiled()
    levels: list[object] = []
    monkeypatch.setattr(ModelReader, "level", lambda *asked: levels.append(asked))
    model = tiny_target(V, seed=8, hidden=H, dtype=torch.float32, max_length=CONTEXT).model
    drafter = Independent(
        Independent.Config(), model=HFTarget(model, compile=True, end_ids=frozenset())
    )
    drafter.bind(target)
    request = RequestBatch(tokens=[[1, 2, 3]], request_ids=(0,), max_new_tokens=9, predictions=())
    tree = drafter.propose(
        drafter.start(request),
        TreeShape.chain(4),
        np.array([3]),
        Sampler(temperature=temperature),
        Noise(0, (0,), [3]),
    )
    assert not levels
    assert tree.num_nodes == 3 and (tree.q is None) == (temperature == 0)
