"""`collect` from the command line: prompts become a store, in as many runs as it takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command_cases import (
    Command,
    a_collect,
    a_command,
    trajectories,
    work_folder,
)
from tests.tiny_models import tiny_tokenizer

from draftsmith import provenance
from draftsmith.commands import collect as recipe
from draftsmith.commands.collect import CollectOptions
from draftsmith.data.suites import load_prompts
from draftsmith.distill.config import KeptConfig, ScaleConfig
from draftsmith.distill.trajectories.requests import known_turns
from draftsmith.distill.trajectories.store import StoreHeader, TrajectoryStore
from draftsmith.distill.trajectories.types import CollectRequest
from draftsmith.distill.trajectories.workers import ShardDone, split
from draftsmith.provenance import output_folder
from draftsmith.targets.config import ModelConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work_folder(tmp_path_factory.mktemp("work"))


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return a_command(folder, capsys)


@pytest.fixture
def collect(folder: Path, command: Command) -> Command:
    return a_collect(folder, command)


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


@pytest.fixture
def unread(folder: Path, tmp_path: Path) -> Path:
    """The same target with a tokenizer of one token more, and prompts that hold it."""
    other = tmp_path / "unread"
    shutil.copytree(folder / "target", other / "target")
    tokenizer = tiny_tokenizer()
    assert tokenizer.add_tokens(["<new>"]) == 1
    tokenizer.save_pretrained(other / "target")
    lines = [
        {"id": "good", "prompt": "the cat", "reference": "sat"},
        {"id": "answer", "prompt": "the dog", "reference": ["sat", "saw <new>"]},
        {"id": "question", "prompt": "the <new> dog sat", "reference": "on the mat"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (other / "prompts.jsonl").write_text(text)
    return other


def test_tokens_that_the_target_does_not_have_are_counted(
    unread: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a prompt, and in a reference where references are asked for."""
    collect = a_collect(unread, a_command(unread, capsys))
    prompt, reference = (
        f"token {of}outside the vocabulary of 300" for of in ("", "of a reference ")
    )
    found = collect(tmp_path / "gold", "--gold")
    assert (found["trajectories"], found["skipped"]) == (1, {prompt: 1, reference: 1})
    found = collect(tmp_path / "greedy")
    assert (found["trajectories"], found["skipped"]) == (2, {prompt: 1})


@pytest.mark.parametrize(("words", "name"), [([], "question"), (["--gold"], "answer")])
def test_tokens_that_the_target_does_not_have_stop_the_run_when_that_is_asked(
    unread: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], name: str
) -> None:
    collect = a_collect(unread, a_command(unread, capsys))
    said = collect(tmp_path / "store", "--on-bad-prompt", "error", *words, code=2)
    assert f"prompt {name}: token" in said and "outside the vocabulary of 300" in said
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


