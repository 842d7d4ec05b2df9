"""`draftsmith tune` on tiny models: all is tried, ranked, written; the advice can be followed."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from tests.robustness.test_command_line import Command, refused
from tests.robustness.test_command_line import command as command  # a fixture
from tests.tiny_models import save_pair

from draftsmith import cli
from draftsmith.bench import costs, tuner
from draftsmith.bench.arms import open_drafters
from draftsmith.bench.costs import Cost, CostTable, DraftCost, StepCost, Workload
from draftsmith.bench.tuner import (
    Candidate,
    CandidateShape,
    Measurement,
    Tuning,
    between,
    candidates_of,
)
from draftsmith.commands import tune
from draftsmith.commands.tune import TuneOptions
from draftsmith.core.config import parse_tree
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.config import DraftingConfig
from draftsmith.drafters.hidden.drafter import FeatureDrafter
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.drafters.suffix import Suffix
from draftsmith.errors import InputError
from draftsmith.targets import hf
from draftsmith.targets.hf import load_target


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_pair(folder, context=128)
    (folder / "suite.txt").write_text("the cat sat on the cat\nthe dog\ndef add(left\n")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(tuner, "ROUNDS", 2)
    monkeypatch.setattr(tuner, "DRAWS", 20)
    monkeypatch.setattr(tuner, "TREES", ("2,1", "2,2,1"))
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
        changes.setattr(tuner, "ROUNDS", 2)
        changes.setattr(tuner, "DRAWS", 20)
        changes.setattr(tuner, "TREES", ("2,1", "2,2,1"))
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
    for length in ("1", "2", "4", "auto"):
        own = ("--draft-length", length, "--draft-proposal", "greedy")
        assert ("independent", own) in flags, "chains of top tokens, too: it draws by itself"
    assert not any(name != "independent" and "--draft-tree" in some for name, some in flags)
    trees = [one for one in found["payload"]["candidates"] if "--draft-tree" in one["flags"]]
    fastest = next(one for one in trees if "auto" not in one["flags"])  # they are in order
    (grown,) = (one for one in trees if "auto" in one["flags"])
    assert grown["flags"] == ["--draft-length", "auto", *fastest["flags"]]
    assert grown["shape"] == f"as deep as pays in {fastest['shape']}"


def test_auto_is_tried_with_trees_whose_width_tells_their_depth() -> None:
    def tree(text: str, *flags: str) -> CandidateShape:
        arm = Arm(name="x", drafter=NoDrafter(), shape=parse_tree(text))
        return CandidateShape(arm=arm, drafter="x", shape=text, flags=flags)

    assert tree("2,1", "--draft-tree", "2,1").is_graded
    assert not tree("2,1").is_graded  # its own, which only a file could name
    assert not tree("10x6:59", "--draft-tree", "10x6:59").is_graded


def test_drafters_that_are_joined_are_tried_with_trees_that_they_fill() -> None:
    arm = Arm(name="x", drafter=Cascade([Suffix(), PromptLookup()]))
    (found,) = candidates_of(["x"], [arm], DraftingConfig(), 8, 0.0)
    assert [tree.flags for tree in found.trees] == [("--draft-tree", text) for text in tuner.TREES]
    assert all(tree.is_graded for tree in found.trees)


def test_the_fastest_is_first_and_figures_agree(found: dict[str, Any]) -> None:
    payload = found["payload"]
    speedups = [one["speedup"] for one in payload["candidates"]]
    assert speedups == sorted(speedups, reverse=True)
    for one in payload["candidates"]:
        assert one["low"] <= one["high"]
        assert 1.0 <= one["tokens_per_step"] <= 5.0
        pace = one["speedup"] * payload["plain_tokens_per_second_by_costs"]
        assert one["tokens_per_second_by_costs"] == pytest.approx(pace)
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
    for single in (one for one in payload["batches"] if one["rows"] == 1):
        own = [one for one in payload["candidates"] if one["drafter"] == single["drafter"]]
        assert (single["flags"], single["speedup"]) == (own[0]["flags"], own[0]["speedup"])
    rates = payload["acceptance_by_depth"]["prompt_lookup"]
    assert all(one["low"] <= one["rate"] <= one["high"] for one in rates)
    costs = payload["step_seconds"]["prompt_lookup"]
    assert len(costs["target_D"]) == len(costs["draft_D"]) == 5


def winning(options: TuneOptions, speedup: float, *flags: str, drafter: str) -> str | None:
    measurement = Measurement(
        arm=Arm(name="x", drafter=NoDrafter(), shape=TreeShape.chain(2)),
        drafter=drafter,
        shape="2 tokens",
        flags=flags,
        length=2,
        temperature=0.8,
        tokens_P=(1,),
        widths_P=({3: 1},),
        by_depth=(),
    )
    winner = Candidate(
        measurement=measurement, speedup=speedup, low=0.9, high=2.0, tokens_per_second=1.0
    )
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
    payload = json.loads(out)
    assert payload["recommendation"]["batches"] == ""
    assert payload["recommendation"]["evidence"].startswith("one prompt was measured")
    # the rounds of the cost table differ, and are all that can
    assert all(one["prompts"] == 1 for one in payload["candidates"])
    assert any(one["low"] < one["high"] for one in payload["candidates"])
    assert "By batch size" not in err
    assert not (tmp_path / "out" / "figures" / "by_batch.png").exists()


class LinearMeter:
    """In place of the real one: forwards cost the same at any width, in batches more by `slope` for
    every token; drafting costs nothing but for chains of a model, which cost five plain steps."""

    slope = 1.0

    def __init__(
        self, target: object, arms: Sequence[Arm], sampler: Sampler, work: Workload
    ) -> None:
        self.arms, self.heat, self.batch = arms, sampler.temperature, work.rows > 1

    def measure(self, rounds: int) -> None:
        pass

    def drafting(self, arm: Arm) -> float:
        return 5.0 * (arm.name.startswith("independent") and arm.used_shape.is_chain)

    def steps(self) -> list[list[StepCost]]:
        return [
            [StepCost(width=1 + arm.used_shape.num_nodes, seconds=self.drafting(arm))]
            for arm in self.arms
        ]

    def table(self) -> CostTable:
        slope = self.slope * self.batch
        ends = tuple(Cost(width=w, seconds=1.0 + slope * (w - 1)) for w in (1, 101))
        draft = {arm.name: (Cost(width=1, seconds=self.drafting(arm)),) for arm in self.arms}
        return CostTable(
            context=1,
            rounds=1,
            target=ends,
            draft=tuple(
                DraftCost(drafter=name, temperature=self.heat, costs=costs)
                for name, costs in draft.items()
            ),
        )

    def redrawn(self, rng: object) -> CostTable:
        return self.table()


def tuned(models: Path, out: Path, *more: str) -> Tuning:
    options = cli.parse("tune", words(models, out, *more)[1:])
    return tune.open_tuner(options).tune()


def candidates(
    names: Sequence[str], drafting: DraftingConfig, target: Any, temperature: float = 0.0
) -> Any:
    arms = open_drafters(names, dataclasses.replace(drafting, draft_length="auto"), target)
    return tuner.candidates_of(names, arms, drafting, 4, temperature)


def together(measurement: Measurement, rows: int) -> float:
    """Speed-up of so many rows, drafts for free: over all ways in which their steps can meet."""
    widths = [w for some in measurement.widths_P for w, count in some.items() for _ in range(count)]
    widest = [max(met) for met in itertools.product(widths, repeat=rows)]
    seconds = [1.0 + LinearMeter.slope * (width - 1) for width in widest]
    return measurement.tokens_per_step * len(seconds) / sum(seconds)


def test_a_batch_is_priced_by_what_batches_cost_and_waits_for_its_longest_row(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "open_meter", LinearMeter)
    monkeypatch.setattr(LinearMeter, "slope", 0.01)
    more = ["--batch-sizes", "1,2", "--max-new-tokens", "48"]  # long enough to repeat themselves
    found = tuned(models, tmp_path, "--drafter", "prompt_lookup", *more)
    one, two = found.batches
    assert (one.measurement, one.speedup) == (found.winner.measurement, found.winner.speedup)
    assert one.speedup == pytest.approx(found.winner.measurement.tokens_per_step)
    fixed = [entry.measurement for entry in found.candidates if entry.measurement.depth is not None]
    assert two.speedup == pytest.approx(
        max(together(some, 2) for some in [*fixed, two.measurement])
    )
    assert two.speedup < together(two.measurement, 1) < one.speedup


def test_in_batches_too_the_best_draft_may_be_a_tree_or_auto(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "open_meter", LinearMeter)
    drafters = f"independent:{models / 'draft'},prompt_lookup"
    found = tuned(models, tmp_path, "--drafter", drafters, "--batch-sizes", "1,2")
    alone, _, model, lookup = found.batches
    best = next(
        one for one in found.candidates if one.measurement.drafter == alone.measurement.drafter
    )
    assert alone.measurement == best.measurement
    assert alone.measurement.length is None
    chains = [one.measurement for one in found.candidates if one.measurement.length is not None]
    trees = [
        one.measurement
        for one in found.candidates
        if one.measurement.depth and not one.measurement.length
    ]
    # a controller that knows what batches cost may well draft nothing, which costs nothing
    assert model.measurement.depth is None or model.measurement in trees
    assert model.speedup >= max(together(measurement, 2) for measurement in trees) - 1e-9
    assert lookup.measurement.label == "auto"
    lookups = [measurement for measurement in chains if measurement.drafter == "prompt_lookup"]
    assert lookup.speedup >= max(together(measurement, 2) for measurement in lookups) - 1e-9


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
    few = ["--drafter", "prompt_lookup", "--max-new-tokens", "1"]
    refused(tuned(*few), 2, "--max-new-tokens must be at least 2")
    assert not (tmp_path / "out").exists()


def test_lengths_between_those_tried() -> None:
    assert between(4, (1, 2, 4, 8, 16)) == (3, 6)
    assert between(1, (1, 2, 4)) == ()
    assert between(16, (1, 2, 4, 8, 16)) == (12,)
    assert between(1, (1,)) == ()


def test_options_go_to_those_drafters_that_can_follow_them(models: Path) -> None:
    target = load_target(str(models / "target"))
    drafting = DraftingConfig(
        draft_proposal="sampled", drafter_option=("prompt_lookup.max_ngram=2",)
    )
    names = ("prompt_lookup", f"independent:{models / 'draft'}")
    lookup, model = candidates(names, drafting, target)
    assert lookup.chain.drafter.config.max_ngram == 2
    assert (lookup.flags, lookup.trees) == ((), ())
    assert model.flags == ("--draft-proposal", "sampled")
    assert model.trees
    assert all(entry.flags[2:] == model.flags for entry in model.trees)
    assert {entry.arm.drafter.config.proposal for entry in model.trees} == {"sampled"}
    assert [entry.length for entry in model.entries(model.lengths)] == [1, 2, 4]


def test_above_temperature_0_chains_are_tried_in_both_ways_unless_one_was_asked_for(
    models: Path,
) -> None:
    target, plain = load_target(str(models / "target")), DraftingConfig()
    names = (f"independent:{models / 'draft'}", "prompt_lookup")
    own, other, lookup = candidates(names, plain, target, 0.7)
    assert (own.flags, own.words, lookup.words) == ((), "", "")
    assert other.flags == ("--draft-proposal", "greedy") and other.trees == ()
    assert other.chain.drafter.config.proposal == "greedy"
    assert own.chain.drafter.config.proposal == "sampled"
    assert other.chain.name != own.chain.name, "each has costs of its own"
    first = other.entries((1, 2))
    assert [one.shape for one in first] == ["1 token, top tokens", "2 tokens, top tokens"]
    assert [one.arm.drafter.config.proposal for one in first] == ["greedy", "greedy"]
    assert len(candidates(names, plain, target)) == 2, "greedy texts know no draws"
    for given in (
        DraftingConfig(draft_proposal="sampled"),
        DraftingConfig(drafter_option=("independent.proposal=sampled",)),
    ):
        assert len(candidates(names, given, target, 0.7)) == 2
    model = own.chain
    both = candidates_of(["independent:a", "hass:b"], [model, model], given, 4, 0.7)
    assert [one.words for one in both] == ["", "", ", top tokens"], "it says nothing of hass"
    reads_text = copy.copy(model.drafter)
    reads_text._vocabularies = None  # as with another tokenizer: it drafts in one way
    (alone,) = candidates_of(["x"], [dataclasses.replace(model, drafter=reads_text)], plain, 4, 0.7)
    assert alone.words == "" and alone.flags == ()


def test_draws_that_a_drafter_cuts_are_also_tried_whole() -> None:
    """The layer draws two tokens: longer chains of its own are the same, and are not tried."""

    class Layer:
        longest = None
        takes_trees = False
        default_shape = TreeShape.chain(6)

        def __init__(self, **options: Any) -> None:
            self.config = FeatureDrafter.Config(**options)

        @property
        def draw_length(self) -> int:
            return 2 if self.config.draw_length == "auto" else self.config.draw_length

    def found(temperature: float, *given: str, **options: Any) -> list[Any]:
        arm = Arm(name="x", drafter=cast(Any, Layer(**{"draw_length": 2, **options})))
        asked = DraftingConfig(drafter_option=given)
        return list(candidates_of(["x"], [arm], asked, 4, temperature))

    own, other, whole = found(0.7, proposal="sampled")
    assert [one.words for one in (own, other, whole)] == ["", ", top tokens", ", draw_length=0"]
    assert own.lengths == (1, 2) and other.lengths == whole.lengths == (1, 2, 4)
    assert whole.flags == ("--drafter-option", "draw_length=0")
    assert [one.chain.drafter.config.draw_length for one in (own, other, whole)] == [2, 2, 0]
    assert whole.chain.drafter.config.proposal == "sampled"
    assert len({one.chain.name for one in (own, other, whole)}) == 3, "each has costs of its own"

    own, drawn, whole = found(0.7)
    assert (own.words, own.lengths) == ("", (1, 2, 4)), "top tokens are not cut"
    assert (drawn.lengths, whole.lengths) == ((1, 2), (1, 2, 4))
    assert whole.words == ", drawn, draw_length=0"
    assert whole.flags == ("--draft-proposal", "sampled", "--drafter-option", "draw_length=0")
    assert whole.chain.drafter.config.proposal == "sampled"

    by_itself = found(0.7, proposal="sampled", draw_length="auto")
    assert [one.lengths for one in by_itself] == [(1, 2), (1, 2, 4), (1, 2, 4)]

    (greedy,) = found(0.0, proposal="sampled")
    assert greedy.lengths == (1, 2, 4), "greedy texts know no draws"
    said = found(0.7, "draw_length=2", proposal="sampled")
    assert [one.words for one in said] == ["", ", top tokens"]
    assert said[0].lengths == (1, 2)


def test_texts_that_end_in_the_step_of_their_prompt_are_no_evidence(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "open_meter", LinearMeter)
    opened = hf.load_target

    def ended(*source: Any, **options: Any) -> Any:
        target = opened(*source, **options)
        target.end_ids = frozenset(range(target.vocab_size))
        return target

    monkeypatch.setattr(hf, "load_target", ended)
    with pytest.raises(InputError, match=r"suite\.txt.*measure"):
        tuned(models, tmp_path, "--drafter", "prompt_lookup")


def test_drafts_that_end_every_text_in_the_step_of_its_prompt_are_left_out(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that drafts for itself: four tokens are one step with a chain of four."""
    monkeypatch.setattr(costs, "open_meter", LinearMeter)
    drafter = f"independent:{models / 'target'}"
    found = tuned(models, tmp_path, "--drafter", drafter, "--max-new-tokens", "4")
    lengths = {one.measurement.length for one in found.candidates}
    assert {1, 2} <= lengths
    assert 4 not in lengths


def test_trees_share_the_weights_of_their_chain(models: Path) -> None:
    target = load_target(str(models / "target"))
    names = [f"independent:{models / 'draft'}"]
    (entrant,) = candidates(names, DraftingConfig(), target)
    chain = entrant.chain.drafter
    assert chain.config.proposal == "sampled"
    assert entrant.trees
    for entry in entrant.trees:
        assert entry.arm.drafter.config.proposal == "without_replacement"
        pairs = zip(entry.arm.drafter.parameters(), chain.parameters(), strict=True)
        assert all(mine is its for mine, its in pairs)
