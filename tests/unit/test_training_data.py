"""Lessons from a store: laws are decoded batch by batch, and are those of the store."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiny_models import save_pair, tiny_model, tiny_tokenizer
from tests.unit.test_store import header, make_laws

from draftsmith.commands.distill import DistillOptions
from draftsmith.core.types import Signals, TopLogprobs, TrajectoryBatch
from draftsmith.distill import datasets, tokenizer_training
from draftsmith.distill.batches import Prefetched, TrainingExample, TrajectoryBlocks
from draftsmith.distill.config import FittingConfig, ScheduleConfig
from draftsmith.distill.datasets import Aggregate, Multi, online_data, stored_data
from draftsmith.distill.trajectories import shards
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.distill.trajectories.types import TopK, Trajectory
from draftsmith.errors import InputError
from draftsmith.targets.base import VocabLimitedTarget
from draftsmith.targets.hf import HFTarget

VOCAB = 300


@pytest.fixture
def options(tmp_path: Path) -> DistillOptions:
    """Two stores of two shards each, two texts per prompt."""
    save_pair(tmp_path, context=128)
    sha256 = tokenizer_training.sha256(
        tokenizer_training.load_tokenizer(str(tmp_path / "target")), tmp_path / "target"
    )
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        store = TrajectoryStore.create(
            tmp_path / name, header(tokenizer_sha256=sha256, vocab_size=VOCAB)
        )
        for number in range(2):
            store.write(number, [a_text(rng, f"p{number}{i // 2}", i % 2) for i in range(8)])
    (tmp_path / "out" / "work").mkdir(parents=True)
    return DistillOptions(
        target=str(tmp_path / "target"),
        drafter=str(tmp_path / "draft"),
        store=(tmp_path / "a", tmp_path / "b"),
        out=tmp_path / "out",
        hold_out=0.2,
        training=ScheduleConfig(block_length=32, batch_tokens=64),
    )


def a_text(rng: np.random.Generator, name: str, index: int) -> Trajectory:
    tokens = tuple(rng.integers(1, VOCAB, rng.integers(1, 12)).tolist())
    return Trajectory(
        prompt_id=name,
        forcing="sample",
        index=index,
        temperature=1.0,
        prompt=(*name.encode(), 7),
        tokens=tokens,
        score=-float(rng.random()),
        top=make_laws(rng, len(tokens), 5, VOCAB),
    )


def from_memory(options: DistillOptions) -> TrajectoryBlocks:
    """What is learnt from when all laws are in memory."""
    every = [one for folder in options.store for one in TrajectoryStore.open(folder).trajectories()]
    named = [replace(one, prompt_id=datasets.prompt_key(one.prompt)) for one in every]
    held = datasets.held_out([one.prompt_id for one in named], options.hold_out)
    kept = [TrainingExample(trajectory=one) for one in named if one.prompt_id not in held]
    documents = Multi(aggregate=options.aggregate).apply(kept)
    assert all(document.trajectory.top is not None for document in documents)
    return TrajectoryBlocks(documents, end_id=0, length=32, batch_blocks=2, seed=0)


def blocks_of(data: datasets.TrainingData) -> TrajectoryBlocks:
    """The blocks that a thread assembles in advance."""
    assert isinstance(data.source, Prefetched)
    assert isinstance(data.source.source, TrajectoryBlocks)
    return data.source.source


def dense(batch: TrajectoryBatch) -> torch.Tensor:
    """[N, V]: probabilities of the laws."""
    assert isinstance(batch.laws, TopLogprobs)
    p_NV = torch.zeros(len(batch.laws), VOCAB)
    return p_NV.scatter_add(1, batch.laws.ids_NK, batch.laws.log_p_NK.exp())


@pytest.mark.parametrize("aggregate", ["per_beam", "mixture"])
def test_batches_are_those_of_laws_in_memory(options: DistillOptions, aggregate: Aggregate) -> None:
    options = replace(options, aggregate=aggregate)
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    data = stored_data(options, tokenizer, VOCAB, None, Signals())
    wanted = from_memory(options)
    assert data.steps_per_epoch == wanted.steps_per_epoch
    for step in (0, 3, 1):
        one, other = data.source.batch(step, 0, 1), wanted.batch(step)
        for name in ("tokens_BT", "loss_mask_BT", "documents_BT", "law_row_BT", "weights_BT"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        if aggregate == "per_beam":
            assert torch.equal(dense(one), dense(other))
        else:  # means are rounded as a store rounds laws
            torch.testing.assert_close(dense(one), dense(other), rtol=2e-3, atol=0)


def test_laws_are_decoded_when_a_batch_asks_and_for_no_other(
    options: DistillOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = shards.decode

    def counted(columns: dict[str, bytes]) -> TopK:
        top = decode(columns)
        decoded.append(len(top))
        return top

    monkeypatch.setattr(shards, "decode", counted)
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    data = stored_data(options, tokenizer, VOCAB, None, Signals())
    assert decoded == []
    batch = data.source.batch(0, 0, 1)
    assert isinstance(batch.laws, TopLogprobs)
    assert sum(decoded) == len(batch.laws) < data.facts["answer_tokens"]
    assert data.held_out is not None
    assert isinstance(data.held_out.batch(0, 0, 1).laws, TopLogprobs)


@pytest.mark.parametrize(("share", "rows"), [(0.1, 1), (0.25, 2), (0.6, 6)])
def test_text_takes_its_share_of_the_batch(
    options: DistillOptions, tmp_path: Path, share: float, rows: int
) -> None:
    """The tokens of a step are --batch-tokens, text included: a --duration in tokens means both."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 100)
    training = replace(options.training, batch_tokens=10 * 32)
    options = replace(options, training=training, text=(str(text),), text_share=share)
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    data = stored_data(options, tokenizer, VOCAB, None, Signals())
    for step in range(3):
        batch = data.source.batch(step, 0, 1)
        assert batch.tokens_BT.numel() == training.batch_tokens
        assert batch.law_row_BT is not None
        assert int((batch.law_row_BT < 0).all(1).sum()) == rows
        parts = [data.source.batch(step, part, 2).tokens_BT.numel() for part in range(2)]
        assert sum(parts) == training.batch_tokens
    without = stored_data(replace(options, text=()), tokenizer, VOCAB, None, Signals())
    assert data.steps_per_epoch == pytest.approx(without.steps_per_epoch * 10 / (10 - rows))


