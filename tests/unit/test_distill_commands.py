"""`distill` from the command line: a store becomes a better draft model."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.command_cases import (
    PROMPTS,
    Command,
    a_collect,
    a_command,
    distill_words,
    work_folder,
)
from transformers import AutoModelForCausalLM

from draftsmith.commands.distill import DistillOptions, time_step
from draftsmith.core.speedup import tokens_per_step
from draftsmith.distill import distilling, trainer
from draftsmith.distill.batches import Block, TrainingExample
from draftsmith.distill.config import ScheduleConfig
from draftsmith.distill.distributed import Precision
from draftsmith.distill.students import weights_digest
from draftsmith.distill.trajectories.types import Trajectory
from draftsmith.targets.hf import HFTarget, load_target
from mini_ende import Pair, examples, read_pairs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work_folder(tmp_path_factory.mktemp("work"))


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return a_command(folder, capsys)


@pytest.fixture
def collect(folder: Path, command: Command) -> Command:
    return a_collect(folder, command)


@pytest.fixture
def store(tmp_path: Path, collect: Command) -> Path:
    collect(tmp_path / "store", "--samples", "3")
    return tmp_path / "store"


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
    assert record["results"]["gamma"] == 5
    tau = float(tokens_per_step(found["acceptance"], 5))
    assert record["results"]["tau_predicted"] == pytest.approx(tau)
    assert not (tmp_path / "better" / "work").exists()


def test_timed_steps_are_steps_and_leave_nothing(
    folder: Path, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([5.0, 11.0])  # behind the first step, and behind three more
    made: list[int] = []
    one_step = trainer.Trainer.one_step

    def counted(self: trainer.Trainer) -> Any:
        made.append(self.step)
        return one_step(self)

    monkeypatch.setattr(trainer.Trainer, "one_step", counted)
    monkeypatch.setattr(distilling, "perf_counter", lambda: next(clock))
    options = DistillOptions(
        target=str(folder / "target"),
        drafter=str(folder / "draft"),
        store=(store,),
        out=tmp_path / "out",
    )
    assert distilling.time_step(options) == 2.0
    assert made == [0, 1, 2, 3]
    assert not options.out.exists()


def test_what_is_said_of_the_data_is_said_once(
    folder: Path, tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the training, not by the timing in front of it."""
    options = DistillOptions(
        target=str(folder / "target"),
        drafter=str(folder / "draft"),
        store=(store,),
        out=tmp_path / "out",
        training=ScheduleConfig(block_length=12, batch_tokens=24),
    )
    with caplog.at_level(logging.INFO, "draftsmith"):
        distilling.time_step(options, steps=1)
        assert "cut" in caplog.text
        caplog.clear()
        time_step(options)
        assert not caplog.records
        assert logging.getLogger("draftsmith").level == logging.INFO


def test_a_drafter_that_is_no_better_is_called_so(
    folder: Path, store: Path, tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--store", str(store), "--hold-out", "0.3"]
    wild = command(
        "distill", *distill_words(folder, tmp_path / "wild", *words, "--learning-rate", "1")
    )
    assert wild["after"] < wild["before"] and "is no better than it was" in caplog.messages[-1]
    caplog.clear()
    tame = command(
        "distill", *distill_words(folder, tmp_path / "tame", *words, "--learning-rate", "0.003")
    )
    assert tame["after"] > tame["before"] and caplog.messages[-1].startswith("wrote ")


@pytest.fixture
def usable(folder: Path) -> Path:
    """Prompts that all fit."""
    path = folder / "usable.jsonl"
    some = [prompt for prompt in PROMPTS if prompt["id"] not in ("none", "long")]
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in some))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat. " * 40)
    return path


