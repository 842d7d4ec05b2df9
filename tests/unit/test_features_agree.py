"""The hidden states that a drafter learns from are those that it reads when decoding, wherever they
come from: a forward of the decoder, a teacher in the loop over packed blocks, or a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiny_models import tiny_model
from tests.unit.test_store import header
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, PretrainedConfig

from draftsmith.core.cache import lay_out
from draftsmith.core.types import FullLogprobs, Signals, TrajectoryBatch
from draftsmith.distill.batches import (
    InLoop,
    PackedBlocks,
    TextRows,
    TrainingExample,
    TrajectoryBlocks,
    assemble,
    pack,
    taught,
)
from draftsmith.distill.datasets import Multi, Online
from draftsmith.distill.trajectories.collect import TransformersBackend
from draftsmith.distill.trajectories.readers import ByteCache
from draftsmith.distill.trajectories.requests import feature_width
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.distill.trajectories.types import (
    CollectRequest,
    CollectSettings,
    Trajectory,
)
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget

END, LENGTH = 0, 40
ASKED = [
    Signals(last_hidden=True),
    Signals(layers=(1, 0), last_hidden=True),  # not in the order of the layers
    Signals(layers=(0, 0, 1)),
]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget(tiny_model().double(), end_ids=frozenset({END}))


def collected(target: HFTarget, signals: Signals) -> list[Trajectory]:
    """Eight prompts of unequal lengths, continued."""
    requests = [
        CollectRequest(prompt_id=str(n), prompt=tuple(range(20 * n + 1, 22 * n + 3)))
        for n in range(8)
    ]
    settings = CollectSettings(forcing="sample", max_new_tokens=9, top_k=3, signals=signals, seed=5)
    return TransformersBackend(target, batch_size=3).collect(requests, settings)


def decoded(target: HFTarget, tokens: Sequence[int], signals: Signals) -> Tensor:
    """[T, S] float32: what one forward of the decoding loop gives, this text alone."""
    tokens_BT, block = lay_out(target.new_cache(1, len(tokens)), [list(tokens)])
    out = target.forward(torch.from_numpy(tokens_BT), block, 1, signals)
    assert out.signals_BTS is not None
    return out.signals_BTS[0].float()


def documents(batch: TrajectoryBatch) -> list[tuple[Tensor, Tensor]]:
    """Tokens and features of every document, row after row; separator and padding as well."""
    assert batch.documents_BT is not None and batch.features_BTS is not None
    out = []
    for b in range(len(batch.tokens_BT)):
        for number in batch.documents_BT[b].unique():
            here = batch.documents_BT[b] == number
            out.append((batch.tokens_BT[b, here], batch.features_BTS[b, here]))
    return out


def check_as_decoded(target: HFTarget, batch: TrajectoryBatch, signals: Signals) -> None:
    """Every document of the batch has the features that it would have alone."""
    for tokens_T, features_TS in documents(batch):
        expected_TS = decoded(target, tokens_T.tolist(), signals)
        torch.testing.assert_close(features_TS, expected_TS, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("signals", ASKED, ids=str)
def test_a_teacher_in_the_loop_hears_what_decoding_hears(
    target: HFTarget, signals: Signals
) -> None:
    texts = [TrainingExample(trajectory=one) for one in collected(target, Signals())]
    blocks = pack(texts, LENGTH)
    assert max(len(block) for block in blocks) >= 2
    batch = taught(assemble(blocks, LENGTH, END), target, signals)
    check_as_decoded(target, batch, signals)
    assert isinstance(batch.laws, FullLogprobs)


@pytest.mark.parametrize("family", [MistralConfig, Gemma2Config])
def test_so_it_does_where_layers_have_windows_and_soft_caps(
    family: type[PretrainedConfig],
) -> None:
    """Gemma 2: windows in every other layer."""
    config = family(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
        sliding_window=8, eos_token_id=END, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        windowed = HFTarget(AutoModelForCausalLM.from_config(config), end_ids=frozenset({END}))
    signals = Signals(layers=(2, 0, 3), last_hidden=True)
    texts = [TrainingExample(trajectory=one) for one in collected(windowed, Signals())]
    batch = taught(assemble(pack(texts, LENGTH), LENGTH, END), windowed, signals)
    check_as_decoded(windowed, batch, signals)


@pytest.mark.parametrize("signals", ASKED, ids=str)
def test_a_store_gives_what_decoding_hears_up_to_its_rounding(
    target: HFTarget, signals: Signals, tmp_path: Path
) -> None:
    store = TrajectoryStore.create(tmp_path, header(vocab_size=300, signals=signals))
    store.write(0, collected(target, signals))
    reader = store.reader(0, ByteCache(), feature_width(signals, target.model.config))
    kept = [TrainingExample(trajectory=one) for one in reader.texts()]
    assert len(kept) == len(collected(target, signals))
    blocks = pack(kept, LENGTH)
    batch = assemble(blocks, LENGTH, END)
    captured = taught(batch, target, signals)
    assert batch.features_BTS is not None and captured.features_BTS is not None
    for b, block in enumerate(blocks):
        at = 0
        for document in block:
            known = document.trajectory
            stop = at + len(known.prompt) + len(known.tokens)
            expected_TS = decoded(target, (*known.prompt, *known.tokens), signals)
            # bfloat16 keeps eight bits
            torch.testing.assert_close(
                batch.features_BTS[b, at:stop], expected_TS, rtol=2**-8, atol=1e-6
            )
            torch.testing.assert_close(
                batch.features_BTS[b, at:stop], captured.features_BTS[b, at:stop],
                rtol=2**-8, atol=1e-6,
            )  # fmt: skip
            assert not batch.features_BTS[b, stop].any()  # the separator
            at = stop + 1
        assert not batch.features_BTS[b, at:].any()


def test_parts_stand_in_the_order_in_which_they_are_named(target: HFTarget) -> None:
    text = range(1, 20)
    both = decoded(target, text, Signals(layers=(1, 0), last_hidden=True))
    parts = [
        decoded(target, text, one)
        for one in (Signals(layers=(1,)), Signals(layers=(0,)), Signals(last_hidden=True))
    ]
    assert torch.equal(both, torch.cat(parts, -1))
    assert not torch.allclose(parts[0], parts[1])


def test_the_state_after_the_norm_is_the_one_that_laws_come_from(target: HFTarget) -> None:
    texts = [TrainingExample(trajectory=one) for one in collected(target, Signals())]
    batch = taught(assemble(pack(texts, LENGTH), LENGTH, END), target, Signals(last_hidden=True))
    assert isinstance(batch.laws, FullLogprobs) and batch.features_BTS is not None
    counted = batch.mask_ahead(1)
    rows = batch.law_ahead(1)[counted]
    assert torch.equal(batch.laws.take(rows).hidden_NH.float(), batch.features_BTS[counted])


def test_without_signals_nothing_is_heard_and_what_was_there_stays(target: HFTarget) -> None:
    texts = [TrainingExample(trajectory=one) for one in collected(target, Signals(layers=(0,)))]
    batch = assemble(pack(texts, LENGTH), LENGTH, END)
    assert torch.equal(taught(batch, target, Signals()).features_BTS, batch.features_BTS)
    bare = [TrainingExample(trajectory=one) for one in collected(target, Signals())]
    assert taught(assemble(pack(bare, 40), 40, END), target, Signals()).features_BTS is None
    with pytest.raises(InputError, match=r"layer 2\b"):
        taught(batch, target, Signals(layers=(2,)))


def test_hooks_are_gone_when_nobody_listens(target: HFTarget) -> None:
    with target.capture(Signals(layers=(0, 1), last_hidden=True)) as captured:
        for text in ([1, 2], [3, 4, 5]):
            decoded(target, text, Signals(layers=(0,)))
        assert captured.signals_BTS is not None
        assert captured.signals_BTS.shape == (1, 3, 96)  # of the last forward
    assert all(not module._forward_hooks for module in target.model.modules())


# --------------------------------------------------------------------------- sources


def text_rows() -> PackedBlocks:
    """Rows that begin in one of 60 documents: their numbers are larger than a row is long."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 300, 9).astype(np.int32) for _ in range(60)]
    return PackedBlocks(
        texts, end_id=END, length=LENGTH, batch_tokens=2 * LENGTH, seed=0, attend_across=False
    )


