"""Models that are not what they should be, made from the old target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig


def changed(folder: Path, name: str, source: str, edit: Callable[[Path], None]) -> None:
    """`folder/name` is a copy of `folder/source`, edited."""
    shutil.copytree(folder / source, folder / name)
    edit(folder / name)


def with_json(file: str, **values: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = json.loads((path / file).read_text(encoding="utf-8"))
        (path / file).write_text(json.dumps(content | values), encoding="utf-8")

    return edit


def with_weights(edit: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        (file,) = path.glob("*.safetensors")
        weights = {
            name: edit(name, tensor).contiguous() for name, tensor in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})

    return apply


def with_other_tokens(path: Path) -> None:
    """The same number of tokens, two of them in each other's place."""
    content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def with_code(path: Path) -> None:
    """A model that brings Python code along, which says that it was run."""
    with_json(
        "config.json",
        model_type="own-code",
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    )(path)
    code = "from pathlib import Path\nPath('RAN').touch()\nraise ImportError('it was run')\n"
    (path / "own.py").write_text(code.replace("RAN", str(path / "it-was-run")), encoding="utf-8")


class Executes:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path / "it-was-run",)


def with_pickle(path: Path) -> None:
    """Weights in a pickle that runs code."""
    for file in path.glob("*.safetensors"):
        file.unlink()
    torch.save({"weight": Executes(path)}, path / "pytorch_model.bin")


def with_half_of(pattern: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = sorted(path.rglob(pattern))[0]
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])

    return edit


def save_wide(folder: Path) -> None:
    """A target with the same tokens and wider states."""
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "wide")
    AutoTokenizer.from_pretrained(folder / "target").save_pretrained(folder / "wide")


def add_others(folder: Path) -> None:
    """Beside the old target: models, drafters, stores and runs that commands refuse."""
    save_wide(folder)
    scaled = with_weights(lambda name, tensor: tensor * 1.5)
    changed(folder, "other", "target", scaled)
    changed(folder, "retold", "target", with_other_tokens)
    changed(folder, "nan", "target", with_weights(lambda name, tensor: tensor * float("nan")))
    changed(folder, "cut", "target", with_half_of("model.safetensors"))
    changed(folder, "code", "target", with_code)
    changed(folder, "encoder", "target", with_json("config.json", model_type="t5"))
    changed(folder, "rope", "target", with_json("config.json", rope_scaling=DYNAMIC))
    changed(folder, "untold", "target", lambda path: (path / "tokenizer.json").unlink())
    changed(folder, "nan-eagle", "drafters/eagle", with_weights(lambda n, t: t * float("nan")))
    changed(folder, "cut-eagle", "drafters/eagle", with_half_of("model.safetensors"))
    changed(folder, "pickled-eagle", "drafters/eagle", with_pickle)
    changed(folder, "odd-eagle", "drafters/eagle", with_json("config.json", hidden_act="relu"))
    changed(folder, "new-kind", "drafters/eagle", with_json("drafter.json", kind="eagle9"))
    changed(folder, "cut-store", "stores/samples", with_half_of("*.parquet"))
    changed(folder, "cut-run", "unfinished/distill", with_half_of("weights.safetensors"))


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
