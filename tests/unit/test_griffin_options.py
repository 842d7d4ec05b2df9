"""GRIFFIN with parts of it left out: what the options of its ablations change, and what not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.core.types import DraftPrediction, NarrowHead, TrajectoryBatch
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.griffin import Griffin
from draftsmith.drafters.registry import make_drafter
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

VOCAB = 64
BARE = {"guided_fusion": False, "enhanced_head": False}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(VOCAB, layers=4)


def griffin(target: HFTarget, **options: Any) -> Griffin:
    drafter = Griffin(Griffin.Config(noise=0.0, seed=2, **options))
    drafter.bind(target)
    return drafter.eval()


def batch(target: HFTarget) -> TrajectoryBatch:
    generator = torch.Generator().manual_seed(1)
    hidden = int(target.config.hidden_size)
    return TrajectoryBatch(
        tokens_BT=torch.randint(0, VOCAB, (2, 12), generator=generator),
        loss_mask_BT=torch.ones(2, 12, dtype=torch.bool),
        features_BTS=torch.randn(2, 12, hidden, generator=generator).to(target.dtype),
    )


def steps(drafter: Griffin, text: TrajectoryBatch, count: int) -> list[DraftPrediction]:
    carry, out = None, []
    with torch.no_grad():
        for _ in range(count):
            prediction, carry = drafter(text, carry)
            out.append(prediction)
    return out


def test_without_fusion_and_head_it_is_eagles_network(target: HFTarget, tmp_path: Path) -> None:
    plain = Eagle()
    plain.bind(target)
    plain.save(tmp_path / "eagle", kind="eagle")
    griffin(target, **BARE).save(tmp_path / "griffin", kind="griffin")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("eagle", "griffin"))
    assert {name: weight.shape for name, weight in one.items()} == {
        name: weight.shape for name, weight in other.items()
    }


@pytest.mark.parametrize("options", [{"guided_fusion": False}, {"enhanced_head": False}, BARE])
def test_a_folder_remembers_what_was_left_out(
    target: HFTarget, tmp_path: Path, options: dict[str, bool]
) -> None:
    drafter = griffin(target, **options)
    drafter.save(tmp_path, kind="griffin")
    again = make_drafter(str(tmp_path), ["noise=0"])
    again.bind(target)
    assert isinstance(again, Griffin)
    text = batch(target)
    (one,), (other,) = steps(drafter, text, 1), steps(again.eval(), text, 1)
    assert torch.equal(one.hidden_BTH, other.hidden_BTH)


def test_without_a_mask_all_chains_count(target: HFTarget) -> None:
    text = batch(target)
    free, strict = (griffin(target, mask_top=top) for top in (0, 1))
    assert all(one.mask_BT.all() for one in steps(free.train(), text, 3))
    assert not steps(strict.train(), text, 3)[2].mask_BT.any()
    assert steps(strict.eval(), text, 3)[2].mask_BT.all()  # figures look at all chains


@pytest.mark.parametrize("feeds", ["text", "draft"])
@pytest.mark.parametrize("top", [0, 1, 3, 40])
def test_chains_live_while_the_texts_token_is_near_the_top(
    target: HFTarget, top: int, feeds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a draft vocabulary, whose columns are other tokens, and which lacks some: the first
    text goes on with the drafter's best tokens, then its third ones, the second one at random."""
    monkeypatch.setattr("draftsmith.drafters.griffin._PLACES", 5)
    known = torch.zeros(VOCAB)
    known[1::2] = 1.0
    drafter = griffin(target, mask_top=top, draft_vocab=VOCAB // 2, feeds=feeds).train()
    drafter.choose_vocabulary(known)
    text = batch(target)
    ranked_TV = drafter.head()(steps(drafter, text, 1)[0].hidden_BTH[0]).argsort(
        -1, descending=True
    )
    assert not (ranked_TV[:, :3] % 2 == 0).any()
    text.tokens_BT[0, 2:8], text.tokens_BT[0, 8:] = ranked_TV[0:6, 0], ranked_TV[6:10, 2]
    first, second, third = steps(drafter, text, 3)
    lives_BT = torch.ones(2, 12, dtype=torch.bool)
    for before, after in ((first, second), (second, third)):
        logits_BTV = drafter.head()(before.hidden_BTH)
        own_BT1 = logits_BTV.gather(-1, text.tokens_ahead(before.ahead)[..., None])
        near_BT = (own_BT1[..., 0] > -torch.inf) & ((logits_BTV > own_BT1).sum(-1) < top)
        lives_BT &= near_BT | (top == 0)
        assert torch.equal(after.mask_BT, lives_BT)
        if after is second and top:
            assert lives_BT[0, :6].any() and not lives_BT[1, :9].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_are_equally_near_the_top(target: HFTarget, dtype: torch.dtype) -> None:
    drafter, ids_D = griffin(target, mask_top=3, feeds="draft"), torch.arange(1, VOCAB, 2)
    logits_D = torch.zeros(len(ids_D), dtype=dtype)
    logits_D[[4, 7]] = 1.0
    prediction = DraftPrediction(
        hidden_BTH=torch.zeros(1, len(ids_D), 2),
        mask_BT=torch.ones(1, len(ids_D), dtype=torch.bool),
        ahead=2,
        narrow=NarrowHead(ids_D=ids_D, head=lambda states: logits_D.expand(len(states), -1)),
    )
    assert drafter._near_top(prediction, ids_D[None]).all()  # two are greater than any other one
    assert not drafter._near_top(prediction, ids_D[None] - 1).any()
    assert (drafter._best(prediction) == ids_D[4]).all()


def test_later_steps_read_the_text_or_the_drafters_own_tokens(target: HFTarget) -> None:
    text = batch(target)
    own, given = (
        steps(griffin(target, mask_top=0, feeds=feeds).train(), text, 2)
        for feeds in ("draft", "text")
    )
    assert torch.equal(own[0].hidden_BTH, given[0].hidden_BTH)
    best_BT = target.head(own[0].hidden_BTH).argmax(-1)
    # the second step at a place sees the text up to it and, of the drafts, its own chain alone
    same_BT = (own[1].hidden_BTH == given[1].hidden_BTH).all(-1)
    wanted_BT = best_BT == text.tokens_ahead(2)
    assert torch.equal(same_BT[:, :-2], wanted_BT[:, :-2])
    assert not wanted_BT[:, :-2].all()


def test_held_out_figures_read_the_text(target: HFTarget) -> None:
    text = batch(target)
    own, given = (
        steps(griffin(target, mask_top=0, feeds=feeds), text, 2) for feeds in ("draft", "text")
    )
    assert torch.equal(own[1].hidden_BTH, given[1].hidden_BTH)


@pytest.mark.parametrize("ahead", [11, 12, 13, 40])
def test_a_text_may_be_shorter_than_the_steps(target: HFTarget, ahead: int) -> None:
    text = batch(target)
    assert text.tokens_ahead(ahead).shape == text.tokens_BT.shape
    assert int(text.mask_ahead(ahead).sum()) == 2 * max(12 - ahead, 0)
    assert float(text.weights_ahead(ahead).sum()) == 2 * max(12 - ahead, 0)
    assert text.features_ahead(ahead)[:, max(12 - ahead, 0) :].abs().sum() == 0
