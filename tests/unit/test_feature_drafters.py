"""Feature-level drafters: training sees what decoding will see, and decoding changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import pytest
import torch
from tests.features import keep
from torch import Tensor

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import DraftTree, Signals, TrajectoryBatch, TreeShape
from draftsmith.distill.objectives.distillation import Distillation
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.fspad import Fspad
from draftsmith.drafters.griffin import Griffin
from draftsmith.drafters.hass import Hass
from draftsmith.drafters.hidden.drafter import (
    FeatureDrafter,
    Features,
    PairReader,
    layer_spec,
    new_state,
)
from draftsmith.drafters.hidden.fused import fused_layers
from draftsmith.drafters.hidden.unroll import Rollout, advance, begin
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.unrolled import Unrolled
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

X = TypeVar("X", bound=Drafter)
VOCAB = 64
PAIRING = [Eagle, Hass, Fspad, Griffin]
DRAFTERS = [*PAIRING, Eagle3, Medusa]
PATHS = TreeShape(
    paths=tuple(tuple(map(int, path)) for path in "0 1 2 00 01 10 000 001 0000 00000".split())
)
"""A static tree like that of EAGLE-1: wide near the root, five deep."""
SHAPES = {
    "chain": TreeShape.chain(3),
    "static": PATHS,
    "dynamic": TreeShape(widths=(4, 4, 4), keep=9),
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(VOCAB, layers=8)


def texts(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (rows, length), generator=generator)


def bound(drafter: X, target: HFTarget) -> X:
    drafter.bind(target)
    return drafter


def features_of(target: HFTarget, tokens_BT: Tensor, signals: Signals) -> Tensor:
    """What transformers' own forward says, layer by layer."""
    with target.native() as model, torch.no_grad():
        out = model.get_decoder()(input_ids=tokens_BT, output_hidden_states=True)
    if signals.last_hidden:
        return out.last_hidden_state
    return torch.cat([out.hidden_states[layer + 1] for layer in signals.layers], -1)


def batch_of(
    target: HFTarget, tokens_BT: Tensor, signals: Signals = Eagle.signals
) -> TrajectoryBatch:
    return TrajectoryBatch(
        tokens_BT=tokens_BT,
        loss_mask_BT=torch.ones_like(tokens_BT, dtype=torch.bool),
        features_BTS=features_of(target, tokens_BT, signals),
    )


@pytest.mark.parametrize(
    ("temperature", "shape", "options", "depths"),
    [
        (1.0, SHAPES["chain"], {"draw_length": 2}, {2}),  # whatever its confidence
        (1.0, SHAPES["chain"], {}, {1}),  # which no token has
        (1.0, SHAPES["static"], {"draw_length": 2}, {5}),
        (1.0, SHAPES["dynamic"], {"draw_length": 1}, {2}),
        (0.0, SHAPES["chain"], {"draw_length": 2}, {1}),
        (1.0, SHAPES["chain"], {"draw_length": 2, "proposal": "greedy"}, {1}),
        (1.0, TreeShape.chain(1), {"draw_length": 2}, {1}),
    ],
    ids=str,
)
def test_chains_of_draws_have_a_length_of_their_own(
    temperature: float,
    shape: TreeShape,
    options: dict[str, Any],
    depths: set[int],
    target: HFTarget,
) -> None:
    config = Eagle.Config(**{"proposal": "sampled", "confidence": 1.0, "seed": 1, **options})
    sampler = Sampler(temperature=temperature)
    drafted = DecodeOptions(sampler=sampler, shape=shape, max_new_tokens=12, ignore_end=True)
    steps = list(decode(target, bound(Eagle(config), target), [[1, 2, 3]], drafted))
    # before its first forward there is nothing to draft from, and the last steps want less
    assert {step.offered_depth[0] for step in steps[1:3]} == depths


