"""`bench --perplexity`: acceptance counted over whole drafts, and the files that `plan` reads."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.command_cases import Command, a_command, ran
from tests.tiny_models import TEXT, save_pair, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from draftsmith import cli
from draftsmith.bench.loops import in_loops
from draftsmith.bench.pairs import (
    LengthTrial,
    Pair,
    Perplexity,
    acceptance,
    agreement,
    count_accepted,
    parameters_of,
)
from draftsmith.config import flags_of
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.generation import Generation
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.drafters.independent import Independent
from draftsmith.errors import InputError
from draftsmith.plan.acceptance import estimate
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import TabularTarget

PROMPTS = "the cat sat on\ndef add(left,\nreturn left\nthe dog saw the\n"


def steps(trial: LengthTrial) -> list[int]:
    """The number of whole drafts of which 0, 1, .., gamma tokens were accepted."""
    return [sum(c.count for c in trial.counts if c.accepted == n) for n in range(trial.gamma + 1)]


def bound(draft: TabularTarget, target: TabularTarget) -> Independent:
    drafter = Independent(Independent.Config(), model=draft)
    drafter.bind(target)
    return drafter


def drawn(tokens: int, **more: Any) -> DecodeOptions:
    return DecodeOptions(sampler=Sampler(temperature=1.0), max_new_tokens=tokens, **more)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Another tokenizer than the tiny models': a token per byte, in another order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258,
        special_tokens=["<stop>", "<other>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([""], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<stop>")


# --------------------------------------------------------------------------- counting


def test_without_memory_the_rate_is_the_overlap_of_both_laws() -> None:
    """Laws that do not look back: every drafted token is accepted with sum of min(p, q)."""
    target, draft = TabularTarget(6, order=0), TabularTarget(6, order=0, seed=3)
    laws = [one.table_CV[0].softmax(-1) for one in (target, draft)]
    overlap = float(torch.minimum(*laws).sum())
    prompts = [[1]] * 24
    trials, _ = count_accepted(
        target, bound(draft, target), prompts, drawn(120), (1, 2, 5), batch_size=8
    )
    rate = acceptance(trials)
    assert rate is not None and rate.moe is not None
    assert abs(rate.value - overlap) < 2 * rate.moe
    assert rate.moe < 0.05
    found = estimate([count for trial in trials for count in trial.counts])
    assert found.mle.alpha == pytest.approx(rate.value)
    assert found.iid_p_value is not None and found.iid_p_value > 0.001


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_equal_to_its_target_is_accepted_whole(temperature: float) -> None:
    target = TabularTarget(6)
    options = DecodeOptions(sampler=Sampler(temperature=temperature), max_new_tokens=40)
    trials, made = count_accepted(
        target, bound(TabularTarget(6), target), [[1, 2], [3]], options, (3,)
    )
    rate = acceptance(trials)
    assert rate is not None and rate.value == 1.0
    assert rate.moe == pytest.approx(1.96**2 / (2 + 1.96**2)), "Wilson's end of two prompts in two"
    assert steps(trials[0]) == [0, 0, 0, 20]
    assert [len(one.token_ids) for one in made] == [40, 40]


@pytest.mark.parametrize("end_ids", [frozenset(), frozenset({2})])
def test_every_step_is_counted_or_left_out(end_ids: frozenset[int]) -> None:
    """Left out are those whose draft the room or an end token cut, and no others."""
    target = TabularTarget(6, end_ids=end_ids)
    drafter, prompts, gamma = bound(TabularTarget(6, seed=1), target), [[1], [3, 4], [5]], 4
    options = drawn(31, shape=TreeShape.chain(gamma))
    trials, made = count_accepted(target, drafter, prompts, options, (gamma,), batch_size=3)
    (trial,) = trials
    assert sum(steps(trial)) + trial.left_out == sum(one.metrics.steps for one in made)
    whole: list[int] = []
    for number, prompt in enumerate(prompts):
        left = 31
        seeded = replace(options, seed=options.seed + gamma, rule="rejection")
        for step in decode(target, drafter, [prompt], seeded, request_ids=[number]):
            cut_by_end = step.finish[0] == "stop" and len(step.emitted[0]) == step.accepted[0]
            if left > gamma and not (cut_by_end and step.accepted[0] < gamma):
                whole.append(step.accepted[0])
            left -= len(step.emitted[0])
    assert steps(trial) == [whole.count(n) for n in range(gamma + 1)]
    assert trial.left_out > 0


def test_drafts_that_begin_outside_of_loops_are_counted_apart() -> None:
    """Against the steps of each text alone: greedy texts of a table end in a loop."""
    target = TabularTarget(6)
    drafter, prompts, gamma = bound(TabularTarget(6, seed=1), target), [[1], [3, 4], [5]], 2
    options = DecodeOptions(max_new_tokens=40)
    trials, made = count_accepted(target, drafter, prompts, options, (gamma,), batch_size=2)
    (trial,) = trials
    wanted: Counter[int] = Counter()
    looped = 0
    for prompt, one in zip(prompts, made, strict=True):
        inside = in_loops(one.token_ids)
        looped += int(inside.sum())
        place = 0
        alone = replace(options, shape=TreeShape.chain(gamma))
        for step in decode(target, drafter, [prompt], alone):
            if step.offered_depth[0] == gamma and not inside[place]:
                wanted[step.accepted[0]] += 1
            place += len(step.emitted[0])
    assert trial.outside == wanted and trial.looped == looped
    assert 0 < wanted.total() < trial.found.total()
    read = Perplexity(
        value=2.0, moe=None, loss=0.7, tokens=9, documents=1, cut=0, unread=0, longest=9
    )
    pair = Pair(name="d", draft=target, perplexity=read, trials=trials, agreement=None)
    assert pair.loop_share == looped / sum(len(one.token_ids) for one in made)
    refused = wanted[0] + wanted[1]
    accepted = wanted[1] + 2 * wanted[2]
    assert pair.alpha_outside_loops == accepted / (accepted + refused)


def test_rows_that_are_done_are_not_counted() -> None:
    target = TabularTarget(6)
    drafter = bound(TabularTarget(6, seed=1), target)
    prompts = [[1], [2], [3], [4]]
    alone, together = (
        count_accepted(target, drafter, prompts, drawn(23), (2, 3), batch_size=size)[0]
        for size in (1, 4)
    )
    assert alone == together


def test_no_whole_draft_gives_no_rate() -> None:
    target = TabularTarget(6)
    trials, _ = count_accepted(target, bound(TabularTarget(6), target), [[1]], drawn(4), (9,))
    assert acceptance(trials) is None
    assert trials[0].left_out > 0 and sum(steps(trials[0])) == 0


def test_prompts_with_rates_of_their_own_widen_the_margin() -> None:
    """The same tokens in the same drafts, spread over prompts evenly or not at all evenly."""

    def of(by_prompt: Sequence[tuple[int, int]]) -> float:
        trial = LengthTrial(gamma=1)
        for number, (accepted, tried) in enumerate(by_prompt):
            trial.found.update({(number, 0): tried - accepted, (number, 1): accepted})
        rate = acceptance([trial])
        assert rate is not None and rate.value == 0.5 and rate.moe is not None
        return rate.moe

    even, uneven, one_sided = [(5, 10)] * 8, [(6, 10), (4, 10)] * 4, [(10, 10), (0, 10)] * 4
    assert of(even) > 0, "equal by chance: as if all tokens were independent"
    assert 0 < of(uneven) < of(one_sided)


def test_lengths_are_drawn_independently() -> None:
    """Laws that do not look back, so prompts differ by what was drawn alone: a prompt that was
    lucky at one length is not so at the next."""
    target, draft = TabularTarget(6, order=0), TabularTarget(6, order=0, seed=3)
    trials, _ = count_accepted(
        target, bound(draft, target), [[1]] * 60, drawn(24), (2, 3), batch_size=60
    )
    rates = []
    for trial in trials:
        found: dict[str | None, list[int]] = {}
        for one in trial.counts:
            found.setdefault(one.prompt, []).extend([one.accepted] * one.count)
        rates.append([np.mean(found[str(number)]) for number in range(60)])
    assert abs(np.corrcoef(rates)[0, 1]) < 0.3


def test_counts_know_their_prompts() -> None:
    target = TabularTarget(6)
    drafter, prompts = bound(TabularTarget(6, seed=1), target), [[1], [3, 4], [5]]
    (trial,), _ = count_accepted(target, drafter, prompts, drawn(31), (2,), batch_size=2)
    for number, prompt in enumerate(prompts):
        options = drawn(31, shape=TreeShape.chain(2), seed=2, rule="rejection")
        whole = [0, 0, 0]
        for step in decode(target, drafter, [prompt], options, request_ids=[number]):
            whole[step.accepted[0]] += step.offered_depth[0] == 2
        mine = {c.accepted: c.count for c in trial.counts if c.prompt == str(number)}
        assert mine == {n: count for n, count in enumerate(whole) if count}


# --------------------------------------------------------------------------- re-tokenised text


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_agreement_asks_the_draft_about_each_token_of_the_text(temperature: float) -> None:
    draft = HFTarget(tiny_model(seed=2).double(), byte_tokenizer())
    tokenizer = tiny_tokenizer()
    texts, each = [], []
    bare = tiny_model(seed=2).double().eval()
    for prompt, text in (("the cat", " sat on the mat"), ("def add", "(left, right)")):
        ids = [tuple(tokenizer(part)["input_ids"]) for part in (prompt, text)]
        texts.append(a_text(*ids))
        read = byte_tokenizer()(prompt + text)["input_ids"]
        for place in range(len(prompt), len(prompt + text)):
            with torch.no_grad():
                logits = bare(torch.tensor([read[:place]])).logits[0, -1]
            law = torch.softmax(logits / (temperature or 1.0), -1)
            first_choice = float(int(logits.argmax()) == read[place])
            each.append(float(law[read[place]]) if temperature else first_choice)
    found = agreement(draft, tokenizer, texts, Sampler(temperature=temperature))
    assert found is not None
    assert found.value == pytest.approx(sum(each) / len(each), rel=1e-9)


def test_a_token_that_straddles_the_end_of_the_prompt_is_not_asked_about() -> None:
    draft = HFTarget(tiny_model(seed=2).double(), tiny_tokenizer())
    whole = tiny_tokenizer()("def add(left")["input_ids"]
    longest = max(whole, key=lambda token: len(tiny_tokenizer().decode([token])))
    piece = tiny_tokenizer().decode([longest])
    assert len(piece) > 2, "the tokenizer knows a word"
    known, said = (tuple(byte_tokenizer()(part)["input_ids"]) for part in (piece[:1], piece[1:]))
    assert agreement(draft, byte_tokenizer(), [a_text(known, said)], Sampler()) is None


def a_text(prompt: Sequence[int], made: Sequence[int]) -> Generation:
    from draftsmith.core.generation import DraftCounts

    return Generation(
        prompt_tokens=tuple(prompt),
        token_ids=tuple(made),
        text=None,
        finish_reason="length",
        metrics=DraftCounts(),
        accepted_mask=(),
    )


# --------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pairs")
    save_pair(place, context=128)
    far = AutoModelForCausalLM.from_pretrained(place / "draft")
    for parameter in far.parameters():
        if parameter.ndim > 1:
            generator = torch.Generator().manual_seed(5)
            parameter.data += 0.12 * torch.randn(parameter.shape, generator=generator)
    far.save_pretrained(place / "other")
    tiny_tokenizer().save_pretrained(place / "other")
    tiny_model(seed=9, context=128).save_pretrained(place / "bytes")
    byte_tokenizer().save_pretrained(place / "bytes")
    (place / "prompts.txt").write_text(PROMPTS)
    (place / "text.txt").write_text(TEXT)
    (place / "more.jsonl").write_text(json.dumps({"text": "the cat saw the dog"}) + "\n")
    return place


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return a_command(folder, capsys)


def words(folder: Path, out: Path, drafters: str, *more: str) -> list[str]:
    named = ",".join(str(folder / name) for name in drafters.split(","))
    text = [str(folder / "text.txt"), str(folder / "more.jsonl")]
    fixed = ["--suite", str(folder / "prompts.txt"), "--max-new-tokens", "24"]
    numbers = ["--dtype", "float64", "--out", str(out)]
    return ["--drafter", named, "--perplexity", *text, *fixed, *numbers, *more]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafts of 1 to 3 tokens by the target itself, two others, and one with another tokenizer."""
    out = tmp_path_factory.mktemp("measured") / "out"
    given = words(folder, out, "target,draft,other,bytes", "--draft-length", "1..3")
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "--target", str(folder / "target"), *given])
    assert end.value.code == 0
    return out


