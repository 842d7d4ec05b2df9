"""`draftsmith plan ladder`: sizes for a budget, predictions, and commands that can be run."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
from draftsmith.errors import InputError
from draftsmith.option_groups import ArchitectureOptions
from draftsmith.options import PretrainOptions
from draftsmith.plan.ladder import FlopBudget, Ground, TokenBudget, best_params, ladder
from draftsmith.plan.optimum import optimal_speedup
from draftsmith.plan.sizing import AcceptanceLaw, Setting, best_draft
from draftsmith.recipes._sizes import PRESETS, count_parameters, read_config, resized
from draftsmith.recipes._student import student_config

OPT_13B = Ground(
    target_params=12_853_473_280, target_tokens=1.8e11, budget=TokenBudget(amount=1.8e11)
)
SIZES = {"a": 8e6, "b": 3e7, "c": 1e8, "d": 4e8, "e": 2e9, "huge": 1e11}
KNOWN = AcceptanceLaw(cov=((1e-8, 0.0, 0.0), (0.0, 1e-6, 0.0), (0.0, 0.0, 1e-4)), residual=0.03)


# --------------------------------------------------------------------------- solving


def test_with_a_budget_of_tokens_the_best_size_is_that_of_plan_optimum() -> None:
    sizing = best_draft(
        Setting(target_params=12_853_473_280, target_tokens=1.8e11, draft_tokens=1.8e11, law=KNOWN)
    )
    found = ladder(replace(OPT_13B, law=KNOWN), SIZES)
    assert sizing.best is not None and sizing.ci95 is not None
    assert found.best_params == pytest.approx(sizing.best.params, rel=1e-6)
    assert found.best_params == pytest.approx(117313808.6, rel=1e-6)  # Table 5
    assert found.ci95 == pytest.approx(sizing.ci95, rel=1e-4)


def test_with_a_budget_of_operations_larger_drafts_see_less_text() -> None:
    budget = FlopBudget(amount=1e19)
    assert float(budget.tokens(1e8)) == pytest.approx(1e19 / 6e8)
    ground = replace(OPT_13B, budget=budget)
    best = best_params(ground)
    assert best is not None
    sizes = np.geomspace(1e6, 1e9, 4001)
    by_hand = [
        Setting(target_params=12_853_473_280, target_tokens=1.8e11, draft_tokens=1e19 / (6 * size))
        for size in sizes
    ]
    found = [float(one.speedup(size)) for one, size in zip(by_hand, sizes, strict=True)]
    assert best == pytest.approx(float(sizes[int(np.argmax(found))]), rel=2e-3)
    richer = best_params(replace(OPT_13B, budget=FlopBudget(amount=1e21)))
    assert richer is not None and richer > best


def test_a_measured_cost_is_a_floor_under_all_sizes() -> None:
    dear = replace(OPT_13B, cost_floor=0.05)
    assert float(dear.cost_ratio(1e8)) == 0.05 > 1e8 / dear.target_params
    assert float(dear.cost_ratio(5e9)) == pytest.approx(5e9 / dear.target_params)
    best, cheap = best_params(dear), best_params(OPT_13B)
    assert best is not None and cheap is not None
    assert best == pytest.approx(0.05 * dear.target_params, rel=1e-3), "smaller is no cheaper"
    assert float(dear.speedup(best)) < float(OPT_13B.speedup(cheap))


def test_the_rungs_are_the_fastest_size_and_its_neighbours() -> None:
    found = ladder(OPT_13B, SIZES)
    assert [rung.size for rung in found.rungs] == ["b", "c", "d"]
    assert found.recommended == 1
    low = ladder(OPT_13B, {"x": 5e8, "y": 1e9, "z": 2e9, "zz": 4e9})
    assert [rung.size for rung in low.rungs] == ["x", "y", "z"] and low.recommended == 0
    assert "below the smallest size" in low.warnings[0]
    high = ladder(OPT_13B, {"x": 5e6, "y": 1e7})
    assert [rung.size for rung in high.rungs] == ["x", "y"] and high.recommended == 1
    assert "above the largest size" in high.warnings[0]


def test_estimates_hang_together_and_widen_with_the_law() -> None:
    for ground in (OPT_13B, replace(OPT_13B, law=KNOWN)):
        for rung in ladder(ground, SIZES).rungs:
            alpha, gamma = rung.alpha.value, rung.gamma
            assert rung.tau.value == pytest.approx(sum(alpha**n for n in range(gamma + 1)))
            cost = rung.params / ground.target_params
            assert rung.speedup.value == pytest.approx(rung.tau.value / (1 + gamma * cost))
            whole = float(optimal_speedup(alpha, cost, integer=True))
            assert rung.speedup.value == pytest.approx(whole)
    rung = ladder(replace(OPT_13B, law=KNOWN), SIZES).rungs[1]
    for estimate in (rung.alpha, rung.tau, rung.speedup):
        assert estimate.low is not None and estimate.high is not None
        assert estimate.low < estimate.value < estimate.high
    assert rung.alpha.high is not None
    # 1.96 sqrt(x^2 1e-8 + y^2 1e-6 + 1e-4 + 0.03^2)
    y = OPT_13B.target_ppl
    spread = math.sqrt(rung.draft_ppl**2 * 1e-8 + y**2 * 1e-6 + 1e-4 + 9e-4)
    assert rung.alpha.high - rung.alpha.value == pytest.approx(1.96 * spread)
    assert ladder(OPT_13B, SIZES).rungs[1].alpha.low is None


def test_a_draft_that_does_not_pay_is_said_to_slow_down() -> None:
    ground = replace(OPT_13B, cost_floor=0.9)
    found = ladder(ground, SIZES)
    assert found.best_params is None and found.recommended is None
    assert any("train none" in line for line in found.warnings)
    assert all(rung.gamma == 1 and rung.speedup.value < 1 for rung in found.rungs)


def test_sizes_without_a_rate_are_left_out_or_refused() -> None:
    found = ladder(OPT_13B, {"tiny": 1e5, **SIZES})
    assert "no acceptance rate for tiny" in found.warnings[0]
    with pytest.raises(InputError, match=r"tiny \(1e\+05\).*plan law"):
        ladder(OPT_13B, {"tiny": 1e5, "huge": 1e11})


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
    for size in PRESETS:
        options = ArchitectureOptions(size=size, tokenizer=str(tmp_path))
        student = student_config(options, vocab_size=320, end_id=0, pad_id=0, context=100)
        assert count_parameters(resized(config, size), "here") == weights(student)


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
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main(["plan", "ladder", *words, "--json"])
        out, err = capsys.readouterr()
        assert end.value.code == code, err
        return json.loads(out) if code == 0 else err.strip().splitlines()[-1]

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
    assert len(found["rungs"]) == 3 and sum(rung["recommended"] for rung in found["rungs"]) == 1
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
        assert options.model.size == rung["size"]
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
    gained = wide["rungs"][-1]["params"] - found["rungs"][-1]["params"]
    assert gained == 32_000 * 1024


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
        "cov": [list(row) for row in KNOWN.cov or ()],
    }
    path = tmp_path / "law.json"
    words = ["--target-params", "13B", "--target-tokens", "180B", "--tokens", "180B"]
    words += ["--law", str(path), "--out", str(tmp_path / "l")]
    path.write_text(json.dumps({**law, "mse": 0.0009, "n": 103}))
    found = plan(*words)
    assert found["law"]["residual"] == pytest.approx(math.sqrt(0.0009 * 1.03))
    path.write_text(json.dumps({**law, "mse": "low", "n": 103}))
    assert "'mse' and 'n' must be those of a fit, got 'low'" in plan(*words, code=2)


def test_where_no_draft_pays_there_is_nothing_to_run(plan: Any, tmp_path: Path) -> None:
    sizes = ["--target-params", "13B", "--target-tokens", "180B", "--tokens", "180B"]
    found = plan(*sizes, "--cost-ratio", "0.95", "--out", str(tmp_path / "l"))
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
        ("--target-params 13B --target-tokens 1T --tokens 1B --cost-ratio 0", "--cost-ratio must"),
        ("--target-params 13B --target-tokens 1T --tokens 1B --out a,b", "must not hold a comma"),
    ],
)
def test_plans_that_cannot_be_made_say_why(plan: Any, words: str, sentence: str) -> None:
    assert sentence in plan(*words.split(), code=2)


def test_folders_without_a_usable_configuration_are_named(plan: Any, tmp_path: Path) -> None:
    words = ["--target", str(tmp_path), "--target-tokens", "1T", "--tokens", "1B"]
    assert f"{tmp_path / 'config.json'}" in plan(*words, code=3)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert "of type 'mamba'" in plan(*words, code=2)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 0}')
    assert "config.json: 'hidden_size' must be a number" in plan(*words, code=2)


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
