"""Every supported architecture, tiny and random, against transformers' own eager attention.

The oracle runs one sequence at a time, without a cache, with a plain causal mask. We run ragged
batches with trees over our cache. Windows (4) are far shorter than the texts (9 to 20 tokens).

    tree   root -+- 0 -+- 3 --- 6 -+- 8          paths to leaves   0 3 6 8
                 |     `- 4        `- 9                            0 3 6 9
                 +- 1 --- 5 --- 7                                  0 4,  1 5 7,  2
                 `- 2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from draftsmith.core.cache import KVCache, lay_out
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Signals
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import UnsupportedModel
from draftsmith.targets.hf import HFTarget

PARENTS = (-1, -1, -1, 0, 0, 1, 3, 5, 6, 6)
LEAVES = ((0, 3, 6, 8), (0, 3, 6, 9), (0, 4), (1, 5, 7), (2,))
WINDOW = 4
KINDS = ("sdpa", "eager")

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
WINDOWED = {"sliding_window": WINDOW, **MIXED}
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
}
LATENT = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 8,
}
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-yarn": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {**WINDOWED, "use_sliding_window": True}),
    "qwen2moe-window": ("Qwen2MoeConfig", {**WINDOWED, **EXPERTS, "use_sliding_window": True}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3-window": ("Qwen3Config", {**WINDOWED, "use_sliding_window": True}),
    "qwen3moe": ("Qwen3MoeConfig", EXPERTS),
    "mistral-window": ("MistralConfig", {"sliding_window": WINDOW}),
    "ministral3-window": ("Ministral3Config", {"sliding_window": WINDOW}),
    "mixtral-window": ("MixtralConfig", {"sliding_window": WINDOW, **EXPERTS}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gemma": ("GemmaConfig", {}),
    "gemma2-window-softcap": (
        "Gemma2Config",
        {**WINDOWED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3-window": ("Gemma3TextConfig", WINDOWED),
    "gemma3n-window-shared": (
        "Gemma3nTextConfig",
        {
            **WINDOWED,
            **{"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "laurel_rank": 4},
            **{"vocab_size_per_layer_input": 64, "altup_num_inputs": 2},
            **{"intermediate_size": [48] * 3, "activation_sparsity_pattern": [0.0] * 3},
        },
    ),
    "gemma4-window-shared": (
        "Gemma4TextConfig",
        {
            **{"sliding_window": WINDOW, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
            **{"head_dim": 8, "global_head_dim": 16},
        },
    ),
    "phi3-window": ("Phi3Config", {"sliding_window": WINDOW}),
    "phimoe-window": ("PhimoeConfig", {"sliding_window": WINDOW, **EXPERTS}),
    "phi": ("PhiConfig", {}),
    "seed-oss": ("SeedOssConfig", {}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "gpt-oss-window-sinks": ("GptOssConfig", {**WINDOWED, **EXPERTS}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "attention_multiplier": 0.5}),
    "cohere": ("CohereConfig", {"logit_scale": 0.3}),
    "cohere2-window": ("Cohere2Config", {**WINDOWED, "logit_scale": 0.3}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3-window": ("Olmo3Config", WINDOWED),
    "olmoe": ("OlmoeConfig", EXPERTS),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "nemotron": ("NemotronConfig", {}),
    "starcoder2-window": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "smollm3-window": (
        "SmolLM3Config",
        {**WINDOWED, "use_sliding_window": True, "no_rope_layers": [1, 0, 1]},
    ),
    "deepseek-v2": ("DeepseekV2Config", LATENT),
    "deepseek-v3": ("DeepseekV3Config", LATENT),
    "glm4": ("Glm4Config", {}),
    "exaone4-window": ("Exaone4Config", WINDOWED),
    "ernie4.5": ("Ernie4_5Config", {}),
}


def config_of(name: str, **changes: Any) -> Any:
    """The tiny configuration of an architecture; only what its class knows is passed."""
    class_name, extra = ZOO[name]
    config_class = getattr(transformers, class_name, None)
    if config_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {class_name}")
    default = config_class().to_dict()
    renamed = config_class.attribute_map
    known = {k: v for k, v in BASE.items() if k in default or k in renamed} | extra
    return config_class(**{**known, **changes})


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 60, (n,), generator=generator).tolist() for n in (13, 9, 17)]


def node_tokens() -> np.ndarray:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, 60, (3, len(PARENTS)), generator=generator).numpy()


def tree_logits(
    target: HFTarget, cache: KVCache, pending: list[list[int]], tokens_BN: np.ndarray
) -> torch.Tensor:
    """One forward of pending tokens and the tree: [B, root + nodes, V]."""
    fed, block = lay_out(cache, pending, tokens_BN, np.array([PARENTS] * len(pending)))
    return target.forward(
        torch.from_numpy(fed), block, 1 + len(PARENTS), Signals()
    ).logits_BNV.double()


@torch.inference_mode()
def oracle_logits(oracle: Any, texts: list[list[int]], tokens_BN: np.ndarray) -> torch.Tensor:
    """The same, each leaf's path by itself in a plain causal forward without a cache."""
    out = torch.full((len(texts), 1 + len(PARENTS), oracle.config.vocab_size), torch.nan).double()
    for b, text in enumerate(texts):
        for path in LEAVES:
            ids = torch.tensor([text + [int(tokens_BN[b, n]) for n in path]])
            logits = oracle(input_ids=ids, use_cache=False).logits[0, len(text) - 1 :].double()
            out[b, [0, *(n + 1 for n in path)]] = logits
    return out


