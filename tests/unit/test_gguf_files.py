"""GGUF files as targets: what is unpacked, when it is unpacked again, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from draftsmith.core.cache import lay_out
from draftsmith.core.types import Signals
from draftsmith.errors import BackendError
from draftsmith.provenance import fresh_beside
from draftsmith.targets import gguf as files
from draftsmith.targets.hf import load_target, load_tokenizer
from draftsmith.targets.native.bindings import compiler


@pytest.fixture
def unpackings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that were unpacked, into folders with a configuration alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done: list[bytes] = []

    def unpack(file: Path, folder: Path) -> None:
        done.append(file.read_bytes())
        (folder / "config.json").write_text("{}")
        (folder / files.INDEX).write_text(json.dumps({"digest": files._checked({})}))

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
    (folder / files.INDEX).unlink()
    left = fresh_beside(folder)
    left.mkdir()
    (folder / "config.json").rename(folder / "weights")
    assert files.unpacked(tmp_path / "a.gguf") == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert sorted(path.name for path in folder.iterdir()) == [files.INDEX, "config.json"]


def test_without_a_cache_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"x")
    program = (
        "import pathlib, draftsmith.targets.gguf as files\n"
        "files._is_whole = lambda folder: (folder / 'config.json').is_file()\n"
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


def write(
    path: Path,
    *,
    without: str = "nothing",
    kind: str = "F32",
    block_count: int = 2,
    tensors: Mapping[str, np.ndarray] = MappingProxyType({}),
    about: Mapping[str, object] = MappingProxyType({}),
    **said: int,
) -> None:
    """A model of two layers, without the tensors that have `without` in their names; matrices of
    the layers are of this kind. `tensors` and `about` (keys behind `llama.`) are added; `said` is
    what the file says of itself in place of what is so."""
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = ["<|end|>", *sorted(ByteLevel.alphabet()), "zz"]
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (
        *[("context_length", 64), ("embedding_length", 64), ("block_count", block_count)],
        *[("feed_forward_length", 96), ("head_count", 2), ("head_count_kv", 2)],
        *[("layer_norm_rms_eps", 1e-5), ("rope_freq_base", 1e4), ("rope_dimension_count", 32)],
        *[("vocab_size", len(vocabulary)), ("tokenizer_model", "gpt2")],
        *[("tokenizer_pre", "smollm"), ("token_list", vocabulary), ("token_merges", ["z z"])],
        *[("token_types", [3] + [1] * (len(vocabulary) - 1))],
        *[("bos_token_id", 0), ("eos_token_id", 0)],
    ):
        getattr(writer, f"add_{name}")(said.get(name, value))
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
    for name, more in tensors.items():
        writer.add_tensor(name, more)
    for key, value in about.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](f"llama.{key}", value)
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
        with pytest.raises(BackendError, match=r"weights are missing .*model\.layers|has 2 layers"):
            load_target(str(tmp_path / "a.gguf"))
    assert not list((tmp_path / "cache").rglob("config.json"))


@pytest.mark.parametrize(
    "name", ["embedding_length", "feed_forward_length", "vocab_size", "rope_dimension_count"]
)
def test_no_memory_is_taken_for_sizes_that_a_file_does_not_have(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "a.gguf", **{name: 2**20})
    said = f"{name.replace('rope_', 'rope.')} is 1048576, and no side of a tensor"
    with pytest.raises(BackendError, match=said):
        load_target(str(tmp_path / "a.gguf"))


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


# ------------------------------------------------------------------------- what it says of itself


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def llama3_factors(width: int, factor: float) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3.1: by what each frequency is divided."""
    out = []
    for i in range(0, width, 2):
        length = 2 * np.pi * 1e4 ** (i / width)
        if length < 8192 / 4:
            out.append(1.0)
        elif length > 8192:
            out.append(factor)
        else:
            smooth = (8192 / length - 1) / (4 - 1)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_frequencies_of_llama_3_are_taken_over(
    factor: float, tmp_path: Path, cache: Path
) -> None:
    freqs = llama3_factors(32, factor)
    assert len(set(freqs.tolist())) > 2, "some lie between the bounds"
    write(tmp_path / "a.gguf", tensors={files.ROPE_FREQS: freqs})
    rope = load_target(tmp_path / "a.gguf").config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("llama3", factor)
    assert rope["original_max_position_embeddings"] == 8192


@pytest.mark.parametrize(
    ("about", "wanted"),
    [
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
    ],
)
def test_scaled_positions_are_taken_over(
    about: dict[str, object], wanted: dict[str, object], tmp_path: Path, cache: Path
) -> None:
    write(tmp_path / "a.gguf", about=about)
    rope = load_target(tmp_path / "a.gguf").config.rope_parameters
    assert {key: rope[key] for key in wanted} == wanted and rope["rope_theta"] == 1e4


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({"tensors": {files.ROPE_FREQS: np.full(16, 3, np.float32)}}, "scales its positions"),
        (
            {
                "about": {
                    "rope.scaling.type": "yarn",
                    "rope.scaling.factor": 4.0,
                    "rope.scaling.original_context_length": 32,
                    "rope.scaling.yarn_log_multiplier": 0.1,
                }
            },
            r"positions .*yarn_log_multiplier",
        ),
        ({"about": {"rope.scaling.type": "longrope"}}, r"positions .*longrope"),
        ({"about": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}}, r"positions .*yarn"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, r"blk\.0\.attn_q\.bias"),
        ({"tensors": {"blk.2.ffn_up.weight": np.ones((96, 64), np.float32)}}, "of 3: it is dam"),
        ({"block_count": 1}, "has 1 layers"),
        ({"block_count": 10_000_000}, "has 10000000 layers"),
    ],
)
def test_what_would_be_another_model_is_refused(
    how: dict[str, Any], wanted: str, tmp_path: Path, cache: Path
) -> None:
    write(tmp_path / "a.gguf", **how)
    with pytest.raises(BackendError, match=wanted):
        load_target(tmp_path / "a.gguf")
    assert not list(cache.rglob("config.json"))


@pytest.mark.parametrize("damage", ["cut", "a list without end"])
def test_a_file_that_names_what_lies_behind_its_end_is_refused_at_once(
    damage: str, tmp_path: Path, cache: Path
) -> None:
    """A list that is said to have 2^40 entries would be read for days."""
    file = tmp_path / "a.gguf"
    write(file)
    whole = file.read_bytes()
    at = whole.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    endless = whole[:at] + (1 << 40).to_bytes(8, "little") + whole[at + 8 :]
    file.write_bytes(whole[:-5] if damage == "cut" else endless)
    with pytest.raises(BackendError, match=r"a\.gguf' is cut or damaged"):
        load_target(file)


def test_a_full_disk_is_said_of_the_cache_and_not_of_the_file(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    write(tmp_path / "a.gguf")
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(BackendError, match=r"cannot write \S+/gguf: no space is left on the disk"):
        load_target(tmp_path / "a.gguf")
    assert not list(cache.rglob("config.json"))


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"digest": 1}', "cut", "an offset"])
def test_a_damaged_index_is_made_again(damage: str, tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "a.gguf", kind="Q4_1")
    index = files.unpacked(tmp_path / "a.gguf") / files.INDEX
    whole = index.read_text()
    damaged = {"cut": whole[:-30], "an offset": whole.replace('"offset": ', '"offset": 9')}
    index.write_text(damaged.get(damage, damage))
    assert load_target(tmp_path / "a.gguf").quantised == (compiler() is not None)
    assert index.read_text() == whole
