"""`collect` and `distill` from the command line: prompts to a store to a better draft model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_models import save_pair, tiny_tokenizer
from transformers import AutoModelForCausalLM

from draftsmith import cli
from draftsmith.distill.store import TrajectoryStore
from draftsmith.distill.trajectory import Trajectory
from draftsmith.recipes._pairs import Pair, examples, read_pairs

Command = Callable[..., Any]
PROMPTS = [
    {"id": "one", "prompt": "def add(left, right):\n", "reference": "return left"},
    {"id": "two", "prompt": "the cat sat", "tag": "animals"},
    {"id": "none", "prompt": ""},
    {"id": "long", "prompt": "return left " * 400},
    {"id": "three", "prompt": "return right", "reference": "- left"},
    {"id": "four", "prompt": "the dog saw"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    save_pair(folder, context=128)
    lines = "".join(json.dumps(prompt) + "\n" for prompt in PROMPTS)
    (folder / "prompts.jsonl").write_text(lines)
    words = "def add left right return the cat sat on mat dog log and saw".split()
    pairs = [f"{first} {second}" for first in words for second in words]
    (folder / "many.txt").write_text("\n".join(pairs) + "\n")
    return folder


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a verb in this process: its JSON, or the sentence and code it failed with."""

    def run(verb: str, *words: str, code: int = 0) -> Any:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([verb, "--target", str(folder / "target"), "--json", *words])
        out, err = capsys.readouterr()
        assert end.value.code == code, err
        return json.loads(out) if code == 0 else err.strip().splitlines()[-1]

    return run


@pytest.fixture
def collect(folder: Path, command: Command) -> Command:
    def run(out: Path, *words: str, code: int = 0) -> Any:
        prompts = str(folder / "prompts.jsonl")
        fixed = ["--prompts", prompts, "--max-new-tokens", "6", "--shard-size", "2"]
        return command("collect", *fixed, "--out", str(out), *words, code=code)

    return run


@pytest.fixture
def store(tmp_path: Path, collect: Command) -> Path:
    collect(tmp_path / "store", "--samples", "3")
    return tmp_path / "store"


def distill_words(folder: Path, out: Path, *words: str) -> list[str]:
    training = (
        "--duration 12steps --block-length 32 --batch-tokens 64 --learning-rate 0.01 --warmup 2"
    )
    fixed = ["--drafter", str(folder / "draft"), "--out", str(out), "--dtype", "float32"]
    return [*fixed, "--save-dtype", "float32", "--save-every", "4", *training.split(), *words]


def trajectories(store: Path) -> list[Trajectory]:
    return list(TrajectoryStore.open(store).trajectories())


# --------------------------------------------------------------------------- collect


def test_unusable_prompts_are_counted_with_their_reason(tmp_path: Path, collect: Command) -> None:
    found = collect(tmp_path / "store")
    assert found["trajectories"] == 4
    assert found["skipped"] == {"empty prompt": 1, "longer than the context of 128 tokens": 1}
    ids = [trajectory.prompt_id for trajectory in trajectories(tmp_path / "store")]
    assert ids == ["one", "two", "three", "four"]


def test_unusable_prompts_stop_the_run_when_that_is_asked(tmp_path: Path, collect: Command) -> None:
    said = collect(tmp_path / "store", "--on-bad-prompt", "error", code=2)
    assert "prompt none: empty prompt (2 such prompts" in said
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("words", "forcing", "per_prompt"),
    [
        ([], "greedy", 1),
        (["--samples", "2", "--temperatures", "0,0.7"], "sample", 3),  # greedy once, two samples
        (["--beams", "3"], "beam", 3),
    ],
)
def test_every_way_of_forcing(
    tmp_path: Path, collect: Command, words: list[str], forcing: str, per_prompt: int
) -> None:
    collect(tmp_path / "store", "--top-k", "7", *words)
    made = trajectories(tmp_path / "store")
    assert {trajectory.forcing for trajectory in made} == {forcing}
    assert len(made) == 4 * per_prompt
    for trajectory in made:
        assert trajectory.top is not None
        assert trajectory.top.ids_NK.shape == (len(trajectory.tokens), 7)
        assert 1 <= len(trajectory.tokens) <= 6


