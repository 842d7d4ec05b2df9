"""What cannot be decoded exactly is refused with one sentence, never decoded wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from draftsmith.core import attention
from draftsmith.errors import UnsupportedModel
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.support import refuse_by_class, refuse_by_config, window_of

Build = Callable[..., tuple[Any, Any]]

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}


def config_of(class_name: str, **options: Any) -> Any:
    return getattr(transformers, class_name)(**options)


@pytest.mark.parametrize(
    "class_name",
    [
        "MambaForCausalLM",
        "Mamba2ForCausalLM",
        "FalconMambaForCausalLM",
        "FalconH1ForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "JambaForCausalLM",
        "BambaForCausalLM",
        "ZambaForCausalLM",
        "Zamba2ForCausalLM",
        "NemotronHForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "RecurrentGemmaForCausalLM",
        "RwkvForCausalLM",
        "xLSTMForCausalLM",
        "KimiLinearForCausalLM",
    ],
)
def test_a_recurrent_state_is_refused_by_class(class_name: str) -> None:
    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {class_name}")
    with pytest.raises(UnsupportedModel, match=rf"{class_name}.*recurrent"):
        refuse_by_class(model_class, class_name)


@pytest.mark.parametrize(
    "class_name",
    [
        "BartForCausalLM",
        "BlenderbotForCausalLM",
        "PegasusForCausalLM",
        "MarianForCausalLM",
        "BloomForCausalLM",
        "MptForCausalLM",
    ],
)
def test_a_model_that_counts_positions_by_itself_is_refused(class_name: str) -> None:
    """BART's decoders number columns, BLOOM and MPT bias attention by them (ALiBi)."""
    with pytest.raises(UnsupportedModel, match=rf"{class_name} takes no position_ids"):
        refuse_by_class(getattr(transformers, class_name), class_name)


@pytest.mark.parametrize("class_name", ["T5Config", "BartConfig", "MarianConfig"])
def test_an_encoder_decoder_is_refused_by_configuration(class_name: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"is an encoder-decoder.*decoder-only"):
        refuse_by_config(config_of(class_name), class_name)


@pytest.mark.parametrize(
    ("class_name", "options", "reason"),
    [
        ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        (
            "Phi3Config",
            {
                "original_max_position_embeddings": 64,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                },
            },
            "longrope",
        ),
        ("Llama4TextConfig", {}, "chunked_attention"),
        ("Llama4TextConfig", {"layer_types": ["full_attention"] * 2}, "positions that it counts"),
        ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "recurrent state"),
        ("DeepseekV32Config", {}, "indexed_attention|sparse_attention"),
    ],
)
def test_a_configuration_is_refused_before_weights_are_read(
    class_name: str, options: dict[str, Any], reason: str
) -> None:
    if not hasattr(transformers, class_name):
        pytest.skip(f"transformers {transformers.__version__} has no {class_name}")
    config = config_of(class_name, **{**SMALL, **options})
    with pytest.raises(UnsupportedModel, match=f"ThisModel.*({reason})"):
        refuse_by_config(config, "ThisModel")


@pytest.mark.parametrize(
    ("class_name", "options", "reason"),
    [
        ("FalconConfig", {}, "computes attention by itself"),
        ("FalconConfig", {"alibi": True}, "computes attention by itself"),
        ("GPTJConfig", {**GPT, "rotary_dim": 8}, "computes attention by itself"),
        ("BertConfig", {}, "attend to later ones"),
        ("RobertaConfig", {}, "attend to later ones"),
        ("DiffLlamaConfig", {}, "attends more than once in layer 0"),
    ],
)
def test_attention_that_would_be_wrong_is_refused_by_the_probe(
    class_name: str, options: dict[str, Any], reason: str, build_pair: Build
) -> None:
    _, model = build_pair(
        config_of(class_name, **(options if "n_embd" in options else SMALL | options))
    )
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        HFTarget(model, check=False)
    assert type(model).__name__ in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_bidirectional_llama_is_refused(build_pair: Build) -> None:
    _, model = build_pair(config_of("LlamaConfig", **SMALL))
    model.config.is_causal = False
    with pytest.raises(UnsupportedModel, match="attend to later ones"):
        HFTarget(model, check=False)


class _Strange(nn.Module):
    """Wraps an attention module and changes what comes out of it."""

    def __init__(self, inner: nn.Module, change: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, **given: Any) -> Any:
        self.change(given)
        return self.inner(**given)


def _strange(model: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    for layer in model.model.layers:
        layer.self_attn = _Strange(layer.self_attn, change)
    return model


def test_the_self_check_refuses_positions_taken_from_columns(build_pair: Build) -> None:
    """A model that numbers the tokens of a forward 0, 1, 2 instead of reading position_ids."""
    _, model = build_pair(config_of("LlamaConfig", **SMALL))
    rotate = model.model.rotary_emb

    def by_columns(given: dict[str, Any]) -> None:
        hidden = given["hidden_states"]
        given["position_embeddings"] = rotate(hidden, torch.arange(hidden.shape[1])[None])

    _strange(model, by_columns)
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM gives other logits"):
        HFTarget(model)
    HFTarget(model, check=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_self_check_refuses_in_every_dtype_and_passes_in_every_dtype(
    dtype: torch.dtype, build_pair: Build
) -> None:
    sound, broken = build_pair(config_of("LlamaConfig", **SMALL), dtype)
    HFTarget(sound)

    def backwards(given: dict[str, Any]) -> None:
        if given.get("draftsmith_block") is not None:
            given["hidden_states"] = given["hidden_states"].flip(1)

    with pytest.raises(UnsupportedModel, match="gives other logits"):
        HFTarget(_strange(broken, backwards))


def test_an_unknown_keyword_to_attention_is_refused(build_pair: Build) -> None:
    _, model = build_pair(config_of("LlamaConfig", **SMALL))
    _strange(model, lambda given: given.update(position_bias=torch.zeros(1)))
    with pytest.raises(UnsupportedModel, match=r"'position_bias'.*attention"):
        HFTarget(model, check=False)


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (lambda b, h, q, k: k <= q, None),
        (lambda b, h, q, k: (k <= q) & (q - k < 7), 7),
        (lambda b, h, q, k: (k <= q) & (q - k < 1), 1),
    ],
)
def test_the_window_is_read_from_the_models_own_mask_rule(rule: Any, window: int | None) -> None:
    assert window_of(rule, 300, "ThisModel", torch.device("cpu")) == window


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (lambda b, h, q, k: k >= 0, "attend to later ones"),
        (lambda b, h, q, k: (k <= q) | (k < 400), "attend to later ones"),
        (lambda b, h, q, k: (k <= q) & (k // 16 == q // 16), "chunked, sparse or with a prefix"),
        (lambda b, h, q, k: (k <= q) & ((q - k < 7) | (k < 4)), "chunked, sparse or with a prefix"),
        (lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0), "chunked, sparse or with a prefix"),
        (lambda b, h, q, k: torch.ones(8)[k] > 0, "by more than positions"),
    ],
)
def test_other_mask_rules_are_refused(rule: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"ThisModel.*{reason}"):
        window_of(rule, 300, "ThisModel", torch.device("cpu"))


def test_the_bare_model_of_a_target_says_how_to_run_it(build_pair: Build) -> None:
    _, model = build_pair(config_of("LlamaConfig", **SMALL))
    target = HFTarget(model)
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(Exception, match=r"with target\.native\(\) as model"):
        model(input_ids=ids)
    with target.native() as bare:
        assert bare.config._attn_implementation == "sdpa"
        bare(input_ids=ids)
    assert model.config._attn_implementation == attention.NAME