@pytest.mark.parametrize("words", [["--gold"], []])
def test_every_turn_of_a_chat_is_asked_behind_the_answers_before_it(
    tmp_path: Path, collect: Command, words: list[str]
) -> None:
    """One chat has answers; of the other only the first turn can be asked."""
    says = ["the cat", "sat on", "the dog", "saw it"]
    chat = [{"from": ["human", "gpt"][n % 2], "value": text} for n, text in enumerate(says)]
    lines = [{"id": "a", "conversations": chat}, {"id": "b", "turns": ["left", "right"]}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    collect(tmp_path / "store", "--prompts", str(path), "--max-new-tokens", "9", *words)
    tokenizer = tiny_tokenizer()
    made = {one.prompt_id: one for one in trajectories(tmp_path / "store")}
    prompts = {"a": "the cat", "a, turn 2": "the cat\n\nsat on\n\nthe dog", "b": "left"}
    answers = {"a": "sat on<end>", "a, turn 2": "saw it<end>"}
    if words:
        del prompts["b"]
        assert {name: tokenizer.decode(one.tokens) for name, one in made.items()} == answers
    assert {name: tokenizer.decode(one.prompt) for name, one in made.items()} == prompts


@pytest.mark.parametrize(
    ("roles", "turns"),
    [
        ("uaua", [((), "1"), (("1",), "3")]),
        ("suaua", [((), "2"), (("2",), "4")]),
        ("uataua", [((), "1")]),  # what a tool says is no turn of the user
        ("uaaua", [((), "1")]),
        ("uuaua", [((), None)]),
        ("uauaaua", [((), "1"), (("1",), "3")]),
        ("uau", [((), None)]),  # nobody has answered the last question: the whole chat is asked it
    ],
)
def test_a_turn_is_known_while_user_and_assistant_take_turns(
    tmp_path: Path, roles: str, turns: list[tuple[tuple[str, ...], str | None]]
) -> None:
    names = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    chat = [{"role": names[role], "content": str(n)} for n, role in enumerate(roles)]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": chat}) + "\n")
    (prompt,) = load_prompts(path)
    found = known_turns(prompt)
    wanted = [(before, () if answer is None else (answer,)) for before, answer in turns]
    assert [(before, said[:1]) for before, said in found] == wanted


def test_references_are_of_each_turn_only_where_there_is_one_for_each(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    lines = [
        {"turns": ["a", "b"], "reference": ["to a", "to b"]},
        {"turns": ["a", "b", "c"], "reference": ["one", "or another"]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    each, other = (known_turns(prompt) for prompt in load_prompts(path))
    assert each == [((), ("to a",)), (("to a",), ("to b",))]
    assert other == [((), ("one", "or another"))]


def test_turns_that_cannot_be_asked_are_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"id": "b", "turns": ["left", "right", "left"]}) + "\n")
    model = ModelConfig(target=str(folder / "target"))
    recipe.run(CollectOptions(model=model, prompts=path, out=tmp_path / "store", max_new_tokens=2))
    said = capsys.readouterr().err
    assert "2 further turns of chats are not asked" in said


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


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, collect: Command) -> None:
    out = tmp_path / "store"
    out.write_text("mine")
    assert f"--out {out} is a file; give a folder" in collect(out, code=2)
    assert out.read_text() == "mine"


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs flock")
def test_a_second_collection_is_refused_until_the_first_has_ended_or_died(
    tmp_path: Path, collect: Command
) -> None:
    out = tmp_path / "store"
    with output_folder(out):
        said = collect(out, code=2)
    assert f"--out {out}" in said and not out.exists()
    whole = collect(out)
    assert not list(out.glob(".*"))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for path in out.glob("shard-00001.*"):
            path.unlink()
        assert f"--out {out}" in collect(out, code=2)
        assert TrajectoryStore.open(out).shards() == [0, 2] and trajectories(out)  # as readers do
        holder.kill()
    assert (out / ".lock").exists()
    assert collect(out)["trajectories"] == whole["trajectories"]
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("damage", ["flipped bit", "missing"])
def test_a_damaged_shard_is_not_taken_for_done(
    tmp_path: Path, collect: Command, damage: str
) -> None:
    out = tmp_path / "store"
    collect(out)
    whole = trajectories(out)
    file = out / "shard-00001.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    if damage == "flipped bit":
        file.write_bytes(content)
    others = {path: path.read_bytes() for path in out.glob("shard-0000[02]*")}
    said = collect(out, code=3)
    assert "shard-00001.parquet" in said
    assert "remove shard-00001.* and collect again with the same command" in said
    for path in out.glob("shard-00001.*"):  # as it says
        path.unlink()
    assert collect(out)["written"] == 1
    assert others == {path: path.read_bytes() for path in others}
    assert [one.tokens for one in trajectories(out)] == [one.tokens for one in whole]


def test_a_store_is_not_continued_with_other_options(tmp_path: Path, collect: Command) -> None:
    collect(tmp_path / "store", "--samples", "2")
    said = collect(tmp_path / "store", "--samples", "3", code=2)
    assert "samples is 2 there and 3 here" in said


@pytest.mark.parametrize("engine", ["--no-compile", "--weights bf16", "--fixed-width 8"])
def test_a_store_is_not_continued_with_other_weights(
    engine: str, tmp_path: Path, collect: Command
) -> None:
    """What the compiled engine computes in another format is another model."""
    collect(tmp_path / "store", "--samples", "2")
    said = collect(tmp_path / "store", "--samples", "2", *engine.split(), code=2)
    assert engine.split()[0].removeprefix("--").removeprefix("no-").replace("-", "_") in said


