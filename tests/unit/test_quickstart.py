"""The parts of `draftsmith quickstart`: prompts, amounts, a short distillation, and what is said of
it, which never claims more than was measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tests.measurements import a_record
from tests.tiny_models import save_pair

from draftsmith.bench.records import BASELINE, FirstDivergence, RunRecord
from draftsmith.bench.run import BenchPlan, Item
from draftsmith.bench.summary import BenchReport
from draftsmith.commands import distill
from draftsmith.commands import quickstart_demo as short
from draftsmith.commands.quickstart import QuickstartOptions
from draftsmith.commands.quickstart_demo import (
    AFTER,
    BEFORE,
    Change,
    SmallModels,
    fit,
    judged,
    pace_of,
)
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.data import suites
from draftsmith.data.prompts import Prompt
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import InputError
from draftsmith.intervals import Interval
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
        fewest = short.FEWEST_MEASURED_PROMPTS
        assert fitting.repeats in (1, short.REPEATS)
        assert fewest <= len(fitting.items) <= 8
        assert fitting.items == plan.items[: len(fitting.items)]
        rounds = len(fitting.items) * fitting.repeats
        assert each * rounds <= seconds or rounds == fewest
        once = fit(plan, seconds, each, repeats=1)
        assert once.repeats == 1
        assert len(once.items) == min(8, max(fewest, int(seconds / each)))
    assert len(fit(a_plan(2, 128), seconds, 1.0).items) == 2


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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_pair(folder, context=128)
    return folder


@pytest.fixture
def demo(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallModels:
    monkeypatch.setattr(short, "held_out_prompts", lambda count: tuple(SHORT[:count]))
    monkeypatch.setattr(short, "training_prompts", lambda: iter(SHORT))
    return SmallModels(QuickstartOptions(models=models, out=tmp_path / "out", max_new_tokens=6))


def test_the_dozen_prompts_are_chats_of_three_kinds() -> None:
    dozen = suites.dozen_prompts()
    assert len({prompt.id for prompt in dozen}) == 12
    assert all(prompt.is_chat and not prompt.turns for prompt in dozen)
    assert [prompt.tag for prompt in dozen] == ["code"] * 4 + ["math"] * 4 + ["chat"] * 4


def test_amounts_follow_from_the_pace_and_the_shipped_model_stays(
    models: Path, demo: SmallModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = (models / "draft/model.safetensors").read_bytes()
    demo.pace = 1.0  # ten prompts of six tokens at two temperatures; eleven steps
    monkeypatch.setattr(distill, "time_step", lambda options: 2.0)
    monkeypatch.setattr(short, "COLLECT_SECONDS", 10.5 * 12 * short.COLLECTED_COST)
    monkeypatch.setattr(short, "DISTIL_SECONDS", 23.0)
    collected, distilled = demo.collect(), demo.distil()
    texts = list(TrajectoryStore.open(demo.folder / "store").trajectories())
    assert [(text.prompt_id, text.temperature) for text in texts] == [
        (str(number), temperature) for number in range(10) for temperature in (0.0, 0.8)
    ]
    assert collected["tokens_collected"] == sum(len(text.tokens) for text in texts)
    assert (collected["training_prompts"], collected["trajectories"]) == (10, 20)
    assert distilled["steps"] == 11
    learnt = demo.folder / "draft"
    assert json.loads((learnt / "run.json").read_text())["results"]["steps"] == 11
    assert (learnt / "model.safetensors").read_bytes() != shipped
    assert (models / "draft/model.safetensors").read_bytes() == shipped


def test_long_texts_end_where_the_context_ends(models: Path, demo: SmallModels) -> None:
    longest = max(len(item.tokens) for item in demo.items)
    options = QuickstartOptions(models=models, out=demo.options.out, max_new_tokens=1000)
    long = SmallModels(options)
    assert long.items == demo.items and demo.max_new_tokens == 6
    assert long.max_new_tokens == long.context - longest
    assert long.plan(long.draft).max_new_tokens == long.max_new_tokens
    assert long.block == long.context


# --------------------------------------------------------------------------- before and after


def test_acceptance_is_one_for_the_target_itself_and_less_for_another(
    models: Path, demo: SmallModels
) -> None:
    plan = demo.plan(demo.draft, demo.open_draft(str(models / "target")))
    for sampler in plan.samplers:
        before, after, tokens = demo.acceptance(plan, sampler)
        assert after == pytest.approx(tokens, abs=1e-4)
        assert 0 < sum(before) < sum(tokens)
        assert len(tokens) == 12  # all prompts, not those that fit the time of a measurement


def test_a_draft_model_that_can_read_no_prompt_is_refused_at_the_start(
    models: Path, tmp_path: Path, demo: SmallModels
) -> None:
    folder = tmp_path / "models"
    save_pair(folder, context=4)
    shutil.rmtree(folder / "target")
    shutil.copytree(models / "target", folder / "target")
    with pytest.raises(InputError, match=r"context of 4\b"):
        SmallModels(QuickstartOptions(models=folder, out=tmp_path / "out"))


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((1.05, 1.4), "faster"),
        ((0.95, 1.4), "not measurably faster"),
        (None, "not measurably faster"),  # one prompt: anything goes
        ((1.0001, 1.0002), "not measurably faster"),  # the table rounds it to nothing
        ((0.8, 0.97), "slower"),
    ],
)
def test_what_lies_within_the_noise_is_no_gain(
    interval: tuple[float, float] | None, said: str
) -> None:
    spread = None if interval is None else Interval(*interval)
    assert judged(spread, 1.0, "faster", "slower") == said


def timed(name: str, prompt: int, seconds: float, *, steps: int, same: bool = True) -> RunRecord:
    """Without a prompt's step."""
    return a_record(
        name,
        prompt,
        tokens=40,
        loop_tokens=12,
        steps=steps,
        decode_steps=steps - 1,
        accepted=40 - steps,
        offered=60,
        proposed=60,
        seconds=seconds,
        prefill_seconds=0.0,
        decode_seconds=seconds,
        identical=same,
        divergence=None if same else FirstDivergence(at=1, gap=0.0, bound=0.1),
    )


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


