"""The model that `pretrain` trains: a target's family at a smaller size, or a Llama of its own.

First weights of a small model, cut from a large one of the same family.

    layers    student layer i takes target layer  i * L / l, the last one the last: both ends stay
    channels  residual channels with the largest embedding energy, the same ones everywhere
    heads     whole key-value groups, those whose output weights are largest; RoPE pairs stay pairs
    neurons   feed-forward neurons with the largest product of in- and outgoing norms
    tokens    rows of a reduced vocabulary

Cutting channels leaves fewer terms in every sum and a normalised vector of other size; matrices
that read the residual stream are scaled by sqrt(kept energy), so that their outputs keep theirs.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from draftsmith.distill.config import ArchitectureConfig
from draftsmith.distill.model_sizes import dimensions, shape_of
from draftsmith.errors import BackendError, InputError
from draftsmith.targets.gguf import checkpoint
from draftsmith.targets.hf import load_model, loading


def student_config(
    options: ArchitectureConfig, *, vocab_size: int, end_id: int, pad_id: int, context: int
) -> PretrainedConfig:
    """The configuration of the new model. Raises InputError when dimensions do not fit together."""
    shape = shape_of(options)
    layers = shape.layers
    config: PretrainedConfig = LlamaConfig(tie_word_embeddings=True)
    if options.tokenizer is not None:
        with loading(f"the configuration of {options.tokenizer}"):
            config = AutoConfig.from_pretrained(checkpoint(options.tokenizer))
    wanted: dict[str, Any] = {
        **dimensions(shape, options.kv_heads),
        "vocab_size": vocab_size,
        "max_window_layers": layers,
        "eos_token_id": end_id,
        "bos_token_id": end_id,
        "pad_token_id": pad_id,
    }
    if options.context or options.tokenizer is None:
        wanted["max_position_embeddings"] = options.context or context
    known = set(config.to_dict()) | set(config.attribute_map)
    for name, value in wanted.items():
        if name in known:
            setattr(config, name, value)
    positions = config.to_dict().get("max_position_embeddings")
    if positions is not None and positions < context:
        raise InputError(
            f"--block-length: blocks of {context} tokens do not fit into the {positions} positions "
            f"of {options.tokenizer}; give shorter blocks, or --context {context}"
        )
    kinds = config.to_dict().get("layer_types")
    if kinds:
        config.layer_types = [kinds[index * len(kinds) // layers] for index in range(layers)]
    return config


def build_student(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A new model in float32; its weights are a function of configuration and seed."""
    padding = config.pad_token_id
    # An embedding with a padding row never learns that row as an input; ours may be the end token.
    config.pad_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (ValueError, KeyError, RuntimeError) as error:
            raise BackendError(f"cannot build this model: {error}") from error
    config.pad_token_id = model.config.pad_token_id = padding
    return model


_LAYER = re.compile(r"^(.*\.layers\.)(\d+)\.(.*)$")
_PARTS = {
    **dict.fromkeys(("q_proj",), ("query", "channels")),
    **dict.fromkeys(("k_proj", "v_proj"), ("group", "channels")),
    **dict.fromkeys(("o_proj", "out_proj"), ("channels", "query")),
    **dict.fromkeys(("gate_proj", "up_proj", "fc1"), ("neurons", "channels")),
    **dict.fromkeys(("down_proj", "fc2"), ("channels", "neurons")),
}
"""Linear modules of a layer: which rows and columns of their matrices are kept."""


def subclone(source: str, student: PreTrainedModel, tokens: Tensor | None = None) -> None:
    """Fill `student` from the target at `source` (folder or hub id), in place.

    `tokens`: target ids of the student's vocabulary, when it is reduced.
    Raises BackendError when the target cannot be loaded, InputError when the student is larger
    than it in some dimension or of another family.
    """
    subclone_from(load_model(source, dtype="float32", device="cpu"), student, tokens)


