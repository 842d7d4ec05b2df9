"""What an `HFTarget` promises beside logits: signals, end tokens, dtypes, padded vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from draftsmith.core.cache import lay_out
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Signals, TargetOutput
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget

Build = Callable[..., tuple[Any, Any]]

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": SMALL,
    "Gemma2Config": {**SMALL, "head_dim": 8, "num_key_value_heads": 2},
    "OPTConfig": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "GPT2Config": {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "GPTNeoXConfig": SMALL,
    "Gemma4TextConfig": {
        **{**SMALL, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 8},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
    },
}
TEXT = [5, 9, 33, 41, 7, 12]


def config_of(class_name: str, **changes: Any) -> Any:
    return getattr(transformers, class_name)(**{**FAMILIES.get(class_name, SMALL), **changes})


def forward(target: HFTarget, texts: list[list[int]], keep: int, signals: Signals) -> TargetOutput:
    fed, block = lay_out(target.new_cache(len(texts), 32), texts)
    return target.forward(torch.from_numpy(fed), block, keep, signals)


@pytest.mark.parametrize("class_name", FAMILIES)
def test_signals_are_the_models_own_hidden_states(class_name: str, build_pair: Build) -> None:
    """Layer outputs in the order asked for, then the state after the final norm."""
    oracle, model = build_pair(config_of(class_name))
    with torch.inference_mode():
        theirs = oracle(
            input_ids=torch.tensor([TEXT]), output_hidden_states=True, use_cache=False
        ).hidden_states
    target = HFTarget(model)
    expected = {
        Signals(last_hidden=True): [theirs[-1]],
        Signals(layers=(0, 1)): [theirs[1], theirs[2]],
        Signals(layers=(1, 0), last_hidden=True): [theirs[2], theirs[1], theirs[-1]],
    }
    for signals, states in expected.items():
        out = forward(target, [TEXT], 1, signals)
        assert out.signals_BTS is not None
        assert out.logits_BNV.shape[1] == 1
        torch.testing.assert_close(out.signals_BTS, torch.cat(states, -1), rtol=0, atol=1e-9)


def test_no_signals_are_computed_unless_asked_for(build_pair: Build) -> None:
    _, model = build_pair(config_of("LlamaConfig"))
    target = HFTarget(model)
    assert forward(target, [TEXT], 1, Signals()).signals_BTS is None
    assert not any(module._forward_hooks for module in model.modules())


def test_the_last_layers_signal_is_its_output_before_the_final_norm(build_pair: Build) -> None:
    """transformers' hidden_states hold the normed state in its place."""
    _, model = build_pair(config_of("LlamaConfig"))
    both = Signals(layers=(2,), last_hidden=True)
    states = forward(HFTarget(model), [TEXT], 1, both).signals_BTS
    assert states is not None
    before, after = states.split(32, dim=-1)
    torch.testing.assert_close(model.model.norm(before), after, rtol=0, atol=0)
    assert float((before - after).abs().max()) > 0.1


