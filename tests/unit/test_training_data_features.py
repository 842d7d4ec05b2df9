"""Lessons for drafters that read hidden states: from stores that keep them, or from the target."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.tiny_models import save_pair
from tests.unit.test_features_agree import check_as_decoded
from tests.unit.test_store import header
from tests.unit.test_stored_features import rewrite

from draftsmith.commands.distill import DistillOptions
from draftsmith.core.types import FullLogprobs, Signals, TopLogprobs, TrajectoryBatch
from draftsmith.distill import datasets, tokenizer_training
from draftsmith.distill.config import FittingConfig, ScheduleConfig
from draftsmith.distill.datasets import Aggregate, online_data, stored_data
from draftsmith.distill.trajectories.collect import TransformersBackend
from draftsmith.distill.trajectories.readers import FeatureFile
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.distill.trajectories.types import CollectRequest, CollectSettings
from draftsmith.errors import BackendError, InputError
from draftsmith.targets.hf import EmbeddingAndHead, HFTarget, load_target

VOCAB, WIDTH = 300, 32
LAST = Signals(last_hidden=True)
FUSED = Signals(layers=(0, 0, 1))


@pytest.fixture
def target(tmp_path: Path) -> HFTarget:
    save_pair(tmp_path, context=128)
    return load_target(str(tmp_path / "target"))


@pytest.fixture
def options(tmp_path: Path, target: HFTarget) -> DistillOptions:
    """A store of two shards with the states after the norm, two texts per prompt."""
    folder = tmp_path / "target"
    sha256 = tokenizer_training.sha256(tokenizer_training.load_tokenizer(str(folder)), folder)
    rng = np.random.default_rng(0)
    requests = [
        CollectRequest(prompt_id=str(n), prompt=tuple(rng.integers(1, VOCAB, 3 + n).tolist()))
        for n in range(8)
    ]
    settings = CollectSettings(forcing="sample", samples=2, max_new_tokens=9, top_k=5, signals=LAST)
    store = TrajectoryStore.create(
        tmp_path / "store", header(tokenizer_sha256=sha256, vocab_size=VOCAB, signals=LAST)
    )
    backend = TransformersBackend(target)
    for number in range(2):
        store.write(number, backend.collect(requests[4 * number :][:4], settings))
    (tmp_path / "out" / "work").mkdir(parents=True)
    return DistillOptions(
        target=str(folder),
        drafter=str(tmp_path / "draft"),
        store=(tmp_path / "store",),
        out=tmp_path / "out",
        hold_out=0.2,
        training=ScheduleConfig(block_length=32, batch_tokens=64),
    )


def every_batch(data: datasets.TrainingData) -> None:
    """Read all texts, held-out ones too."""
    for step in range(math.ceil(data.steps_per_epoch)):
        data.source.batch(step, 0, 1)
    assert data.held_out is not None
    for step in range(data.held_out.num_batches):
        data.held_out.batch(step, 0, 1)


def from_store(
    options: DistillOptions, signals: Signals, teacher: HFTarget | None = None
) -> datasets.TrainingData:
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    return stored_data(options, tokenizer, VOCAB, teacher, signals)


def near(batch: TrajectoryBatch, options: DistillOptions) -> None:
    """The features of every place of a text are those that the store has for the text."""
    known: dict[tuple[int, ...], Any] = {}
    for one in TrajectoryStore.open(options.store[0]).trajectories():
        known[(*one.prompt, *one.tokens)] = one.features
    assert batch.documents_BT is not None and batch.features_BTS is not None
    found = 0
    for b in range(len(batch.tokens_BT)):
        for number in batch.documents_BT[b].unique():
            here = batch.documents_BT[b] == number
            text = batch.tokens_BT[b, here].tolist()
            whole = [tokens for tokens in known if list(tokens) == text[: len(tokens)]]
            states_TS = batch.features_BTS[b, here]
            if not whole:  # padding
                assert not states_TS.any()
                continue
            longest = max(whole, key=len)
            assert torch.equal(states_TS[: len(longest)], torch.from_numpy(known[longest]))
            assert not states_TS[len(longest) :].any()
            found += 1
    assert found


@pytest.mark.parametrize("aggregate", ["per_beam", "mixture"])
def test_a_store_gives_its_hidden_states_with_its_laws(
    options: DistillOptions, aggregate: Aggregate
) -> None:
    data = from_store(replace(options, aggregate=aggregate), LAST)
    for step in (0, 3, 1):
        batch = data.source.batch(step, 0, 1)
        assert isinstance(batch.laws, TopLogprobs)
        near(batch, options)
    assert data.held_out is not None
    near(data.held_out.batch(0, 0, 1), options)


def test_they_are_read_when_a_batch_asks_and_for_no_other(
    options: DistillOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []
    read = FeatureFile.read

    def counted(self: FeatureFile, row: int, many: int) -> torch.Tensor:
        places.append(many)
        return read(self, row, many)

    monkeypatch.setattr(FeatureFile, "read", counted)
    data = from_store(options, LAST)
    assert places == []
    batch = data.source.batch(0, 0, 1)
    assert batch.features_BTS is not None
    assert sum(places) == int(batch.features_BTS.any(-1).sum())


def test_one_that_is_not_a_number_is_named_when_it_is_read(
    options: DistillOptions,
) -> None:
    store = TrajectoryStore.open(options.store[0])
    number, rows = store.shards()[-1], {}
    for row, one in enumerate(store.read(number)):
        assert one.features is not None
        rows[str(row)] = torch.from_numpy(one.features)
    rows["1"][-1, -1] = torch.nan
    rewrite(store, rows, number)
    said = rf"shard {number} of .*, trajectory 1: its hidden states hold NaN"
    data = from_store(options, LAST)
    with pytest.raises(BackendError, match=said):
        every_batch(data)
    data = from_store(replace(options, fitting=FittingConfig(on_bad_shard="skip")), LAST)
    assert data.facts["bad_shards"] == 1
    learnt = data.facts["prompts"] + data.facts["held_out_prompts"]
    assert learnt == len({one.prompt for one in store.read(0)})


def test_a_drafter_that_reads_none_gets_none(options: DistillOptions) -> None:
    data = from_store(options, Signals())
    assert data.source.batch(0, 0, 1).features_BTS is None
    assert data.held_out is not None
    assert data.held_out.batch(0, 0, 1).features_BTS is None


@pytest.mark.parametrize(
    ("kept", "wanted", "said"),
    [
        (LAST, FUSED, r"reads hidden states \(0,0,1\), .* holds last: .*--features 0,0,1,"),
        (Signals(), LAST, r"reads hidden states \(last\), .* holds none: .*--features last,"),
        (Signals(layers=(1, 0)), Signals(layers=(0, 1)), "holds 1,0: collect with --features 0,1"),
        (replace(FUSED, last_hidden=True), FUSED, "holds 0,0,1,last: "),
    ],
)
def test_a_store_with_others_is_refused_with_the_command_to_use(
    options: DistillOptions, target: HFTarget, kept: Signals, wanted: Signals, said: str
) -> None:
    there = TrajectoryStore.open(options.store[0])
    folder = options.store[0].with_name("other")
    other = TrajectoryStore.create(folder, replace(there.header, signals=kept))
    other.write(0, [replace(one, features=None) for one in there.read(0)])
    with pytest.raises(InputError, match=said + ".*--laws teacher"):
        from_store(replace(options, store=(folder,)), wanted)
    # with the target in memory it does not matter what the store holds
    data = from_store(replace(options, store=(folder,)), wanted, target)
    check_as_decoded(target, data.source.batch(0, 0, 1), wanted)


def test_hidden_states_that_a_store_lacks_or_of_another_width_are_named(
    options: DistillOptions,
) -> None:
    there = TrajectoryStore.open(options.store[0])
    change: dict[str, Callable[[Any], Any]] = {
        "lacks": lambda features: None,
        "narrow": lambda features: features[:, 1:],
    }
    said = {
        "lacks": "shard 0 of .*lacks, trajectory 2: .*cannot be read",
        "narrow": f"shard 0 of .*narrow, trajectory 2: .* {WIDTH - 1} wide, .* target {WIDTH}; ",
    }
    for name, changed in change.items():
        folder = options.store[0].with_name(name)
        texts = there.read(0)
        texts[2] = replace(texts[2], features=changed(texts[2].features))
        TrajectoryStore.create(folder, there.header).write(0, texts)
        spoilt = replace(options, store=(folder, *options.store))
        with pytest.raises(BackendError, match=said[name]):
            from_store(spoilt, LAST)
        data = from_store(replace(spoilt, fitting=FittingConfig(on_bad_shard="skip")), LAST)
        assert data.facts["bad_shards"] == 1
        assert data.facts["data"][1:] == from_store(options, LAST).facts["data"]


def test_text_needs_the_target_in_memory(
    options: DistillOptions, target: HFTarget, tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("the dog sat on the mat and the cat saw it " * 20)
    mixed = replace(options, text=(str(tmp_path / "corpus.txt"),), text_share=0.5)
    with pytest.raises(InputError, match=r"--text.*--laws.*teacher"):
        from_store(mixed, LAST)
    batch = from_store(mixed, FUSED, target).source.batch(0, 0, 1)
    assert len(batch.tokens_BT) == 2
    check_as_decoded(target, batch, FUSED)
    assert isinstance(batch.laws, FullLogprobs)
    assert bool((batch.law_ahead(1)[batch.mask_ahead(1)] >= 0).all())
    # a draft model learns the tokens of the text, or the target's logprobs of it
    plain = from_store(mixed, Signals(), target).source.batch(0, 0, 1)
    assert plain.features_BTS is None and plain.law_row_BT is not None
    assert bool((plain.law_row_BT[1] == -1).all())
    heard = from_store(replace(mixed, text_logprobs=True), Signals(), target).source.batch(0, 0, 1)
    assert heard.features_BTS is None and isinstance(heard.laws, FullLogprobs)
    assert torch.equal(heard.tokens_BT, batch.tokens_BT) and heard.law_row_BT is not None
    assert torch.equal(heard.law_row_BT, batch.law_row_BT)
    assert bool((heard.law_row_BT[1] >= 0).any())
    torch.testing.assert_close(heard.laws.hidden_NH, batch.laws.hidden_NH)


def log_q(batch: TrajectoryBatch) -> torch.Tensor:
    """[N, V]: whole logprobs of the places that learn any."""
    assert isinstance(batch.laws, FullLogprobs)
    with torch.no_grad():
        return batch.laws.head(batch.laws.hidden_NH).float().log_softmax(-1)


@pytest.mark.parametrize("held", [False, True], ids=["learnt", "held out"])
def test_stored_states_and_the_targets_head_say_what_the_target_says(
    options: DistillOptions, target: HFTarget, held: bool
) -> None:
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    ends = EmbeddingAndHead.load(options.target, target.config, tokenizer)
    options = replace(options, laws="states")
    data = stored_data(options, tokenizer, VOCAB, None, LAST, ends)
    heard = stored_data(options, tokenizer, VOCAB, target, LAST)
    assert data.facts["top_k"] is None
    for step in range(2):
        one, other = (
            made.held_out.batch(0) if held and made.held_out else made.source.batch(step, 0, 1)
            for made in (data, heard)
        )
        assert one.law_row_BT is not None and other.law_row_BT is not None
        assert torch.equal(one.law_row_BT, other.law_row_BT) and bool((one.law_row_BT >= 0).any())
        torch.testing.assert_close(log_q(one), log_q(other), rtol=0, atol=2e-2)
        assert (log_q(one) - log_q(one)[0]).abs().max() > 0.2  # places differ by far more
        near(one, options)


@pytest.mark.parametrize("source", ["states", "teacher"])
def test_whole_laws_are_cut_as_a_store_would_cut_them(
    options: DistillOptions, target: HFTarget, source: Literal["states", "teacher"]
) -> None:
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    options = replace(options, laws=source)
    ends = EmbeddingAndHead.load(options.target, target.config, tokenizer)
    given = (None, LAST, ends) if source == "states" else (target, LAST)
    whole = stored_data(options, tokenizer, VOCAB, *given).source.batch(0, 0, 1)
    data = stored_data(replace(options, top_k=5), tokenizer, VOCAB, *given)
    assert data.facts["top_k"] == 5
    cut = data.source.batch(0, 0, 1)
    assert isinstance(cut.laws, TopLogprobs) and cut.laws.vocab_size == VOCAB
    best = log_q(whole).topk(5)
    assert torch.equal(cut.laws.ids_NK, best.indices.sort(-1).values)
    torch.testing.assert_close(cut.laws.log_p_NK, log_q(whole).gather(1, cut.laws.ids_NK))
    assert data.held_out is not None
    assert isinstance(data.held_out.batch(0).laws, FullLogprobs)


def test_online_the_target_says_them(
    options: DistillOptions, target: HFTarget, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("the cat\nthe dog\ndef add\nreturn left\n")
    drawn = replace(
        options,
        store=(),
        online=True,
        prompts=tmp_path / "prompts.txt",
        prompts_per_step=2,
        max_new_tokens=6,
        training=replace(options.training, duration="3steps"),
    )
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    data = online_data(drawn, tokenizer, target, FUSED, target, None, None)
    check_as_decoded(target, data.source.batch(0, 0, 1), FUSED)
    assert data.held_out is not None
    check_as_decoded(target, data.held_out.batch(0, 0, 1), FUSED)
