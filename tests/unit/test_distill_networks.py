"""Drafters over hidden states: collect, train, decode exactly, for every family of targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.command_cases import Command, a_command, a_store, family_folder, network_words
from tests.tiny_models import FAMILIES
from transformers import AutoTokenizer

from draftsmith.commands.distill import DistillOptions
from draftsmith.distill.distilling import tokens_before
from draftsmith.distill.students import NetworkStudent

KINDS = ("eagle", "eagle3", "fspad", "griffin", "hass", "medusa", "p_eagle", "parallel", "unrolled")
EVERYWHERE = ("eagle3", "griffin", "medusa")
"""One kind of each group: layers in the middle, autoregressive over the last one, heads."""
ELSEWHERE = {"llama": ("eagle",), "mixtral": ("hass",), "qwen2": ("fspad",)}
PAIRS = [
    pytest.param(family, kind, marks=() if family == "gemma2" else pytest.mark.full)
    for family in sorted(FAMILIES)
    for kind in (KINDS if family == "gemma2" else EVERYWHERE + ELSEWHERE[family])
]
"""All kinds with the target that differs most (scaled embeddings, capped logits, windows). FSPAD
and EAGLE have networks of their own and HASS trains EAGLE's in another way: each of the three is
tried with one other family, which differs in what the network copies from the target alone.
Other families take long and are `full`."""
LONG = "--duration 18steps --learning-rate 0.02 --save-every 18 --eval-every 9".split()
"""Until something is accepted."""
TRAINING = [*network_words(6), "--save-every", "3", "--eval-every", "3"]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_folder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return a_command(folder, capsys)


def store_for(kind: str, folder: Path, command: Command) -> Path:
    """All kinds but EAGLE-3 and its parallel variant read the last hidden state alone: one store
    serves them."""
    words = "eagle3" if kind in ("eagle3", "p_eagle") else "last"
    return a_store(folder, command, f"store-{words}", "--features", words)


@pytest.fixture(scope="module")
def plain_texts(folder: Path) -> dict[str, list[list[int]]]:
    """The target's own texts per sampling, made once."""
    return {}


def distil(command: Command, kind: str, out: Path, *words: str) -> None:
    command("distill", "--drafter", kind, "--out", str(out), *TRAINING, *words)


@pytest.mark.parametrize(("folder", "kind"), PAIRS, indirect=["folder"])
@pytest.mark.every(3)
def test_what_was_trained_from_a_store_decodes_as_the_target(
    folder: Path,
    tmp_path: Path,
    command: Command,
    kind: str,
    plain_texts: dict[str, list[list[int]]],
) -> None:
    store = store_for(kind, folder, command)
    distil(command, kind, tmp_path / "made", "--store", str(store), *LONG)
    record = json.loads((tmp_path / "made" / "run.json").read_text())
    assert record["results"]["held_out"]["tokens_per_step"] >= 1
    prompts = ["--prompts", str(folder / "prompts.txt"), "--limit", "6", "--batch-size", "6"]
    prompts += ["--max-new-tokens", "24"]
    tree = (
        ["--draft-tree", "10x6:59"] if kind in ("p_eagle", "parallel") else []
    )  # others have one anyway
    for sampling in (["--temperature", "0"], ["--temperature", "0.7", "--seed", "3"]):
        text = [*prompts, *sampling]
        if str(sampling) not in plain_texts:
            plain = command("generate", *text, "--drafter", "none")["results"]
            plain_texts[str(sampling)] = [one["token_ids"] for one in plain]
        drafted = command("generate", *text, *tree, "--drafter", str(tmp_path / "made"))["results"]
        # drawn texts are the same, too: the top tokens that the tree holds are no draws
        assert [one["token_ids"] for one in drafted] == plain_texts[str(sampling)]
        rates = [one["acceptance_rate"] for one in drafted]
        assert (
            sampling[1] != "0" or max(rates) > 0
        )  # accepted paths are committed, and gone on from


@pytest.mark.parametrize("kind", ["griffin", "eagle3", "medusa"])
@pytest.mark.every(5)
def test_a_target_in_memory_needs_no_stored_states(
    folder: Path, tmp_path: Path, command: Command, kind: str
) -> None:
    store = a_store(folder, command, "store-bare")
    distil(command, kind, tmp_path / "made", "--store", str(store), "--laws", "teacher")
    (path,) = (tmp_path / "made").glob("*.safetensors")
    weights = load_file(path)
    assert all(torch.isfinite(one).all() for one in weights.values())


@pytest.mark.every(4)
def test_training_goes_on_from_a_folder(folder: Path, tmp_path: Path, command: Command) -> None:
    store = store_for("griffin", folder, command)
    distil(command, "griffin", tmp_path / "first", "--store", str(store))
    distil(command, str(tmp_path / "first"), tmp_path / "second", "--store", str(store))
    again = f"griffin:{tmp_path / 'second'}"
    distil(command, again, tmp_path / "third", "--store", str(store), "--duration", "2steps")
    before, after, last = (
        json.loads((tmp_path / name / "run.json").read_text())["results"]
        for name in ("first", "second", "third")
    )
    assert after["held_out_before"] == pytest.approx(before["held_out"], rel=1e-5)
    assert last["tokens"] < before["tokens"] == after["tokens"]
    learnt = [one["tokens_before"] for one in (before, after, last)]
    assert learnt == [0, before["tokens"], before["tokens"] + after["tokens"]]


def test_what_weights_had_learnt_is_known_by_their_folder_alone(tmp_path: Path) -> None:
    assert tokens_before("hass") == 0, "new weights"
    assert tokens_before(str(tmp_path)) is None and tokens_before(f"hass:{tmp_path}") is None
    (tmp_path / "run.json").write_text(json.dumps({"results": {"tokens": 7}}))
    assert tokens_before(f"hass:{tmp_path}") == 7, "of a version that did not write what was before"


@pytest.mark.parametrize("bad", ["a", "7", [1], {}, 1.5, True, None])
def test_what_is_no_count_of_tokens_says_nothing(bad: object, tmp_path: Path) -> None:
    for results, known in (({"tokens": bad}, None), ({"tokens": 7, "tokens_before": bad}, 7)):
        (tmp_path / "run.json").write_text(json.dumps({"results": results}))
        assert tokens_before(str(tmp_path)) == known


def test_what_costs_otherwise_is_the_same_run(folder: Path) -> None:
    """An option that changes memory and time alone is neither part of what is continued nor of a
    run's name; nor is a seed of the latter."""
    target = str(folder / "target")
    tokenizer = AutoTokenizer.from_pretrained(target)

    def student(*said: str) -> NetworkStudent:
        options = DistillOptions(
            target=target, drafter="hass", drafter_option=said, out=folder / "made"
        )
        return NetworkStudent(options, tokenizer)

    first, second, third = student(), student("recompute=false"), student("seed=3")
    assert first.identity == second.identity != third.identity
    assert {one.facts({})["drafter"] for one in (first, second, third)} == {"hass"}
