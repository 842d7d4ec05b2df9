"""What `distill` refuses before anything is learnt: options that mean nothing, folders of another
kind or target, texts too short to learn from. Each sentence says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.command_cases import (
    Command,
    a_command,
    a_store,
    family_folder,
    network_words,
    trajectories,
)
from tests.tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, GPT2Config

from draftsmith.bench.compare.model import compare, read_runs
from draftsmith.distill import distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_folder(tmp_path_factory.mktemp("work"), "llama")


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return a_command(folder, capsys)


@pytest.fixture
def store(folder: Path, command: Command) -> Path:
    return a_store(folder, command, "store", "--features", "last")


def distil(command: Command, store: Path, out: Path, *words: str, code: int = 2) -> str:
    own = [*network_words(2), *words]
    said = command("distill", "--store", str(store), "--out", str(out), *own, code=code)
    assert code == 0 or not out.exists() or not (out / "run.json").exists()
    return said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("hass num_forwards=0", "num_forwards must be at least 1, got 0"),
        ("eagle noise=-1", "noise must be at least 0, got -1"),
        ("eagle noise=nan", "noise must be at least 0, got nan"),
        ("eagle3 decay=-0.5", "decay must be at least 0"),
        ("griffin mask_top=-3", "mask_top must be at least 0"),
        ("medusa heads=0", "heads must be at least 1"),
        ("medusa layers=-1", "layers must be at least 0"),
        ("p_eagle block=1", "block must be at least 2, got 1"),
        ("p_eagle layers=0", "layers must be at least 1, got 0"),
        ("parallel spacing=0", "spacing must be at least 1, got 0"),
        ("grifin", "'griffin'"),
        ("independent", "needs a model"),
        ("eagle:", "names no folder behind the colon"),
        ("prompt_lookup", "no weights"),
    ],
)
def test_values_without_meaning(
    tmp_path: Path, command: Command, store: Path, words: str, said: str
) -> None:
    kind, *option = words.split()
    own = ["--drafter", kind, *(["--drafter-option", *option] if option else [])]
    assert said in distil(command, store, tmp_path / "made", *own)


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        ("draft", "--feature-weight 1", "a draft model learns the divergence alone"),
        ("draft", "--mean-over all", "a draft model learns the divergence alone"),
        ("draft", "--laws states", "--laws states is for drafters that read the target's last"),
        ("eagle3", "--laws states", "--laws states is for drafters that read the target's last"),
        ("eagle", "--laws teacher --top-k 9999", "--top-k 9999: the target has"),
        ("medusa", "--feature-weight 1", "medusa imitates no states"),
        ("hass", "--objective sft --top-weight 1", "learns from tokens, not from laws"),
        (
            "eagle",
            "--token-weight 0 --feature-weight 0",
            "--token-weight and --feature-weight cannot both be 0",
        ),
        ("eagle", "--token-weight 0 --top-weight 1", "give --token-weight, too"),
        ("eagle", "--token-weight -1", "0 or more"),
    ],
)
def test_weights_of_terms_that_are_not_there(
    folder: Path, tmp_path: Path, command: Command, store: Path, kind: str, words: str, said: str
) -> None:
    drafter = str(folder / "target") if kind == "draft" else kind
    own = ["--drafter", drafter, *words.split()]
    assert said in distil(command, store, tmp_path / "made", *own)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sft --teacher-temperature 2", "--teacher-temperature 2.0 means nothing to --objective"),
        ("sft --tail floor", "--tail floor means nothing to --objective sft"),
        ("kl --beta 0.2", "--beta 0.2 means nothing to --objective kl, only to jsd: leave it out"),
        ("tvd --reading uniform", "--reading uniform means nothing to --objective tvd"),
        ("helinger", "no --objective 'helinger'; did you mean 'hellinger'"),
        ("sft --laws teacher --top-k 5", "--top-k does nothing without logprobs"),
        ("sft --laws teacher --text t --text-logprobs", "--text-logprobs does nothing without"),
    ],
)
def test_what_means_nothing_to_an_objective_is_refused_before_anything_is_loaded(
    tmp_path: Path, command: Command, words: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.distill.tokenizer_training.load_tokenizer", None)
    own = ["--drafter", "eagle", "--objective", *words.split()]
    assert said in distil(command, tmp_path / "no store", tmp_path / "made", *own)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "into 3 parts, but it has only 2 blocks (--batch-tokens 64 / --block-length 32):"),
        (
            ["--text", "t", "--text-share", "0.5", "--batch-tokens", "128"],
            "only 2 blocks (--batch-tokens 128 / --block-length 32, less --text-share 0.5):",
        ),
        (["--batch-tokens", "80"], "--batch-tokens 80 must be a multiple of --block-length 32"),
        (["--online"], "into 3 parts, but it has only 2 prompts (--prompts-per-step):"),
    ],
)
def test_parts_of_a_step_without_anything_are_refused_before_anything_is_loaded(
    tmp_path: Path,
    command: Command,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("draftsmith.distill.tokenizer_training.load_tokenizer", None)
    of = (
        ["--prompts", "p", "--prompts-per-step", "2"] if words == ["--online"] else ["--store", "s"]
    )
    own = ["--drafter", "eagle", "--gradient-accumulation", "3", *network_words(1), *of, *words]
    assert said in command("distill", *own, "--out", str(tmp_path / "made"), code=2)


def test_so_many_processes_are_as_many_parts(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.distill.distributed.started", lambda: 2)
    own = ["--drafter", "eagle", "--gradient-accumulation", "2", "--laws", "teacher"]
    said = distil(command, tmp_path / "no store", tmp_path / "made", *own)
    assert "--gradient-accumulation 2 in each of 2 processes divides a step into 4 parts" in said


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("hass --top-weight 1", "learns from tokens, not from laws"),
        (
            "parallel --drafter-option confidence_head=true",
            "learns from tokens, and the confidence head of parallel from laws",
        ),
    ],
)
def test_weights_of_terms_are_judged_before_the_stores_are_read(
    words: str, wanted: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.distill.distilling.training_data", None)
    own = ["--objective", "sft", "--drafter", *words.split()]
    assert wanted in distil(command, tmp_path / "no store", tmp_path / "made", *own)


def test_a_folder_settles_its_kind_and_its_structure(
    tmp_path: Path, command: Command, store: Path
) -> None:
    made = tmp_path / "medusa"
    own = ["--drafter", "medusa", "--drafter-option", "heads=2"]
    distil(command, store, made, *own, code=0)
    said = distil(command, store, tmp_path / "other", "--drafter", f"eagle:{made}")
    assert "holds a drafter of the kind medusa" in said
    again = ["--drafter", str(made), "--drafter-option", "heads=3"]
    assert "settled" in distil(command, store, tmp_path / "other", *again)
    kept = ["--drafter", str(made), "--drafter-option", "decay=0.5"]
    distil(command, store, tmp_path / "more", *kept, code=0)


def test_texts_too_short_for_the_forwards(tmp_path: Path, command: Command, store: Path) -> None:
    own = ["--drafter", "hass", "--drafter-option", "num_forwards=31"]
    said = distil(command, store, tmp_path / "made", *own)
    assert "learns 31 tokens ahead, from texts of at least 33 tokens" in said


@pytest.mark.parametrize("kind", ["learned positions", "rotated positions"])
def test_texts_longer_than_the_context_of_a_draft_model(
    kind: str, folder: Path, tmp_path: Path, command: Command, store: Path
) -> None:
    longest = max(len(one.prompt) + len(one.tokens) for one in trajectories(store))
    draft = tmp_path / "draft"

    def with_context(context: int) -> list[str]:
        config = GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=context)
        if kind == "learned positions":
            AutoModelForCausalLM.from_config(config).save_pretrained(draft)
        else:
            tiny_model(context=context).save_pretrained(draft)
        tiny_tokenizer().save_pretrained(draft)
        return ["--drafter", str(draft)]

    out, own = tmp_path / "made", with_context(longest - 1)
    said = distil(command, store, out, *own)
    assert (
        f"has a context of {longest - 1} tokens, and the longest text has up to {longest}" in said
    )
    assert f"--block-length {longest - 1} or less" in said and "--long-texts drop" in said
    prompts = ["--online", "--prompts", str(folder / "prompts.txt"), "--max-new-tokens", "8"]
    training = network_words(1)
    said = command("distill", *prompts, *training, *own, "--out", str(out), code=2)
    assert f"the longest text has up to {longest}" in said
    # the separator behind the longest text and the padding of a block have no place in it either
    distil(command, store, out, *with_context(longest), code=0)


def test_a_store_of_another_target_with_the_same_tokens(
    folder: Path, tmp_path: Path, command: Command, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "target", tmp_path / "target")
    path = tmp_path / "target" / "model.safetensors"
    weights = {name: torch.as_tensor(one) * 1.5 for name, one in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    other = a_command(tmp_path, capsys)
    said = distil(other, store, tmp_path / "made", "--drafter", "eagle")
    given = str(tmp_path / "target")
    assert f"from '.../target', and this target '{given}' has another digest of its weights" in said


def test_a_folder_beside_does_not_shadow_a_kind(
    tmp_path: Path, command: Command, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    distil(command, store, Path("eagle"), "--drafter", "medusa", code=0)
    distil(command, store, Path("made"), "--drafter", "eagle", code=0)
    kinds = [json.loads(Path(one, "drafter.json").read_text())["kind"] for one in ("eagle", "made")]
    assert kinds == ["medusa", "eagle"]
    distil(command, store, Path("more"), "--drafter", "./eagle", code=0)


def test_drafters_of_different_kinds_are_no_seeds_of_one_setting(
    tmp_path: Path, command: Command, store: Path
) -> None:
    cases = {
        "eagle": ["eagle"],
        "again": ["eagle", "--seed", "1"],
        "heavy": ["eagle", "--feature-weight", "2"],
        "medusa": ["medusa", "--drafter-option", "heads=2"],
    }
    for name, (kind, *words) in cases.items():
        distil(command, store, tmp_path / name, "--drafter", kind, *words, code=0)
    compared = compare(read_runs([tmp_path / name for name in cases]))
    (scope,) = compared.scopes
    assert not compared.notes and scope.ranked_by == "tau_predicted"
    assert {entry.setting.drafter: entry.seeds for entry in scope.entries} == {
        "eagle": 2,
        "eagle feature_weight=2.0": 1,
        "medusa heads=2": 1,
    }


def test_a_pass_that_cannot_fit_into_memory_is_refused(
    tmp_path: Path, command: Command, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1 KiB a token 64 fit, and 65 do not; in two passes each has half."""
    words = ["--drafter", "eagle", "--batch-tokens", "64", "--block-length", "32"]
    monkeypatch.setattr(distributed, "memory_bytes", lambda: 64 * 1024 - 1)
    said = distil(command, store, tmp_path / "large", *words)
    assert "--batch-tokens 64 has 64 tokens in a pass, more than 0.0 GiB of memory hold" in said
    distil(command, store, tmp_path / "parts", *words, "--gradient-accumulation", "2", code=0)
    monkeypatch.setattr(distributed, "memory_bytes", lambda: 64 * 1024)
    distil(command, store, tmp_path / "fits", *words, code=0)
