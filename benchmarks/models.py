"""The models that the figures are taken on: what ships with the project, and random weights of a
common size. Speed does not depend on what weights say."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.targets.hf import HFTarget, load_target

MINI_CODE = Path(__file__).resolve().parents[1] / "models" / "mini-code"


def mini_code() -> HFTarget | None:
    """The shipped target, or None where it is absent."""
    if not (MINI_CODE / "target" / "config.json").is_file():
        return None
    return load_target(str(MINI_CODE / "target"))


def random_llama(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    vocab: int,
    context: int,
    kv_heads: int | None = None,
    peaked: float = 8.0,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> HFTarget:
    """A Llama without end tokens. Its laws are as peaked as a trained model's: untrained ones are
    nearly uniform, which no top-p was made for. (`peaked`: scale of its final norm.)"""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        model.model.norm.weight.data.mul_(peaked)
    return HFTarget(model.to(dtype), end_ids=frozenset(), name=f"random-{layers}x{hidden}")


def llama_110m() -> HFTarget:
    """109.5 M parameters in bfloat16: 12 layers of 768, 32,000 tokens."""
    return random_llama(
        layers=12, hidden=768, intermediate=2048, heads=12, vocab=32_000, context=4096
    )


def llama_draft() -> HFTarget:
    """A draft model for it: 2 layers of 256."""
    return random_llama(
        layers=2, hidden=256, intermediate=704, heads=4, vocab=32_000, context=4096, seed=1
    )


def llama_8b_part(layers: int) -> HFTarget:
    """Some layers of Llama 3 8B, and its head of 128,256 tokens."""
    return random_llama(
        layers=layers,
        hidden=4096,
        intermediate=14_336,
        heads=32,
        kv_heads=8,
        vocab=128_256,
        context=4096,
        peaked=3.5,
    )


def random_prompts(count: int, length: int, vocab: int, *, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, vocab, (count, length), generator=generator)
    return [tuple(int(t) for t in row) for row in rows]