def test_hidden_states_come_when_asked(tmp_path: Path, collect: Command) -> None:
    collect(tmp_path / "store", "--features", "last,1")
    for trajectory in trajectories(tmp_path / "store"):
        assert trajectory.features is not None
        assert trajectory.features.shape == (len(trajectory.prompt) + len(trajectory.tokens), 64)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [("eagle3", "0,0,1"), *((kind, "last") for kind in ("eagle", "fspad", "griffin", "medusa"))],
)
def test_hidden_states_of_a_drafter_come_by_its_name(
    tmp_path: Path, collect: Command, drafter: str, words: str
) -> None:
    collect(tmp_path / "store", "--features", drafter)
    assert collect(tmp_path / "store", "--features", words)["written"] == 0  # the same store
    signals = TrajectoryStore.open(tmp_path / "store").header.signals
    width = 32 * (len(signals.layers) + signals.last_hidden)
    assert {one.features.shape[1] for one in trajectories(tmp_path / "store")} == {width}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--top-k", "301"], "--top-k 301 is more than the 300 tokens of the target"),
        (["--beams", "2", "--samples", "2"], "give one of --samples, --beams and --gold"),
        (["--beams", "two"], "--beams must be a whole number or auto, got 'two'"),
        (["--temperatures", "0.5,-1"], "--temperatures must be 0 (greedy) or a positive number"),
        (["--max-bytes", "much"], "--max-bytes must be a size such as 500MB"),
        (["--features", "last,x"], "--features: layer numbers and 'last', by commas, or one"),
        (["--features", "eagel3"], "Unknown drafter 'eagel3'; did you mean 'eagle3'?"),
        (["--features", "eagle3,last"], "or one drafter; got 'eagle3,last'"),
        (["--features", "prompt_lookup"], "this drafter reads no hidden states"),
        (["--features", "1,2"], "--features names layer 2, and the target has 2"),
        (["--features", "last", "--backend", "vllm"], "--features needs --backend transformers"),
        *(
            ([*some, "--backend", "vllm"], f"{some[0]} does nothing without --backend transformers")
            for some in (
                ["--batch-size", "4"],
                ["--device", "cpu"],
                ["--attn-implementation", "eager"],
            )
        ),
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


