"""`draftsmith plan ladder`: sizes for a budget, predictions, and commands that can be run."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.command_cases import ran
from tests.tiny_models import tiny_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from draftsmith import cli
from draftsmith.commands.pretrain import PretrainOptions
from draftsmith.distill.config import ArchitectureConfig, ScheduleConfig
from draftsmith.distill.initial_model import student_config
from draftsmith.distill.model_sizes import (
    PRESETS,
    count_parameters,
    read_config,
    resized,
    shape_for,
)
from draftsmith.errors import InputError

HOURS = "--target-params 13B --target-tokens 1T --hours"
COV = [[1e-8, 0.0, 0.0], [0.0, 1e-6, 0.0], [0.0, 0.0, 1e-4]]


# --------------------------------------------------------------------------- counting weights

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 100,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GROUPED: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "llama-tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**GROUPED),
    "phi3": Phi3Config(**GROUPED),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED),
    "gemma": GemmaConfig(**GROUPED),
    "gemma2": Gemma2Config(**GROUPED),
    "opt": OPTConfig(**SMALL, ffn_dim=96),
    "opt-350m": OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False),
}


def weights(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", list(CONFIGS))
def test_weights_are_counted_from_config_json(name: str, tmp_path: Path) -> None:
    CONFIGS[name].save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert count_parameters(config, "here") == weights(CONFIGS[name])
    for size, preset in PRESETS.items():
        options = ArchitectureConfig(size=size, tokenizer=str(tmp_path))
        student = student_config(options, vocab_size=320, end_id=0, pad_id=0, context=100)
        assert count_parameters(resized(config, preset), "here") == weights(student)


@pytest.mark.parametrize("vocab_size", [320, 32_000, 150_000])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "opt"])
def test_shapes_come_near_to_any_size(family: str, vocab_size: int) -> None:
    config = CONFIGS[family].to_dict() | {"vocab_size": vocab_size}
    smallest = count_parameters(resized(config, shape_for(config, 1.0)), "here")
    for params in np.geomspace(max(4 * smallest, 1e6), 4e10, 23).tolist():
        shape = shape_for(config, params)
        count = count_parameters(resized(config, shape), "here")
        assert abs(math.log(count / params)) < math.log(1.3)
        assert shape.hidden % shape.heads == 0 and (shape.hidden // shape.heads) % 2 == 0
        assert 2 <= shape.intermediate / shape.hidden <= 3.5
        assert shape.layers <= shape.hidden / 16
    for preset in PRESETS.values():
        assert shape_for(config, count_parameters(resized(config, preset), "here")) == preset


def test_a_configuration_that_cannot_be_counted_is_named() -> None:
    with pytest.raises(InputError, match=r"here: .*type 'mamba'.*--target-params"):
        count_parameters({"model_type": "mamba"}, "here")
    with pytest.raises(InputError, match=r"here: 'hidden_size' must be a number.*None"):
        count_parameters({"model_type": "llama", "vocab_size": 10}, "here")


# --------------------------------------------------------------------------- the command


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `plan ladder`: its JSON, or the sentence it failed with."""

    def run(*words: str, code: int = 0) -> Any:
        return ran(capsys, "plan", "ladder", *words, "--json", code=code)

    return run


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json, and with what `pretrain` says of a training."""
    folder = tmp_path_factory.mktemp("a target")
    config = tiny_model().config
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = 4096, 32, 11008
    config.vocab_size = 32_000
    config.save_pretrained(folder)
    (folder / "run.json").write_text(json.dumps({"results": {"tokens": 2_000_000_000_000}}))
    return folder


@pytest.mark.parametrize("told", [True, False])
def test_the_commands_are_commands(plan: Any, target: Path, tmp_path: Path, told: bool) -> None:
    out = tmp_path / "a ladder"
    more: list[str] = []
    if told:
        texts = ["--text", "a b.txt", "c/*.py", "--eval-text", "held.txt"]
        more = [*texts, "--prompts", "p q.jsonl", "--suite", "s.jsonl"]
    found = plan("--target", str(target), "--tokens", "20B", "--out", str(out), *more)
    assert json.loads((out / "ladder.json").read_text()) == found
    best = found["n_opt"]
    for rung, wanted in zip(found["rungs"], (best / 2, best, 2 * best), strict=True):
        assert wanted / 1.3 < rung["params"] < 1.3 * wanted
    assert sum(rung["recommended"] for rung in found["rungs"]) == 1
    verbs, made = [], []
    for line in found["commands"]:
        name, *words = shlex.split(line)
        assert name == "draftsmith"
        verb, rest = cli.split_verb(words)
        options = cli.parse(verb, rest)
        options.validate()
        verbs.append(verb)
        made.append(options)
    assert verbs == ["collect", *["pretrain", "distill"] * 3, *["bench"] * 4, "plan check"]
    script = (out / "ladder.sh").read_text()
    assert all(line in script for line in found["commands"])
    for rung, options in zip(found["rungs"], made[1:7:2], strict=True):
        assert isinstance(options, PretrainOptions)
        block = options.training.block_length
        sizes = {"vocab_size": 32_000, "end_id": 0, "pad_id": 0}
        student = student_config(options.model, **sizes, context=block)
        assert weights(student) == rung["params"]
        assert options.training.duration == f"{rung['tokens']:.0f}tokens" == "20000000000tokens"
        assert str(options.out) == rung["drafts"]["pretrained"]
        assert options.data.text == (("a b.txt", "c/*.py") if told else ("$TEXT",))
        assert options.training.block_length <= tiny_model().config.max_position_embeddings
    observe, *benches = made[7:11]
    assert observe.drafting.lengths() == tuple(range(1, 10)) and observe.perplexity
    assert [one.drafting.draft_length for one in benches] == [
        one["gamma"] for one in found["rungs"]
    ]
    wanted = [folder for rung in found["rungs"] for folder in rung["drafts"].values()]
    assert list(observe.drafters()) == wanted
    assert [str(folder) for folder in made[-1].records] == [str(one.out) for one in made[7:11]]


def test_the_script_asks_for_what_it_was_not_told(plan: Any, target: Path, tmp_path: Path) -> None:
    """And leaves alone what is there: every line but the check is done."""
    folder = tmp_path / "l"
    plan("--target", str(target), "--tokens", "20B", "--out", str(folder), "--text", "x")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "draftsmith").write_text('#!/bin/sh\necho "$@"\n')
    (tools / "draftsmith").chmod(0o755)
    path = f"{tools}:/usr/bin:/bin"

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": path, **variables}
        command = ["sh", str(folder / "ladder.sh")]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    asked = run(EVAL_TEXT="e", PROMPTS="p")
    assert asked.returncode != 0 and "SUITE: file of prompts" in asked.stderr
    assert asked.stdout == "" and "TEXT:" not in asked.stderr.replace("EVAL_TEXT:", "")
    done = run(EVAL_TEXT="two words", PROMPTS="p", SUITE="s")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 12
    assert "--perplexity two words" in done.stdout
    for line in done.stdout.splitlines()[:-1]:
        words = shlex.split(line)
        out = Path(words[words.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "run.json").write_text("{}")
    again = run(EVAL_TEXT="e", PROMPTS="p", SUITE="s")
    assert again.stdout.split()[:2] == ["plan", "check"] and len(again.stdout.splitlines()) == 1


@pytest.mark.parametrize("tokens", [400_000, 8_000_000, 400_000_000])
def test_a_small_budget_has_many_small_steps(plan: Any, tmp_path: Path, tokens: int) -> None:
    """A thousand, unless a step is but a block; and the warm-up is over early."""
    laws = ["--coefficients", "-0.0066,0,1.31", "--loss", "3.8,55,0.35,1,0.366"]
    sizes = ["--target-params", "8.4M", "--target-tokens", "30M", "--vocab-size", "4096"]
    found = plan(*laws, *sizes, "--tokens", str(tokens), "--out", str(tmp_path / "l"))
    made = [shlex.split(line) for line in found["commands"]]
    parsed = [cli.parse("pretrain", words[2:]) for words in made if words[1] == "pretrain"]
    trainings = [one.training for one in parsed if isinstance(one, PretrainOptions)]
    assert len(trainings) == 3
    for plans in trainings:
        steps = tokens / plans.batch_tokens
        assert plans.batch_tokens % plans.block_length == 0
        assert steps >= 1000 or plans.batch_tokens == plans.block_length
        assert steps < 2000 or plans.batch_tokens == ScheduleConfig().batch_tokens
        assert 10 <= plans.warmup <= min(100, 0.1 * steps)
    rates = [plans.learning_rate for plans in trainings]
    assert 1.2e-3 < rates[2] < rates[1] < rates[0] < 1.6e-3, "small drafts learn at higher rates"


def test_a_budget_below_one_step_is_refused(plan: Any, tmp_path: Path) -> None:
    laws = ["--coefficients", "-0.0066,0,1.31", "--loss", "3.8,55,0.35,1,0.366"]
    sizes = ["--target-params", "8.4M", "--target-tokens", "30M", "--vocab-size", "4096"]
    said = plan(*laws, *sizes, "--tokens", "400", "--out", str(tmp_path / "l"), code=2)
    assert "400 tokens for a draft are less than one step" in said
    assert not (tmp_path / "l").exists()


def test_large_drafts_learn_at_the_usual_rate(plan: Any, tmp_path: Path) -> None:
    sizes = ["--target-params", "100000B", "--target-tokens", "30T", "--tokens", "30T"]
    found = plan(*sizes, "--out", str(tmp_path / "l"))
    made = [shlex.split(line) for line in found["commands"]]
    largest = [cli.parse("pretrain", words[2:]) for words in made if words[1] == "pretrain"][-1]
    assert isinstance(largest, PretrainOptions)
    assert found["rungs"][-1]["params"] > 13e9, "where the formula is below zero"
    assert largest.training.learning_rate == ScheduleConfig().learning_rate


def test_budgets_in_every_form(plan: Any, target: Path, tmp_path: Path) -> None:
    fixed = ["--target", str(target), "--out", str(tmp_path / "l")]
    tokens = plan(*fixed, "--tokens", "7.2B")
    hours = plan(*fixed, "--hours", "2", "--tokens-per-second", "1e6")
    assert tokens["rungs"] == hours["rungs"] and tokens["n_opt"] == hours["n_opt"]
    operations = plan(*fixed, "--flops", "1e18")
    for rung in operations["rungs"]:
        assert rung["tokens"] * 6 * rung["params"] == pytest.approx(1e18)
    assert operations["budget"] == {"tokens": None, "flops": 1e18}
    assert operations["target_tokens"] == 2e12, "as its run.json says"
    other = plan(*fixed, "--tokens", "7.2B", "--target-tokens", "1T")
    assert other["target_ppl"] > tokens["target_ppl"]


def test_a_target_that_is_not_here_is_told_by_its_size(plan: Any, tmp_path: Path) -> None:
    sizes = ["--target-params", "13B", "--target-tokens", "180B", "--tokens", "180B"]
    found = plan(*sizes, "--out", str(tmp_path / "l"))
    assert '"$TARGET"' in found["commands"][0] and "Llama" in found["warnings"][0]
    hub = plan("--target", "maker/model", *sizes, "--out", str(tmp_path / "m"))
    assert "--target maker/model" in hub["commands"][0]
    wide = plan(*sizes, "--vocab-size", "64000", "--out", str(tmp_path / "w"))
    for one, vocab in ((found, 32_000), (wide, 64_000)):
        for rung in one["rungs"]:
            hidden, inner = rung["shape"]["hidden"], rung["shape"]["intermediate"]
            layer = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden
            by_hand = vocab * hidden + rung["shape"]["layers"] * layer + hidden
            assert rung["params"] == by_hand


def test_the_default_law_has_the_errors_of_its_fit(plan: Any, tmp_path: Path) -> None:
    pytest.importorskip("statsmodels")
    sizes = ["--target-params", "12853473280", "--target-tokens", "180B", "--tokens", "180B"]
    found = plan(*sizes, "--out", str(tmp_path / "l"))
    low, high = found["ci95"]
    assert (high - low) / 2 == pytest.approx(1.96 * 0.077e8, rel=0.02)
    assert found["law"]["residual"] == pytest.approx(math.sqrt(0.001284 * 130 / 127), rel=1e-3)
    for rung in found["rungs"]:
        assert rung["alpha"]["low"] < rung["alpha"]["value"] < rung["alpha"]["high"]
    own = plan(*sizes, "--coefficients", "-0.0067,0.012971,0.65", "--out", str(tmp_path / "o"))
    assert own["ci95"] is None and own["rungs"][0]["tau"]["low"] is None
    assert any("no intervals" in line for line in own["warnings"])


def test_a_law_of_ones_own_brings_its_intervals(plan: Any, tmp_path: Path) -> None:
    law = {
        "A": -0.0067,
        "B": 0.012971,
        "C": 0.642084,
        "cov": COV,
    }
    path = tmp_path / "law.json"
    words = ["--target-params", "13B", "--target-tokens", "180B", "--tokens", "180B"]
    words += ["--law", str(path), "--out", str(tmp_path / "l")]
    path.write_text(json.dumps({**law, "mse": 0.0009, "n": 103}))
    found = plan(*words)
    assert found["law"]["residual"] == pytest.approx(math.sqrt(0.0009 * 1.03))
    path.write_text(json.dumps({**law, "mse": "low", "n": 103}))
    assert f"option mse in {path}: expected float or none, got 'low'" in plan(*words, code=2)
    path.write_text(json.dumps({**law, "mse": 0.0009, "n": 3}))
    assert "'mse' and 'n' must be those of a fit, got 0.0009 and 3" in plan(*words, code=2)


def test_coefficients_that_are_given_have_no_errors_of_others(plan: Any, tmp_path: Path) -> None:
    """Also where they equal those of the paper."""
    pytest.importorskip("statsmodels")
    papers = {"A": -0.0067, "B": 0.012971, "C": 0.642084}
    (tmp_path / "law.json").write_text(json.dumps(papers))
    ladder = ("--target-params", "13B", "--target-tokens", "180B", "--tokens", "180B")
    for number, words in enumerate(
        (
            ("--law", str(tmp_path / "law.json")),
            ("--coefficients", ",".join(map(str, papers.values()))),
        )
    ):
        own = plan(*ladder, *words, "--out", str(tmp_path / str(number)))
        assert own["ci95"] is None
        assert any("no intervals" in line for line in own["warnings"])


def test_where_no_draft_pays_there_is_nothing_to_run(plan: Any, tmp_path: Path) -> None:
    sizes = ["--target-params", "13B", "--target-tokens", "180B", "--tokens", "180B"]
    found = plan(*sizes, "--cost-floor", "0.95", "--out", str(tmp_path / "l"))
    assert found["n_opt"] is None and found["commands"] == []
    assert not any(rung["recommended"] for rung in found["rungs"])
    assert not (tmp_path / "l" / "ladder.sh").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--target-params 13B --target-tokens 1T", "give one budget"),
        ("--target-params 13B --target-tokens 1T --tokens 1B --flops 1e18", "give one budget"),
        ("--target-params 13B --target-tokens 1T --hours 2", "--hours needs --tokens-per-second"),
        ("--target-params 13B --tokens 1B --tokens-per-second 5", "does nothing without --hours"),
        ("--target-params 13B --target-tokens 1T --tokens many", "--tokens must be a count"),
        ("--target-params 13B --tokens 1B", "give --target-tokens"),
        ("--tokens 1B", "give --target FOLDER, or --target-params"),
        ("--target maker/model --tokens 1B", "maker/model is no folder here"),
        ("--target-params 13B --target-tokens 1T --tokens 1B --cost-floor 0", "--cost-floor must"),
        ("--target-params 13B --target-tokens 1T --tokens 1B --out a,b", "must not hold a comma"),
        (f"{HOURS} 1e300 --tokens-per-second 1e300", "--hours must be"),
        (f"{HOURS} 1e30 --tokens-per-second 1e30", "--tokens-per-second must be"),
        (f"{HOURS} 1e-9 --tokens-per-second 1", "--tokens-per-second must be"),
        (f"{HOURS} 1e-3 --tokens-per-second 1", "budget of --hours x --tokens-per-second = 3.6"),
        ("--target-params 13B --target-tokens 1T --tokens 1", "with a budget of --tokens = 1 no"),
        ("--target-params 13B --target-tokens 1T --flops 1", "with a budget of --flops = 1 no"),
        (f"{HOURS} 9 --tokens-per-second 1e6 --coefficients -0.0067,0.0129,1.05", "no best draft"),
    ],
)
def test_plans_that_cannot_be_made_say_why(plan: Any, words: str, sentence: str) -> None:
    assert sentence in plan(*words.split(), code=2)


def test_folders_without_a_usable_configuration_are_named(plan: Any, tmp_path: Path) -> None:
    words = ["--target", str(tmp_path), "--target-tokens", "1T", "--tokens", "1B"]
    assert f"{tmp_path / 'config.json'}" in plan(*words, code=2)
    for text in ("", "[]", "{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        assert "config.json" in plan(*words, code=2)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert "of type 'mamba'" in plan(*words, code=2)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 0}')
    assert "config.json: 'hidden_size' must be a number" in plan(*words, code=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 10**400),
        ("vocab_size", True),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", "x"),
        ("head_dim", -1),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", "long"),
        ("num_hidden_layers", 10**12),
    ],
)
def test_a_dimension_that_is_none_is_named(
    plan: Any, tmp_path: Path, name: str, value: object
) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    large = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 11008}
    path.write_text(json.dumps({**json.loads(path.read_text()), **large, name: value}))
    said = plan("--target", str(tmp_path), "--target-tokens", "1T", "--tokens", "1B", code=2)
    assert "config.json" in said and f"'{name}'" in said and len(said) < 500


def test_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom draftsmith import cli\ntry:\n    cli.main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    words = "--target-params 13B --target-tokens 1T --tokens 1B --coefficients -0.0067,0.013,0.65"
    words += f" --out {tmp_path / 'l'}"
    command = [sys.executable, "-c", program, "plan", "ladder", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tokens_of_a_target_are_not_those_of_any_run_that_lies_here(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text('{"results": {"tokens": 1e12}}')
    monkeypatch.chdir(tmp_path)
    said = plan("--target-params", "13B", "--tokens", "1T", code=2)
    assert "--target-tokens" in said
