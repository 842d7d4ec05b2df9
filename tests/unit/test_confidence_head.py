"""The confidence head of drafters of blocks: what it learns, what it reads, and how drafts end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.unit.test_feature_drafters import VOCAB, batch_of, texts
from tests.unit.test_parallel import BLOCK, reader_of, state_behind, steps
from torch import Tensor

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.law import Noise
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import FullLogprobs, TopLogprobs, TrajectoryBatch, TreeShape
from draftsmith.distill.objectives.distillation import Confidence, Distillation, Imitation
from draftsmith.drafters.parallel import Parallel, ParallelReader
from draftsmith.drafters.registry import make_drafter
from draftsmith.drafters.tree_growth import PADDING
from draftsmith.errors import BackendError, InputError
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import TabularTarget, tiny_target

KL = Imitation(token=Distillation(objective="kl"), token_weight=1.0)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(VOCAB, layers=8)


def bound(target: Any, **options: Any) -> Parallel:
    usual = {"block": BLOCK, "seed": 1, "markov": 3}
    drafter = Parallel(Parallel.Config(**(usual | options)))
    drafter.bind(target)
    return drafter


def taught(target: HFTarget, tokens_BT: Tensor, kept: int | None = None) -> TrajectoryBatch:
    """Texts with the target's laws behind every place; `kept`: only so many of the best tokens."""
    features_BTS = batch_of(target, tokens_BT).features_BTS
    assert features_BTS is not None
    batch = with_laws(target, tokens_BT, features_BTS)
    if kept is None:
        return batch
    log_p_NV = target.head(features_BTS[:, :-1].flatten(0, 1)).log_softmax(-1)
    log_p_NK, ids_NK = log_p_NV.topk(kept)
    return replace(batch, laws=TopLogprobs(ids_NK=ids_NK, log_p_NK=log_p_NK, vocab_size=VOCAB))


def with_laws(target: Any, tokens_BT: Tensor, features_BTS: Tensor) -> TrajectoryBatch:
    hidden_BTH = features_BTS[:, :-1]
    rows_BT = torch.arange(hidden_BTH[..., 0].numel()).view(len(tokens_BT), -1)
    return TrajectoryBatch(
        tokens_BT=tokens_BT,
        loss_mask_BT=torch.ones_like(tokens_BT, dtype=torch.bool),
        features_BTS=features_BTS,
        laws=FullLogprobs(hidden_NH=hidden_BTH.flatten(0, 1), head=target.head),
        law_row_BT=F.pad(rows_BT, (1, 0), value=-1),
    )


def acceptance(drafter: Parallel, batch: TrajectoryBatch) -> list[Tensor]:
    """[N] of each step: sum of min(p, q) over all tokens, where the drafter's mask and the text
    count."""
    found = []
    for one in steps(drafter, batch):
        q_BTV = drafter.head()(one.hidden_BTH).softmax(-1)
        assert batch.features_BTS is not None
        p_BTV = drafter.target.head(batch.features_BTS).softmax(-1)
        # the law of the token `ahead` places further stands one place before it
        p_BTV = p_BTV.roll(1 - one.ahead, dims=1)
        counts_BT = one.mask_BT & batch.mask_ahead(one.ahead)
        found.append(torch.minimum(p_BTV, q_BTV).sum(-1)[counts_BT])
    return found


def test_it_learns_the_expected_acceptance_of_each_place(target: HFTarget) -> None:
    """What is outside of a draft vocabulary is no draft, and adds nothing."""
    batch = taught(target, texts(2, 12))
    some = bound(target, confidence_head=True, draft_vocab=9)
    some.choose_vocabulary(torch.arange(VOCAB).remainder(11).float())
    for drafter in (bound(target, confidence_head=True), some):
        with torch.no_grad():
            accepted, learnt = acceptance(drafter.eval(), batch), steps(drafter, batch)
        for one, wanted_N in zip(learnt, accepted, strict=True):
            assert one.confidence_BT is not None
            counts_BT = one.mask_BT & batch.mask_ahead(one.ahead)
            said_N = one.confidence_BT[counts_BT].sigmoid()
            terms = Confidence().loss(one, batch, drafter.head())
            by_hand = -(wanted_N * said_N.log() + (1 - wanted_N) * (1 - said_N).log())
            assert float(terms.total) == pytest.approx(float(by_hand.sum()), rel=1e-9)
            assert float(terms.weight) == len(wanted_N)