@pytest.mark.parametrize(("share", "lacks"), [(0.1, "text"), (0.9, "answers")])
def test_a_batch_without_text_or_without_answers_is_refused(
    options: DistillOptions, share: float, lacks: str
) -> None:
    options = replace(options, text=("text.txt",), text_share=share)
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    with pytest.raises(InputError, match=rf"2 blocks.*{lacks}"):
        stored_data(options, tokenizer, VOCAB, None, Signals())


def test_texts_whose_prompt_fills_a_block_are_left_out_and_counted(
    options: DistillOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of what is held out: the choice falls on texts that can be looked at."""
    caplog.set_level("INFO", logger="draftsmith")
    sha256 = TrajectoryStore.open(tmp_path / "a").header.tokenizer_sha256
    store = TrajectoryStore.create(
        tmp_path / "long", header(tokenizer_sha256=sha256, vocab_size=VOCAB)
    )
    rng = np.random.default_rng(1)
    prompts = [(*name.encode(), *[5] * 40) for name in ("one", "two", "three")]
    store.write(0, [replace(a_text(rng, "long", 0), prompt=prompt) for prompt in prompts])
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    both = replace(options, store=(*options.store, tmp_path / "long"))
    data, plain = (stored_data(one, tokenizer, VOCAB, None, Signals()) for one in (both, options))
    assert (data.facts["too_long"], plain.facts["too_long"]) == (3, 0)
    said = "left out 3 texts: the prompt alone fills --block-length 32"
    assert caplog.messages == [said]
    assert data.facts["held_out_prompts"] == plain.facts["held_out_prompts"]
    alone = replace(options, store=(tmp_path / "long",))
    with pytest.raises(InputError, match=r"block of 32\b"):
        stored_data(alone, tokenizer, VOCAB, None, Signals())


def test_texts_that_do_not_fit_into_a_block_are_cut_or_can_be_left_out(
    options: DistillOptions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="draftsmith")
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    length = 8
    short = replace(options, training=replace(options.training, block_length=length))
    dropping = replace(short, fitting=FittingConfig(long_texts="drop"))
    texts = [one for folder in options.store for one in TrajectoryStore.open(folder).trajectories()]
    too_long = sum(len(one.prompt) + len(one.tokens) > length for one in texts)
    cut, left = (stored_data(one, tokenizer, VOCAB, None, Signals()) for one in (short, dropping))
    assert 0 < too_long < len(texts)
    assert (cut.facts["too_long"], left.facts["too_long"]) == (0, too_long)
    assert (cut.facts["cut"], left.facts["cut"]) == (too_long, 0)
    assert caplog.messages == [
        f"cut {too_long} answers: longer than what the prompt leaves of --block-length {length}",
        f"left out {too_long} texts: longer than --block-length {length}",
    ]
    for block in blocks_of(left).blocks:
        for one in block:
            assert one.trajectory.prompt_length + one.trajectory.answer_length <= length
    nothing = replace(dropping, training=replace(options.training, block_length=4))
    with pytest.raises(InputError, match=r"--block-length 4\b"):
        stored_data(nothing, tokenizer, VOCAB, None, Signals())


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (16, "the prompt alone fills --block-length 16"),
        (48, "longer than the context of 40 tokens"),
    ],
)
def test_prompts_that_cannot_be_continued_online_are_counted_by_their_reason(
    options: DistillOptions,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    length: int,
    reason: str,
) -> None:
    caplog.set_level("INFO", logger="draftsmith")
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    teacher = HFTarget(tiny_model(context=40), tokenizer)
    texts = ["the cat", "", "", "the dog", "return " * min(length, 40), "the cat"]
    sizes = [len(tokenizer.encode(text)) for text in texts]
    assert min(length, 40) <= sizes[4] < max(length, 40) + 1 and max(sizes[0], sizes[3]) < 16
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    online = replace(
        options,
        store=(),
        online=True,
        prompts=path,
        prompts_per_step=2,
        max_new_tokens=3,
        hold_out=0.0,
        training=replace(options.training, block_length=length, batch_tokens=2 * length),
    )
    data = online_data(online, tokenizer, teacher, Signals(), teacher, None, None)
    assert data.facts["skipped"] == {"empty prompt": 2, reason: 1}
    assert (data.facts["prompts"], data.facts["tight"]) == (2, 0)
    said = ["left out 2 prompts: empty prompt", f"left out 1 prompts: {reason}"]
    assert caplog.messages == said
    assert data.source.batch(0, 0, 1).loss_mask_BT.any()
    shorter, longer = sorted((sizes[0], sizes[3]))
    tight = replace(online, max_new_tokens=length - longer + 1)
    data = online_data(tight, tokenizer, teacher, Signals(), teacher, None, None)
    assert data.facts["tight"] == (2 if shorter == longer else 1)
    assert f"leave less than --max-new-tokens {tight.max_new_tokens}" in caplog.text
    path.write_text(json.dumps({"prompt": ""}))
    with pytest.raises(InputError, match="empty prompt"):
        online_data(online, tokenizer, teacher, Signals(), teacher, None, None)


def test_prompts_of_tokens_that_are_not_known_are_left_out_online(
    options: DistillOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokenizer has one token more than the target."""
    caplog.set_level("INFO", logger="draftsmith")
    tokenizer = tiny_tokenizer()
    assert tokenizer.add_tokens(["<new>"]) == 1
    teacher = HFTarget(tiny_model(), tokenizer)
    path = tmp_path / "prompts.txt"
    path.write_text("the cat\nthe <new> dog\nthe dog\n")
    online = replace(
        options, store=(), online=True, prompts=path, prompts_per_step=2, max_new_tokens=3
    )
    data = online_data(online, tokenizer, teacher, Signals(), teacher, None, None)
    assert data.facts["skipped"] == {"token outside the vocabulary of 300": 1}
    assert "left out 1 prompts: token outside" in caplog.text
    assert data.source.batch(0, 0, 1).loss_mask_BT.any()
    fewer = VocabLimitedTarget(
        teacher, max(tokenizer.encode("the dog"))
    )  # as a draft with less padding
    data = online_data(online, tokenizer, teacher, Signals(), fewer, None, None)
    assert data.facts["skipped"] == {f"token outside the vocabulary of {fewer.vocab_size}": 2}


def test_blocks_can_hold_one_text_each(options: DistillOptions) -> None:
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    alone = replace(options, fitting=FittingConfig(one_per_block=True))
    packed, single = (
        stored_data(one, tokenizer, VOCAB, None, Signals()) for one in (options, alone)
    )
    alone, together = blocks_of(single).blocks, blocks_of(packed).blocks
    assert {len(block) for block in alone} == {1}
    assert len(alone) == single.facts["trajectories"] > len(together)


def test_another_store_chooses_the_weights_and_none_of_its_prompts_is_learnt(
    options: DistillOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="draftsmith")
    sha256 = TrajectoryStore.open(tmp_path / "a").header.tokenizer_sha256
    other = TrajectoryStore.create(
        tmp_path / "other", header(tokenizer_sha256=sha256, vocab_size=VOCAB, top_k=3)
    )
    rng = np.random.default_rng(2)
    texts = [replace(a_text(rng, name, 0), forcing="greedy") for name in ("new", "p00")]
    other.write(0, [replace(one, top=make_laws(rng, len(one.tokens), 3, VOCAB)) for one in texts])
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    chosen = replace(options, hold_out=0.05, evaluate=(tmp_path / "other",))
    data = stored_data(chosen, tokenizer, VOCAB, None, Signals())
    assert data.held_out is not None
    batches = [data.held_out.batch(n) for n in range(data.held_out.num_batches)]
    asked = sum(int(batch.loss_mask_BT.sum()) for batch in batches)
    assert asked == sum(len(one.tokens) for one in texts)
    assert data.facts["prompts"] == 7 and data.facts["held_out_prompts"] == 2  # p00 is not learnt
    assert any("--evaluate" in said and "4" in said for said in caplog.messages)
    assert data.facts["evaluated_on"] and data.facts["evaluation_forcing"] == "greedy"
    assert (data.facts["evaluation_top_k"], data.facts["top_k"]) == (3, 5)
    assert data.facts["forcing"] == "sample" and len(data.facts["data"]) == 2
    plain = stored_data(options, tokenizer, VOCAB, None, Signals())
    assert data.facts.keys() - plain.facts.keys() == {
        *("evaluated_on", "evaluation_data", "evaluation_forcing", "evaluation_top_k")
    }
    other.write(1, [replace(one, prompt=(*one.prompt, 1)) for one in other.read(0)])
    damaged = tmp_path / "other" / "shard-00001.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    skipping = replace(chosen, fitting=FittingConfig(on_bad_shard="skip"))
    skipped = stored_data(skipping, tokenizer, VOCAB, None, Signals())
    assert (skipped.facts["bad_shards"], skipped.facts["held_out_prompts"]) == (1, 2)
    for name in ("a", "b"):  # the same store, and one that holds the same prompts
        wrong = replace(chosen, store=(tmp_path / "a",), evaluate=(tmp_path / name,))
        with pytest.raises(InputError, match="--evaluate"):
            stored_data(wrong, tokenizer, VOCAB, None, Signals())


def test_tokens_are_counted_in_the_answers_that_are_learnt(options: DistillOptions) -> None:
    """Not in prompts, and not in what is held out."""
    options = replace(options, hold_out=0.4)
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    data = stored_data(options, tokenizer, VOCAB, None, Signals())
    wanted = torch.zeros(VOCAB, dtype=torch.int64)
    documents = [one for block in from_memory(options).blocks for one in block]
    for document in documents:
        wanted += torch.bincount(torch.tensor(document.trajectory.tokens), minlength=VOCAB)
    assert data.count_tokens is not None and data.facts["held_out_prompts"] > 0
    assert torch.equal(data.count_tokens(), wanted)
    assert gc.isenabled()