def test_every_pair_and_protocol_has_a_line(measured: Path) -> None:
    rows = table(measured / "observations.csv")
    assert [(Path(row["draft"]).name, row["protocol"]) for row in rows] == [
        ("target", "decoded"),
        ("draft", "decoded"),
        ("other", "decoded"),
        ("bytes", "decoded"),
        ("bytes", "retokenised"),
    ]
    same, near, far = rows[:3]
    assert float(same["alpha"]) == 1.0 == float(same["alpha_least_squares"])
    assert same["draft_ppl"] == same["target_ppl"]
    assert 0 < float(far["alpha"]) < float(near["alpha"]) < 1
    assert all(float(row["moe"]) > 0 for row in rows[:3])
    weights = sum(one.numel() for one in tiny_model().parameters())
    assert {row["target_params"] for row in rows} == {str(weights)} == {far["draft_params"]}
    assert rows[-1]["tokens_per_step_3"] == "" != rows[-2]["tokens_per_step_3"]
    assert {row["temperature"] for row in rows} == {"0.0"}
    assert all(0 <= float(row["loop_share"]) <= 1 for row in rows)
    assert all((row["alpha_outside_loops"] == "") == (row["protocol"] != "decoded") for row in rows)


def test_counts_add_up_to_the_steps(measured: Path) -> None:
    results = json.loads((measured / "run.json").read_text())["results"]
    counts = table(measured / "counts.csv")
    for name, steps in results["steps"].items():
        mine = [row for row in counts if row["draft"] == name]
        assert sum(int(row["count"]) for row in mine) == steps > 0
        keys = [(row["prompt"], row["gamma"], row["accepted_length"]) for row in mine]
        assert len(set(keys)) == len(keys)
        assert {row["prompt"] for row in mine} == {"0", "1", "2", "3"}
        assert {row["gamma"] for row in mine} == {"1", "2", "3"}
    assert set(results["steps_left_out"]) == set(results["steps"])
    assert any(results["steps_left_out"].values())


