"""The parts of `draftsmith quickstart`: prompts, amounts, a short distillation, and what is said of
it, which never claims more than was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.tiny_models import save_pair

from draftsmith.bench.arms import open_drafters
from draftsmith.bench.expected import expectations
from draftsmith.bench.records import (
    BASELINE,
    FirstDivergence,
    Interval,
    RunRecord,
    drafter_metrics,
)
from draftsmith.bench.run import Bench, BenchPlan, Item
from draftsmith.bench.summary import BenchReport, render
from draftsmith.commands import quickstart_demo as short
from draftsmith.commands.quickstart import QuickstartOptions
from draftsmith.commands.quickstart_demo import (
    AFTER,
    BEFORE,
    FEWEST_MEASURED_PROMPTS,
    FEWEST_MEASURED_TOKENS,
    MOST_REPEATS,
    Change,
    Outcome,
    Quickstart,
    fit,
)
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.data import suites
from draftsmith.data.prompts import Prompt
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.drafters.config import DraftingConfig
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget, load_target
from draftsmith.targets.toy import TabularTarget

# --------------------------------------------------------------------------- amounts and prompts


def a_plan(prompts: int, tokens: int) -> BenchPlan:
    return BenchPlan(
        target=TabularTarget(8),
        arms=(Arm(name=BASELINE, drafter=NoDrafter()),),
        items=tuple(Item(prompt=str(number), tokens=(1, 2)) for number in range(prompts)),
        samplers=(Sampler(),),
        max_new_tokens=tokens,
    )


def test_what_is_measured_fits_the_time_and_is_never_nothing() -> None:
    seconds, plan = 100.0, a_plan(8, 128)
    for each in (0.01, 1.0, 5.0, 12.0, 60.0, 1e4):
        fitting = fit(plan, seconds, each)
        assert fitting.repeats in (1, MOST_REPEATS)
        assert FEWEST_MEASURED_PROMPTS <= len(fitting.items) <= 8
        assert fitting.items == plan.items[: len(fitting.items)]
        assert FEWEST_MEASURED_TOKENS <= fitting.max_new_tokens <= 128
        tokens = fitting.max_new_tokens
        needed = each * len(fitting.items) * fitting.repeats * tokens / 128
        assert needed <= seconds or tokens == FEWEST_MEASURED_TOKENS
    assert len(fit(a_plan(2, 128), seconds, 1.0).items) == 2
    least = fit(a_plan(2, 8), seconds, 1e4)
    assert (len(least.items), least.repeats, least.max_new_tokens) == (2, 1, 8)


def test_prompts_are_held_out_code_and_the_same_every_time() -> None:
    first = suites.held_out_prompts(8)
    assert first == suites.held_out_prompts(8)
    assert suites.held_out_prompts(3) == first[:3]
    assert len({prompt.id for prompt in first}) == 8
    for prompt in first:
        lines = (prompt.text or "").splitlines()
        assert 2 <= len(lines) <= suites.CONTEXT_LINES
        assert any("def " in line for line in lines)


def test_no_file_gives_prompts_to_learn_from_and_to_measure_on() -> None:
    def files(prompts: Iterator[Prompt]) -> set[str]:
        return {prompt.id.rpartition(":")[0] for prompt in prompts}

    held = files(iter(suites.held_out_prompts(10_000)))
    learnt = files(islice(suites.training_prompts(), 60))
    assert len(held) > 10
    assert len(learnt) >= 20  # at most three of a file
    assert not held & learnt


# --------------------------------------------------------------------------- a short distillation

SHORT = [Prompt(id=str(i), text=f"the cat sat on {i} mats") for i in range(13)]
STOPPED = SimpleNamespace(monotonic=lambda: 0.0)
"""A clock: what was measured is given, and nothing else takes time."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_pair(folder, context=128)
    return folder


@pytest.fixture(scope="module")
def target(models: Path) -> HFTarget:
    return load_target(str(models / "target"))