def a_change(**changed: Any) -> Change:
    """Four prompts: the draft model gets faster, and is accepted more often in three of them."""
    records = [
        record
        for prompt in range(4)
        for record in (
            timed(BASELINE, prompt, 8.0, steps=40),
            timed(BEFORE, prompt, 4.0, steps=20),
            timed(AFTER, prompt, 2.5, steps=16, **changed),
        )
    ]
    accepted = {"before": [20.0] * 4, "after": [20.0, 24.0, 24.0, 28.0], "tokens": [40] * 4}
    return short.change(a_report(*records), 0.0, **accepted)


def test_a_change_is_read_from_records_and_texts_of_the_same_prompts() -> None:
    change = a_change()
    before, after = change.payload["before"], change.payload["after"]
    assert (before["speedup"], after["speedup"]) == pytest.approx((2.0, 3.2))
    assert (before["tokens_per_step"], after["tokens_per_step"]) == (2.0, 2.5)
    assert (before["alpha"], after["alpha"]) == (0.5, 0.6)
    assert change.payload["speed_ratio"] == pytest.approx(1.6)
    assert change.payload["identical_to_autoregressive"] is True
    assert change.fast == "faster"
    (_, *alphas, gain), (_, _, _, saved), steps, (_, *looped, _), _ = change.rows
    assert alphas == ["50.0 %", "60.0 %"]
    assert gain.startswith("+10.0 points (")
    assert saved == "20.0 %"
    assert looped == ["30%", "30%"]
    assert steps == ("tokens per step (tau)", "2.05", "2.60", "+27 %")  # 39 / 19, 39 / 15
    assert a_change(same=False).payload["identical_to_autoregressive"] is False


def test_a_draft_that_is_faster_than_before_and_slower_than_none_is_told() -> None:
    assert not a_change().slow
    records = [
        record
        for prompt in range(4)
        for record in (
            timed(BASELINE, prompt, 8.0, steps=40),
            timed(BEFORE, prompt, 14.0, steps=20),
            timed(AFTER, prompt, 10.0 + prompt / 10, steps=16),
        )
    ]
    change = short.change(a_report(*records), 0.0, [20.0] * 4, [24.0] * 4, [40] * 4)
    assert change.fast == "faster" and change.slow


def test_the_pace_is_that_of_plain_decoding() -> None:
    report = a_report(
        *(timed(BASELINE, prompt, seconds, steps=40) for prompt, seconds in enumerate((4, 8, 40))),
        timed(AFTER, 0, 1.0, steps=4),
    )
    assert pace_of(report) == report.records[1].seconds / 40


def test_no_gain_of_acceptance_is_claimed_that_one_text_decides() -> None:
    report = a_report(*(timed(name, 0, 4.0, steps=20) for name in (BASELINE, BEFORE, AFTER)))
    before, tokens = [20.0] * 12, [40] * 12
    for after, said in (
        ([24.0, *before[1:]], "not measurably more often"),
        ([21.0] * 12, "more often"),
        ([19.0] * 12, "less often"),
    ):
        assert short.change(report, 0.0, before, after, tokens).accepted == said
    one = short.change(report, 0.0, before[:1], [24.0], tokens[:1])
    assert one.accepted == "not measurably more often", "one text has no interval"


def test_the_sentence_tells_temperatures_apart_and_says_when_nothing_is_better() -> None:
    cost = {"distil_seconds": 61.0, "tokens_collected": 12_345}
    good = a_change()._replace(accepted="more often", fast="faster")
    same = good._replace(temperature=0.8, fast="not measurably faster")
    assert short.sentence(cost, [good, same, good._replace(temperature=1.0)]) == (
        "After 61 s of distillation on 12,345 tokens of the target the draft model is accepted "
        "more often at temperature 0 and 0.8 and 1 than before, and decoding with it is faster at "
        "temperature 0 and 1 and not measurably faster at temperature 0.8 than before."
    )
    still = short.sentence(cost, [good, same._replace(slow=True)])
    assert still.endswith(" than before, but slower than plain decoding at temperature 0.8.")
    worse = same._replace(accepted="less often")
    assert "is no better: it is accepted less often" in short.sentence(cost, [worse])