def two_steps(target: HFTarget) -> tuple[list[torch.Tensor], list[list[list[int]]]]:
    """A ragged prefill with a tree, a ragged commit, a second tree: logits and texts of both."""
    texts, tokens = prompts(), node_tokens()
    cache = target.new_cache(3, 64)
    first = tree_logits(target, cache, texts, tokens)
    accepted = [[0, 3, 6], [], [1, 5]]
    path = np.full((3, 3), -2)
    for b, nodes in enumerate(accepted):
        path[b, : len(nodes)] = nodes
    cache.commit(np.array([len(t) for t in texts]), path, np.array([len(a) for a in accepted]))
    roots = [5, 6, 7]
    longer = [
        [*text, *(int(tokens[b, n]) for n in accepted[b]), roots[b]] for b, text in enumerate(texts)
    ]
    second = tree_logits(target, cache, [[root] for root in roots], tokens)
    return [first, second], [texts, longer]


Build = Callable[..., tuple[Any, Any]]
# Rotations or routers of these compute in float32 whatever the weights are.
ROUNDS_INSIDE = {"deepseek-v2", "deepseek-v3"}


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.every(3)
def test_every_node_of_a_tree_has_the_logits_of_its_path_alone(
    name: str, build_pair: Build
) -> None:
    """With either attention implementation, in float64."""
    oracle, model = build_pair(config_of(name))
    steps = {kind: two_steps(HFTarget(model, attn_implementation=kind)) for kind in KINDS}
    for step in (0, 1):
        theirs = oracle_logits(oracle, steps["sdpa"][1][step], node_tokens())
        bound = (1e-5 if name in ROUNDS_INSIDE else 1e-9) * float(theirs.abs().max())
        for kind in KINDS:
            gap = float((steps[kind][0][step] - theirs).abs().max())
            assert gap <= bound, f"{kind}, step {step}: off by {gap:.1e}, {bound:.1e} allowed"


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.every(4)
def test_float32_agrees_to_rounding(name: str, build_pair: Build) -> None:
    oracle, model = build_pair(config_of(name), torch.float32)
    logits, texts = two_steps(HFTarget(model))
    for ours, known in zip(logits, texts, strict=True):
        theirs = oracle_logits(oracle, known, node_tokens())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.every(4)
def test_greedy_decoding_equals_transformers_generate(name: str, build_pair: Build) -> None:
    oracle, model = build_pair(config_of(name))
    target = HFTarget(model, end_ids=frozenset())
    options = DecodeOptions(sampler=Sampler(temperature=0.0), max_new_tokens=12)
    drafter = NoDrafter()
    drafter.bind(target)
    emitted: list[list[int]] = [[], [], []]
    for step in decode(target, drafter, prompts(), options):
        for row, tokens in zip(emitted, step.emitted, strict=True):
            row.extend(tokens)
    oracle.generation_config.eos_token_id = None
    for text, ours in zip(prompts(), emitted, strict=True):
        ids = torch.tensor([text])
        theirs = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
        )
        assert ours == theirs[0, len(text) :].tolist()


@pytest.mark.parametrize("name", [name for name in ZOO if "window" in name])
@pytest.mark.every(4)
def test_the_window_matters_inside_the_tree(name: str, build_pair: Build) -> None:
    """Without this, agreement would say nothing about windows."""
    oracle, _ = build_pair(config_of(name))
    wider, _ = build_pair(config_of(name, sliding_window=WINDOW + 1))
    for texts in (prompts(),):
        narrow_logits = oracle_logits(oracle, texts, node_tokens())
        wide_logits = oracle_logits(wider, texts, node_tokens())
        gap = (narrow_logits - wide_logits).abs().amax((0, 2))
        assert float(gap.min()) > 1e-4, "some node does not feel a window wider by one"


def test_the_soft_cap_matters(build_pair: Build) -> None:
    name = "gemma2-window-softcap"
    oracle, _ = build_pair(config_of(name))
    looser, _ = build_pair(config_of(name, attn_logit_softcapping=2.5))
    texts = prompts()
    gap = oracle_logits(oracle, texts, node_tokens()) - oracle_logits(looser, texts, node_tokens())
    assert float(gap.abs().amax((0, 2)).min()) > 1e-4


@pytest.mark.parametrize("name", ["llama", "mixtral-window", "gpt-oss-window-sinks"])
def test_a_row_does_not_depend_on_its_neighbours(name: str, build_pair: Build) -> None:
    _, model = build_pair(config_of(name))
    target = HFTarget(model)
    tokens = node_tokens()
    together = tree_logits(target, target.new_cache(3, 64), prompts(), tokens)
    for b, text in enumerate(prompts()):
        alone = tree_logits(target, target.new_cache(1, 64), [text], tokens[b : b + 1])
        torch.testing.assert_close(together[b], alone[0], rtol=0, atol=1e-9)


REFUSES_FIXED_WIDTH = {
    *("qwen2moe-window", "qwen3moe", "mixtral-window", "phimoe-window", "olmoe"),
    *("deepseek-v2", "deepseek-v3", "gemma2-window-softcap", "gpt-oss-window-sinks"),
}


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.every(3)
def test_forwards_of_fixed_width_give_the_same_logits(name: str, build_pair: Build) -> None:
    """Ragged rows and trees in pieces of 8; or a refusal, of experts and written-out sums."""
    _, model = build_pair(config_of(name))
    usual, _ = two_steps(HFTarget(model))
    if name in REFUSES_FIXED_WIDTH:
        with pytest.raises(UnsupportedModel, match="cannot keep --fixed-width: its"):
            HFTarget(model, fixed_width=8)
        return
    fixed, _ = two_steps(HFTarget(model, fixed_width=8))
    for ours, theirs in zip(fixed, usual, strict=True):
        bound = (1e-5 if name in ROUNDS_INSIDE else 1e-9) * float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)
