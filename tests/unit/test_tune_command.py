"""`draftsmith tune` on tiny models: all is tried, ranked, written; the advice can be followed."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.robustness.test_command_line import Command, refused
from tests.robustness.test_command_line import command as command  # a fixture
from tests.tiny_models import save_pair

from draftsmith import cli
from draftsmith.drafting_options import DraftingOptions
from draftsmith.plan.tune import Candidate, Trial
from draftsmith.recipes import _tune, _tuner, tune
from draftsmith.recipes._tune import between
from draftsmith.targets.hf import load_target
from draftsmith.tune_options import TuneOptions


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_pair(folder, context=128)
    (folder / "suite.txt").write_text("the cat sat on the cat\nthe dog\ndef add(left\n")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(_tuner, "ROUNDS", 2)
    monkeypatch.setattr(_tune, "DRAWS", 20)
    monkeypatch.setattr(_tune, "TREES", ("2,1", "2,2,1"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def words(models: Path, out: Path, *more: str) -> list[str]:
    start = ["tune", "--target", models / "target", "--suite", models / "suite.txt", "--out", out]
    fixed = [*start, "--max-new-tokens", "10", "--longest", "4", "--dtype", "float64", "--json"]
    return [*map(str, fixed), *more]


@pytest.fixture(scope="module")
def found(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One run with three drafters and two batch sizes; `err` is what it said."""
    out, patch = tmp_path_factory.mktemp("out"), pytest.MonkeyPatch()
    with patch.context() as changes:
        changes.setattr(_tuner, "ROUNDS", 2)
        changes.setattr(_tune, "DRAWS", 20)
        changes.setattr(_tune, "TREES", ("2,1", "2,2,1"))
        changes.setenv("XDG_CACHE_HOME", str(out / "cache"))
        drafters = f"prompt_lookup,lookahead,independent:{models / 'draft'}"
        more = ["--drafter", drafters, "--batch-sizes", "1,2", "--temperature", "0.8"]
        more += ["--limit", "2", "--drafter-option", "lookahead.ngram=5"]
        given = cli.parse("tune", words(models, out, *more)[1:])
        yield {"payload": tune.run(given), "out": out, "options": given}


def test_every_drafter_is_tried_with_every_shape_it_can_draft(found: dict[str, Any]) -> None:
    flags = {
        (one["drafter"].partition(":")[0], tuple(one["flags"]))
        for one in found["payload"]["candidates"]
    }
    for name in ("prompt_lookup", "lookahead", "independent"):
        for length in ("1", "2", "4", "auto"):
            assert (name, ("--draft-length", length)) in flags
    drawn = ("--draft-proposal", "without_replacement")
    assert ("independent", ("--draft-tree", "2,2,1", *drawn)) in flags
    assert not any(name != "independent" and "--draft-tree" in some for name, some in flags)


def test_the_fastest_is_first_and_figures_agree(found: dict[str, Any]) -> None:
    payload = found["payload"]
    speedups = [one["speedup"] for one in payload["candidates"]]
    assert speedups == sorted(speedups, reverse=True)
    for one in payload["candidates"]:
        assert one["low"] <= one["high"]
        assert 1.0 <= one["tokens_per_step"] <= 5.0
        pace = one["speedup"] * payload["plain_tokens_per_second"]
        assert one["tokens_per_second"] == pytest.approx(pace)
    assert payload["recommendation"]["speculate"] == (speedups[0] > 1.0)
    assert payload["recommendation"]["sentence"].startswith("do not") == (speedups[0] <= 1.0)


def test_what_was_found_is_written(found: dict[str, Any]) -> None:
    out, payload = found["out"], found["payload"]
    assert json.loads((out / "tune.json").read_text()) == payload
    run = json.loads((out / "run.json").read_text())
    assert run["verb"] == "tune"
    assert run["results"] == payload["recommendation"]
    assert {path.name for path in (out / "figures").iterdir()} == {
        f"{name}.{kind}" for name in ("by_length", "by_batch") for kind in ("png", "svg")
    }
    assert sorted({one["rows"] for one in payload["batches"]}) == [1, 2]
    rates = payload["acceptance_by_depth"]["prompt_lookup"]
    assert all(one["low"] <= one["rate"] <= one["high"] for one in rates)
    costs = payload["step_seconds"]["prompt_lookup"]
    assert len(costs["target_D"]) == len(costs["draft_D"]) == 5


