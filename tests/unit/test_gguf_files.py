"""GGUF files as targets: what is unpacked, when it is unpacked again, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.core.cache import lay_out
from draftsmith.core.types import Signals
from draftsmith.errors import BackendError
from draftsmith.provenance import fresh_beside
from draftsmith.targets import gguf as files
from draftsmith.targets.hf import load_target, load_tokenizer
from draftsmith.targets.native.library import compiler


@pytest.fixture
def unpackings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that were unpacked, into folders with a configuration alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done: list[bytes] = []

    def unpack(file: Path, folder: Path) -> None:
        done.append(file.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(files, "_unpack", unpack)
    return done


def test_a_file_is_unpacked_once(unpackings: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"x")
    first = files.unpacked(tmp_path / "a.gguf")
    assert files.unpacked(tmp_path / "a.gguf") == first
    assert files.checkpoint(str(tmp_path / "a.gguf")) == str(first)
    assert unpackings == [b"x"]


def test_a_file_that_differs_behind_its_beginning_is_another_one(
    unpackings: list[bytes], tmp_path: Path
) -> None:
    """A model that went on learning has its old name, size, header and tokenizer."""
    before, after = bytes(2 << 20), bytes((2 << 20) - 1) + b"x"
    (tmp_path / "a.gguf").write_bytes(before)
    first = files.unpacked(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(after)
    assert files.unpacked(tmp_path / "a.gguf") != first
    assert unpackings == [before, after]


def test_what_a_killed_process_left_is_removed_and_a_broken_folder_replaced(
    unpackings: list[bytes], tmp_path: Path
) -> None:
    (tmp_path / "a.gguf").write_bytes(b"x")
    folder = files.unpacked(tmp_path / "a.gguf")
    left = fresh_beside(folder)
    left.mkdir()
    (folder / "config.json").rename(folder / "weights")
    assert files.unpacked(tmp_path / "a.gguf") == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_without_a_cache_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"x")
    program = (
        "import pathlib, draftsmith.targets.gguf as files\n"
        "files._unpack = lambda file, folder: (folder / 'config.json').write_text('{}')\n"
        "print((files.unpacked(pathlib.Path('a.gguf')) / 'config.json').is_file())\n"
        "print(*pathlib.Path('.').glob('draftsmith-*'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "TMPDIR": str(tmp_path)}
        | {"XDG_CACHE_HOME": "/dev/null"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("True\ndraftsmith-"), done
    assert not list(tmp_path.glob("draftsmith-*"))


def test_a_module_without_a_specification_is_no_package_with_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `__main__` is."""
    monkeypatch.setitem(sys.modules, "bare_module", types.ModuleType("bare_module"))
    assert files.gguf_file("bare-module") is None


# ------------------------------------------------------------------------- real files


def write(path: Path, *, without: str = "nothing", kind: str = "F32") -> None:
    """A model of two layers, without the tensors that have `without` in their names; matrices of
    the layers are of this kind."""
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = ["<|end|>", *sorted(ByteLevel.alphabet()), "zz"]
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (
        *[("context_length", 64), ("embedding_length", 64), ("block_count", 2)],
        *[("feed_forward_length", 96), ("head_count", 2), ("head_count_kv", 2)],
        *[("layer_norm_rms_eps", 1e-5), ("rope_freq_base", 1e4), ("rope_dimension_count", 32)],
        *[("vocab_size", len(vocabulary)), ("tokenizer_model", "gpt2")],
        *[("tokenizer_pre", "smollm"), ("token_list", vocabulary), ("token_merges", ["z z"])],
        *[("token_types", [3] + [1] * (len(vocabulary) - 1))],
        *[("bos_token_id", 0), ("eos_token_id", 0)],
    ):
        getattr(writer, f"add_{name}")(value)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(vocabulary), 64),
        "output_norm": (64,),
    }
    for layer in range(2):
        parts = ("attn_q", "attn_k", "attn_v", "attn_output")
        shapes |= {f"blk.{layer}.{part}": (64, 64) for part in parts}
        shapes |= {f"blk.{layer}.{part}": (96, 64) for part in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.ffn_down": (64, 96)}
        shapes |= {f"blk.{layer}.{part}": (64,) for part in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        if without not in name:
            values = draw.standard_normal(shape, np.float32)
            packed = len(shape) == 2 and name.startswith("blk")
            which = gguf.GGMLQuantizationType[kind if packed else "F32"]
            data = gguf.quants.quantize(values, which)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=which)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("without", ["ffn_up", "blk.1"])
def test_a_file_that_lacks_weights_is_refused_and_not_kept(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would fill them with noise."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "a.gguf", without=without)
    for _ in range(2):
        with pytest.raises(BackendError, match=r"weights are missing .*model\.layers"):
            load_target(str(tmp_path / "a.gguf"))
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_a_tokenizer_comes_out_of_a_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "a.gguf")
    assert load_tokenizer(str(tmp_path / "a.gguf")).decode([258 - 1]) == "zz"
    assert load_target(tmp_path / "a.gguf").vocab_size == 258


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(("kind", "quantised"), [("Q4_1", True), ("Q8_0", True), ("F32", False)])
def test_the_blocks_of_a_file_are_what_is_computed_with(
    kind: str, quantised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other matrices are bfloat16; without the engine all are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "a.gguf", kind=kind)
    target = load_target(tmp_path / "a.gguf")
    assert target.engine.endswith("stored weights)")
    assert target.quantised == quantised
    logits = [
        one.forward(torch.from_numpy(tokens), block, 3, Signals()).logits_BNV.float()
        for one in (target, target.unquantised())
        for tokens, block in [lay_out(one.new_cache(1, 64), [[5, 9, 7]])]
    ]
    error = (logits[0] - logits[1]).std() / logits[1].std()
    assert 0 < error < 0.1, "rounded activations, and no other model"
