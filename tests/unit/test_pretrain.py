"""`pretrain` from text files to a model folder: data, tokenizers, families, subsets, resuming."""

from __future__ import annotations

import errno
import gzip
import json
import lzma
import math
import os
import re
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    OPTConfig,
    Qwen3Config,
)

from draftsmith.cli import parse
from draftsmith.commands import pretrain
from draftsmith.commands.pretrain import PretrainOptions
from draftsmith.config import Duration
from draftsmith.core.types import TrajectoryBatch
from draftsmith.data import text as _text
from draftsmith.data.text import TextConfig
from draftsmith.distill import callbacks, distributed, pretraining, tokenizer_training
from draftsmith.distill.callbacks import Callback
from draftsmith.distill.config import ArchitectureConfig, ScheduleConfig
from draftsmith.distill.distributed import training_folder
from draftsmith.distill.initial_model import build_student, student_config, subclone, subclone_from
from draftsmith.distill.model_sizes import check_memory
from draftsmith.drafters.independent import causal_forward
from draftsmith.errors import BackendError, InputError
from draftsmith.provenance import output_folder
from draftsmith.targets.hf import causal_head

WORDS = "def return self if else for in range ( ) : = + import class None True x y z".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty small files that have something to learn in them."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for index in range(40):
        lines = [
            "    " * int(rng.integers(0, 3)) + " ".join(rng.choice(WORDS[: 5 + line % 15], 6))
            for line in range(20)
        ]
        path = folder / ("sub" if index % 3 else ".") / f"file{index:02d}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines), encoding="utf-8")
    return folder