def test_kept_laws_give_the_same_as_whole_ones(target: HFTarget) -> None:
    drafter = bound(target, confidence_head=True, draft_vocab=9).eval()
    drafter.choose_vocabulary(torch.arange(VOCAB).remainder(11).float())
    whole, kept = (taught(target, texts(2, 12), kept=k) for k in (None, VOCAB))
    with torch.no_grad():
        for one, other in zip(steps(drafter, whole), steps(drafter, kept), strict=True):
            first, second = (
                Confidence().loss(*given, drafter.head()) for given in ((one, whole), (other, kept))
            )
            torch.testing.assert_close(first.total, second.total, rtol=1e-9, atol=1e-9)


def gradients(drafter: Parallel, batch: TrajectoryBatch, objective: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    drafter.zero_grad()
    for one in steps(drafter.train(), batch):
        objective.loss(one, batch, drafter.head()).total.backward(retain_graph=True)
    named = drafter.network.named_parameters()
    return {name: one.grad.clone() for name, one in named if one.grad is not None}


def test_nothing_else_learns_by_it(target: HFTarget) -> None:
    """Also the first weights of the rest are those of a drafter without it."""
    batch = taught(target, texts(2, 20))
    without, with_head = (bound(target, confidence_head=one) for one in (False, True))
    names = {name for name, _ in with_head.network.named_parameters()}
    own = names - {name for name, _ in without.network.named_parameters()}
    assert own and gradients(with_head, batch, Confidence()).keys() == own
    plain, both = gradients(without, batch, KL), gradients(with_head, batch, KL)
    assert both.keys() - plain.keys() == own
    for name, one in plain.items():
        torch.testing.assert_close(one, both[name], rtol=1e-9, atol=1e-12, msg=name)


def test_after_some_steps_it_says_more_than_a_constant() -> None:
    """On texts that it has not seen, beside the best constant for these: of what either loses by
    not knowing the acceptance of each place, it loses less than half."""
    drafter = bound(TabularTarget(8, order=1), confidence_head=True)
    learnt, held_out = (short_texts(drafter, rows, seed) for rows, seed in ((32, 1), (8, 2)))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    before, _ = lost(drafter, held_out)
    for step in range(60):
        torch.manual_seed(step)
        total: Any = 0.0
        for one in steps(drafter.train(), learnt):
            terms = KL.loss(one, learnt, drafter.head())
            total = total + terms.total / terms.weight
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    own, constant = lost(drafter, held_out)
    assert own < 0.5 * constant < 0.5 * before


def short_texts(drafter: Parallel, rows: int, seed: int) -> TrajectoryBatch:
    """Texts of a target whose law is settled by the token before, and so is what is accepted."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(8, (rows, 30), generator=generator)
    return with_laws(drafter.target, tokens_BT, F.one_hot(tokens_BT + 1, 9).double())


def lost(drafter: Parallel, batch: TrajectoryBatch) -> tuple[float, float]:
    """Nats per place above the least that there can be: of the head, and of the best constant."""
    drafter.eval()
    with torch.no_grad():
        terms = [Confidence().loss(one, batch, drafter.head()) for one in steps(drafter, batch)]
        accepted_N = torch.cat(acceptance(drafter, batch))
    nats = sum(float(one.total) for one in terms) / sum(float(one.weight) for one in terms)
    least, constant = (
        float(F.binary_cross_entropy(said_N.expand_as(accepted_N), accepted_N))
        for said_N in (accepted_N, accepted_N.mean())
    )
    return nats - least, constant - least


def test_decoding_reads_the_head_as_training_does(target: HFTarget) -> None:
    drafter = bound(target, confidence_head=True).eval()
    tokens_BT = texts(2, 11)
    batch = batch_of(target, tokens_BT)
    with torch.no_grad():
        said = [one.confidence_BT for one in steps(drafter, batch)]
    for anchor in range(1, 6):
        reader = reader_of(drafter, state_behind(drafter, batch, anchor))
        assert isinstance(reader, ParallelReader)
        with torch.inference_mode():
            reader.root()
            found = [reader.believed()]
            for step in range(1, BLOCK - 1):
                above = tokens_BT[:, anchor + step, None]
                reader.level(above, torch.empty(0), torch.empty(0))
                found.append(reader.believed())
        for one, logits_BT in zip(found, said, strict=True):
            assert logits_BT is not None
            wanted_B = logits_BT[:, anchor].sigmoid()
            torch.testing.assert_close(one, wanted_B, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_ends_behind_the_token_that_the_head_doubts(
    temperature: float, target: HFTarget
) -> None:
    """The tokens are those of a draft that does not end; how many, the head says."""
    batch = batch_of(target, texts(8, 11))
    config = {"confidence_head": True, "proposal": "sampled" if temperature else "greedy"}
    whole = bound(target, **config)
    lengths = set()
    sampler, shape = Sampler(temperature=temperature), TreeShape.chain(BLOCK - 1)
    depth_B = np.full(8, BLOCK - 1)
    for threshold in (0.2, 0.3):
        drafter = bound(target, **config, confidence=threshold)
        trees = []
        for one in (whole, drafter):
            state, noise = state_behind(one, batch, 5), Noise(0, list(range(8)), [6] * 8)
            with torch.inference_mode():
                trees.append(one.propose(state, shape, depth_B, sampler, noise))
        tokens_BN = trees[0].tokens_BN
        reader = reader_of(whole, state_behind(whole, batch, 5))
        assert isinstance(reader, ParallelReader)
        with torch.inference_mode():
            reader.root()
            product_B, wanted_B = reader.believed(), torch.ones(8, dtype=torch.long)
            for step in range(1, BLOCK - 1):
                wanted_B += (wanted_B == step) & (product_B >= threshold)
                reader.level(tokens_BN[:, step - 1 : step], torch.empty(0), torch.empty(0))
                product_B = product_B * reader.believed()
        count_B = (trees[1].parents_BN != PADDING).sum(1)
        assert torch.equal(count_B, wanted_B)
        for row, count in enumerate(count_B.tolist()):
            assert torch.equal(trees[1].tokens_BN[row, :count], tokens_BN[row, :count])
        lengths |= set(count_B.tolist())
    assert len(lengths) > 1


def test_a_folder_keeps_the_head(target: HFTarget, tmp_path: Path) -> None:
    made = bound(target, confidence_head=True)
    made.save(tmp_path, kind="parallel")
    again = make_drafter(str(tmp_path), ["confidence=0.3"])
    again.bind(target)
    assert isinstance(again, Parallel) and again.config.confidence_head
    stored, wanted = again.network.state_dict(), made.network.state_dict()
    assert stored.keys() == wanted.keys()
    assert all(torch.equal(stored[name], one) for name, one in wanted.items())
    assert any(name.startswith("confidence.") for name in stored)
    with pytest.raises(InputError, match="confidence_head: the weights in"):
        make_drafter(str(tmp_path), ["confidence_head=false"])


def test_a_folder_of_an_earlier_version_loads_without_it(target: HFTarget, tmp_path: Path) -> None:
    bound(target).save(tmp_path, kind="parallel")
    for name in ("config.json", "drafter.json"):
        path = tmp_path / name
        known = json.loads(path.read_text(encoding="utf-8"))
        del (known if name == "config.json" else known["options"])["confidence_head"]
        path.write_text(json.dumps(known), encoding="utf-8")
    again = make_drafter(str(tmp_path), ["confidence=0.3"])
    again.bind(target)
    options = DecodeOptions(max_new_tokens=8, ignore_end=True)
    assert sum(len(one.emitted[0]) for one in decode(target, again, [[1, 2]], options)) == 8


def test_a_folder_that_contradicts_itself_is_refused(target: HFTarget, tmp_path: Path) -> None:
    bound(target).save(tmp_path, kind="parallel")
    path = tmp_path / "drafter.json"
    known = json.loads(path.read_text(encoding="utf-8"))
    known["options"]["confidence_head"] = True
    path.write_text(json.dumps(known), encoding="utf-8")
    with pytest.raises(BackendError, match="confidence_head"):
        make_drafter(str(tmp_path)).bind(target)
