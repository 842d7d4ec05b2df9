"""Bad models, folders and prompts: one clear sentence, the right error class, nothing executed."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import BackendError, DraftsmithError, InputError, UnsupportedModel
from draftsmith.targets.hf import HFTarget, load_model, load_target
from draftsmith.targets.toy import tiny_target

Folder = Path


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
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
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


@pytest.mark.parametrize("left_over", [None, "LlamaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer"])
def test_a_missing_tokenizer_is_named(copy: Folder, left_over: str | None) -> None:
    """transformers makes up an empty one where only tokenizer_config.json is left."""
    for path in copy.glob("tokenizer*"):
        path.unlink()
    if left_over:
        settings = {"tokenizer_class": left_over, "eos_token": "</s>"}
        (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    match = "has no tokenizer files" if left_over else "Cannot load the tokenizer of|no tokenizer"
    refusal(BackendError, 3, match, lambda: load_target(str(copy)))


def test_a_broken_tokenizer_is_named(copy: Folder) -> None:
    (copy / "tokenizer.json").write_text('{"version": ')
    refusal(BackendError, 3, "Cannot load the tokenizer of", lambda: load_target(str(copy)))


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
    refusal(BackendError, 3, "safetensors", lambda: load_target(str(copy)))
    assert not trace.exists()


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


@pytest.mark.parametrize("device", ["nonsense", "cpu:x", "cuda:99", "meta", ""])
def test_a_device_that_is_not_there_is_an_input_error(sound: Folder, device: str) -> None:
    message = refusal(InputError, 2, "Device", lambda: load_model(str(sound), device=device))
    assert repr(device) in message


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


def test_a_prompt_one_short_of_the_context_gets_one_token() -> None:
    target = tiny_target(max_length=32)
    drafter = NoDrafter()
    drafter.bind(target)
    steps = list(decode(target, drafter, [[3] * 31], DecodeOptions(max_new_tokens=9)))
    assert [len(step.emitted[0]) for step in steps] == [1]
    assert steps[-1].finish == ("context",)