def options(corpus: Path, out: Path, **training: Any) -> PretrainOptions:
    settings = {
        "duration": "30steps",
        "block_length": 32,
        "batch_tokens": 256,
        "learning_rate": 5e-3,
        "warmup": 5,
    }
    return PretrainOptions(
        data=TextConfig(text=(str(corpus),), hold_out=0.2),
        model=ArchitectureConfig(size="tiny", vocab_size=320),
        training=ScheduleConfig(**(settings | training)),
        out=out,
        dtype="float32",
        save_dtype="float32",
        save_every=10,
    )


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "target"
    pretrain.run(options(corpus, out))
    return out


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def bits_of(folder: Path, texts: list[str]) -> float:
    """Bits per byte, from the definition, token by token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    end = tokenizer.eos_token_id
    stream = [end]
    for text in texts:
        stream += [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(stream) - 1, 31):  # blocks of 32 that overlap by one
            block = torch.tensor([stream[start : start + 32]])
            logits = model(block).logits[0, :-1].double()
            nats -= float(logits.log_softmax(-1).gather(-1, block[0, 1:, None]).sum())
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


# --------------------------------------------------------------------------- the whole run


def test_the_model_folder_is_complete_and_loads_with_transformers(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    wanted = (
        "config.json generation_config.json model.safetensors tokenizer.json run.json README.md"
    )
    assert set(wanted.split()) <= names
    assert not names & {"work"} and not any(name.startswith(".") for name in names)
    model = AutoModelForCausalLM.from_pretrained(trained)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    ids = tokenizer("def x return", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=5, do_sample=False)
    assert out.shape[1] > ids["input_ids"].shape[1]
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


def test_it_learns(trained: Path) -> None:
    results = record(trained)["results"]
    assert results["held_out_loss"] < 0.8 * math.log(320)
    assert results["training_loss"][-1][1] < results["training_loss"][0][1]


def test_bits_per_byte_is_what_the_definition_says(trained: Path, corpus: Path) -> None:
    results = record(trained)["results"]
    names = results["data"]["held_out_files"]
    assert names
    expected = bits_of(trained, [(corpus / name).read_text() for name in names])
    assert results["bits_per_byte"] == pytest.approx(expected, rel=1e-4)


def test_no_absolute_path_is_in_any_file(trained: Path, corpus: Path) -> None:
    for path in trained.iterdir():
        content = path.read_bytes()
        for folder in (trained.parent, corpus, Path.home(), Path(__file__).parents[2]):
            assert str(folder).encode() not in content, path.name


def test_run_json_holds_what_recreates_the_run(trained: Path) -> None:
    run = record(trained)
    assert run["verb"] == "pretrain" and run["options"]["training"]["duration"] == "30steps"
    data = run["results"]["data"]
    assert re.fullmatch("[0-9a-f]{64}", data["train_sha256"])
    assert data["files"] + len(data["held_out_files"]) == 40
    assert run["results"]["attend_across_documents"] is True


def test_a_finished_folder_is_not_overwritten(trained: Path, corpus: Path) -> None:
    before = {path: path.read_bytes() for path in trained.iterdir()}
    (trained / "work/checkpoints").mkdir(parents=True)  # as a kill behind run.json leaves them
    with pytest.raises(InputError, match="already holds a finished model"):
        pretrain.run(options(corpus, trained))
    assert before == {path: path.read_bytes() for path in trained.iterdir()}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_that_no_training_wrote_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=f"holds a model .{name}"), training_folder(tmp_path):
        pytest.fail("it was let in")
    assert {path.name for path in tmp_path.iterdir()} == {name}
    (tmp_path / "work/checkpoints").mkdir(parents=True)  # as a kill before run.json leaves them
    with training_folder(tmp_path):
        pass


@pytest.mark.parametrize("verb", ["tune", "plan law"])
def test_checkpoints_stay_where_another_verb_left_its_results(tmp_path: Path, verb: str) -> None:
    (tmp_path / "work/checkpoints").mkdir(parents=True)
    (tmp_path / "run.json").write_text(json.dumps({"verb": verb}))
    said = f"{tmp_path} already holds the results of `draftsmith {verb}`"
    with pytest.raises(InputError, match=said), training_folder(tmp_path):
        pytest.fail("it was let in")
    assert (tmp_path / "work/checkpoints").is_dir()


def test_a_second_run_into_the_folder_of_a_running_one_changes_nothing(
    trained: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    class Second(Callback):
        def on_step(self, run: Any, report: Any) -> None:
            if report.step == 13:
                before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
                with pytest.raises(InputError, match=str(out)):
                    pretrain.run(options(corpus, out))
                assert all(path.read_bytes() == content for path, content in before.items())

    monkeypatch.setattr(callbacks, "ProgressBar", Second)
    pretrain.run(options(corpus, out))
    mine, other = (load_file(path / "model.safetensors") for path in (out, trained))
    assert all(torch.equal(mine[name], other[name]) for name in other)


def test_a_file_in_place_of_the_checkpoints_is_told_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("mine")
    with pytest.raises(InputError, match="work"), training_folder(tmp_path):
        pytest.fail("it was let in")
    assert (tmp_path / "work").read_text() == "mine"


@pytest.mark.parametrize(
    ("group", "alone"),
    [
        ({"RANK": "1"}, True),  # left over in a shell: there is no group
        ({"WORLD_SIZE": "2", "RANK": "0"}, True),
        ({"WORLD_SIZE": "2", "RANK": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, False),
    ],
)
def test_the_first_process_of_a_group_holds_the_folder_for_all(
    tmp_path: Path, group: dict[str, str], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    refused = pytest.raises(InputError, match=str(tmp_path)) if alone else nullcontext()
    with output_folder(tmp_path), refused, training_folder(tmp_path):
        pass


class Interrupt(Callback):
    def on_step(self, run: Any, report: Any) -> None:
        if report.step == 13:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupted_run_continues_to_bit_equal_weights(
    trained: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(callbacks, "ProgressBar", Interrupt)
        with pytest.raises(KeyboardInterrupt):
            pretrain.run(options(corpus, tmp_path))
    assert not (tmp_path / "model.safetensors").exists()
    pretrain.run(options(corpus, tmp_path))
    mine, other = (
        load_file(tmp_path / "model.safetensors"),
        load_file(trained / "model.safetensors"),
    )
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    ours, theirs = record(tmp_path)["results"], record(trained)["results"]
    assert ours == theirs


def test_other_options_do_not_continue_a_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(callbacks, "ProgressBar", Interrupt)
        with pytest.raises(KeyboardInterrupt):
            pretrain.run(options(corpus, tmp_path))
    with pytest.raises(InputError, match="learning_rate"):
        pretrain.run(options(corpus, tmp_path, learning_rate=1e-3))


@pytest.mark.parametrize("place", ["tokenizer", "model"])
def test_a_full_disk_loses_nothing_and_can_be_continued(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    real = os.replace

    def full(source: Any, target: Any) -> None:
        if place in str(source):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(BackendError, match=r"(?i)no space"):
            pretrain.run(options(corpus, tmp_path, duration="2steps"))
    assert not (tmp_path / "run.json").exists()
    pretrain.run(options(corpus, tmp_path, duration="2steps"))
    assert (tmp_path / "run.json").exists()


def test_long_blocks_and_document_masks_run(corpus: Path, tmp_path: Path) -> None:
    base = options(corpus, tmp_path, duration="4steps", long_block_length=64, long_share=0.5)
    base = replace(base, data=replace(base.data, attend_across_documents=False), dtype="bfloat16")
    result = pretrain.run(base)
    assert result.steps == 4 and result.tokens == 4 * 256
    assert record(tmp_path)["results"]["attend_across_documents"] is False
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 64


def test_parts_of_a_step_without_a_block_are_refused_before_anything_is_read(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 tokens hold two of the long blocks at the end."""
    monkeypatch.setattr(pretraining, "read_data", None)
    divided = options(corpus, tmp_path, long_block_length=128, gradient_accumulation=3)
    with pytest.raises(InputError, match=r"2 blocks of 128\b.*--batch-tokens 256\b"):
        pretrain.run(divided)


