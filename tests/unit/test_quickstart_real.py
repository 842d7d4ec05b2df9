"""`draftsmith quickstart` on a really trained model: what it shows, trains and says. A tiny chat
model stands for the real one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.measurements import a_record
from tests.tiny_models import save_chat_pair

from draftsmith.bench.records import BASELINE, RunRecord
from draftsmith.bench.summary import BenchReport
from draftsmith.commands import distill, quickstart, quickstart_demo
from draftsmith.commands import quickstart_real as real
from draftsmith.commands.quickstart import QuickstartOptions
from draftsmith.commands.quickstart_real import AFTER, BEFORE, SHIPPED, RealModel
from draftsmith.data import suites
from draftsmith.data.prompts import Prompt
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.drafters.registry import make_drafter
from draftsmith.errors import InputError
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import open_model

HELD = [Prompt(id=f"held-{i}", text=f"def f(x):\n    return x + {i}\n") for i in range(4)]
LEARNT = [Prompt(id=f"learnt-{i}", text=f"def g(x):\n    return x * {i}\n") for i in range(10)]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QuickstartOptions:
    save_chat_pair(tmp_path, context=4096)
    monkeypatch.setattr(real, "REAL", str(tmp_path / "target"))
    monkeypatch.setattr(real, "SHIPPED_LAYER", tmp_path / "layer")
    monkeypatch.setattr(real, "gguf_file", Path)
    monkeypatch.setattr(real, "FEWEST_QUESTIONS", 8)
    monkeypatch.setattr(real, "FEWEST_STEPS", 4)
    monkeypatch.setattr(real, "held_out_prompts", lambda count: tuple(HELD[:count]))
    monkeypatch.setattr(real, "training_prompts", lambda: iter(LEARNT))
    small = [one.replace("draft_vocab=4096", "draft_vocab=60") for one in real.LAYER_OPTIONS]
    monkeypatch.setattr(real, "LAYER_OPTIONS", tuple(small))
    for name in ("COMPARE", "COLLECT", "DISTIL", "GAIN"):
        monkeypatch.setattr(real, f"{name}_SECONDS", 0.0)
    return QuickstartOptions(out=tmp_path / "out", max_new_tokens=12)


def ship(folder: Path) -> None:
    drafter = make_drafter(real.LAYER, [])
    drafter.bind(open_model(ModelConfig(target=real.REAL)))
    drafter.save(folder, kind=real.LAYER)


@pytest.mark.parametrize("shipped", [True, False])
def test_a_real_model_is_chatted_with_measured_and_learnt_from(
    shipped: bool, options: QuickstartOptions, tmp_path: Path, capsys: Any
) -> None:
    if shipped:
        ship(tmp_path / "layer")
    quickstart.run(options)
    said = capsys.readouterr().out
    assert real.QUESTION in said and "a second)" in said
    assert ("no trained drafter is measured" in said) is not shipped

    def arms(folder: Path) -> Counter[str]:
        lines = (folder / "records.jsonl").read_text().splitlines()
        return Counter(json.loads(line)["drafter"].partition(":")[0] for line in lines)

    names = [BASELINE, "prompt_lookup", "suffix", *[real.LAYER] * shipped]
    assert arms(options.out) == dict.fromkeys(names, 3)
    layers = [BASELINE, BEFORE, AFTER, *[SHIPPED] * shipped]
    assert arms(options.out / "distilled") == dict.fromkeys(layers, 3)
    made = json.loads((options.out / "summary.json").read_text())["distillation"]
    (only,) = made["temperatures"]
    assert {"before", "after", *["shipped"] * shipped} <= set(only)
    assert ("shipped" in only) is shipped
    assert made["sentence"] in said.replace("\n", " ")
    assert made["training_prompts"] == real.FEWEST_QUESTIONS
    store = TrajectoryStore.open(options.out / "distilled/store")
    assert made["tokens_collected"] == sum(len(text.tokens) for text in store.trajectories())
    assert json.loads((options.out / "run.json").read_text())["verb"] == "quickstart"


def test_before_is_what_the_training_began_with(options: QuickstartOptions) -> None:
    demo = RealModel(replace(options, seed=3))
    demo.pace = 0.01
    demo.collect()
    demo.distil()
    (trained,) = demo.open_layer(demo.folder / "layer")
    twin: Any = demo.untrained_twin(trained).drafter
    learnt: Any = trained.drafter
    assert torch.equal(twin.network.target_ids, learnt.network.target_ids)
    fresh: Any = make_drafter(real.LAYER, demo.layer_options)
    fresh.bind(demo.target)
    for (name, own), first in zip(
        twin.network.named_parameters(), fresh.network.parameters(), strict=True
    ):
        assert torch.equal(own, first), name
    assert any(
        not torch.equal(own, after)
        for own, after in zip(twin.network.parameters(), learnt.network.parameters(), strict=True)
    )
    assert twin.default_shape == learnt.default_shape
    assert twin.config.confidence == learnt.config.confidence


def test_amounts_follow_from_the_pace(
    options: QuickstartOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = RealModel(options)
    demo.pace = 2.0  # nine prompts, whose answers of twelve tokens count as 64; seven steps
    monkeypatch.setattr(real, "COLLECT_SECONDS", 9.5 * 2 * 64 * real.ANSWERED_COST)
    monkeypatch.setattr(distill, "time_step", lambda options: 3.0)
    monkeypatch.setattr(real, "DISTIL_SECONDS", 23.0)
    assert demo.collect()["training_prompts"] == 9
    assert demo.distil()["steps"] == 7


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_new_tokens": 1}, "--max-new-tokens must be at least 2, got 1"),
        ({"limit": 0}, "--limit must be at least 1, got 0"),
    ],
)
def test_what_leaves_nothing_to_measure_is_refused(given: dict[str, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        QuickstartOptions(**given).validate()


def test_questions_are_chats_about_the_end_of_the_code(tmp_path: Path) -> None:
    code = "".join(f"    line {number}\n" for number in range(30))
    path = tmp_path / "questions.jsonl"
    real.write_questions(path, [Prompt(id="a.py:f", text=code)])
    (prompt,) = suites.load_prompts(path)
    assert prompt.id == "a.py:f" and prompt.is_chat and not prompt.turns
    lines = prompt.asked.removeprefix(real.ASKED).splitlines()
    assert lines == [f"line {number}" for number in range(30 - real.ASKED_LINES, 30)]


def test_small_models_take_its_place_where_it_is_not_installed(
    options: QuickstartOptions, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    ran: list[str] = []

    class Small:
        def __init__(self, options: QuickstartOptions) -> None:
            pass

        def run(self) -> dict[str, Any]:
            ran.append("small")
            return {}

    monkeypatch.setattr(quickstart_demo, "SmallModels", Small)
    quickstart.run(replace(options, models=Path("models/mini-code")))
    assert capsys.readouterr().out == "", "models of the caller's: nothing is missed"
    monkeypatch.setattr(real, "gguf_file", lambda name: None)
    quickstart.run(options)
    assert "is not installed" in capsys.readouterr().out
    assert ran == ["small", "small"]


def test_the_layer_for_the_real_model_is_in_the_repository() -> None:
    places = (quickstart_demo.ROOT / real.SHIPPED_LAYER,)
    assert quickstart_demo.find_folder(places, "drafter.json", "model.safetensors") is not None
    assert quickstart_demo.find_folder(places, "drafter.json", "gone") is None


# --------------------------------------------------------------------------- before and after


def records(name: str, seconds: float, steps: list[int]) -> Iterator[RunRecord]:
    """Texts of 41 tokens, one per number of steps; the first token is the prompt's step's."""
    for prompt, count in enumerate(steps):
        yield a_record(
            name,
            prompt,
            tokens=41,
            decode_tokens=40,
            steps=count + 1,
            decode_steps=count,
            accepted=40 - count,
            offered=60,
            seconds=seconds,
            decode_seconds=seconds,
        )


def a_report(after: list[int], seconds: float = 2.0) -> BenchReport:
    made = [
        *records(BASELINE, 4.0, [40] * len(after)),
        *records(BEFORE, 6.0, [40] * len(after)),
        *records(AFTER, seconds, after),
    ]
    return BenchReport(
        target="tiny",
        dtype="bfloat16",
        records=tuple(made),
        command="draftsmith quickstart",
        versions={},
        machine={},
        max_new_tokens=41,
    )


def test_the_gain_is_in_tokens_per_step_over_random_weights() -> None:
    change = real.change(a_report([20, 25, 32, 20]), 0.0)
    assert change.steps == pytest.approx((1.0, 160 / 97))
    assert change.accepted == "more often"
    assert change.payload["after"]["speedup"] == pytest.approx(2.0)
    assert change.payload["speed_ratio"] == pytest.approx(3.0)
    low, high = change.payload["tokens_per_step_gain_ci95"]
    assert 0.25 < low < 160 / 97 - 1 < high <= 1.0
    (_, before, after, gain), *_ = change.rows
    assert (before, after) == ("1.00", "1.65") and gain.startswith("+0.65 (")


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ([20, 40, 40, 40], "not measurably more often"),  # one text decides
        ([40] * 4, "not measurably more often"),
        ([30] * 4, "more often"),
        ([30], "not measurably more often"),  # one text has no interval
    ],
)
def test_no_gain_is_claimed_that_chance_explains(after: list[int], said: str) -> None:
    assert real.change(a_report(after), 0.0).accepted == said


def test_the_sentence_says_whether_it_pays() -> None:
    cost = {"distil_seconds": 58.0, "tokens_collected": 9_437}
    good = real.change(a_report([20, 25, 32, 20]), 0.0)
    assert real.sentence(cost, [good]) == (
        "After 58 s of training on 9,437 tokens of the model a new layer's drafts are accepted "
        "more often at temperature 0 than with random weights (1.00 -> 1.65 tokens per step), and "
        "decoding with it is faster at temperature 0 than plain decoding."
    )
    slow = real.change(a_report([20, 25, 32, 20], seconds=5.0), 0.0)
    assert "is slower at temperature 0 than plain" in real.sentence(cost, [slow])
    same = real.change(a_report([20, 25, 32, 20], seconds=4.0), 0.0)
    assert "is not measurably faster at temperature 0 than plain" in real.sentence(cost, [same])