@pytest.mark.parametrize("online", [False, True], ids=["from a store", "online and on-policy"])
@pytest.mark.every(2)
def test_an_interrupted_run_ends_in_the_same_weights(
    folder: Path,
    tmp_path: Path,
    command: Command,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    online: bool,
) -> None:
    from draftsmith.distill import trainer as module

    if online:
        prompts, text = (str(request.getfixturevalue(name)) for name in ("usable", "text"))
        words = ["--online", "--prompts", prompts, "--on-policy", "0.5", "--text", text]
        words += ["--text-share", "0.4", "--prompts-per-step", "3", "--max-new-tokens", "5"]
    else:
        words = ["--store", str(request.getfixturevalue("store"))]
    words += ["--hold-out", "0.4", "--eval-every", "3"]
    command("distill", *distill_words(folder, tmp_path / "whole", *words))
    step = module.Trainer.one_step

    def stop_at_seven(self: module.Trainer) -> Any:
        if self.step == 7:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(trainer.Trainer, "one_step", stop_at_seven)
    command("distill", *distill_words(folder, tmp_path / "cut", *words), code=130)
    monkeypatch.setattr(trainer.Trainer, "one_step", step)
    assert (tmp_path / "cut" / "work" / "checkpoints").is_dir()
    command("distill", *distill_words(folder, tmp_path / "cut", *words))
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    first = load_file(folder / "draft" / "model.safetensors")
    assert any(not torch.equal(first[name], one[name]) for name in one)


@pytest.mark.parametrize(
    "words",
    [
        ["--objective", "sft"],
        ["--objective", "rkl", "--tail", "renormalise"],
        ["--objective", "jsd", "--beta", "0.3"],
        ["--objective", "tvdpp", "--reading", "uniform"],
        ["--laws", "teacher", "--objective", "tvd"],
        ["--laws", "teacher", "--objective", "rkl", "--top-k", "4", "--tail", "renormalise"],
        ["--objective", "tvdpp", "--reading", "draws"],
        ["--aggregate", "mixture"],
        ["--beam-weights", "score", "--beams", "2"],
    ],
)
def test_every_kind_of_data_moves_the_weights(
    folder: Path, tmp_path: Path, command: Command, store: Path, words: list[str]
) -> None:
    out = tmp_path / "out"
    fixed = distill_words(folder, out, "--store", str(store), "--eval-every", "0")
    command("distill", *fixed, "--duration", "3steps", *words)
    before = load_file(folder / "draft" / "model.safetensors")
    after = load_file(out / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("stored", "learnt_in", "computes"),
    [
        (torch.bfloat16, "float32", torch.float32),
        (torch.float16, "float32", torch.float32),
        (torch.bfloat16, "bfloat16", torch.bfloat16),
        (torch.float64, "float32", torch.float64),  # nothing is narrowed
    ],
)
def test_a_target_in_memory_computes_in_float32_where_its_pupil_does(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stored: torch.dtype,
    learnt_in: str,
    computes: torch.dtype,
) -> None:
    folder = work_folder(tmp_path)
    target = folder / "target"
    AutoModelForCausalLM.from_pretrained(target, dtype=stored).save_pretrained(target)
    command = a_command(folder, capsys)
    a_collect(folder, command)(tmp_path / "store", "--samples", "1")
    if stored == torch.bfloat16:  # its number format is then that of its weights
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"dtype": None}))
    taught, load = list[torch.dtype](), distilling.load_teacher

    def recording(name: str, precision: Precision) -> tuple[HFTarget, str]:
        made, digest = load(name, precision)
        taught.append(made.dtype)
        assert digest == weights_digest(load_target(name).model.state_dict()), "as stored"
        return made, digest

    monkeypatch.setattr(distilling, "load_teacher", recording)
    words = distill_words(folder, tmp_path / "out", "--store", str(tmp_path / "store"))
    words[words.index("--dtype") + 1] = learnt_in
    command("distill", *words, "--duration", "1steps", "--laws", "teacher")
    assert taught == [computes]


def test_online_and_on_policy_with_text_beside_it(
    folder: Path, tmp_path: Path, command: Command, usable: Path, text: Path
) -> None:
    words = ["--online", "--prompts", str(usable), "--on-policy", "0.5", "--text", str(text)]
    words += ["--text-share", "0.4", "--prompts-per-step", "2", "--max-new-tokens", "5"]
    fixed = distill_words(folder, tmp_path / "out", *words, "--hold-out", "0.4")
    found = command("distill", *fixed, "--duration", "3steps")
    assert found["acceptance"] is not None
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["results"]["on_policy"] == 0.5