def test_long_blocks_that_do_not_fill_a_step_are_refused_before_the_model_is_made(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretraining, "build_student", None)
    with pytest.raises(InputError, match=r"256 .*--long-block-length 96\b"):
        pretrain.run(options(corpus, tmp_path, long_block_length=96))


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"layers": 1000, "hidden": 65536, "heads": 64}, "--hidden 65536"),
        ({"hidden": 2**29}, "--hidden 536870912"),
        ({"intermediate": 10**9}, "--intermediate 1000000000"),
        ({"vocab_size": 10**9}, "--vocab-size 1000000000"),
    ],
)
def test_a_model_that_cannot_fit_into_memory_is_refused_before_anything_is_read(
    change: dict[str, int],
    flag: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pretraining, "read_data", None)
    base = options(corpus, tmp_path)
    with pytest.raises(InputError, match=rf"{flag}\b.* [0-9,]+ bytes"):
        pretrain.run(replace(base, model=replace(base.model, **change)))


def test_a_pass_that_cannot_fit_into_memory_is_refused_before_anything_is_read(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretraining, "read_data", None)
    asked = options(corpus, tmp_path, batch_tokens=10**12)
    with pytest.raises(InputError, match=r"--batch-tokens 10{12} has 10{12} tokens in a pass\b"):
        pretrain.run(asked)


