"""Packed weights are kept from load to load: equal bit for bit, and never another model's."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_models import tiny_model, tiny_tokenizer

from draftsmith.core.cache import lay_out
from draftsmith.core.types import Signals
from draftsmith.provenance import fresh_beside
from draftsmith.targets import hf
from draftsmith.targets.gguf import StoredBlocks
from draftsmith.targets.hf import load_target
from draftsmith.targets.native import engine as engines
from draftsmith.targets.native import packed
from draftsmith.targets.native.bindings import compiler
from draftsmith.targets.native.engine import engine_of
from draftsmith.targets.native.weights import pack, usable_library

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that the engine runs, and a cache of its own that keeps small ones, too."""
    native = packed.cache_folder("native")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache/draftsmith").mkdir(parents=True)
    if native.is_dir():
        (tmp_path / "cache/draftsmith/native").symlink_to(native)
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    tiny_model(hidden=128).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats that were converted to, matrix by matrix."""
    found: list[str] = []
    pack = engines.pack

    def noted(library: Any, weight: Any, form: str, bias: Any = None) -> Any:
        found.append(form)
        return pack(library, weight, form, bias)

    monkeypatch.setattr(engines, "pack", noted)
    return found


def files() -> list[Path]:
    return sorted(packed.packed_folder().glob("*"))


def logits(folder: Path, weights: str = "auto") -> torch.Tensor:
    target = load_target(str(folder), weights=weights, check=False)
    assert engine_of(target) is not None, target.not_compiled
    cache = target.new_cache(1, 16)
    tokens, block = lay_out(cache, [list(range(3, 12))])
    return target.forward(torch.from_numpy(tokens), block, 9, Signals()).logits_BNV


@pytest.mark.parametrize("weights", ["auto", "bf16", "w8a8", "int8", "int4"])
def test_the_second_load_converts_nothing_and_computes_the_same(
    weights: str, folder: Path, converted: list[str]
) -> None:
    first = logits(folder, weights)
    assert converted and len(files()) == 1
    converted.clear()
    second = logits(folder, weights)
    assert not converted
    assert torch.equal(first, second)


def test_biases_are_kept_too(tmp_path: Path, folder: Path, converted: list[str]) -> None:
    model = tiny_model(hidden=128)
    model.config.attention_bias = True
    biased = type(model)(model.config)
    with torch.no_grad():
        for layer in biased.model.layers:
            layer.self_attn.q_proj.bias.normal_()
    biased.save_pretrained(folder)
    first = logits(folder)
    converted.clear()
    assert torch.equal(logits(folder), first) and not converted


def test_each_format_and_each_version_of_a_model_has_a_file_of_its_own(
    folder: Path, converted: list[str]
) -> None:
    first = logits(folder, "int8")
    logits(folder, "int4")
    assert len(files()) == 2
    tiny_model(seed=7, hidden=128).save_pretrained(folder)  # same size, other weights
    converted.clear()
    assert not torch.equal(logits(folder, "int8"), first)
    assert converted and len(files()) == 3


def test_a_copy_that_keeps_size_and_time_is_another_version(
    folder: Path, converted: list[str]
) -> None:
    logits(folder)
    (file,) = folder.glob("*.safetensors")
    known = file.stat()
    tiny_model(seed=7, hidden=128).save_pretrained(folder)
    assert file.stat().st_size == known.st_size
    os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))
    converted.clear()
    logits(folder)
    assert converted


def test_a_file_that_is_replaced_while_it_is_read_keeps_nothing_for_the_new_one(
    folder: Path, converted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = hf.load_model

    def replaced(*args: Any, **options: Any) -> Any:
        model = load(*args, **options)
        tiny_model(seed=7, hidden=128).save_pretrained(folder)
        return model

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(hf, "load_model", replaced)
        old = logits(folder)
    converted.clear()
    assert not torch.equal(logits(folder), old)
    assert converted


def test_a_change_of_the_code_or_of_the_processor_is_another_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, some = usable_library(), packed.versions_of(sorted(folder.glob("*.safetensors")))

    def path() -> Path:
        return packed.PackedFile.of(some, "int8", "torch.float32", library).path

    found = {path()}
    monkeypatch.setattr(packed, "_code", lambda: "other")
    found.add(path())
    monkeypatch.setattr(library, "instructions", "other")
    found.add(path())
    assert len(found) == 3


@pytest.mark.parametrize("part", [StoredBlocks, engines.Engine, packed.PackedFile, pack])
def test_all_code_that_converts_is_in_the_key(part: Any) -> None:
    """Blocks of a GGUF file are decoded elsewhere than other weights."""
    here = Path(packed.__file__).parent
    assert Path(inspect.getfile(part)).resolve() in {
        (here / name).resolve() for name in packed._CODE
    }


def cut(content: bytes) -> bytes:
    return content[:-200]


def empty(content: bytes) -> bytes:
    return b""


def of_zeros(content: bytes) -> bytes:
    return bytes(len(content))


def flipped(at: float) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        array = np.frombuffer(content, dtype=np.uint8).copy()
        array[int(at * len(array))] ^= 1
        return array.tobytes()

    return flip


@pytest.mark.parametrize(
    "damage",
    [cut, empty, of_zeros, flipped(0.0), flipped(0.001), flipped(0.5)],
    ids=["cut", "empty", "zeros", "length", "header", "numbers"],
)
def test_a_damaged_file_is_told_and_made_again(
    damage: Callable[[bytes], bytes],
    folder: Path,
    converted: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = logits(folder)
    (file,) = files()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    converted.clear()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(folder), first)
    assert converted
    assert file.name in caplog.text and "converted again" in caplog.text
    assert file.read_bytes() == whole


def test_a_file_of_something_else_under_this_name_is_not_used(
    folder: Path, converted: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    logits(folder, "int4")
    (other,) = files()
    first = logits(folder, "int8")
    (own,) = set(files()) - {other}
    own.write_bytes(other.read_bytes())
    converted.clear()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(folder, "int8"), first)
    assert converted and "belongs to something else" in caplog.text


def test_an_unwritable_folder_keeps_nothing_and_stops_nothing(
    folder: Path, converted: list[str]
) -> None:
    packed.packed_folder().write_text("a file where the folder should be")
    first = logits(folder)
    converted.clear()
    assert torch.equal(logits(folder), first) and converted


def test_a_file_of_somebody_else_stops_nothing(
    folder: Path,
    converted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = logits(folder)
    converted.clear()
    kept, opened, exists = files()[0], Path.open, Path.exists

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def refused(path: Path, *given: Any, **named: Any) -> Any:
            if path == kept:
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *given, **named)

        return refused

    monkeypatch.setattr(Path, "open", refusing(opened))
    monkeypatch.setattr(Path, "exists", refusing(exists))
    assert torch.equal(logits(folder), first) and converted
    assert "cannot be read: the weights are converted again" in caplog.text


def test_the_files_used_longest_ago_make_room(
    folder: Path, converted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for weights in ("int8", "w8a8"):
        logits(folder, weights)
    for file in files():
        os.utime(file, ns=(1, 1) if file == files()[0] else (2, 2))
    oldest, newer = sorted(files(), key=lambda file: file.stat().st_mtime_ns)
    sizes = sum(file.stat().st_size for file in files())
    monkeypatch.setattr(packed, "MOST_BYTES", sizes)
    assert packed.make_room(packed.packed_folder(), oldest.stat().st_size // 2)
    assert files() == [newer]
    assert not packed.make_room(packed.packed_folder(), sizes + 1), "it would never fit"
    assert files() == [newer]


def test_what_a_killed_writer_left_goes_with_the_next_file(folder: Path) -> None:
    left = fresh_beside(packed.packed_folder() / "x.bin")
    left.parent.mkdir()
    left.write_bytes(b"half")
    logits(folder)
    assert len(files()) == 1 and not left.exists()


def test_a_file_that_is_used_is_the_last_to_go(folder: Path) -> None:
    logits(folder)
    (file,) = files()
    os.utime(file, ns=(1, 1))
    logits(folder)
    assert file.stat().st_mtime_ns > 1


def test_small_models_and_models_in_memory_are_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert packed.LEAST_BYTES > 1 << 20
    library = usable_library()
    file = packed.PackedFile(path=folder / "x.bin", key="x")
    model = tiny_model(hidden=128)
    file.store(engines.Engine(model, "bfloat16")._matrices)
    assert not file.path.exists() and library is usable_library()