def test_hidden_states_that_cannot_fit_are_refused_before_anything_is_computed(
    tmp_path: Path, collect: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four usable prompts of at least two tokens each, 32 numbers of two bytes per token."""
    out = tmp_path / "store"
    said = collect(out, "--features", "last", "--max-bytes", "200B", code=2)
    assert "hidden states of at least" in said and "larger than 200 bytes" in said
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(provenance.shutil, "disk_usage", lambda path: usage._replace(free=200))
    said = collect(out, "--features", "last", code=3)
    assert "would fill the disk" in said and "(200 bytes are free)" in said
    assert not out.exists()


def test_the_least_that_hidden_states_take_is_told_and_not_more_than_they_take(
    tmp_path: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    told, taken = [], []
    caplog.set_level("INFO", logger="draftsmith")
    for length in (1, 6):
        out = tmp_path / str(length)
        options = CollectOptions(
            model=ModelConfig(target=str(folder / "target")),
            prompts=folder / "prompts.jsonl",
            out=out,
            samples=2,
            max_new_tokens=length,
            kept=KeptConfig(features="last"),
        )
        capsys.readouterr()
        caplog.clear()
        result = recipe.run(options)
        err = capsys.readouterr().err
        assert "(64 per token)" in caplog.text
        least = caplog.text.partition("at least ")[2].partition(" bytes")[0]
        told.append(int(least.replace(",", "")))
        numbers = [t.features.size for t in trajectories(out) if t.features is not None]
        taken.append(2 * sum(numbers))
        assert result["feature_bytes"] >= taken[-1] >= told[-1]
        assert f"{result['feature_bytes']:,} bytes of hidden states" in err
    assert told[0] == told[1] == taken[0] < taken[1]  # exact where every answer has one token


def test_what_is_stored_already_needs_no_more_room(tmp_path: Path, collect: Command) -> None:
    out = tmp_path / "store"
    collect(out, "--features", "last")
    assert collect(out, "--features", "last", "--max-bytes", "1KB")["written"] == 0


def test_a_store_that_was_too_small_from_the_first_shard_on_is_gone_on_with(
    tmp_path: Path, collect: Command
) -> None:
    collect(tmp_path / "whole", "--samples", "2")
    out = tmp_path / "store"
    collect(out, "--samples", "2", "--max-bytes", "4KB", code=2)
    assert TrajectoryStore.open(out).shards() == []
    said = collect(out, "--samples", "2", "--max-bytes", "1MB", "--top-k", "7", code=2)
    assert "top_k is 50 there and 7 here" in said
    said = collect(out, "--samples", "2", "--max-bytes", "1MB", "--temperatures", "0.5", code=2)
    assert "temperatures is [1.0] there and [0.5] here" in said
    assert collect(out, "--samples", "2", "--max-bytes", "1MB")["written"] == 3
    for a, b in zip(trajectories(out), trajectories(tmp_path / "whole"), strict=True):
        assert (a.prompt_id, a.index, a.tokens) == (b.prompt_id, b.index, b.tokens)


def test_references_that_are_cut_are_counted_with_their_reason(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second prompt leaves 3 tokens in a context of 128."""
    tokenizer = tiny_tokenizer()
    deep = tokenizer.decode(tokenizer.encode("return left " * 200)[:125])
    assert len(tokenizer.encode(deep)) == 125
    just = tokenizer.decode(tokenizer.encode("return left " * 200)[:3])  # and the end
    texts = ["left", just, "left return left return left return", "the dog sat on the mat"]
    records = [
        {"id": "one", "prompt": "the cat", "reference": texts},
        {"id": "deep", "prompt": deep, "reference": texts},
        {"id": "empty", "prompt": "", "reference": texts},
    ]
    prompts = tmp_path / "gold.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "store"
    words = ["--prompts", str(prompts), "--max-new-tokens", "4", "--gold", "--shard-size", "1"]
    found = command("collect", *words, "--out", str(out))
    expected = {
        "longer than --max-new-tokens 4": 2,
        "longer than what the prompt leaves of the context of 128 tokens": 3,
    }
    assert found["cut"] == expected
    lengths = [len(trajectory.tokens) for trajectory in trajectories(out)]
    assert lengths == [2, 4, 4, 4, 2, 3, 3, 3]
    assert json.loads((out / "run.json").read_text())["results"]["cut"] == expected
    again = command("collect", *words, "--out", str(out))
    assert (again["written"], again["cut"]) == (0, expected)
    capsys.readouterr()
    recipe.print_summary(TrajectoryStore.open(out).summary(), out)
    assert "cut 2 references: longer than --max-new-tokens 4\n" in capsys.readouterr().err
    whole = tmp_path / "whole"
    enough = ["--prompts", str(prompts), "--limit", "1", "--max-new-tokens", "40", "--gold"]
    assert command("collect", *enough, "--out", str(whole))["cut"] == {}


# --------------------------------------------------------------------------- progress


def test_checks_are_told_of_only_while_they_last(
    tmp_path: Path,
    collect: Command,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    collect(tmp_path / "store")
    options = CollectOptions(
        model=ModelConfig(target=str(folder / "target")),
        prompts=folder / "prompts.jsonl",
        out=tmp_path / "store",
        max_new_tokens=6,
        scale=ScaleConfig(shard_size=2),
    )
    for every, told in ((60.0, []), (0.0, ["checked 1 of 3 shards", "checked 2 of 3 shards"])):
        monkeypatch.setattr(recipe, "PRINT_EVERY", every)
        recipe.run(options)
        err = capsys.readouterr().err
        assert [line for line in err.splitlines() if line.startswith("checked")] == told


def said_prompts(capsys: pytest.CaptureFixture[str]) -> list[int]:
    """Prompts that the lines so far call done."""
    lines = capsys.readouterr().err.splitlines()
    return [int(line.split()[0]) for line in lines if " prompts " in line and " of " in line]


def test_progress_moves_within_a_shard(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recipe, "PRINT_EVERY", 0.0)
    options = CollectOptions(
        model=ModelConfig(target=str(folder / "target")),
        prompts=folder / "prompts.jsonl",
        out=tmp_path / "store",
        max_new_tokens=6,
        batch_size=1,
    )
    recipe.run(options)
    assert said_prompts(capsys) == [1, 2, 3, 4, 4]  # one shard: a batch each, then the whole


def test_progress_goes_by_tokens_where_prompts_end_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With several temperatures no prompt is done before the last of them."""
    monkeypatch.setattr(recipe, "PRINT_EVERY", 0.0)
    requests = [CollectRequest(prompt_id=str(n), prompt=(1,)) for n in range(10)]
    header = StoreHeader(
        target="t", tokenizer_sha256="", vocab_size=2, top_k=1, settings={}, prompts_sha256=""
    )
    store = TrajectoryStore.create(tmp_path, header)
    store.write(0, [])  # of an earlier run
    with recipe.CollectProgress(split(requests, 4), store) as progress:
        progress.on_batch(0, 30)
        progress.on_shard(ShardDone(1, 8, 80))
        progress.on_batch(0, 20)
        progress.on_batch(0, 70)
        progress.on_batch(2, 75)
        progress.on_shard(ShardDone(2, 4, 75))
        assert progress.bar.tasks[0].completed == progress.bar.tasks[0].total == 10
    assert said_prompts(capsys) == [4, 8, 9, 10, 10, 10]