def test_the_bytes_that_are_refused_are_those_of_the_model() -> None:
    """A model of a given number of parameters needs sixteen bytes for each."""
    wanted = ArchitectureConfig(size="tiny", layers=2, vocab_size=400)
    config = student_config(wanted, vocab_size=400, end_id=0, pad_id=0, context=64)
    size = 16 * sum(weight.numel() for weight in build_student(config, seed=0).parameters())
    check_memory(wanted, size)
    with pytest.raises(InputError, match=f"{size:,} bytes"):
        check_memory(wanted, size - 1)
    check_memory(wanted, size // 2, processes=2)
    check_memory(wanted, None)
    with pytest.raises(InputError) as caught:
        check_memory(replace(wanted, tokenizer="target"), 1)  # whose size is not known yet
    assert "--vocab-size" not in str(caught.value)


def test_blocks_longer_than_the_positions_of_a_target_are_refused(tmp_path: Path) -> None:
    family("opt").save_pretrained(tmp_path)
    wanted = ArchitectureConfig(tokenizer=str(tmp_path), layers=1, heads=2, hidden=32)
    sizes = {"vocab_size": 96, "end_id": 1, "pad_id": 1}
    with pytest.raises(InputError, match=r"--block-length.* 9999 tokens .*--context 9999"):
        student_config(wanted, **sizes, context=9999)
    student_config(replace(wanted, context=9999), **sizes, context=9999)


@pytest.mark.parametrize("name", ["nonsense", "tensorbord", "tensorboard,nonsense"])
def test_a_tracker_that_is_none_is_refused_before_anything_is_read(
    name: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretraining, "read_data", None)
    with pytest.raises(InputError, match=r"--report-to: .*tensorboard") as caught:
        pretrain.run(replace(options(corpus, tmp_path), report_to=name))
    assert len(re.findall(r"\ball\b", str(caught.value))) == 1


def test_a_tracker_that_is_not_installed_is_not_left_out(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretraining, "read_data", None)
    monkeypatch.setattr(distributed, "get_available_trackers", list)
    with pytest.raises(InputError, match=r"--report-to tensorboard: .*not installed"):
        pretrain.run(replace(options(corpus, tmp_path), report_to="tensorboard"))


def test_tensorboard_gets_the_figures(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    base = replace(options(corpus, tmp_path, duration="2steps"), report_to="tensorboard")
    pretrain.run(base)
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_the_command_line_gives_these_options(corpus: Path, tmp_path: Path) -> None:
    words = (
        f"--text {corpus} --out {tmp_path} --size tiny --layers 3 --duration 2epochs --init random"
    )
    parsed = parse("pretrain", words.split())
    parsed.validate()
    assert parsed.model.layers == 3 and parsed.data.text == (str(corpus),)
    for wrong, message in [
        ("--layers 0", "--layers"),
        ("--hold-out 1", "--hold-out"),
        ("--init copy", "subclone:TARGET"),
        ("--vocab-subset 10", "needs --tokenizer"),
        ("--learning-rate nan", "--learning-rate"),
        ("--batch-tokens 0", "--batch-tokens"),
        ("--batch-tokens 1024", "--batch-tokens 1024 .*--block-length"),
        ("--context 1", "--context 1 .*--block-length"),
        ("--context 2047", "--context 2047 .*--block-length .* 2048 tokens"),
        ("--long-block-length 4096 --context 2048", "--context 2048 .*--long-block-length"),
        ("--layers 100000", "--layers must be at most"),
        ("--duration 9999999999999999999999999999999999steps", "--duration"),
    ]:
        with pytest.raises(InputError, match=message):
            parse("pretrain", [*words.split(), *wrong.split()]).validate()


# --------------------------------------------------------------------------- a target's drafter


def test_a_drafter_takes_the_targets_tokenizer_and_family(
    trained: Path, corpus: Path, tmp_path: Path
) -> None:
    base = options(corpus, tmp_path, duration="3steps")
    model = ArchitectureConfig(
        tokenizer=str(trained), layers=1, heads=2, hidden=32, intermediate=48, size="tiny"
    )
    pretrain.run(replace(base, model=model))
    target, draft = (AutoTokenizer.from_pretrained(path) for path in (trained, tmp_path))
    assert target.get_vocab() == draft.get_vocab()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"]) == (1, 32)


def test_a_vocabulary_subset_keeps_frequent_and_end_tokens(
    trained: Path, corpus: Path, tmp_path: Path
) -> None:
    base = options(corpus, tmp_path, duration="3steps")
    model = ArchitectureConfig(
        tokenizer=str(trained), vocab_subset=60, layers=1, size="tiny", init=f"subclone:{trained}"
    )
    pretrain.run(replace(base, model=model))
    tensors = load_file(tmp_path / "draft_vocab.safetensors")
    d2t, unknown = tensors["d2t"], int(tensors["unknown"][0])
    end = AutoTokenizer.from_pretrained(trained).eos_token_id
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert d2t.dtype == torch.int64 and d2t.shape == (60,) and end in d2t.tolist()
    assert loaded.config.vocab_size == 60
    assert d2t[loaded.config.eos_token_id] == end and 0 <= unknown < 60
    assert d2t[unknown] != end
    with torch.no_grad():
        assert torch.isfinite(loaded(torch.tensor([[0, 5, 59]])).logits).all()


def test_the_most_frequent_tokens_are_chosen_with_ties_to_smaller_ids() -> None:
    documents = [np.array([5, 5, 2, 2, 7, 3], np.int32), np.array([5, 2, 1], np.int32)]
    counts = tokenizer_training.token_counts(documents, 10)
    assert counts.tolist() == [0, 1, 3, 1, 0, 3, 0, 1, 0, 0]
    assert tokenizer_training.most_frequent(counts, 4, {9}).tolist() == [1, 2, 5, 9]
    subset = tokenizer_training.choose_subset(counts, 4, {9})
    assert subset.ids[subset.unknown] == 1
    mapped = list(tokenizer_training.into_subset(documents, subset.ids, 10))
    assert mapped[0].tolist() == [2, 2, 1, 1, -1, -1]
    for keep in (0, 1, 11):
        with pytest.raises(InputError, match="--vocab-subset"):
            tokenizer_training.most_frequent(counts, keep, {9})


def family(name: str) -> Any:
    size = {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    grouped = {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
    if name == "opt":
        return OPTConfig(ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=64, **size)
    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config, "gemma2": Gemma2Config}[name]
    return kind(**size, **grouped, tie_word_embeddings=name != "llama")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "opt"])
def test_every_family_gives_a_smaller_sister_that_runs(name: str, tmp_path: Path) -> None:
    family(name).save_pretrained(tmp_path)
    wanted = ArchitectureConfig(
        tokenizer=str(tmp_path), layers=2, heads=2, kv_heads=1, hidden=32, intermediate=40
    )
    config = student_config(wanted, vocab_size=96, end_id=1, pad_id=1, context=64)
    model = build_student(config, seed=0).eval()
    assert model.config.num_hidden_layers == 2 and model.config.hidden_size == 32
    assert sum(p.numel() for p in model.parameters()) < 40_000
    batch = TrajectoryBatch(
        tokens_BT=torch.arange(12).view(2, 6), loss_mask_BT=torch.ones(2, 6, dtype=torch.bool)
    )
    with torch.no_grad():
        logits = causal_head(model)(causal_forward(model, batch).hidden_BTH)
        expected = model(batch.tokens_BT).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_first_weights_are_a_function_of_the_seed() -> None:
    config = family("llama")
    first, again, other = (build_student(config, seed) for seed in (0, 0, 1))
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 30, "heads": 4}, "even multiple"),
        ({"heads": 4, "kv_heads": 3, "hidden": 64}, "multiple of --kv-heads"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(change: dict[str, int], message: str) -> None:
    wanted = replace(ArchitectureConfig(), **change)
    with pytest.raises(InputError, match=message):
        student_config(wanted, vocab_size=300, end_id=0, pad_id=0, context=64)


# --------------------------------------------------------------------------- document masks


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("qwen3", "sdpa"),
        ("gemma2", "eager"),
        ("opt", "sdpa"),
        ("opt", "eager"),
    ],
)
def test_packed_documents_are_as_if_each_stood_alone(name: str, attention: str) -> None:
    config = family(name)
    config._attn_implementation = attention
    model = build_student(config, seed=0).eval()
    # block:   document 0 is 5 tokens, document 1 is 4, document 2 is 3
    tokens = torch.randint(0, 96, (1, 12), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3])
    batch = TrajectoryBatch(
        tokens_BT=tokens,
        loss_mask_BT=torch.ones_like(tokens, dtype=torch.bool),
        documents_BT=documents,
    )
    with torch.no_grad():
        packed = causal_forward(model, batch).hidden_BTH[0]
        for start, end in ((0, 5), (5, 9), (9, 12)):
            alone = model.get_decoder()(input_ids=tokens[:, start:end]).last_hidden_state[0]
            torch.testing.assert_close(packed[start:end], alone, rtol=1e-4, atol=1e-4)


