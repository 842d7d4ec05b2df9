"""The parts of `draftsmith quickstart`: prompts, amounts, a short distillation, and what is said of
it, which never claims more than was measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.tiny_models import save_pair

from draftsmith.bench.records import (
    BASELINE,
    FirstDivergence,
    Interval,
    RunRecord,
    drafter_metrics,
)
from draftsmith.bench.run import BenchPlan, Item
from draftsmith.bench.summary import BenchReport, render
from draftsmith.commands import quickstart_demo as short
from draftsmith.commands.quickstart import QuickstartOptions
from draftsmith.commands.quickstart_demo import (
    AFTER,
    BEFORE,
    FEWEST_MEASURED_PROMPTS,
    FEWEST_MEASURED_TOKENS,
    MOST_REPEATS,
    Acceptance,
    Change,
    Collected,
    Outcome,
    Quickstart,
    fit,
)
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.data import suites
from draftsmith.data.prompts import Prompt
from draftsmith.distill.trajectories.store import TrajectoryStore
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
def collected(demo: Quickstart, monkeypatch: pytest.MonkeyPatch) -> Collected:
    """Ten of thirteen prompts, at two temperatures; the trial's pace is given."""
    monkeypatch.setattr(short, "COLLECT_SECONDS", 1050.0)  # two texts of a prompt take 100
    monkeypatch.setattr(short, "seconds_per_text", lambda *arguments: 50.0)
    return demo.collect()


def test_as_many_prompts_are_collected_as_the_time_allows(
    demo: Quickstart, collected: Collected
) -> None:
    texts = list(TrajectoryStore.open(demo.folder / "store").trajectories())
    assert [(text.prompt_id, text.temperature) for text in texts] == [
        (str(number), temperature) for number in range(10) for temperature in (0.0, 0.8)
    ]
    assert collected.tokens == sum(len(text.tokens) for text in texts)
    assert (collected.prompts, collected.trajectories) == (10, 20)


def test_a_trial_tells_a_pace_and_a_prompt_without_room_is_refused(target: HFTarget) -> None:
    assert short.seconds_per_text(target, SHORT, 6) > 0
    endless = Prompt(id="long", text="return left " * 200)
    assert short.seconds_per_text(target, [endless, *SHORT], 6) > 0
    with pytest.raises(InputError, match="No prompt fits into the 128 positions"):
        short.seconds_per_text(target, [endless], 6)