def test_references_are_gold(tmp_path: Path, collect: Command) -> None:
    found = collect(tmp_path / "store", "--gold")
    assert found["skipped"]["no reference"] == 2
    tokenizer = tiny_tokenizer()
    texts = {t.prompt_id: tokenizer.decode(t.tokens) for t in trajectories(tmp_path / "store")}
    assert texts == {"one": "return left<end>", "three": "- left<end>"}


def test_an_interrupted_collection_goes_on_and_ends_the_same(
    tmp_path: Path, collect: Command
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for out in (whole, cut):
        collect(out, "--samples", "2")
    for path in cut.glob("shard-00001*"):
        path.unlink()
    assert collect(cut, "--samples", "2")["written"] == 1
    assert collect(cut, "--samples", "2")["written"] == 0
    for a, b in zip(trajectories(whole), trajectories(cut), strict=True):
        assert (a.prompt_id, a.index, a.tokens) == (b.prompt_id, b.index, b.tokens)


def test_a_store_is_not_continued_with_other_options(tmp_path: Path, collect: Command) -> None:
    collect(tmp_path / "store", "--samples", "2")
    said = collect(tmp_path / "store", "--samples", "3", code=2)
    assert "samples is 2 there and 3 here" in said


def test_hidden_states_come_when_asked(tmp_path: Path, collect: Command) -> None:
    collect(tmp_path / "store", "--features", "last,1")
    for trajectory in trajectories(tmp_path / "store"):
        assert trajectory.features is not None
        assert trajectory.features.shape == (len(trajectory.prompt) + len(trajectory.tokens), 64)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--top-k", "301"], "--top-k 301 is more than the 300 tokens of the target"),
        (["--beams", "2", "--samples", "2"], "give one of --samples, --beams and --gold"),
        (["--beams", "two"], "--beams must be a whole number or auto, got 'two'"),
        (["--temperatures", "0.5,-1"], "--temperature must be 0 (greedy) or a positive number"),
        (["--max-bytes", "much"], "--max-bytes must be a size such as 500MB"),
        (["--features", "last,x"], "--features: layer numbers and 'last'"),
        (["--system", "Be brief."], "--system is for chats"),
    ],
)
def test_bad_options_of_collect(
    tmp_path: Path, collect: Command, words: list[str], said: str
) -> None:
    assert said in collect(tmp_path / "store", *words, code=2)
    assert not (tmp_path / "store").exists()


def test_a_full_budget_keeps_what_is_there(tmp_path: Path, collect: Command) -> None:
    said = collect(tmp_path / "store", "--max-bytes", "4KB", code=2)
    assert "larger than 4,000 bytes" in said
    assert "everything so far is kept" in said


# --------------------------------------------------------------------------- distill


def test_a_store_makes_a_better_draft_model(folder: Path, tmp_path: Path, command: Command) -> None:
    store = tmp_path / "store"
    prompts = ["--prompts", str(folder / "many.txt"), "--max-new-tokens", "12"]
    command("collect", *prompts, "--samples", "2", "--out", str(store))
    words = distill_words(folder, tmp_path / "better", "--store", str(store), "--hold-out", "0.2")
    training = ["--duration", "60steps", "--batch-tokens", "512", "--learning-rate", "0.003"]
    found = command("distill", *words, *training, "--eval-every", "20")
    assert found["acceptance"] > found["acceptance_before"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "better")
    assert model.config.vocab_size == 300
    record = json.loads((tmp_path / "better" / "run.json").read_text())
    assert record["results"]["forcing"] == "sample"
    assert record["results"]["alpha"] == found["acceptance"]
    assert not (tmp_path / "better" / "work").exists()


