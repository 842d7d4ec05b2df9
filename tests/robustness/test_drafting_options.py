"""Drafting options that a drafter cannot follow, drafters by folder, and predictions from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.robustness.test_command_line import Command, command, models, refused
from tests.tiny_models import tiny_tokenizer

from draftsmith.bench.arms import open_drafters
from draftsmith.bench.run import first_difference
from draftsmith.core.generation import Arm
from draftsmith.core.types import TreeShape
from draftsmith.drafters.base import STRUCTURE, options_marked
from draftsmith.drafters.config import DraftingConfig
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.registry import drafter_class, load_drafter
from draftsmith.errors import InputError
from draftsmith.plan.length_policy import AdaptiveLength
from draftsmith.targets.toy import TabularTarget, tiny_target

__all__ = ["command", "models"]

TARGET = TabularTarget(8)


def opened(*names: str, **options: object) -> tuple[Arm, ...]:
    return open_drafters(names, DraftingConfig(**options), TARGET)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("none", {"draft_length": 3}, "none drafts nothing: leave out --draft-length"),
        ("none", {"draft_length": "adaptive"}, "none drafts nothing: leave out --draft-length"),
        ("none", {"draft_length": "auto"}, "none drafts nothing: leave out --draft-length"),
        ("none", {"draft_tree": "2,1"}, "none drafts nothing: leave out --draft-tree"),
        ("prompt_lookup", {"draft_tree": "2,1"}, "prompt_lookup drafts chains, no trees: use"),
        ("lookahead", {"draft_tree": "2,1"}, "lookahead drafts chains, no trees"),
        (
            "lookahead",
            {"draft_length": 10},
            "lookahead drafts at most 4 tokens: use --drafter-option ngram=11.",
        ),
        (
            "lookahead",
            {"draft_length": 10, "drafter_option": ("ngram=7",)},
            "lookahead drafts at most 6 tokens: use --drafter-option ngram=11.",
        ),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    name: str, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InputError) as caught:
        opened(name, **options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("prompt_lookup", {"draft_length": 4}, "--drafter-option length and --draft-length"),
        ("prompt_lookup", {"draft_length": "auto"}, "--drafter-option length and --draft-length"),
        ("recycling", {"draft_tree": "2,1"}, "--drafter-option length and --draft-tree"),
    ],
)
def test_a_length_is_said_once(name: str, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        opened(name, **options, drafter_option=("length=3",))
    with pytest.raises(InputError, match=sentence):
        opened("none", name, **options, drafter_option=(f"{name}.length=3",))


def test_a_proposal_is_said_once(models: Path, command: Command) -> None:
    words = ["--target", models / "target", "--drafter", models / "draft", "--prompt", "x"]
    words += ["--draft-proposal", "greedy", "--drafter-option", "proposal=sampled"]
    refused(command("generate", *words), 2, "proposal and --draft-proposal exclude each other")


def test_a_later_part_of_a_cascade_has_a_length_of_its_own() -> None:
    options = ("recycling.length=2",)
    (arm,) = opened("suffix+recycling", draft_length=4, drafter_option=options)
    assert arm.used_shape == TreeShape.chain(4)
    with pytest.raises(InputError, match=r"suffix\.length and --draft-length"):
        opened("suffix+recycling", draft_length=4, drafter_option=("suffix.length=2",))


@pytest.mark.parametrize(
    ("name", "part"),
    [("suffix+runs/draft", "runs/draft"), ("prompt_lookup+", ""), ("zz+none", "zz")],
)
def test_the_part_of_a_cascade_that_is_no_drafter_is_named(name: str, part: str) -> None:
    with pytest.raises(InputError, match=f"its part '{part}' is no drafter .*KIND:FOLDER"):
        load_drafter(name)


@pytest.mark.parametrize("options", [("length=3", "length=4"), ("min-match=1", "min_match=1")])
def test_an_option_that_is_given_twice_is_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="is given twice"):
        DraftingConfig(drafter_option=options).validate()


def test_the_advice_is_good() -> None:
    (arm,) = opened("lookahead", draft_length=10, drafter_option=("ngram=11",))
    assert arm.used_shape == TreeShape.chain(10)
    (arm,) = opened("prompt_lookup", draft_length=20)
    assert arm.used_shape == TreeShape.chain(20)
    (arm,) = opened("prompt_lookup", draft_tree="1,1")
    assert arm.used_shape.is_chain


def test_with_several_drafters_an_option_is_for_those_that_take_it() -> None:
    none, lookup, ahead = opened("none", "prompt_lookup", "lookahead", draft_length=9)
    assert none.shape is None
    assert lookup.shape == TreeShape.chain(9)
    assert ahead.shape is None
    with pytest.raises(InputError) as caught:
        opened("none", "lookahead", draft_length=9)
    assert str(caught.value) == (
        "lookahead drafts at most 4 tokens: use --drafter-option lookahead.ngram=10."
    )


def test_an_adaptive_length_stays_within_what_the_drafter_can() -> None:
    (ahead,) = opened("lookahead", draft_length="adaptive")
    assert ahead.policy == AdaptiveLength(first=4, longest=4)
    assert ahead.shape == TreeShape.chain(4)
    (lookup,) = opened("prompt_lookup", draft_length="adaptive")
    assert lookup.policy == AdaptiveLength()


def test_draft_models_declare_that_they_take_trees() -> None:
    assert Independent.takes_trees
    assert Independent(Independent.Config(), model=TabularTarget(8)).longest is None


# ---------------------------------------------------------------------------- trained drafters

TINY = tiny_target(64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of trained drafters, named by their kind."""
    folder = tmp_path_factory.mktemp("trained")
    for kind in (
        *("eagle", "eagle3", "hass", "fspad", "griffin", "medusa", "p_eagle", "parallel"),
        "unrolled",
    ):
        drafter = drafter_class(kind)()
        drafter.bind(TINY)
        drafter.save(folder / kind, kind=kind)
    return folder