def winning(options: TuneOptions, speedup: float, *flags: str, drafter: str) -> str | None:
    trial = Trial(
        drafter=drafter,
        curve="x",
        shape="2 tokens",
        flags=flags,
        length=2,
        depth=2,
        tokens_P=(1,),
        widths_P=({3: 1},),
        by_depth=(),
    )
    winner = Candidate(trial=trial, speedup=speedup, low=0.9, high=2.0, tokens_per_second=1.0)
    return tune.paste(options, winner)


def test_the_advice_can_be_followed(found: dict[str, Any], models: Path, command: Command) -> None:
    """The pasted command decodes; it carries target, sampling and the winner's own flags."""
    options = dataclasses.replace(found["options"], max_new_tokens=6)
    drafter = f"independent:{models / 'draft'}"
    flags = ("--draft-tree", "2,1", "--draft-proposal", "greedy")
    line = winning(options, 1.3, *flags, drafter=drafter)
    assert line is not None
    program, verb, *rest = shlex.split(line)
    assert (program, verb) == ("draftsmith", "generate")
    given = cli.parse(verb, rest)
    given.validate()
    assert (given.temperature, given.drafting.draft_tree) == (0.8, "2,1")
    code, _, err = command(verb, *rest)
    assert code == 0, err
    assert winning(options, 0.97, drafter=drafter) is None


def test_a_single_batch_size_says_nothing_of_batches(
    models: Path, tmp_path: Path, command: Command
) -> None:
    more = ["--drafter", "prompt_lookup", "--limit", "1"]
    code, out, err = command(*words(models, tmp_path / "out", *more))
    assert code == 0, err
    assert json.loads(out)["recommendation"]["batches"] == ""
    assert "By batch size" not in err
    assert not (tmp_path / "out" / "figures" / "by_batch.png").exists()


def test_the_controller_finds_the_costs_that_tune_measured(
    models: Path, tmp_path: Path, command: Command
) -> None:
    more = ["--drafter", "prompt_lookup", "--limit", "1", "--longest", "16"]
    code, _, err = command(*words(models, tmp_path / "out", *more))
    assert code == 0, err
    line = ["generate", "--target", models / "target", "--prompt", "the cat", "--json"]
    line += ["--dtype", "float64", "--max-new-tokens", "4", "--drafter", "prompt_lookup"]
    code, _, err = command(*line, "--draft-length", "auto")
    assert code == 0, err
    assert "measured on 20" in err


def test_bad_input_is_refused_in_one_sentence(
    models: Path, tmp_path: Path, command: Command
) -> None:
    def tuned(*more: str, out: Path = tmp_path / "out") -> tuple[int, str, str]:
        return command(*words(models, out, *more))

    refused(tuned("--drafter", "none"), 2, "--drafter none is what all others are compared with")
    refused(tuned("--drafter", "prompt_lokup"), 2, "did you mean 'prompt_lookup'")
    refused(tuned("--drafter", "prediction"), 2, "drafts from the field `reference`")
    refused(tuned("--drafter", "prompt_lookup", "--longest", "80"), 2, "too few to measure")
    (tmp_path / "file").write_text("")
    refused(tuned("--drafter", "prompt_lookup", out=tmp_path / "file"), 2, "is a file")
    missing = ["--drafter", "prompt_lookup", "--suite", str(tmp_path / "nowhere.jsonl")]
    refused(tuned(*missing), 2, "nowhere.jsonl does not exist")
    assert not (tmp_path / "out").exists()


def test_lengths_between_those_tried() -> None:
    assert between(4, (1, 2, 4, 8, 16)) == (3, 6)
    assert between(1, (1, 2, 4)) == ()
    assert between(16, (1, 2, 4, 8, 16)) == (12,)
    assert between(1, (1,)) == ()


def test_options_go_to_those_drafters_that_can_follow_them(models: Path) -> None:
    target = load_target(str(models / "target"))
    drafting = DraftingOptions(draft_proposal="sampled", drafter_option=("prompt_lookup.length=7",))
    names = ("prompt_lookup", f"independent:{models / 'draft'}")
    lookup, model = _tune.open_entrants(names, drafting, target, 4, greedy=True)
    assert lookup.chain.drafter.config.length == 7
    assert (lookup.flags, lookup.trees) == ((), ())
    assert model.flags == ("--draft-proposal", "sampled")
    assert model.trees
    assert all(entry.flags[2:] == model.flags for entry in model.trees)
    assert {entry.arm.drafter.config.proposal for entry in model.trees} == {"sampled"}
    assert [entry.length for entry in model.entries(model.lengths)] == [1, 2, 4]