def test_unusable_prompts_stop_an_online_run_when_that_is_asked(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    words = ["--online", "--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "5"]
    fixed = distill_words(folder, tmp_path / "out", *words, "--on-bad-prompt", "error")
    said = command("distill", *fixed, code=2)
    assert "prompt none: empty prompt (2 such prompts; --on-bad-prompt skip leaves" in said
    assert not (tmp_path / "out").exists()


def test_online_beams_are_learnt_from_side_by_side(
    folder: Path, tmp_path: Path, command: Command, usable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DistillBeam, Algorithm 2: the texts of every step are the beams of its prompts, and of the
    target's logprobs the best so many are learnt. Held-out texts are measured with all."""
    from draftsmith.distill import datasets

    packed: list[list[Trajectory]] = []
    pack = datasets.pack

    def noted(documents: Sequence[TrainingExample], length: int) -> list[Block]:
        packed.append([document.trajectory for document in documents])
        return pack(documents, length)

    monkeypatch.setattr(datasets, "pack", noted)
    words = ["--online", "--prompts", str(usable), "--beams", "3", "--max-new-tokens", "4"]
    words += ["--top-k", "6", "--tail", "renormalise", "--objective", "rkl"]
    fixed = distill_words(folder, tmp_path / "out", *words, "--prompts-per-step", "2")
    command("distill", *fixed, "--duration", "3steps", "--hold-out", "0.4")
    results = json.loads((tmp_path / "out" / "run.json").read_text())["results"]
    assert (results["forcing"], results["beams"]) == ("beam", 3)
    assert (results["top_k"], results["alpha_is_lower_bound"]) == (6, False)
    assert len(packed) == 3
    for texts in packed:
        assert len({(one.prompt, one.tokens) for one in texts}) == len(texts) == 2 * 3
        assert Counter(one.index for one in texts) == {0: 2, 1: 2, 2: 2}


def test_a_duration_in_tokens_counts_text_too(
    folder: Path, tmp_path: Path, command: Command, store: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    words = ["--store", str(store), "--text", str(text), "--text-share", "0.4"]
    fixed = distill_words(folder, tmp_path / "out", *words, "--eval-every", "0")
    assert command("distill", *fixed, "--duration", "320tokens")["tokens"] == 320


def test_bad_options_of_distill(
    folder: Path, tmp_path: Path, command: Command, store: Path
) -> None:
    def said(*words: str) -> str:
        return str(command("distill", *distill_words(folder, tmp_path / "out", *words), code=2))

    assert "give either --store FOLDER or --online" in said()
    assert "--online needs --prompts" in said("--online")
    assert "is no trajectory store" in said("--store", str(folder))
    told = said("--online", "--prompts", "p", "--duration", "5ktokens")
    assert "--duration 5ktokens cannot be kept with --online" in told
    assert "--duration must be like 2000steps" in said("--store", str(store), "--duration", "soon")
    unknown = said("--store", str(store), "--objective", "rkll")
    assert "rkll" in unknown
    assert "rkl" in unknown.replace("rkll", "")
    assert "give --tail renormalise" in said("--store", str(store), "--teacher-temperature", "0.7")
    assert "must be a multiple of --block-length" in said(
        "--store", str(store), "--batch-tokens", "33"
    )


def test_a_damaged_store_is_named_before_anything_is_learnt(
    folder: Path, tmp_path: Path, command: Command, store: Path
) -> None:
    """A shard is checked when it is first read: here the first that is read is damaged."""
    for path in store.glob("shard-*.parquet"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(bytes(content))
    out = tmp_path / "out"
    words = distill_words(folder, out, "--store", str(store))
    assert f"of {store} is damaged: shard-" in command("distill", *words, code=3)
    assert not (out / "model.safetensors").exists() and not list(out.glob("checkpoint*"))


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

    monkeypatch.setattr(trainer.Trainer, "one_step", stop_at_five)
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
        ("distill", "--text-logprobs", "--text-logprobs does nothing without --text"),
        ("distill", "--text t --text-logprobs", "without --laws teacher or --online"),
        ("distill", "--top-k 5", "--top-k does nothing without --laws states"),
        ("distill", "--laws teacher --top-k -1", "--top-k must be at least 0"),
        ("distill", "--laws states --aggregate mixture", "--aggregate mixture"),
        ("distill", "--prompts-per-step 4", "--prompts-per-step does nothing without --online"),
        ("distill", "--on-bad-prompt error", "--on-bad-prompt does nothing without --online"),
        ("distill", "--weight-decay nan", "--weight-decay must be 0 or more"),
        (
            "distill",
            "--learning-rate 1e30",
            "--learning-rate must be at most 1, or training diverg",
        ),
        ("distill", "--weight-decay 1e30", "--learning-rate times --weight-decay must be at most"),
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
