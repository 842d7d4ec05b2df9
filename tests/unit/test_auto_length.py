"""`--draft-length auto` from the command line: the same texts, costs measured once and said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.robustness.test_command_line import Command, command, models, refused

from draftsmith import provenance
from draftsmith.bench import costs as bench_costs
from draftsmith.bench.arms import open_drafters
from draftsmith.bench.costs import REFRESH, Workload
from draftsmith.config import from_dict
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import StepCount, TreeShape
from draftsmith.drafters.config import DraftingConfig
from draftsmith.drafters.independent import Independent
from draftsmith.errors import InputError
from draftsmith.plan.length_policy import CostAware, Learning, StepCosts
from draftsmith.targets.base import Target
from draftsmith.targets.toy import TabularTarget

__all__ = ["command", "models"]

TARGET = TabularTarget(8)
WORK = Workload(prompts=[(1, 2, 3)], max_new_tokens=16)
CHEAP = StepCosts(target_D=(1.0,) * 17, draft_D=(0.0,) * 17, in_vain=1.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(REFRESH, raising=False)
    monkeypatch.setattr(bench_costs, "ROUNDS", 2)
    return tmp_path / "cache"


def words(models: Path, *more: str) -> list[str]:
    start = ["generate", "--target", str(models / "target"), "--prompt", "the cat sat on the cat"]
    return [*start, "--max-new-tokens", "24", "--dtype", "float64", "--json", *more]


@pytest.mark.parametrize("drafter", ["prompt_lookup", "lookahead", "independent:{}"])
def test_the_text_is_that_of_plain_decoding(drafter: str, models: Path, command: Command) -> None:
    drafter = drafter.format(models / "draft")
    plain = command(*words(models))
    auto = command(*words(models, "--drafter", drafter, "--draft-length", "auto"))
    assert auto[0] == 0, auto[2]
    (expected,), (found,) = json.loads(plain[1])["results"], json.loads(auto[1])["results"]
    assert found["token_ids"] == expected["token_ids"]


@pytest.mark.parametrize("tree", ["2,2,1", "3x3:7"])
def test_the_text_of_a_tree_that_grows_as_deep_as_pays_is_that_of_plain_decoding(
    tree: str, models: Path, command: Command
) -> None:
    drafter = ["--drafter", f"independent:{models / 'draft'}", "--draft-tree", tree]
    plain = command(*words(models))
    auto = command(*words(models, *drafter, "--draft-length", "auto"))
    assert auto[0] == 0, auto[2]
    assert "with drafts 1, 3 deep a step lasts" in auto[2]
    (expected,), (found,) = json.loads(plain[1])["results"], json.loads(auto[1])["results"]
    assert found["token_ids"] == expected["token_ids"]


@pytest.mark.parametrize(("draft", "accepted"), [(0.0, 3), (9.0, 0)])
def test_a_tree_is_priced_by_its_nodes_and_left_out_where_it_costs_too_much(
    draft: float, accepted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def priced(_target: Target, arm: Arm, *_: object) -> StepCosts:
        nodes = [one.used_shape.num_nodes for one in bench_costs.arms_by_depth(arm)]
        assert nodes == [0, 2, 6, 10]  # cut to no token, 1, 2 and 3
        return StepCosts(target_D=(1.0,) * 4, draft_D=(0.0, *[draft] * 3), in_vain=1.0)

    monkeypatch.setattr(bench_costs, "measure", priced)
    twin = TabularTarget(8)
    drafter = Independent(Independent.Config(proposal="greedy"), model=twin)
    drafter.bind(TARGET)
    tree = TreeShape(widths=(2, 2, 1))
    grown = DraftingConfig(draft_length="auto", draft_tree="2,2,1")
    arms = [Arm(name="x", drafter=drafter, shape=tree)]
    (arm,) = bench_costs.with_controllers(arms, grown, TARGET, Sampler(), WORK)
    options = arm.adapt(DecodeOptions(max_new_tokens=60))
    for number in range(3):
        steps = list(decode(TARGET, drafter, [(1, 2, 3)], replace(options, seed=number)))
    assert steps[-2].accepted == (accepted,)
    assert steps[-2].proposed == ((10,) if accepted else (0,))


def test_a_tree_that_ends_above_its_depth_has_missed_there() -> None:
    seen: list[StepCount] = []

    class Noted(CostAware):
        def learn(self, rows: Sequence[Sequence[StepCount]]) -> None:
            seen.extend(step for row in rows for step in row)

    drafter = Independent(Independent.Config(proposal="greedy"), model=TabularTarget(8))
    drafter.bind(TARGET)
    policy = Noted(costs=StepCosts(target_D=(1.0,) * 5, draft_D=(0.0,) * 5, in_vain=1.0))
    for shape in (TreeShape(widths=(2,) * 4, keep=4), TreeShape.chain(4)):
        seen.clear()
        options = DecodeOptions(max_new_tokens=60, shape=shape, policy=policy)
        list(decode(TARGET, drafter, [(1, 2, 3)], options))
        some = [step for step in seen if step.offered]
        assert some
        assert all(step.accepted <= step.offered <= step.asked for step in some)
        early = [step for step in some if step.accepted < step.asked]
        assert all(step.offered > step.accepted for step in early)
        assert bool(early) == (not shape.is_chain)  # the twin's chains are accepted whole


def test_costs_are_measured_once_and_said_in_one_line(
    models: Path, command: Command, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = words(models, "--drafter", "prompt_lookup", "--draft-length", "auto")

    def said() -> str:
        code, _, err = command(*line)
        assert code == 0, err
        (sentence,) = [text for text in err.splitlines() if "times a plain one" in text]
        return sentence

    assert said().startswith("prompt_lookup: with drafts 1, 4, 16 deep a step lasts ")
    (kept,) = (cache / "draftsmith" / "costs").iterdir()
    before = kept.read_bytes()
    assert "measured on 20" in said()
    assert kept.read_bytes() == before
    monkeypatch.setenv(REFRESH, "1")
    assert "kept in" in said()
    monkeypatch.delenv(REFRESH)
    kept.write_text("{")
    code, _, err = command(*line)
    assert code == 0
    assert "cannot be read: measuring again" in err
    assert json.loads(kept.read_text())["costs"]


def test_before_costs_are_kept_it_warns_of_other_programs(
    models: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance.os, "getloadavg", lambda: (900.0, 1.0, 1.0), raising=False)
    monkeypatch.setattr(provenance, "_others_run", lambda: True)
    line = words(models, "--drafter", "prompt_lookup", "--draft-length", "auto")
    warning = "other programs use this machine (load 900.0 on "
    code, _, err = command(*line)
    assert code == 0, err
    said = [text for text in err.splitlines() if text.startswith(warning)]
    assert len(said) == 1
    assert "measured again once nothing else runs" in said[0]
    assert err.index(warning) < err.index("kept in")
    assert warning not in command(*line)[2]  # what is kept takes no time
    # the load of the minute before, but nothing runs now
    monkeypatch.setattr(provenance, "_others_run", lambda: False)
    for expected in (True, False):
        err = command(*line)[2]
        assert warning not in err
        assert ("was measured beside other programs: measuring again" in err) == expected


def measured_for(
    command: Command, line: Sequence[object], monkeypatch: pytest.MonkeyPatch
) -> tuple[Sampler, Workload]:
    """The sampler and the workload that a command has costs measured for."""
    seen: list[tuple[Sampler, Workload]] = []

    def noted(_arm: Arm, _target: Target, sampler: Sampler, work: Workload) -> StepCosts:
        seen.append((sampler, work))
        return CHEAP

    monkeypatch.setattr(bench_costs, "measure", noted)
    code, _, err = command(*line)
    assert code == 0, err
    (found,) = seen
    return found


@pytest.mark.parametrize(("asked", "rows"), [(1, 1), (2, 2), (8, 3)])
def test_costs_are_those_of_as_many_rows_as_are_decoded_together(
    asked: int, rows: int, models: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--prompt", "the dog", "--prompt", "a cat", "--batch-size", str(asked)]
    line = words(models, *more, "--drafter", "prompt_lookup", "--draft-length", "auto")
    _, work = measured_for(command, line, monkeypatch)
    assert (work.rows, len(work.prompts)) == (rows, 3)


def test_a_bench_of_several_temperatures_measures_what_drawing_costs(
    models: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tmp_path / "suite.txt"
    suite.write_text("the cat sat on the cat\nthe dog\na cat\n")
    line = ["bench", "--target", models / "target", "--suite", suite, "--no-hf-baseline"]
    line += ["--drafter", "prompt_lookup", "--draft-length", "auto", "--temperature", "0,1,0.5"]
    line += ["--repeats", "1", "--warmup", "0", "--max-new-tokens", "4", "--batch-size", "2"]
    sampler, work = measured_for(command, [*line, "--out", tmp_path / "out"], monkeypatch)
    assert sampler.temperature == 1.0
    assert work.rows == 2


def test_a_cache_that_cannot_be_written_stops_nothing(
    models: Path, command: Command, cache: Path
) -> None:
    cache.write_text("a file where a folder should be")
    code, out, err = command(*words(models, "--drafter", "prompt_lookup", "--draft-length", "auto"))
    assert code == 0, err
    assert json.loads(out)["results"]
    assert "costs are not kept" in err


def test_bench_measures_it_beside_others(models: Path, command: Command, tmp_path: Path) -> None:
    suite = tmp_path / "suite.txt"
    suite.write_text("the cat sat on the cat\nthe dog\n")
    start = ["bench", "--target", models / "target", "--suite", suite, "--no-hf-baseline"]
    code, out, err = command(
        *start,
        *["--drafter", "none,prompt_lookup,lookahead", "--draft-length", "auto", "--json"],
        *["--temperature", "0,1", "--repeats", "1", "--warmup", "0", "--max-new-tokens", "12"],
        *["--dtype", "float64", "--out", tmp_path / "out"],
    )
    assert code == 0, err
    summary = json.loads(out)
    assert [entry["name"] for entry in summary["drafters"]].count("lookahead") == 2
    assert summary["losslessness"]
    assert err.count("times a plain one") == 2  # `none` has no costs of its own
    records = [json.loads(s) for s in (tmp_path / "out/records.jsonl").read_text().splitlines()]
    assert all(record["identical"] is not False for record in records)
    kept = json.loads((tmp_path / "out/run.json").read_text())["results"]["step_seconds"]
    assert sorted(kept) == ["lookahead", "prompt_lookup"], "its choices can be made again"
    assert all(from_dict(StepCosts, one, where=name).longest for name, one in kept.items())


def test_what_drafts_nothing_has_no_length(models: Path, command: Command) -> None:
    refused(
        command(*words(models, "--draft-length", "auto")),
        2,
        "none drafts nothing: leave out --draft-length",
    )


def test_a_context_too_short_to_draft_in_is_refused(
    models: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TARGET, "max_length", 30)
    (arm,) = open_drafters(["prompt_lookup"], DraftingConfig(draft_length="auto"), TARGET)
    with pytest.raises(InputError, match=r"drafts of 16\b"):
        bench_costs.costs_of(arm, TARGET, Sampler(), WORK, None)


def test_only_arms_that_follow_the_option_get_a_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_costs, "costs_of", lambda *_: CHEAP)
    auto = DraftingConfig(draft_length="auto")
    names = ["none", "prompt_lookup", "lookahead"]
    arms = bench_costs.with_controllers(
        open_drafters(names, auto, TARGET), auto, TARGET, Sampler(), WORK
    )
    none, lookup, ahead = arms
    assert (none.shape, none.policy) == (None, None)
    assert lookup.shape == TreeShape.chain(16)
    assert ahead.shape == TreeShape.chain(4)
    for arm in (lookup, ahead):
        assert isinstance(arm.policy, Learning)
        assert arm.policy.policy == CostAware(costs=CHEAP)
    assert lookup.policy is not ahead.policy  # each learns of its own drafts
    tree = DraftingConfig(draft_length="auto", draft_tree="2,1")
    with pytest.raises(InputError, match="prompt_lookup drafts chains, no trees"):
        open_drafters(["prompt_lookup"], tree, TARGET)
    fixed = DraftingConfig(draft_length=3)
    arms = open_drafters(["prompt_lookup"], fixed, TARGET)
    assert bench_costs.with_controllers(arms, fixed, TARGET, Sampler(), WORK) == arms


def test_a_lossy_rule_may_have_a_controller(models: Path, command: Command) -> None:
    drafter = f"independent:{models / 'draft'}"
    lossy = ["--acceptance", "typical", "--draft-length", "auto", "--temperature", "1"]
    code, out, err = command(*words(models, "--drafter", drafter, *lossy))
    assert code == 0, err
    assert json.loads(out)["lossy"]
