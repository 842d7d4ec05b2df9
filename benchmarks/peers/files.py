"""What other engines read a model from: GGUF files and EAGLE folders, written from ours.

    folder of a Llama ---- write_gguf ---> FILE.gguf    llama.cpp, OpenVINO GenAI
    folder of an EAGLE --- write_eagle --> FOLDER       vLLM

Neither changes what a model computes, beyond the number format that is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.drafters.hidden.checkpoint import D2T, EMBEDDING, T2D, read_config, read_tensors
from draftsmith.errors import InputError
from draftsmith.provenance import atomic_path, read_json, write_json_atomic

KINDS = {
    "F16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "Q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
BLOCK = 32
"""Weights of a row that share a scale in Q8_0."""
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, like: Path, out: Path, kind: str) -> None:
    """A Llama's folder as a GGUF file with the tokenizer of another file.

    Args:
        like: a GGUF file of a model with the same tokens; its tokenizer is copied.
        kind: format of the matrices, of `KINDS`; norms are float32.

    Raises:
        InputError: it is no plain Llama, it has other tokens than `like`, or rows that are no whole
            number of blocks.
    """
    config = AutoConfig.from_pretrained(folder)
    reader = GGUFReader(like)
    tokens = len(reader.fields["tokenizer.ggml.tokens"].data)
    rope = dict(config.rope_parameters or {})
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise InputError(f"{folder} is no plain Llama ({config.model_type}, or with biases).")
    if rope.get("rope_type", "default") != "default":
        raise InputError(f"{folder} scales its rotary positions, which is not written to GGUF.")
    if config.vocab_size != tokens:
        raise InputError(
            f"{folder} has {config.vocab_size} tokens, and {like} has {tokens}: a draft model for "
            "other engines needs the target's own vocabulary."
        )
    if kind == "Q8_0" and (config.hidden_size % BLOCK or config.intermediate_size % BLOCK):
        raise InputError(f"{folder} has rows that are no multiple of {BLOCK}: write it as F16.")
    with atomic_path(out) as part:
        writer = GGUFWriter(part, "llama")
        _describe(writer, config, KINDS[kind][1])
        _copy_tokenizer(writer, reader)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            one = _rotary_pairs(name, weight, config).numpy()
            stored = KINDS[kind][0] if one.ndim == 2 else GGMLQuantizationType.F32
            writer.add_tensor(_gguf_name(name), quantize(one, stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _describe(writer: GGUFWriter, config: Any, kind: LlamaFileType) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(kind)
    writer.add_quantization_version(2)


def _copy_tokenizer(writer: GGUFWriter, reader: GGUFReader) -> None:
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            kind, *inner = field.types
            sub = inner[0] if inner else None
            writer.add_key_value(name, field.contents(), GGUFValueType(kind), sub_type=sub)


def _gguf_name(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    number, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_INSIDE[part.removesuffix('.weight')]}.weight"


def _rotary_pairs(name: str, weight: Tensor, config: Any) -> Tensor:
    """Rows of queries and keys in the order of GGUF: numbers that are rotated together stand side
    by side there, and half a head apart in transformers."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    heads = len(weight) // config.head_dim
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def write_eagle(folder: Path, out: Path) -> None:
    """Our EAGLE drafter as a folder that vLLM reads.

    vLLM's network has no bias behind its fusion, but may have biases in its attention, and the
    layer behind the fusion has no norm in front. So b moves into biases of q, k, v and o:

        x + b + o(attend(q(x + b), k(x + b), v(x + b)))
            = x + o(attend(q x + q b, k x + k b, v x + v b)) + b

    It has no draft vocabulary: the target's head is read over all tokens.

    Raises:
        InputError: it is no EAGLE drafter.
    """
    kind = read_json(folder / "drafter.json")["kind"]
    if kind != "eagle":
        raise InputError(f"{folder} holds a drafter of the kind {kind!r}: vLLM reads 'eagle'.")
    config = read_config(folder)
    tensors = read_tensors(folder, pickled=False)
    for name in (D2T, T2D, EMBEDDING):
        tensors.pop(name, None)
    shift = tensors.pop("fc.bias", None)
    if shift is not None:
        attention = "layers.0.self_attn"
        for part in ("q_proj", "k_proj", "v_proj"):
            moved = tensors[f"{attention}.{part}.weight"].float() @ shift.float()
            old = tensors.get(f"{attention}.{part}.bias", torch.zeros_like(moved))
            tensors[f"{attention}.{part}.bias"] = (moved + old.float()).to(shift.dtype)
        tensors[f"{attention}.o_proj.bias"] = shift
    # with a key qkv_bias vLLM looks at no other
    measures = {name: one for name, one in config.to_dict().items() if name != "qkv_bias"}
    wanted = measures | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": shift is not None,
        "draft_vocab_size": config.vocab_size,
        "dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
    }
    with atomic_path(out) as part_folder:
        part_folder.mkdir()
        save_file(tensors, part_folder / "model.safetensors")
        write_json_atomic(part_folder / "config.json", wanted)
