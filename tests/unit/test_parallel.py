"""Blocks drafted at once: training computes what decoding does, and sees no more than that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.features import keep
from tests.unit.test_feature_drafters import VOCAB, batch_of, features_of, texts
from torch import Tensor

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.types import DraftPrediction, FullLogprobs, TrajectoryBatch, TreeShape
from draftsmith.distill.evaluation import FIGURES, Chains
from draftsmith.distill.objectives.distillation import Distillation, Imitation
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.drafters.hidden import blocks
from draftsmith.drafters.hidden.blocks import BlockDrafter, BlockReader
from draftsmith.drafters.hidden.drafter import (
    FeatureDrafter,
    FeatureState,
    PairReader,
    layer_spec,
    new_state,
)
from draftsmith.drafters.p_eagle import PEagle, PEagleReader
from draftsmith.drafters.parallel import Parallel, ParallelReader
from draftsmith.drafters.registry import make_drafter
from draftsmith.errors import BackendError, InputError
from draftsmith.targets import base as targets
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

BLOCK = 4
SETTINGS: list[tuple[type[BlockDrafter], dict[str, Any]]] = [
    (Parallel, {"markov": 0}),
    (Parallel, {"markov": 3}),
    (Parallel, {"layers": 1, "states": "layers"}),
    (PEagle, {}),
    (PEagle, {"layers": 1}),
]
BOTH = [Parallel, PEagle]
READERS: dict[type[BlockDrafter], type[BlockReader[Any]]] = {
    Parallel: ParallelReader,
    PEagle: PEagleReader,
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(VOCAB, layers=8)


def bound(target: HFTarget, kind: type[BlockDrafter] = Parallel, **options: Any) -> BlockDrafter:
    drafter = kind(kind.Config(**({"block": BLOCK, "seed": 1} | options)))
    drafter.bind(target)
    return drafter


def reader_of(
    drafter: BlockDrafter, state: FeatureState, count: int = BLOCK - 1
) -> BlockReader[Any]:
    return READERS[type(drafter)](drafter.network, drafter.target, state, count)


def steps(drafter: BlockDrafter, batch: TrajectoryBatch) -> list[DraftPrediction]:
    predictions, carry = [], None
    for _ in range(drafter.num_steps):
        prediction, carry = drafter(batch, carry)
        predictions.append(prediction)
    return predictions


def trained(drafter: BlockDrafter, batch: TrajectoryBatch) -> list[Tensor]:
    """[B, T, V] of each place of the blocks, behind every place of the texts."""
    drafter.eval()
    with torch.no_grad():
        return [drafter.head()(one.hidden_BTH) for one in steps(drafter, batch)]


def state_behind(drafter: FeatureDrafter, batch: TrajectoryBatch, count: int) -> FeatureState:
    """The first `count` tokens of each text were fed, the next one is known."""
    features, target = batch.features_BTS, drafter.target
    assert features is not None
    known = batch.tokens_BT[:, : count + 1].tolist()
    spec = layer_spec(drafter.layer, target)
    state = new_state(known, target, spec, features.shape[2], 32)
    keep(state.features, list(features[:, :count]))
    return state


@pytest.mark.parametrize(("kind", "options"), SETTINGS, ids=str)
def test_training_computes_what_decoding_does(
    kind: type[BlockDrafter], options: dict[str, Any], target: HFTarget
) -> None:
    drafter = bound(target, kind, **options)
    tokens_BT = texts(2, 11)
    batch = batch_of(target, tokens_BT, drafter.signals)
    by_step = trained(drafter, batch)
    for anchor in range(1, 6):
        reader = reader_of(drafter, state_behind(drafter, batch, anchor))
        with torch.inference_mode():
            decoded = [reader.root()]
            for step in range(1, BLOCK - 1):
                above = tokens_BT[:, anchor + step, None]
                decoded.append(reader.level(above, torch.empty(0), torch.empty(0))[:, 0])
        for step, law_BV in enumerate(decoded):
            torch.testing.assert_close(law_BV, by_step[step][:, anchor], rtol=1e-9, atol=1e-9)


def test_only_a_markov_term_reads_what_was_drafted_before(target: HFTarget) -> None:
    drafters = [(bound(target, markov=rank), not rank) for rank in (0, 3)]
    for drafter, alike in [*drafters, (bound(target, PEagle), True)]:
        batch = batch_of(target, texts(2, 9), drafter.signals)
        reader = reader_of(drafter, state_behind(drafter, batch, 5))
        with torch.inference_mode():
            reader.root()
            laws = reader.level(torch.tensor([[1, 2], [3, 4]]), torch.empty(0), torch.empty(0))
            laws = laws.expand(-1, 2, -1)
        assert torch.equal(laws[:, 0], laws[:, 1]) is alike


def test_a_shorter_draft_of_causal_places_is_the_beginning_of_a_longer_one(
    target: HFTarget,
) -> None:
    """What a row drafts must not depend on how deep its neighbours go."""
    drafter = bound(target, PEagle)
    batch = batch_of(target, texts(2, 9), drafter.signals)
    laws = []
    for count in (1, 2, BLOCK - 1):
        reader = reader_of(drafter, state_behind(drafter, batch, 5), count)
        with torch.inference_mode():
            reader.root()
        laws.append(reader._own_BPD)
        assert reader._own_BPD.shape[1] == count
    longest = laws[-1]
    for some in laws[:-1]:
        torch.testing.assert_close(some, longest[:, : some.shape[1]], rtol=1e-9, atol=1e-9)
    for one, other in ((0, 1), (1, 2)):
        assert not torch.isclose(longest[:, one], longest[:, other]).all(-1).any()


def test_all_that_stands_for_the_unknown_learns(target: HFTarget) -> None:
    drafter = bound(target, PEagle, layers=3).train()
    drafter.choose_vocabulary(None)
    batch = batch_of(target, texts(2, 20), drafter.signals)
    torch.manual_seed(0)
    head = drafter.head()
    for step, prediction in enumerate(steps(drafter, batch)):
        drafter.zero_grad()
        logits = head(prediction.hidden_BTH[prediction.mask_BT])
        logits.logsumexp(-1).sum().backward(retain_graph=True)
        without = {name for name, one in drafter.network.named_parameters() if one.grad is None}
        assert without == (set() if step else {"mask_embedding", "mask_hidden"})


def test_the_first_law_is_learnt_everywhere_and_further_ones_behind_anchors(
    target: HFTarget,
) -> None:
    drafter = bound(target, PEagle, spacing=3).train()
    batch = batch_of(target, texts(2, 30), drafter.signals)
    documents_BT = (torch.arange(30) >= 12).long().expand(2, -1)
    first, *others = steps(drafter, replace(batch, documents_BT=documents_BT))
    assert first.mask_BT.sum(1).tolist() == [28, 28]  # two texts begin
    assert not first.mask_BT[:, [0, 12]].any()
    assert [one.mask_BT.sum(1).tolist() for one in others] == [[10, 10]] * 2
    assert [one.weight for one in (first, *others)] == pytest.approx([1, 0.8, 0.64])


@pytest.mark.parametrize("kind", BOTH)
def test_a_block_of_one_draft(kind: type[BlockDrafter], target: HFTarget) -> None:
    drafter = bound(target, kind, block=2).train()
    batch = batch_of(target, texts(2, 9), drafter.signals)
    (only,) = steps(drafter, batch)
    assert only.ahead == 1 and only.mask_BT.any()
    options = DecodeOptions(max_new_tokens=6, shape=TreeShape(widths=(3,)))
    for step in decode(target, drafter, [[1, 2]], options):
        assert max(step.offered_depth) <= 1


@pytest.mark.parametrize("kind", BOTH)
def test_a_block_sees_its_text_up_to_its_anchor_and_no_other_block(
    kind: type[BlockDrafter], target: HFTarget
) -> None:
    drafter = bound(target, kind, **({"markov": 0} if kind is Parallel else {}))
    batch = batch_of(target, texts(1, 12), drafter.signals)
    assert batch.features_BTS is not None
    before = trained(drafter, batch)
    tokens_BT, features_BTS = batch.tokens_BT.clone(), batch.features_BTS.clone()
    tokens_BT[:, 7] += 1
    features_BTS[:, 7] += 1
    after = trained(drafter, replace(batch, tokens_BT=tokens_BT % VOCAB, features_BTS=features_BTS))
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one[:, :7], other[:, :7], rtol=0, atol=0)
        assert not torch.isclose(one[:, 7:], other[:, 7:]).all(-1).any()


@pytest.mark.parametrize("kind", BOTH)
def test_texts_of_a_block_of_training_are_read_alone(
    kind: type[BlockDrafter], target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "GROUP", 5)
    drafter = bound(target, kind)
    first, second = texts(1, 6, seed=1), texts(1, 8, seed=2)
    packed = TrajectoryBatch(
        tokens_BT=torch.cat([first, second], 1),
        loss_mask_BT=torch.ones(1, 14, dtype=torch.bool),
        documents_BT=torch.tensor([[0] * 6 + [1] * 8]),
        features_BTS=torch.cat(
            [features_of(target, text, drafter.signals) for text in (first, second)], 1
        ),
    )
    together, alone = (
        trained(drafter, packed),
        trained(drafter, batch_of(target, second, drafter.signals)),
    )
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one[:, 7:], other[:, 1:], rtol=1e-9, atol=1e-9)


def test_anchors_are_drawn_where_something_can_be_learnt(target: HFTarget) -> None:
    drafter = bound(target, spacing=3)
    batch = batch_of(target, texts(4, 30))
    counts_BT = torch.ones_like(batch.tokens_BT, dtype=torch.bool)
    counts_BT[:, :5] = False
    counts_BT[3] = False
    counts_BT[3, 20:22] = True  # only two places have a token behind them
    documents_BT = (torch.arange(30) >= 12).long().expand(4, -1)
    batch = replace(batch, loss_mask_BT=counts_BT, documents_BT=documents_BT)
    drawn = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        first, *others = steps(drafter.train(), batch)
        for one in others:
            assert torch.equal(one.mask_BT, first.mask_BT)
        drawn.append(first.mask_BT)
    assert not torch.equal(*drawn)
    able_BT = batch.mask_ahead(1)
    able_BT[:, 12] = False  # a text begins: the target has said nothing before it
    for mask_BT in drawn:
        assert not (mask_BT & ~able_BT).any()
        assert mask_BT.sum(1).tolist() == [10, 10, 10, 2]
    (evaluated, *_) = steps(drafter.eval(), batch)
    assert torch.equal(evaluated.mask_BT, able_BT)


@pytest.mark.parametrize("kind", BOTH)
def test_the_prompt_is_read_in_pieces(
    kind: type[BlockDrafter], target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = bound(target, kind)
    batch = batch_of(target, texts(2, 24), drafter.signals)
    known = []
    for size in (targets.CHUNK, 7):
        monkeypatch.setattr(targets, "CHUNK", size)
        state = state_behind(drafter, batch, 20)
        with torch.inference_mode():
            known.append(reader_of(drafter, state).root())
        state.cache.rollback()
        assert state.cache.lengths_B.tolist() == [20, 20]
    torch.testing.assert_close(*known)


@pytest.mark.parametrize("kind", BOTH)
def test_it_learns_to_repeat_what_the_target_says(
    kind: type[BlockDrafter], target: HFTarget
) -> None:
    """Some steps on greedy texts: drafts are then accepted, several at once."""
    torch.manual_seed(0)
    prompts = [[a, b] for a in range(6) for b in range(6)]
    plain = DecodeOptions(max_new_tokens=20, shape=TreeShape.chain(BLOCK - 1))
    said = [list(prompt) for prompt in prompts]
    for step in decode(target, make_drafter("none"), prompts, plain):
        for text, new in zip(said, step.emitted, strict=True):
            text.extend(new)
    drafter = bound(target, kind, spacing=1).train()
    batch = batch_of(target, torch.tensor(said), drafter.signals)
    objective = Imitation(token=Distillation(objective="sft"), token_weight=1.0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(60):
        total: Any = 0.0
        for prediction in steps(drafter, batch):
            terms = objective.loss(prediction, batch, drafter.head())
            total = total + terms.total / terms.weight * prediction.weight
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    drafter.eval()
    with torch.no_grad():
        chains = Chains()
        survived = [
            chains.loss(one, batch, drafter.head()).total[FIGURES.index("survival")]
            for one in steps(drafter, batch)
        ]
    accepted = [sum(step.accepted) for step in decode(target, drafter, prompts, plain)]
    assert survived[2] > 0.5 * len(said) * 18
    assert sum(accepted) > 0.6 * len(said) * 18


@pytest.mark.parametrize("kind", BOTH)
def test_the_mass_outside_of_a_draft_vocabulary_is_that_behind_every_anchor(
    kind: type[BlockDrafter], target: HFTarget
) -> None:
    drafter = bound(target, kind, draft_vocab=20).eval()
    drafter.choose_vocabulary(torch.arange(VOCAB).remainder(7).float())
    tokens_BT = texts(3, 12)
    logits_BTV = torch.randn(3, 12, VOCAB, generator=torch.Generator().manual_seed(0)).double()
    batch = replace(
        batch_of(target, tokens_BT, drafter.signals),
        laws=FullLogprobs(hidden_NH=logits_BTV.flatten(0, 1), head=lambda logits: logits),
        law_row_BT=torch.arange(tokens_BT.numel()).view(tokens_BT.shape),
    )
    known = drafter.draft_ids
    assert known is not None
    inside_BT = logits_BTV.softmax(-1)[..., known].sum(-1)
    chains = Chains()
    for step, prediction in enumerate(steps(drafter, batch), 1):
        terms = chains.loss(prediction, batch, drafter.head())
        found = (terms.total / terms.weight)[FIGURES.index("outside")]
        # an anchor has a token before it, and the block's token lies so many places behind it
        torch.testing.assert_close(found, 1 - inside_BT[:, 1 + step :].mean())


@pytest.mark.parametrize("kind", BOTH)
def test_what_is_longer_than_a_block_is_refused_or_cut(
    kind: type[BlockDrafter], target: HFTarget
) -> None:
    assert bound(target, kind).longest == BLOCK - 1
    assert bound(target, kind).default_shape == TreeShape.chain(BLOCK - 1)
    assert bound(target, kind, length=2).default_shape == TreeShape.chain(2)
    with pytest.raises(InputError, match="a block of 4 drafts at most 3 tokens"):
        bound(target, kind, length=4)
    options = DecodeOptions(max_new_tokens=12, shape=TreeShape.chain(9))
    drafted = decode(target, bound(target, kind), [[1, 2]], options)
    deepest = [max(one.offered_depth) for one in drafted]
    assert max(deepest) == BLOCK - 1


@pytest.mark.parametrize("kind", BOTH)
def test_a_folder_settles_block_and_layers(
    kind: type[BlockDrafter], target: HFTarget, tmp_path: Path
) -> None:
    made = bound(target, kind, layers=1, **({"markov": 2} if kind is Parallel else {}))
    made.save(tmp_path, kind="parallel" if kind is Parallel else "p_eagle")
    again = make_drafter(str(tmp_path))
    again.bind(target)
    batch = batch_of(target, texts(1, 9), made.signals)
    assert isinstance(again, kind)
    for one, other in zip(trained(made, batch), trained(again, batch), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(InputError, match=r"block: the weights in .* have settled it"):
        make_drafter(str(tmp_path), ["block=8"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"block_size": 16}))
    with pytest.raises(BackendError, match=r"block_size is 16 in its config\.json, and only 4"):
        make_drafter(str(tmp_path)).bind(target)


@pytest.mark.parametrize("kind", BOTH)
def test_rows_of_unequal_length_draft_as_alone(kind: type[BlockDrafter], target: HFTarget) -> None:
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9], [8, 8, 1]]
    options = DecodeOptions(max_new_tokens=15, shape=TreeShape(widths=(3, 2, 1)))

    def counted(some: list[list[int]]) -> np.ndarray:
        steps = [step.accepted for step in decode(target, bound(target, kind), some, options)]
        return np.array(steps).sum(0)

    together = counted(prompts)
    assert together.tolist() == [int(counted([one])[0]) for one in prompts]


def test_the_first_law_of_one_layer_is_that_of_eagle3(target: HFTarget) -> None:
    """And an unknown pair is read as any other, one place on."""
    drafter, eagle = bound(target, PEagle, layers=1), Eagle3()
    eagle.bind(target)
    weights = drafter.network.state_dict()
    for name in ("mask_embedding", "mask_hidden"):
        weights.pop(name)
    eagle.network.load_state_dict(
        {name.replace("layers.0", "midlayer"): one for name, one in weights.items()}
    )
    batch = batch_of(target, texts(2, 9), drafter.signals)
    state = state_behind(drafter, batch, 5)
    with torch.inference_mode():
        theirs = PairReader(eagle.network, target, state_behind(eagle, batch, 5))
        reader = reader_of(drafter, state)
        torch.testing.assert_close(reader.root(), theirs.root(), rtol=1e-9, atol=1e-9)
        network = drafter.network
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target, "embed", lambda tokens: network.embedded_places(*tokens.shape))
            theirs._above_BTH = network.fc(network.place_features(2, 1))
            second = theirs.level(
                torch.zeros(2, 1, dtype=torch.long),
                torch.ones(2, 1, 1, dtype=torch.bool),
                torch.zeros(2, 1, dtype=torch.long),
            )
        ours = reader.level(torch.zeros(2, 1), torch.empty(0), torch.empty(0))
        torch.testing.assert_close(ours, second, rtol=1e-9, atol=1e-9)
