"""Reads llama2.c checkpoints and character vocabularies of the reference data into transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.targets.hf import HFTarget

_BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"


def weights_folder() -> Path:
    """The reference weights; skips the test where they are absent."""
    folder = Path(os.environ.get("DRAFTSMITH_DATA", _BESIDE)) / "weights"
    if not folder.is_dir():
        pytest.skip("the reference data are not here (set DRAFTSMITH_DATA)")
    return folder


def read_checkpoint(path: Path) -> LlamaForCausalLM:
    """A legacy llama2.c file (7 int32, then float32 tensors) as a float32 Llama."""
    raw = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, length = np.frombuffer(raw, np.int32, 7).tolist()
    assert vocab > 0, "the output matrix is tied in these files"
    data, at = np.frombuffer(raw, np.float32, offset=28), 0

    def read(*shape: int) -> torch.Tensor:
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return torch.from_numpy(data[at - size : at].reshape(shape).copy())

    def turned(weight: torch.Tensor, count: int) -> torch.Tensor:
        # interleaved pairs (2j, 2j+1) of each head become halves (j, j + hs/2)
        half = weight.shape[0] // count // 2
        return weight.view(count, half, 2, dim).transpose(1, 2).reshape(weight.shape)

    kv = kv_heads * dim // heads
    state = {"model.embed_tokens.weight": read(vocab, dim)}
    names = {
        "input_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
        "mlp.up_proj": (hidden, dim),
    }
    for name, shape in names.items():
        stacked = read(layers, *shape)
        for layer in range(layers):
            weight = stacked[layer]
            if name.endswith("q_proj"):
                weight = turned(weight, heads)
            if name.endswith("k_proj"):
                weight = turned(weight, kv_heads)
            state[f"model.layers.{layer}.{name}.weight"] = weight
    state["model.norm.weight"] = read(dim)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model


def character_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """One token per character (`.vocab` lists the pieces in id order), a blank put in front."""
    lines = path.read_text(encoding="utf-8").split("\n")
    pieces = [line.rsplit("\t", 1)[0] for line in lines if line]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def babyllama(dtype: torch.dtype = torch.float32) -> HFTarget:
    """The 105-character model: another vocabulary than the 512-piece models'."""
    folder = weights_folder()
    model: Any = read_checkpoint(folder / "babyllama_tok105_936K.bin")
    return HFTarget(model.to(dtype), character_tokenizer(folder / "babyllama_tok105.vocab"))
