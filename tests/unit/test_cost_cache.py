"""Costs kept from run to run: found again for just what they were measured for, never a crash."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.bench import costs as bench_costs
from draftsmith.bench.costs import REFRESH, CostFile, Workload, cost_file
from draftsmith.config import as_dict
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.plan.length_policy import StepCosts
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import TabularTarget, tiny_target

COSTS = StepCosts(target_D=(1.0, 1.1, 1.25), draft_D=(0.0, 0.1, 0.2), in_vain=1.1)
KEYED = '{"key": KEY, "measured": "x", "costs": %s}'
WORK = Workload(prompts=[(1, 2, 3)], max_new_tokens=16)
TARGET = tiny_target(64)


def lookup(length: int = 4, **config: object) -> Arm:
    drafter = PromptLookup(PromptLookup.Config(**config))
    return Arm(name="d", drafter=drafter, shape=TreeShape.chain(length))


Messages = Callable[[], list[str]]


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Messages:
    """The messages that were logged so far."""
    caplog.set_level(logging.INFO, "draftsmith")
    return lambda: [one.getMessage() for one in caplog.records]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(REFRESH, raising=False)
    return tmp_path


def the_file(sampler: Sampler | None = None, arm: Arm | None = None, **work: object) -> CostFile:
    workload = dataclasses.replace(WORK, **work)
    return cost_file(TARGET, arm or lookup(), sampler or Sampler(), workload)


def test_what_was_stored_is_loaded(cache: Path) -> None:
    assert the_file().load() is None
    assert the_file().store(COSTS)
    kept = the_file().load()
    assert kept is not None and kept[0] == COSTS
    assert the_file().path.is_relative_to(cache / "draftsmith" / "costs")


def test_what_costs_depend_on_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {
        "as it is": the_file(),
        "drawing": the_file(Sampler(temperature=0.8)),
        "nucleus": the_file(Sampler(temperature=0.8, top_p=0.9)),
        "rows": the_file(rows=4),
        "context": the_file(prompts=[(1,) * 600]),
        "length": the_file(arm=lookup(8)),
        "option": the_file(arm=lookup(max_ngram=2)),
        "target": cost_file(tiny_target(64, layers=1), lookup(), Sampler(), WORK),
    }
    eager = HFTarget(TARGET.model, name=TARGET.name, attn_implementation="eager")
    paths["attention"] = cost_file(eager, lookup(), Sampler(), WORK)
    for seed_layers in (1, 2):
        drafter = Independent(Independent.Config(), model=tiny_target(64, layers=seed_layers))
        own = Arm(name="d", drafter=drafter, shape=TreeShape.chain(4))
        paths[f"draft of {seed_layers} layers"] = the_file(arm=own)
    summary = bench_costs.machine_summary()
    monkeypatch.setattr(bench_costs, "machine_summary", lambda: {**summary, "cpus": 999})
    paths["machine"] = the_file()
    found = [file.path for file in paths.values()]
    assert len(set(found)) == len(found)


def test_what_costs_do_not_depend_on_is_not() -> None:
    warm, warmer = Sampler(temperature=0.8), Sampler(temperature=1.0, logit_bias=((3, 1.0),))
    assert the_file(warm).path == the_file(warmer).path
    assert the_file().path == the_file(prompts=[(9, 9)], max_new_tokens=60).path
    again = cost_file(tiny_target(64, seed=5), lookup(), Sampler(), WORK)
    assert the_file().path == again.path  # other weights of the same sizes


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        '{"key": 1}',
        KEYED % '{"target_D": [1.0], "draft_D": [0.0], "in_vain": 1.0}',
        KEYED % '{"target_D": [0.0, 1.0], "draft_D": [0.0, 0.0], "in_vain": 1.0}',
        KEYED % '{"target_D": [1.0, NaN], "draft_D": [0.0, 0.0], "in_vain": 1.0}',
        KEYED % '{"target_D": "fast", "draft_D": [0.0, 0.0], "in_vain": 1.0}',
        KEYED % '{"target_D": [1.0, 1.0], "draft_D": [0.0, 0.0]}',
        '{"key": KEY, "costs": GOOD}',
        '{"key": {}, "measured": "x", "costs": GOOD}',
    ],
)
def test_a_file_that_is_damaged_or_of_something_else_is_not_used(
    content: str, messages: Messages
) -> None:
    file = the_file()
    file.path.parent.mkdir(parents=True)
    good = json.dumps(as_dict(COSTS))
    file.path.write_text(content.replace("KEY", json.dumps(file.key)).replace("GOOD", good))
    assert file.load() is None
    (said,) = messages()
    assert file.path.name in said and "measuring again" in said
    assert file.store(COSTS)
    assert file.load() is not None


def test_bytes_that_are_no_text_are_not_used(messages: Messages) -> None:
    file = the_file()
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(b"\xff\xfe\x00")
    assert file.load() is None
    (said,) = messages()
    assert "cannot be read" in said


def test_a_folder_that_cannot_be_written_keeps_nothing_and_says_so(
    cache: Path, messages: Messages
) -> None:
    (cache / "draftsmith").write_text("a file where a folder should be")
    assert not the_file().store(COSTS)
    (said,) = messages()
    assert "not kept" in said
    assert the_file().load() is None


def test_costs_can_be_asked_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    the_file().store(COSTS)
    monkeypatch.setenv(REFRESH, "1")
    assert the_file().load() is None
    monkeypatch.setenv(REFRESH, "0")
    assert the_file().load() is not None


def test_costs_measured_beside_other_programs_do_until_nothing_else_runs(
    messages: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([COSTS, dataclasses.replace(COSTS, in_vain=1.2)])
    monkeypatch.setattr(bench_costs, "measure", lambda *_: next(measured))

    def used(others: str | None) -> float:
        return bench_costs.costs_of(lookup(), TARGET, Sampler(), WORK, others).in_vain

    busy = "other programs use this machine"
    assert [used(busy), used(busy), used(None), used(None), used(busy)] == [1.1, 1.1, 1.2, 1.2, 1.2]
    assert "measured again once nothing else runs" in messages()[0]
    assert sum("was measured beside other programs" in said for said in messages()) == 1


def test_without_the_variable_costs_are_in_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert the_file().path.is_relative_to(tmp_path / ".cache" / "draftsmith")


def test_tabular_targets_have_a_file_too() -> None:
    file = cost_file(TabularTarget(8), lookup(), Sampler(), WORK)
    file.store(COSTS)
    assert file.load() is not None
    assert os.listdir(file.path.parent) == [file.path.name]
