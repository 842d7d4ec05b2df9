"""What the options refuse, in whose words, and how they become flags and come back."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.cli import parse
from draftsmith.commands.bench import BenchOptions
from draftsmith.commands.generate import GenerateOptions
from draftsmith.config import flags_of, to_argv
from draftsmith.core.config import SamplingConfig, TreeShape
from draftsmith.drafters.config import DraftingConfig, built_in_kinds, option_names
from draftsmith.drafters.registry import drafter_class
from draftsmith.errors import InputError
from draftsmith.targets.config import ModelConfig


def test_names_of_drafter_options_are_those_of_every_kind() -> None:
    own = [fields(drafter_class(kind).Config) for kind in built_in_kinds()]
    assert option_names() == {field.name for some in own for field in some} - {"source"}


BASE = ["--target", "T", "--prompt", "hello"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "--temperature must be 0"),
        (["--temperature", "nan"], "--temperature must be 0"),
        (["--temperature", "inf"], "--temperature must be 0"),
        (["--top-p", "0"], "--top-p must be above 0"),
        (["--top-p", "1.01"], "--top-p must be above 0"),
        (["--top-p", "nan"], "--top-p must be above 0"),
        (["--min-p", "-0.1"], "--min-p must lie between 0 and 1"),
        (["--min-p", "nan"], "--min-p must lie between 0 and 1"),
        (["--top-k", "-1"], "--top-k must be 0"),
        (["--repetition-penalty", "0"], "--repetition-penalty must be above 0"),
        (["--presence-penalty", "inf"], "--presence-penalty must be a finite number"),
        (["--frequency-penalty", "nan"], "--frequency-penalty must be a finite number"),
        (["--logit-bias", "3"], "TOKEN_ID:BIAS"),
        (["--logit-bias", "-3:1"], "a token id is 0 or more"),
        (["--logit-bias", "3:nan"], "bias of token 3 cannot be nan"),
        (["--logit-bias", "3:1,,4:1"], "separated by commas"),
        (["--seed", "-1"], "--seed must be a whole number of 0 or more"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--stop", ""], "--stop must not be empty"),
        (["--prompt", ""], "--prompt must not be empty"),
        (["--prompts", "f"], "either by --prompt TEXT or by --prompts FILE"),
        (["--drafter", " "], "--drafter must not be empty"),
        (["--target", ""], "--target must not be empty"),
        (["--draft-length", "0"], "--draft-length must be at least 1"),
        (["--draft-length", "3", "--draft-tree", "2,1"], "exclude each other"),
        (["--draft-length", "1000000000"], "--draft-length must be at most 4096"),
        (["--draft-length", "5..99999999999"], "--draft-length .* 4096 or less"),
        (["--draft-length", f"5..{'9' * 400}"], "--draft-length .* below 2.63"),
        (["--draft-tree", "1000000000"], "--draft-tree: a draft has at most 4096 nodes"),
        (["--draft-tree", "2x1000000000:5"], "--draft-tree: a draft has at most 4096 nodes"),
        (["--draft-tree", "9,9,9,9,9,9"], "--draft-tree: a draft has at most 4096 nodes"),
        (["--draft-tree", "1," * 5000 + "1"], "--draft-tree"),
        (["--draft-tree", "2,0"], "every number"),
        (["--draft-tree", "2,x"], "--draft-tree"),
        (["--draft-tree", "4x3:8", "--draft-proposal", "sampled"], "--draft-tree 4x3:8 grows"),
        (
            ["--draft-tree", "4x3:8", "--draft-proposal", "without_replacement"],
            "--draft-proposal without_replacement does nothing: leave it out, or give a tree",
        ),
        (["--drafter-option", "k"], "KEY=VALUE"),
        (["--json", "--stream"], "exclude each other"),
    ],
)
def test_generate_refuses_in_one_sentence(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse("generate", [*BASE, *words]).validate()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "0,-1"], "--temperature must be 0"),
        (["--temperature", "0,,1"], "--temperature"),
        (["--drafter", "none,none"], "names one twice"),
        (["--drafter", "none,lookahead", "--drafter-option", "window=3"], "say which drafter"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--warmup", "-1"], "--warmup must be at least 0"),
        (["--limit", "0"], "--limit must be at least 1"),
    ],
)
def test_bench_refuses_in_one_sentence(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse("bench", ["--target", "T", "--suite", "s.jsonl", *words]).validate()


def test_defaults_are_valid_and_code_from_the_hub_never_runs_by_default() -> None:
    options = parse("generate", BASE)
    options.validate()
    assert options == GenerateOptions(model=ModelConfig(target="T"), prompt=("hello",))
    assert options.model.trust_remote_code is False
    assert options.temperature == 0.0


def test_a_value_that_starts_with_a_minus_sign_parses() -> None:
    words = ["--target", "-t", "--prompt", "-v", "--prompt", "-- two words", "--prompt=--x=1"]
    words += ["--logit_bias", "-1:2", "--stop", "-", "--presence-penalty", "-0.5"]
    options = parse("generate", words)
    assert options.model.target == "-t"
    assert options.prompt == ("-v", "-- two words", "--x=1")
    assert options.sampling.logit_bias == "-1:2"
    assert options.stop == ("-",)
    assert options.sampling.presence_penalty == -0.5


def test_lists_biases_and_trees_are_parsed(tmp_path: Path) -> None:
    bench = parse("bench", ["--target", "T", "--suite", "s", "--temperature", "0, 0.8"])
    assert isinstance(bench, BenchOptions)
    assert bench.temperatures() == (0.0, 0.8)
    assert bench.drafters() == ("none", "prompt_lookup")
    assert SamplingConfig(logit_bias="17:-5,42:-inf").biases() == {17: -5.0, 42: -math.inf}
    assert DraftingConfig(draft_tree="4,2,2,1").tree() == TreeShape(widths=(4, 2, 2, 1))
    assert DraftingConfig(draft_tree="10x3:59").tree() == TreeShape(widths=(10, 10, 10), keep=59)
    assert DraftingConfig(draft_length=3).tree() == TreeShape(widths=(1, 1, 1))
    assert DraftingConfig(draft_length="adaptive").tree() is None
    path = tmp_path / "tree.json"
    path.write_text("[[1], [0], [0, 0]]")
    assert DraftingConfig(draft_tree=str(path)).tree() == TreeShape(paths=((0,), (1,), (0, 0)))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "must hold a list of paths"),
        ("[]", "must hold a list of paths"),
        ("[[0], [true]]", "must hold a list of paths"),
        ("[[0], [2]]", "comes without its ancestors"),
        ("[[0, 0]]", "comes without its ancestors"),
        ("[", "cannot read the --draft-tree"),
    ],
)
def test_a_file_of_paths_is_checked(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text(content)
    with pytest.raises(InputError, match=said):
        DraftingConfig(draft_tree=str(path)).validate()


@pytest.mark.parametrize("text", ["", "3,x", "10x6", "0x3:4", "3x2:0", "2,0", "gone.json"])
def test_a_tree_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--draft-tree"):
        DraftingConfig(draft_tree=text).validate()


@pytest.mark.parametrize(
    ("tree", "proposal"), [("4x3:8", "greedy"), ("4x3:8", None), ("4,2,1", "sampled")]
)
def test_a_tree_of_fixed_shape_is_drawn_and_one_that_grows_takes_the_best(
    tree: str, proposal: Literal["greedy", "sampled"] | None
) -> None:
    DraftingConfig(draft_tree=tree, draft_proposal=proposal).validate()


def test_drafter_options_go_to_the_drafter_they_name() -> None:
    options = DraftingConfig(drafter_option=("lookahead.window=7", "prompt_lookup.max_ngram=3"))
    assert options.assignments("lookahead", alone=False) == ("window=7",)
    assert options.assignments("independent:x", alone=False) == ()
    assert DraftingConfig(drafter_option=("a=1",)).assignments("x:y", alone=True) == ("a=1",)


TEXT = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=12
)
TEXT |= st.sampled_from(["-", "--", "--x", "-1", "--target", "-h", "--help", "--a b=1"])
WORDS = TEXT.filter(lambda text: text not in ("None", "-h", "--help"))


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(TEXT, min_size=1, max_size=3),
    revision=st.none() | WORDS,
    temperature=st.just(0.0) | st.floats(1e-30, 10),
    bias=st.integers(-5, 5),
    stream=st.booleans(),
    length=st.none() | st.just("adaptive") | st.integers(1, 9),
)
def test_options_become_flags_and_come_back(
    prompts: list[str],
    revision: str | None,
    temperature: float,
    bias: int,
    stream: bool,
    length: object,
) -> None:
    options = GenerateOptions(
        model=ModelConfig(target="T", revision=revision, trust_remote_code=stream),
        prompt=tuple(prompts),
        temperature=temperature,
        stream=stream,
        sampling=SamplingConfig(logit_bias=f"{bias}:{bias}"),
        drafting=DraftingConfig(draft_length=length),
    )
    assert parse("generate", to_argv(options)) == options


def test_every_flag_is_written_with_minus_signs_only() -> None:
    for flag in flags_of(BenchOptions).values():
        assert "_" not in flag.name


@pytest.mark.parametrize(
    ("verb", "words", "flags"),
    [
        (
            "generate",
            ["a b", "c", "--target", "t", "--stop", "x"],
            ["--prompt", "a b", "--prompt", "c", "--target", "t", "--stop", "x"],
        ),
        (
            "generate",
            ["a", "--target", "t", "--prompt", "b"],
            ["--prompt", "a", "--prompt", "b", "--target", "t"],
        ),
        ("generate", ["-5 + 3", "--target", "t"], ["--prompt=-5 + 3", "--target", "t"]),
        (
            "generate",
            ["a_b", "--target", "t", "--", "-5", "--x"],
            ["--prompt", "a_b", "--prompt=-5", "--prompt=--x", "--target", "t"],
        ),
        ("generate", ["--prompt=a b", "--target", "t"], ["--prompt", "a b", "--target", "t"]),
        ("report", ["--base", "x", "--", "a", "b"], ["--runs", "a", "b", "--base", "x"]),
        ("live make-stream", ["s.txt", "--lag", "2"], ["--source", "s.txt", "--lag", "2"]),
        ("live replay", ["s.jsonl", "--target", "t"], ["--stream", "s.jsonl", "--target", "t"]),
        ("report", ["a", "b", "--base", "x"], ["--runs", "a", "b", "--base", "x"]),
    ],
)
def test_what_a_command_is_about_may_stand_in_first_place(
    verb: str, words: list[str], flags: list[str]
) -> None:
    assert parse(verb, words) == parse(verb, flags)


def test_only_the_first_place_is_for_prompts() -> None:
    with pytest.raises(InputError, match=r"'b'.*belongs"):
        parse("generate", ["--target", "t", "b"])