def training(target: HFTarget, signals: Signals = ASKED[0]) -> TrajectoryBlocks:
    return TrajectoryBlocks(
        [TrainingExample(trajectory=one) for one in collected(target, signals)],
        end_id=END, length=LENGTH, batch_blocks=3, seed=1,
    )  # fmt: skip


@pytest.mark.parametrize("parts", [1, 2])
def test_text_beside_trajectories_is_heard_like_them(target: HFTarget, parts: int) -> None:
    signals = ASKED[1]
    both = TextRows(first=training(target, Signals()), text=text_rows())
    source = InLoop(source=both, teacher=target, signals=signals)
    rows = 0
    for part in range(parts):
        batch = source.batch(0, part, parts)
        check_as_decoded(target, batch, signals)
        counted = batch.mask_ahead(1)
        assert bool((batch.law_ahead(1)[counted] >= 0).all())
        assert batch.documents_BT is not None and int(batch.documents_BT.max()) < LENGTH
        rows += len(batch.tokens_BT)
    assert rows == 5


def test_text_without_hidden_states_does_not_stand_beside_trajectories_with_them(
    target: HFTarget,
) -> None:
    with pytest.raises(InputError, match=r"plain text.*hidden states"):
        TextRows(first=training(target), text=text_rows()).batch(0, 0, 1)


def test_rows_keep_their_own_features_when_sources_are_joined(target: HFTarget) -> None:
    signals = ASKED[0]
    first = InLoop(source=training(target), teacher=target, signals=signals)
    text = InLoop(source=text_rows(), teacher=target, signals=signals)
    for part in range(2):
        check_as_decoded(target, TextRows(first=first, text=text).batch(1, part, 2), signals)


def test_online_and_held_out_texts_are_heard(target: HFTarget) -> None:
    signals = ASKED[2]
    drawn = Online(
        [CollectRequest(prompt_id=str(n), prompt=(n + 1, 1)) for n in range(6)],
        teacher=TransformersBackend(target),
        settings=CollectSettings(forcing="sample", max_new_tokens=5, top_k=1),
        multi=Multi(),
        end_id=END,
        length=LENGTH,
        prompts_per_step=4,
        seed=1,
    )
    online = InLoop(source=drawn, teacher=target, signals=signals)
    check_as_decoded(target, online.batch(0, 0, 1), signals)
    answers = [TrainingExample(trajectory=one) for one in collected(target, Signals())]
    held = TrajectoryBlocks(answers, end_id=END, length=LENGTH, batch_blocks=2, seed=None)
    evaluated = InLoop(source=held, teacher=target, signals=signals)
    for number in range(evaluated.num_batches):
        check_as_decoded(target, evaluated.batch(number), signals)