def opened_folders(*names: Path | str, **options: Any) -> tuple[Arm, ...]:
    return open_drafters([str(name) for name in names], DraftingConfig(**options), TINY)


def refusal(*names: Path | str, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        opened_folders(*names, **options)
    return str(caught.value)


def test_heads_that_were_not_trained_are_not_advised(trained: Path) -> None:
    medusa = trained / "medusa"
    (arm,) = opened_folders(medusa, draft_length=4)
    assert arm.drafter.longest == 4
    said = f"{medusa} drafts at most 4 tokens: {{}} must not be longer."
    assert refusal(medusa, draft_length=6) == said.format("--draft-length")
    assert refusal(medusa, draft_tree="2,1,1,1,1") == said.format("--draft-tree")


@pytest.mark.parametrize("length", [8, 9, 20])
@pytest.mark.parametrize("kind", ["p_eagle", "parallel"])
def test_a_block_that_was_not_trained_is_not_advised(kind: str, length: int, trained: Path) -> None:
    folder = trained / kind
    said = f"{folder} drafts at most 7 tokens: --draft-length must not be longer."
    assert refusal(folder, draft_length=length) == said


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *[(kind, "noise=0.1") for kind in ("eagle", "eagle3", "hass", "fspad", "griffin")],
        ("unrolled", "noise=0.1"),
        ("unrolled", "fusion=plain"),
        *[(kind, "num-forwards=2") for kind in ("eagle3", "hass", "griffin", "unrolled")],
        ("eagle", "seed=0"),
        ("eagle3", "decay=0.5"),
        ("griffin", "mask_top=5"),
        ("griffin", "mask_shift=official"),
        *[("medusa", option) for option in ("heads=2", "layers=2", "decay=0.5")],
    ],
)
def test_an_option_for_training_is_refused_where_nothing_is_trained(
    kind: str, option: str, trained: Path
) -> None:
    folder, name = trained / kind, option.partition("=")[0].replace("-", "_")
    settled = name in options_marked(drafter_class(kind).Config, STRUCTURE)
    why = f"the weights in {folder} have settled it" if settled else f"{folder} reads it when it is"
    what = f"--drafter-option {name}: {why}"
    assert what in refusal(folder, drafter_option=(option,))
    assert what in refusal("none", folder, drafter_option=(f"{kind}.{option}",))


