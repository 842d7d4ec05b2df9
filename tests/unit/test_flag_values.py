"""Values of flags are checked before tyro sees them: one sentence, and the nearest choice."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from draftsmith.cli import parse, verbs
from draftsmith.commands.pretrain import PretrainOptions
from draftsmith.config import MOST, Flag, bare, flags_of, to_argv
from draftsmith.errors import InputError

BASE = {
    "chat": ["--target", "T"],
    "generate": ["--target", "T", "--prompt", "x"],
    "bench": ["--target", "T", "--suite", "s"],
    "pretrain": ["--text", "a", "--out", "o"],
    "collect": ["--target", "T", "--prompts", "p", "--out", "o"],
    "distill": ["--target", "T", "--drafter", "d", "--store", "s", "--out", "o"],
    "report": ["--runs", "r"],
    "tune": ["--target", "T", "--drafter", "prompt_lookup", "--suite", "s"],
    "doctor": [],
    "quickstart": [],
    "live translate": ["--target", "T"],
    "live make-stream": ["--source", "s"],
    "live make-examples": ["--pairs", "p"],
    "live replay": ["--target", "T", "--stream", "s"],
    "live score": ["--records", "r"],
    "live serve": ["--target", "T"],
    "plan law": ["--observations", "o"],
    "plan optimum": ["--target-params", "1B", "--target-tokens", "1T", "--draft-tokens", "1T"],
    "plan sweep": [],
    "plan alpha": ["--counts", "c"],
    "plan fit": ["--runs", "r"],
    "plan table": ["--number", "5"],
    "plan ladder": ["--target", "T", "--tokens", "1B"],
    "plan check": ["--predictions", "l", "--records", "r"],
}


@pytest.mark.parametrize(
    ("verb", "words", "sentence"),
    [
        ("generate", "--temperature abc", "--temperature must be a number, got 'abc'"),
        ("generate", "--temperature=", "--temperature must not be empty"),
        ("generate", "--top_k 1.5", "--top-k must be a whole number, got '1.5'"),
        ("generate", "--limit None", "--limit must be a whole number, got 'None'"),
        (
            "generate",
            "--draft-proposal gredy",
            "--draft-proposal must be one of sampled, greedy, without_replacement, got 'gredy'; "
            "did you mean 'greedy'?",
        ),
        (
            "generate",
            "--draft-length adaptve",
            "--draft-length must be a whole number or one of adaptive, auto, got 'adaptve'; "
            "did you mean 'adaptive'?",
        ),
        (
            "bench",
            "--draft-length 1.9",
            "--draft-length must be a whole number or one of adaptive, auto, got '1.9'",
        ),
        ("bench", "--draft-length 1..", "whole number or one of adaptive, auto, got '1..'"),
        ("generate", "--attn-implementation -1", "--attn-implementation must be one of sdpa"),
        ("generate", "--json=yes", "--json takes no value, got 'yes'"),
        ("generate", "--stop", "--stop needs a value"),
        ("generate", "--seed --json", "--seed needs a value"),
        ("generate", "--json hello", "'hello' belongs to no option of draftsmith generate"),
        ("bench", "--repeats many", "--repeats must be a whole number, got 'many'"),
        ("pretrain", "--betas 0.9", "--betas needs 2 values, got 1"),
        ("pretrain", "--betas 0.9 x", "--betas must be a number, got 'x'"),
        ("pretrain", "--size 9m", "did you mean '8m'?"),
        ("doctor", "now", "'now' belongs to no option of draftsmith doctor"),
    ],
)
def test_a_wrong_value_is_one_sentence(verb: str, words: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(verb, [*BASE[verb], *words.split()])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "None'," not in str(caught.value)


@pytest.mark.parametrize(
    ("verb", "words", "needed"),
    [
        ("generate", "--prompt x", "--target"),
        ("bench", "", "--target and --suite"),
        ("bench", "--suite s --json", "--target"),
        ("pretrain", "--text a b", "--out"),
    ],
)
def test_required_flags_are_named(verb: str, words: str, needed: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(verb, words.split())
    assert str(caught.value) == f"draftsmith {verb} needs {needed}"


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("generate", "--draft-length 3 --temperature=1e-1 --stop y --top_p .5".split()),
        ("bench", "--draft-length 1..9 --perplexity a b".split()),
        ("generate", ["--draft-length", "adaptive", "--logit-bias", "-5:3", "--stop", "-- x"]),
        ("pretrain", "--betas 0.8 0.9 --text a b c --include".split()),
        ("doctor", ["--json"]),
    ],
)
def test_what_tyro_takes_is_let_through(verb: str, words: list[str]) -> None:
    assert isinstance(parse(verb, [*BASE[verb], *words]), verbs()[verb])


def test_a_tuple_that_is_set_to_nothing_comes_back() -> None:
    options = parse("pretrain", [*BASE["pretrain"], "--include"])
    assert isinstance(options, PretrainOptions)
    assert options.data.include == ()
    assert parse("pretrain", to_argv(options)) == options
    assert options.out == Path("o")


@pytest.mark.parametrize("verb", list(verbs()))
def test_every_default_passes_its_own_check(verb: str) -> None:
    for flag in flags_of(verbs()[verb]).values():
        if isinstance(flag.default, (int, float, str)) and not flag.is_switch:
            without = BASE[verb]
            if flag.name not in without:
                parse(verb, [*without, f"{flag.name}={flag.default}"])


# --------------------------------------------------------------------------- hostile values

DIGITS = "9" * 400
BRACKETS = "[" * 100_000
NEVER = {"NUL": "a\0b", "not UTF-8": "a\udc80b"}
"""What no flag takes."""
NO_NUMBER = {"digits": DIGITS, "1e308": "1e308", "nan": "nan", "brackets": BRACKETS}
"""What no flag takes that stands for a number, or for one of some words."""
EDGES = ("-1", "0", "inf", str(MOST + 1))
"""What some numbers may be."""


def kinds_of(flag: Flag) -> set[object]:
    return {bare(member) for member in (flag.kind, *get_args(flag.kind))}


def is_number(flag: Flag) -> bool:
    return not kinds_of(flag).isdisjoint({int, float})


def words_with(verb: str, flag: Flag, value: str) -> list[str]:
    """A command line with this value, and without another one of the flag."""
    words = BASE[verb]
    if flag.name in words:
        at = words.index(flag.name)
        words = [*words[:at], *words[at + 2 :]]
    pair = [flag.name, value, "0.5"] if flag.name == "--betas" else [f"{flag.name}={value}"]
    return [*words, *pair]


def refusal(verb: str, flag: Flag, value: str) -> str | None:
    """What is said of the value before anything is read or loaded; None: it may be used. Any other
    error than InputError, whose exit code is 2, fails the test."""
    try:
        parse(verb, words_with(verb, flag, value)).validate()
    except InputError as error:
        return str(error)
    return None


def test_a_token_has_one_bias() -> None:
    with pytest.raises(InputError, match="--logit-bias has two biases for token 7"):
        parse("generate", [*BASE["generate"], "--logit-bias", "7:1,8:2,07:3"]).validate()


@pytest.mark.parametrize(
    ("verb", "words", "sentence"),
    [
        ("pretrain", "--long-share 0.5", "--long-share does nothing without --long-block-length"),
        ("distill", "--decay-share 0.5", "--decay-share does nothing without --schedule stable"),
        ("pretrain", "--hold-out 0.1 --eval-text b", "--hold-out and --eval-text exclude"),
        ("pretrain", "--tokenizer T --vocab-size 500", "leave it out with --tokenizer"),
        ("pretrain", "--learning-rate 1e-7", "at least --min-learning-rate, which is 1e-06"),
    ],
)
def test_what_would_do_nothing_is_refused(verb: str, words: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        parse(verb, [*BASE[verb], *words.split()]).validate()


def test_every_kind_of_flag_is_tried() -> None:
    flags = [flag for cls in verbs().values() for flag in flags_of(cls).values()]
    assert len(flags) > 400
    kinds = {kind for flag in flags for kind in kinds_of(flag) if kind in (int, float, str, Path)}
    assert kinds == {int, float, str, Path}


@pytest.mark.parametrize("verb", list(verbs()))
def test_hostile_values_are_refused_by_the_name_of_their_flag(verb: str) -> None:
    for flag in flags_of(verbs()[verb]).values():
        if flag.is_switch:
            continue
        tried = dict(NEVER)
        if flag.default != "":
            tried["nothing"] = ""
        if Path in kinds_of(flag):
            tried["a name that no disk takes"] = BRACKETS
        # a flag that does not take any word takes none of these
        if is_number(flag) or refusal(verb, flag, "zz") is not None:
            tried |= NO_NUMBER
        for name, value in tried.items():
            said = refusal(verb, flag, value)
            assert said is not None, f"{verb} {flag.name}: {name} is taken"
            assert flag.name in said and "\n" not in said, (verb, flag.name, name, said[:200])


@pytest.mark.parametrize("verb", list(verbs()))
def test_numbers_at_the_edges_are_taken_or_refused_by_the_name_of_their_flag(verb: str) -> None:
    for flag in flags_of(verbs()[verb]).values():
        if not is_number(flag):
            continue
        for value in EDGES:
            said = refusal(verb, flag, value)
            assert said is None or flag.name in said, (verb, flag.name, value, said)
            counts = int in kinds_of(flag) and flag.name not in ("--seed", "--top-k")
            assert said is not None or value != EDGES[-1] or not counts, (verb, flag.name)


@pytest.mark.full
@pytest.mark.parametrize("verb", list(verbs()))
def test_any_text_is_taken_or_refused_in_one_line(verb: str) -> None:
    for flag in flags_of(verbs()[verb]).values():
        if flag.is_switch or is_number(flag):
            continue
        for value in (*NO_NUMBER.values(), *EDGES, " ", "\u2028", "\x1b[2J", "a=b", "--", "%s{}"):
            said = refusal(verb, flag, value)
            assert said is None or (flag.name in said and "\n" not in said), (verb, flag.name)
