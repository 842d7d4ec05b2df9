"""Model folders that load in a moment: a random Llama of a few thousand parameters with a
byte-level tokenizer, and a draft that knows it half (the same weights, disturbed)."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

TEXT = """
def add(left, right):
    \"\"\"Return the sum of left and right.\"\"\"
    return left + right

def subtract(left, right):
    return left - right

the cat sat on the mat, the dog sat on the log, and the cat saw the dog.
"""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 300 tokens; id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def tiny_model(seed: int = 0, *, context: int = 512, hidden: int = 32) -> LlamaForCausalLM:
    """Random weights, far from uniform laws; it never ends a text by itself for long. The compiled
    engine runs it from a `hidden` of 128: its heads are a quarter of it."""
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.25)
    return model


def save_pair(folder: Path, *, context: int = 512) -> None:
    """Write `folder/target` and `folder/draft`."""
    model = tiny_model(context=context)
    model.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder / "draft")
    tiny_tokenizer().save_pretrained(folder / "draft")


CHAT = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template."""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
"""In front of it: one that refuses system texts, as Gemma's does."""


def save_chat_pair(folder: Path, *, context: int = 512, template: str = CHAT) -> None:
    """`save_pair` with a chat template."""
    save_pair(folder, context=context)
    (folder / "target" / "chat_template.jinja").write_text(template, encoding="utf-8")


FAMILIES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "mixtral": MixtralConfig,
    "gemma2": Gemma2Config,
}


def save_family(folder: Path, family: str) -> None:
    """Write a random target of this family to `folder/target`, with biases where it has some."""
    config = FAMILIES[family](
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