def test_what_a_drafter_was_trained_with_stays_in_its_folder(trained: Path) -> None:
    manifest = trained / "griffin" / "drafter.json"
    before = manifest.read_text()
    manifest.write_text(before.replace('"num_forwards": 3', '"num_forwards": 5'))
    (arm,) = opened_folders(trained / "griffin", drafter_option=("proposal=greedy",))
    assert arm.drafter.num_steps == 5
    manifest.write_text(before)


ASKED = {
    "flag": {"draft_proposal": "sampled"},
    "option": {"drafter_option": ("proposal=without_replacement",)},
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_a_tree_that_grows_is_not_drawn(asked: dict[str, Any], trained: Path) -> None:
    eagle = trained / "eagle"
    assert f"the tree of {eagle} grows from its most probable tokens" in refusal(eagle, **asked)
    lengths = [{"draft_length": length} for length in (3, "adaptive", "auto")]
    for shape in (*lengths, {"draft_tree": "2,1"}):
        (arm,) = opened_folders(eagle, **asked, **shape)
        assert arm.drafter.config.proposal != "greedy"
        assert not arm.used_shape.is_dynamic
    (arm,) = opened_folders(eagle, draft_proposal="greedy")
    assert arm.used_shape.is_dynamic


def test_a_proposal_is_for_those_drafters_that_can_follow_it(trained: Path) -> None:
    eagle, medusa = trained / "eagle", trained / "medusa"
    assert "drafts in one way only" in refusal("none", medusa, draft_proposal="greedy")
    assert "grows from" in refusal("none", eagle, draft_proposal="sampled")
    assert "grows from" in refusal("none", eagle, drafter_option=("eagle.proposal=sampled",))
    opened_folders("none", eagle, draft_proposal="sampled", draft_length=3)
    opened_folders("none", medusa, eagle, draft_proposal="greedy")


# ---------------------------------------------------------------------------- by folder


def test_a_model_folder_is_a_draft_model(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    drafter = load_drafter(str(folder), ["proposal=greedy"])
    assert isinstance(drafter, Independent)
    assert drafter.config == Independent.Config(source=str(folder), proposal="greedy")
    own = DraftingConfig(drafter_option=("independent.dtype=float32",))
    own.check_assignments(("none", str(folder)))
    assert own.assignments(str(folder), alone=False) == ("dtype=float32",)


def test_another_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.bin").write_text("{")
    with pytest.raises(InputError, match=r"config\.json.*transformers"):
        load_drafter(str(tmp_path))
    manifest = tmp_path / "drafter.json"
    for content in ("{", "[]", '{"kind": "eagle"}', '{"kind": "eagle", "options": 3}'):
        manifest.write_text(content)
        with pytest.raises(InputError, match=r"drafter\.json"):
            load_drafter(str(tmp_path))
    manifest.write_text('{"kind": "griffin", "options": {"num_forwards": 5}}')
    drafter = load_drafter(str(tmp_path))
    assert (type(drafter).__name__, drafter.num_steps) == ("Griffin", 5)
    assert drafter.config.source == str(tmp_path)
    manifest.unlink()
    with pytest.raises(InputError, match="'runs/nowhere' does not exist"):
        load_drafter("runs/nowhere")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt_lookup").mkdir()
    assert type(load_drafter("prompt_lookup")).__name__ == "PromptLookup"


def test_generate_takes_a_folder(models: Path, command: Command) -> None:
    words = ["generate", "--target", models / "target", "--prompt", "the cat", "--json"]
    words += ["--max-new-tokens", "8", "--drafter"]
    by_folder = command(*words, models / "draft")
    assert by_folder[0] == 0, by_folder[2]
    assert by_folder[1] == command(*words, f"independent:{models / 'draft'}")[1]


# ---------------------------------------------------------------------------- predictions


def test_references_of_a_prompt_file_are_predictions(
    models: Path, tmp_path: Path, command: Command
) -> None:
    """The model's own text as reference, in `generate` and in `bench`. The words of a random model
    are not cut into the same tokens again: as far as they are, they must be drafted at once."""
    words = ["generate", "--target", models / "target", "--max-new-tokens", "24", "--json"]
    words += ["--dtype", "float64", "--prompts"]
    path = tmp_path / "prompts.jsonl"
    starts = [f"{a} {b}" for a in ("the", "cat", "def", "log") for b in ("a", "on", "sat", "(")]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in starts))
    found = json.loads(command(*words, path)[1])["results"]

    def same_tokens(made: dict[str, Any]) -> int:
        again = tiny_tokenizer().encode(made["text"], add_special_tokens=False)
        place = first_difference(again, made["token_ids"])
        return len(again) if place is None else place

    plain = max(found, key=same_tokens)
    text, same = plain["prompt"], same_tokens(plain)
    assert same >= 3
    lines = [{"text": text, "reference": plain["text"], "id": "a"}, {"text": "the dog", "id": "a"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = command(*words, path, "--drafter", "prediction")
    assert code == 0, err
    with_one, without = json.loads(out)["results"]
    assert with_one["token_ids"] == plain["token_ids"]
    assert with_one["tokens_per_step"] >= 24 / (24 - same)
    assert without["tokens_per_step"] == 1.0

    bench = ["bench", "--target", models / "target", "--suite", path, "--no-hf-baseline"]
    bench += ["--drafter", "prediction", "--out", tmp_path / "out", "--max-new-tokens", "24"]
    bench += ["--temperature", "0", "--repeats", "1", "--dtype", "float64"]
    code, _, err = command(*bench)
    assert code == 0, err
    records = [json.loads(s) for s in (tmp_path / "out/records.jsonl").read_text().splitlines()]
    accepted = {r["prompt"]: r["accepted"] for r in records if r["drafter"] == "prediction"}
    assert accepted["a"] >= same - 1  # the last one may be the target's own
    assert accepted["a#2"] == 0


def test_prediction_without_a_reference_is_refused(
    models: Path, tmp_path: Path, command: Command
) -> None:
    start = ["generate", "--target", models / "target", "--drafter", "prediction"]
    refused(command(*start, "--prompt", "x"), 2, "`reference`", "no prompt here has one")
    path = tmp_path / "suite.jsonl"
    path.write_text('{"text": "the cat"}\n')
    words = ["bench", "--target", models / "target", "--drafter", "none,prediction"]
    out = tmp_path / "out"
    refused(command(*words, "--suite", path, "--out", out), 2, "--drafter prediction drafts from")
    assert not out.exists()


@pytest.mark.parametrize(
    ("drafter", "option"),
    [
        ("prompt_lookup", "length=1000000000"),
        ("prediction", "length=1000000000"),
        ("lookahead", "window=1000000000"),
        ("lookahead", "ngram=1000000000"),
        ("lookahead", "guesses=1000000000"),
        ("prompt_lookup", f"length={'9' * 400}"),
    ],
)
def test_an_option_that_would_draft_without_end_is_refused(drafter: str, option: str) -> None:
    with pytest.raises(InputError, match=f"{option.partition('=')[0]}.*(at most|4096|below)"):
        opened(drafter, drafter_option=(option,))