@torch.no_grad()
def subclone_from(
    target: PreTrainedModel, student: PreTrainedModel, tokens: Tensor | None = None
) -> None:
    """`subclone` for a loaded target."""
    if type(target) is not type(student):
        raise InputError(
            f"--init subclone: the target is a {type(target).__name__}, the new model a "
            f"{type(student).__name__}; give the same model as --tokenizer"
        )
    theirs_by_name, ours_by_name = target.config.to_dict(), student.config.to_dict()
    heads = ("num_hidden_layers", "num_attention_heads")
    for name in ("hidden_size", *heads, "intermediate_size", "ffn_dim"):
        large_size, size = theirs_by_name.get(name), ours_by_name.get(name)
        if large_size is not None and size is not None and size > large_size:
            raise InputError(
                f"--init subclone: {name} {size} is more than the target's {large_size}"
            )
    theirs = dict(target.named_parameters())
    # residual channels with the largest embedding energy
    energy = target.get_input_embeddings().weight.float().square().sum(0)
    channels = energy.topk(student.config.hidden_size).indices.sort().values
    # Normalising over fewer channels of more than average energy makes each smaller.
    share = float(energy[channels].sum() / energy.sum())
    scale = (share / (student.config.hidden_size / target.config.hidden_size)) ** 0.5
    # target layer of each student layer: spread evenly, first and last kept (one: the first)
    last, own_last = target.config.num_hidden_layers - 1, student.config.num_hidden_layers - 1
    layers = [round(index * last / max(1, own_last)) for index in range(own_last + 1)]
    kept: dict[str, dict[str, Tensor]] = {}
    for name, parameter in student.named_parameters():
        match = _LAYER.match(name)
        prefix = "" if match is None else f"{match[1]}{layers[int(match[2])]}."
        large = theirs.get(name if match is None else prefix + match[3])
        if large is None:
            raise InputError(f"--init subclone: the target has no parameter {name}")
        if match is None:
            if large.shape[0] != parameter.shape[0] and "norm" not in name:
                if tokens is None:
                    raise InputError("--init subclone: the vocabularies differ; use --vocab-subset")
                large = large[tokens]
            large = large[..., channels]
            # The final norm's output feeds the head: same energy rule as inside the layers.
            parameter.copy_(large * scale if "norm" in name else large)
            continue
        if prefix not in kept:
            layer = {key: one for key, one in theirs.items() if key.startswith(prefix)}
            query, group = _heads(target, student, layer)
            kept[prefix] = {"channels": channels, "query": query, "group": group}
            kept[prefix]["neurons"] = _neurons(student, layer)
        kind = name.split(".")[-2]
        if kind in _PARTS:
            rows, columns = _PARTS[kind]
            large = large[kept[prefix][rows]]
            if large.ndim == 2:
                large = large[:, kept[prefix][columns]]
                if columns == "channels" and kind != "fc1":
                    large = large * scale
        elif large.ndim == 1 and large.shape[0] == target.config.hidden_size:
            large = large[channels]
        elif large.shape != parameter.shape:  # norms of single heads
            large = large[: parameter.shape[0]]
        if large.shape != parameter.shape:
            raise InputError(f"--init subclone: cannot cut {name} to {tuple(parameter.shape)}")
        parameter.copy_(large)


def _heads(
    target: PreTrainedModel, student: PreTrainedModel, layer: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Rows of q_proj and of k/v_proj that the student keeps.

    Whole key-value groups go together:      kv heads  0 1        student 1 group of 2
                                             queries   0 1 2 3    keeps kv 1, queries 2 3
    """
    own, other = student.config, target.config
    dim, large_dim = _head_dim(own), _head_dim(other)
    groups, large_groups = (
        _size(config, "num_key_value_heads", "num_attention_heads") for config in (own, other)
    )
    per, large_per = own.num_attention_heads // groups, other.num_attention_heads // large_groups
    if groups > large_groups or per > large_per or dim > large_dim:
        raise InputError(
            f"--init subclone: {groups} groups of {per} heads of {dim} do not fit into the "
            f"target's {large_groups} groups of {large_per} heads of {large_dim}"
        )
    ends = ("o_proj.weight", "out_proj.weight")
    out = next(weight for name, weight in layer.items() if name.endswith(ends))
    # [large_groups, large_per, large_dim] energies of what each head writes.
    energy = out.float().square().sum(0).view(large_groups, large_per, large_dim)
    kept = energy.sum((1, 2)).topk(groups).indices.sort().values
    # RoPE turns dimension i together with i + d/2, at a frequency that depends on i / d.
    half = (torch.arange(dim // 2) * large_dim) // dim
    dims = torch.cat([half, half + large_dim // 2])
    rows = torch.arange(large_groups * large_per * large_dim).view(large_groups, large_per, -1)
    kv_rows = torch.arange(large_groups * large_dim).view(large_groups, -1)
    query = []
    for index in kept.tolist():
        heads = energy[index].sum(-1).topk(per).indices.sort().values
        query.append(rows[index][heads][:, dims].flatten())
    return torch.cat(query), kv_rows[kept][:, dims].flatten()


def _neurons(student: PreTrainedModel, layer: dict[str, Tensor]) -> Tensor:
    outs = ("down_proj.weight", "fc2.weight")
    ins = ("gate_proj.weight", "up_proj.weight", "fc1.weight")
    norms = (
        weight.float().norm(dim=dim)
        for dim, ends in enumerate((outs, ins))
        for name, weight in layer.items()
        if name.endswith(ends)
    )
    score: Any = math.prod(norms)
    kept: Tensor = score.topk(_size(student.config, "intermediate_size", "ffn_dim")).indices
    return kept.sort().values


def _size(config: PretrainedConfig, name: str, other: str) -> int:
    """A dimension that has another name, or comes from another one, in some families."""
    values = config.to_dict()
    return int(values.get(name) or values[other])


def _head_dim(config: PretrainedConfig) -> int:
    values = config.to_dict()
    return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])