def test_a_draft_model_learns_for_so_many_steps_and_the_shipped_one_stays(
    models: Path, demo: Quickstart, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = (models / "draft/model.safetensors").read_bytes()
    monkeypatch.setattr(short, "seconds_per_step", lambda options: (100.0, 30.0))
    # eleven steps and five evaluations; one step more would take too long
    monkeypatch.setattr(short, "DISTIL_SECONDS", 1260.0)
    distilled = demo.distil(collected)
    learnt = demo.folder / "draft"
    assert distilled.result.steps == 11
    record = json.loads((learnt / "run.json").read_text())
    assert record["verb"] == "distill"
    assert record["results"]["steps"] == 11
    assert (learnt / "model.safetensors").read_bytes() != shipped
    assert (models / "draft/model.safetensors").read_bytes() == shipped


def test_the_trial_of_training_leaves_nothing_behind(
    demo: Quickstart, collected: Collected, monkeypatch: pytest.MonkeyPatch
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
        demo.distil(collected)
    assert sorted(path.name for path in demo.folder.iterdir()) == ["prompts.jsonl", "store"]


# --------------------------------------------------------------------------- before and after


def test_alpha_is_one_for_the_target_itself_and_less_for_another(
    models: Path, demo: Quickstart
) -> None:
    plan = demo.plan(demo.draft, demo.open_draft(str(models / "target")))
    for sampler in plan.samplers:
        found = demo.acceptance(plan, sampler)
        assert found.after == pytest.approx(1.0, abs=1e-5)
        assert 0 < found.before < 1
        assert found.texts == 12  # all prompts, not those that fit the time of a measurement
        assert found.gain_ci95 is not None
        assert 0 < found.gain_ci95.low < found.after - found.before < found.gain_ci95.high


def test_alpha_is_computed_as_far_as_the_draft_models_can_read(demo: Quickstart) -> None:
    plan = demo.plan(demo.draft, demo.draft)
    (draft, _) = demo.draft.drafter.drawn_from(Sampler()) or pytest.fail("no draft model")
    lengths = [len(item.tokens) for item in demo.items]
    draft.max_length = sorted(lengths)[6]
    found = demo.acceptance(plan, Sampler())
    assert found.texts == sum(length <= draft.max_length for length in lengths)
    assert found.before == found.after
    assert found.gain_ci95 == Interval(low=0, high=0)


def test_a_draft_model_that_can_read_no_prompt_is_refused_at_the_start(
    models: Path, tmp_path: Path, demo: Quickstart
) -> None:
    folder = tmp_path / "models"
    save_pair(folder, context=4)
    shutil.rmtree(folder / "target")
    shutil.copytree(models / "target", folder / "target")
    with pytest.raises(InputError, match="context of 4 tokens, and the shortest prompt has"):
        Quickstart(QuickstartOptions(models=folder, out=tmp_path / "out"))


def test_no_gain_of_acceptance_is_claimed_that_one_token_decides() -> None:
    before = [np.array([1.0, 0.0, 0.0, 1.0]) for _ in range(12)]
    after = [text.copy() for text in before]
    after[3][1] = 1.0
    change = replace(a_change(0.0, None), acceptance=Acceptance.between(before, after))
    assert change.acceptance.after - change.acceptance.before > 20 * short.LEAST_GAIN
    assert change.accepted == "not measurably more often"
    for text in after:
        text[1] = 1.0
    change = replace(change, acceptance=Acceptance.between(before, after))
    assert change.accepted == "more often"
    change = replace(change, acceptance=Acceptance.between(before[:1], after[:1]))
    assert change.accepted == "not measurably more often", "one text has no interval"


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


def an_acceptance(before: float, after: float, margin: float = 0.01) -> Acceptance:
    gain = after - before
    interval = Interval(low=gain - margin, high=gain + margin)
    return Acceptance(before=before, after=after, gain_ci95=interval, texts=4)


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
    change = Change.between(a_report(*records), an_acceptance(0.5, 0.6), 0.0)
    assert (change.before.speedup, change.after.speedup) == pytest.approx((2.0, 3.2))
    assert (change.before.tokens_per_step, change.after.tokens_per_step) == (2.0, 2.5)
    payload = change.payload()
    assert (payload["before"]["alpha"], payload["after"]["alpha"]) == (0.5, 0.6)
    assert change.ratio == pytest.approx(1.6)
    assert payload["identical_to_autoregressive"] is True
    assert (change.accepted, change.fast) == ("more often", "faster")
    records[-1] = a_record(AFTER, 3, 2.5, steps=16, same=False)
    change = Change.between(a_report(*records), an_acceptance(0.5, 0.6), 0.0)
    assert change.payload()["identical_to_autoregressive"] is False


def a_change(
    temperature: float,
    interval: tuple[float, float] | None,
    acceptance: Acceptance | None = None,
) -> Change:
    (_, side) = drafter_metrics([a_record(name, 0, 4.0, steps=20) for name in (BASELINE, BEFORE)])
    low, high = interval or (1.5, 1.5)
    return Change(
        temperature=temperature,
        before=side,
        after=side,
        acceptance=acceptance or an_acceptance(0.5, 0.6),
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
        ((0.50, 0.60, 0.11), None, "not measurably more often", "not measurably faster"),
        (
            (0.50, 0.5001, 1e-5),  # the table rounds it to nothing
            (0.99, 1.01),
            "not measurably more often",
            "not measurably faster",
        ),
        ((0.50, 0.45), (0.80, 0.97), "less often", "slower"),
    ],
)
def test_what_lies_within_the_noise_is_no_gain(
    alphas: tuple[float, ...], interval: tuple[float, float] | None, accepted: str, fast: str
) -> None:
    change = a_change(0.8, interval, an_acceptance(*alphas))
    assert (change.accepted, change.fast) == (accepted, fast)
    sentence = an_outcome(change).sentence
    assert f"accepted {accepted} at temperature 0.8 than before" in sentence
    assert sentence.endswith(f"decoding with it is {fast} at temperature 0.8.")
    better = accepted == "more often" or fast == "faster"
    assert ("no better" in sentence) == (not better)


def test_the_sentence_tells_temperatures_apart() -> None:
    outcome = an_outcome(
        a_change(0.0, (1.1, 1.2)),
        a_change(0.8, (0.9, 1.2)),
        a_change(1.0, (1.1, 1.2)),
    )
    assert outcome.sentence == (
        "After 61 s of distillation on 12,345 tokens of the target the draft model is accepted "
        "more often at temperature 0 and 0.8 and 1 than before, and decoding with it is faster at "
        "temperature 0 and 1 and not measurably faster at temperature 0.8."
    )


def test_page_terminal_and_json_tell_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = an_outcome(a_change(0.8, (1.1, 1.2), an_acceptance(0.5, 0.612)))
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
