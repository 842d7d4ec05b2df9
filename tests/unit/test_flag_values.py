"""Values of flags are checked before tyro sees them: one sentence, and the nearest choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.cli import parse, verbs
from draftsmith.commands.pretrain import PretrainOptions
from draftsmith.config import flags_of, to_argv
from draftsmith.errors import InputError

BASE = {
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
        ("generate", "--temperature=", "--temperature must be a number, got ''"),
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
