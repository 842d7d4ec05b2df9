"""What an interrupted `pretrain` may continue from: its tokenizer, its phases."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.commands import pretrain
from draftsmith.commands.pretrain import PretrainOptions
from draftsmith.data.text import TextConfig
from draftsmith.distill import callbacks, tokenizer_training
from draftsmith.distill.callbacks import Callback
from draftsmith.distill.config import ArchitectureConfig, ScheduleConfig
from draftsmith.errors import InputError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(8):
        lines = [f"x{line} = y{line * index % 7} + {line * line}" for line in range(40)]
        (folder / f"{index}.py").write_text("\n".join(lines), encoding="utf-8")
    return folder


def options(corpus: Path, out: Path, vocab_size: int = 300, **training: Any) -> PretrainOptions:
    settings = {"duration": "10steps", "block_length": 16, "batch_tokens": 64, "warmup": 1}
    return PretrainOptions(
        data=TextConfig(text=(str(corpus),), hold_out=0.0),
        model=ArchitectureConfig(
            size="tiny", layers=1, heads=2, hidden=16, intermediate=16, vocab_size=vocab_size
        ),
        training=ScheduleConfig(**(settings | training)),
        out=out,
        dtype="float32",
        save_every=100,
    )


def interrupt(chosen: PretrainOptions, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run, and press Ctrl-C after this step: 0 is before the first one, with nothing saved."""

    class Interrupt(Callback):
        def on_start(self, run: Any) -> None:
            if step == 0:
                raise KeyboardInterrupt

        def on_step(self, run: Any, report: Any) -> None:
            if report.step == step:
                signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(callbacks, "ProgressBar", Interrupt)
        with pytest.raises(KeyboardInterrupt):
            pretrain.run(chosen)


# --------------------------------------------------------------------------- the tokenizer


def test_a_tokenizer_from_other_options_is_trained_again_before_the_first_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    kept = out / "work" / "tokenizer"
    interrupt(options(corpus, out, vocab_size=300), 0, monkeypatch)
    first = (kept / "tokenizer.json").read_bytes()
    interrupt(options(corpus, out, vocab_size=280), 0, monkeypatch)
    assert len(AutoTokenizer.from_pretrained(kept)) == 280, "--vocab-size"
    interrupt(options(corpus, out, vocab_size=280, block_length=32), 0, monkeypatch)
    assert AutoTokenizer.from_pretrained(kept).model_max_length == 32, "the context"
    (corpus / "more.py").write_text("while zebra:\n    zebra = zebra.zebra\n" * 200)
    second = (kept / "tokenizer.json").read_bytes()
    pretrain.run(options(corpus, out, vocab_size=280, duration="2steps"))
    last = (out / "tokenizer.json").read_bytes()
    assert len({first, second, last}) == 3 and b"zebra" in last, "--text"


@pytest.mark.parametrize("content", [None, "{half", "[]"])
def test_a_tokenizer_whose_origin_is_unknown_is_trained_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    chosen = options(corpus, tmp_path / "out", duration="2steps")
    kept = tmp_path / "out" / "work" / "tokenizer"
    interrupt(replace(chosen, model=replace(chosen.model, vocab_size=260)), 0, monkeypatch)
    origin = kept / "made_from.json"
    assert json.loads(origin.read_text())["vocab_size"] == 260
    origin.unlink()
    if content is not None:
        origin.write_text(content)
    pretrain.run(chosen)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 300


def test_the_same_tokenizer_is_not_trained_twice(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = options(corpus, tmp_path / "out", duration="2steps")
    interrupt(chosen, 0, monkeypatch)
    monkeypatch.setattr(tokenizer_training, "train_bpe", None)  # calling it would fail
    pretrain.run(chosen)
    assert not (tmp_path / "out" / "made_from.json").exists()


def test_behind_a_checkpoint_other_text_is_refused_and_the_tokenizer_stays(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = options(corpus, tmp_path / "out")
    interrupt(chosen, 4, monkeypatch)
    kept = tmp_path / "out" / "work" / "tokenizer" / "tokenizer.json"
    before = kept.read_bytes()
    with pytest.raises(InputError, match="was made with model"):
        pretrain.run(options(corpus, tmp_path / "out", vocab_size=280))
    (corpus / "more.py").write_text("zebra = zebra\n" * 50)
    with pytest.raises(InputError, match="was made with data"):
        pretrain.run(chosen)
    assert kept.read_bytes() == before
    (corpus / "more.py").unlink()
    pretrain.run(chosen)
    made = json.loads((tmp_path / "out" / "run.json").read_text())["results"]["data"]
    assert made["tokenizer_sha256"] == hashlib.sha256(before).hexdigest()


def test_another_tokenizer_in_the_same_folder_does_not_continue_a_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (300, 301):
        pretrain.run(options(corpus, tmp_path / str(size), vocab_size=size, duration="1steps"))
    shutil.copytree(tmp_path / "300", tmp_path / "target")
    chosen = options(corpus, tmp_path / "out")
    chosen = replace(chosen, model=replace(chosen.model, tokenizer=str(tmp_path / "target")))
    interrupt(chosen, 4, monkeypatch)
    shutil.copy(tmp_path / "301" / "tokenizer.json", tmp_path / "target" / "tokenizer.json")
    with pytest.raises(InputError, match="was made with tokenizer"):
        pretrain.run(chosen)
    shutil.copy(tmp_path / "300" / "tokenizer.json", tmp_path / "target" / "tokenizer.json")
    assert pretrain.run(chosen).steps == 10


# --------------------------------------------------------------------------- phases


def phases(corpus: Path, out: Path, duration: str) -> PretrainOptions:
    """The last five of ten steps have long blocks, and the rate decays in the last one alone."""
    schedule: dict[str, Any] = {"schedule": "stable", "decay_share": 0.1}
    return options(corpus, out, duration=duration, long_block_length=32, long_share=0.5, **schedule)


@pytest.mark.parametrize("duration", ["20steps", "14steps", "9steps"])
def test_a_run_in_its_long_blocks_does_not_go_back_to_short_ones(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, duration: str
) -> None:
    interrupt(phases(corpus, tmp_path / "out", "10steps"), 7, monkeypatch)
    with pytest.raises(InputError, match="long blocks"):
        pretrain.run(phases(corpus, tmp_path / "out", duration))
    assert pretrain.run(phases(corpus, tmp_path / "out", "10steps")).steps == 10


def test_before_the_long_blocks_the_number_of_steps_may_change(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(phases(corpus, tmp_path / "cut", "10steps"), 5, monkeypatch)
    pretrain.run(phases(corpus, tmp_path / "cut", "14steps"))
    pretrain.run(phases(corpus, tmp_path / "whole", "14steps"))
    cut, whole = (tmp_path / name / "model.safetensors" for name in ("cut", "whole"))
    assert cut.read_bytes() == whole.read_bytes()
