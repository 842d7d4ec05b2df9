"""A write that the system refuses: known whoever reports it, and what was there is there again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.distill import checkpoint as checkpoints
from draftsmith.distill.checkpoint import Checkpoint
from draftsmith.distill.tokenizer_training import train_bpe
from draftsmith.errors import BackendError, InputError
from draftsmith.provenance import atomic_path, is_write_failure, start_run

WRAPPED = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
    SafetensorError(
        'Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "x" })'
    ),
    Exception("No space left on device (os error 28)"),  # what tokenizers makes of it
    Exception("File too large (os error 27)"),
    Exception("Disk quota exceeded (os error 122)"),
]


def test_refused_writes_are_known_whoever_reports_them() -> None:
    assert all(is_write_failure(error) for error in WRAPPED)
    assert is_write_failure(PermissionError(errno.EACCES, "no"))
    assert is_write_failure(SafetensorError("anything"))
    for other in (Exception("os error 1228"), ValueError("os error 2"), ZeroDivisionError()):
        assert not is_write_failure(other)


@pytest.mark.parametrize("error", WRAPPED, ids=str)
def test_an_atomic_write_says_what_a_library_wrapped(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "model"
    path.write_text("old")

    def write() -> None:
        with atomic_path(path) as part:
            part.write_text("half")
            raise error

    with pytest.raises(BackendError, match=r"model.*no space") as caught:
        write()
    assert caught.value.__cause__ is error
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["model"]


def test_a_wrapped_error_that_is_not_a_full_disk_keeps_its_reason(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_path(tmp_path / "model"):
            raise SafetensorError("I/O error: Permission denied (os error 13)")

    with pytest.raises(InputError, match=r"cannot write .*model: Permission denied$"):
        write()


# --------------------------------------------------------------------------- the finished model


RESULTS: dict[str, Any] = {"bits_per_byte": None, "parameters": 1, "tokens": 1, "steps": 1}


def write_model(out: Path) -> None:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    tokenizer = train_bpe(["a b c"], 300, 64)
    record = start_run("pretrain", {})
    model = LlamaForCausalLM(config)
    with checkpoints.finished_folder(out, record, RESULTS, "# A model") as folder:
        checkpoints.save_model(folder, model, tokenizer, None, "float32")


@pytest.mark.parametrize("error", WRAPPED, ids=str)
@pytest.mark.parametrize("place", ["model", "tokenizer", "run.json"])
def test_a_model_that_cannot_be_written_leaves_the_checkpoint_and_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise error

    out = tmp_path / "out"
    out.mkdir()
    with monkeypatch.context() as patch:
        if place == "model":
            patch.setattr(LlamaForCausalLM, "save_pretrained", refuse)
        elif place == "tokenizer":
            patch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", refuse)
        else:
            patch.setattr("draftsmith.provenance._sync", refuse)
        with pytest.raises(BackendError, match="checkpoint is kept") as caught:
            write_model(out)
    text = str(caught.value)
    assert "half-written" in text and "\n" not in text and "os error" not in text
    assert not (out / "run.json").exists()
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    write_model(out)
    assert (out / "run.json").exists()


def test_a_mistake_that_is_no_failed_write_is_not_called_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **options: Any) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", wrong)
    with pytest.raises(ValueError, match="a mistake of ours"):
        write_model(tmp_path)


# --------------------------------------------------------------------------- checkpoints


def make(step: int, value: float) -> Checkpoint:
    weights = {"w": torch.full((3,), value)}
    return Checkpoint(step=step, weights=weights, optimizer={}, state={})


@pytest.mark.parametrize("error", WRAPPED, ids=str)
def test_a_checkpoint_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise error

    def room(folder: Path) -> int:
        assert list(folder.iterdir()), "what was written of the checkpoint still takes room"
        return 1234

    monkeypatch.setattr(checkpoints, "save_file", refuse)
    monkeypatch.setattr(checkpoints, "free_bytes", room)
    said = r"\(1,234 bytes are free on its disk\); earlier checkpoints are untouched"
    with pytest.raises(BackendError, match=said):
        checkpoints.save(tmp_path, make(1, 1.0), keep=1)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_gone_does_not_hide_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **options: Any) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(checkpoints, "save_file", gone)
    monkeypatch.setattr(checkpoints, "free_bytes", gone)
    said = "the disk is gone; earlier checkpoints are untouched"
    with pytest.raises(BackendError, match=said):
        checkpoints.save(tmp_path, make(1, 1.0), keep=1)
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------- folders


def fail_at(number: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[str]:
    """Let the number-th os.replace raise; the others do their work."""
    real = os.replace
    calls: list[str] = []

    def replace(source: Any, target: Any) -> None:
        calls.append(Path(target).name)
        if len(calls) == number:
            raise error
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    return calls


FAILURES = [OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt()]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("error", FAILURES, ids=["error", "interrupt"])
def test_a_folder_that_cannot_be_replaced_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "old").write_text("old")

    def write() -> None:
        with atomic_path(path) as part:
            part.mkdir()
            (part / "new").write_text("new")

    with monkeypatch.context() as patch:
        fail_at(number, patch, error)
        with pytest.raises((InputError, KeyboardInterrupt)):
            write()
    assert os.listdir(tmp_path) == ["model"] and os.listdir(path) == ["old"]
    write()
    assert os.listdir(tmp_path) == ["model"] and os.listdir(path) == ["new"]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("error", FAILURES, ids=["error", "interrupt"])
def test_a_checkpoint_that_cannot_be_replaced_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
) -> None:
    path = checkpoints.save(tmp_path, make(5, 1.0), keep=1)
    with monkeypatch.context() as patch:
        fail_at(number, patch, error)
        with pytest.raises((BackendError, KeyboardInterrupt)):
            checkpoints.save(tmp_path, make(5, 2.0), keep=1)
    assert checkpoints.latest(tmp_path) == path
    assert checkpoints.load(path).weights["w"][0] == 1.0
    assert not list(tmp_path.glob(".*"))
    checkpoints.save(tmp_path, make(5, 3.0), keep=1)
    assert checkpoints.load(path).weights["w"][0] == 3.0
    assert os.listdir(tmp_path) == [path.name]