def test_an_interrupted_run_ends_in_the_same_weights(
    folder: Path,
    tmp_path: Path,
    command: Command,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from draftsmith.distill import trainer as module

    words = ["--store", str(store), "--hold-out", "0.4", "--eval-every", "3"]
    command("distill", *distill_words(folder, tmp_path / "whole", *words))
    step = module.Trainer.one_step

    def stop_at_seven(self: module.Trainer) -> Any:
        if self.step == 7:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(module.Trainer, "one_step", stop_at_seven)
    command("distill", *distill_words(folder, tmp_path / "cut", *words), code=130)
    monkeypatch.setattr(module.Trainer, "one_step", step)
    assert (tmp_path / "cut" / "work" / "checkpoints").is_dir()
    command("distill", *distill_words(folder, tmp_path / "cut", *words))
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "words",
    [
        ["--objective", "sft"],
        ["--objective", "rkl", "--tail", "renormalise"],
        ["--objective", "jsd", "--beta", "0.3"],
        ["--objective", "tvdpp", "--reading", "uniform"],
        ["--laws", "teacher", "--objective", "tvd"],
        ["--aggregate", "mixture"],
        ["--beam-weights", "score", "--beams", "2"],
    ],
)
def test_every_kind_of_lesson_moves_the_weights(
    folder: Path, tmp_path: Path, command: Command, store: Path, words: list[str]
) -> None:
    out = tmp_path / "out"
    fixed = distill_words(folder, out, "--store", str(store), "--eval-every", "0")
    command("distill", *fixed, "--duration", "3steps", *words)
    before = load_file(folder / "draft" / "model.safetensors")
    after = load_file(out / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_online_and_on_policy_with_text_beside_it(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    words = ["--online", "--prompts", str(folder / "prompts.jsonl"), "--on-policy", "0.5"]
    fixed = distill_words(
        folder, tmp_path / "out", *words, "--text", str(text), "--text-share", "0.4"
    )
    small = ["--prompts-per-step", "2", "--max-new-tokens", "5", "--hold-out", "0.4"]
    usable = folder / "usable.jsonl"
    usable.write_text(
        "".join(json.dumps(p) + "\n" for p in PROMPTS if p["id"] not in ("none", "long"))
    )
    fixed[fixed.index("--prompts") + 1] = str(usable)
    found = command("distill", *fixed, *small, "--duration", "3steps")
    assert found["acceptance"] is not None
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["results"]["on_policy"] == 0.5


def test_bad_options_of_distill(
    folder: Path, tmp_path: Path, command: Command, store: Path
) -> None:
    def said(*words: str) -> str:
        return str(command("distill", *distill_words(folder, tmp_path / "out", *words), code=2))

    assert "give either --store FOLDER or --online" in said()
    assert "--online needs --prompts" in said("--online")
    assert "is no trajectory store" in said("--store", str(folder))
    unknown = said("--store", str(store), "--objective", "rkll")
    assert "rkll" in unknown
    assert "rkl" in unknown.replace("rkll", "")
    assert "give --tail renormalise" in said("--store", str(store), "--teacher-temperature", "0.7")
    assert "must be a multiple of --block-length" in said(
        "--store", str(store), "--batch-tokens", "33"
    )


def test_another_tokenizer_is_refused(
    folder: Path, tmp_path: Path, command: Command, store: Path
) -> None:
    from transformers import AutoTokenizer

    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(folder / "draft").save_pretrained(other)
    tokenizer = AutoTokenizer.from_pretrained(folder / "draft")
    swapped = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = swapped["model"]["vocab"]
    first, second = list(vocab)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    tokenizer.save_pretrained(other)
    (other / "tokenizer.json").write_text(json.dumps(swapped))
    words = distill_words(folder, tmp_path / "out", "--store", str(store))
    words[words.index("--drafter") + 1] = str(other)
    assert "another tokenizer than the target" in command("distill", *words, code=2)


# --------------------------------------------------------------------------- pairs


def test_pairs_are_joined_into_examples_each_once_per_pass(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text(
        "".join(f"good\tEnglish {n}.\tDeutsch {n}.\n" for n in range(50)) + "bad\ta\tb\n"
    )
    pairs = read_pairs(path, ("good",))
    assert len(pairs) == 50
    made = list(examples(pairs, "German", passes=2, most=3, seed=0))
    completions = " ".join(example["completion"] for example in made)
    assert all(completions.count(f"Deutsch {n}.") == 2 for n in range(50))
    for example in made:
        head, _, source = example["prompt"].partition(": ")
        assert head == "Translate to German"
        assert source.strip().replace("English", "Deutsch") == example["completion"]
        assert 1 <= example["completion"].count("Deutsch") <= 3
    assert made == list(examples(pairs, "German", passes=2, most=3, seed=0))


def test_translations_of_one_sentence_stay_on_one_side_of_a_split() -> None:
    assert Pair(source="Hi.", target="Hallo.").key == Pair(source="Hi.", target="Servus.").key


# --------------------------------------------------------------------------- what may go wrong


def test_stores_whose_prompts_share_their_names_are_kept_apart(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    for name, text in (("a", "the cat\nthe dog\n"), ("b", "return left\ndef add\n")):
        (tmp_path / f"{name}.txt").write_text(text)
        words = ["--prompts", str(tmp_path / f"{name}.txt"), "--max-new-tokens", "4"]
        command("collect", *words, "--out", str(tmp_path / name))
    out = tmp_path / "out"
    stores = ["--store", str(tmp_path / "a"), str(tmp_path / "b")]
    command("distill", *distill_words(folder, out, *stores, "--duration", "2steps"))
    results = json.loads((out / "run.json").read_text())["results"]
    assert results["prompts"] + results["held_out_prompts"] == 4
    assert results["held_out_prompts"] == 1  # a small store holds out one at least
    assert results["beams"] == 1
    twice = ["--store", str(tmp_path / "a"), str(tmp_path / "a")]
    said = command("distill", *distill_words(folder, tmp_path / "no", *twice), code=2)
    assert "--store names one store twice" in said
    assert not (tmp_path / "no").exists()


def test_a_run_is_not_continued_with_another_text(
    folder: Path, tmp_path: Path, command: Command, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.distill import trainer as module

    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    share = ["--text", str(text), "--text-share", "0.4"]
    words = distill_words(folder, tmp_path / "out", "--store", str(store), *share)
    step = module.Trainer.one_step

    def stop_at_five(self: module.Trainer) -> Any:
        if self.step == 5:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(module.Trainer, "one_step", stop_at_five)
    command("distill", *words, code=130)
    text.write_text("the dog sat on the log. " * 40)
    assert "was made with text" in command("distill", *words, code=2)


@pytest.mark.parametrize(
    ("verb", "words", "said"),
    [
        ("collect", "--temperatures 0.7", "--temperatures does nothing without --samples"),
        ("collect", "--beams 2 --max-beams 4", "--max-beams does nothing without --beams auto"),
        ("collect", "--workers 4", "--workers does nothing without --ray"),
        ("collect", "--samples 2 --temperatures 0.5,0.5", "--temperatures names one twice"),
        ("distill", "--score-temperature 2", "without --beam-weights score"),
        ("distill", "--prompts-per-step 4", "--prompts-per-step does nothing without --online"),
        ("distill", "--weight-decay nan", "rates must be 0 or more"),
        ("distill", "--betas 2 3", "--betas must be at least 0 and below 1"),
        ("distill", "--block-length 0", "--block-length must be at least 2"),
    ],
)
def test_options_that_would_do_nothing_or_harm(
    tmp_path: Path, command: Command, verb: str, words: str, said: str
) -> None:
    fixed = {"collect": ["--prompts", "p"], "distill": ["--drafter", "d", "--store", "s"]}
    out = ["--out", str(tmp_path / "out")]
    assert said in command(verb, *fixed[verb], *out, *words.split(), code=2)
    assert not (tmp_path / "out").exists()


def test_laws_of_all_tokens_can_be_tempered_and_are_no_bound(
    folder: Path, tmp_path: Path, command: Command, collect: Command
) -> None:
    collect(tmp_path / "whole", "--top-k", "0")
    words = ["--store", str(tmp_path / "whole"), "--teacher-temperature", "2"]
    out = tmp_path / "out"
    command("distill", *distill_words(folder, out, *words, "--duration", "2steps"))
    results = json.loads((out / "run.json").read_text())["results"]
    assert results["top_k"] is None
    assert results["alpha_is_lower_bound"] is False