def test_positions_restart_with_each_document() -> None:
    documents = torch.tensor([[3, 3, 3, 1, 1, 7], [2, 2, 2, 2, 2, 2]])
    expected = [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    batch = TrajectoryBatch(
        tokens_BT=documents,
        loss_mask_BT=torch.ones_like(documents, dtype=torch.bool),
        documents_BT=documents,
    )
    assert batch.positions_BT.tolist() == expected


# --------------------------------------------------------------------------- subcloning


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "opt"])
def test_a_full_size_subclone_is_the_target(name: str) -> None:
    target = build_student(family(name), seed=0).eval()
    student = build_student(family(name), seed=1).eval()
    subclone_from(target, student)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(student(ids).logits, target(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "opt"])
def test_a_smaller_subclone_is_finite(name: str, tmp_path: Path) -> None:
    target = build_student(family(name), seed=0)
    target.save_pretrained(tmp_path)
    wanted = ArchitectureConfig(
        tokenizer=str(tmp_path), layers=2, heads=2, kv_heads=1, hidden=32, intermediate=40
    )
    config = student_config(wanted, vocab_size=96, end_id=1, pad_id=1, context=64)
    student = build_student(config, seed=1)
    subclone_from(target, student)
    with torch.no_grad():
        assert torch.isfinite(student(torch.arange(10)[None]).logits).all()


def test_a_subclone_of_a_trained_target_starts_better_than_random(
    trained: Path, corpus: Path, tmp_path: Path
) -> None:
    losses = {}
    for init in ("random", f"subclone:{trained}"):
        out = tmp_path / init.split(":")[0]
        model = ArchitectureConfig(
            tokenizer=str(trained), layers=1, heads=2, hidden=48, intermediate=96, init=init
        )
        # One step at a rate of nothing: the first weights are what is measured.
        base = options(
            corpus, out, duration="1steps", learning_rate=1e-12, min_learning_rate=0.0, warmup=0
        )
        result = pretrain.run(replace(base, model=model))
        assert result.loss is not None
        losses[init.split(":")[0]] = result.loss
    assert losses["subclone"] < losses["random"] - 0.2, losses