def test_how_long_draws_are_is_not_known_before_the_target() -> None:
    with pytest.raises(InputError, match="bind"):
        Eagle(Eagle.Config(draw_length="auto")).longest_draw(SHAPES["chain"])
    with pytest.raises(InputError, match="draw_length must be at least 0, got -1"):
        Eagle.Config(draw_length=-1)


def test_a_chain_of_draws_is_no_longer_than_it_may_be(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed of what lies behind its last draw."""
    config = Eagle.Config(proposal="sampled", length=6, draw_length=2, seed=1)
    drafted: list[int] = []
    propose = Eagle.propose

    def noted(self: Eagle, *given: Any) -> DraftTree:
        tree = propose(self, *given)
        drafted.append(tree.num_nodes)
        return tree

    monkeypatch.setattr(Eagle, "propose", noted)
    options = DecodeOptions(sampler=Sampler(temperature=1.0), max_new_tokens=12, ignore_end=True)
    list(decode(target, bound(Eagle(config), target), [[1, 2, 3], [4, 5]], options))
    assert max(drafted) == 2


@pytest.mark.parametrize("cls", [*PAIRING, Eagle3])
def test_a_roll_out_is_what_decoding_computes(cls: type[FeatureDrafter], target: HFTarget) -> None:
    """At place t, step j of training = j levels of a chain of the text's own tokens below t."""
    drafter = bound(cls(cls.Config(seed=1)), target)
    assert drafter.network is not None
    tokens_BT = texts(2, 9)
    batch = batch_of(target, tokens_BT, drafter.signals)
    assert batch.features_BTS is not None
    rollout: Rollout = begin(batch, noise=0.0)
    trained = []
    with torch.no_grad():
        for _ in range(4):
            prediction, rollout = advance(drafter.network, target, batch, rollout)
            trained.append(drafter.network.logits(prediction.hidden_BTH, target))
    for t in range(4):
        known = tokens_BT[:, : t + 2].tolist()
        width = batch.features_BTS.shape[2]
        state = new_state(known, target, layer_spec(drafter.layer, target), width, 32)
        keep(state.features, list(batch.features_BTS[:, : t + 1]))
        reader = PairReader(drafter.network, target, state)
        with torch.inference_mode():
            decoded = [reader.root()]
            for depth in range(1, 4):
                decoded.append(
                    reader.level(
                        tokens_BT[:, t + 1 + depth, None],
                        torch.ones(2, 1, depth, dtype=torch.bool),
                        torch.zeros(2, 1, dtype=torch.long),
                    )[:, 0]
                )
        for step in range(4):
            torch.testing.assert_close(decoded[step], trained[step][:, t], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cls", [*PAIRING, Eagle3])
def test_documents_of_a_block_are_rolled_out_alone(
    cls: type[FeatureDrafter], target: HFTarget
) -> None:
    drafter = bound(cls(cls.Config(seed=1)), target)
    assert drafter.network is not None
    first, second = texts(1, 6, seed=1), texts(1, 8, seed=2)
    packed = TrajectoryBatch(
        tokens_BT=torch.cat([first, second], 1),
        loss_mask_BT=torch.ones(1, 14, dtype=torch.bool),
        documents_BT=torch.tensor([[0] * 6 + [1] * 8]),
        features_BTS=torch.cat(
            [features_of(target, text, drafter.signals) for text in (first, second)], 1
        ),
    )

    def last_states(batch: TrajectoryBatch) -> list[Tensor]:
        rollout, out = begin(batch, noise=0.0), []
        for _ in range(3):
            prediction, rollout = advance(drafter.network, target, batch, rollout)
            out.append(prediction.hidden_BTH)
        return out

    for together, alone in zip(
        last_states(packed),
        last_states(batch_of(target, second, drafter.signals)),
        strict=True,
    ):
        torch.testing.assert_close(together[:, 6:11], alone[:, :5], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("proposal", ["greedy", "without_replacement"])
def test_a_static_tree_is_whole_at_every_temperature(
    target: HFTarget, proposal: Literal["greedy", "without_replacement"], temperature: float
) -> None:
    """At temperature 0 a law is one token: draws of it would leave the other children nothing."""
    drafter = bound(Eagle(Eagle.Config(seed=1, proposal=proposal)), target)
    options = DecodeOptions(
        sampler=Sampler(temperature=temperature), max_new_tokens=40, shape=PATHS, seed=2
    )
    proposed = [step.proposed for step in decode(target, drafter, texts(2, 5).tolist(), options)]
    assert proposed[0] == (0, 0)  # there is no hidden state of the prompt yet
    assert set(proposed[1:9]) == {(len(PATHS.paths),) * 2}


@pytest.mark.parametrize("cls", DRAFTERS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 1.0])
@pytest.mark.every(4)
def test_decoding_says_what_the_target_says(
    cls: type[FeatureDrafter], shape: TreeShape, temperature: float, target: HFTarget
) -> None:
    drafter = bound(cls(), target)
    prompts = [row.tolist()[: 3 + 2 * b] for b, row in enumerate(texts(3, 12, seed=5))]
    options = DecodeOptions(
        sampler=Sampler(temperature=temperature), max_new_tokens=17, rule="match", seed=4
    )

    def said(drafter: object, shape: TreeShape | None) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in prompts]
        for step in decode(target, drafter, prompts, replace(options, shape=shape)):
            for row, new in zip(out, step.emitted, strict=True):
                row += new
        return out

    assert said(drafter, shape) == said(NoDrafter(), None)


@pytest.mark.parametrize("cls", DRAFTERS)
def test_an_option_says_the_length_of_its_chains(cls: type[Drafter], target: HFTarget) -> None:
    """In a cascade nothing else says it for a later drafter."""
    usual, drafter = cls(), bound(cls(cls.Config(length=3)), target)
    assert drafter.default_shape == TreeShape.chain(3) and not usual.default_shape.is_chain
    for step in decode(target, drafter, [[1, 2, 3]], DecodeOptions(max_new_tokens=8)):
        assert step.proposed[0] <= 3
    with pytest.raises(InputError, match="length must be at least 0"):
        cls.Config(length=-1)


def test_medusa_drafts_no_longer_than_it_has_heads(target: HFTarget) -> None:
    with pytest.raises(InputError, match="length=3: 2 heads draft at most 2 tokens"):
        Medusa(Medusa.Config(heads=2, length=3)).bind(target)


@pytest.mark.parametrize("cls", DRAFTERS)
def test_a_drafter_is_not_bound_to_a_target_of_other_measures(
    cls: type[Drafter], target: HFTarget
) -> None:
    """One of the same measures takes the place of the first."""
    drafter = bound(cls(), target)
    drafter.bind(tiny_target(VOCAB, layers=8, seed=1))
    for other in (tiny_target(VOCAB + 2, layers=8), tiny_target(VOCAB, layers=8, hidden=48)):
        with pytest.raises(InputError, match="another drafter"):
            drafter.bind(other)


class WithoutList:
    """A tokenizer that does not list its tokens."""


class Counted:
    """A tokenizer that counts how often its tokens are listed."""

    calls = 0

    def get_vocab(self) -> dict[str, int]:
        self.calls += 1
        return {"a": 0}


@pytest.mark.parametrize("cls", DRAFTERS)
def test_the_vocabulary_is_read_once_per_target(cls: type[Drafter]) -> None:
    tokenizer = Counted()
    target, other = (
        HFTarget(tiny_target(VOCAB, layers=8, seed=seed).model, tokenizer=tokenizer)
        for seed in (0, 1)
    )
    before = tokenizer.calls
    drafter = bound(cls(), target)
    drafter.bind(target)
    assert tokenizer.calls == before + 1
    drafter.bind(other)
    drafter.bind(other)
    assert tokenizer.calls == before + 2


@pytest.mark.parametrize("cls", DRAFTERS)
def test_a_tokenizer_need_not_list_its_tokens(cls: type[Drafter]) -> None:
    model = tiny_target(VOCAB, layers=8).model
    bound(cls(), HFTarget(model, tokenizer=WithoutList()))


def test_a_captured_module_that_did_not_run_is_an_error(target: HFTarget) -> None:
    with target.capture(Signals(last_hidden=True)) as captured:
        pass
    with pytest.raises(AssertionError, match="did not run"):
        _ = captured.signals_BTS
    with target.capture(Signals()) as captured:
        pass
    assert captured.signals_BTS is None


def test_a_griffin_chain_counts_while_the_text_stays_near_the_top(target: HFTarget) -> None:
    tokens_BT = texts(2, 12, seed=8)
    batch = batch_of(target, tokens_BT)
    masks: dict[str, list[Tensor]] = {}
    for shift in ("decode", "official"):
        config = Griffin.Config(seed=1, noise=0.0, mask_shift=shift, mask_top=20)
        drafter = bound(Griffin(config), target)
        carry, masks[shift], hits = None, [], []
        for step in range(3):
            prediction, carry = drafter(batch, carry)
            masks[shift].append(prediction.mask_BT)
            logits = drafter.head()(prediction.hidden_BTH)
            hit = torch.zeros(2, 12, dtype=torch.bool)
            for b in range(2):
                for t in range(12):
                    wanted = tokens_BT[b, t + 2 + step] if t + 2 + step < 12 else 0
                    hit[b, t] = wanted in logits[b, t].topk(20).indices
            hits.append(hit)
    decode, official = masks["decode"], masks["official"]
    assert decode[0].all() and official[0].all(), "the first step counts everywhere"
    assert torch.equal(decode[1], hits[0]) and torch.equal(decode[2], hits[0] & hits[1])
    for step in (1, 2):
        assert torch.equal(official[step][:, :-1], decode[step][:, 1:])
    assert 0 < int(decode[2].sum()) < decode[2].numel()


def test_keys_hand_on_their_gradient_and_states_only_eagle3s(target: HFTarget) -> None:
    for cls, kept in ((Hass, False), (Griffin, False), (Eagle3, True)):
        drafter = bound(cls(cls.Config(seed=1)), target)
        _, carry = drafter(batch_of(target, texts(1, 8), drafter.signals), None)
        assert carry.feature_BTH.requires_grad is kept
        assert all(one.requires_grad for one in carry.keys_and_values)


def test_medusa_heads_begin_as_the_target_s_own(target: HFTarget) -> None:
    drafter = bound(Medusa(), target)
    batch = batch_of(target, texts(2, 7))
    assert batch.features_BTS is not None
    carry = None
    for k in range(4):
        prediction, carry = drafter(batch, carry)
        assert (prediction.ahead, prediction.weight) == (2 + k, 0.8**k)
        assert prediction.head is not None
        torch.testing.assert_close(
            prediction.head(prediction.hidden_BTH), target.head(batch.features_BTS)
        )


def test_every_medusa_head_has_blocks_of_its_own(target: HFTarget) -> None:
    drafter = bound(Medusa(Medusa.Config(heads=2, layers=3)), target)
    assert drafter.network is not None
    blocks = {id(p) for p in drafter.network.parameters()}
    assert len(blocks) == 2 * (3 * 2 + 1)


def test_nothing_behind_a_short_path_of_medusa_is_accepted(target: HFTarget) -> None:
    """Token 0 is certain, and one path is shorter than the other:

        paths      0        accepted: 1, and then the target's own 0
                   1 - 0

    The released code fills the short one up with its token 0 and accepts that too.
    """
    drafter = bound(Medusa(Medusa.Config(heads=2)), target)
    options = DecodeOptions(
        max_new_tokens=12,
        shape=TreeShape(paths=((0,), (1,), (1, 0))),
        sampler=Sampler(logit_bias=((0, 1e4),)),
    )
    first, *steps = decode(target, drafter, [[3, 4, 5]], options)
    assert list(first.emitted[0]) == [0]
    assert [list(step.emitted[0]) for step in steps[:-1]] == [[0, 0]] * 5


@pytest.mark.parametrize("cls", DRAFTERS)
def test_no_step_learns_at_places_whose_prediction_lies_behind_the_text(
    cls: type[Drafter], target: HFTarget
) -> None:
    """Those of a text of T tokens are the last `ahead`. The released EAGLE-3 leaves the last one of
    its mask at 1 at all seven steps, where it learns a law of zero logits."""
    drafter = bound(cls(), target)
    batch, carry = batch_of(target, texts(1, 12), drafter.signals), None
    for _ in range(drafter.num_steps):
        prediction, carry = drafter(batch, carry)
        head = prediction.head or drafter.head()
        hidden_BTH = prediction.hidden_BTH.detach().requires_grad_()
        alone = replace(prediction, hidden_BTH=hidden_BTH, feature_BTH=None)
        loss = Distillation(objective="sft").loss(alone, batch, head).total
        (gradient_BTH,) = torch.autograd.grad(loss, hidden_BTH)
        learns_T = gradient_BTH[0].abs().sum(-1) > 0
        wanted_T = prediction.mask_BT[0] & (torch.arange(12) < 12 - prediction.ahead)
        assert learns_T.tolist() == wanted_T.tolist()
        assert prediction.ahead > 2 or wanted_T.sum() == 10, (
            "the first step learns all over the text"
        )


@pytest.mark.parametrize("cls", PAIRING)
def test_a_draft_vocabulary_borrows_rows_of_the_targets_head(
    cls: type[FeatureDrafter], target: HFTarget
) -> None:
    ids = torch.tensor([3, 4, 9, 40])
    drafter = bound(cls(cls.Config(seed=1, draft_vocab=4)), target)
    counts_V = torch.zeros(VOCAB)
    counts_V[ids] = 2.0
    drafter.choose_vocabulary(counts_V)
    states = torch.randn(2, 5, 32, dtype=torch.float64)
    logits = drafter.head()(states)
    torch.testing.assert_close(logits[..., ids], target.head(states)[..., ids])
    others = [v for v in range(VOCAB) if v not in ids.tolist()]
    assert (logits[..., others] == -torch.inf).all()
    prediction, _ = drafter.forward(batch_of(target, texts(2, 9)), None)
    assert prediction.narrow is not None and torch.equal(prediction.narrow.ids_D, ids)
    torch.testing.assert_close(prediction.narrow.head(states), logits[..., ids])


def test_eagle3_knows_only_its_draft_vocabulary(target: HFTarget) -> None:
    drafter = bound(Eagle3(Eagle3.Config(seed=1)), target)
    network = drafter.network
    ids = torch.tensor([3, 4, 9, 40])
    network.lm_head = torch.nn.Linear(32, 4, bias=False, dtype=torch.float64)
    network.d2t = ids - torch.arange(4)
    states = torch.randn(2, 5, 32, dtype=torch.float64)
    logits = drafter.head()(states)
    assert logits.shape == (2, 5, VOCAB)
    torch.testing.assert_close(logits[..., ids], network.lm_head(network.norm(states)))
    others = [v for v in range(VOCAB) if v not in ids.tolist()]
    assert (logits[..., others] == -torch.inf).all()


def test_eagle3_reads_the_published_layers() -> None:
    assert fused_layers(32) == (1, 15, 28)
    assert fused_layers(7) == (1, 2, 3)
    assert [fused_layers(count) for count in (1, 2, 6)] == [(0, 0, 0), (0, 0, 1), (0, 2, 5)]


def test_features_are_the_same_whenever_they_are_read(target: HFTarget) -> None:
    """They are stored when any are read; rows are taken and rewound before and after."""
    torch.manual_seed(0)
    eager, late = Features(2, 3, target), Features(2, 3, target)
    texts = [torch.zeros(0, 3), torch.zeros(0, 3)]
    for number, counts in enumerate([(4, 2), (1, 1), (1, 3), (2, 1)]):
        new = [torch.randn(count, 3) for count in counts]
        texts = [torch.cat(pair) for pair in zip(texts, new, strict=True)]
        for one in (eager, late):
            keep(one, new)
        eager.right_aligned(np.zeros(2, dtype=np.int64), eager.lengths_B)
        if number == 1:
            texts = texts[::-1]
            for one in (eager, late):
                one.take([1, 0])
        if number == 2:
            texts = [text[:5] for text in texts]
            for one in (eager, late):
                one.rewind(np.array([5, 5]))
        assert late.lengths_B.tolist() == [len(text) for text in texts]
    # of a forward whose first column is padding: a path that is scattered, and a row that was done
    signals = torch.randn(2, 5, 3)
    texts = [torch.cat([texts[0], signals[0, [1, 2, 4]]]), texts[1]]
    for one in (eager, late):
        one.append(signals, [[1, 2, 4], []])
    for one in (eager, late):
        for b, text in enumerate(texts):
            one.take([0, 1])
            found = one.right_aligned(np.zeros(2, dtype=np.int64), one.lengths_B)
            assert torch.equal(found[b, -len(text) :], text)


@pytest.mark.parametrize("seed", range(6))
def test_features_are_kept_until_they_are_read_while_rows_leave_and_change_places(
    seed: int, target: HFTarget
) -> None:
    draw = np.random.default_rng(seed)
    features, texts = Features(5, 3, target), [torch.zeros(0, 3)] * 5
    for _ in range(12):
        width = int(draw.integers(1, 5))
        signals = torch.from_numpy(draw.normal(size=(len(texts), width, 3)).astype(np.float32))
        columns = [np.flatnonzero(draw.random(width) < 0.6).tolist() for _ in texts]
        features.append(signals, columns)
        texts = [torch.cat([text, signals[b, columns[b]]]) for b, text in enumerate(texts)]
        if draw.random() < 0.5:
            rows = draw.permutation(len(texts))[: max(len(texts) - int(draw.integers(2)), 2)]
            features.take(rows.tolist())
            texts = [texts[b] for b in rows]
        if draw.random() < 0.2:
            features.right_aligned(np.zeros(len(texts), dtype=np.int64), features.lengths_B)
        if draw.random() < 0.2:
            most_B = draw.integers(2, 9, size=len(texts))
            features.rewind(most_B)
            texts = [text[:most] for text, most in zip(texts, most_B, strict=True)]
    assert features.lengths_B.tolist() == [len(text) for text in texts]
    found = features.right_aligned(np.zeros(len(texts), dtype=np.int64), features.lengths_B)
    for b, text in enumerate(texts):
        assert torch.equal(found[b, found.shape[1] - len(text) :], text.to(found.dtype))


@pytest.mark.parametrize(("kind", "through"), [(Unrolled, True), (Hass, False)])
def test_whether_later_losses_reach_earlier_drafts(
    kind: type[FeatureDrafter], through: bool, target: HFTarget
) -> None:
    """`unrolled` learns to give states from which the next draft is good; HASS takes them as they
    are."""
    drafter = kind()
    drafter.bind(target)
    drafter.train()
    batch = batch_of(target, texts(2, 9))
    _, after = drafter.forward(batch, None)
    assert after.feature_BTH.requires_grad is through
    second, _ = drafter.forward(batch, after)
    if through:
        (gradient,) = torch.autograd.grad(second.hidden_BTH.square().sum(), after.feature_BTH)
        assert gradient.abs().sum() > 0