def test_plan_reads_both_files(
    measured: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(*words: str, code: int = 0) -> Any:
        return ran(capsys, "plan", *words, "--json", code=code)

    counts, rows = measured / "counts.csv", table(measured / "observations.csv")
    near = rows[1]
    alone = plan("alpha", str(counts), "--draft", near["draft"])
    assert alone == plan("alpha", str(measured), "--draft", near["draft"]), "the folder itself"
    assert alone["mle"]["alpha"] == pytest.approx(float(near["alpha"]))
    low, high = alone["mle"]["ci95"]
    reach = max(high - alone["mle"]["alpha"], alone["mle"]["alpha"] - low)
    assert reach == pytest.approx(float(near["moe"])), "both by prompts"
    assert alone["least_squares"]["ci95"] is not None
    assert alone["tokens_per_step"]["3"] == pytest.approx(float(near["tokens_per_step_3"]))
    said = plan("alpha", str(counts), code=2)
    assert "4 pairs" in said and "--draft" in said and near["draft"] in said
    assert "there is no" in plan("alpha", str(counts), "--draft", "nobody", code=2)
    said = plan("law", str(measured / "observations.csv"), "--protocol", "decoded", code=2)
    assert "row 1 " in said and "column 'alpha'" in said, "equal models are no observation"
    pytest.importorskip("statsmodels")
    usable = tmp_path / "observations.csv"
    found = [row | {"alpha": row["alpha"] if float(row["alpha"]) else "0.01"} for row in rows[1:]]
    found[-1]["alpha"] = "0.02"  # a random model of bytes never agrees with the other
    second = [row | {"target": "another", "target_ppl": "3.5"} for row in found]
    with usable.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows([*found, *second])
    said = plan("law", str(usable), code=2)
    assert "decoded" in said and "retokenised" in said and "--protocol" in said
    laws = {
        name: plan("law", str(usable), "--protocol", name) for name in {"decoded", "retokenised"}
    }
    assert [law["n"] for law in laws.values()] == [6, 6]
    assert laws["decoded"]["A"] != laws["retokenised"]["A"]


def test_a_batch_counts_what_single_prompts_count(
    command: Command, folder: Path, tmp_path: Path
) -> None:
    for size in ("1", "4"):
        given = words(folder, tmp_path / size, "draft", "--draft-length", "2", "--batch-size", size)
        command("bench", *given, "--temperature", "1,0")
    first, second = ((tmp_path / size / "counts.csv").read_text() for size in ("1", "4"))
    assert first == second
    assert table(tmp_path / "1" / "observations.csv")[0]["temperature"] == "1.0"


@pytest.mark.parametrize(("text", "said"), [("one.txt", True), ("more.txt", False)])
def test_a_single_document_is_said_to_have_no_margin(
    command: Command, folder: Path, tmp_path: Path, text: str, said: bool
) -> None:
    """And a plain file of which little is read."""
    (tmp_path / "one.txt").write_text(TEXT * 9)
    (tmp_path / "more.txt").write_text("the cat sat on the mat")
    out, files = tmp_path / "out", [str(tmp_path / text)]
    files += [] if said else [str(folder / "text.txt")]
    fixed = ["--drafter", str(folder / "draft"), "--suite", str(folder / "prompts.txt")]
    ends = ["--draft-length", "1", "--max-new-tokens", "8", "--out", str(out)]
    command("bench", *fixed, *ends, "--perplexity", *files)
    results = json.loads((out / "run.json").read_text())["results"]
    warned = [line for line in results["warnings"] if "document" in line and "margin" in line]
    assert len(warned) == said
    unread = [line for line in results["warnings"] if "most of the text was not read" in line]
    assert len(unread) == said and (not said or f"first {128} of" in unread[0])


def test_other_tokenizers_and_short_contexts_are_said(measured: Path) -> None:
    said = json.loads((measured / "run.json").read_text())["results"]["warnings"]
    assert any("bytes has another tokenizer" in line and "not the rate" in line for line in said)
    assert any("has a context of 128 tokens" in line for line in said)


@pytest.mark.parametrize(
    ("drafter", "more", "sentence"),
    [
        ("prompt_lookup", "", "prompt_lookup: --perplexity is for draft models"),
        ("DRAFT", "--draft-length 3..2", "--draft-length must be a range upwards"),
        ("DRAFT", "--draft-length 0..2", "from 1 or more to 4096"),
        ("DRAFT", "--draft-length adaptive", "a whole number or a range such as 1..9"),
        (
            "DRAFT",
            "--draft-length 1..200",
            "does not fit into the context of target, which has 128",
        ),
        ("DRAFT", "--draft-tree 2,2", "--perplexity counts chains"),
        ("DRAFT", "--acceptance typical", "verified exactly"),
        ("DRAFT", "--repeats 5", "are for measuring speed"),
        ("DRAFT", "--max-new-tokens 2 --draft-length 4", "no draft of any length was whole"),
    ],
)
def test_what_cannot_be_observed_is_refused(
    command: Command, folder: Path, tmp_path: Path, drafter: str, more: str, sentence: str
) -> None:
    name = str(folder / "draft") if drafter == "DRAFT" else drafter
    fixed = ["--suite", str(folder / "prompts.txt"), "--out", str(tmp_path / "out")]
    text = ["--perplexity", str(folder / "text.txt")]
    said = command("bench", "--drafter", name, *fixed, *text, *more.split(), code=2)
    assert sentence in said
    assert not (tmp_path / "out" / "observations.csv").exists()


@pytest.mark.parametrize(("weights", "costs"), [("int8", True), ("auto", False)])
def test_a_target_alone_has_a_perplexity_and_a_quantised_one_that_of_its_weights_beside_it(
    command: Command, folder: Path, tmp_path: Path, weights: str, costs: bool
) -> None:
    tiny_model(hidden=128).save_pretrained(tmp_path / "wide")
    tiny_tokenizer().save_pretrained(tmp_path / "wide")
    fixed = ["--suite", str(folder / "prompts.txt"), "--out", str(tmp_path / "out")]
    fixed += ["--target", str(tmp_path / "wide"), "--weights", weights]
    command("bench", "--drafter", "none", "--perplexity", str(folder / "text.txt"), *fixed)
    found = json.loads((tmp_path / "out" / "run.json").read_text())["results"]
    (own,) = found["perplexity"].values()
    plain = found["perplexity_unquantised"]
    assert (plain is not None) == costs
    if plain is not None:
        assert own["value"] != plain["value"]
        assert own["value"] == pytest.approx(plain["value"], rel=0.05)
    assert not list((tmp_path / "out").glob("*.csv")), "there are no pairs"


def test_texts_and_folders_that_cannot_be_used_are_named(
    command: Command, folder: Path, tmp_path: Path
) -> None:
    fixed = ["--drafter", str(folder / "draft"), "--suite", str(folder / "prompts.txt")]
    out = tmp_path / "out"
    ends = [*fixed, "--out", str(out), "--draft-length", "1", "--max-new-tokens", "8"]
    said = command("bench", *ends, "--perplexity", str(tmp_path / "none.txt"), code=2)
    assert "--perplexity" in said and "none.txt: there is no such file" in said
    (tmp_path / "bad.bin").write_bytes(b"\xff\xfe")
    said = command("bench", *ends, "--perplexity", str(tmp_path / "bad.bin"), code=2)
    assert "none of these files is UTF-8 text" in said
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"words": "no"}\n')
    said = command("bench", *ends, "--perplexity", str(tmp_path / "bad.jsonl"), code=2)
    assert "bad.jsonl, line 2: has no field `text`" in said
    command("bench", *ends, "--perplexity", str(folder / "text.txt"))
    said = command("bench", *ends, "--perplexity", str(folder / "text.txt"), code=2)
    assert f"--out {out}" in said
    (out / "run.json").rename(out / ".begun.json")  # as if it had been killed
    (out / "observations.csv").write_text("half")
    command("bench", *ends, "--perplexity", str(folder / "text.txt"))
    assert (out / "run.json").exists() and (out / "observations.csv").read_text() != "half"


DRAFTING = [verb for verb, options in cli.verbs().items() if "--draft-length" in flags_of(options)]


@pytest.mark.parametrize("verb", DRAFTING)
def test_a_range_of_lengths_is_for_observing(verb: str) -> None:
    words = ["--target", "T", "--draft-length", "1..9"]
    wanted = flags_of(cli.verbs()[verb])
    asked = {"--suite": "s", "--prompt": "x"}  # a chat is asked later
    words += [word for flag, text in asked.items() if flag in wanted for word in (flag, text)]
    words += ["--drafter", "independent:D"]
    with pytest.raises(InputError, match="--draft-length"):
        cli.parse(verb, words).validate()


def test_a_table_has_no_weights_to_count() -> None:
    assert parameters_of(TabularTarget(4)) is None