def test_pickled_weights_are_not_cut_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build_student(family("llama"), seed=0)
    target.config.save_pretrained(tmp_path)
    torch.save(target.state_dict(), tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it is unpickled"))
    with pytest.raises(BackendError, match="safetensors"):
        subclone(str(tmp_path), target)


def test_a_subclone_larger_than_its_target_is_refused() -> None:
    target = build_student(family("llama"), seed=0)
    config = family("llama")
    config.num_hidden_layers = 5
    with pytest.raises(InputError, match="num_hidden_layers 5"):
        subclone_from(target, build_student(config, seed=0))
    with pytest.raises(InputError, match="OPTForCausalLM"):
        subclone_from(build_student(family("opt"), seed=0), target)


# --------------------------------------------------------------------------- text


def test_text_is_read_from_plain_and_compressed_files_and_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("eins")
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("zwei")
    with lzma.open(tmp_path / "c.jsonl.xz", "wt") as file:
        file.write('{"text": "drei"}\n\n{"text": "vier", "x": 1}\n')
    (tmp_path / ".hidden").write_text("no")
    found = _text.find_files([str(tmp_path)])
    assert [file.name for file in found] == ["a.txt", "b.txt.gz", "c.jsonl.xz"]
    assert list(_text.documents(found)) == ["eins", "zwei", "drei", "vier"]
    assert [f.name for f in _text.find_files([str(tmp_path / "*.txt*")])] == ["a.txt", "b.txt.gz"]
    assert [f.name for f in _text.find_files([str(tmp_path)], exclude=["*.gz"])] == [
        "a.txt",
        "c.jsonl.xz",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.txt", b"\xff\xfe\xfa", r"bad\.txt is not UTF-8"),
        ("bad.gz", b"no gzip", r"bad\.gz: damaged"),
        ("bad.gz", b"\x1f\x8b\x08" + b"\0" * 7 + b"\xff" * 9, r"bad\.gz: damaged"),
        ("bad.xz", b"no xz", r"bad\.xz: damaged"),
        ("bad.jsonl", b'{"text": "a"}\n{oops\n', r"bad\.jsonl, line 2"),
        ("bad.jsonl", b'{"body": "a"}\n', r"bad\.jsonl, line 1"),
        ("bad.jsonl", b'{"text": 3}\n', r"line 1: is not a text in the field `text`"),
    ],
)
def test_text_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(_text.documents(_text.find_files([str(tmp_path / name)])))


def test_text_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        _text.find_files([str(tmp_path / "nowhere")])
    with pytest.raises(InputError, match="no file"):
        _text.find_files([str(tmp_path)], include=["*.py"])


def test_the_standard_library_has_a_name_that_is_the_same_on_every_machine() -> None:
    found = _text.find_files(["python:stdlib"], include=["json/*.py"])
    assert "json/decoder.py" in [file.name for file in found]


def test_holding_out_depends_on_names_alone(corpus: Path) -> None:
    files = _text.find_files([str(corpus)])
    kept, held = _text.hold_out(files, 0.3)
    assert {f.name for f in kept} | {f.name for f in held} == {f.name for f in files}
    assert 0 < len(held) < 24
    fewer = _text.hold_out(files[::2], 0.3)[1]
    assert {f.name for f in fewer} == {f.name for f in held} & {f.name for f in files[::2]}


@pytest.mark.parametrize("content", ["", "{", '{"model": 5}'])
def test_a_damaged_tokenizer_of_an_interrupted_run_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BackendError, match=f"the tokenizer in {tmp_path}"):
        tokenizer_training.kept(tmp_path)


def test_a_trained_tokenizer_gives_every_text_back() -> None:
    tokenizer = tokenizer_training.train_bpe(["def f(x): return x", "äöü 日本"], 300, 64)
    for text in ("def g(y):\n\treturn y  # ok", "日本語 \x00\x7f ñ", " leading and trailing "):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("20steps", 20),
        ("1 step", 1),
        ("3epochs", 30),
        ("0.55 epochs", 6),
        ("5000tokens", 5),
        ("5ktokens", 5),
        ("0.0051Mtokens", 6),
    ],
)
def test_durations(text: str, steps: int) -> None:
    assert Duration.parse(text).steps(tokens_per_step=1000, steps_per_epoch=10) == steps


@pytest.mark.parametrize("text", ["", "5", "steps", "-3steps", "0steps", "5minutes", "1e3steps"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="duration"):
        Duration.parse(text)
