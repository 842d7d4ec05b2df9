"""Bad models, folders and prompts: one clear sentence, the right error class, nothing executed."""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma3TextConfig

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.registry import make_drafter
from draftsmith.errors import BackendError, DraftsmithError, InputError, UnsupportedModel
from draftsmith.targets.hf import (
    EmbeddingAndHead,
    HFTarget,
    load_model,
    load_target,
    load_tokenizer,
    loading,
)
from draftsmith.targets.support import refuse_by_numbers
from draftsmith.targets.toy import tiny_target

Folder = Path
EIGHT_BITS = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A small complete model with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "sound"
    tiny_target(max_length=32).model.float().save_pretrained(folder)
    words = {word: i for i, word in enumerate(["<unk>", "</s>", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert "attn_implementation" not in json.dumps(config), "how we attend is not the model's"
    return folder


@pytest.fixture
def copy(sound: Folder, tmp_path: Path) -> Folder:
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    return folder


def refusal(expected: type[DraftsmithError], code: int, match: str, call: Any) -> str:
    """The message of what `call` raises: one sentence, of this class and exit code."""
    with pytest.raises(expected, match=match) as caught:
        call()
    message = str(caught.value)
    assert caught.value.exit_code == code
    assert "\n" not in message
    assert message.endswith((".", ")."))
    return message


def set_config(folder: Folder, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --------------------------------------------------------------------------- folders


def test_a_sound_folder_loads_and_keeps_its_name(sound: Folder) -> None:
    target = load_target(str(sound), dtype="float32", device="cpu")
    assert target.name == "sound"
    assert target.end_ids == {1}
    assert target.max_length == 32


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", torch.float32),
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float32", torch.float32),
        ("float64", torch.float64),
    ],
)
def test_every_dtype_loads(sound: Folder, dtype: str, expected: torch.dtype) -> None:
    assert load_target(str(sound), dtype=dtype, device="cpu").dtype == expected


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    name = str(tmp_path / "nowhere")
    message = refusal(BackendError, 3, "does not exist", lambda: load_target(name))
    assert name in message


def test_a_file_in_place_of_a_folder_is_not_said_to_be_missing(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    message = refusal(BackendError, 3, "is a file", lambda: load_target(str(file)))
    assert "does not exist" not in message


def test_a_folder_without_configuration_is_named(tmp_path: Path) -> None:
    refusal(BackendError, 3, "has no config.json", lambda: load_target(str(tmp_path)))


@pytest.mark.parametrize("text", ['{"model_type": "llama", ', "[1, 2]", "{}", "\x00\x01", ""])
def test_a_broken_configuration_is_one_sentence(copy: Folder, text: str) -> None:
    (copy / "config.json").write_text(text)
    message = refusal(BackendError, 3, "Cannot load the model", lambda: load_target(str(copy)))
    assert str(copy) in message


def test_an_unknown_architecture_is_named(copy: Folder) -> None:
    set_config(copy, model_type="nosuchmodel")
    refusal(BackendError, 3, "nosuchmodel", lambda: load_target(str(copy)))


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_truncated_weights_are_refused(copy: Folder, keep: int) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    refusal(BackendError, 3, "Cannot load the model", lambda: load_target(str(copy)))


def test_missing_weights_are_refused_and_not_made_up(copy: Folder) -> None:
    """transformers only warns, and goes on with random numbers."""
    change_weights(copy, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    refusal(
        BackendError,
        3,
        r"incomplete: 1 weights .*model\.layers\.1\.mlp\.up_proj\.weight",
        lambda: load_target(str(copy)),
    )


def test_weights_of_another_shape_are_refused(copy: Folder) -> None:
    set_config(copy, intermediate_size=48)
    match = r"does not fit .*mlp.* is \[.*64.*\] .* asks for \[.*48.*\]"
    refusal(BackendError, 3, match, lambda: load_target(str(copy)))


def change_weights(folder: Folder, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 100),
        ("num_hidden_layers", 10_000_000),
        ("num_hidden_layers", 10**18),
        ("num_labels", 10**9),
        ("vocab_size", 10**9),
        ("intermediate_size", 10**12),
        ("num_key_value_heads", 10**9),
        ("head_dim", 10**7),
    ],
)
def test_sizes_that_the_files_cannot_hold_are_refused_before_memory_is_asked_for(
    copy: Folder, monkeypatch: pytest.MonkeyPatch, key: str, value: int
) -> None:
    def load(*_: Any, **__: Any) -> None:
        pytest.fail("weights are loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
    set_config(copy, **{key: value})
    refusal(BackendError, 3, "config.json asks for", lambda: load_target(str(copy)))


def test_layers_that_the_configuration_leaves_out_are_named(copy: Folder) -> None:
    """transformers drops their weights and goes on with a shallower model."""
    set_config(copy, num_hidden_layers=1)
    match = r"9 weights .*LlamaForCausalLM.*model\.layers\.1\."
    refusal(BackendError, 3, match, lambda: load_target(str(copy)))


def test_a_tensor_without_a_place_is_named(copy: Folder) -> None:
    change_weights(copy, lambda weights: weights.update(blend=torch.ones(3)))
    refusal(BackendError, 3, r"1 weights .*\(blend\)", lambda: load_target(str(copy)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_floating_point_numbers_are_named(
    copy: Folder, dtype: torch.dtype
) -> None:
    """transformers rounds the others to them and goes on."""
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(copy, lambda weights: weights.update({name: weights[name].to(dtype)}))
    refusal(BackendError, 3, rf"{re.escape(name)} as ", lambda: load_target(str(copy)))


def test_compressed_weights_without_their_configuration_are_named(copy: Folder) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    scale = {f"{name}_scale": torch.ones(64, 1)}
    change_weights(copy, lambda weights: weights.update(scale))
    refusal(BackendError, 3, r"compressed.*quantization_config", lambda: load_target(str(copy)))
    change_weights(copy, lambda weights: weights.update({name: weights[name].to(EIGHT_BITS)}))
    match = rf"compressed.* F8_E4M3.* 1 scales \({re.escape(name)}_scale"
    refusal(BackendError, 3, match, lambda: load_target(str(copy)))


def test_a_key_that_another_package_misses_is_a_sentence() -> None:
    said = r"Cannot load it: the key 'rope_theta' is missing"
    with pytest.raises(BackendError, match=said), loading("it"):
        raise KeyError("rope_theta")


def test_a_quantization_that_is_not_known_is_named(copy: Folder) -> None:
    """transformers takes the numbers for weights, with a remark."""
    set_config(copy, quantization_config={"quant_method": "modelopt"})
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(copy, lambda weights: weights.update({name: weights[name].to(torch.uint8)}))
    refusal(BackendError, 3, "'modelopt'", lambda: load_target(str(copy)))


def test_what_older_versions_saved_beside_the_weights_is_left_out(copy: Folder) -> None:
    """Rotary frequencies and masks that are computed today, and a head that is the embedding."""
    set_config(copy, tie_word_embeddings=True)

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        for layer in range(2):
            attention = f"model.layers.{layer}.self_attn"
            weights[f"{attention}.rotary_emb.inv_freq"] = torch.ones(4)
            weights[f"{attention}.rotary_emb.cos_cached"] = torch.ones(1, 1, 32, 4)
            weights[f"{attention}.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool)
            weights[f"{attention}.masked_bias"] = torch.tensor(-1e9)
        weights["model.position_ids"] = torch.arange(32)[None]

    change_weights(copy, change)
    weight = load_target(str(copy), device="cpu").head_weight()
    assert torch.equal(weight, load_file(copy / "model.safetensors")["lm_head.weight"])


def test_a_head_that_is_the_embedding_need_not_be_stored(copy: Folder) -> None:
    set_config(copy, tie_word_embeddings=True)
    change_weights(copy, lambda weights: weights.pop("lm_head.weight"))
    weight = load_target(str(copy), device="cpu").head_weight()
    assert torch.equal(weight, load_file(copy / "model.safetensors")["model.embed_tokens.weight"])


@pytest.mark.parametrize("text", ['{"eos_token_id": ', "[1]", "\x00", ""])
def test_a_generation_config_that_cannot_be_read_is_named(copy: Folder, text: str) -> None:
    """It says where texts end; transformers decodes without it."""
    (copy / "generation_config.json").write_text(text)
    refusal(BackendError, 3, r"generation_config\.json", lambda: load_target(str(copy)))


@pytest.mark.parametrize("value", ["1", [[1]], ["</s>"], True])
def test_an_end_that_is_no_token_is_named(copy: Folder, value: object) -> None:
    """transformers keeps it, and texts would go on behind their end."""
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    refusal(BackendError, 3, "eos_token_id", lambda: load_target(str(copy)))


@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_link_that_leads_nowhere_is_named(copy: Folder, name: str) -> None:
    """Without its generation_config.json a model would end its texts elsewhere."""
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(copy / "nowhere")
    refusal(BackendError, 3, rf"{name}.*broken link", lambda: load_target(str(copy)))


@pytest.mark.parametrize("text", ["", "[1]", "nonsense"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_cannot_be_read_is_named(copy: Folder, name: str, text: str) -> None:
    (copy / name).write_text(text)
    refusal(BackendError, 3, f"{copy}/{name}", lambda: load_target(str(copy)))


def test_a_word_that_transformers_does_not_know_is_named(copy: Folder) -> None:
    set_config(copy, hidden_act="nonsense")
    refusal(BackendError, 3, "key 'nonsense'", lambda: load_target(str(copy)))


def test_a_generation_config_may_be_left_out(copy: Folder) -> None:
    (copy / "generation_config.json").unlink()
    assert load_target(str(copy), device="cpu").end_ids == {1}


@pytest.mark.parametrize("value", [0, -5, "512", None, 1.5])
def test_a_context_of_no_tokens_blames_the_configuration(copy: Folder, value: object) -> None:
    set_config(copy, max_position_embeddings=value)
    match = rf"max_position_embeddings.*{value}"
    refusal(BackendError, 3, match, lambda: load_target(str(copy)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("rms_norm_eps", math.inf), ("rms_norm_eps", -1.0), ("rms_norm_eps", math.nan)],
)
def test_a_constant_that_cannot_be_is_named(copy: Folder, name: str, value: float) -> None:
    set_config(copy, **{name: value})
    refusal(BackendError, 3, rf"{name} is {value}, and should be", lambda: load_target(str(copy)))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -5.0, 0.0, 0])
def test_a_rotary_base_that_cannot_be_is_named(copy: Folder, value: float) -> None:
    set_config(copy, rope_parameters={"rope_type": "default", "rope_theta": value})
    said = rf"rope_theta is {value}, and should be a finite number above 0"
    refusal(BackendError, 3, said, lambda: load_target(str(copy)))


@pytest.mark.parametrize("value", [-4.0, 0.0, math.inf])
def test_a_rotary_factor_that_cannot_be_is_named(copy: Folder, value: float) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": value}
    set_config(copy, rope_parameters=rope)
    said = rf"factor is {value}, and should be a finite number above 0"
    refusal(BackendError, 3, said, lambda: load_target(str(copy)))


def test_a_rotary_base_of_one_kind_of_layer_is_named() -> None:
    good, bad = ({"rope_type": "default", "rope_theta": base} for base in (1e4, 0.0))
    config = Gemma3TextConfig(rope_parameters={"full_attention": good, "sliding_attention": bad})
    with pytest.raises(BackendError, match=r"rope_theta is 0\.0"):
        refuse_by_numbers(config, "a model")


@pytest.mark.parametrize("left_over", [None, "LlamaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer"])
def test_a_missing_tokenizer_is_named(copy: Folder, left_over: str | None) -> None:
    """transformers makes up an empty one where only tokenizer_config.json is left."""
    for path in copy.glob("tokenizer*"):
        path.unlink()
    if left_over:
        settings = {"tokenizer_class": left_over, "eos_token": "</s>"}
        (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    refusal(BackendError, 3, "has no tokenizer files", lambda: load_target(str(copy)))


def test_a_broken_tokenizer_is_named(copy: Folder) -> None:
    (copy / "tokenizer.json").write_text('{"version": ')
    refusal(BackendError, 3, "Cannot load the tokenizer of", lambda: load_target(str(copy)))


def test_a_tokenizer_that_cannot_be_used_is_named(copy: Folder) -> None:
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": "x"}))
    refusal(BackendError, 3, "Cannot load the tokenizer of", lambda: load_target(str(copy)))


@pytest.mark.parametrize("as_draft", [False, True])
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    copy: Folder, as_draft: bool
) -> None:
    """Its ids lie outside of the embedding, or mean other tokens there."""
    change = json.loads((copy / "tokenizer.json").read_text())
    words = change["model"]["vocab"]
    words |= {f"w{i}": i for i in range(len(words), 65)}
    (copy / "tokenizer.json").write_text(json.dumps(change))
    match = r"tokens go up to 64\b.* has 64 of them"
    if as_draft:
        draft = make_drafter(f"independent:{copy}")
        refusal(BackendError, 3, match, lambda: draft.bind(tiny_target()))
    else:
        refusal(BackendError, 3, match, lambda: load_target(str(copy)))
        # what trains a drafter over stored states reads no more than embedding and head
        tokenizer, config = load_tokenizer(str(copy)), AutoConfig.from_pretrained(copy)
        ends = partial(EmbeddingAndHead.load, str(copy), config, tokenizer)
        refusal(BackendError, 3, match, ends)
    del words["w64"]
    (copy / "tokenizer.json").write_text(json.dumps(change))
    tokenizer = load_tokenizer(str(copy))
    tokenizer.add_tokens(["<image>"])  # as in Gemma 3, whose text model never learnt it
    tokenizer.save_pretrained(copy)
    target = load_target(str(copy), device="cpu")
    assert (target.vocab_size, target.tokenizer.get_vocab()["<image>"]) == (64, 64)


def test_an_encoder_decoder_folder_is_refused_before_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    refusal(UnsupportedModel, 3, "is an encoder-decoder", lambda: load_target(str(tmp_path)))


def test_a_recurrent_folder_is_refused_before_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    refusal(
        UnsupportedModel,
        3,
        r"\(MambaForCausalLM\) keeps a recurrent state that cannot roll back",
        lambda: load_target(str(tmp_path)),
    )


# --------------------------------------------------------------------------- foreign code


class _Bomb:
    """Unpickling it writes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.trace, "executed"))


def test_pickled_weights_are_refused_and_never_unpickled(copy: Folder, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": _Bomb(trace)}))
    match = r"pytorch_model\.bin only, a pickle.*safetensors"
    refusal(BackendError, 3, match, lambda: load_target(str(copy)))
    assert not trace.exists()


def test_pickled_parts_are_refused_by_the_name_of_their_index(copy: Folder) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin.index.json").write_text("{}")
    match = r"pytorch_model\.bin\.index\.json only, a pickle"
    refusal(BackendError, 3, match, lambda: load_target(str(copy)))


def test_a_configuration_cannot_lead_to_pickled_weights(copy: Folder, tmp_path: Path) -> None:
    """transformers reads this file, even where it is to read safetensors alone."""
    torch.save(load_file(copy / "model.safetensors"), copy / "adapter_model.bin")
    set_config(copy, transformers_weights="adapter_model.bin")
    refusal(BackendError, 3, "safetensors", lambda: load_target(str(copy)))


@pytest.mark.parametrize("model_type", ["llama", "nosuchmodel"])
def test_code_in_the_folder_never_runs_by_default(
    copy: Folder, tmp_path: Path, model_type: str
) -> None:
    trace = tmp_path / "trace"
    for module in ("configuration_x", "modeling_x", "tokenization_x"):
        (copy / f"{module}.py").write_text(
            f"from pathlib import Path\nPath({str(trace)!r}).write_text('executed')\n"
            "class X: pass\n"
        )
    set_config(
        copy,
        model_type=model_type,
        auto_map={
            "AutoConfig": "configuration_x.X",
            "AutoModelForCausalLM": "modeling_x.X",
            "AutoTokenizer": ["tokenization_x.X", None],
        },
    )
    if model_type == "llama":  # transformers' own class is used instead
        load_target(str(copy), device="cpu")
    else:
        refusal(BackendError, 3, "custom code", lambda: load_target(str(copy)))
    assert not trace.exists()


# --------------------------------------------------------------------------- arguments


def test_an_unknown_dtype_names_the_nearest(sound: Folder) -> None:
    message = refusal(
        InputError, 2, "Unknown dtype 'bfloat61'", lambda: load_target(str(sound), dtype="bfloat61")
    )
    assert "did you mean 'bfloat16'?" in message


@pytest.mark.parametrize("device", ["nonsense", "cpu:x", "cpu:7", "cuda:99", "meta", ""])
def test_a_device_that_is_not_there_is_an_input_error(sound: Folder, device: str) -> None:
    message = refusal(InputError, 2, "Device", lambda: load_model(str(sound), device=device))
    assert repr(device) in message


def test_a_revision_of_a_local_folder_is_refused(sound: Folder) -> None:
    refusal(InputError, 2, "leave it out", lambda: load_target(str(sound), revision="main"))


# --------------------------------------------------------------------------- numbers


def _with_nan() -> Any:
    model = tiny_target().model.float()
    model.model.norm.weight.data[3] = torch.nan
    return model


def test_nan_weights_are_refused_at_loading() -> None:
    refusal(BackendError, 3, "LlamaForCausalLM gives NaN", lambda: HFTarget(_with_nan()))


def test_nan_weights_end_generation_with_one_sentence() -> None:
    target = HFTarget(_with_nan(), check=False)
    drafter = NoDrafter()
    drafter.bind(target)
    run = decode(target, drafter, [[3, 4, 5]], DecodeOptions(max_new_tokens=4))
    refusal(BackendError, 3, "NaN", lambda: list(run))


# --------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ([], "There is no prompt"),
        ([[3], []], "Prompt 1 is empty"),
        ([[3, 64]], "Prompt 0 holds token 64, outside the target's vocabulary of 64"),
        ([[3], [-1]], "Prompt 1 holds token -1"),
        ([[3] * 32], "Prompt 0 has 32 tokens, but .* has a context of 32"),
    ],
)
@pytest.mark.parametrize("as_array", [False, True])
def test_a_prompt_that_cannot_be_decoded_is_an_input_error(
    prompts: list[list[int]], match: str, as_array: bool
) -> None:
    target = tiny_target(max_length=32)
    drafter = NoDrafter()
    drafter.bind(target)
    given: Any = [np.array(prompt, dtype=np.int64) for prompt in prompts] if as_array else prompts
    refusal(InputError, 2, match, lambda: list(decode(target, drafter, given, DecodeOptions())))


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_prompt_that_is_a_set_has_no_order(kind: Any) -> None:
    target = tiny_target(max_length=32)
    given: Any = [[3], kind([5, 4])]
    match = "Prompt 1 is a set, which has no order"
    refusal(InputError, 2, match, lambda: list(decode(target, NoDrafter(), given, DecodeOptions())))


def test_a_prompt_one_short_of_the_context_gets_one_token() -> None:
    target = tiny_target(max_length=32)
    drafter = NoDrafter()
    drafter.bind(target)
    steps = list(decode(target, drafter, [[3] * 31], DecodeOptions(max_new_tokens=9)))
    assert [len(step.emitted[0]) for step in steps] == [1]
    assert steps[-1].finish == ("context",)