@pytest.fixture
def demo(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quickstart:
    monkeypatch.setattr(short, "time", STOPPED)
    monkeypatch.setattr(short, "held_out_prompts", lambda count: tuple(SHORT[:count]))
    monkeypatch.setattr(short, "training_prompts", lambda: iter(SHORT))
    return Quickstart(QuickstartOptions(models=models, out=tmp_path / "out", max_new_tokens=6))


@pytest.fixture
def collected(demo: Quickstart, monkeypatch: pytest.MonkeyPatch) -> Quickstart:
    """Ten of thirteen prompts, at two temperatures; the trial's pace is given."""
    monkeypatch.setattr(short, "COLLECT_SECONDS", 1050.0)  # two texts of a prompt take 100
    monkeypatch.setattr(short, "seconds_per_text", lambda *arguments: 50.0)
    demo.collect()
    return demo


def test_as_many_prompts_are_collected_as_the_time_allows(collected: Quickstart) -> None:
    texts = list(TrajectoryStore.open(collected.folder / "store").trajectories())
    assert [(text.prompt_id, text.temperature) for text in texts] == [
        (str(number), temperature) for number in range(10) for temperature in (0.0, 0.8)
    ]
    assert collected.collected["tokens"] == sum(len(text.tokens) for text in texts)
    assert (collected.num_collected, collected.collected["trajectories"]) == (10, 20)


def test_a_trial_tells_a_pace_and_a_prompt_without_room_is_refused(target: HFTarget) -> None:
    assert short.seconds_per_text(target, SHORT, 6) > 0
    endless = Prompt(id="long", text="return left " * 200)
    assert short.seconds_per_text(target, [endless, *SHORT], 6) > 0
    with pytest.raises(InputError, match="No prompt fits into the 128 positions"):
        short.seconds_per_text(target, [endless], 6)


def test_a_draft_model_learns_for_so_many_steps_and_the_shipped_one_stays(
    models: Path, collected: Quickstart, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = (models / "draft/model.safetensors").read_bytes()
    monkeypatch.setattr(short, "seconds_per_step", lambda options: (100.0, 30.0))
    # eleven steps and five evaluations; one step more would take too long
    monkeypatch.setattr(short, "DISTIL_SECONDS", 1260.0)
    collected.distil()
    learnt = collected.folder / "draft"
    assert collected.distilled.steps == 11
    record = json.loads((learnt / "run.json").read_text())
    assert record["verb"] == "distill"
    assert record["results"]["steps"] == 11
    assert (learnt / "model.safetensors").read_bytes() != shipped
    assert (models / "draft/model.safetensors").read_bytes() == shipped


def test_the_trial_of_training_leaves_nothing_behind(
    collected: Quickstart, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds_per_step = short.seconds_per_step

    def tried(options: short.distill.DistillOptions) -> tuple[float, float]:
        monkeypatch.undo()  # the clock runs
        step, evaluation = seconds_per_step(options)
        assert step > 0
        assert evaluation > 0
        raise KeyboardInterrupt

    monkeypatch.setattr(short, "seconds_per_step", tried)
    with pytest.raises(KeyboardInterrupt):
        collected.distil()
    assert sorted(path.name for path in collected.folder.iterdir()) == ["prompts.jsonl", "store"]


# --------------------------------------------------------------------------- before and after


def test_alpha_is_one_for_the_target_itself_and_less_for_another(
    models: Path, target: HFTarget
) -> None:
    drafting = DraftingConfig(draft_length=short.DRAFT_LENGTH)
    names = [f"independent:{models / name}" for name in ("target", "draft")]
    items = [Item(prompt=p.id, tokens=p.token_ids(target.tokenizer)) for p in SHORT[:3]]
    plan = BenchPlan(
        target=target,
        arms=(
            Arm(name=BASELINE, drafter=NoDrafter()),
            *open_drafters(names, drafting, target),
        ),
        items=tuple(items),
        samplers=(Sampler(temperature=0.0), Sampler(temperature=0.8)),
        max_new_tokens=8,
        repeats=1,
        warmup=0,
        cost_rounds=0,
        with_transformers=False,
    )
    run = Bench(plan)
    assert sum(len(records) for records in run.records()) == 18
    itself, other = (
        [found.acceptance.alpha for found in expectations(run) if found.drafter == arm.name]
        for arm in plan.arms[1:]
    )
    assert itself == pytest.approx([1.0, 1.0], abs=1e-5)
    assert len(other) == 2
    assert all(0 < alpha < 1 for alpha in other)


def a_record(name: str, prompt: int, seconds: float, *, steps: int, same: bool = True) -> RunRecord:
    return RunRecord(
        prompt=f"p{prompt}",
        drafter=name,
        temperature=0.0,
        repeat=0,
        seed=0,
        place=0,
        group=prompt,
        prompt_tokens=7,
        tokens=40,
        decode_tokens=39,
        steps=steps,
        decode_steps=steps - 1,
        accepted=40 - steps,
        offered=60,
        proposed=60,
        finish_reason="length",
        seconds=seconds,
        prefill_seconds=0.0,
        decode_seconds=seconds,
        digest="ab" * 8,
        identical=same,
        divergence=None if same else FirstDivergence(at=1, gap=0.0, bound=0.1),
    )


ALPHAS = {(BEFORE, 0.0): 0.5, (AFTER, 0.0): 0.6}


def a_report(*records: RunRecord) -> BenchReport:
    return BenchReport(
        target="models/target",
        dtype="float32",
        records=records,
        command="draftsmith quickstart",
        versions={},
        machine={},
        max_new_tokens=40,
    )


def test_a_change_is_read_from_records_of_the_same_prompts() -> None:
    records = [
        record
        for prompt in range(4)
        for record in (
            a_record(BASELINE, prompt, 8.0, steps=40),
            a_record(BEFORE, prompt, 4.0, steps=20),
            a_record(AFTER, prompt, 2.5, steps=16),
        )
    ]
    change = Change.between(a_report(*records), ALPHAS, 0.0)
    assert (change.before.speedup, change.after.speedup) == pytest.approx((2.0, 3.2))
    assert (change.before.tokens_per_step, change.after.tokens_per_step) == (2.0, 2.5)
    assert change.alphas == (0.5, 0.6)
    assert change.ratio == pytest.approx(1.6)
    assert change.payload()["identical_to_autoregressive"] is True
    assert (change.accepted, change.fast) == ("more often", "faster")
    records[-1] = a_record(AFTER, 3, 2.5, steps=16, same=False)
    change = Change.between(a_report(*records), ALPHAS, 0.0)
    assert change.payload()["identical_to_autoregressive"] is False


def a_change(
    temperature: float, alphas: tuple[float, float], interval: tuple[float, float] | None
) -> Change:
    (_, side) = drafter_metrics([a_record(name, 0, 4.0, steps=20) for name in (BASELINE, BEFORE)])
    low, high = interval or (1.5, 1.5)
    return Change(
        temperature=temperature,
        before=side,
        after=side,
        alphas=alphas,
        ratio=(low + high) / 2,
        ratio_ci95=None if interval is None else Interval(low=low, high=high),
    )


def an_outcome(*changes: Change) -> Outcome:
    return Outcome(
        before="models/draft",
        after="draft",
        tokens_collected=12_345,
        trajectories=6,
        training_prompts=3,
        collect_seconds=20.0,
        steps=100,
        tokens_fed=800_000,
        distil_seconds=61.0,
        prompts=4,
        texts_of_alpha=4,
        changes=changes,
        equality=("At temperature 0 <nothing> changed.",),
    )


@pytest.mark.parametrize(
    ("alphas", "interval", "accepted", "fast"),
    [
        ((0.50, 0.60), (1.05, 1.40), "more often", "faster"),
        ((0.50, 0.60), (0.95, 1.40), "more often", "not measurably faster"),
        ((0.50, 0.60), None, "more often", "not measurably faster"),  # one prompt: anything goes
        ((0.50, 0.5001), (0.99, 1.01), "no more often", "not measurably faster"),
        ((0.50, 0.45), (0.80, 0.97), "less often", "slower"),
    ],
)
def test_what_lies_within_the_noise_is_no_gain(
    alphas: tuple[float, float], interval: tuple[float, float] | None, accepted: str, fast: str
) -> None:
    change = a_change(0.8, alphas, interval)
    assert (change.accepted, change.fast) == (accepted, fast)
    sentence = an_outcome(change).sentence
    assert f"accepted {accepted} at temperature 0.8 than before" in sentence
    assert sentence.endswith(f"decoding with it is {fast} at temperature 0.8.")
    better = accepted == "more often" or fast == "faster"
    assert ("no better" in sentence) == (not better)


def test_the_sentence_tells_temperatures_apart() -> None:
    outcome = an_outcome(
        a_change(0.0, (0.5, 0.6), (1.1, 1.2)),
        a_change(0.8, (0.5, 0.6), (0.9, 1.2)),
        a_change(1.0, (0.5, 0.6), (1.1, 1.2)),
    )
    assert outcome.sentence == (
        "After 61 s of distillation on 12,345 tokens of the target the draft model is accepted "
        "more often at temperature 0 and 0.8 and 1 than before, and decoding with it is faster at "
        "temperature 0 and 1 and not measurably faster at temperature 0.8."
    )


def test_page_terminal_and_json_tell_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = an_outcome(a_change(0.8, (0.5, 0.612), (1.1, 1.2)))
    report = a_report(a_record(BASELINE, 0, 8.0, steps=40))
    assert outcome.sentence not in render(report, ())
    page = render(replace(report, sections=(outcome.section,)), ())
    short.show("", outcome.section.columns, outcome.section.rows)
    printed = capsys.readouterr().out
    for row in outcome.section.rows:
        for cell in row:
            assert f"<td>{cell}</td>" in page
            assert cell in printed
    assert outcome.sentence in page
    assert "&lt;nothing&gt; changed" in page
    payload = outcome.payload()
    (entry,) = payload["temperatures"]
    assert entry["after"]["alpha"] == 0.612
    assert entry["speed_ratio_ci95"] == [1.1, 1.2]
    assert payload["tokens_collected"] == 12_345
    assert json.dumps(payload)