def test_a_layer_that_does_not_exist_is_refused(build_pair: Build) -> None:
    _, model = build_pair(config_of("LlamaConfig"))
    with pytest.raises(InputError, match=r"LlamaForCausalLM has 3 decoder layers.*layer 3\b"):
        forward(HFTarget(model), [TEXT], 1, Signals(layers=(0, 3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_gives_its_own_logits_and_caches_its_own_keys(
    dtype: torch.dtype, build_pair: Build
) -> None:
    exact, model = build_pair(config_of("LlamaConfig"), dtype)
    target = HFTarget(model)
    out = forward(target, [TEXT, TEXT[:3]], 1, Signals()).logits_BNV
    assert target.dtype == out.dtype == dtype
    assert target.new_cache(1, 8).spec.dtype == dtype
    with torch.inference_mode():
        theirs = exact.double()(input_ids=torch.tensor([TEXT])).logits[0, -1]
    spread = float(theirs.std())
    bound = {torch.float16: 0.02, torch.bfloat16: 0.15}.get(dtype, 1e-4)
    assert float((out[0, -1].double() - theirs).square().mean().sqrt()) < bound * spread


def test_end_tokens_come_from_generation_config_config_and_tokenizer(build_pair: Build) -> None:
    class Tokenizer:
        eos_token_id = 11

    _, model = build_pair(config_of("LlamaConfig", eos_token_id=7))
    model.generation_config.eos_token_id = [8, 9]
    assert HFTarget(model, Tokenizer()).end_ids == {7, 8, 9, 11}
    assert HFTarget(model).end_ids == {7, 8, 9}
    assert HFTarget(model, end_ids=frozenset({3})).end_ids == {3}
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert HFTarget(model).end_ids == frozenset()


def test_tied_embeddings_work_like_untied_ones(build_pair: Build) -> None:
    oracle, model = build_pair(config_of("LlamaConfig", tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    out = forward(HFTarget(model), [TEXT], len(TEXT), Signals()).logits_BNV
    with torch.inference_mode():
        theirs = oracle(input_ids=torch.tensor([TEXT])).logits
    torch.testing.assert_close(out, theirs, rtol=0, atol=1e-9)


def test_a_padded_vocabulary_is_the_heads_and_not_the_tokenizers(build_pair: Build) -> None:
    """Qwen's head has more rows than its tokenizer has tokens. The law is over all rows, as in
    transformers: nothing is masked, and a padding token is emitted if the model prefers it."""

    class Tokenizer:
        eos_token_id = 2

        def __len__(self) -> int:
            return 50

    oracle, model = build_pair(config_of("Qwen2Config", num_key_value_heads=2))
    for each in (oracle, model):
        each.lm_head.weight.data[60] *= 50  # a padding row that wins whenever its sign is right
    target = HFTarget(model, Tokenizer())
    assert target.vocab_size == 64
    drafter = NoDrafter()
    drafter.bind(target)
    options = DecodeOptions(sampler=Sampler(temperature=0.0), max_new_tokens=8)
    emitted = [t for step in decode(target, drafter, [TEXT], options) for t in step.emitted[0]]
    ids = torch.tensor([TEXT])
    theirs = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
    )
    assert emitted == theirs[0, len(TEXT) :].tolist()
    assert 60 in emitted


def test_the_text_part_of_a_multimodal_model_decodes(build_pair: Build) -> None:
    text = {**SMALL, "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 4}
    text["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={
            **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        },
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
    )
    oracle, model = build_pair(config)
    target = HFTarget(model)
    assert target.vocab_size == 64
    assert target.max_length == 128
    out = forward(target, [TEXT], len(TEXT), Signals()).logits_BNV
    with torch.inference_mode():
        theirs = oracle(input_ids=torch.tensor([TEXT])).logits
    torch.testing.assert_close(out, theirs, rtol=0, atol=1e-9)


def test_an_unknown_attention_implementation_is_an_input_error(build_pair: Build) -> None:
    _, model = build_pair(config_of("LlamaConfig"))
    with pytest.raises(InputError, match=r"sdpa or eager.*'flash'"):
        HFTarget(model, attn_implementation="flash")


@pytest.mark.parametrize("class_name", ["LlamaConfig", "Gemma2Config"])
def test_native_generate_is_transformers_own(class_name: str, build_pair: Build) -> None:
    """Under sdpa Gemma 2 would lose its soft-cap or refuse; `native` knows."""
    caps = {"attn_logit_softcapping": 2.0} if class_name == "Gemma2Config" else {}
    oracle, model = build_pair(config_of(class_name, **caps))
    target = HFTarget(model)
    ids = torch.tensor([TEXT])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8}
    with target.native() as bare:
        assert bare.generate(ids, **options).tolist() == oracle.generate(ids, **options).tolist()
